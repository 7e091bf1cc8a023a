//! Sentences 1 to 5 and 9 of the contract: how requests start, run and end.

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use blockhaul_block::{Can, Device, OpKind, PendingRequest, Request, RequestFlags};
use blockhaul_io::{Data, Reservation, WorkerHandle};

use super::case::{CheckCase, read_bytes, same};
use super::verdict::{CheckResult, Verdict, ensure, skip_if};

/// Requests in flight: the number in the contract.
const MANY: usize = 64;

/// How often they may take too long.
const TRIES: usize = 10;

/// One request of each kind that the facts allow, in this range.
fn one_of_each(case: &CheckCase, at: u64, len: u64) -> Vec<Request> {
    let mut all = vec![Request::read(at, Reservation::unpooled(len as usize))];
    let mut add = |can: Can, request: Request| {
        if case.can(can) {
            all.push(request);
        }
    };
    add(Can::WRITE, Request::write(at, Data::copy_of(&case.noise(len))));
    add(Can::WRITE | Can::ZERO, Request::zero(at, len));
    add(Can::WRITE | Can::TRIM, Request::trim(at, len));
    add(Can::FLUSH, Request::flush());
    add(Can::CACHE, Request::cache(at, len));
    add(Can::EXTENTS, Request::extents(at, len, case.facts.all_contexts()));
    all
}

/// 1. It never blocks.
pub(super) async fn submit_never_blocks(case: CheckCase) -> CheckResult {
    let Some(place) = case.places(1, 4096).pop() else {
        return Ok(Verdict::Skipped("the device is too small".to_string()));
    };
    let len = place.end - place.start;
    let mut best: Vec<(OpKind, Duration)> = Vec::new();
    for _ in 0..5 {
        for (index, request) in one_of_each(&case, place.start, len).into_iter().enumerate() {
            let kind = request.kind();
            let started = Instant::now();
            let pending = case.device.submit(request);
            let took = started.elapsed();
            let outcome = case.wait(pending, kind.name()).await?;
            outcome.map_err(|error| format!("{kind} failed: {error}"))?;
            match best.get_mut(index) {
                Some((_, best)) => *best = took.min(*best),
                None => best.push((kind, took)),
            }
        }
    }
    for (kind, took) in best {
        let limit = case.options.submit_max;
        ensure!(took <= limit, "submit of a {kind} took {took:?} in the best of 5 tries");
    }
    Ok(Verdict::Held)
}

/// Waits until a range reads as expected, without polling the request that must change it.
async fn appears(case: &CheckCase, at: u64, expected: &[u8], why: &str) -> Result<(), String> {
    let started = Instant::now();
    loop {
        let found = case.read(at..at + expected.len() as u64).await?;
        let Err(difference) = same(at, &found, expected) else { return Ok(()) };
        let limit = case.options.request_timeout;
        ensure!(started.elapsed() < limit, "{why}: after {limit:?} {difference}");
        blockhaul_io::sleep(Duration::from_millis(1)).await;
    }
}

/// 2. The request has started when `submit` returns: it continues without being polled.
pub(super) async fn a_request_has_started_when_submit_returns(case: CheckCase) -> CheckResult {
    skip_if!(!case.keeps(), "nothing can be seen of a read that has started");
    let places = case.places(4, 4096);
    skip_if!(places.is_empty(), "the device is too small");
    let mut held = Vec::new();
    let mut written = Vec::new();
    for place in places {
        let bytes = case.noise(place.end - place.start);
        held.push(case.device.submit(Request::write(place.start, Data::copy_of(&bytes))));
        written.push((place.start, bytes));
    }
    for (at, bytes) in &written {
        appears(&case, *at, bytes, "a write that nobody polls does not happen").await?;
    }
    for pending in held {
        let outcome = case.wait(pending, "a write that was not polled").await?;
        outcome.map_err(|error| format!("a write failed: {error}"))?;
    }
    Ok(Verdict::Held)
}

