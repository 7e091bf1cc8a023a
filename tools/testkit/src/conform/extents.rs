//! Sentence 8 of the contract: reported extents are true.

use blockhaul_block::{Can, ContextSet, Extents, HOLE, Reply, Request, RequestFlags, ZERO};

use super::case::CheckCase;
use super::verdict::{CheckResult, Verdict, ensure, skip_if};

/// Maximum number of replies for one walk.
const ANSWERS_MAX: usize = 200_000;

/// Requests extents once and checks the shape of the reply.
pub(super) async fn ask(
    case: &CheckCase,
    at: u64,
    len: u64,
    contexts: ContextSet,
    flags: RequestFlags,
) -> Result<Vec<Extents>, String> {
    let what = format!("extents {at}+{len} {flags:?}");
    let reply = case.ok(Request::extents(at, len, contexts).with(flags)).await?;
    let Reply::Extents(lists) = reply else { return Err(format!("{what}: {reply:?}")) };
    let got = lists.len();
    let asked = contexts.count();
    ensure!(got == asked, "{what}: {got} lists for {asked} contexts");
    for list in &lists {
        let total = list.total();
        ensure!(total > 0, "{what}: an empty list");
        ensure!(total <= len, "{what}: {total} bytes are beyond the request's end");
        ensure!(list.runs().iter().all(|run| run.len > 0), "{what}: a run of length 0");
        let sum: u64 = list.runs().iter().map(|run| run.len).sum();
        ensure!(sum == total, "{what}: runs of {sum} bytes, {total} in all");
        for (start, run) in list.ranges(at) {
            let is_last = start.checked_add(run.len) == Some(case.facts.size);
            let fits = run.len.is_multiple_of(case.minimum()) || is_last;
            ensure!(fits, "{what}: a run of {} bytes at {start} is unaligned", run.len);
        }
        let one = !flags.contains(RequestFlags::ONE_EXTENT) || list.len() == 1;
        ensure!(one, "{what}: {} extents instead of one", list.len());
    }
    Ok(lists)
}

/// 8. Each list starts at the request's offset, is not empty and ends within the request; a walk
///    reaches the end.
pub(super) async fn extents_start_at_the_offset_and_end_within_the_request(
    case: CheckCase,
) -> CheckResult {
    skip_if!(!case.can(Can::EXTENTS), "the device has no extents");
    skip_if!(case.reach() == 0, "the device is empty");
    if case.keeps() {
        for (index, place) in case.places(40, 6000).into_iter().enumerate() {
            let len = place.end - place.start;
            match index % 3 {
                0 if case.can(Can::ZERO) => {
                    case.ok(Request::zero(place.start, len)).await?;
                }
                1 if case.can(Can::TRIM) => {
                    case.ok(Request::trim(place.start, len)).await?;
                }
                _ => case.write(place.start, &case.noise(len)).await?,
            }
        }
    }
    let all = case.facts.all_contexts();
    let minimum = case.minimum();
    for window in case.windows() {
        let size = window.end - window.start;
        for _ in 0..60 {
            let at = window.start + case.down(case.random(size));
            let len = case.up(1 + case.random(window.end - at)).min(window.end - at);
            ask(&case, at, len, all, RequestFlags::empty()).await?;
        }
        for len in [minimum, case.up(513), case.up(4097)] {
            let len = len.min(size);
            ask(&case, window.start, len, all, RequestFlags::empty()).await?;
            ask(&case, window.end - len, len, all, RequestFlags::empty()).await?;
        }
    }
    for index in all.iter() {
        let only = ContextSet::empty().with(index);
        walk(&case, 0, case.reach(), only, |_, _, _| Ok(())).await?;
    }
    // The same lists, in order of context, whether requested together or alone.
    let together = ask(&case, 0, case.reach().min(1 << 20), all, RequestFlags::ONE_EXTENT).await?;
    for (list, index) in together.iter().zip(all.iter()) {
        let only = ContextSet::empty().with(index);
        let alone =
            ask(&case, 0, case.reach().min(1 << 20), only, RequestFlags::ONE_EXTENT).await?;
        let states = (list.runs()[0].state, alone[0].runs()[0].state);
        ensure!(states.0 == states.1, "context {index}: states {states:?} for the same bytes");
    }
    Ok(Verdict::Held)
}

