//! What the commands of qemu-img share.

use std::ffi::OsString;
use std::io::Read as _;
use std::path::Path;
use std::sync::Arc;

use blockhaul_block::{Device, DeviceExt as _, Error, Kind};
use blockhaul_catalog::{ImageFormat, Intent, NamePolicy, OpenContext, Spec, parse_size};
use blockhaul_command_lines::qemu_image::{Format, Image};
use blockhaul_command_lines::qemu_img::Line;
use blockhaul_formats::qcow2::backing_change::{
    BackingChange, BackingName, Rebase, Snapshots, rebase,
};
use blockhaul_formats::qcow2::describe::{Obstacle, obstacle};

pub(super) use super::super::stand_in::failure;
use super::super::stand_in::own;
use crate::args::Command;
use crate::exit::{Failure, Outcome, plain};
use crate::image_tools::run as on_worker;
use crate::{image_bitmap, image_change, image_format, image_tools, out};

/// The format of an image; the first bytes tell it if the user does not.
pub(crate) fn format_of(image: &Image) -> Format {
    let probed = || match image.path().and_then(image_format::name_of) {
        Some("qcow2") => Format::Qcow2,
        Some("VMDK") => Format::Vmdk,
        Some("VHDX") => Format::Vhdx,
        Some("VHD") => Format::Vpc,
        Some("VDI") => Format::Vdi,
        _ => Format::Raw,
    };
    image.format.unwrap_or_else(probed)
}

/// The format of an image that must exist.
pub(crate) fn opened(image: &Image) -> Result<Format, Failure> {
    if image.context.is_some() {
        return Err(failure("Parameter 'x-dirty-bitmap' is only supported by qemu-img map"));
    }
    if let Some(error) = image.path().and_then(|path| std::fs::metadata(path).err()) {
        let name = &image.shown;
        let why = plain(&error);
        return Err(failure(format!("Could not open '{name}': Could not open '{name}': {why}")));
    }
    let format = match image.unknown_export() {
        Some(_) => told_by_export(image)?,
        None => format_of(image),
    };
    if format == Format::Qcow2
        && let Some(path) = image.path()
        && let Some(why) = first_bytes(path).ok().and_then(|bytes| obstacle(&bytes))
    {
        return Err(failure(format!("Could not open '{}': {}", image.shown, explained(&why))));
    }
    Ok(format)
}

/// The format of an export by its first bytes, over a connection of its own.
fn told_by_export(image: &Image) -> Result<Format, Failure> {
    let holder = Spec::parse(image.holder().as_ref())?;
    let (result, open) = on_worker(move |registry| async move {
        let mut open = None;
        let result = async {
            let stack = registry.open(&holder, Vec::new(), Intent::READ).await?;
            let device = stack.device().clone();
            open = Some(stack);
            told_by(&device).await
        };
        (result.await, open)
    })?;
    // Not on a worker: this waits for servers to end.
    drop(open);
    result.map_err(|error| not_opened(image, &error))
}

/// The format that the first bytes of a device tell.
pub(crate) async fn told_by(device: &Arc<dyn Device>) -> Result<Format, Error> {
    let len = device.facts().size.min(ImageFormat::HEAD as u64);
    if len == 0 {
        return Ok(Format::Raw);
    }
    let head = device.read(0, usize::try_from(len).unwrap_or(0)).await?;
    let format = ImageFormat::of_head(head.bytes());
    Ok(format.map_or(Format::Raw, |format| Format::of_scheme(format.scheme)))
}

/// The disk in an image that is read, with further options of the device for its format. An export
/// without a format is opened once: its server may end with its last client.
pub(crate) fn read_disk(
    image: &Image,
    options: impl Fn(Format) -> Result<Vec<String>, Failure>,
) -> Result<String, Failure> {
    if let (Some(disk), None) = (image.unknown_export(), &image.context)
        && options(Format::Qcow2)?.is_empty()
    {
        return Ok(disk);
    }
    let format = opened(image)?;
    Ok(image.disk(format, &options(format)?))
}