/// 2. A caller that submits 64 requests and then awaits them in turn has 64 in flight.
pub(super) async fn sixty_four_requests_are_at_work_at_once(case: CheckCase) -> CheckResult {
    let places = case.places(MANY, 4096);
    skip_if!(places.len() < 2, "the device is too small");
    // A busy machine may delay this thread for longer than requests take, but not each time.
    let mut tries = 1..TRIES;
    loop {
        let took = at_once(&case, &places).await?;
        let Some(latency) = case.options.latency else { return Ok(Verdict::Held) };
        let count = places.len();
        ensure!(took >= latency, "{count} requests took {took:?}, less than one may take");
        if took < latency * (count as u32).div_ceil(4).max(2) {
            return Ok(Verdict::Held);
        }
        ensure!(tries.next().is_some(), "{count} requests took {took:?}, one at a time");
    }
}

/// How long simultaneous requests for all of these places take.
async fn at_once(case: &CheckCase, places: &[Range<u64>]) -> Result<Duration, String> {
    let started = Instant::now();
    let mut out = Vec::new();
    for place in places {
        let len = place.end - place.start;
        let request = if case.keeps() {
            Request::write(place.start, Data::copy_of(&case.noise(len)))
        } else {
            Request::read(place.start, Reservation::unpooled(len as usize))
        };
        out.push(case.device.submit(request));
    }
    for pending in out {
        let outcome = case.wait(pending, "one of 64 requests in flight").await?;
        outcome.map_err(|error| format!("one of 64 requests in flight failed: {error}"))?;
    }
    Ok(started.elapsed())
}

/// 3. Each request completes (a second completion is impossible by type).
pub(super) async fn each_request_completes(case: CheckCase) -> CheckResult {
    let mut out = Vec::new();
    for place in case.places(8, 512) {
        for request in one_of_each(&case, place.start, place.end - place.start) {
            let what = format!("{} {}+{}", request.kind(), request.at, request.len);
            out.push((case.device.submit(request), what));
        }
    }
    if case.can(Can::FLUSH) {
        out.push((case.device.submit(Request::flush()), "flush".to_string()));
    }
    skip_if!(out.is_empty(), "the device is too small");
    case.shuffle(&mut out);
    for (pending, what) in out {
        let outcome = case.wait(pending, &what).await?;
        outcome.map_err(|error| format!("{what} failed: {error}"))?;
    }
    Ok(Verdict::Held)
}

/// 3. Dropping the [`PendingRequest`] detaches; a submitted write is drained, never abandoned.
pub(super) async fn dropping_a_pending_detaches(case: CheckCase) -> CheckResult {
    // Reads release their memory although the reply is not awaited.
    let pool = blockhaul_io::Pool::new(1 << 20);
    for place in case.places(8, 4096) {
        let room = pool.try_reserve((place.end - place.start) as usize);
        if let Some(room) = room {
            drop(case.device.submit(Request::read(place.start, room)));
        }
    }
    let started = Instant::now();
    while pool.reserved() > 0 {
        let left = pool.reserved();
        let limit = case.options.request_timeout;
        ensure!(started.elapsed() < limit, "dropped reads still hold {left} bytes after {limit:?}");
        blockhaul_io::sleep(Duration::from_millis(1)).await;
    }
    skip_if!(!case.keeps(), "the device does not keep writes; reads that were dropped ended");
    let mut written = Vec::new();
    for (index, place) in case.places(32, 4096).into_iter().enumerate() {
        let bytes = case.noise(place.end - place.start);
        let pending = case.device.submit(Request::write(place.start, Data::copy_of(&bytes)));
        if index % 2 == 0 {
            drop(pending);
        } else {
            // Polled once: the waker must not be what keeps it alive.
            let _ = blockhaul_io::timeout(Duration::ZERO, pending).await;
        }
        written.push((place.start, bytes));
    }
    for (at, bytes) in &written {
        appears(&case, *at, bytes, "a write whose Pending was dropped got lost").await?;
    }
    Ok(Verdict::Held)
}