/// Visits all runs of a range in one context: offset, length, state.
async fn walk(
    case: &CheckCase,
    start: u64,
    end: u64,
    context: ContextSet,
    mut visit: impl FnMut(u64, u64, u64) -> Result<(), String>,
) -> Result<(), String> {
    let mut at = start;
    let mut answers = 0;
    while at < end {
        let lists = ask(case, at, end - at, context, RequestFlags::empty()).await?;
        for (here, run) in lists[0].ranges(at) {
            visit(here, run.len, run.state)?;
        }
        at += lists[0].total();
        answers += 1;
        ensure!(answers < ANSWERS_MAX, "{answers} answers lead to {at} of {end} only");
    }
    Ok(())
}

/// 8. With ONE_EXTENT each list has one entry.
pub(super) async fn one_extent_means_one(case: CheckCase) -> CheckResult {
    skip_if!(!case.can(Can::EXTENTS), "the device has no extents");
    let places = case.places(20, 4096);
    skip_if!(places.is_empty(), "the device is too small");
    if case.keeps() {
        for place in places.iter().step_by(2) {
            case.write(place.start, &case.noise(place.end - place.start)).await?;
        }
    }
    let all = case.facts.all_contexts();
    for place in places {
        for len in [place.end - place.start, case.reach() - place.start] {
            ask(&case, place.start, len, all, RequestFlags::ONE_EXTENT).await?;
        }
    }
    ask(&case, 0, case.reach(), all, RequestFlags::ONE_EXTENT).await?;
    Ok(Verdict::Held)
}

/// 8. Data must never be called zero or hole.
pub(super) async fn data_is_never_called_zero_or_hole(case: CheckCase) -> CheckResult {
    skip_if!(!case.can(Can::EXTENTS), "the device has no extents");
    skip_if!(case.reach() == 0, "the device is empty");
    if case.keeps() {
        for (index, place) in case.places(200, 3000).into_iter().enumerate() {
            let len = place.end - place.start;
            match index % 5 {
                0 if case.can(Can::ZERO) => {
                    case.ok(Request::zero(place.start, len)).await?;
                }
                1 if case.can(Can::TRIM) => {
                    case.ok(Request::trim(place.start, len)).await?;
                }
                2 => {
                    // One byte is not zero, the rest is.
                    let mut bytes = vec![0; len as usize];
                    bytes[case.random(len) as usize] = 1;
                    case.write(place.start, &bytes).await?;
                }
                _ => case.write(place.start, &case.noise(len)).await?,
            }
        }
    }
    for window in case.most() {
        let mut runs = Vec::new();
        let start = window.start;
        let end = window.end;
        walk(&case, start, end, ContextSet::first(), |at, len, state| {
            if state & (ZERO | HOLE) != 0 {
                runs.push((at, len, state));
            }
            Ok(())
        })
        .await?;
        for (run_at, run_len, state) in runs {
            let mut at = run_at;
            while at < run_at + run_len {
                let end = (run_at + run_len).min(at + case.chunk());
                let bytes = case.read(at..end).await?;
                if let Some(index) = bytes.iter().position(|&byte| byte != 0) {
                    let byte = bytes[index];
                    let offset = at + index as u64;
                    return Err(format!(
                        "extents call {run_at}+{run_len} {}, but byte {offset} is {byte:#04x}",
                        name(state)
                    ));
                }
                at = end;
            }
        }
    }
    Ok(Verdict::Held)
}

fn name(state: u64) -> &'static str {
    match state & (HOLE | ZERO) {
        HOLE => "a hole",
        ZERO => "zero",
        _ => "a hole and zero",
    }
}

// nbd: zeroes.no-hole
/// 7. Zero may free the storage unless `NO_HOLE`.
pub(super) async fn no_hole_keeps_the_range_allocated(case: CheckCase) -> CheckResult {
    skip_if!(!case.can(Can::WRITE | Can::ZERO | Can::EXTENTS), "the device cannot show it");
    skip_if!(!case.keeps(), "the device does not keep writes");
    let unit = u64::from(case.facts.allocation_unit.max(1)).max(4096);
    // Pairs of neighbours: a unit within is whole, wherever the first one starts.
    for place in case.places(8, unit * 3) {
        let len = place.end - place.start;
        case.write(place.start, &case.noise(len)).await?;
        case.ok(Request::zero(place.start, len).with(RequestFlags::NO_HOLE)).await?;
        walk(&case, place.start, place.end, ContextSet::first(), |at, len, state| {
            ensure!(state & HOLE == 0, "{at}+{len} is a hole after zero with NO_HOLE");
            Ok(())
        })
        .await?;
    }
    Ok(Verdict::Held)
}
