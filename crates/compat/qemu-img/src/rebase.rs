//! `qemu-img rebase`.

use blockhaul_command_lines::qemu_image::QemuFormat;
use blockhaul_command_lines::qemu_img::QemuImgCommand;
use blockhaul_formats::qcow2::backing_change::{BackingName, RebaseMode};

use crate::convert::NOT_COMPRESSED;
use crate::error::{QemuImgStatus, Result, failure};
use crate::progress::{COARSE, ProgressLines};
use crate::tool::QemuImg;

impl QemuImg {
    /// Runs `rebase`.
    pub(crate) fn rebase(&self, line: &QemuImgCommand) -> Result<QemuImgStatus> {
        line.at_most(1)?;
        let image = line.image(0, "format")?;
        if line.has("compress") && self.image_format(&image)? == QemuFormat::Raw {
            return Err(failure(NOT_COMPRESSED));
        }
        self.require_qcow2(line, &image)?;
        let name = line.value("backing").unwrap_or_default();
        let how = match (line.has("backing-unsafe"), line.has("compress")) {
            (true, _) => RebaseMode::Unsafe,
            (false, true) => RebaseMode::Compressed,
            (false, false) => RebaseMode::Safe,
        };
        let new = match (name, line.value("backing-format")) {
            ("", _) => None,
            (name, Some(format)) => {
                Some(BackingName { name: name.to_string(), format: format.to_string() })
            }
            (_, None) => {
                let text = "backing format must be specified";
                return Err(failure(format!(
                    "Could not change the backing file to '{name}': {text}"
                )));
            }
        };
        let shown = ProgressLines::begin(self.output(), line, COARSE);
        self.give_backing(&image, new, how)?;
        shown.end();
        Ok(QemuImgStatus::Success)
    }
}