/// 4. Requests in flight may complete in any order, so they can be awaited in any order.
pub(super) async fn requests_in_flight_may_be_awaited_in_any_order(case: CheckCase) -> CheckResult {
    let places = case.places(MANY, 1024);
    skip_if!(places.len() < 2, "the device is too small");
    let mut expected = Vec::new();
    if case.keeps() {
        let mut out = Vec::new();
        for place in &places {
            let bytes = case.noise(place.end - place.start);
            out.push(case.device.submit(Request::write(place.start, Data::copy_of(&bytes))));
            expected.push(bytes);
        }
        for pending in out.into_iter().rev() {
            let outcome = case.wait(pending, "a write").await?;
            outcome.map_err(|error| format!("a write failed: {error}"))?;
        }
    } else {
        for place in &places {
            expected.push(case.read(place.clone()).await?);
        }
    }
    let mut out: Vec<(usize, PendingRequest)> = Vec::new();
    for (index, place) in places.iter().enumerate() {
        let room = Reservation::unpooled((place.end - place.start) as usize);
        out.push((index, case.device.submit(Request::read(place.start, room))));
    }
    case.shuffle(&mut out);
    for (index, pending) in out {
        let outcome = case.wait(pending, "a read").await?;
        let reply = outcome.map_err(|error| format!("a read failed: {error}"))?;
        let found = read_bytes(reply, expected[index].len())?;
        same(places[index].start, &found, &expected[index])?;
    }
    Ok(Verdict::Held)
}

/// 4. Only overlapping requests have no defined order: adjacent ones in flight do not affect each
///    other, even within one sector or page.
pub(super) async fn neighbours_in_flight_leave_each_other_alone(case: CheckCase) -> CheckResult {
    skip_if!(!case.keeps(), "the device does not keep writes");
    let len = case.up(150);
    let count = (case.reach() / len).min(MANY as u64);
    skip_if!(count < 2, "the device is too small");
    for round in 0..4 {
        let start = case.down(case.random(case.reach() - count * len + 1));
        let mut expected = vec![0; (count * len) as usize];
        let mut requests = Vec::new();
        for (index, bytes) in expected.chunks_mut(len as usize).enumerate() {
            let at = start + index as u64 * len;
            if case.can(Can::ZERO) && (index + round) % 4 == 0 {
                requests.push(Request::zero(at, len));
            } else {
                bytes.copy_from_slice(&case.noise(len));
                requests.push(Request::write(at, Data::copy_of(bytes)));
            }
        }
        case.shuffle(&mut requests);
        let out: Vec<_> = requests.into_iter().map(|request| case.device.submit(request)).collect();
        for pending in out {
            let outcome = case.wait(pending, "one of several neighbours").await?;
            outcome.map_err(|error| format!("one of several neighbours failed: {error}"))?;
        }
        let found = case.read(start..start + count * len).await?;
        same(start, &found, &expected).map_err(|text| format!("a neighbour's bytes: {text}"))?;
    }
    Ok(Verdict::Held)
}

// nbd: write.before-reply, zeroes.before-reply
/// 4. A read sees what every write wrote that had completed when the read was submitted; a caller
///    that awaits the first write before submitting the second has an order.
pub(super) async fn a_completed_write_is_seen_by_later_reads(case: CheckCase) -> CheckResult {
    skip_if!(!case.keeps(), "the device does not keep writes");
    let places = case.places(4, 4096);
    skip_if!(places.is_empty(), "the device is too small");
    for place in places {
        for _ in 0..16 {
            let bytes = case.noise(place.end - place.start);
            case.write(place.start, &bytes).await?;
            let found = case.read(place.clone()).await?;
            same(place.start, &found, &bytes).map_err(|text| format!("a stale read: {text}"))?;
        }
        // Half of it again: the other half stays.
        let half = case.down((place.end - place.start) / 2);
        let mut expected = case.read(place.clone()).await?;
        expected[..half as usize].copy_from_slice(&case.noise(half));
        case.write(place.start, &expected[..half as usize]).await?;
        // Late effects of earlier writes would show up by now.
        blockhaul_io::sleep(Duration::from_millis(3)).await;
        same(place.start, &case.read(place.clone()).await?, &expected)?;
    }
    Ok(Verdict::Held)
}

