//! Sentence 10 of the contract and the facts: allowed requests work, and others are refused by the
//! fence with the right kind of error.

use std::cell::Cell;
use std::rc::Rc;

use blockhaul_block::{
    BASE_ALLOCATION, Can, ContextSet, Kind, LeaseAccess, Op, Request, RequestFlags,
};
use blockhaul_io::{Buf, Data, Pool, Reservation};

use super::case::{CheckCase, WHOLE_MAX, same};
use super::verdict::{CheckResult, Verdict, ensure, skip_if};
use crate::arbitrary::StepGenerator;

/// The facts follow their own rules.
pub(super) async fn the_facts_are_consistent(case: CheckCase) -> CheckResult {
    for facts in [case.subject.device.facts(), case.facts.clone()] {
        let block = facts.block;
        ensure!(!facts.name.is_empty(), "the name is empty");
        ensure!(i64::try_from(facts.size).is_ok(), "the size {} exceeds 2^63 - 1", facts.size);
        let powers = block.minimum.is_power_of_two() && block.preferred.is_power_of_two();
        ensure!(powers && facts.allocation_unit.is_power_of_two(), "no powers of two: {block:?}");
        let range = block.minimum <= 65_536 && block.preferred >= 512;
        ensure!(range, "minimum above 65536 or preferred below 512: {block:?}");
        ensure!(block.minimum <= block.preferred, "minimum above preferred: {block:?}");
        ensure!(block.maximum >= block.minimum, "maximum below minimum: {block:?}");
        let changes = facts.can.intersects(Can::CHANGES) && !facts.can.contains(Can::WRITE);
        ensure!(!changes, "changes without writing: {:?}", facts.can);
        ensure!(facts.can.contains(facts.emulated), "emulated but not there: {:?}", facts.emulated);
        let fast = facts.can.contains(Can::FAST_ZERO) && !facts.can.contains(Can::ZERO);
        ensure!(!fast, "fast zero without zero");
        ensure!(facts.in_flight != Some(0), "no bytes in flight are worth keeping");
        ensure!(facts.contexts.len() <= ContextSet::MAX, "{} contexts", facts.contexts.len());
        if facts.can.contains(Can::EXTENTS) {
            ensure!(!facts.contexts.is_empty(), "extents without a context");
        }
        let base = facts.contexts.iter().position(|name| name == BASE_ALLOCATION);
        ensure!(base.is_none_or(|index| index == 0), "base:allocation is not the first context");
    }
    if !case.options.emulate {
        return Ok(Verdict::Held);
    }
    ensure!(case.can(Can::EXTENTS), "emulate has not supplied extents");
    let zero = !case.can(Can::WRITE) || case.can(Can::ZERO);
    ensure!(zero, "emulate has not supplied zero");
    let minimum = case.facts.block.minimum;
    ensure!(minimum == 1, "emulate has left a minimum block of {minimum}");
    Ok(Verdict::Held)
}

/// Submits a request that must be refused.
async fn refused(case: &CheckCase, what: &str, request: Request, kind: Kind) -> Result<(), String> {
    let outcome = case.wait(case.device.submit(request), what).await?;
    match outcome {
        Ok(_) => Err(format!("{what} succeeded, {kind:?} was due")),
        Err(error) if error.kind() == kind => Ok(()),
        Err(error) => {
            Err(format!("{what} failed as {:?}, {kind:?} was due: {error}", error.kind()))
        }
    }
}

fn read(at: u64, len: u64) -> Request {
    Request::read(at, Reservation::unpooled(len as usize))
}

fn write(at: u64, len: u64) -> Request {
    Request::write(at, Data::zeroes(len as usize))
}

