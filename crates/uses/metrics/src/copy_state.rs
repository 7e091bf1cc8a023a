//! The state of running copies, for displays of progress and for the page.

use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use blockhaul_block::{LATENCY_BOUNDS, LatencySnapshot};
use blockhaul_engine::{CopyProgress, MapCell, MapSnapshot, ProgressSnapshot, RateLimit};
use serde_json::{Value, json};

use crate::text::seconds_since_1970;

/// Time constant of the displayed rate: a change shows after a few seconds.
const MEMORY: Duration = Duration::from_millis(1900);
/// Minimum interval between two values of the rate.
const APART: Duration = Duration::from_millis(10);
/// The part of the waiting time from which on one side is the slower one.
const SLOWER: f64 = 0.6;
/// The part of a rate limit from which on the limit slows the copy down.
const AT_LIMIT: f64 = 0.9;
/// Maximum number of cells in the maps of all disks together, as long as each has [`CELLS_MIN`].
const CELLS_MAX: usize = 8192;
/// Minimum number of cells of a map, as far as there are.
const CELLS_MIN: usize = 16;

/// An observed copy.
#[derive(Debug, Clone, Default)]
pub struct ObservedCopy {
    /// Its name, if there are several.
    pub name: Option<String>,
    /// Source and target, without parameters.
    pub ends: [String; 2],
    /// Its counters.
    pub progress: Arc<CopyProgress>,
    /// How it ended, if there are several: `None` for success, else the error.
    pub result: Arc<OnceLock<Option<String>>>,
}

/// The end of a command.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CommandEnd {
    /// The number that the command returns, from 0 to 255; 0 for success.
    pub status: u8,
    /// Why it failed.
    pub error: Option<String>,
}

/// An observer of running copies, which share a rate limit: it computes their rate.
pub struct CopyObserver {
    command: &'static str,
    disks: Vec<ObservedCopy>,
    limit: Option<Arc<RateLimit>>,
    started: Instant,
    pace: Mutex<SmoothedRates>,
    end: OnceLock<Arc<CopySnapshot>>,
}

impl CopyObserver {
    /// Observes these copies from now on.
    pub fn new(disks: Vec<ObservedCopy>, limit: Option<Arc<RateLimit>>) -> CopyObserver {
        let started = blockhaul_io::now();
        let pace = Mutex::new(SmoothedRates::new());
        CopyObserver { command: COPY, disks, limit, started, pace, end: OnceLock::new() }
    }

    /// Observes other work than a copy, by the name of its command.
    #[must_use]
    pub fn of_command(self, command: &'static str) -> CopyObserver {
        CopyObserver { command, ..self }
    }

    /// The observed copies.
    pub fn disks(&self) -> &[ObservedCopy] {
        &self.disks
    }

    /// Their rate limit.
    pub fn limit(&self) -> Option<&RateLimit> {
        self.limit.as_deref()
    }

    /// Takes the last snapshot, which is the answer from now on.
    pub fn finish(&self, end: CommandEnd) {
        let view = Arc::new(self.take(Some(end)));
        // A second end changes nothing.
        let _ = self.end.set(view);
    }

    /// How the command ended; `None` while it runs.
    pub fn end(&self) -> Option<&CommandEnd> {
        self.end.get()?.end.as_ref()
    }

    /// A snapshot of the counters, which also updates the rate; the last one after the end.
    pub fn view(&self) -> Arc<CopySnapshot> {
        self.end.get().cloned().unwrap_or_else(|| Arc::new(self.take(None)))
    }

    fn take(&self, end: Option<CommandEnd>) -> CopySnapshot {
        let end_time = end.is_some().then(seconds_since_1970);
        let mut view = CopySnapshot {
            end,
            end_time,
            command: self.command,
            ..CopySnapshot::from_copies(&self.disks)
        };
        let mut pace = self.pace.lock().expect("no panic under this lock");
        pace.note(&view.all, view.latency.map(|side| side.seconds));
        view.rate = pace.bytes_per_second();
        view.data_rate = pace.moved.unwrap_or(0.0) as u64;
        view.elapsed = blockhaul_io::elapsed(self.started);
        let limit = self.limit.as_ref().map_or(0, |limit| limit.limits().0);
        view.bottleneck = match &view.end {
            None => bottleneck(pace.waits, pace.moved.unwrap_or(0.0), limit),
            // Of the whole run.
            Some(_) => {
                let moved = view.all.data as f64 / view.elapsed.as_secs_f64().max(0.001);
                bottleneck(view.latency.map(|side| side.seconds), moved, limit)
            }
        };
        drop(pace);
        view
    }
}