/// Checks that a range is among the durable bytes.
fn durable_shows(case: &CheckCase, at: u64, expected: &[u8], why: &str) -> Result<(), String> {
    let Some(durable) = &case.subject.durable else { return Ok(()) };
    let durable = durable();
    let found = durable.get(at as usize..at as usize + expected.len());
    let found = found.ok_or_else(|| "the durable bytes are shorter than the device".to_string())?;
    same(at, found, expected).map_err(|text| format!("{why}: {text}"))
}

// nbd: flush.covers-completed, flush.durable
/// 5. A flush makes durable every write that had completed when it was submitted.
pub(super) async fn a_flush_makes_completed_writes_durable(case: CheckCase) -> CheckResult {
    skip_if!(!case.can(Can::FLUSH), "the device has no flush");
    case.ok(Request::flush()).await?;
    skip_if!(!case.keeps(), "the device does not keep writes");
    let mut written = Vec::new();
    for place in case.places(16, 4096) {
        let bytes = case.noise(place.end - place.start);
        case.write(place.start, &bytes).await?;
        written.push((place.start, bytes));
    }
    case.ok(Request::flush()).await?;
    for (at, bytes) in &written {
        durable_shows(&case, *at, bytes, "not durable after a flush")?;
        same(*at, &case.read(*at..*at + bytes.len() as u64).await?, bytes)?;
    }
    // A zero request is a write too.
    if let Some((at, bytes)) = written.first().filter(|_| case.can(Can::ZERO)) {
        case.ok(Request::zero(*at, bytes.len() as u64)).await?;
        case.ok(Request::flush()).await?;
        durable_shows(&case, *at, &vec![0; bytes.len()], "not durable after a flush")?;
    }
    skip_if!(
        case.subject.durable.is_none(),
        "flush succeeds; durability cannot be seen from outside"
    );
    Ok(Verdict::Held)
}

// nbd: flags.multi-conn
/// 5. … on all handles of the same storage when the facts say `MULTI_CONN`; and a read through one
///    handle sees what a flushed write through another wrote.
pub(super) async fn a_flush_covers_all_handles(case: CheckCase) -> CheckResult {
    skip_if!(!case.keeps(), "the device does not keep writes");
    skip_if!(!case.can(Can::MULTI_CONN | Can::FLUSH), "the facts do not promise it");
    let Some(other) = case.another().await? else {
        return Ok(Verdict::Skipped("the subject offers one handle only".to_string()));
    };
    for place in case.places(8, 4096) {
        let bytes = case.noise(place.end - place.start);
        case.write_on(&other, place.start, &bytes, RequestFlags::empty()).await?;
        case.ok(Request::flush()).await?;
        durable_shows(&case, place.start, &bytes, "not durable after another handle's flush")?;
        same(place.start, &case.read(place.clone()).await?, &bytes)?;
        let bytes = case.noise(place.end - place.start);
        case.write(place.start, &bytes).await?;
        case.ok_on(&other, Request::flush()).await?;
        same(place.start, &case.read_on(&other, place.clone(), case.chunk()).await?, &bytes)?;
    }
    Ok(Verdict::Held)
}

// nbd: fua.durable, command-flags.fua
/// 5. A write with FUA is durable when it completes.
pub(super) async fn fua_is_durable_on_completion(case: CheckCase) -> CheckResult {
    skip_if!(!case.can(Can::WRITE | Can::FUA), "the device has no FUA");
    for place in case.places(8, 4096) {
        let len = place.end - place.start;
        let bytes = case.noise(len);
        case.write_on(&case.device, place.start, &bytes, RequestFlags::FUA).await?;
        if case.options.keeps_writes {
            durable_shows(&case, place.start, &bytes, "not durable after a write with FUA")?;
            same(place.start, &case.read(place.clone()).await?, &bytes)?;
        }
        if case.can(Can::ZERO) {
            case.ok(Request::zero(place.start, len).with(RequestFlags::FUA)).await?;
            if case.options.keeps_writes {
                let zeroes = vec![0; len as usize];
                durable_shows(&case, place.start, &zeroes, "not durable after a zero with FUA")?;
            }
        }
        if case.can(Can::TRIM) {
            case.ok(Request::trim(place.start, len).with(RequestFlags::FUA)).await?;
        }
    }
    skip_if!(
        case.subject.durable.is_none(),
        "FUA is accepted; durability cannot be seen from outside"
    );
    Ok(Verdict::Held)
}

