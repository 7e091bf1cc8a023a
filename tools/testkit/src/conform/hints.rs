//! Hints: promises of the facts about memory, the path of payloads and all contents hold, also
//! through layers that pass the promise on.

use blockhaul_block::{Can, ContextSet, Reply, Request};
use blockhaul_io::{Data, File, ParkedPayload, Pool, Reservation};

use super::case::{CheckCase, read_bytes, same};
use super::verdict::{CheckResult, Verdict, ensure, skip_if};

/// Length of a payload that is worth parking.
const PARKED: u64 = 64 << 10;
/// Turns of other tasks, in which a request proceeds as far as it can without memory.
const TURNS: usize = 50;

/// `Facts::zeroed`: the whole device reads as zeroes.
pub(super) async fn a_zeroed_device_reads_as_zeroes(case: CheckCase) -> CheckResult {
    skip_if!(!case.facts.zeroed, "it is not said to be zeroed");
    for window in case.most() {
        let at = window.start;
        let found = case.read(window).await?;
        let wrong = found.iter().position(|&byte| byte != 0);
        ensure!(wrong.is_none(), "the byte at {} is not zero", at + wrong.unwrap_or(0) as u64);
    }
    Ok(Verdict::Held)
}

/// `Facts::claims_room`: a read with a late reservation waits for its memory, and never exceeds the
/// limit.
pub(super) async fn late_room_has_its_memory_with_the_answer(case: CheckCase) -> CheckResult {
    skip_if!(!case.facts.claims_room, "it does not claim late room");
    let reach = case.reach();
    skip_if!(reach == 0, "the device is empty");
    for len in [case.up(4096).min(reach), case.chunk().min(reach)] {
        for at in [0, case.down(reach / 2).min(reach - len), reach - len] {
            let expected = case.read(at..at + len).await?;
            let cost = Pool::cost(len as usize);
            let memory = Pool::new(cost);
            let asked = Pool::new(cost);
            // Exhaust the memory.
            let taken = memory.try_reserve(len as usize).ok_or("a pool is used up at once")?;
            let room = asked.reserve_late(len as usize, &memory).await;
            let room = room.map_err(|error| error.to_string())?;
            let reading = case.device.submit(Request::read(at, room));
            for _ in 0..TURNS {
                blockhaul_io::yield_now().await;
            }
            let beyond = memory.peak() > memory.limit();
            ensure!(!beyond, "a read of {len} bytes at {at} has taken memory that was not there");
            drop(taken);
            let outcome = case.wait(reading, "a read with late room").await?;
            let reply = outcome.map_err(|error| format!("a read with late room: {error}"))?;
            same(at, &read_bytes(reply, len as usize)?, &expected)?;
            let beyond = memory.peak() > memory.limit();
            ensure!(!beyond, "a read of {len} bytes at {at} has taken memory beyond the limit");
        }
    }
    Ok(Verdict::Held)
}

/// A payload that is parked in the kernel; none if that is not possible.
fn park(bytes: &[u8]) -> Result<Option<Data>, String> {
    let named = |error: std::io::Error| format!("cannot park a payload: {error}");
    let file = tempfile::tempfile().map_err(named)?;
    std::os::unix::fs::FileExt::write_all_at(&file, bytes, 0).map_err(named)?;
    let room = Reservation::unpooled(bytes.len()).parkable();
    let Ok(mut parked) = ParkedPayload::begin(room) else { return Ok(None) };
    parked.fill_from_file(File::new(file.into()), 0).map_err(named)?;
    Ok((parked.missing() == 0).then(|| Data::from(parked)))
}

/// `Facts::takes_parked`: a parked payload is written, and no layer reads it on the way.
pub(super) async fn a_parked_payload_is_written_unseen(case: CheckCase) -> CheckResult {
    skip_if!(!case.facts.takes_parked, "it does not take parked payloads");
    skip_if!(!case.can(Can::WRITE), "the device is read-only");
    skip_if!(u64::from(case.facts.block.maximum) < PARKED, "writes are shorter");
    for place in case.places(3, PARKED) {
        let bytes = case.noise(place.end - place.start);
        let Some(data) = park(&bytes)? else {
            return Ok(Verdict::Skipped("payloads cannot be parked here".to_string()));
        };
        let model = case.subject.model.as_ref();
        let before = model.map(|model| model.parked_writes());
        case.ok(Request::write(place.start, data)).await?;
        let unseen = model.map(|model| model.parked_writes()) > before || model.is_none();
        ensure!(unseen, "the payload at {} was looked at", place.start);
        if case.keeps() {
            same(place.start, &case.read(place).await?, &bytes)?;
        }
    }
    Ok(Verdict::Held)
}

/// `Facts::contexts`: each of them is answered, alone and with all others.
pub(super) async fn every_context_is_answered(case: CheckCase) -> CheckResult {
    skip_if!(!case.can(Can::EXTENTS), "the device has no extents");
    let all = case.facts.all_contexts();
    let alone = all.iter().map(|index| ContextSet::empty().with(index));
    let asked: Vec<_> = alone.chain([all]).collect();
    for window in case.windows() {
        let len = window.end - window.start;
        for &contexts in &asked {
            let reply = case.ok(Request::extents(window.start, len, contexts)).await?;
            let Reply::Extents(lists) = reply else { return Err("no extents".to_string()) };
            let found = lists.len();
            let wanted = contexts.count();
            ensure!(found == wanted, "{found} lists for {wanted} contexts");
            let fits = lists.iter().all(|list| (1..=len).contains(&list.total()));
            ensure!(fits, "a list is empty, or longer than the {len} bytes asked for");
        }
    }
    Ok(Verdict::Held)
}
