//! `qemu-img create`, and the options of new images.

use std::fmt::Write as _;

use blockhaul_catalog::{Intent, NamePolicy, OpenContext};
use blockhaul_command_lines::qemu_image::{Format, Image};
use blockhaul_command_lines::qemu_img::Line;
use blockhaul_formats::qcow2::backing_change::{BackingName, Rebase};
use blockhaul_formats::qcow2::reserve::reserve;
use blockhaul_io::plain;
use blockhaul_transfer::one_line;

use crate::error::{QemuImgError, QemuImgStatus, Result, failure};
use crate::help::OptionUse;
use crate::image::{beside, not_changed, not_opened, size};
use crate::tool::QemuImg;

/// Formats that QEMU itself only reads.
pub(crate) const READ_ONLY: &[&str] = &["bochs", "cloop", "dmg", "vvfat"];

/// What a new image is to be.
#[derive(Debug)]
pub(crate) struct NewImage {
    pub(crate) size: Option<u64>,
    pub(crate) cluster: u64,
    pub(crate) subclusters: bool,
    /// Name and format of the backing file.
    pub(crate) backing: Option<(String, Option<String>)>,
    pub(crate) data_file: Option<String>,
    /// `subformat`, for VMDK.
    pub(crate) subformat: Option<String>,
    /// The compression type that was asked for.
    pub(crate) compression: Option<String>,
    preallocation: Preallocation,
    /// `compat`, and the version of the format.
    compat: Option<String>,
    version: u32,
    refcount_bits: u64,
    lazy_refcounts: bool,
    data_file_raw: bool,
    /// Options that were given, and are printed only then.
    shown_preallocation: Option<String>,
}

/// What is allocated when there is no data yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum Preallocation {
    #[default]
    Off,
    /// Places for all clusters of an image: its file has holes there.
    Metadata,
    /// The space of the file, too.
    Falloc,
    /// The same, with zeroes written to it.
    Full,
}

impl Preallocation {
    /// The one of this name.
    pub(crate) fn named(name: &str) -> Result<Preallocation> {
        Ok(match name {
            "off" => Preallocation::Off,
            "metadata" => Preallocation::Metadata,
            "falloc" => Preallocation::Falloc,
            "full" => Preallocation::Full,
            _ => {
                let text = format!("Parameter 'preallocation' does not accept value '{name}'");
                return Err(failure(text));
            }
        })
    }
}

pub(crate) fn is_on(value: &str) -> bool {
    !["off", "no", "false", "n"].contains(&value)
}

impl NewImage {
    /// Understands the options of a new image in `format`.
    pub(crate) fn new(line: &Line, format: Format, name: &str) -> Result<NewImage> {
        let mut new = NewImage {
            size: None,
            cluster: 64 << 10,
            subclusters: false,
            backing: None,
            data_file: None,
            subformat: None,
            compression: None,
            preallocation: Preallocation::Off,
            compat: None,
            version: 3,
            refcount_bits: 16,
            lazy_refcounts: false,
            data_file_raw: false,
            shown_preallocation: None,
        };
        let mut backing = line.value("backing").map(str::to_string);
        let mut backing_format = line.value("backing-format").map(str::to_string);
        let is_qcow2 = format == Format::Qcow2;
        for (key, value) in line.creation().map_err(failure)? {
            match key.as_str() {
                "size" => new.size = Some(size(&value)?),
                "preallocation" if is_qcow2 || format == Format::Raw => {
                    new.shown_preallocation = Some(value);
                }
                // Of the file, which needs none here.
                "extent_size_hint" | "nocow" => {}
                "subformat" if format == Format::Vmdk => new.subformat = Some(value),
                "cluster_size" if is_qcow2 => new.cluster = size(&value)?,
                "extended_l2" if is_qcow2 => new.subclusters = is_on(&value),
                "backing_file" if is_qcow2 => backing = Some(value),
                "backing_fmt" if is_qcow2 => backing_format = Some(value),
                "data_file" if is_qcow2 => new.data_file = Some(value),
                "compression_type" if is_qcow2 => new.compression = Some(value),
                "compat" if is_qcow2 => new.compat = Some(value),
                "refcount_bits" if is_qcow2 => {
                    let text = "Parameter 'refcount_bits' expects a number";
                    new.refcount_bits =
                        value.parse().map_err(|_| failure(format!("{name}: {text}")))?;
                }
                "lazy_refcounts" if is_qcow2 => new.lazy_refcounts = is_on(&value),
                "data_file_raw" if is_qcow2 => new.data_file_raw = is_on(&value),
                _ => return Err(failure(format!("{name}: Invalid parameter '{key}'"))),
            }
        }
        new.backing = backing.filter(|name| !name.is_empty()).map(|name| (name, backing_format));
        if new.backing.is_some() && !is_qcow2 {
            let text =
                format!("{name}: Backing file not supported for file format '{}'", format.name());
            return Err(failure(text));
        }
        Ok(new)
    }

