//! `extents-cache`: requests the extents of a slow source once, in bulk, and caches them.
//!
//! - `map`: the cached extents. `pace`: whether queries are slow enough to cache them. `unflushed`: what a
//!   crash of the server below may undo.
//!
//! All handles of the layer share the cache. Changes through any of them keep it valid: when a
//! change has completed, its range is known to be data (write) or zeroes (zero with FUA), or is dropped
//! (zero, trim, and all other contexts); replies to requests that were in flight at that moment are not
//! cached for the range. What was zeroed or trimmed is not cached before a flush.

mod map;
mod pace;
mod unflushed;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use blockhaul_block::{
    BASE_ALLOCATION, Can, ContextSet, Device, Error, Extents, Facts, FileRange, Kind, LeaseAccess,
    Op, OpKind, Outcome, PendingRequest, Reply, Request, RequestFlags, Result, ZERO,
};
use blockhaul_catalog::{Layer, LayerKind, Param, ParamKind, ParamValues};
use blockhaul_io::{Completer, Ticket};

use crate::declared::{opened, param, param_or, usage};
use crate::per_disk::PerDisk;
use map::{ExtentMap, forget_oldest};
use pace::{PaceMeter, QueryPace};
use unflushed::UnflushedChanges;

/// Maximum number of runs in one reply; the caller requests the rest again.
const RUNS_IN_ANSWER: usize = 64 << 10;
/// Changed ranges recorded for an extents request before all of its reply counts as changed.
const STALE_MAX: usize = 64;

/// The layer `extents-cache`.
pub static EXTENTS_CACHE: LayerKind = LayerKind {
    name: "extents-cache",
    summary: "asks a slow source for its extents once, in bulk, and remembers them",
    manual: "The first request for extents queries the device below for all extents from its offset on, in \
one request, and the reply is cached for all connections. Requests for a range that is being \
queried wait for the reply. Use it for sources where each such request takes long or blocks \
reads, whatever its length: VMware's library, disks behind slow networks, files with very many \
extents.

With `slow=TIME` the layer measures the first queries. It passes queries through unchanged if most \
of them take less time and do not hold up reads.

Writes, zero and trim requests through this layer update the cache; extents of ranges that were zeroed \
or trimmed are cached after the next flush only. Changes by other means \
(another program, another export without this layer) are not detected: use it only if no other \
program changes the disk. When the memory is full, the least recently used extents are dropped \
and queried again.",
    example: r#"
blockhaul copy --source-layer 'delay?extents=50ms' --source-layer extents-cache \
  sample:1G null:
"#,
    needs_content: false,
    writes_below: true,
    transparent: true,
    params: PARAMS,
    changeable: &[],
    configure: |args| configure(args),
};

const PARAMS: &[Param] = &[
    param_or("memory", ParamKind::Size, "64M", "Maximum memory for the cached extents."),
    param("bulk", ParamKind::Size, "Maximum range of one query [default: up to the end]."),
    param(
        "slow",
        ParamKind::Duration,
        "Cache only if the median of the first queries is above this, or if they hold up reads \
         [default: always cache].",
    ),
];

fn configure(args: &ParamValues) -> Result<Arc<dyn Layer>> {
    let memory = args.size("memory").unwrap_or(64 << 20);
    let bulk = args.size("bulk").unwrap_or(u64::MAX);
    if bulk == 0 {
        return Err(usage("extents-cache: bulk must be above 0"));
    }
    let slow = args.duration("slow");
    let disks = PerDisk::default();
    opened(move |below| {
        let facts = below.device.facts();
        if !facts.can.contains(Can::EXTENTS) || facts.emulated.contains(Can::EXTENTS) {
            // There are no extents to request.
            return Ok(below.device);
        }
        let known = disks.get(&below, || Ok(ExtentsCache::new(memory, bulk, slow)))?;
        if let Err(error) = known.adopt(&facts) {
            // With `slow` nobody may know of this layer: who opens the device compares its handles.
            let passes = slow.is_some() && !below.intent.write;
            return if passes { Ok(below.device) } else { Err(error) };
        }
        let handle = known.next_handle();
        Ok(Arc::new(ExtentsCacheDevice { inner: below.device, facts, known, handle }))
    })
}

