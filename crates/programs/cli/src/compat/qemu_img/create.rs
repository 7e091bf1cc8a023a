//! `qemu-img create`, and the options of new images.

use std::fmt::Write as _;

use blockhaul_catalog::{Intent, Spec};
use blockhaul_command_lines::qemu_image::{Format, Image};
use blockhaul_command_lines::qemu_img::Line;
use blockhaul_formats::qcow2::backing_change::{BackingName, Rebase};

use super::common::{beside, failure, give_backing, native, not_opened, opened, say, size, words};
use crate::exit::{Failure, Outcome, plain};
use crate::image_tools::run;

/// What a new image is to be.
#[derive(Debug)]
pub(super) struct Wanted {
    pub(super) size: Option<u64>,
    pub(super) cluster: u64,
    pub(super) subclusters: bool,
    /// Name and format of the backing file.
    pub(super) backing: Option<(String, Option<String>)>,
    pub(super) data_file: Option<String>,
    /// `subformat`, for VMDK.
    pub(super) subformat: Option<String>,
    /// The compression type that was asked for.
    pub(super) compression: Option<String>,
}

impl Wanted {
    /// Understands the options of a new image in `format`.
    pub(super) fn new(line: &Line, format: Format, name: &str) -> Result<Wanted, Failure> {
        let mut wanted = Wanted {
            size: None,
            cluster: 64 << 10,
            subclusters: false,
            backing: None,
            data_file: None,
            subformat: None,
            compression: None,
        };
        let mut backing = line.value("backing").map(str::to_string);
        let mut backing_format = line.value("backing-format").map(str::to_string);
        let is_qcow2 = format == Format::Qcow2;
        for (key, value) in line.creation().map_err(failure)? {
            let is_off = ["off", "no", "false", "n"].contains(&value.as_str());
            match key.as_str() {
                "size" => wanted.size = Some(size(&value)?),
                "preallocation" if value == "off" => {}
                "subformat" if format == Format::Vmdk => wanted.subformat = Some(value),
                "cluster_size" if is_qcow2 => wanted.cluster = size(&value)?,
                "extended_l2" if is_qcow2 => wanted.subclusters = !is_off,
                "backing_file" if is_qcow2 => backing = Some(value),
                "backing_fmt" if is_qcow2 => backing_format = Some(value),
                "data_file" if is_qcow2 => wanted.data_file = Some(value),
                "compression_type" if is_qcow2 => wanted.compression = Some(value),
                "compat" if is_qcow2 && ["1.1", "v3"].contains(&value.as_str()) => {}
                "refcount_bits" if is_qcow2 && value == "16" => {}
                "lazy_refcounts" | "data_file_raw" if is_qcow2 && is_off => {}
                "preallocation" | "compat" | "refcount_bits" | "lazy_refcounts"
                | "data_file_raw" => {
                    let text = format!("{name}: option {key}={value} is not supported");
                    return Err(failure(text));
                }
                _ => return Err(failure(format!("{name}: Invalid parameter '{key}'"))),
            }
        }
        wanted.backing = backing.filter(|name| !name.is_empty()).map(|name| (name, backing_format));
        if wanted.backing.is_some() && !is_qcow2 {
            let text =
                format!("{name}: Backing file not supported for file format '{}'", format.name());
            return Err(failure(text));
        }
        Ok(wanted)
    }

    /// The options of our device.
    pub(super) fn device_options(&self) -> Vec<String> {
        let mut all = vec![format!("cluster={}", self.cluster)];
        if self.subclusters {
            all.push("subclusters=on".to_string());
        }
        if let Some(file) = &self.data_file {
            all.push(format!("data-file={}", blockhaul_command_lines::qemu_image::encoded(file)));
        }
        all
    }
}

