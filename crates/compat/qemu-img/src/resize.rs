//! `qemu-img resize`.

use blockhaul_catalog::{DeviceSpec, NamePolicy};
use blockhaul_command_lines::qemu_image::{QemuFormat, QemuImage};
use blockhaul_command_lines::qemu_img::QemuImgCommand;
use blockhaul_formats::qcow2::resize::{NewSize, resize};
use blockhaul_formats::raw::{self, RawResizeError};
use blockhaul_io::plain;
use blockhaul_transfer::path_of;

use crate::error::{QemuImgError, QemuImgStatus, Result, failure};
use crate::image::{image_failure, size};
use crate::preallocation::Preallocation;
use crate::tool::QemuImg;

impl QemuImg {
    /// Runs `resize`.
    pub(crate) fn resize(&self, line: &QemuImgCommand) -> Result<QemuImgStatus> {
        line.at_most(2)?;
        let how =
            line.value("preallocation").map_or(Ok(Preallocation::Off), Preallocation::parse)?;
        let Some(size) = line.operands.get(1) else {
            return Err(failure("resize: Expecting image file name and size"));
        };
        let image = line.image(0, "format")?;
        let format = self.image_format(&image)?;
        if image.format.is_none() && format == QemuFormat::Raw {
            self.warn_of_guess(&image);
        }
        let old = match how {
            Preallocation::Off => 0,
            _ => {
                let old = self.disk_size(&image)?;
                let shrinks =
                    size.starts_with('-') || !size.starts_with('+') && self::size(size)? < old;
                if shrinks {
                    return Err(failure("Preallocation can only be used for growing images"));
                }
                old
            }
        };
        self.set_disk_size(&image, format, new_size(size)?, line.has("shrink"))?;
        self.preallocate(&image, format, how, old)?;
        self.say(line, "Image resized.\n")
    }

    /// Gives the disk in an image another size. `shrinks` allows a smaller one.
    pub(crate) fn set_disk_size(
        &self,
        image: &QemuImage,
        format: QemuFormat,
        size: NewSize,
        shrinks: bool,
    ) -> Result<()> {
        match format {
            QemuFormat::Raw => self.resize_raw(image, size, shrinks),
            QemuFormat::Qcow2 => self.resize_qcow2(image, size, shrinks),
            other => Err(failure(format!("resize: format {} is not supported", other.name()))),
        }
    }

    fn resize_qcow2(&self, image: &QemuImage, size: NewSize, shrinks: bool) -> Result<()> {
        let result = self.with_holder(image, NamePolicy::Allow, async move |context, holder| {
            resize(context, holder, size, shrinks, &|_, _| ()).await
        })?;
        result.map_err(|error| image_failure(image, &error))?;
        Ok(())
    }

    fn resize_raw(&self, image: &QemuImage, size: NewSize, shrinks: bool) -> Result<()> {
        let disk = DeviceSpec::parse(image.disk(QemuFormat::Raw, &[]).as_ref())?;
        let name = disk.to_string();
        let Some(path) = path_of(&disk) else {
            return Err(failure(format!("{name} is neither a file nor qcow2:PATH")));
        };
        let result = self.on_worker(move |registry| async move {
            raw::resize(&registry, &disk, &path, size, shrinks).await
        })?;
        result.map(drop).map_err(|error| match error {
            RawResizeError::NoRegularFile => failure(format!("{name} is not a regular file")),
            RawResizeError::Size(error) => error.into(),
            RawResizeError::Open(error) => QemuImgError::opening("disk", &name, &error),
            RawResizeError::System(error) => {
                failure(format!("cannot resize {name}: {}", plain(&error)))
            }
        })
    }
}

/// A new size, as the original parses it.
pub(crate) fn new_size(text: &str) -> Result<NewSize> {
    NewSize::parse(text).map_err(|error| failure(format!("Invalid size: {}", error.text())))
}