/// A request that changes a range.
struct ChangeRequest {
    kind: OpKind,
    start: u64,
    end: u64,
    fua: bool,
}

/// State shared by all handles.
struct ExtentsCache {
    memory: u64,
    bulk: u64,
    measure: Arc<PaceMeter>,
    state: Mutex<ExtentsCacheState>,
}

#[derive(Default)]
struct ExtentsCacheState {
    /// One for each context of the device.
    maps: Vec<ExtentMap>,
    size: u64,
    /// The index of `base:allocation`: for this context the state after a change is known.
    base: Option<usize>,
    asking: Vec<PendingExtents>,
    /// What is not cached before a flush.
    unflushed: UnflushedChanges,
    /// Number of handles that were opened.
    handles: u64,
    /// Counts requests, as a clock for the last use.
    now: u64,
    /// The longest range that the device describes in one reply, once it has described less than
    /// it was asked for: further queries are no longer, so that several can be in flight.
    reach: Option<u64>,
}

/// An extents request in flight to the device.
struct PendingExtents {
    id: u64,
    contexts: ContextSet,
    at: u64,
    end: u64,
    /// Ranges changed since it was submitted.
    stale: Vec<(u64, u64)>,
    waiting: Vec<Completer<Result<()>>>,
}

/// Parameters of requests and replies.
#[derive(Clone, Copy)]
struct QueryParameters {
    /// Minimum block of the device.
    minimum: u64,
    /// Maximum number of runs in a reply.
    runs: usize,
}

/// How to handle a request for extents.
enum QueryPlan {
    Known(Vec<Extents>),
    Wait(Ticket<Result<()>>),
    Ask { id: u64, at: u64, end: u64 },
}

impl ExtentsCache {
    fn new(memory: u64, bulk: u64, slow: Option<Duration>) -> ExtentsCache {
        let measure = Arc::new(PaceMeter::new(slow));
        ExtentsCache { memory, bulk, measure, state: Mutex::default() }
    }

    /// Checks the device below against the first one; all handles must be on the same storage.
    fn adopt(&self, facts: &Facts) -> Result<()> {
        let mut state = self.lock();
        if state.maps.is_empty() {
            state.maps.resize_with(facts.contexts.len(), ExtentMap::default);
            state.size = facts.size;
            state.base = facts.contexts.iter().position(|context| context == BASE_ALLOCATION);
        }
        if state.maps.len() != facts.contexts.len() || state.size != facts.size {
            return Err(usage(format!(
                "extents-cache: {} is not the cached device: give each device a layer of its own",
                facts.name
            )));
        }
        Ok(())
    }

    /// The number of a new handle.
    fn next_handle(&self) -> u64 {
        let mut state = self.lock();
        state.handles += 1;
        state.handles
    }