/// The command of copies.
const COPY: &str = "copy";

/// The state of all observed copies at one moment.
#[derive(Debug, Default)]
pub struct CopySnapshot {
    /// The name of the command; empty as `copy`.
    pub command: &'static str,
    /// All disks together.
    pub all: ProgressSnapshot,
    /// The disks.
    pub disks: Vec<DiskSnapshot>,
    /// Requests in flight.
    pub in_flight: usize,
    /// Repeated requests: to sources, to targets.
    pub retried: [u64; 2],
    /// Replaced connections: to sources, to targets.
    pub reconnected: [u64; 2],
    /// Request times: of sources, of targets.
    pub latency: [LatencySnapshot; 2],
    /// Bytes by route.
    pub routes: Vec<(&'static str, u64)>,
    /// Bytes per second, smoothed.
    pub rate: u64,
    /// Bytes of data per second, smoothed: without zeroes and holes.
    pub data_rate: u64,
    /// The cause of most waiting: source, target, rate (a limit), or both sides.
    pub bottleneck: Option<&'static str>,
    /// Time since the beginning.
    pub elapsed: Duration,
    /// How the command ended, in the last snapshot.
    pub end: Option<CommandEnd>,
    /// Time at which it ended, in seconds since 1970.
    pub end_time: Option<f64>,
}

/// The state of one disk.
#[derive(Debug)]
pub struct DiskSnapshot {
    /// Its name, if there are several.
    pub name: Option<String>,
    ends: [String; 2],
    now: ProgressSnapshot,
    map: Option<MapSnapshot>,
    result: Option<Option<String>>,
}

impl CopySnapshot {
    fn from_copies(disks: &[ObservedCopy]) -> CopySnapshot {
        let mut view = CopySnapshot::default();
        for disk in disks {
            let now = disk.progress.snapshot();
            let meters = disk.progress.meters();
            view.all = together(&view.all, &now);
            view.in_flight += meters.in_flight;
            for side in [0, 1] {
                view.retried[side] += meters.retried[side];
                view.reconnected[side] += meters.reconnected[side];
                view.latency[side] += meters.latency[side];
            }
            for (index, (name, bytes)) in disk.progress.routes().named().into_iter().enumerate() {
                match view.routes.get_mut(index) {
                    Some((_, sum)) => *sum += bytes,
                    None => view.routes.push((name, bytes)),
                }
            }
            let name = disk.name.clone();
            let ends = disk.ends.clone();
            let map = disk.progress.map();
            view.disks.push(DiskSnapshot {
                name,
                ends,
                now,
                map,
                result: disk.result.get().cloned(),
            });
        }
        view
    }

    /// The map of the disk, if there is only one.
    pub fn map(&self) -> Option<&MapSnapshot> {
        match &self.disks[..] {
            [only] => only.map.as_ref(),
            _ => None,
        }
    }

    /// Whether the command copies, which is more than reading.
    pub fn is_copy(&self) -> bool {
        self.command.is_empty() || self.command == COPY
    }

    /// Number of disks, if there are several; 0 for a copy of one.
    pub fn named(&self) -> usize {
        self.disks.iter().filter(|disk| disk.name.is_some()).count()
    }

    /// Number of completed disks, of several.
    pub fn complete(&self) -> usize {
        let done = |now: &ProgressSnapshot| now.total > 0 && now.done() >= now.total;
        self.disks.iter().filter(|disk| disk.name.is_some() && done(&disk.now)).count()
    }

