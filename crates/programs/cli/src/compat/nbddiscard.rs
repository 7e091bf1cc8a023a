//! `nbddiscard` and `nbdzero`: a part of a disk is discarded, zeroed, or checked for data.

use std::ffi::OsString;
use std::io::Read as _;
use std::sync::Arc;

use blockhaul_block::{
    BASE_ALLOCATION, Can, Device, DeviceExt as _, Error, HOLE, Kind, Reply, Request, RequestFlags,
    ZERO,
};
use blockhaul_catalog::Intent;
use blockhaul_command_lines::ToolInvocation;
use blockhaul_command_lines::nbddiscard::{DiscardProgram, DiscardRequest, translate};
use blockhaul_io::{Runtime, RuntimeConfig};

use super::stand_in::{answer, failure, log_as};
use crate::exit::{CommandFailure, CommandResult, FAILED, plain};
use crate::{devices, out};

/// Longest request in bytes: more than most servers take without extended headers would be refused.
const REQUEST_MAX: u64 = 1 << 30;

/// Runs nbddiscard with these words.
pub fn run_discard(words: &[OsString]) -> CommandResult {
    run(DiscardProgram::Discard, words)
}

/// Runs nbdzero with these words.
pub fn run_zero(words: &[OsString]) -> CommandResult {
    run(DiscardProgram::Zero, words)
}

fn run(program: DiscardProgram, words: &[OsString]) -> CommandResult {
    let request = match translate(program, words).map_err(failure)? {
        ToolInvocation::Text(text) => return answer(&text),
        ToolInvocation::Run(request) => request,
    };
    log_as(program.name(), request.verbose);
    crate::logger::start(request.verbose);
    let registry = devices::registry(std::time::Duration::ZERO).for_command();
    let config = RuntimeConfig { workers: 1, ..RuntimeConfig::default() };
    let runtime = Runtime::start(&config)
        .map_err(|error| failure(format!("cannot start workers: {}", plain(&error))))?;
    let (spec, intent) = (request.spec.clone(), intent(&request));
    let opened =
        runtime.block_on(move || async move { registry.open(&spec, Vec::new(), intent).await });
    let stack = opened.map_err(|error| {
        CommandFailure::opening("device", &request.uri, &error).with_status(FAILED)
    })?;
    let device = stack.device().clone();
    check_abilities(&device, &request)?;
    let Some(part) = part(&device, &request)? else { return Ok(0) };
    if !request.check && !request.yes {
        ask(&request.uri, part)?;
    }
    let done = runtime.block_on(move || async move { carry_out(&device, &request, part).await });
    done.map(|()| 0).map_err(|error| CommandFailure::new(FAILED, error.to_string()))
}

fn intent(request: &DiscardRequest) -> Intent {
    if request.check { Intent::READ } else { Intent::WRITE }
}

/// Refuses a server without the requests that are needed: nothing is emulated.
fn check_abilities(
    device: &Arc<dyn Device>,
    request: &DiscardRequest,
) -> Result<(), CommandFailure> {
    let facts = device.facts();
    let own = facts.can - facts.emulated;
    let why = match (request.check, request.zero) {
        (true, _) if !own.contains(Can::EXTENTS) => {
            "this server does not support the block status operation"
        }
        (true, _) => return Ok(()),
        (_, false) if !own.contains(Can::TRIM) => {
            "this server does not support the trim/discard operation"
        }
        (_, true) if !own.contains(Can::ZERO) => "this server does not support the zero operation",
        _ if request.fast && !own.contains(Can::FAST_ZERO) => {
            "fast zeroing is not supported by this server"
        }
        _ => return Ok(()),
    };
    Err(failure(why))
}

/// Offset and length in bytes of the part; none if it is behind the end of the disk.
fn part(
    device: &Arc<dyn Device>,
    request: &DiscardRequest,
) -> Result<Option<(u64, u64)>, CommandFailure> {
    let size = device.facts().size;
    let warn = |text: &str| {
        let line = if request.quiet { String::new() } else { format!("warning: {text}\n") };
        out::print(line.as_bytes()).map(drop)
    };
    let offset = request.offset;
    let Some(most) = size.checked_sub(offset).filter(|most| *most > 0 || offset == 0) else {
        warn("offset at or beyond the end of the disk")?;
        return Ok(None);
    };
    if request.length.is_some_and(|length| length > most) {
        warn("offset + length is beyond the end of the disk")?;
    }
    Ok(Some((offset, request.length.map_or(most, |length| length.min(most)))))
}

/// Asks the user, who must answer with `y`.
fn ask(uri: &str, (offset, length): (u64, u64)) -> Result<(), CommandFailure> {
    let last = i128::from(offset) + i128::from(length) - 1;
    let text = format!("PERMANENTLY ERASE everything on {uri} bytes {offset} - {last} (y/N)? ");
    out::print(text.as_bytes())?;
    let mut letter = [0];
    let read = std::io::stdin().read_exact(&mut letter);
    if read.is_ok() && letter[0].eq_ignore_ascii_case(&b'y') {
        return Ok(());
    }
    Err(failure("operation cancelled"))
}

async fn carry_out(
    device: &Arc<dyn Device>,
    request: &DiscardRequest,
    (offset, length): (u64, u64),
) -> Result<(), Error> {
    let end = offset.saturating_add(length);
    if request.check {
        return check(device, offset, end, if request.zero { ZERO } else { HOLE }).await;
    }
    let mut at = offset;
    while at < end {
        let len = (end - at).min(REQUEST_MAX);
        let change = match (request.zero, request.fast) {
            (false, _) => Request::trim(at, len),
            (true, false) => Request::zero(at, len),
            (true, true) => Request::zero(at, len).with(RequestFlags::FAST),
        };
        let Reply::Done = device.submit(change).await? else { return Err(Error::misfit()) };
        at += len;
    }
    if device.facts().can.contains(Can::FLUSH) { device.flush().await } else { Ok(()) }
}

/// Fails at the first extent that lacks a state.
async fn check(device: &Arc<dyn Device>, mut at: u64, end: u64, state: u64) -> Result<(), Error> {
    let context = device.facts().context(BASE_ALLOCATION).ok_or_else(Error::misfit)?;
    while at < end {
        let lists = device.extents(at, (end - at).min(REQUEST_MAX), context).await?;
        let list = lists.first().filter(|list| !list.is_empty()).ok_or_else(Error::misfit)?;
        for extent in list.runs() {
            if extent.state & state == 0 && at < end {
                let text = format!("image has data at offset {at}");
                return Err(Error::new(Kind::Invalid, text));
            }
            at = at.saturating_add(extent.len);
        }
    }
    Ok(())
}