    fn plan(&self, at: u64, end: u64, contexts: ContextSet, ask: QueryParameters) -> QueryPlan {
        let mut state = self.lock();
        let ExtentsCacheState { maps, asking, now, size, reach, .. } = &mut *state;
        *now += 1;
        if contexts.iter().all(|index| maps.get(index).is_some_and(|map| map.knows(at))) {
            let asked = maps.iter_mut().enumerate().filter(|(index, _)| contexts.contains(*index));
            let found = asked.map(|(_, map)| map.find(at, end, ask.runs, *now));
            return QueryPlan::Known(found.collect());
        }
        let fits = |asking: &&mut PendingExtents| {
            asking.at <= at && at < asking.end && asking.contexts.includes(contexts)
        };
        if let Some(asking) = asking.iter_mut().find(fits) {
            let (completer, ticket) = blockhaul_io::ticket();
            asking.waiting.push(completer);
            return QueryPlan::Wait(ticket);
        }
        // Up to the next known extent of the first context that is unknown here, and the requested
        // range.
        let unknown = contexts.iter().filter_map(|index| maps.get(index)).find(|m| !m.knows(at));
        let mut until = unknown.and_then(|map| map.next_known(at)).unwrap_or(u64::MAX);
        for other in asking.iter().filter(|other| other.at > at) {
            until = until.min(other.at);
        }
        let minimum = ask.minimum;
        // Until queries are known to be slow they are no longer than the callers'.
        let bulk = if self.measure.pace() == QueryPace::Slow { self.bulk } else { 0 };
        let bulk = bulk.min(reach.unwrap_or(u64::MAX));
        let bulk = at.saturating_add(bulk).max(end);
        let bulk = bulk.checked_next_multiple_of(minimum).unwrap_or(u64::MAX);
        // All of these are multiples of the minimum block or the end, and `end` is inside the device.
        let until = until.min(bulk).max(at + minimum).min(*size);
        let id = *now;
        let stale = Vec::new();
        let waiting = Vec::new();
        asking.push(PendingExtents { id, contexts, at, end: until, stale, waiting });
        QueryPlan::Ask { id, at, end: until }
    }

    /// Adds a reply to the cache, except for what has changed since the request, and wakes its
    /// waiters.
    fn learn(&self, id: u64, contexts: ContextSet, answer: &Result<Vec<Extents>>) {
        let mut state = self.lock();
        let ExtentsCacheState { maps, asking, now, reach, unflushed, .. } = &mut *state;
        let Some(index) = asking.iter().position(|asking| asking.id == id) else { return };
        let asking = asking.swap_remove(index);
        if let Ok(lists) = answer {
            let told = lists.iter().map(Extents::total).min().unwrap_or(0);
            if told < asking.end - asking.at {
                *reach = Some(told.max(reach.unwrap_or(0)));
            }
            for (index, list) in contexts.iter().zip(lists) {
                let Some(map) = maps.get_mut(index) else { continue };
                map.learn(asking.at, list, *now);
                for (start, end) in asking.stale.iter().copied().chain(unflushed.ranges()) {
                    map.forget(start, end);
                }
            }
        }
        forget_oldest(maps, self.memory);
        drop(state);
        let result = answer.as_ref().map(drop).map_err(Error::clone);
        for completer in asking.waiting {
            completer.complete(result.clone());
        }
    }

    /// A change through a handle has completed (`done`) or failed.
    fn changed(&self, handle: u64, change: &ChangeRequest, done: bool) {
        let &ChangeRequest { kind, start, end, fua } = change;
        let durable = done && fua;
        let mut state = self.lock();
        let ExtentsCacheState { maps, asking, base, unflushed, .. } = &mut *state;
        if kind != OpKind::Write && !durable {
            unflushed.add(handle, start, end);
        }
        for (index, map) in maps.iter_mut().enumerate() {
            match kind {
                OpKind::Write if *base == Some(index) => map.set(start, end, 0),
                OpKind::Zero if *base == Some(index) && durable => map.set(start, end, ZERO),
                _ => map.forget(start, end),
            }
        }
        for asking in asking.iter_mut().filter(|asking| asking.at < end && start < asking.end) {
            if asking.stale.len() == STALE_MAX {
                asking.stale.clear();
                asking.stale.push((asking.at, asking.end));
            }
            if asking.stale.first() != Some(&(asking.at, asking.end)) {
                asking.stale.push((start, end));
            }
        }
    }

    /// A measured query has ended, the first one to show how long they take.
    fn decided(&self, name: &str, pace: QueryPace, median: Duration) {
        if pace == QueryPace::Slow {
            let milliseconds = median.as_millis();
            log::info!(
                "{name}: a query for extents takes {milliseconds} ms; asking for many at once, and caching \
                 them"
            );
            return;
        }
        // Those who wait for a reply get it; nobody looks for others.
        let mut state = self.lock();
        state.maps.iter_mut().for_each(|map| *map = ExtentMap::default());
    }