    /// Remaining seconds, if known.
    pub fn eta(&self) -> Option<u64> {
        let left = self.all.total.checked_sub(position(&self.all))?;
        let known = self.all.total > 0 && self.rate > 0 && self.end.is_none();
        known.then(|| left.div_ceil(self.rate))
    }

    /// As JSON: a line of `--progress=json`, and `/status.json`.
    pub fn json(&self) -> Value {
        let now = &self.all;
        let sides = |[source, target]: [u64; 2]| json!({ "source": source, "target": target });
        let used = self.routes.iter().filter(|(_, bytes)| *bytes > 0);
        let routes: serde_json::Map<_, _> =
            used.map(|(name, bytes)| ((*name).to_string(), (*bytes).into())).collect();
        let mut line = counts(now);
        let command = if self.is_copy() { COPY } else { self.command };
        line["command"] = command.into();
        if !self.is_copy() {
            line["phase"] = command.into();
        }
        line["version"] = env!("CARGO_PKG_VERSION").into();
        line["connections"] = now.connections.into();
        line["requests"] = now.requests.into();
        line["request_size"] = now.request_size.into();
        line["in_flight"] = self.in_flight.into();
        line["retries"] = sides(self.retried);
        line["reconnects"] = sides(self.reconnected);
        line["latency"] = latencies([("source", self.latency[0]), ("target", self.latency[1])]);
        line["bottleneck"] = self.bottleneck.into();
        line["routes"] = routes.into();
        line["rate"] = self.rate.into();
        line["data_rate"] = self.data_rate.into();
        line["eta"] = self.eta().into();
        line["elapsed"] = self.elapsed.as_secs_f64().into();
        line["finished"] = self.end.is_some().into();
        if let Some(end) = &self.end {
            line["success"] = (end.status == 0).into();
            line["exit_status"] = end.status.into();
            line["error"] = end.error.as_deref().into();
            line["end_time"] = self.end_time.into();
        }
        let cells = (CELLS_MAX / self.disks.len().max(1)).max(CELLS_MIN);
        match &self.disks[..] {
            [only] if only.name.is_none() => only.describe(&mut line, cells),
            disks => line["disks"] = disks.iter().map(|disk| disk.json(cells)).collect(),
        }
        line
    }
}

impl DiskSnapshot {
    /// A disk of several.
    fn json(&self, cells: usize) -> Value {
        let mut line = counts(&self.now);
        line["name"] = self.name.as_deref().into();
        let begun = self.now.connections > 0 || self.now.done() > 0;
        line["state"] = match &self.result {
            Some(None) => "complete",
            Some(Some(_)) => "failed",
            None if begun => "running",
            None => "waiting",
        }
        .into();
        line["error"] = self.result.clone().flatten().into();
        self.describe(&mut line, cells);
        line
    }

    /// Adds its ends, and its map in at most this many cells.
    fn describe(&self, line: &mut Value, cells: usize) {
        let [source, target] = &self.ends;
        line["source"] = source.as_str().into();
        line["target"] = target.as_str().into();
        if let Some(map) = &self.map {
            line["map"] = map_json(map, cells);
        }
    }
}

/// Histograms as JSON, with the upper bounds of their classes in seconds.
pub fn latencies<'a>(each: impl IntoIterator<Item = (&'a str, LatencySnapshot)>) -> Value {
    let mut all = json!({ "bounds": LATENCY_BOUNDS });
    for (name, latency) in each {
        all[name] = json!({ "seconds": latency.seconds, "classes": latency.classes });
    }
    all
}

/// A map in at most `most` cells: a string for each kind, and in it a digit for each cell, from 0
/// (nothing) to 9 (all of it).
fn map_json(map: &MapSnapshot, most: usize) -> Value {
    let merged = map.cells.len().div_ceil(most).max(1);
    let text = |bytes: fn(&MapCell) -> u64| {
        let digit = |(index, cells): (usize, &[MapCell])| {
            let lengths = (0..cells.len()).map(|each| map.len_of(index * merged + each));
            digit(cells.iter().map(bytes).sum(), lengths.sum())
        };
        map.cells.chunks(merged).enumerate().map(digit).collect::<String>()
    };
    json!({
        "size": map.size,
        "cell_bytes": map.cell_bytes.saturating_mul(merged as u64),
        "data": text(|cell| cell.data),
        "zero": text(|cell| cell.zero),
        "resumed": text(|cell| cell.resumed),
        "verified": text(|cell| cell.verified),
    })
}

