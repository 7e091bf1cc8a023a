//! `qemu-img dd`: a part of a disk as a new image.

use blockhaul_catalog::DeviceSpec;
use blockhaul_command_lines::qemu_image::{QemuFormat, QemuImage, encoded};
use blockhaul_command_lines::qemu_img::QemuImgCommand;
use blockhaul_transfer::one_line;
use blockhaul_transfer::{CopyRequest, Endpoint, TransferOptions};

use crate::copy::CopyTarget;
use crate::error::{QemuImgStatus, Result, failure};
use crate::image::size;
use crate::preallocation::empty_raw;
use crate::tool::QemuImg;

/// The operands.
#[derive(Debug, Default)]
struct DdOperands<'a> {
    source: Option<&'a str>,
    target: Option<&'a str>,
    /// In bytes.
    block: Option<u64>,
    /// In blocks: the end of the part, and its beginning.
    count: Option<u64>,
    skip: u64,
}

impl DdOperands<'_> {
    fn new(line: &QemuImgCommand) -> Result<DdOperands<'_>> {
        let mut operands = DdOperands::default();
        for operand in &line.operands {
            let (name, value) = operand.split_once('=').unwrap_or((operand, ""));
            match name {
                "if" => operands.source = Some(value),
                "of" => operands.target = Some(value),
                "bs" => operands.block = Some(size(value)?),
                "count" => operands.count = Some(size(value)?),
                "skip" => operands.skip = size(value)?,
                _ => return Err(failure(format!("unrecognized operand {name}"))),
            }
        }
        if operands.block == Some(0) {
            return Err(failure("bs: Invalid block size: 0"));
        }
        Ok(operands)
    }
}

impl QemuImg {
    /// Runs `dd`.
    pub(crate) fn dd(&self, line: &QemuImgCommand) -> Result<QemuImgStatus> {
        let operands = DdOperands::new(line)?;
        let (Some(source), Some(target)) = (operands.source, operands.target) else {
            return Err(failure("Must specify both input and output file names"));
        };
        let source = if line.has("image-opts") {
            QemuImage::options(source)
        } else {
            QemuImage::named(source, line.value("format"))
        };
        let source = source?;
        let name = line.value("target-format").unwrap_or("raw");
        let format = match QemuFormat::named(name) {
            Some(format @ (QemuFormat::Raw | QemuFormat::Qcow2)) => format,
            _ => return Err(failure(format!("dd: format {name} is not supported"))),
        };
        let target = QemuImage::named(target, Some(name))?;
        let block = operands.block.unwrap_or(512);
        let whole = self.disk_size(&source)?;
        let end = operands.count.map_or(whole, |count| count.saturating_mul(block).min(whole));
        let start = operands.skip.saturating_mul(block);
        let from = source.disk(self.image_format(&source)?, &[]);
        let to = match format {
            QemuFormat::Qcow2 => format!("qcow2:{}", encoded(&target.holder())),
            _ => {
                empty_raw(&target)?;
                target.disk(format, &[])
            }
        };
        if start >= end {
            if start > end {
                let text = format!("{}: cannot skip to specified offset", source.shown);
                self.tell(&format!("qemu-img: {}\n", one_line(&text)));
            }
            self.create_disk(&to, 0)?;
            return Ok(QemuImgStatus::Success);
        }
        let part = format!("offset?offset={start}&range={}", end - start);
        let options = TransferOptions { source_layer: vec![part], ..TransferOptions::default() };
        let [from, to] = [DeviceSpec::parse(from.as_ref())?, DeviceSpec::parse(to.as_ref())?]
            .map(Endpoint::Device);
        self.copy(CopyRequest { options, ..CopyRequest::new(from, to) }, CopyTarget::New)?;
        Ok(QemuImgStatus::Success)
    }
}
