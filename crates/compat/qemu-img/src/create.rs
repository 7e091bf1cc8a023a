//! `qemu-img create`.

use std::fmt::Write as _;

use blockhaul_command_lines::qemu_image::{QemuFormat, QemuImage, encoded};
use blockhaul_command_lines::qemu_img::QemuImgCommand;
use blockhaul_formats::qcow2::backing_change::{BackingName, RebaseMode};
use blockhaul_io::plain;
use blockhaul_transfer::one_line;

use crate::error::{QemuImgError, QemuImgStatus, Result, failure};
use crate::help::OptionUse;
use crate::image::{beside, size};
use crate::new_image::NewImage;
use crate::preallocation::{Preallocation, allocate_start, empty_raw};
use crate::tool::QemuImg;

/// Formats that QEMU itself only reads.
pub(crate) const READ_ONLY: &[&str] = &["bochs", "cloop", "dmg", "vvfat"];

impl QemuImg {
    /// Runs `create`.
    pub(crate) fn create(&self, line: &QemuImgCommand) -> Result<QemuImgStatus> {
        // Wrong lists are refused before anything else.
        line.creation()?;
        if line.wants_help() {
            return self.print_options(line.value("format").unwrap_or("raw"), OptionUse::Create);
        }
        line.at_most(2)?;
        let Some(name) = line.operands.first() else {
            return Err(failure("create: Expecting image file name"));
        };
        let format = created_format(line, name)?;
        let image = QemuImage::named(name, None)?;
        let mut new = NewImage::parse(line, format, name)?;
        if let Some(given) = line.operands.get(1) {
            new.size = Some(size(given)?);
        }
        let below = self.new_backing(line, &image, &mut new)?;
        let Some(size) = new.size else {
            return Err(failure(format!("{name}: Image creation needs a size parameter")));
        };
        self.say(line, &formatting(name, format, &new, size))?;
        new.check(name, format)?;
        check_size(name, format, &new, size)?;
        self.create_empty(&image, format, &new, size)?;
        if below.is_some() {
            self.give_backing(&image, below, RebaseMode::Unsafe)?;
        }
        self.preallocate(&image, format, new.preallocation, 0)?;
        let data = new.data_file.as_deref().map(|name| QemuImage::named(name, Some("raw")));
        if let Some(data) = data.transpose()?
            && new.preallocation != Preallocation::Metadata
        {
            self.preallocate(&data, QemuFormat::Raw, new.preallocation, 0)?;
        }
        Ok(QemuImgStatus::Success)
    }

    /// Creates an image without data and without a backing file.
    fn create_empty(
        &self,
        image: &QemuImage,
        format: QemuFormat,
        new: &NewImage,
        size: u64,
    ) -> Result<()> {
        if format == QemuFormat::Raw {
            empty_raw(image)?;
            self.create_disk(&image.disk(format, &[]), size)?;
            return allocate_start(image, size);
        }
        let holder = encoded(&image.holder());
        self.create_disk(&format!("qcow2:{holder}?{}", new.device_options().join("&")), size)
    }

    /// The backing file of a new image, which must exist unless the user says otherwise.
    fn new_backing(
        &self,
        line: &QemuImgCommand,
        image: &QemuImage,
        new: &mut NewImage,
    ) -> Result<Option<BackingName>> {
        let name = &image.shown;
        let Some((backing, format)) = &new.backing else { return Ok(None) };
        let place = QemuImage::of_backing(&beside(image, backing), format.as_deref())?;
        if place.place == image.place {
            let text =
                "Error: Trying to create an image with the same filename as the backing file";
            return Err(failure(format!("{name}: {text}")));
        }
        if !line.has("backing-unsafe") {
            let none = |why: QemuImgError| {
                failure(format!("{name}: {why}\nCould not open backing image."))
            };
            if let Some(error) = place.path().and_then(|path| std::fs::metadata(path).err()) {
                let shown = &place.shown;
                return Err(none(failure(format!("Could not open '{shown}': {}", plain(&error)))));
            }
            let found = self.disk_size(&place).map_err(none)?;
            new.size = new.size.or(Some(found));
        }
        let Some(format) = format else {
            let probed = self
                .image_format(&place)
                .map(|format| format!("\nDetected format of {}.", format.name()));
            let text = format!("{name}: Backing file specified without backing format");
            return Err(failure(text + &probed.unwrap_or_default()));
        };
        Ok(Some(BackingName { name: backing.clone(), format: format.clone() }))
    }
}

/// The format of a new image.
fn created_format(line: &QemuImgCommand, name: &str) -> Result<QemuFormat> {
    let format = line.value("format").unwrap_or("raw");
    match QemuFormat::named(format) {
        Some(format @ (QemuFormat::Raw | QemuFormat::Qcow2)) => Ok(format),
        Some(_) => Err(failure(format!("create: format {format} is not supported"))),
        None if READ_ONLY.contains(&format) => {
            let text = format!("{name}: Format driver '{format}' does not support image creation");
            Err(failure(text))
        }
        None => Err(failure(format!("{name}: Unknown file format '{format}'"))),
    }
}

/// Refuses a disk whose L1 table would be longer than 32 MiB.
fn check_size(name: &str, format: QemuFormat, new: &NewImage, size: u64) -> Result<()> {
    if format != QemuFormat::Qcow2 {
        return Ok(());
    }
    let entry = if new.subclusters { 16 } else { 8 };
    let covers = (new.cluster / entry).max(1).saturating_mul(new.cluster);
    if size.div_ceil(covers) * 8 > 32 << 20 {
        let text = "The image size is too large for file format 'qcow2' (try using a larger cluster \
                    size)";
        return Err(failure(format!("{name}: {text}")));
    }
    Ok(())
}

/// The line that the original prints before it creates an image.
fn formatting(name: &str, format: QemuFormat, new: &NewImage, size: u64) -> String {
    let mut text = format!("Formatting '{}', fmt={}", one_line(name), format.name());
    if format == QemuFormat::Raw {
        let _ = write!(text, " size={size}");
        if let Some(mode) = &new.shown_preallocation {
            let _ = write!(text, " preallocation={}", one_line(mode));
        }
        return text + "\n";
    }
    let extended = if new.subclusters { "on" } else { "off" };
    let cluster = new.cluster;
    let _ = write!(text, " cluster_size={cluster} extended_l2={extended}");
    if let Some(mode) = &new.shown_preallocation {
        let _ = write!(text, " preallocation={}", one_line(mode));
    }
    let compression = new.compression.as_deref().unwrap_or("zlib");
    let compression = one_line(compression);
    let _ = write!(text, " compression_type={compression} size={size}");
    if let Some(compat) = &new.compat {
        let _ = write!(text, " compat={}", one_line(compat));
    }
    if let Some((backing, format)) = &new.backing {
        let format = format.as_deref().unwrap_or_default();
        let _ = write!(text, " backing_file={} backing_fmt={format}", one_line(backing));
    }
    if let Some(file) = &new.data_file {
        let _ = write!(text, " data_file={}", one_line(file));
    }
    if new.data_file_raw {
        text += " data_file_raw=on";
    }
    let lazy = if new.lazy_refcounts { "on" } else { "off" };
    let _ = writeln!(text, " lazy_refcounts={lazy} refcount_bits={}", new.refcount_bits);
    text
}