    /// Checks what the original checks after it has printed what it makes.
    pub(crate) fn check(&mut self, name: &str, format: Format) -> Result<()> {
        let wrong = |text: &str| Err(failure(format!("{name}: {text}")));
        if let Some(mode) = &self.shown_preallocation {
            let mode = Preallocation::named(mode);
            self.preallocation = mode.map_err(|why| failure(format!("{name}: {why}")))?;
        }
        if format != Format::Qcow2 {
            return match self.preallocation {
                Preallocation::Metadata => wrong("Unsupported preallocation mode 'metadata'"),
                _ => Ok(()),
            };
        }
        self.version = match self.compat.as_deref() {
            None | Some("1.1" | "v3") => 3,
            Some("0.10" | "v2") => 2,
            Some(other) => {
                return wrong(&format!("Parameter 'version' does not accept value '{other}'"));
            }
        };
        if !self.cluster.is_power_of_two() || !(512..=2 << 20).contains(&self.cluster) {
            return wrong("Cluster size must be a power of two between 512 and 2048k");
        }
        if !self.refcount_bits.is_power_of_two() || self.refcount_bits > 64 {
            return wrong("Refcount width must be a power of two and may not exceed 64 bits");
        }
        let level = "compatibility level 1.1 and above (use version=v3 or greater)";
        let new = [
            (self.lazy_refcounts, format!("Lazy refcounts only supported with {level}")),
            (
                self.refcount_bits != 16,
                "Different refcount widths than 16 bits require compatibility level 1.1 or above (use \
                 version=v3 or greater)"
                    .to_string(),
            ),
            (self.data_file.is_some(), format!("External data files are only supported with {level}")),
            (self.subclusters, format!("Extended L2 entries are only supported with {level}")),
        ];
        if let Some((_, text)) = new.into_iter().find(|one| one.0 && self.version < 3) {
            return wrong(&text);
        }
        if self.data_file_raw && self.data_file.is_none() {
            return wrong("data-file-raw requires data-file");
        }
        match self.compression.as_deref() {
            None | Some("zlib") => Ok(()),
            Some("zstd") if self.version >= 3 => Ok(()),
            Some("zstd") => {
                wrong(&format!("Non-zlib compression type is only supported with {level}"))
            }
            Some(other) => {
                let text = "Parameter 'compression-type' does not accept value";
                wrong(&format!("{text} '{other}'"))
            }
        }
    }

    /// Whether no option needs a feature of the format that compressed images here do not have.
    pub(crate) fn is_plain(&self) -> bool {
        let old = self.version == 3 && self.refcount_bits == 16 && !self.lazy_refcounts;
        old && !self.subclusters && self.data_file.is_none()
    }

    /// Whether space is to be allocated that has no data.
    pub(crate) fn is_preallocated(&self) -> bool {
        self.preallocation != Preallocation::Off
    }

    /// The options of our device.
    pub(crate) fn device_options(&self) -> Vec<String> {
        let mut all = vec![format!("cluster={}", self.cluster)];
        if self.version < 3 {
            all.push("version=2".to_string());
        }
        if self.compression.as_deref() == Some("zstd") {
            all.push("compression=zstd".to_string());
        }
        if self.refcount_bits != 16 {
            all.push(format!("refcount-bits={}", self.refcount_bits));
        }
        for (name, on) in
            [("lazy-refcounts", self.lazy_refcounts), ("data-file-raw", self.data_file_raw)]
        {
            all.extend(on.then(|| format!("{name}=on")));
        }
        if self.subclusters {
            all.push("subclusters=on".to_string());
        }
        if let Some(file) = &self.data_file {
            all.push(format!("data-file={}", blockhaul_command_lines::qemu_image::encoded(file)));
        }
        all
    }
}

