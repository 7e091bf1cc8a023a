//! `qemu-img bitmap`.

use blockhaul_catalog::{OpenContext, Spec};
use blockhaul_command_lines::qemu_image::Image;
use blockhaul_command_lines::qemu_img::Line;
use blockhaul_formats::qcow2::bitmap_change::{BitmapChange, change_bitmap};

use super::common::{failure, image_failure, qcow2, size};
use crate::exit::{Failure, Outcome};
use crate::image_tools::run;

/// Runs `bitmap`.
pub(super) fn change_bitmaps(line: &Line) -> Outcome {
    line.at_most(2).map_err(failure)?;
    let image = line.image(0, "format").map_err(failure)?;
    let Some(bitmap) = line.operands.get(1) else {
        return Err(failure("bitmap: Expecting image file name and bitmap name"));
    };
    qcow2(line, &image)?;
    let mut changes = Vec::new();
    for (name, value) in line.options() {
        changes.extend(change(line, name, value)?);
    }
    if changes.is_empty() {
        let text = "Need at least one of --add, --remove, --clear, --enable, --disable, or --merge";
        return Err(failure(text));
    }
    for one in changes {
        apply(&image, bitmap, one)?;
    }
    Ok(0)
}

/// The change that an option asks for; `None` for other options.
fn change(line: &Line, option: &str, value: &str) -> Result<Option<BitmapChange>, Failure> {
    Ok(Some(match option {
        "add" => {
            let granularity = line.value("granularity").map(size).transpose()?;
            BitmapChange::Add { granularity, enabled: true }
        }
        "remove" => BitmapChange::Remove,
        "clear" => BitmapChange::Clear,
        "enable" => BitmapChange::Enable,
        "disable" => BitmapChange::Disable,
        "merge" => BitmapChange::Merge { sources: vec![value.to_string()], from: source(line)? },
        _ => return Ok(None),
    }))
}

/// The description of the other image of a merge, if there is one.
fn source(line: &Line) -> Result<Option<String>, Failure> {
    let Some(file) = line.value("source-file") else { return Ok(None) };
    let from = Image::named(file, line.value("source-format")).map_err(failure)?;
    qcow2(line, &from)?;
    Ok(Some(Spec::parse(from.holder().as_ref())?.to_string()))
}

fn apply(image: &Image, bitmap: &str, change: BitmapChange) -> Result<(), Failure> {
    let name = Spec::parse(image.holder().as_ref())?.to_string();
    let (described, bitmap) = (name.clone(), bitmap.to_string());
    let result = run(move |registry| async move {
        let context = OpenContext::new(&registry);
        change_bitmap(&context, &described, &bitmap, change).await
    })?;
    result.map_err(|error| image_failure(&name, &error))
}
