//! What the commands of qemu-img share.

use std::io::Read as _;
use std::os::unix::fs::FileTypeExt as _;
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
use blockhaul_transfer::CopyRequest;

pub(super) use super::super::stand_in::failure;
use crate::copy::copy_options::check_request;
use crate::copy::{RunOptions, run_request};
use crate::exit::{Failure, Outcome, plain};
use crate::image_tools::run as on_worker;
use crate::out;
use crate::session::SessionOptions;

/// Length in bytes of the largest cluster of a qcow2 image.
const CLUSTER_MAX: u64 = 2 << 20;

/// The format of an image; the first bytes tell it if the user does not.
fn format_of(image: &Image) -> Format {
    let probed = || image.path().and_then(probed_format).unwrap_or(Format::Raw);
    image.format.unwrap_or_else(probed)
}

/// The format that the first bytes of a file or block device tell; `None` for a raw disk, and if they cannot be
/// read.
fn probed_format(path: &Path) -> Option<Format> {
    let kind = std::fs::metadata(path).ok()?.file_type();
    if !kind.is_file() && !kind.is_block_device() {
        return None;
    }
    let head = first_bytes(path, ImageFormat::HEAD as u64).ok()?;
    ImageFormat::of_head(&head).map(|format| Format::of_scheme(format.scheme))
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
        && let Some(why) = first_bytes(path, CLUSTER_MAX).ok().and_then(|bytes| obstacle(&bytes))
    {
        return Err(failure(format!("Could not open '{}': {}", image.shown, explained(&why))));
    }
    Ok(format)
}

/// The format of an export by its first bytes, over a connection of its own.
fn told_by_export(image: &Image) -> Result<Format, Failure> {
    let found = with_device(&image.holder(), Intent::READ, async |device| told_by(&device).await)?;
    found.map_err(|error| not_opened(image, &error))
}

/// Opens a device by its description, and runs `work` with it on a worker.
pub(super) fn with_device<T, F>(
    description: &str,
    intent: Intent,
    work: F,
) -> Result<Result<T, Error>, Failure>
where
    T: Send + 'static,
    F: AsyncFnOnce(Arc<dyn Device>) -> Result<T, Error> + Send + 'static,
{
    let spec = Spec::parse(description.as_ref())?;
    let (result, open) = on_worker(move |registry| async move {
        match registry.open(&spec, Vec::new(), intent).await {
            Ok(stack) => (work(stack.device().clone()).await, Some(stack)),
            Err(error) => (Err(error), None),
        }
    })?;
    // Not on a worker: this waits for servers to end.
    drop(open);
    Ok(result)
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

/// At most `most` first bytes of a file.
fn first_bytes(path: &Path, most: u64) -> std::io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    std::fs::File::open(path)?.take(most).read_to_end(&mut bytes)?;
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

/// Creates a disk of `size` bytes, in place of one that exists.
pub(super) fn create_disk(description: &str, size: u64) -> Result<(), Failure> {
    let spec = Spec::parse(description.as_ref())?;
    let name = spec.to_string();
    let result = on_worker(move |registry| async move { registry.create(&spec, size).await })?;
    result.map_err(|error| Failure::opening("target", &name, &error))
}

/// Runs a copy.
pub(super) fn copy_disk(request: CopyRequest) -> Outcome {
    check_request(&request)?;
    let no_zero_copy = request.options.no_zero_copy;
    let engine = crate::args::Engine { no_zero_copy, ..crate::args::Engine::default() };
    let session = SessionOptions { engine, ..SessionOptions::default() };
    let options = RunOptions { progress: None, no_progress: true, verbose: false, session };
    run_request(request, &options)
}

/// A qcow2 image: nothing else has what the command changes.
pub(super) fn qcow2(line: &Line, image: &Image) -> Result<(), Failure> {
    match opened(image)? {
        Format::Qcow2 => Ok(()),
        other => {
            let text = format!("{}: not supported for format {}", line.command, other.name());
            Err(failure(text))
        }
    }
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

/// An image that cannot be opened or changed, with the description of its device.
pub(super) fn image_failure(name: &str, error: &Error) -> Failure {
    match error.kind() {
        Kind::Usage => failure(error.to_string()),
        _ => Failure::opening("image", name, error),
    }
}

/// A size, as the original parses it.
pub(crate) fn size(text: &str) -> Result<u64, Failure> {
    parse_size(text).map_err(|error| failure(format!("Invalid size: {}", error.text())))
}