/// Runs `create`.
pub(super) fn create(line: &Line) -> Outcome {
    line.at_most(2).map_err(failure)?;
    let Some(name) = line.operands.first() else {
        return Err(failure("create: Expecting image file name"));
    };
    let format = line.value("format").unwrap_or("raw");
    let format = match Format::named(format) {
        Some(format @ (Format::Raw | Format::Qcow2)) => format,
        Some(_) => return Err(failure(format!("create: format {format} is not supported"))),
        None => return Err(failure(format!("{name}: Unknown file format '{format}'"))),
    };
    let image = Image::named(name, None).map_err(failure)?;
    let mut wanted = Wanted::new(line, format, name)?;
    if wanted.compression.as_deref().is_some_and(|kind| kind != "zlib") {
        let text = "create: only compression_type=zlib is supported; convert -c makes zstd";
        return Err(failure(text));
    }
    if let Some(given) = line.operands.get(1) {
        wanted.size = Some(size(given)?);
    }
    let mut below = None;
    if let Some((backing, backing_format)) = &wanted.backing {
        let place =
            Image::named(&beside(&image, backing), backing_format.as_deref()).map_err(failure)?;
        let Some(named) = backing_format else {
            let text =
                format!("{name}: Backing file specified without backing format; give it with -F");
            return Err(failure(text));
        };
        if !line.has("backing-unsafe") {
            let found = disk_size(&place)?;
            wanted.size = wanted.size.or(Some(found));
        }
        below = Some(BackingName { name: backing.clone(), format: named.clone() });
    }
    let Some(size) = wanted.size else {
        return Err(failure(format!("{name}: Image creation needs a size parameter")));
    };
    say(line, &formatting(name, format, &wanted, size))?;
    let device = match format {
        Format::Raw => {
            emptied(&image)?;
            image.disk(format, &[])
        }
        _ => {
            let holder = blockhaul_command_lines::qemu_image::encoded(&image.holder());
            format!("qcow2:{holder}?{}", wanted.device_options().join("&"))
        }
    };
    native(words(&["blockhaul", "create", "--overwrite", "--", &device, &size.to_string()]))?;
    if below.is_some() {
        give_backing(&image, below, Rebase::Unsafe)?;
    }
    Ok(0)
}

/// A raw disk that exists loses its contents.
fn emptied(image: &Image) -> Result<(), Failure> {
    let Some(path) = image.path().filter(|path| path.is_file()) else { return Ok(()) };
    let emptied = std::fs::OpenOptions::new().write(true).truncate(true).open(path);
    emptied.map(|_| ()).map_err(|error| {
        failure(format!("{}: Could not create file: {}", image.shown, plain(&error)))
    })
}

/// The size of the disk in an image, in bytes.
pub(super) fn disk_size(image: &Image) -> Result<u64, Failure> {
    let format = opened(image)?;
    let disk = Spec::parse(image.disk(format, &[]).as_ref())?;
    let (result, open) = run(move |registry| async move {
        match registry.open(&disk, Vec::new(), Intent::READ).await {
            Ok(stack) => (Ok(stack.device().facts().size), Some(stack)),
            Err(error) => (Err(error), None),
        }
    })?;
    // Not on a worker: this waits for servers to end.
    drop(open);
    result.map_err(|error| not_opened(image, &error))
}

/// The line that the original prints before it creates an image.
fn formatting(name: &str, format: Format, wanted: &Wanted, size: u64) -> String {
    let mut text = format!("Formatting '{}', fmt={}", crate::out::one_line(name), format.name());
    if format == Format::Raw {
        let _ = writeln!(text, " size={size}");
        return text;
    }
    let extended = if wanted.subclusters { "on" } else { "off" };
    let cluster = wanted.cluster;
    let _ = write!(
        text,
        " cluster_size={cluster} extended_l2={extended} compression_type=zlib size={size}"
    );
    if let Some((backing, format)) = &wanted.backing {
        let format = format.as_deref().unwrap_or_default();
        let _ =
            write!(text, " backing_file={} backing_fmt={format}", crate::out::one_line(backing));
    }
    if let Some(file) = &wanted.data_file {
        let _ = write!(text, " data_file={}", crate::out::one_line(file));
    }
    text + " lazy_refcounts=off refcount_bits=16\n"
}
