//! `qemu-img commit`.

use blockhaul_catalog::{NamePolicy, OpenContext};
use blockhaul_command_lines::qemu_image::{Format, Image};
use blockhaul_command_lines::qemu_img::Line;
use blockhaul_formats::qcow2::backing_change::{BackingName, Snapshots, commit};
use blockhaul_formats::qcow2::resize::NewSize;

use super::common::{changed, failure, qcow2, say};
use super::info::{down_to, to_grow};
use super::progress::{FINE, Shown};
use super::resize::resize;
use crate::exit::{Failure, Outcome};
use crate::image_tools::run;

/// Runs `commit`.
pub(super) fn committed(line: &Line) -> Outcome {
    line.at_most(1).map_err(failure)?;
    let image = line.image(0, "format").map_err(failure)?;
    qcow2(line, &image)?;
    let shown = Shown::begin(line, FINE);
    if let Some(base) = line.value("base") {
        let (above, base, format) = down_to(&image, base)?;
        for one in above.iter().rev() {
            commit_one(one, Some((&base, format)), true)?;
        }
    } else {
        if let Some((below, format, size)) = to_grow(&image)? {
            resize(&below, format, NewSize::To(size), false)?;
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
    let result = run(move |registry| async move {
        let context = OpenContext::new(&registry).with_names(NamePolicy::Allow);
        commit(&context, &holder, base.as_ref(), keep, Snapshots::Change).await
    })?;
    changed(image, result)
}
