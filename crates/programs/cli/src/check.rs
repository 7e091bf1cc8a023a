//! `blockhaul compare`, `blockhaul verify` and `blockhaul checksum`: read whole devices.

use std::sync::Arc;

use blockhaul_block::{Error, OpKind};
use blockhaul_catalog::{Intent, Registry, Stack};
use blockhaul_engine::{ComparisonResult, CopyProgress, EngineOptions, Manifest, RateLimit};
use blockhaul_io::{Pool, Runtime};
use blockhaul_transfer::{make_layers, same_extension, unread_manifest};
use serde_json::json;

use crate::backup_run::{BackupReport, with_report};
use crate::brackets::Groups;
use crate::exit::{self, CommandFailure, CommandResult, plain};
use crate::image_format::{self, ReadDevice};
use crate::progress::WorkProgress;
use crate::{args, devices, out};

/// Exit statuses of `compare`, the same as of qemu-img compare.
const DIFFERENT: u8 = 1;
const CANNOT_OPEN: u8 = 2;
const CANNOT_MAP: u8 = 3;
const CANNOT_READ: u8 = 4;

/// Runs `blockhaul compare`.
pub fn compare(args: &args::CompareArgs, groups: &Groups) -> CommandResult {
    let found = compared(args, groups)?;
    let (one, other) = found.sizes;
    let is_different = found.differs_at.is_some() || (args.strict && one != other);
    let text = match found.differs_at {
        Some(at) => format!("different: first difference at offset {at}\n"),
        None if is_different => format!("different sizes: {one} and {other} bytes\n"),
        None if one == other => format!("identical: {one} bytes\n"),
        None => {
            let text = "identical up to the end of the shorter one, then zeroes";
            format!("{text}: {one} and {other} bytes\n")
        }
    };
    if !args.quiet {
        let value = json!({
            "identical": !is_different,
            "first-difference": found.differs_at,
            "sizes": [one, other],
        });
        out::result(args.json, &value, &text)?;
    }
    Ok(if is_different { DIFFERENT } else { 0 })
}