    fn lock(&self) -> MutexGuard<'_, ExtentsCacheState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A request in flight; if its task ends without a reply, the waiters are notified.
struct QueryGuard {
    known: Arc<ExtentsCache>,
    id: u64,
    contexts: ContextSet,
}

impl Drop for QueryGuard {
    fn drop(&mut self) {
        let lost = Err(Error::new(Kind::Disconnected, "the query for extents got lost"));
        self.known.learn(self.id, self.contexts, &lost);
    }
}

struct ExtentsCacheDevice {
    inner: Arc<dyn Device>,
    facts: Arc<Facts>,
    known: Arc<ExtentsCache>,
    handle: u64,
}

impl Device for ExtentsCacheDevice {
    fn facts(&self) -> Arc<Facts> {
        self.facts.clone()
    }

    fn submit(&self, request: Request) -> PendingRequest {
        match request.op {
            // nbd: trim.no-assumption
            Op::Write(_) | Op::Zero | Op::Trim => self.change(request),
            Op::Extents(contexts) if self.known.measure.pace() != QueryPace::Quick => {
                self.extents(request, contexts)
            }
            Op::Flush => self.flush(request),
            Op::Read(_) if self.known.measure.read_begins() => self.measured_read(request),
            _ => self.inner.submit(request),
        }
    }

    fn file_at(&self, at: u64, len: u64, access: LeaseAccess) -> Option<FileRange> {
        match access {
            LeaseAccess::Read => self.inner.file_at(at, len, access),
            // Writes that bypass the layer would go unnoticed.
            LeaseAccess::Write => None,
        }
    }
}

impl ExtentsCacheDevice {
    /// A read during a query that is being measured.
    fn measured_read(&self, request: Request) -> PendingRequest {
        let known = self.known.clone();
        match self.inner.submit(request).now() {
            Ok(outcome) => {
                known.measure.read_ended();
                PendingRequest::ready(outcome)
            }
            Err(pending) => PendingRequest::start(async move {
                let outcome = pending.await;
                known.measure.read_ended();
                outcome
            }),
        }
    }

    fn change(&self, request: Request) -> PendingRequest {
        let change = ChangeRequest {
            kind: request.kind(),
            start: request.at,
            end: request.end().unwrap_or(u64::MAX),
            fua: request.flags.contains(RequestFlags::FUA),
        };
        let known = self.known.clone();
        let handle = self.handle;
        self.noted(request, move |outcome| known.changed(handle, &change, outcome.is_ok()))
    }

    fn flush(&self, request: Request) -> PendingRequest {
        let known = self.known.clone();
        let handle = self.handle;
        let so_far = known.lock().unflushed.so_far();
        let all = self.facts.can.contains(Can::MULTI_CONN);
        self.noted(request, move |outcome| {
            if outcome.is_ok() {
                known.lock().unflushed.flushed(handle, so_far, all);
            }
        })
    }

    /// Calls `note` with the outcome of a request.
    fn noted(&self, request: Request, note: impl FnOnce(&Outcome) + 'static) -> PendingRequest {
        match self.inner.submit(request).now() {
            Ok(outcome) => {
                note(&outcome);
                PendingRequest::ready(outcome)
            }
            Err(pending) => PendingRequest::start(async move {
                let outcome = pending.await;
                note(&outcome);
                outcome
            }),
        }
    }

