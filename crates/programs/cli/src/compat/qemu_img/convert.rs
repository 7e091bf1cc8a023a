//! `qemu-img convert`, by `blockhaul copy`.

use blockhaul_command_lines::qemu_image::{Format, Image, encoded};
use blockhaul_command_lines::qemu_img::Line;
use blockhaul_formats::qcow2::backing_change::{BackingName, Rebase};

use super::common::{beside, failure, give_backing, native, opened, say, size, words};
use super::create::Wanted;
use super::info::disk_size;
use crate::exit::{Failure, Outcome};

/// The level of zstd, as in QEMU: its default.
const LEVEL: u32 = 3;

/// The options of the device for `-l`.
pub(super) fn snapshot(line: &Line, format: Format) -> Result<Vec<String>, Failure> {
    let Some(given) = line.value("snapshot") else { return Ok(Vec::new()) };
    let name = given.strip_prefix("snapshot.name=").or(given.strip_prefix("snapshot.id="));
    if format != Format::Qcow2 {
        return Err(failure(format!("format {} has no internal snapshots", format.name())));
    }
    Ok(vec![format!("snapshot={}", encoded(name.unwrap_or(given)))])
}

/// Runs `convert`.
pub(super) fn convert(line: &Line) -> Outcome {
    let (source, target) = match line.operands.len() {
        0 | 1 => return Err(failure("Must specify image file name")),
        2 => (line.image(0, "source-format").map_err(failure)?, line.operands[1].as_str()),
        _ => return Err(failure("convert: several images as the source are not supported")),
    };
    let no_create = line.has("no-create");
    if line.has("target-is-zero") && !no_create {
        return Err(failure("--target-is-zero requires use of -n flag"));
    }
    let format = line.value("target-format");
    let target = if line.has("target-image-opts") {
        if !no_create {
            return Err(failure("--target-image-opts requires use of -n flag"));
        }
        if format.is_some() {
            return Err(failure("-O cannot be used with --target-image-opts"));
        }
        Image::options(target)
    } else {
        let name = format.unwrap_or("raw");
        if Format::named(name).is_none() {
            return Err(failure(format!("Unknown file format '{name}'")));
        }
        Image::named(target, Some(name))
    };
    let target = target.map_err(failure)?;
    let format = target.format.unwrap_or(Format::Raw);
    let wanted = Wanted::new(line, format, &target.shown)?;
    let from = opened(&source)?;
    let from = source.disk(from, &snapshot(line, from)?);
    let mut all = words(&["blockhaul", "copy", "--no-progress"]);
    if let Some(sparse) = line.value("sparse-size") {
        match size(sparse)? {
            0 => all.extend(words(&["--allocated", "--sparse=0"])),
            sparse => {
                let sparse = sparse.clamp(512, 1 << 30).next_power_of_two();
                all.push(format!("--sparse={sparse}").into());
            }
        }
    }
    if line.has("target-is-zero") {
        all.push("--destination-is-zero".into());
    }
    if let Some(rate) = line.value("rate-limit") {
        all.push(format!("--rate={}", size(rate)?).into());
    }
    // The default, unsafe, flushes nothing.
    if line.value("cache").is_some_and(|mode| mode != "unsafe") {
        all.push("--flush".into());
    }
    let mut below = None;
    let (from, to) = ends(line, &wanted, (&from, &target, format), &mut below)?;
    all.extend(words(&["--", &from]));
    all.extend(to.iter().map(std::ffi::OsString::from));
    if no_create {
        opened(&target)?;
        // Not of servers, which may end with their last client.
        let is_whole = source.path().is_some() && line.value("snapshot").is_none();
        let is_raw_file = format == Format::Raw && target.path().is_some();
        if is_whole && is_raw_file && disk_size(&target)? < disk_size(&source)? {
            return Err(failure("output file is smaller than input file"));
        }
    }
    let is_shown = line.has("progress");
    if is_shown {
        say(line, "    (0.00/100%)\r")?;
    }
    native(all)?;
    if below.is_some() {
        // Zeroes are written where the backing file has something else.
        give_backing(&target, below, Rebase::Safe)?;
    }
    if is_shown {
        say(line, "    (100.00/100%)\r\n")?;
    }
    Ok(0)
}

/// The source and the target of the copy.
fn ends(
    line: &Line,
    wanted: &Wanted,
    (from, target, format): (&str, &Image, Format),
    below: &mut Option<BackingName>,
) -> Result<(String, Vec<String>), Failure> {
    let alone = |text: String| vec![text];
    if line.has("no-create") {
        if line.has("compress") {
            return Err(failure("convert: -c with -n is not supported"));
        }
        return Ok((
            from.to_string(),
            match format {
                Format::Raw => alone(target.disk(format, &[])),
                // A copy to an image creates it; one to its server writes to it.
                Format::Qcow2 => ["[", "blockhaul", "serve", &target.disk(format, &[]), "]"]
                    .map(str::to_string)
                    .to_vec(),
                other => {
                    let text = format!("convert: -n with -O {} is not supported", other.name());
                    return Err(failure(text));
                }
            },
        ));
    }
    match format {
        Format::Raw if line.has("compress") => {
            Err(failure("Compression not supported for this file format"))
        }
        Format::Raw => Ok((from.to_string(), alone(target.disk(format, &[])))),
        Format::Vmdk => {
            if wanted.subformat.as_deref() != Some("streamOptimized") {
                return Err(failure(
                    "convert: -O vmdk is only supported with -o subformat=streamOptimized",
                ));
            }
            let to = target.disk(Format::Raw, &[]);
            Ok((format!("as-vmdk:{}", encoded(from)), alone(to)))
        }
        Format::Qcow2 if line.has("compress") => {
            if wanted.backing.is_some() || wanted.data_file.is_some() || wanted.subclusters {
                return Err(failure(
                    "convert: -c with a backing file, data_file or extended_l2 is not supported",
                ));
            }
            if wanted.compression.as_deref().is_some_and(|kind| kind != "zstd") {
                return Err(failure("convert: -c is only supported with compression_type=zstd"));
            }
            let cluster = wanted.cluster;
            let source = format!("as-qcow2:{}?zstd={LEVEL}&cluster={cluster}", encoded(from));
            Ok((source, alone(target.disk(Format::Raw, &[]))))
        }
        Format::Qcow2 => {
            if wanted.compression.as_deref().is_some_and(|kind| kind != "zlib") {
                return Err(failure("convert: compression_type=zstd is only supported with -c"));
            }
            if let Some((name, backing_format)) = &wanted.backing {
                let Some(named) = backing_format else {
                    return Err(failure("backing format must be given: -F FORMAT"));
                };
                let place = Image::named(&beside(target, name), Some(named)).map_err(failure)?;
                opened(&place)?;
                *below = Some(BackingName { name: name.clone(), format: named.clone() });
            }
            let options = wanted.device_options();
            let to = format!("qcow2:{}?{}", encoded(&target.holder()), options.join("&"));
            Ok((from.to_string(), alone(to)))
        }
        other => Err(failure(format!("convert: -O {} is not supported", other.name()))),
    }
}
