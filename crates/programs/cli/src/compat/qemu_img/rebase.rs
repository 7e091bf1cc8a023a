//! `qemu-img rebase`.

use blockhaul_command_lines::qemu_image::Format;
use blockhaul_command_lines::qemu_img::Line;
use blockhaul_formats::qcow2::backing_change::{BackingName, Rebase};

use super::common::{failure, give_backing, opened, qcow2};
use super::convert::NOT_COMPRESSED;
use super::progress::{COARSE, Shown};
use crate::exit::Outcome;

/// Runs `rebase`.
pub(super) fn rebased(line: &Line) -> Outcome {
    line.at_most(1).map_err(failure)?;
    let image = line.image(0, "format").map_err(failure)?;
    if line.has("compress") && opened(&image)? == Format::Raw {
        return Err(failure(NOT_COMPRESSED));
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
