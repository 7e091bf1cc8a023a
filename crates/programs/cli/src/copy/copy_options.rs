//! The request of a command line, and the checks that only a command makes.

use std::io::IsTerminal as _;

use blockhaul_catalog::DeviceSpec;
use blockhaul_transfer::{
    CopyRequest, CopySetup, Endpoint, FileUse, TransferError, TransferOptions, format_warning,
    name_warning, same_extension, takes_writes,
};

use crate::exit::{self, CommandFailure, plain};
use crate::image_format;
use crate::{args, devices, out};

/// The request of a command for these descriptions, after the checks for which nothing is opened.
pub(crate) fn checked_request(
    image: &args::ImageFormatArgs,
    mut options: TransferOptions,
    [source, target]: [DeviceSpec; 2],
) -> Result<CopyRequest, CommandFailure> {
    let source = image_format::chosen(source, image)?;
    options.source_layer.splice(..0, image.partition.layer());
    let [source, target] = [source, target].map(Endpoint::Device);
    let request = CopyRequest { options, ..CopyRequest::new(source, target) };
    check_request(&request)?;
    Ok(request)
}

/// Checks the fields of a request, and standard output.
pub(crate) fn check_request(request: &CopyRequest) -> Result<(), CommandFailure> {
    request.check().map_err(|conflict| CommandFailure::usage(conflict.to_string()))?;
    check_output(request)
}

/// Checks a request, as far as nothing must be opened for that.
pub(crate) fn set_up(request: CopyRequest) -> Result<CopySetup, TransferError> {
    let options = request.options.clone();
    let registry = devices::registry(options.timeout).for_command();
    let setup = CopySetup::new(request, registry)?;
    warn_of_formats(&options, setup.specs());
    Ok(setup)
}

/// Refuses what standard output cannot be for a command with this request.
fn check_output(request: &CopyRequest) -> Result<(), CommandFailure> {
    let to_pipe = *request.target.spec() == DeviceSpec::Pipe;
    if to_pipe && std::io::stdout().is_terminal() {
        let text =
            "standard output is a terminal: redirect it to a file, or to a program that reads it";
        return Err(CommandFailure::usage(text));
    }
    if request.options.digest.is_some() && !to_pipe { check_printed_digest() } else { Ok(()) }
}

/// Warns where the bytes of an image in a format are copied or overwritten, and not the disk in it.
pub(crate) fn warn_of_formats(options: &TransferOptions, [source, target]: [&DeviceSpec; 2]) {
    let ends = [
        (source, !options.source_layer.is_empty(), FileUse::Source),
        (target, !options.target_layer.is_empty(), FileUse::Target),
    ];
    if same_extension(source, target) {
        return;
    }
    let mut warnings: Vec<String> = ends
        .into_iter()
        .filter_map(|(spec, layered, used)| format_warning(spec, layered, used))
        .collect();
    // A layer may show or make an image.
    if warnings.is_empty() && options.source_layer.is_empty() && options.target_layer.is_empty() {
        warnings.extend(name_warning(Some(source), target));
    }
    for text in warnings {
        log::warn!("{text}");
    }
}

/// Refuses a digest that nobody would see.
fn check_printed_digest() -> Result<(), CommandFailure> {
    out::check_open("it")
        .map_err(|failure| CommandFailure::usage(format!("--digest: {failure}")))?;
    takes_writes(std::io::stdout()).map_err(|error| {
        let why = plain(&error);
        let text = format!("--digest: standard output, where it would be printed: {why}");
        CommandFailure::new(exit::FAILED, text)
    })
}
