//! `blockhaul compare`, `blockhaul verify` and `blockhaul checksum`: read whole devices.

use std::sync::Arc;

use blockhaul_block::{Error, OpKind};
use blockhaul_catalog::{DeviceSpec, Intent, Registry, Stack};
use blockhaul_engine::{ComparisonResult, CopyProgress, EngineOptions, Manifest, RateLimit};
use blockhaul_io::{Pool, Runtime};
use blockhaul_transfer::unread_manifest;

use crate::brackets::Groups;
use crate::exit::{self, CommandFailure, CommandResult, plain};
use crate::{args, devices, logger, out};

/// Exit statuses of `compare`, the same as of qemu-img compare.
const DIFFERENT: u8 = 1;
const CANNOT_OPEN: u8 = 2;
const CANNOT_MAP: u8 = 3;
const CANNOT_READ: u8 = 4;

/// Runs `blockhaul compare`.
pub fn compare(args: &args::CompareArgs, groups: &Groups) -> CommandResult {
    let found = compared(args, groups)?;
    let (one, other) = found.sizes;
    let (text, status) = match found.differs_at {
        Some(at) => (format!("different: first difference at offset {at}\n"), DIFFERENT),
        None if args.strict && one != other => {
            (format!("different sizes: {one} and {other} bytes\n"), DIFFERENT)
        }
        None if one == other => (format!("identical: {one} bytes\n"), 0),
        None => {
            let text = "identical up to the end of the shorter one, then zeroes";
            (format!("{text}: {one} and {other} bytes\n"), 0)
        }
    };
    if !args.quiet {
        out::print(text.as_bytes())?;
    }
    Ok(status)
}

/// Compares two devices; failures have the status of `compare`.
fn compared(args: &args::CompareArgs, groups: &Groups) -> Result<ComparisonResult, CommandFailure> {
    let specs = vec![groups.spec(&args.one)?, groups.spec(&args.other)?];
    let strict = args.strict;
    let result = over(&args.reading, specs, move |stacks, options, pool| async move {
        let sizes = (stacks[0].device().facts().size, stacks[1].device().facts().size);
        if strict && sizes.0 != sizes.1 {
            return Ok(ComparisonResult { differs_at: None, sizes });
        }
        let progress = Arc::new(CopyProgress::new());
        Ok(blockhaul_engine::compare(&stacks[0], &stacks[1], &options, &pool, &progress).await?)
    });
    result.map_err(|failure| match failure {
        CheckFailure::Opening(failure) => failure.with_status(CANNOT_OPEN),
        CheckFailure::Working(error) => {
            let status = match error.request() {
                Some((OpKind::Extents, ..)) => CANNOT_MAP,
                _ => CANNOT_READ,
            };
            CommandFailure::from(error).with_status(status)
        }
    })
}

/// Runs `blockhaul verify`.
pub fn verify(args: &args::VerifyArgs, groups: &Groups) -> CommandResult {
    let spec = groups.spec(&args.device)?;
    let path = args.manifest.display().to_string();
    let unusable = |why: String| CommandFailure::new(exit::OPEN, format!("manifest {path}: {why}"));
    let text = std::fs::read_to_string(&args.manifest)
        .map_err(|error| unusable(format!("{}, behind the device", unread_manifest(&error))))?;
    let kept: Manifest = text.parse().map_err(|error: Error| unusable(error.text()))?;
    let like = kept.clone();
    let result = over(&args.reading, vec![spec], |stacks, options, pool| async move {
        let progress = Arc::new(CopyProgress::new());
        Ok(blockhaul_engine::manifest(&stacks[0], Some(&like), &options, &pool, &progress).await?)
    });
    let found = result.map_err(reading)?;
    let differences = kept.differences(&found);
    if kept.size() != found.size() {
        out::print(format!("{} bytes, not {}\n", found.size(), kept.size()).as_bytes())?;
    }
    for (at, len) in &differences {
        out::print(format!("different: {len} bytes at offset {at}\n").as_bytes())?;
    }
    if differences.is_empty() && kept.size() == found.size() {
        out::print(format!("same as in the manifest: {} bytes\n", found.size()).as_bytes())?;
        return Ok(0);
    }
    Ok(exit::DIFFERENT)
}

/// Runs `blockhaul checksum`.
pub fn checksum(args: &args::ChecksumArgs, groups: &Groups) -> CommandResult {
    let spec = groups.spec(&args.device)?;
    let name = spec.to_string();
    let algorithm = args.digest;
    let result = over(&args.reading, vec![spec], move |stacks, options, pool| async move {
        let progress = Arc::new(CopyProgress::new());
        Ok(blockhaul_engine::digest(&stacks[0], algorithm, &options, &pool, &progress).await?)
    });
    let digest = result.map_err(reading)?;
    out::print(format!("{digest}  {name}\n").as_bytes())?;
    Ok(0)
}

enum CheckFailure {
    Opening(CommandFailure),
    Working(Error),
}

/// The failure of a command that reads one device.
fn reading(failed: CheckFailure) -> CommandFailure {
    match failed {
        CheckFailure::Opening(failure) => failure,
        CheckFailure::Working(error) => {
            let failure = CommandFailure::from(error);
            let lost = failure.status() == exit::LOST;
            if lost { failure } else { failure.with_status(exit::SOURCE) }
        }
    }
}

/// Opens devices for reading, and runs work with them on a worker.
fn over<T, F>(
    args: &args::ReadArgs,
    specs: Vec<DeviceSpec>,
    work: impl FnOnce(Vec<Stack>, EngineOptions, Pool) -> F + Send + 'static,
) -> Result<T, CheckFailure>
where
    T: Send + 'static,
    F: Future<Output = blockhaul_block::Result<T>> + 'static,
{
    logger::start(args.verbose);
    let registry = devices::registry(args.timeout);
    for spec in &specs {
        registry
            .target(spec, Intent::READ)
            .map_err(|error| CheckFailure::Opening(CommandFailure::from(error)))?;
    }
    let config = args.engine.config(0);
    let runtime = Runtime::start(&config).map_err(|error| {
        let text = format!("cannot start workers: {}", plain(&error));
        CheckFailure::Opening(CommandFailure::new(exit::FAILED, text))
    })?;
    let options = EngineOptions {
        connections: usize::from(args.connections),
        retries: args.retries,
        extents: !args.no_extents,
        rate: args.rate.map(|bytes| Arc::new(RateLimit::new(bytes, 0))),
        ..EngineOptions::default()
    };
    let (result, open) = runtime.block_on(move || async move {
        let stacks = match open(&registry, specs).await {
            Ok(stacks) => stacks,
            Err(failure) => return (Err(CheckFailure::Opening(failure)), Vec::new()),
        };
        let pool = Pool::new(options.memory());
        let result = work(stacks.clone(), options, pool).await;
        (result.map_err(CheckFailure::Working), stacks)
    });
    // Not on a worker: this waits for the servers of `[ CMD ]`.
    drop(open);
    result
}

async fn open(registry: &Registry, specs: Vec<DeviceSpec>) -> Result<Vec<Stack>, CommandFailure> {
    let mut stacks = Vec::new();
    for spec in specs {
        let opened = registry.open(&spec, Vec::new(), Intent::READ).await;
        let name = spec.to_string();
        stacks.push(opened.map_err(|error| CommandFailure::opening("device", &name, &error))?);
    }
    Ok(stacks)
}
