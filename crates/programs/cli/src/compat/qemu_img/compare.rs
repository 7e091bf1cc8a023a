//! `qemu-img compare`.

use std::sync::Arc;
use std::time::Duration;

use blockhaul_block::{Error, OpKind};
use blockhaul_catalog::{Intent, Registry, Spec, Stack};
use blockhaul_command_lines::qemu_img::Line;
use blockhaul_engine::{Comparison, Options, Progress};
use blockhaul_io::{Config, Pool, Runtime};

use super::common::{failure, read_disk, say};
use super::progress::{COARSE, Shown};
use crate::exit::{Failure, Outcome, plain};

/// The exit status for everything but differences that has no other.
const NOT_COMPARED: u8 = 2;
const CANNOT_MAP: u8 = 3;
const CANNOT_READ: u8 = 4;
/// The unit in bytes in which the original compares.
const SECTOR: u64 = 512;
/// Connections to each image, and how often each repeats a request.
const CONNECTIONS: usize = 4;
const RETRIES: u32 = 5;
/// Time without a byte after which a connection is dropped.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Runs `compare`.
pub(super) fn compared(line: &Line) -> Outcome {
    line.at_most(2).map_err(failure)?;
    if line.operands.len() < 2 {
        return Err(failure("compare: Expecting two image file names"));
    }
    let disks = disks(line).map_err(|failure| failure.with_status(NOT_COMPARED))?;
    let shown = Shown::begin(line, COARSE);
    let progress = Arc::default();
    shown.watch(&progress, None);
    let outcome = compare(disks, line.has("strict"), progress)
        .and_then(|found| tell_differences(line, &found));
    shown.leave();
    outcome
}

/// The disks in both images.
fn disks(line: &Line) -> Result<[Spec; 2], Failure> {
    Ok([disk(line, 0, "format")?, disk(line, 1, "b-format")?])
}

/// The disk in the image that an operand names, in the format of this option.
fn disk(line: &Line, number: usize, format: &str) -> Result<Spec, Failure> {
    let image = line.image(number, format).map_err(failure)?;
    Ok(Spec::parse(read_disk(&image, |_| Ok(Vec::new()))?.as_ref())?)
}

/// Compares two disks, with these counters. With `strict`, disks of different sizes are not read.
fn compare(disks: [Spec; 2], strict: bool, progress: Arc<Progress>) -> Result<Comparison, Failure> {
    let registry = crate::devices::registry(TIMEOUT);
    for disk in &disks {
        let target = registry.target(disk, Intent::READ);
        target.map_err(|error| Failure::from(error).with_status(NOT_COMPARED))?;
    }
    let runtime = Runtime::start(&Config::default()).map_err(|error| {
        failure(format!("cannot start workers: {}", plain(&error))).with_status(NOT_COMPARED)
    })?;
    let options = Options { connections: CONNECTIONS, retries: RETRIES, ..Options::default() };
    let (result, open) = runtime.block_on(move || async move {
        let stacks = match open(&registry, disks).await {
            Ok(stacks) => stacks,
            Err(failure) => return (Err(failure), None),
        };
        let sizes = (stacks[0].device().facts().size, stacks[1].device().facts().size);
        if strict && sizes.0 != sizes.1 {
            return (Ok(Comparison { differs_at: None, sizes }), Some(stacks));
        }
        let pool = Pool::new(options.memory());
        let [one, other] = &stacks;
        let compared = blockhaul_engine::compare(one, other, &options, &pool, &progress).await;
        (compared.map_err(|error| not_read(error.into())), Some(stacks))
    });
    // Not on a worker: this waits for servers to end.
    drop(open);
    result
}

async fn open(registry: &Registry, [one, other]: [Spec; 2]) -> Result<[Stack; 2], Failure> {
    let open = async |disk: Spec| {
        let opened = registry.open(&disk, Vec::new(), Intent::READ).await;
        let failed = |error: Error| Failure::opening("device", &disk.to_string(), &error);
        opened.map_err(|error| failed(error).with_status(NOT_COMPARED))
    };
    Ok([open(one).await?, open(other).await?])
}

fn not_read(error: Error) -> Failure {
    let status = match error.request() {
        Some((OpKind::Extents, ..)) => CANNOT_MAP,
        _ => CANNOT_READ,
    };
    Failure::from(error).with_status(status)
}

/// Prints what a comparison has found.
fn tell_differences(line: &Line, found: &Comparison) -> Outcome {
    let mut text = String::new();
    if found.sizes.0 != found.sizes.1 {
        if line.has("strict") {
            say(line, "Strict mode: Image size mismatch!\n")?;
            return Ok(1);
        }
        // A difference where both have something is reported alone.
        let common = found.sizes.0.min(found.sizes.1);
        if found.differs_at.is_none_or(|at| at >= common) {
            text += "Warning: Image size mismatch!\n";
        }
    }
    if let Some(at) = found.differs_at {
        let at = at / SECTOR * SECTOR;
        say(line, &format!("{text}Content mismatch at offset {at}!\n"))?;
        return Ok(1);
    }
    say(line, &format!("{text}Images are identical.\n"))
}