impl QemuImg {
    /// Runs `create`.
    pub(crate) fn create(&self, line: &Line) -> Result<QemuImgStatus> {
        // Wrong lists are refused before anything else.
        line.creation().map_err(failure)?;
        if line.wants_help() {
            return self.print_options(line.value("format").unwrap_or("raw"), OptionUse::Create);
        }
        line.at_most(2).map_err(failure)?;
        let Some(name) = line.operands.first() else {
            return Err(failure("create: Expecting image file name"));
        };
        let format = line.value("format").unwrap_or("raw");
        let format = match Format::named(format) {
            Some(format @ (Format::Raw | Format::Qcow2)) => format,
            Some(_) => return Err(failure(format!("create: format {format} is not supported"))),
            None if READ_ONLY.contains(&format) => {
                let text =
                    format!("{name}: Format driver '{format}' does not support image creation");
                return Err(failure(text));
            }
            None => return Err(failure(format!("{name}: Unknown file format '{format}'"))),
        };
        let image = Image::named(name, None).map_err(failure)?;
        let mut new = NewImage::new(line, format, name)?;
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
        let device = match format {
            Format::Raw => {
                emptied(&image)?;
                image.disk(format, &[])
            }
            _ => {
                let holder = blockhaul_command_lines::qemu_image::encoded(&image.holder());
                format!("qcow2:{holder}?{}", new.device_options().join("&"))
            }
        };
        self.create_disk(&device, size)?;
        if below.is_some() {
            self.give_backing(&image, below, Rebase::Unsafe)?;
        }
        if format == Format::Raw {
            begun(&image, size)?;
        }
        self.preallocate(&image, format, new.preallocation, 0)?;
        let data = new.data_file.as_deref().map(|name| Image::named(name, Some("raw")));
        if let Some(data) = data.transpose().map_err(failure)?
            && new.preallocation != Preallocation::Metadata
        {
            self.preallocate(&data, Format::Raw, new.preallocation, 0)?;
        }
        Ok(QemuImgStatus::Success)
    }

