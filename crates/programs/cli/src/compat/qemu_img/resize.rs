//! `qemu-img resize`.

use blockhaul_catalog::{NamePolicy, OpenContext, Spec};
use blockhaul_command_lines::qemu_image::{Format, Image};
use blockhaul_command_lines::qemu_img::Line;
use blockhaul_formats::qcow2::resize::NewSize;
use blockhaul_formats::raw::{self, RawResizeError};
use blockhaul_transfer::path_of;

use super::common::{failure, image_failure, opened, say, size, warn_of_guess};
use super::create::{Preallocation, disk_size, preallocate};
use crate::exit::{Failure, Outcome, plain};
use crate::image_tools::run;

/// Runs `resize`.
pub(super) fn resized(line: &Line) -> Outcome {
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
    resize(&image, format, new_size(size)?, line.has("shrink"))?;
    preallocate(&image, format, how, old)?;
    say(line, "Image resized.\n")
}

/// A new size, as the original parses it.
pub(super) fn new_size(text: &str) -> Result<NewSize, Failure> {
    NewSize::parse(text).map_err(|error| failure(format!("Invalid size: {}", error.text())))
}

/// Gives the disk in an image another size. `shrinks` allows a smaller one.
pub(super) fn resize(
    image: &Image,
    format: Format,
    size: NewSize,
    shrinks: bool,
) -> Result<(), Failure> {
    match format {
        Format::Raw => resize_raw(image, size, shrinks),
        Format::Qcow2 => resize_qcow2(image, size, shrinks),
        other => Err(failure(format!("resize: format {} is not supported", other.name()))),
    }
}

fn resize_qcow2(image: &Image, size: NewSize, shrinks: bool) -> Result<(), Failure> {
    let name = Spec::parse(image.holder().as_ref())?.to_string();
    let described = name.clone();
    let result = run(move |registry| async move {
        let context = OpenContext::new(&registry).with_names(NamePolicy::Allow);
        blockhaul_formats::qcow2::resize::resize(&context, &described, size, shrinks).await
    })?;
    result.map_err(|error| image_failure(&name, &error))?;
    Ok(())
}

fn resize_raw(image: &Image, size: NewSize, shrinks: bool) -> Result<(), Failure> {
    let disk = Spec::parse(image.disk(Format::Raw, &[]).as_ref())?;
    let name = disk.to_string();
    let Some(path) = path_of(&disk) else {
        return Err(failure(format!("{name} is neither a file nor qcow2:PATH")));
    };
    let result = run(move |registry| async move {
        raw::resize(&registry, &disk, &path, size, shrinks).await
    })?;
    result.map_err(|error| match error {
        RawResizeError::NoRegularFile => failure(format!("{name} is not a regular file")),
        RawResizeError::Size(error) => error.into(),
        RawResizeError::Open(error) => Failure::opening("disk", &name, &error),
        RawResizeError::System(error) => {
            failure(format!("cannot resize {name}: {}", plain(&error)))
        }
    })
}
