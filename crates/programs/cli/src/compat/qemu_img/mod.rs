//! `qemu-img`, by our commands about images. Differences are listed in docs/qemu-img.md.

mod amend;
mod bitmaps;
mod check;
mod common;
mod convert;
mod create;
mod dd;
mod help;
mod info;
mod json;
mod map;
mod progress;
mod snapshot;

use std::ffi::OsString;
use std::sync::Arc;

use blockhaul_catalog::{NamePolicy, OpenContext, Spec};
use blockhaul_command_lines::Asked;
use blockhaul_command_lines::qemu_image::{Format, Image};
use blockhaul_command_lines::qemu_img::{Line, parse};
use blockhaul_engine::Comparison;
use blockhaul_formats::qcow2::backing_change::{BackingName, Rebase, Snapshots, commit};
use blockhaul_formats::qcow2::describe::describe;

use self::common::{
    changed, failure, give_backing, native, not_opened, read_disk, say, size, words,
};
pub(super) use self::common::{opened, warn_of_guess};
use self::create::{Preallocation, disk_size, preallocate};
use self::json::Value;
use self::progress::{COARSE, FINE, Shown};
use super::stand_in::{answer, log_as, own};
use crate::args::Command;
use crate::exit::{FAILED, Failure, Outcome};
use crate::image_tools::run as on_worker;
use crate::{image_tools, out};

/// The exit status of `compare` for everything but differences that has no other.
const NOT_COMPARED: u8 = 2;
/// The unit in bytes in which the original compares.
const SECTOR: u64 = 512;

/// Runs qemu-img with these words.
pub fn run(words: &[OsString]) -> Outcome {
    let line = match parse(words).map_err(failure)? {
        Asked::Text(text) => return answer(&text),
        Asked::Run(line) => line,
    };
    log_as("qemu-img", false);
    let outcome = match line.command {
        "amend" => amend::amended(&line),
        "bitmap" => change_bitmaps(&line),
        "check" => return check::checked(&line),
        "commit" => committed(&line),
        "compare" => return compared(&line),
        "convert" => convert::convert(&line),
        "create" => create::create(&line),
        "dd" => dd::dd(&line),
        "info" => info::info(&line),
        "map" => map::map(&line),
        "measure" => measured(&line),
        "rebase" => rebased(&line),
        "resize" => resized(&line),
        _ => snapshot::snapshot(&line),
    };
    outcome.map_err(|failure| match failure.status() {
        // Like a shell for a program that was ended by a signal.
        128.. => failure,
        _ => failure.with_status(FAILED),
    })
}

/// A qcow2 image: nothing else has what the command changes.
fn qcow2(line: &Line, image: &Image) -> Result<(), Failure> {
    match opened(image)? {
        Format::Qcow2 => Ok(()),
        other => {
            let text = format!("{}: not supported for format {}", line.command, other.name());
            Err(failure(text))
        }
    }
}

fn compared(line: &Line) -> Outcome {
    let failed = |text: String| failure(text).with_status(NOT_COMPARED);
    line.at_most(2).map_err(failure)?;
    if line.operands.len() < 2 {
        return Err(failure("compare: Expecting two image file names"));
    }
    let mut all = words(&["blockhaul", "compare"]);
    if line.has("strict") {
        all.push("--strict".into());
    }
    all.push("--".into());
    for (number, format) in ["format", "b-format"].into_iter().enumerate() {
        let image = line.image(number, format).map_err(failed)?;
        let disk = read_disk(&image, |_| Ok(Vec::new()));
        all.push(disk.map_err(|failure| failure.with_status(NOT_COMPARED))?.into());
    }
    let (cli, groups) = own(all).map_err(|failure| failure.with_status(NOT_COMPARED))?;
    let Command::Compare(args) = cli.command else {
        return Err(failed("the command line was not understood".to_string()));
    };
    let shown = Shown::begin(line, COARSE);
    let progress = Arc::default();
    shown.watch(&progress, None);
    let outcome = crate::check::compared(&args, &groups, progress)
        .and_then(|found| tell_differences(line, &found));
    shown.leave();
    outcome
}

/// Prints what a comparison has found.
fn tell_differences(line: &Line, found: &Comparison) -> Outcome {
    let mut text = String::new();
    if found.sizes.0 != found.sizes.1 {
        if line.has("strict") {
            say(line, "Strict mode: Image size mismatch!\n")?;
            return Ok(1);
        }
        // A difference where both have something is reported alone.
        let common = found.sizes.0.min(found.sizes.1);
        if found.differs_at.is_none_or(|at| at >= common) {
            text += "Warning: Image size mismatch!\n";
        }
    }
    if let Some(at) = found.differs_at {
        let at = at / SECTOR * SECTOR;
        say(line, &format!("{text}Content mismatch at offset {at}!\n"))?;
        return Ok(1);
    }
    say(line, &format!("{text}Images are identical.\n"))
}