/// 9. Handles may move between workers.
pub(super) async fn handles_move_between_workers(case: CheckCase) -> CheckResult {
    let places = case.places(4, 4096);
    skip_if!(places.is_empty(), "the device is too small");
    let keeps = case.keeps();
    for (index, place) in places.into_iter().enumerate() {
        let before = if keeps {
            case.noise(place.end - place.start)
        } else {
            case.read(place.clone()).await?
        };
        if keeps {
            case.write(place.start, &before).await?;
        }
        let after = case.noise(place.end - place.start);
        let device = case.device.clone();
        let at = place.start;
        let len = before.len();
        let bytes = after.clone();
        let there = WorkerHandle::to(index + 1).spawn(move || async move {
            let reply = device.submit(Request::read(at, Reservation::unpooled(len))).await;
            let found = read_bytes(reply.map_err(|error| error.to_string())?, len)?;
            if keeps {
                let write = device.submit(Request::write(at, Data::copy_of(&bytes)));
                write.await.map_err(|error| error.to_string())?;
            }
            Ok::<_, String>(found)
        });
        let limit = case.options.request_timeout;
        let there = blockhaul_io::timeout(limit, there).await;
        let there = there.map_err(|_| format!("requests on worker {} never end", index + 1))?;
        let found = there.map_err(|lost| lost.to_string())??;
        same(at, &found, &before)?;
        if keeps {
            same(at, &case.read(place).await?, &after)?;
        }
    }
    Ok(Verdict::Held)
}

/// 9. It is called on any worker, on several at the same time.
pub(super) async fn workers_write_disjoint_ranges(case: CheckCase) -> CheckResult {
    let places = case.places(96, 2048);
    skip_if!(places.len() < 3, "the device is too small");
    let keeps = case.keeps();
    let mut expected = Vec::new();
    for place in &places {
        expected.push(if keeps {
            case.noise(place.end - place.start)
        } else {
            case.read(place.clone()).await?
        });
    }
    let mut workers = Vec::new();
    for worker in 0..blockhaul_io::worker_count() {
        let device: Arc<dyn Device> = case.device.clone();
        let all = places.iter().map(|place| place.start).zip(expected.iter().cloned());
        let mine: Vec<(u64, Vec<u8>)> =
            all.skip(worker).step_by(blockhaul_io::worker_count()).collect();
        workers.push(WorkerHandle::to(worker).spawn(move || async move {
            let mut out = Vec::new();
            for (at, bytes) in &mine {
                let request = if keeps {
                    Request::write(*at, Data::copy_of(bytes))
                } else {
                    Request::read(*at, Reservation::unpooled(bytes.len()))
                };
                out.push(device.submit(request));
            }
            for (pending, (at, bytes)) in out.into_iter().zip(&mine) {
                let reply = pending.await.map_err(|error| error.to_string())?;
                if !keeps {
                    same(*at, &read_bytes(reply, bytes.len())?, bytes)?;
                }
            }
            Ok::<_, String>(())
        }));
    }
    for ticket in workers {
        let ended = blockhaul_io::timeout(case.options.request_timeout, ticket).await;
        let ended = ended.map_err(|_| "requests of several workers never end".to_string())?;
        ended.map_err(|lost| lost.to_string())??;
    }
    for (place, expected) in places.iter().zip(&expected) {
        same(place.start, &case.read(place.clone()).await?, expected)?;
    }
    Ok(Verdict::Held)
}