    /// The backing file of a new image, which must exist unless the user says otherwise.
    fn new_backing(
        &self,
        line: &Line,
        image: &Image,
        new: &mut NewImage,
    ) -> Result<Option<BackingName>> {
        let name = &image.shown;
        let Some((backing, format)) = &new.backing else { return Ok(None) };
        let place = Image::named(&beside(image, backing), format.as_deref()).map_err(failure)?;
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

    /// Allocates the disk in an image from `from` on.
    pub(crate) fn preallocate(
        &self,
        image: &Image,
        format: Format,
        how: Preallocation,
        from: u64,
    ) -> Result<()> {
        if how == Preallocation::Off {
            return Ok(());
        }
        let Some(path) = image.path() else {
            let text = "Could not resize image: Cannot grow NBD nodes";
            return Err(failure(format!("{}: {text}", image.shown)));
        };
        let wrong = |error: std::io::Error| {
            failure(format!("{}: Could not preallocate: {}", image.shown, plain(&error)))
        };
        let needs_space = how != Preallocation::Metadata && format == Format::Qcow2;
        let start = match format {
            // New clusters: what is before them keeps its holes.
            Format::Qcow2 => {
                let len = std::fs::metadata(path).map_err(wrong)?.len();
                len.checked_next_multiple_of(self.description(image)?.cluster).unwrap_or(len)
            }
            _ => from,
        };
        if needs_space {
            // As one piece, before parts of it are written: each piece needs an entry in the tables of the
            // file system, which may then grow when more is written.
            let data = self.disk_size(image)?.saturating_sub(from);
            // With its tables; what is too much is freed.
            let more = data.saturating_add(data / 32).saturating_add(TABLES);
            let file = std::fs::OpenOptions::new().write(true).open(path).map_err(wrong)?;
            // Without it, the space may suffice: what is needed is allocated later.
            let _ = allocate_beyond(&file, start, more);
        }
        let end = if format == Format::Qcow2 {
            let holder = image.holder();
            let writes = how == Preallocation::Full;
            let result = self.on_worker(move |registry| async move {
                let context = OpenContext::new(&registry).with_names(NamePolicy::Refuse);
                reserve(&context, &holder, from, writes).await
            })?;
            result.map_err(|error| not_changed(image, &error))?
        } else {
            0
        };
        let file = std::fs::OpenOptions::new().write(true).open(path).map_err(wrong)?;
        let len = file.metadata().map_err(wrong)?.len();
        if len < end {
            file.set_len(end).map_err(wrong)?;
        }
        let end = end.max(len);
        if how != Preallocation::Metadata && start < end {
            allocate(&file, start, end).map_err(wrong)?;
        }
        if needs_space {
            // Frees what is behind the end.
            file.set_len(end).map_err(wrong)?;
        }
        if how == Preallocation::Full && format == Format::Raw {
            zeroes(&file, start, end).map_err(wrong)?;
        }
        Ok(())
    }

    /// The size of the disk in an image, in bytes.
    pub(crate) fn disk_size(&self, image: &Image) -> Result<u64> {
        let format = self.image_format(image)?;
        let disk = image.disk(format, &[]);
        let found =
            self.with_device(&disk, Intent::READ, async |device| Ok(device.facts().size))?;
        found.map_err(|error| not_opened(image, &error))
    }
}

/// Allocates the first block of a file, as the original does: QEMU finds out with it which alignment
/// direct I/O needs.
fn begun(image: &Image, size: u64) -> Result<()> {
    let Some(path) = image.path().filter(|path| path.is_file()) else { return Ok(()) };
    let file = std::fs::OpenOptions::new().write(true).open(path);
    let done = file.and_then(|file| zeroes(&file, 0, size.min(4096)));
    done.map_err(|error| failure(format!("{}: {}", image.shown, plain(&error))))
}

/// The same for a file that a copy has filled: its first block is written only if it has nothing.
pub(crate) fn begun_copy(image: &Image) -> Result<()> {
    use std::os::unix::fs::FileExt as _;
    let Some(path) = image.path().filter(|path| path.is_file()) else { return Ok(()) };
    let fill = || {
        let file = std::fs::OpenOptions::new().read(true).write(true).open(path)?;
        let mut first = [0; 4096];
        let len = file.read_at(&mut first, 0)?;
        if first.iter().all(|byte| *byte == 0) {
            file.write_all_at(&first[..len], 0)
        } else {
            Ok(())
        }
    };
    fill().map_err(|error| failure(format!("{}: {}", image.shown, plain(&error))))
}

/// Refuses a disk whose L1 table would be longer than 32 MiB.
fn check_size(name: &str, format: Format, new: &NewImage, size: u64) -> Result<()> {
    if format != Format::Qcow2 {
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

/// Bytes that the tables of a small image take, with what is left free before clusters.
const TABLES: u64 = 256 << 10;

/// Allocates the space of a part of a file.
fn allocate(file: &std::fs::File, start: u64, end: u64) -> std::io::Result<()> {
    use rustix::fs::{FallocateFlags, fallocate};
    Ok(fallocate(file, FallocateFlags::empty(), start, end - start)?)
}

/// Allocates the space of a part of a file, which may be behind its end.
fn allocate_beyond(file: &std::fs::File, start: u64, len: u64) -> std::io::Result<()> {
    use rustix::fs::{FallocateFlags, fallocate};
    Ok(fallocate(file, FallocateFlags::KEEP_SIZE, start, len)?)
}

/// Writes zeroes to a part of a file.
fn zeroes(file: &std::fs::File, start: u64, end: u64) -> std::io::Result<()> {
    use std::os::unix::fs::FileExt as _;
    let piece = vec![0; 1 << 20];
    let mut at = start;
    while at < end {
        let len = usize::try_from(end - at).unwrap_or(usize::MAX).min(piece.len());
        file.write_all_at(&piece[..len], at)?;
        at += len as u64;
    }
    Ok(())
}

/// A raw disk that exists loses its contents.
pub(crate) fn emptied(image: &Image) -> Result<()> {
    let Some(path) = image.path().filter(|path| path.is_file()) else { return Ok(()) };
    let emptied = std::fs::OpenOptions::new().write(true).truncate(true).open(path);
    emptied.map(|_| ()).map_err(|error| {
        failure(format!("{}: Could not create file: {}", image.shown, plain(&error)))
    })
}

/// The line that the original prints before it creates an image.
fn formatting(name: &str, format: Format, new: &NewImage, size: u64) -> String {
    let mut text = format!("Formatting '{}', fmt={}", one_line(name), format.name());
    if format == Format::Raw {
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
