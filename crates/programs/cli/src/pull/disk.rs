//! A disk in a file of `blockhaul pull`.

use blockhaul_backups::{ChangeBitmap, PullDisk, PullMode};
use blockhaul_block::BITMAP_CONTEXT;
use blockhaul_store::check_name;

use crate::exit::CommandFailure;
use crate::jobfile::JobFileDisk;
use crate::{args, devices};

/// Checks the keys of a disk; the command line takes precedence.
pub(super) fn pull_disk(
    disk: &JobFileDisk,
    args: &args::PullArgs,
) -> Result<PullDisk, CommandFailure> {
    let JobFileDisk { name, place, .. } = disk;
    let wrong = |text: &str| CommandFailure::usage(format!("{place}: disk {name}: {text}"));
    let key = |key: &str, given: &Option<String>| -> Result<Option<String>, CommandFailure> {
        let value = given.clone().or_else(|| disk.keys.get(key).cloned());
        if let Some(value) = &value {
            check_name(value).map_err(|error| wrong(&format!("{key}: {}", error.text())))?;
        }
        Ok(value)
    };
    let store = disk.keys.get("store").filter(|dir| !dir.is_empty());
    let store = store.ok_or_else(|| wrong("no store: add store = \"DIR\""))?.into();
    let bitmap = key("bitmap", &args.bitmap)?;
    let parent = key("parent", &args.parent)?;
    if parent.is_some() && bitmap.is_none() {
        return Err(wrong("parent says when a bitmap began: add bitmap = \"NAME\""));
    }
    let checkpoint = key("checkpoint", &args.checkpoint)?;
    // Points of a machine have names by the clock: its checkpoints have names for programs.
    let from_checkpoint = checkpoint.clone().filter(|_| args.job.is_some());
    let point = key("point", &args.point)?.or(from_checkpoint);
    let mode = match (args.full, disk.keys.get("mode").map(String::as_str)) {
        (true, _) | (_, Some("full")) => PullMode::Full,
        (_, None | Some("auto")) => PullMode::Auto,
        (_, Some("increment")) => PullMode::Increment,
        (_, Some(_)) => return Err(wrong("mode must be auto, full or increment")),
    };
    if mode == PullMode::Increment && bitmap.is_none() {
        return Err(wrong("mode increment needs a bitmap: add bitmap = \"NAME\""));
    }
    let bitmap = bitmap.map(|bitmap| change_bitmap(bitmap, parent));
    let context = bitmap.as_ref().map(|bitmap| bitmap.context.clone());
    let options = &disk.options;
    Ok(PullDisk {
        name: name.clone(),
        store,
        source: disk.source.clone(),
        registry: devices::registry_asking(options.timeout, options.min_rate, context.as_slice()),
        layers: options.source_layer.clone(),
        retries: options.retries,
        bitmap,
        point,
        checkpoint,
        mode,
        files: disk
            .keys
            .get("files")
            .into_iter()
            .flat_map(|files| files.lines())
            .map(Into::into)
            .collect(),
        with_digests: disk.keys.get("digests").is_none_or(|on| on == "true"),
    })
}

/// The bitmap of this name in QEMU, or with this metadata context.
fn change_bitmap(name: String, parent: Option<String>) -> ChangeBitmap {
    let context = if name.contains(':') { name } else { format!("{BITMAP_CONTEXT}{name}") };
    let own = context.strip_prefix(BITMAP_CONTEXT).unwrap_or(&context).to_string();
    ChangeBitmap { checkpoint: parent.unwrap_or(own), context }
}
