//! `qemu-img convert`.

use blockhaul_catalog::DeviceSpec;
use blockhaul_command_lines::qemu_image::{QemuFormat, QemuImage, encoded};
use blockhaul_command_lines::qemu_img::QemuImgCommand;
use blockhaul_formats::qcow2::backing_change::{BackingName, RebaseMode};
use blockhaul_transfer::{CopyRequest, Endpoint, TransferOptions, parse_schedule};

use crate::copy::CopyTarget;
use crate::create::READ_ONLY;
use crate::error::{QemuImgStatus, Result, failure};
use crate::help::OptionUse;
use crate::image::{beside, size, stored_name};
use crate::new_image::NewImage;
use crate::preallocation::allocate_start_of_copy;
use crate::progress::{FINE, ProgressLines};
use crate::tool::QemuImg;

/// The levels of zstd and of zlib, as in QEMU: their defaults.
const ZSTD: u32 = 3;
const ZLIB: u32 = 6;

/// The error of formats without compression.
pub(crate) const NOT_COMPRESSED: &str = "Compression not supported for this file format";

/// The options of the device for `-l`.
pub(crate) fn snapshot_option(line: &QemuImgCommand, format: QemuFormat) -> Result<Vec<String>> {
    let Some(given) = line.value("snapshot") else { return Ok(Vec::new()) };
    let name = given.strip_prefix("snapshot.name=").or(given.strip_prefix("snapshot.id="));
    if format != QemuFormat::Qcow2 {
        return Err(failure(format!("format {} has no internal snapshots", format.name())));
    }
    Ok(vec![format!("snapshot={}", encoded(name.unwrap_or(given)))])
}

/// A conversion as the command line describes it.
struct ConversionRequest {
    sources: Vec<QemuImage>,
    target: QemuImage,
    /// Format of the target.
    format: QemuFormat,
    new: NewImage,
}

/// The copy of a conversion, and the backing file that the target gets.
struct ConversionCopy {
    request: CopyRequest,
    target: CopyTarget,
    below: Option<BackingName>,
}

impl QemuImg {
    /// Runs `convert`.
    pub(crate) fn convert(&self, line: &QemuImgCommand) -> Result<QemuImgStatus> {
        refuse_offloading(line)?;
        line.creation()?;
        if line.wants_help() {
            let format = line.value("target-format").unwrap_or("raw");
            return self.print_options(format, OptionUse::Create);
        }
        let conversion = ConversionRequest::parse(line)?;
        let ConversionRequest { sources, target, format, new } = &conversion;
        let bitmaps = self.bitmap_copy(line, sources, *format)?;
        let copy = self.conversion_copy(line, &conversion)?;
        if line.has("no-create") {
            self.check_room(line, sources, target)?;
        } else if new.is_preallocated() {
            return Err(failure("convert: preallocation is not supported"));
        }
        let shown = ProgressLines::begin(self.output(), line, FINE);
        self.run_copy(line, &conversion, copy, &shown)?;
        if *format == QemuFormat::Raw && !line.has("no-create") {
            allocate_start_of_copy(target)?;
        }
        if let Some(bitmaps) = bitmaps {
            self.add_bitmaps(bitmaps, target)?;
        }
        shown.end();
        Ok(QemuImgStatus::Success)
    }

    fn conversion_copy(
        &self,
        line: &QemuImgCommand,
        conversion: &ConversionRequest,
    ) -> Result<ConversionCopy> {
        let source = self.joined_disks(line, &conversion.sources)?;
        let (from, to, below) = if line.has("no-create") {
            (source, existing_target(line, conversion)?, None)
        } else {
            let below = self.backing_name(conversion)?;
            let (from, to) = new_target(line, conversion, source)?;
            (from, to, below)
        };
        if below.is_some() && conversion.sources.len() > 1 {
            let text = "Having a backing file for the target makes no sense when concatenating multiple \
                        input images";
            return Err(failure(text));
        }
        let options = options(line)?;
        let [from, to] = [DeviceSpec::parse(from.as_ref())?, DeviceSpec::parse(to.as_ref())?]
            .map(Endpoint::Device);
        let is_image = line.has("no-create") && conversion.format == QemuFormat::Qcow2;
        let target = if is_image { CopyTarget::Existing } else { CopyTarget::New };
        let request = CopyRequest { options, ..CopyRequest::new(from, to) };
        Ok(ConversionCopy { request, target, below })
    }

    /// The backing file that the target gets, which must exist.
    fn backing_name(&self, conversion: &ConversionRequest) -> Result<Option<BackingName>> {
        let Some((name, format)) = &conversion.new.backing else { return Ok(None) };
        let Some(format) = format else {
            return Err(failure("Use of backing file requires explicit backing format"));
        };
        let place = QemuImage::of_backing(&beside(&conversion.target, name), Some(format))?;
        self.image_format(&place)?;
        Ok(Some(BackingName { name: name.clone(), format: format.clone() }))
    }