// nbd: sizes.in-range
/// 10. Ranges lie inside the device, are aligned and not empty; commands, flags and payloads are
///     those that the facts allow: everything else is refused.
pub(super) async fn the_fence_refuses_what_the_facts_forbid(case: CheckCase) -> CheckResult {
    let size = case.facts.size;
    let minimum = case.minimum();
    let last = case.down(size);
    refused(&case, "an empty read", read(0, 0), Kind::Invalid).await?;
    refused(&case, "a read at the end", read(last, minimum * 2), Kind::Invalid).await?;
    refused(&case, "a read far behind", read(u64::MAX - 1, 1), Kind::Invalid).await?;
    refused(&case, "a read that wraps", read(u64::MAX, 4096), Kind::Invalid).await?;
    let crooked = Request { len: 5, ..Request::flush() };
    let kind = if case.can(Can::FLUSH) { "a flush with a range" } else { "a flush" };
    refused(&case, kind, crooked, Kind::Invalid).await?;
    let fua = read(0, minimum).with(RequestFlags::FUA);
    refused(&case, "a read with FUA", fua, Kind::Invalid).await?;
    let none = Request::extents(0, minimum, ContextSet::empty());
    refused(&case, "extents without context", none, Kind::Invalid).await?;
    if case.facts.contexts.len() < ContextSet::MAX {
        let unknown = ContextSet::empty().with(case.facts.contexts.len());
        let request = Request::extents(0, minimum, unknown);
        refused(&case, "extents of an unknown context", request, Kind::Invalid).await?;
    }
    if !case.can(Can::CACHE) {
        refused(&case, "a cache", Request::cache(0, minimum), Kind::Invalid).await?;
    }
    if size >= minimum * 3 && minimum > 1 {
        refused(&case, "an unaligned offset", read(1, minimum), Kind::Invalid).await?;
        refused(&case, "an unaligned offset", read(1, size - 1), Kind::Invalid).await?;
        refused(&case, "an unaligned length", read(0, minimum + 1), Kind::Invalid).await?;
    }
    if size >= minimum * 2 {
        let room = Op::Read(Reservation::unpooled(minimum as usize));
        let misfit = Request { op: room, ..read(0, minimum * 2) };
        refused(&case, "a room shorter than the read", misfit, Kind::Invalid).await?;
    }
    let longer = u64::from(case.facts.block.maximum) + minimum;
    if longer <= case.reach() {
        refused(&case, "a read longer than the maximum", read(0, longer), Kind::Invalid).await?;
    }
    if !case.can(Can::WRITE) {
        return Ok(Verdict::Held);
    }
    refused(&case, "a write at the end", write(last, minimum * 2), Kind::NoSpace).await?;
    let zero = if case.can(Can::ZERO) { Kind::NoSpace } else { Kind::Invalid };
    refused(&case, "a zero at the end", Request::zero(last, minimum * 2), zero).await?;
    refused(&case, "a zero that wraps", Request::zero(minimum, u64::MAX), zero).await?;
    if !case.can(Can::TRIM) {
        refused(&case, "a trim", Request::trim(0, minimum), Kind::Invalid).await?;
    }
    if !case.can(Can::FUA) && size >= minimum {
        let fua = write(0, minimum).with(RequestFlags::FUA);
        refused(&case, "a write with FUA", fua, Kind::Invalid).await?;
    }
    if case.can(Can::ZERO) && !case.can(Can::FAST_ZERO) && size >= minimum {
        let fast = Request::zero(0, minimum).with(RequestFlags::FAST);
        refused(&case, "a fast zero", fast, Kind::Unsupported).await?;
    }
    let odd = write(0, minimum).with(RequestFlags::NO_HOLE);
    refused(&case, "a write with NO_HOLE", odd, Kind::Invalid).await?;
    Ok(Verdict::Held)
}

/// 10. Read-only devices are not changed.
pub(super) async fn read_only_devices_refuse_changes(case: CheckCase) -> CheckResult {
    skip_if!(case.can(Can::WRITE), "the device can be written");
    let minimum = case.minimum();
    for request in [write(0, minimum), Request::zero(0, minimum), Request::trim(0, minimum)] {
        let what = format!("a {}", request.kind());
        refused(&case, &what, request, Kind::ReadOnly).await?;
    }
    Ok(Verdict::Held)
}

/// 10. The maximum that the facts allow is served: the last byte, a tail that is not a whole block,
///     the longest request.
pub(super) async fn requests_at_the_limits_are_served(case: CheckCase) -> CheckResult {
    let reach = case.reach();
    let minimum = case.minimum();
    skip_if!(reach == 0, "the device is empty");
    let longest = case.down(case.facts.block.maximum.into()).min(reach);
    for len in [1, 511, 512, 513, 4096, 65_536, longest] {
        let len = case.up(len).min(longest);
        if len > WHOLE_MAX {
            continue;
        }
        for at in [0, reach - len] {
            let before = if case.keeps() {
                let noise = case.noise(len);
                let data = Data::copy_of(&noise);
                case.ok(Request::write(at, data)).await?;
                noise
            } else {
                case.read(at..at + len).await?
            };
            let reply = case.ok(read(at, len)).await?;
            same(at, &super::case::read_bytes(reply, len as usize)?, &before)?;
        }
    }
    case.read(reach - minimum..reach).await?;
    let size = case.facts.size;
    for at in [reach, reach - minimum] {
        if reach < size && size - at <= longest {
            let noise = case.noise(size - at);
            if case.keeps() {
                case.ok(Request::write(at, Data::copy_of(&noise))).await?;
                let reply = case.ok(read(at, size - at)).await?;
                same(at, &super::case::read_bytes(reply, noise.len())?, &noise)?;
            } else {
                case.ok(read(at, size - at)).await?;
            }
        }
    }
    if case.can(Can::CACHE) {
        case.ok(Request::cache(0, reach)).await?;
    }
    if case.can(Can::WRITE | Can::TRIM) {
        case.ok(Request::trim(reach - minimum, minimum)).await?;
        // Neither zero nor trim has a payload: both may be longer than the longest write.
        if reach <= WHOLE_MAX {
            case.ok(Request::trim(0, reach)).await?;
        }
    }
    Ok(Verdict::Held)
}

