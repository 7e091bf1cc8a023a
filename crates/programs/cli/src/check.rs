//! `blockhaul compare`, `blockhaul verify` and `blockhaul checksum`: read whole devices.

use std::sync::Arc;

use blockhaul_block::{Error, OpKind};
use blockhaul_catalog::{Intent, Registry, Spec, Stack};
use blockhaul_engine::{Comparison, Manifest, Options, Progress, Rate};
use blockhaul_io::{Pool, Runtime};
use blockhaul_transfer::unread_manifest;

use crate::brackets::Groups;
use crate::exit::{self, Failure, Outcome, plain};
use crate::{args, devices, logger, out};

/// Exit statuses of `compare`, the same as of qemu-img compare.
const DIFFERENT: u8 = 1;
const CANNOT_OPEN: u8 = 2;
const CANNOT_MAP: u8 = 3;
const CANNOT_READ: u8 = 4;

/// Runs `blockhaul compare`.
pub fn compare(args: &args::Compare, groups: &Groups) -> Outcome {
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
fn compared(args: &args::Compare, groups: &Groups) -> Result<Comparison, Failure> {
    let specs = vec![groups.spec(&args.one)?, groups.spec(&args.other)?];
    let strict = args.strict;
    let result = over(&args.reading, specs, move |stacks, options, pool| async move {
        let sizes = (stacks[0].device().facts().size, stacks[1].device().facts().size);
        if strict && sizes.0 != sizes.1 {
            return Ok(Comparison { differs_at: None, sizes });
        }
        let progress = Arc::new(Progress::new());
        Ok(blockhaul_engine::compare(&stacks[0], &stacks[1], &options, &pool, &progress).await?)
    });
    result.map_err(|failure| match failure {
        Failed::Opening(failure) => failure.with_status(CANNOT_OPEN),
        Failed::Working(error) => {
            let status = match error.request() {
                Some((OpKind::Extents, ..)) => CANNOT_MAP,
                _ => CANNOT_READ,
            };
            Failure::from(error).with_status(status)
        }
    })
}

/// Runs `blockhaul verify`.
pub fn verify(args: &args::Verify, groups: &Groups) -> Outcome {
    let spec = groups.spec(&args.device)?;
    let path = args.manifest.display().to_string();
    let unusable = |why: String| Failure::new(exit::OPEN, format!("manifest {path}: {why}"));
    let text = std::fs::read_to_string(&args.manifest)
        .map_err(|error| unusable(format!("{}, behind the device", unread_manifest(&error))))?;
    let kept: Manifest = text.parse().map_err(|error: Error| unusable(error.text()))?;
    let like = kept.clone();
    let result = over(&args.reading, vec![spec], |stacks, options, pool| async move {
        let progress = Arc::new(Progress::new());
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
pub fn checksum(args: &args::Checksum, groups: &Groups) -> Outcome {
    let spec = groups.spec(&args.device)?;
    let name = spec.to_string();
    let algorithm = args.digest;
    let result = over(&args.reading, vec![spec], move |stacks, options, pool| async move {
        let progress = Arc::new(Progress::new());
        Ok(blockhaul_engine::digest(&stacks[0], algorithm, &options, &pool, &progress).await?)
    });
    let digest = result.map_err(reading)?;
    out::print(format!("{digest}  {name}\n").as_bytes())?;
    Ok(0)
}

enum Failed {
    Opening(Failure),
    Working(Error),
}

/// The failure of a command that reads one device.
fn reading(failed: Failed) -> Failure {
    match failed {
        Failed::Opening(failure) => failure,
        Failed::Working(error) => {
            let failure = Failure::from(error);
            let lost = failure.status() == exit::LOST;
            if lost { failure } else { failure.with_status(exit::SOURCE) }
        }
    }
}

/// Opens devices for reading, and runs work with them on a worker.
fn over<T, F>(
    args: &args::Reading,
    specs: Vec<Spec>,
    work: impl FnOnce(Vec<Stack>, Options, Pool) -> F + Send + 'static,
) -> Result<T, Failed>
where
    T: Send + 'static,
    F: Future<Output = blockhaul_block::Result<T>> + 'static,
{
    logger::start(args.verbose);
    let registry = devices::registry(args.timeout);
    for spec in &specs {
        registry
            .target(spec, Intent::READ)
            .map_err(|error| Failed::Opening(Failure::from(error)))?;
    }
    let config = args.engine.config(0);
    let runtime = Runtime::start(&config).map_err(|error| {
        let text = format!("cannot start workers: {}", plain(&error));
        Failed::Opening(Failure::new(exit::FAILED, text))
    })?;
    let options = Options {
        connections: usize::from(args.connections),
        retries: args.retries,
        extents: !args.no_extents,
        rate: args.rate.map(|bytes| Arc::new(Rate::new(bytes, 0))),
        ..Options::default()
    };
    let (result, open) = runtime.block_on(move || async move {
        let stacks = match open(&registry, specs).await {
            Ok(stacks) => stacks,
            Err(failure) => return (Err(Failed::Opening(failure)), Vec::new()),
        };
        let pool = Pool::new(options.memory());
        let result = work(stacks.clone(), options, pool).await;
        (result.map_err(Failed::Working), stacks)
    });
    // Not on a worker: this waits for the servers of `[ CMD ]`.
    drop(open);
    result
}

async fn open(registry: &Registry, specs: Vec<Spec>) -> Result<Vec<Stack>, Failure> {
    let mut stacks = Vec::new();
    for spec in specs {
        let opened = registry.open(&spec, Vec::new(), Intent::READ).await;
        let name = spec.to_string();
        stacks.push(opened.map_err(|error| Failure::opening("device", &name, &error))?);
    }
    Ok(stacks)
}