fn measured(line: &Line) -> Outcome {
    line.at_most(1).map_err(failure)?;
    let is_json = line.is_json().map_err(failure)?;
    let target = line.value("target-format").unwrap_or("raw");
    if !["raw", "qcow2"].contains(&target) {
        return Err(failure(format!("measure: format {target} is not supported")));
    }
    let mut cluster = 64 << 10;
    let mut has_bitmaps = true;
    for (name, value) in line.creation().map_err(failure)? {
        match (target, name.as_str()) {
            ("qcow2", "cluster_size") => cluster = size(&value)?,
            ("qcow2", "compat") => match value.as_str() {
                "1.1" | "v3" => has_bitmaps = true,
                "0.10" | "v2" => has_bitmaps = false,
                _ => {
                    let text = format!("Parameter 'version' does not accept value '{value}'");
                    return Err(failure(text));
                }
            },
            _ => return Err(failure(format!("measure: option {name} is not supported"))),
        }
    }
    let mut bitmaps = None;
    let source = match (line.value("size"), line.operands.is_empty()) {
        (Some(_), false) => {
            return Err(failure("--size N cannot be used together with a filename"));
        }
        (None, true) => return Err(failure("Either --size N or one filename must be specified")),
        (Some(given), true) => format!("zero:{}", size(given)?),
        (None, false) => {
            let image = line.image(0, "format").map_err(failure)?;
            if target == "qcow2" && opened(&image)? == Format::Qcow2 && has_bitmaps {
                bitmaps = bitmaps_size(&image, cluster)?;
            }
            read_disk(&image, |format| convert::snapshot(line, format))?
        }
    };
    let all =
        words(&["blockhaul", "measure", "--target", target, "--cluster", &cluster.to_string()]);
    let (cli, groups) = own([all, words(&["--", &source])].concat())?;
    let Command::Measure(args) = cli.command else {
        return Err(failure("the command line was not understood"));
    };
    let (required, full) = image_tools::measured(&args, &groups)?;
    let text = if is_json {
        let mut all = Vec::new();
        all.extend(bitmaps.map(|size| ("bitmaps", Value::Number(size))));
        all.push(("required", Value::Number(required)));
        all.push(("fully-allocated", Value::Number(full)));
        Value::Object(all).json() + "\n"
    } else {
        let more = bitmaps.map(|size| format!("bitmaps size: {size}\n")).unwrap_or_default();
        format!("required size: {required}\nfully allocated size: {full}\n{more}")
    };
    out::print(text.as_bytes())?;
    Ok(0)
}

/// The space in bytes that the bitmaps of an image need in a new one; none for version 2, which has
/// none.
fn bitmaps_size(image: &Image, cluster: u64) -> Result<Option<u64>, Failure> {
    let holder = Spec::parse(image.holder().as_ref())?;
    let (result, open) = on_worker(move |registry| async move {
        match registry.open(&holder, Vec::new(), blockhaul_catalog::Intent::READ).await {
            Ok(stack) => (describe(stack.device()).await, Some(stack)),
            Err(error) => (Err(error), None),
        }
    })?;
    drop(open);
    let found = result.map_err(|error| not_opened(image, &error))?;
    if found.version < 3 {
        return Ok(None);
    }
    let mut clusters: u64 = 0;
    let mut directory: u64 = 0;
    for one in found.bitmaps.iter().filter(|one| !one.in_use) {
        let bytes = found.size.div_ceil(one.granularity.max(1)).div_ceil(8);
        let data = bytes.div_ceil(cluster);
        clusters = clusters.saturating_add(data).saturating_add((data * 8).div_ceil(cluster));
        directory += (24 + one.name.len() as u64).next_multiple_of(8);
    }
    let clusters = clusters.saturating_add(directory.div_ceil(cluster));
    Ok(Some(clusters.saturating_mul(cluster)))
}

fn resized(line: &Line) -> Outcome {
    line.at_most(2).map_err(failure)?;
    let how = line.value("preallocation").map_or(Ok(Preallocation::Off), Preallocation::named)?;
    let Some(size) = line.operands.get(1) else {
        return Err(failure("resize: Expecting image file name and size"));
    };
    let image = line.image(0, "format").map_err(failure)?;
    let format = opened(&image)?;
    if image.format.is_none() && format == Format::Raw {
        warn_of_guess(&image);
    }
    let old = match how {
        Preallocation::Off => 0,
        _ => {
            let old = disk_size(&image)?;
            let shrinks =
                size.starts_with('-') || !size.starts_with('+') && self::size(size)? < old;
            if shrinks {
                return Err(failure("Preallocation can only be used for growing images"));
            }
            old
        }
    };
    resize(&image, format, size, line.has("shrink"))?;
    preallocate(&image, format, how, old)?;
    say(line, "Image resized.\n")
}