/// A share as a digit; 0 and 9 are exact.
fn digit(bytes: u64, len: u64) -> char {
    let ninths = match bytes {
        0 => 0,
        bytes if bytes >= len => 9,
        bytes => 1 + u128::from(bytes) * 8 / u128::from(len.max(1)),
    };
    u32::try_from(ninths).ok().and_then(|digit| char::from_digit(digit, 10)).unwrap_or('9')
}

/// The sum of two copies' counters.
fn together(one: &ProgressSnapshot, other: &ProgressSnapshot) -> ProgressSnapshot {
    ProgressSnapshot {
        total: one.total.saturating_add(other.total),
        data: one.data + other.data,
        zeroed: one.zeroed + other.zeroed,
        skipped: one.skipped + other.skipped,
        resumed: one.resumed + other.resumed,
        verified: one.verified + other.verified,
        connections: one.connections + other.connections,
        requests: one.requests + other.requests,
        request_size: one.request_size.max(other.request_size),
        is_preparing: one.is_preparing || other.is_preparing,
    }
}

/// Rates, and the time that requests wait for each side, smoothed.
struct SmoothedRates {
    last: Instant,
    done: u64,
    data: u64,
    /// Bytes per second of all kinds.
    smoothed: Option<f64>,
    /// Bytes of data per second, which a limit applies to.
    moved: Option<f64>,
    seconds: [f64; 2],
    waits: [f64; 2],
}

impl SmoothedRates {
    fn new() -> SmoothedRates {
        SmoothedRates {
            last: blockhaul_io::now(),
            done: 0,
            data: 0,
            smoothed: None,
            moved: None,
            seconds: [0.0; 2],
            waits: [0.0; 2],
        }
    }

    /// Notes the counters, and the sums of request times of both sides in seconds.
    fn note(&mut self, now: &ProgressSnapshot, seconds: [f64; 2]) {
        let done = now.done() + now.verified;
        let passed = blockhaul_io::elapsed(self.last);
        if passed < APART {
            return;
        }
        // The weight does not depend on how often this is called.
        let newest = 1.0 - (-passed.as_secs_f64() / MEMORY.as_secs_f64()).exp();
        let smooth = |before: Option<f64>, bytes: u64| {
            let rate = bytes as f64 / passed.as_secs_f64();
            Some(before.map_or(rate, |before| before * (1.0 - newest) + rate * newest))
        };
        self.smoothed = smooth(self.smoothed, done.saturating_sub(self.done));
        self.moved = smooth(self.moved, now.data.saturating_sub(self.data));
        for (side, seconds) in seconds.into_iter().enumerate() {
            let waited = (seconds - self.seconds[side]).max(0.0);
            self.waits[side] = self.waits[side] * (1.0 - newest) + waited;
        }
        (self.last, self.done, self.data, self.seconds) =
            (blockhaul_io::now(), done, now.data, seconds);
    }

    fn bytes_per_second(&self) -> u64 {
        self.smoothed.unwrap_or(0.0) as u64
    }
}

/// The side or the limit that a copy waits for, if it is known. `waits`: the time that requests wait for each side;
/// `moved`: bytes of data per second; `limit`: the limit of these, 0 for none.
fn bottleneck(waits: [f64; 2], moved: f64, limit: u64) -> Option<&'static str> {
    let all = waits[0] + waits[1];
    if limit > 0 && moved >= limit as f64 * AT_LIMIT {
        Some("rate")
    } else if all < 1e-6 {
        None
    } else if waits[0] >= all * SLOWER {
        Some("source")
    } else if waits[1] >= all * SLOWER {
        Some("target")
    } else {
        Some("both")
    }
}

/// Whether the copy is complete and being verified.
pub fn is_verifying(now: &ProgressSnapshot) -> bool {
    now.verified > 0 && now.done() >= now.total
}