    fn run_copy(
        &self,
        line: &QemuImgCommand,
        conversion: &ConversionRequest,
        copy: ConversionCopy,
        shown: &ProgressLines,
    ) -> Result<()> {
        let ConversionRequest { sources, target, format, new } = conversion;
        let ConversionCopy { request, target: state, below } = copy;
        let how = if line.has("compress") { RebaseMode::Compressed } else { RebaseMode::Safe };
        match (below, &sources[..]) {
            (None, _) => {
                self.copy_shown((request, state), shown, plain_sources(line, sources, *format))
            }
            (Some(below), [source]) if source.path().is_some() && !line.has("snapshot") => {
                self.make_overlay(target, new, source, (below, how))
            }
            (Some(below), _) => {
                self.copy_shown((request, state), shown, sources)?;
                // Zeroes are written where the backing file has something else.
                self.give_backing(target, Some(below), how)
            }
        }
    }

    /// Runs the copy and shows its progress. `sources`: the images whose bytes are copied, if they are known.
    fn copy_shown(
        &self,
        (request, target): (CopyRequest, CopyTarget),
        shown: &ProgressLines,
        sources: &[QemuImage],
    ) -> Result<()> {
        if shown.is_shown() {
            let amount = if sources.is_empty() { None } else { self.source_amount(sources)? };
            shown.watch(&request.progress, amount);
        }
        self.copy(request, target)
    }

    /// The disks of all sources, one behind the other.
    fn joined_disks(&self, line: &QemuImgCommand, sources: &[QemuImage]) -> Result<String> {
        let mut disks = Vec::new();
        for image in sources {
            disks.push(self.read_disk(image, |format| snapshot_option(line, format))?);
        }
        match &disks[..] {
            [disk] => Ok(disk.clone()),
            // A comma ends a part.
            _ => {
                let parts = disks.iter().map(|disk| disk.replace('%', "%25").replace(',', "%2c"));
                Ok(format!("split:{}", parts.collect::<Vec<_>>().join(",")))
            }
        }
    }

    /// Refuses a raw file that is too small.
    fn check_room(
        &self,
        line: &QemuImgCommand,
        sources: &[QemuImage],
        target: &QemuImage,
    ) -> Result<()> {
        let format = self.image_format(target)?;
        // Not of servers, which may end with their last client.
        let are_whole = sources.iter().all(|one| one.path().is_some()) && !line.has("snapshot");
        if !are_whole || format != QemuFormat::Raw || target.path().is_none() {
            return Ok(());
        }
        let mut needed: u64 = 0;
        for one in sources {
            needed = needed.saturating_add(self.described_size(one)?);
        }
        if self.described_size(target)? < needed {
            return Err(failure("output file is smaller than input file"));
        }
        Ok(())
    }

    /// Makes an image over a backing file that has only what differs: it begins as an empty one over the
    /// source, and moves to that backing file.
    fn make_overlay(
        &self,
        target: &QemuImage,
        new: &NewImage,
        source: &QemuImage,
        (below, how): (BackingName, RebaseMode),
    ) -> Result<()> {
        let options = new.device_options();
        let device = format!("qcow2:{}?{}", encoded(&target.holder()), options.join("&"));
        self.create_disk(&device, self.described_size(source)?)?;
        let path = std::path::absolute(source.path().unwrap_or_else(|| std::path::Path::new("")));
        let path = path.map_err(|error| failure(format!("{}: {error}", source.shown)))?;
        let format = self.image_format(source)?.name().to_string();
        let over = BackingName { name: stored_name(&path)?, format };
        self.give_backing(target, Some(over), RebaseMode::Unsafe)?;
        self.give_backing(target, Some(below), how)
    }
}

impl ConversionRequest {
    fn parse(line: &QemuImgCommand) -> Result<ConversionRequest> {
        if line.operands.len() < 2 {
            return Err(failure("Must specify image file name"));
        }
        let last = line.operands.len() - 1;
        refuse_read_only(line)?;
        let sources = (0..last).map(|number| line.image(number, "source-format"));
        let sources = sources.collect::<Result<Vec<QemuImage>, _>>()?;
        let target = target(line, &line.operands[last])?;
        let format = target.format.unwrap_or(QemuFormat::Raw);
        let mut new = NewImage::parse(line, format, &target.shown)?;
        new.check(&target.shown, format)?;
        Ok(ConversionRequest { sources, target, format, new })
    }
}

/// The description of a target that exists.
fn existing_target(line: &QemuImgCommand, conversion: &ConversionRequest) -> Result<String> {
    let ConversionRequest { target, format, .. } = conversion;
    match *format {
        QemuFormat::Raw if line.has("compress") => Err(failure(NOT_COMPRESSED)),
        QemuFormat::Raw => Ok(target.disk(QemuFormat::Raw, &[])),
        QemuFormat::Qcow2 if line.has("compress") => {
            Ok(target.disk(QemuFormat::Qcow2, &["compress=on".to_string()]))
        }
        QemuFormat::Qcow2 => Ok(target.disk(QemuFormat::Qcow2, &[])),
        other => {
            let text = format!("convert: -n with -O {} is not supported", other.name());
            Err(failure(text))
        }
    }
}

