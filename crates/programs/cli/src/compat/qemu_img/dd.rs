//! `qemu-img dd`: a part of a disk as a new image.

use blockhaul_catalog::Spec;
use blockhaul_command_lines::qemu_image::{Format, Image, encoded};
use blockhaul_command_lines::qemu_img::Line;
use blockhaul_transfer::{CopyRequest, Endpoint, TransferOptions};

use super::common::{copy_disk, create_disk, failure, opened, size};
use super::create::{disk_size, emptied};
use crate::exit::{Failure, Outcome};
use crate::out;

/// The operands.
#[derive(Debug, Default)]
struct Wanted<'a> {
    source: Option<&'a str>,
    target: Option<&'a str>,
    /// In bytes.
    block: Option<u64>,
    /// In blocks: the end of the part, and its beginning.
    count: Option<u64>,
    skip: u64,
}

impl Wanted<'_> {
    fn new(line: &Line) -> Result<Wanted<'_>, Failure> {
        let mut wanted = Wanted::default();
        for operand in &line.operands {
            let (name, value) = operand.split_once('=').unwrap_or((operand, ""));
            match name {
                "if" => wanted.source = Some(value),
                "of" => wanted.target = Some(value),
                "bs" => wanted.block = Some(size(value)?),
                "count" => wanted.count = Some(size(value)?),
                "skip" => wanted.skip = size(value)?,
                _ => return Err(failure(format!("unrecognized operand {name}"))),
            }
        }
        if wanted.block == Some(0) {
            return Err(failure("bs: Invalid block size: 0"));
        }
        Ok(wanted)
    }
}

/// Runs `dd`.
pub(super) fn dd(line: &Line) -> Outcome {
    let wanted = Wanted::new(line)?;
    let (Some(source), Some(target)) = (wanted.source, wanted.target) else {
        return Err(failure("Must specify both input and output file names"));
    };
    let source = if line.has("image-opts") {
        Image::options(source)
    } else {
        Image::named(source, line.value("format"))
    };
    let source = source.map_err(failure)?;
    let name = line.value("target-format").unwrap_or("raw");
    let format = match Format::named(name) {
        Some(format @ (Format::Raw | Format::Qcow2)) => format,
        _ => return Err(failure(format!("dd: format {name} is not supported"))),
    };
    let target = Image::named(target, Some(name)).map_err(failure)?;
    let block = wanted.block.unwrap_or(512);
    let whole = disk_size(&source)?;
    let end = wanted.count.map_or(whole, |count| count.saturating_mul(block).min(whole));
    let start = wanted.skip.saturating_mul(block);
    let from = source.disk(opened(&source)?, &[]);
    let to = match format {
        Format::Qcow2 => format!("qcow2:{}", encoded(&target.holder())),
        _ => {
            emptied(&target)?;
            target.disk(format, &[])
        }
    };
    if start >= end {
        if start > end {
            let text = format!("{}: cannot skip to specified offset", source.shown);
            out::error(&format!("qemu-img: {}\n", out::one_line(&text)));
        }
        create_disk(&to, 0)?;
        return Ok(0);
    }
    let part = format!("offset?offset={start}&range={}", end - start);
    let options = TransferOptions { source_layer: vec![part], ..TransferOptions::default() };
    let [from, to] = [Spec::parse(from.as_ref())?, Spec::parse(to.as_ref())?].map(Endpoint::Device);
    copy_disk(CopyRequest { options, ..CopyRequest::new(from, to) })
}