/// The position of the copy, or of its verification.
pub fn position(now: &ProgressSnapshot) -> u64 {
    let done = if is_verifying(now) { now.verified } else { now.done() };
    if now.total > 0 { done.min(now.total) } else { done }
}

/// The phase of a copy.
fn phase(now: &ProgressSnapshot) -> &'static str {
    match is_verifying(now) {
        true => "verify",
        false if now.is_preparing && now.done() == 0 => "prepare",
        false => COPY,
    }
}

/// The counters of a copy, of one disk or of all.
fn counts(now: &ProgressSnapshot) -> Value {
    json!({
        "phase": phase(now),
        "done": now.done(),
        "total": now.total,
        "data": now.data,
        "zeroed": now.zeroed,
        "skipped": now.skipped,
        "resumed": now.resumed,
        "verified": now.verified,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn disk(name: &str) -> ObservedCopy {
        ObservedCopy { name: Some(name.to_string()), ..ObservedCopy::default() }
    }

    #[test]
    fn several_disks_are_shown_together_and_one_by_one() {
        let observer = CopyObserver::new(vec![disk("a"), disk("b")], None);
        observer.disks[0].progress.expect(10);
        observer.disks[1].progress.expect(30);
        observer.disks[1].result.set(Some("it burns".to_string())).unwrap();
        let line = observer.view().json();
        assert_eq!((&line["total"], &line["disks"][1]["total"]), (&40.into(), &30.into()));
        assert_eq!(
            (&line["disks"][0]["name"], &line["disks"][0]["state"]),
            (&"a".into(), &"waiting".into())
        );
        assert_eq!(
            (&line["disks"][1]["error"], &line["disks"][1]["state"]),
            (&"it burns".into(), &"failed".into())
        );
    }

    #[test]
    fn the_last_snapshot_stays() {
        let observer = CopyObserver::new(vec![ObservedCopy::default()], None);
        assert_eq!(observer.view().json()["finished"], false);
        let error = Some("no space".to_string());
        observer.finish(CommandEnd { status: 4, error });
        observer.finish(CommandEnd::default());
        observer.disks[0].progress.expect(10);
        let line = observer.view().json();
        assert_eq!((&line["success"], &line["exit_status"]), (&false.into(), &4.into()));
        assert_eq!((&line["error"], &line["total"]), (&"no space".into(), &0.into()));
        assert_eq!(line, observer.view().json());
    }

    #[test]
    fn the_slower_side_is_named() {
        for (waits, moved, limit, named) in [
            ([0.0, 0.0], 0.0, 0, None),
            ([1.0, 0.1], 9.0, 0, Some("source")),
            ([1.0, 3.0], 9.0, 0, Some("target")),
            ([4.0, 5.0], 9.0, 0, Some("both")),
            ([4.0, 1.0], 9.0, 10, Some("rate")),
            ([4.0, 1.0], 8.0, 10, Some("source")),
        ] {
            assert_eq!(bottleneck(waits, moved, limit), named, "{waits:?} {moved} {limit}");
        }
    }

    #[test]
    fn old_waits_are_forgotten() {
        let mut pace = SmoothedRates::new();
        let mut note = |data, seconds| {
            pace.last = Instant::now().checked_sub(10 * MEMORY).unwrap();
            pace.note(&ProgressSnapshot { data, ..ProgressSnapshot::default() }, seconds);
            bottleneck(pace.waits, pace.moved.unwrap(), 0)
        };
        assert_eq!(note(100, [5.0, 0.1]), Some("source"));
        assert_eq!(note(200, [5.0, 1.1]), Some("target"), "lately");
    }

    #[test]
    fn a_map_has_a_digit_for_each_cell() {
        assert_eq!([0, 1, 50, 99, 100].map(|bytes| digit(bytes, 100)), ['0', '1', '5', '8', '9']);
        assert_eq!(digit(u64::MAX - 1, u64::MAX), '8');
        let copy = ObservedCopy::default();
        copy.progress.keep_map();
        assert!(CopyObserver::new(vec![copy], None).view().json()["map"].is_null(), "no size yet");
    }
}
