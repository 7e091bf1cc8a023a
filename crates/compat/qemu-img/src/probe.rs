//! The formats of images.

use std::io::Read as _;
use std::os::unix::fs::FileTypeExt as _;
use std::path::Path;
use std::sync::Arc;

use blockhaul_block::{Device, DeviceExt as _, Error};
use blockhaul_catalog::{ImageFormat, Intent};
use blockhaul_command_lines::qemu_image::{QemuFormat, QemuImage};
use blockhaul_formats::qcow2::describe::{OpenObstacle, obstacle};
use blockhaul_io::plain;
use blockhaul_transfer::one_line;

use crate::error::{Result, failure};
use crate::image::not_opened;
use crate::tool::QemuImg;

/// Length in bytes of the largest cluster of a qcow2 image.
const CLUSTER_MAX: u64 = 2 << 20;

impl QemuImg {
    /// The format of an image that must exist: the one that the user gives, or the one that its first bytes tell. Of a
    /// qcow2 image the first bytes are checked.
    ///
    /// # Errors
    /// If the image does not exist or cannot be read, has a feature that is not known, or is named with a metadata
    /// context.
    pub fn image_format(&self, image: &QemuImage) -> Result<QemuFormat> {
        if image.context.is_some() {
            return Err(failure("Parameter 'x-dirty-bitmap' is only supported by qemu-img map"));
        }
        if let Some(error) = image.path().and_then(|path| std::fs::metadata(path).err()) {
            let name = &image.shown;
            let why = plain(&error);
            return Err(failure(format!(
                "Could not open '{name}': Could not open '{name}': {why}"
            )));
        }
        let format = match image.unknown_export() {
            Some(_) => self.export_format(image)?,
            None => format_of(image),
        };
        if format == QemuFormat::Qcow2
            && let Some(path) = image.path()
            && let Some(why) =
                first_bytes(path, CLUSTER_MAX).ok().and_then(|bytes| obstacle(&bytes))
        {
            return Err(failure(format!("Could not open '{}': {}", image.shown, explained(&why))));
        }
        Ok(format)
    }

    /// The format of an export by its first bytes, over a connection of its own.
    fn export_format(&self, image: &QemuImage) -> Result<QemuFormat> {
        let found = self.with_device(&image.holder(), Intent::READ, async |device| {
            format_of_device(&device).await
        })?;
        found.map_err(|error| not_opened(image, &error))
    }

    /// The disk in an image that is read, with further options of the device for its format. An export
    /// without a format is opened once: its server may end with its last client.
    pub(crate) fn read_disk(
        &self,
        image: &QemuImage,
        options: impl Fn(QemuFormat) -> Result<Vec<String>>,
    ) -> Result<String> {
        if let (Some(disk), None) = (image.unknown_export(), &image.context)
            && options(QemuFormat::Qcow2)?.is_empty()
        {
            return Ok(disk);
        }
        let format = self.image_format(image)?;
        Ok(image.disk(format, &options(format)?))
    }

    /// Warns that an image without a given format is taken for a raw disk and is written, as the original does.
    pub fn warn_of_guess(&self, image: &QemuImage) {
        let shown = one_line(&image.shown);
        self.tell(&format!(
            "WARNING: Image format was not specified for '{shown}' and probing guessed raw.\n         Automatically \
             detecting the format is dangerous for raw images, write operations on block 0 will be \
             restricted.\n         Specify the 'raw' format explicitly to remove the restrictions.\n"
        ));
    }
}

/// The format of an image; the first bytes tell it if the user does not.
fn format_of(image: &QemuImage) -> QemuFormat {
    let probed = || image.path().and_then(probed_format).unwrap_or(QemuFormat::Raw);
    image.format.unwrap_or_else(probed)
}

/// The format that the first bytes of a file or block device tell; `None` for a raw disk, and if they cannot be
/// read.
fn probed_format(path: &Path) -> Option<QemuFormat> {
    let kind = std::fs::metadata(path).ok()?.file_type();
    if !kind.is_file() && !kind.is_block_device() {
        return None;
    }
    let head = first_bytes(path, ImageFormat::HEAD as u64).ok()?;
    ImageFormat::of_head(&head).map(QemuFormat::of)
}

/// The format that the first bytes of a device tell.
pub(crate) async fn format_of_device(device: &Arc<dyn Device>) -> Result<QemuFormat, Error> {
    let len = device.facts().size.min(ImageFormat::HEAD as u64);
    if len == 0 {
        return Ok(QemuFormat::Raw);
    }
    let head = device.read(0, usize::try_from(len).unwrap_or(0)).await?;
    let format = ImageFormat::of_head(head.bytes());
    Ok(format.map_or(QemuFormat::Raw, QemuFormat::of))
}

/// At most `most` first bytes of a file.
fn first_bytes(path: &Path, most: u64) -> std::io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    std::fs::File::open(path)?.take(most).read_to_end(&mut bytes)?;
    Ok(bytes)
}

fn explained(why: &OpenObstacle) -> String {
    match why {
        OpenObstacle::TooLarge => "Image is too big".to_string(),
        OpenObstacle::Features(names, unnamed) => {
            let mut all = names.clone();
            if *unnamed != 0 {
                all.push(format!("Unknown incompatible feature: {unnamed:x}"));
            }
            format!("Unsupported qcow2 feature(s): {}", all.join(", "))
        }
    }
}
