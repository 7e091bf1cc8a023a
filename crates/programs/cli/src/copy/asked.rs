//! The options of one copy on the command line, and checks for invalid combinations.

use std::io::IsTerminal as _;
use std::os::fd::AsFd as _;

use blockhaul_catalog::Spec;
use blockhaul_engine::{ByKernel, Options};

use crate::args;
use crate::ends::{self, full, same};
use crate::exit::{self, Failure, plain};
use crate::image_format::{self, Use};

/// The engine's options for a command line.
pub(super) fn options(args: &args::CopyArgs) -> Options {
    let usual = Options::default();
    Options {
        connections: args.connections.map_or(usual.connections, usize::from),
        // An explicit number is used as is.
        adaptive_connections: args.connections.is_none(),
        multi_conn: args.multi_conn,
        requests: args.requests.map_or(usual.requests, |n| n as usize),
        adaptive: args.requests.is_none(),
        request_size: args.request_size.unwrap_or(usual.request_size),
        adaptive_size: args.request_size.is_none(),
        queue_size: args.queue_size.max(args.request_size.unwrap_or(0).into()),
        sparse: args.sparse.unwrap_or(usual.sparse),
        sampled: args.sparse.is_none(),
        allocated: args.allocated,
        target_is_zero: args.destination_is_zero,
        trust_zero: args.trust,
        extents: !args.no_extents,
        zero_all: args.zero_all,
        // A verification and a manifest are about durable data.
        flush: args.flush || args.verify || args.manifest.is_some(),
        discard_source: args.discard_source,
        synchronous: args.synchronous,
        segment: args.segment.map_or(blockhaul_engine::SEGMENT, u64::from),
        spread: args.segment.is_none(),
        retries: args.retries,
        retry_delay: args.retry_delay,
        by_kernel: if args.engine.no_zero_copy { ByKernel::Never } else { ByKernel::Auto },
        digest: args.digest,
        ..usual
    }
}

/// Warns where the bytes of an image in a format are copied or overwritten, and not the disk in it.
pub(super) fn warn_of_formats(args: &args::CopyArgs, source: &Spec, target: &Spec) {
    let ends = [
        (source, !args.source_layer.is_empty(), Use::Source),
        (target, !args.target_layer.is_empty(), Use::Target),
    ];
    if image_format::same_extension(source, target) {
        return;
    }
    let mut warnings: Vec<String> = ends
        .into_iter()
        .filter_map(|(spec, layered, used)| image_format::warning(spec, layered, used))
        .collect();
    // A layer may show or make an image.
    if warnings.is_empty() && args.source_layer.is_empty() && args.target_layer.is_empty() {
        warnings.extend(image_format::misnamed(Some(source), target));
    }
    for text in warnings {
        log::warn!("{text}");
    }
}

/// Refuses invalid combinations, before anything is opened.
pub(super) fn check_ends(
    args: &args::CopyArgs,
    source: &Spec,
    target: &Spec,
) -> Result<(), Failure> {
    let pipes = [source, target].map(|spec| *spec == Spec::Pipe);
    if pipes == [true, true] {
        return Err(Failure::usage("copies from - to -: one of them must be a device"));
    }
    if pipes[1] && std::io::stdout().is_terminal() {
        let text =
            "standard output is a terminal: redirect it to a file, or to a program that reads it";
        return Err(Failure::usage(text));
    }
    if args.journal.is_some() && pipes != [false, false] {
        let text =
            "--journal: a copy from or to a pipe cannot be resumed: use a device on both sides";
        return Err(Failure::usage(text));
    }
    if args.discard_source && pipes != [false, false] {
        let text =
            "--discard-source: a pipe can neither discard nor be flushed: neither side can be one";
        return Err(Failure::usage(text));
    }
    check_second_read(args, pipes == [false, false])?;
    if let (Some(journal), Some(manifest)) = (&args.journal, &args.manifest)
        && full(journal) == full(manifest)
    {
        return Err(Failure::usage(
            "--journal and --manifest are the same file: choose another name",
        ));
    }
    if args.digest.is_some() && !pipes[1] {
        check_printed_digest()?;
    }
    if same(source, target) {
        return Err(Failure::usage(ends::same_storage(source, target)));
    }
    Ok(())
}

/// Refuses options that read a side again, where it cannot be.
fn check_second_read(args: &args::CopyArgs, are_devices: bool) -> Result<(), Failure> {
    let twice = [
        (args.verify, "--verify"),
        (args.digest.is_some(), "--digest"),
        (args.manifest.is_some(), "--manifest"),
        (args.since.is_some(), "--since"),
    ];
    if args.discard_source
        && let Some((_, option)) = twice.iter().find(|(given, _)| *given)
    {
        let text = format!(
            "{option} reads the source a second time, and --discard-source leaves nothing to read: leave \
             out one of them"
        );
        return Err(Failure::usage(text));
    }
    if args.manifest.is_some() && !are_devices {
        let text = "--manifest reads the source again: use a device on both sides, not a pipe";
        return Err(Failure::usage(text));
    }
    if args.verify && !are_devices {
        return Err(Failure::usage(
            "--verify reads both sides again: use a device on both sides, not a \
                                   pipe",
        ));
    }
    Ok(())
}

/// Refuses a digest that nobody would see.
fn check_printed_digest() -> Result<(), Failure> {
    if !ends::is_heard(std::io::stdout().as_fd()) {
        let text = "--digest: standard output, where it would be printed, is closed";
        return Err(Failure::usage(text));
    }
    ends::takes_writes(std::io::stdout()).map_err(|error| {
        let why = plain(&error);
        let text = format!("--digest: standard output, where it would be printed: {why}");
        Failure::new(exit::FAILED, text)
    })
}