/// The first bytes of a file: as many as the largest cluster has.
fn first_bytes(path: &Path) -> std::io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    std::fs::File::open(path)?.take(2 << 20).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Warns as the original does before it writes to what it takes for a raw disk.
pub(crate) fn warn_of_guess(image: &Image) {
    out::error(&format!(
        "WARNING: Image format was not specified for '{}' and probing guessed raw.\n         Automatically detecting \
         the format is dangerous for raw images, write operations on block 0 will be restricted.\n         Specify \
         the 'raw' format explicitly to remove the restrictions.\n",
        out::one_line(&image.shown)
    ));
}

fn explained(why: &Obstacle) -> String {
    match why {
        Obstacle::TooLarge => "Image is too big".to_string(),
        Obstacle::Features(names, unnamed) => {
            let mut all = names.clone();
            if *unnamed != 0 {
                all.push(format!("Unknown incompatible feature: {unnamed:x}"));
            }
            format!("Unsupported qcow2 feature(s): {}", all.join(", "))
        }
    }
}

/// An image that cannot be opened.
pub(crate) fn not_opened(image: &Image, error: &Error) -> Failure {
    failure(format!("Could not open '{}': {error}", image.shown))
}

/// A name in an image, from the directory of this program.
pub(crate) fn beside(image: &Image, name: &str) -> String {
    let has_protocol = name.split_once(':').is_some_and(|(scheme, _)| !scheme.contains('/'));
    match image.path().and_then(Path::parent) {
        Some(folder) if !has_protocol && !folder.as_os_str().is_empty() => {
            folder.join(name).display().to_string()
        }
        _ => name.to_string(),
    }
}

/// Runs one of our commands that prints nothing.
pub(crate) fn native(words: Vec<OsString>) -> Outcome {
    let (cli, groups) = own(words)?;
    match cli.command {
        Command::Create(args) => image_tools::create(&args, &groups),
        Command::Resize(args) => image_change::run_resize(&args, &groups),
        Command::Bitmap(args) => image_bitmap::bitmap(args, &groups),
        Command::Copy(args) => crate::copy::run(&args, &groups),
        _ => Err(failure("the command line was not understood")),
    }
}

pub(crate) fn words(texts: &[&str]) -> Vec<OsString> {
    texts.iter().map(OsString::from).collect()
}

pub(crate) fn say(line: &Line, text: &str) -> Outcome {
    if !line.has("quiet") {
        out::print(text.as_bytes())?;
    }
    Ok(0)
}

/// Gives an image another backing file.
pub(crate) fn give_backing(
    image: &Image,
    new: Option<BackingName>,
    how: Rebase,
) -> Result<(), Failure> {
    let holder = image.holder();
    let result = on_worker(move |registry| async move {
        let context = OpenContext::new(&registry).with_names(NamePolicy::Allow);
        rebase(&context, &holder, new.as_ref(), how, Snapshots::Change).await
    })?;
    changed(image, result)
}

/// Warns of snapshots that have other contents. The original says nothing.
pub(crate) fn changed(
    image: &Image,
    result: blockhaul_block::Result<BackingChange>,
) -> Result<(), Failure> {
    let BackingChange { snapshots, .. } = result.map_err(|error| not_changed(image, &error))?;
    if snapshots > 0 {
        let shown = &image.shown;
        let text = format!(
            "qemu-img: warning: {shown}: the contents of its internal snapshots ({snapshots}) have changed where \
             they came from the backing file\n"
        );
        out::error(&text);
    }
    Ok(())
}

pub(crate) fn not_changed(image: &Image, error: &Error) -> Failure {
    match error.kind() {
        Kind::NotFound | Kind::Refused | Kind::InUse => not_opened(image, error),
        _ => failure(error.to_string()),
    }
}

/// A size, as the original parses it.
pub(crate) fn size(text: &str) -> Result<u64, Failure> {
    parse_size(text).map_err(|error| failure(format!("Invalid size: {}", error.text())))
}
