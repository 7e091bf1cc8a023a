//! The request of a command line, and the checks that only a command makes.

use std::io::IsTerminal as _;
use std::os::fd::AsFd as _;

use blockhaul_catalog::Spec;
use blockhaul_transfer::{
    CopyRequest, CopySetup, Endpoint, TransferError, TransferOptions, is_heard, takes_writes,
};

use crate::exit::{self, Failure, plain};
use crate::image_format::{self, Use};
use crate::{args, devices};

/// The request of a command for these descriptions, after the checks for which nothing is opened.
pub(crate) fn checked_request(
    image: &args::ImageFormat,
    options: TransferOptions,
    [source, target]: [Spec; 2],
) -> Result<CopyRequest, Failure> {
    let source = image_format::chosen(source, image)?;
    let [source, target] = [source, target].map(Endpoint::Device);
    let request = CopyRequest { options, ..CopyRequest::new(source, target) };
    check_request(&request)?;
    Ok(request)
}

/// Checks the fields of a request, and standard output.
pub(crate) fn check_request(request: &CopyRequest) -> Result<(), Failure> {
    request.check().map_err(|conflict| Failure::usage(conflict.to_string()))?;
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
fn check_output(request: &CopyRequest) -> Result<(), Failure> {
    let to_pipe = *request.target.spec() == Spec::Pipe;
    if to_pipe && std::io::stdout().is_terminal() {
        let text =
            "standard output is a terminal: redirect it to a file, or to a program that reads it";
        return Err(Failure::usage(text));
    }
    if request.options.digest.is_some() && !to_pipe { check_printed_digest() } else { Ok(()) }
}

/// Warns where the bytes of an image in a format are copied or overwritten, and not the disk in it.
pub(crate) fn warn_of_formats(options: &TransferOptions, [source, target]: [&Spec; 2]) {
    let ends = [
        (source, !options.source_layer.is_empty(), Use::Source),
        (target, !options.target_layer.is_empty(), Use::Target),
    ];
    if image_format::same_extension(source, target) {
        return;
    }
    let mut warnings: Vec<String> = ends
        .into_iter()
        .filter_map(|(spec, layered, used)| image_format::warning(spec, layered, used))
        .collect();
    // A layer may show or make an image.
    if warnings.is_empty() && options.source_layer.is_empty() && options.target_layer.is_empty() {
        warnings.extend(image_format::misnamed(Some(source), target));
    }
    for text in warnings {
        log::warn!("{text}");
    }
}

/// Refuses a digest that nobody would see.
fn check_printed_digest() -> Result<(), Failure> {
    if !is_heard(std::io::stdout().as_fd()) {
        let text = "--digest: standard output, where it would be printed, is closed";
        return Err(Failure::usage(text));
    }
    takes_writes(std::io::stdout()).map_err(|error| {
        let why = plain(&error);
        let text = format!("--digest: standard output, where it would be printed: {why}");
        Failure::new(exit::FAILED, text)
    })
}