    fn extents(&self, request: Request, contexts: ContextSet) -> PendingRequest {
        let at = request.at;
        let end = request.end().unwrap_or(u64::MAX);
        let minimum = u64::from(self.facts.block.minimum.max(1));
        let one = request.flags.contains(RequestFlags::ONE_EXTENT);
        let ask = QueryParameters { minimum, runs: if one { 1 } else { RUNS_IN_ANSWER } };
        let plan = match self.known.plan(at, end, contexts, ask) {
            QueryPlan::Known(lists) => return PendingRequest::ready(Ok(Reply::Extents(lists))),
            plan => plan,
        };
        let cached = QuerySource { inner: self.inner.clone(), known: self.known.clone(), contexts };
        PendingRequest::start(async move {
            let mut plan = plan;
            loop {
                match plan {
                    QueryPlan::Known(lists) => return Ok(Reply::Extents(lists)),
                    QueryPlan::Wait(ticket) => match ticket.await {
                        // The connection of the requesting handle is lost; this handle's may work.
                        Ok(Err(error)) if error.kind() != Kind::Disconnected => return Err(error),
                        _ => {}
                    },
                    QueryPlan::Ask { id, at, end: until } => {
                        let mut lists = cached.ask(id, at, until).await?;
                        for list in &mut lists {
                            list.truncate(end - at);
                            if one {
                                list.first_only();
                            }
                        }
                        return Ok(Reply::Extents(lists));
                    }
                }
                plan = cached.known.plan(at, end, contexts, ask);
            }
        })
    }
}

/// What a query needs of a handle.
struct QuerySource {
    inner: Arc<dyn Device>,
    known: Arc<ExtentsCache>,
    contexts: ContextSet,
}

impl QuerySource {
    /// Asks the device about a range, as planned, and adds the reply to the cache.
    async fn ask(&self, id: u64, at: u64, until: u64) -> Result<Vec<Extents>> {
        let QuerySource { inner, known, contexts } = self;
        let on_its_way = QueryGuard { known: known.clone(), id, contexts: *contexts };
        let measured = known.measure.begin();
        let answer = inner.submit(Request::extents(at, until - at, *contexts)).await;
        if let Some((pace, median)) = measured.and_then(|query| known.measure.end(&query)) {
            known.decided(&inner.facts().name, pace, median);
        }
        let lists = match answer {
            Ok(Reply::Extents(lists)) if lists.len() == contexts.count() => Ok(lists),
            Ok(_) => Err(Error::misfit()),
            Err(error) => Err(error),
        };
        known.learn(id, *contexts, &lists);
        drop(on_its_way);
        lists
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_while_an_answer_is_awaited_is_not_forgotten() {
        let known = ExtentsCache::new(1 << 20, u64::MAX, None);
        let contexts = vec![BASE_ALLOCATION.to_string()];
        known.adopt(&Facts { contexts, ..Facts::new("device", 1000) }).unwrap();
        let base = ContextSet::first();
        let ask = QueryParameters { minimum: 1, runs: 9 };
        let QueryPlan::Ask { id, at: 0, end: 1000 } = known.plan(0, 10, base, ask) else {
            panic!("nothing is known");
        };
        assert!(matches!(known.plan(500, 600, base, ask), QueryPlan::Wait(_)));
        known.changed(
            1,
            &ChangeRequest { kind: OpKind::Write, start: 100, end: 200, fua: false },
            true,
        );
        known.learn(id, base, &Ok(vec![Extents::one(1000, ZERO)]));
        assert!(matches!(known.plan(99, 600, base, ask), QueryPlan::Known(_)));
        let QueryPlan::Ask { id, at: 100, end: 200 } = known.plan(100, 600, base, ask) else {
            panic!("the changed range is not known");
        };
        // Many changes invalidate all of a reply.
        for at in 0..100 {
            let change = ChangeRequest {
                kind: OpKind::Trim,
                start: 190 + at % 5,
                end: 195 + at % 5,
                fua: true,
            };
            known.changed(1, &change, true);
        }
        known.learn(id, base, &Ok(vec![Extents::one(100, ZERO)]));
        assert!(matches!(known.plan(150, 160, base, ask), QueryPlan::Ask { .. }));
    }
}