/// Compares two devices; failures have the status of `compare`.
fn compared(args: &args::CompareArgs, groups: &Groups) -> Result<ComparisonResult, CommandFailure> {
    let reading = DeviceReading { command: "compare", args: &args.reading };
    let words = [&args.one, &args.other].map(|word| groups.spec(word));
    let [one, other] = words;
    let one = image_format::read_device(one?, &args.reading.image)?;
    let mut other = image_format::read_device(other?, &args.reading.image)?;
    // The partition is one of the first disk.
    other.layers.clear();
    let strict = args.strict;
    let result = reading.run(vec![one, other], move |stacks, run| async move {
        let sizes = (stacks[0].device().facts().size, stacks[1].device().facts().size);
        if strict && sizes.0 != sizes.1 {
            return Ok(ComparisonResult { differs_at: None, sizes });
        }
        let EngineRun { options, pool, progress } = run;
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
    with_report("verify", &args.result, |report| verify_reporting(args, groups, report))
}

fn verify_reporting(
    args: &args::VerifyArgs,
    groups: &Groups,
    report: &mut BackupReport,
) -> CommandResult {
    let device = image_format::read_device(groups.spec(&args.device)?, &args.reading.image)?;
    let path = args.manifest.display().to_string();
    let unusable = |why: String| CommandFailure::new(exit::OPEN, format!("manifest {path}: {why}"));
    let text = std::fs::read_to_string(&args.manifest)
        .map_err(|error| unusable(format!("{}, behind the device", unread_manifest(&error))))?;
    let kept: Manifest = text.parse().map_err(|error: Error| unusable(error.text()))?;
    let like = kept.clone();
    let reading = DeviceReading { command: "verify", args: &args.reading };
    let result = reading.run(vec![device], |stacks, run| async move {
        let EngineRun { options, pool, progress } = run;
        Ok(blockhaul_engine::manifest(&stacks[0], Some(&like), &options, &pool, &progress).await?)
    });
    let found = result.map_err(failed)?;
    let differences = kept.differences(&found);
    let (size, expected) = (found.size(), kept.size());
    let is_same = differences.is_empty() && size == expected;
    let range = |&(at, len): &(u64, u64)| json!({ "offset": at, "length": len });
    let value = json!({
        "identical": is_same,
        "size": size,
        "expected-size": expected,
        "differences": differences.iter().map(range).collect::<Vec<_>>(),
    });
    let mut text = String::new();
    if size != expected {
        text += &format!("{size} bytes, not {expected}\n");
    }
    for (at, len) in &differences {
        text += &format!("different: {len} bytes at offset {at}\n");
    }
    if is_same {
        text += &format!("same as in the manifest: {size} bytes\n");
    }
    report.tell(value, &text)?;
    Ok(if is_same { 0 } else { exit::DIFFERENT })
}

/// Runs `blockhaul checksum`.
pub fn checksum(args: &args::ChecksumArgs, groups: &Groups) -> CommandResult {
    out::check_open("the digest")?;
    let device = image_format::read_device(groups.spec(&args.device)?, &args.reading.image)?;
    let name = device.spec.to_string();
    let algorithm = args.digest;
    let reading = DeviceReading { command: "checksum", args: &args.reading };
    let result = reading.run(vec![device], move |stacks, run| async move {
        let EngineRun { options, pool, progress } = run;
        Ok(blockhaul_engine::digest(&stacks[0], algorithm, &options, &pool, &progress).await?)
    });
    let digest = result.map_err(failed)?;
    let value = json!({
        "device": name,
        "algorithm": algorithm.to_string(),
        "digest": digest.to_string(),
    });
    out::result(args.json, &value, &format!("{digest}  {name}\n"))?;
    Ok(0)
}

enum CheckFailure {
    Opening(CommandFailure),
    Working(Error),
}

/// The failure of a command that reads one device.
fn failed(failed: CheckFailure) -> CommandFailure {
    match failed {
        CheckFailure::Opening(failure) => failure,
        CheckFailure::Working(error) => {
            let failure = CommandFailure::from(error);
            let lost = failure.status() == exit::LOST;
            if lost { failure } else { failure.with_status(exit::SOURCE) }
        }
    }
}

/// A command that reads whole devices.
struct DeviceReading<'a> {
    command: &'static str,
    args: &'a args::ReadArgs,
}

/// What the engine needs for one run.
struct EngineRun {
    options: EngineOptions,
    pool: Pool,
    progress: Arc<CopyProgress>,
}

impl DeviceReading<'_> {
    /// Opens devices for reading, and runs work with them on a worker; shows its progress.
    fn run<T, F>(
        &self,
        devices: Vec<ReadDevice>,
        work: impl FnOnce(Vec<Stack>, EngineRun) -> F + Send + 'static,
    ) -> Result<T, CheckFailure>
    where
        T: Send + 'static,
        F: Future<Output = blockhaul_block::Result<T>> + 'static,
    {
        let args = self.args;
        args.reporting.start_log();
        let registry = devices::registry(args.timeout);
        let opening = |error| CheckFailure::Opening(CommandFailure::from(error));
        for device in &devices {
            registry.target(&device.spec, Intent::READ).map_err(opening)?;
            make_layers(&registry, &device.layers).map_err(opening)?;
        }
        self.warn(&devices);
        let shown =
            WorkProgress::start(self.command, &args.reporting).map_err(CheckFailure::Opening)?;
        let config = args.engine.config(0);
        let runtime = Runtime::start(&config).map_err(|error| {
            let text = format!("cannot start workers: {}", plain(&error));
            CheckFailure::Opening(CommandFailure::new(exit::FAILED, text))
        })?;
        let options = self.options();
        let progress = shown.progress().part();
        let (result, open) = runtime.block_on(move || async move {
            let stacks = match open(&registry, devices).await {
                Ok(stacks) => stacks,
                Err(failure) => return (Err(CheckFailure::Opening(failure)), Vec::new()),
            };
            let pool = Pool::new(options.memory());
            progress.expect(stacks.first().map_or(0, |stack| stack.device().facts().size));
            let result = work(stacks.clone(), EngineRun { options, pool, progress }).await;
            (result.map_err(CheckFailure::Working), stacks)
        });
        shown.finish(result.is_ok());
        // Not on a worker: this waits for the servers of `[ CMD ]`.
        drop(open);
        result
    }

    /// Warns of images that are read as they are; two of the same kind are so on purpose.
    fn warn(&self, devices: &[ReadDevice]) {
        if let [one, other] = devices
            && same_extension(&one.spec, &other.spec)
        {
            return;
        }
        devices.iter().for_each(image_format::warn_of_read);
    }

    fn options(&self) -> EngineOptions {
        let args = self.args;
        EngineOptions {
            connections: usize::from(args.connections),
            retries: args.retries,
            extents: !args.no_extents,
            rate: args.rate.map(|bytes| Arc::new(RateLimit::new(bytes, 0))),
            ..EngineOptions::default()
        }
    }
}

async fn open(registry: &Registry, devices: Vec<ReadDevice>) -> Result<Vec<Stack>, CommandFailure> {
    let mut stacks = Vec::new();
    for ReadDevice { spec, layers } in devices {
        let layers = make_layers(registry, &layers)?;
        let opened = registry.open(&spec, layers, Intent::READ).await;
        let name = spec.to_string();
        stacks.push(opened.map_err(|error| CommandFailure::opening("device", &name, &error))?);
    }
    Ok(stacks)
}