/// A lease on part of a file shows the same bytes as a read.
pub(super) async fn a_lease_shows_the_same_bytes(case: CheckCase) -> CheckResult {
    skip_if!(case.reach() == 0, "the device is empty");
    if case.keeps() {
        for place in case.places(16, 5000) {
            case.write(place.start, &case.noise(place.end - place.start)).await?;
        }
    }
    let mut leases = 0;
    for window in case.windows() {
        let at = window.start;
        let len = window.end - window.start;
        if !case.can(Can::WRITE) {
            let writable = case.device.file_at(at, len, LeaseAccess::Write).is_some();
            ensure!(!writable, "a lease for writing on a read-only device");
        }
        let Some(lease) = case.device.file_at(at, len, LeaseAccess::Read) else { continue };
        let fits = lease.len > 0 && lease.len <= len;
        ensure!(fits, "a lease of {} bytes on a range of {len}", lease.len);
        let (result, buf) =
            lease.file.read_exact_at(Buf::unpooled(lease.len as usize), lease.at).await;
        result.map_err(|error| format!("cannot read the leased file: {error}"))?;
        let found = case.read(at..at + lease.len).await?;
        same(at, &buf, &found).map_err(|text| format!("the leased file differs: {text}"))?;
        leases += 1;
    }
    ensure!(
        case.device.file_at(0, u64::MAX, LeaseAccess::Read).is_none(),
        "a lease beyond the end"
    );
    skip_if!(leases == 0, "the device gives no leases");
    Ok(Verdict::Held)
}

/// Every stack works with a pool for exactly one request: no task waits for a buffer of the
/// caller's pool while holding one, and all buffers are returned.
pub(super) async fn a_pool_of_one_request_is_enough(case: CheckCase) -> CheckResult {
    let windows = case.windows();
    skip_if!(windows.is_empty(), "the device is empty");
    let len_max = case.chunk().min(128 << 10);
    let pool = Pool::new(Pool::cost(len_max as usize));
    let done = Rc::new(Cell::new(0_usize));
    let mut tasks = Vec::new();
    for task in 0..16 {
        let generator = StepGenerator::new(&case.facts, case.seed ^ task);
        let steps = generator.windows(windows.clone()).len_max(len_max).steps(12);
        let device = case.device.clone();
        let pool = pool.clone();
        let done = done.clone();
        let contexts = case.facts.all_contexts();
        let options = case.options.clone();
        tasks.push(blockhaul_io::spawn(async move {
            for step in steps {
                let room = pool.reserve(step.payload()).await;
                let room = room.map_err(|error| error.to_string())?;
                let pending = device.submit(step.request_in(room, contexts));
                let limit = options.request_timeout;
                let outcome = blockhaul_io::timeout(limit, pending).await;
                let outcome = outcome.map_err(|_| format!("{step:?} never ends"))?;
                let unsupported =
                    |error: &blockhaul_block::Error| error.kind() == Kind::Unsupported;
                if let Err(error) = outcome
                    && !(step.flags.contains(RequestFlags::FAST) && unsupported(&error))
                {
                    return Err(format!("{step:?} failed: {error}"));
                }
                done.set(done.get() + 1);
            }
            Ok(())
        }));
    }
    for task in tasks {
        let limit = case.options.request_timeout * 2;
        let ended = blockhaul_io::timeout(limit, task).await;
        ended.map_err(|_| {
            let done = done.get();
            let left = pool.reserved();
            format!("stuck after {done} requests: {left} bytes of the pool never came back")
        })??;
    }
    let limit = std::time::Instant::now() + case.options.request_timeout;
    while pool.reserved() > 0 {
        let left = pool.reserved();
        let late = std::time::Instant::now() > limit;
        ensure!(!late, "all requests are over, but {left} bytes of the pool never came back");
        blockhaul_io::sleep(std::time::Duration::from_millis(1)).await;
    }
    Ok(Verdict::Held)
}