/// The descriptions of the source and of a target that is created. `source`: the disk that is converted.
fn new_target(
    line: &QemuImgCommand,
    conversion: &ConversionRequest,
    source: String,
) -> Result<(String, String)> {
    let ConversionRequest { target, format, new, .. } = conversion;
    let file = target.disk(QemuFormat::Raw, &[]);
    match *format {
        QemuFormat::Raw if line.has("compress") => Err(failure(NOT_COMPRESSED)),
        QemuFormat::Raw => Ok((source, file)),
        vmdk if vmdk.is_vmdk() && new.subformat.as_deref() != Some("streamOptimized") => {
            let text = "convert: -O vmdk is only supported with -o subformat=streamOptimized";
            Err(failure(text))
        }
        vmdk if vmdk.is_vmdk() => Ok((format!("as-vmdk:{}", encoded(&source)), file)),
        // From front to back, where that is possible.
        QemuFormat::Qcow2 if line.has("compress") && new.backing.is_none() && new.is_plain() => {
            Ok((compressed(new, &source), file))
        }
        QemuFormat::Qcow2 => {
            let mut options = new.device_options();
            options.extend(line.has("compress").then(|| "compress=on".to_string()));
            let to = format!("qcow2:{}?{}", encoded(&target.holder()), options.join("&"));
            Ok((source, to))
        }
        other => Err(failure(format!("convert: -O {} is not supported", other.name()))),
    }
}

/// Refuses what `-C` excludes, and `--salvage`.
fn refuse_offloading(line: &QemuImgCommand) -> Result<()> {
    let salvages = line.has("salvage");
    let why = match line.has("copy-range") {
        true if salvages => "Cannot use copy offloading in salvaging mode",
        true if line.has("sparse-size") => "Cannot enable copy offloading when -S is used",
        true if line.has("compress") => "Cannot enable copy offloading when -c is used",
        _ if salvages => "convert: --salvage is not supported",
        _ => return Ok(()),
    };
    Err(failure(why))
}

/// The sources, if their bytes are those that are copied.
fn plain_sources<'a>(
    line: &QemuImgCommand,
    sources: &'a [QemuImage],
    target: QemuFormat,
) -> &'a [QemuImage] {
    let is_other = line.has("compress") || line.has("snapshot") || target.is_vmdk();
    if is_other { &[] } else { sources }
}

/// Refuses to make images in formats that QEMU itself only reads, also from one of them.
fn refuse_read_only(line: &QemuImgCommand) -> Result<()> {
    match line.value("target-format").filter(|format| READ_ONLY.contains(format)) {
        None => Ok(()),
        Some(format) => {
            let text = format!("Format driver '{format}' does not support image creation");
            Err(failure(text))
        }
    }
}

/// The image that is written.
fn target(line: &QemuImgCommand, name: &str) -> Result<QemuImage> {
    let no_create = line.has("no-create");
    let format = line.value("target-format");
    if line.has("target-is-zero") && !no_create {
        return Err(failure("--target-is-zero requires use of -n flag"));
    }
    if !line.has("target-image-opts") {
        let format = format.unwrap_or("raw");
        if QemuFormat::named(format).is_none() {
            return Err(failure(format!("Unknown file format '{format}'")));
        }
        return QemuImage::named(name, Some(format)).map_err(failure);
    }
    if !no_create {
        return Err(failure("--target-image-opts requires use of -n flag"));
    }
    if format.is_some() {
        return Err(failure("-O cannot be used with --target-image-opts"));
    }
    QemuImage::options(name).map_err(failure)
}

/// The options of the copy.
fn options(line: &QemuImgCommand) -> Result<TransferOptions> {
    let mut options = TransferOptions {
        destination_is_zero: line.has("target-is-zero"),
        // The default, unsafe, flushes nothing.
        flush: line.value("cache").is_some_and(|mode| mode != "unsafe"),
        ..TransferOptions::default()
    };
    match line.value("sparse-size").map(size).transpose()? {
        None => {}
        Some(0) => write_all(&mut options),
        Some(sparse) => {
            let sparse = sparse.clamp(512, 1 << 30).next_power_of_two();
            options.sparse = u32::try_from(sparse).ok();
        }
    }
    if let Some(rate) = line.value("rate-limit") {
        let rate = size(rate)?.to_string();
        options.rate = Some(parse_schedule(&rate)?);
    }
    Ok(options)
}

/// Reads and writes everything, zeroes too, in few large pieces: the target gets few fragments.
fn write_all(options: &mut TransferOptions) {
    options.allocated = true;
    options.sparse = Some(0);
    options.no_extents = true;
    options.zero_all = true;
    options.no_zero_copy = true;
    options.request_size = Some(2 << 20);
}

/// The device with a compressed image of a disk.
fn compressed(new: &NewImage, from: &str) -> String {
    let how = match new.compression.as_deref() {
        Some("zlib") => format!("zlib={ZLIB}"),
        _ => format!("zstd={ZSTD}"),
    };
    format!("as-qcow2:{}?{how}&cluster={}", encoded(from), new.cluster)
}