fn resize(image: &Image, format: Format, size: &str, shrinks: bool) -> Outcome {
    let disk = match format {
        Format::Raw => image.disk(format, &[]),
        Format::Qcow2 => format!("qcow2:{}", image.holder()),
        other => {
            return Err(failure(format!("resize: format {} is not supported", other.name())));
        }
    };
    let mut all = words(&["blockhaul", "resize", "--backing=allow"]);
    if shrinks {
        all.push("--shrink".into());
    }
    all.extend(words(&["--", &disk, size]));
    native(all)
}

fn rebased(line: &Line) -> Outcome {
    line.at_most(1).map_err(failure)?;
    let image = line.image(0, "format").map_err(failure)?;
    if line.has("compress") && opened(&image)? == Format::Raw {
        return Err(failure(convert::NOT_COMPRESSED));
    }
    qcow2(line, &image)?;
    let name = line.value("backing").unwrap_or_default();
    let how = match (line.has("backing-unsafe"), line.has("compress")) {
        (true, _) => Rebase::Unsafe,
        (false, true) => Rebase::Compressed,
        (false, false) => Rebase::Safe,
    };
    let new = match (name, line.value("backing-format")) {
        ("", _) => None,
        (name, Some(format)) => {
            Some(BackingName { name: name.to_string(), format: format.to_string() })
        }
        (_, None) => {
            let text = "backing format must be specified";
            return Err(failure(format!("Could not change the backing file to '{name}': {text}")));
        }
    };
    let shown = Shown::begin(line, COARSE);
    give_backing(&image, new, how)?;
    shown.end();
    Ok(0)
}

fn committed(line: &Line) -> Outcome {
    line.at_most(1).map_err(failure)?;
    let image = line.image(0, "format").map_err(failure)?;
    qcow2(line, &image)?;
    let shown = Shown::begin(line, FINE);
    if let Some(base) = line.value("base") {
        let (above, base, format) = info::down_to(&image, base)?;
        for one in above.iter().rev() {
            commit_one(one, Some((&base, format)), true)?;
        }
    } else {
        if let Some((below, format, size)) = info::to_grow(&image)? {
            resize(&below, format, &size.to_string(), false)?;
        }
        commit_one(&image, None, line.has("drop"))?;
    }
    shown.end();
    say(line, "Image committed.\n")
}

/// Copies what an image has to the image below it, or to `base`.
fn commit_one(image: &Image, base: Option<(&Image, Format)>, keep: bool) -> Result<(), Failure> {
    let holder = image.holder();
    let base = match base {
        None => None,
        Some((base, format)) => {
            let path = base.path().map(std::path::absolute).transpose();
            let path = path.map_err(|error| failure(format!("{}: {error}", base.shown)))?;
            let name = path.map_or_else(|| base.holder(), |path| path.display().to_string());
            Some(BackingName { name, format: format.name().to_string() })
        }
    };
    let result = on_worker(move |registry| async move {
        let context = OpenContext::new(&registry).with_names(NamePolicy::Allow);
        commit(&context, &holder, base.as_ref(), keep, Snapshots::Change).await
    })?;
    changed(image, result)
}

fn change_bitmaps(line: &Line) -> Outcome {
    line.at_most(2).map_err(failure)?;
    let image = line.image(0, "format").map_err(failure)?;
    let Some(bitmap) = line.operands.get(1) else {
        return Err(failure("bitmap: Expecting image file name and bitmap name"));
    };
    qcow2(line, &image)?;
    let disk = image.holder();
    let mut actions = Vec::new();
    for (name, value) in line.options() {
        let mut all = words(&["blockhaul", "bitmap", name]);
        let mut sources = Vec::new();
        match *name {
            "add" => {
                let granularity = line.value("granularity").map(size).transpose()?;
                all.extend(granularity.map(|size| format!("--granularity={size}").into()));
            }
            "merge" => {
                if let Some(file) = line.value("source-file") {
                    let from = Image::named(file, line.value("source-format")).map_err(failure)?;
                    qcow2(line, &from)?;
                    all.push(format!("--from={}", from.holder()).into());
                }
                sources.push(OsString::from(value));
            }
            "remove" | "clear" | "enable" | "disable" => {}
            _ => continue,
        }
        all.extend(words(&["--", &disk, bitmap]));
        all.extend(sources);
        actions.push(all);
    }
    if actions.is_empty() {
        let text = "Need at least one of --add, --remove, --clear, --enable, --disable, or --merge";
        return Err(failure(text));
    }
    for action in actions {
        native(action)?;
    }
    Ok(0)
}
