//! `blockhaul resize`: commands that change an image in place.

use std::path::Path;

use blockhaul_block::{Error, Kind};
use blockhaul_catalog::{DeviceSpec, NamePolicy, NameRefused, OpenContext};
use blockhaul_formats::qcow2::resize::resize;
use blockhaul_formats::raw::{self, RawResizeError};
use blockhaul_transfer::{FileFormat, is_image, path_of};

use crate::args::{self, BackingPolicy};
use crate::brackets::Groups;
use crate::exit::{self, CommandFailure, CommandResult, plain};
use crate::image_backing::shown;
use crate::image_tools::{holder, run};
use crate::out;

/// Whether files that an image names are opened.
pub(crate) fn policy(backing: Option<BackingPolicy>) -> NamePolicy {
    backing.map_or(NamePolicy::Refuse, args::backing_policy)
}

/// Runs `blockhaul resize`.
pub fn run_resize(args: &args::ResizeArgs, groups: &Groups) -> CommandResult {
    let spec = groups.spec(&args.image)?;
    if !is_image(&spec) {
        return resize_raw(spec, args);
    }
    let name = holder(spec)?.to_string();
    let names = policy(args.backing);
    let described = name.clone();
    let size = args.size;
    let shrink = args.shrink;
    let result = shown("resize", &args.output, |progress| {
        run(move |registry| async move {
            let context = OpenContext::new(&registry).with_names(names);
            let count = |done, all| progress.set_done(done, all);
            resize(&context, &described, size, shrink, &count).await
        })
    })?;
    tell(args, &name, result.map_err(|error| failure(&name, &error))?)
}

/// What went wrong with an image.
pub(crate) fn failure(name: &str, error: &Error) -> CommandFailure {
    if error.kind() == Kind::Usage {
        return CommandFailure::usage(error.to_string());
    }
    with_advice(CommandFailure::opening("image", name, error), error)
}

/// The failure of a command with `--backing`, with the advice for a name in an image.
pub(crate) fn with_advice(failure: CommandFailure, error: &Error) -> CommandFailure {
    // The advice in the error is that for devices.
    if NameRefused::caused(error) { failure.and("; here with --backing allow") } else { failure }
}

/// Sets the length of a raw disk, which nothing else may use.
fn resize_raw(spec: DeviceSpec, args: &args::ResizeArgs) -> CommandResult {
    let Some(path) = path_of(&spec) else {
        return Err(CommandFailure::usage(format!("{spec} is neither a file nor qcow2:PATH")));
    };
    check_format(&spec, &path)?;
    let name = spec.to_string();
    let (size, shrink) = (args.size, args.shrink);
    let result = shown("resize", &args.output, |_| {
        run(move |registry| async move { raw::resize(&registry, &spec, &path, size, shrink).await })
    })?;
    let result = result.map_err(|error| match error {
        RawResizeError::NoRegularFile => {
            CommandFailure::new(exit::OPEN, format!("{name} is not a regular file"))
        }
        RawResizeError::Size(error) => error.into(),
        RawResizeError::Open(error) => CommandFailure::opening("disk", &name, &error),
        RawResizeError::System(error) => {
            CommandFailure::new(exit::OPEN, format!("cannot resize {name}: {}", plain(&error)))
        }
    });
    tell(args, &name, result?)
}

/// Prints the new size.
fn tell(args: &args::ResizeArgs, name: &str, size: u64) -> CommandResult {
    out::result(args.output.json, &serde_json::json!({ "image": name, "size": size }), "")?;
    Ok(0)
}

/// Refuses a path whose file begins as an image, unless it is named as `file:PATH`.
fn check_format(spec: &DeviceSpec, path: &Path) -> Result<(), CommandFailure> {
    let is_plain_path = matches!(spec, DeviceSpec::Path(_)) && path.is_file();
    let Some(format) = FileFormat::of(path).filter(|_| is_plain_path) else {
        return Ok(());
    };
    let shown = path.as_os_str().to_string_lossy();
    let text = format!(
        "{spec} begins as a {} image: write qcow2:{shown} for the disk in a qcow2 image, or file:{shown} \
         for a raw disk",
        format.name()
    );
    Err(CommandFailure::new(exit::OPEN, text))
}
