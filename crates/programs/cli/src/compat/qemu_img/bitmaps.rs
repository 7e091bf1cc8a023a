//! `--bitmaps` of `qemu-img convert`.

use blockhaul_catalog::{NamePolicy, OpenContext};
use blockhaul_command_lines::qemu_image::{Format, Image};
use blockhaul_command_lines::qemu_img::Line;
use blockhaul_formats::qcow2::bitmap_change::{BitmapChange, change_bitmap};
use blockhaul_formats::qcow2::describe::BitmapDescription;

use super::common::{failure, not_changed, opened};
use super::info::bitmaps_of;
use crate::exit::Failure;
use crate::image_tools::run;
use crate::out;

/// The bitmaps that the target gets.
pub(super) struct Copied {
    from: String,
    all: Vec<BitmapDescription>,
}

/// Finds the bitmaps of the source, and refuses those that cannot be copied; none if they are not
/// asked for.
pub(super) fn wanted(
    line: &Line,
    sources: &[Image],
    target: Format,
) -> Result<Option<Copied>, Failure> {
    let skips = line.has("skip-broken-bitmaps");
    if !line.has("bitmaps") {
        if skips {
            return Err(failure("Use of --skip-broken-bitmaps requires --bitmaps"));
        }
        return Ok(None);
    }
    let [source] = sources else {
        return Err(failure("Copying bitmaps only possible with single source"));
    };
    if target != Format::Qcow2 {
        let text = format!("Format driver '{}' does not support bitmaps", target.name());
        return Err(failure(text));
    }
    let mut all = match opened(source)? {
        Format::Qcow2 => bitmaps_of(source)?,
        _ => Vec::new(),
    };
    // The original goes through them in the reverse order of the image.
    for broken in all.iter().rev().filter(|one| one.in_use) {
        let name = out::one_line(&broken.name);
        if !skips {
            return Err(failure(format!(
                "Cannot copy inconsistent bitmap '{name}'\nTry --skip-broken-bitmaps, or use 'qemu-img bitmap \
                 --remove' to delete it"
            )));
        }
        out::error(&format!("qemu-img: warning: Skipping inconsistent bitmap '{name}'\n"));
    }
    all.retain(|one| !one.in_use);
    Ok(Some(Copied { from: source.holder(), all }))
}

impl Copied {
    /// Adds the bitmaps to the target.
    pub(super) fn add_to(self, target: &Image) -> Result<(), Failure> {
        let holder = target.holder();
        let Copied { from, all } = self;
        let result = run(move |registry| async move {
            let context = OpenContext::new(&registry).with_names(NamePolicy::Allow);
            for one in all {
                let granularity = Some(one.granularity);
                let add = BitmapChange::Add { granularity, enabled: one.enabled };
                change_bitmap(&context, &holder, &one.name, add).await?;
                let sources = vec![one.name.clone()];
                let merge = BitmapChange::Merge { sources, from: Some(from.clone()) };
                change_bitmap(&context, &holder, &one.name, merge).await?;
            }
            Ok(())
        })?;
        result.map_err(|error| not_changed(target, &error))
    }
}
