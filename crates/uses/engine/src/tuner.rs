//! How many connections are used and how large requests are, learned while copying.
//!
//! More is not always faster: some servers answer each call more slowly the more connections there
//! are, others have a cost per call that only larger requests make up for, or a limit per connection.
//! So one thing at a time is changed, up and down, and stays changed only where that made the copy
//! faster by a margin, twice in a row. Local copies begin with what was measured to be the best for
//! them and are over before the first step; where requests take long, steps begin at once. The steps
//! are in `search`; here is what they are measured by and what they change.
//! How many requests are in flight on each connection is learned apart from this, in `window`.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use blockhaul_block::Facts;
use blockhaul_io::Pool;

use crate::gate::Gate;
use crate::options::MAX_REQUEST;
use crate::progress::Progress;
use crate::search::{Bounds, Sample, Search, Setting};
use crate::settled::Settled;

/// Sizes of requests that are tried.
pub(crate) const SIZE_MIN: u64 = 64 << 10;
pub(crate) const SIZE_MAX: u64 = 8 << 20;
// Digests that are computed while copying need whole blocks.
const _: () = assert!(SIZE_MIN.is_multiple_of(crate::algorithm::BLOCK));

/// What all lanes of a copy share of the search.
pub(crate) struct Tuner {
    started: Instant,
    gate: Arc<Gate>,
    progress: Arc<Progress>,
    size: AtomicU64,
    moved: AtomicU64,
    requests: AtomicU64,
    /// Sum of the times of requests, and the shortest, in microseconds.
    waited: AtomicU64,
    shortest: AtomicU64,
    /// Microseconds from the start at which somebody looks again.
    next_look: AtomicU64,
    disturbed: AtomicBool,
    /// A connection could not be had.
    refused: AtomicBool,
    search: Mutex<Search>,
}

impl Tuner {
    /// A tuner for a copy between these devices.
    pub(crate) fn of(
        settled: &Settled,
        from: &Facts,
        to: &Facts,
        pool: &Pool,
        (gate, progress): (Arc<Gate>, Arc<Progress>),
    ) -> Tuner {
        let begin = Setting { lanes: settled.connections_first, size: settled.request_size };
        let minimum = from.block.minimum.max(to.block.minimum);
        let preferred = from.block.preferred.max(to.block.preferred);
        let maximum = from.block.maximum.min(to.block.maximum).min(MAX_REQUEST);
        let size = match settled.adaptive_size && begin.size.is_power_of_two() {
            true => {
                let least = SIZE_MIN.max(minimum.max(preferred).into());
                let most = SIZE_MAX.min(maximum.into()).min(settled.queue_size);
                (least.min(begin.size), most.max(begin.size))
            }
            false => (begin.size, begin.size),
        };
        let lanes = match settled.connections_max > settled.connections {
            true => (1, settled.connections_max),
            false => (begin.lanes, begin.lanes),
        };
        let bounds = Bounds { lanes, usual: settled.connections, size, memory: pool.limit() };
        let search = Search::new(begin, bounds);
        // What a limit holds back tells nothing.
        let fixed = settled.is_limited() || search.over();
        let next = if fixed { u64::MAX } else { micros(search.due) };
        progress.set_request_size(begin.size);
        Tuner {
            started: blockhaul_io::now(),
            gate,
            progress,
            size: AtomicU64::new(begin.size),
            moved: AtomicU64::new(0),
            requests: AtomicU64::new(0),
            waited: AtomicU64::new(0),
            shortest: AtomicU64::new(u64::MAX),
            next_look: AtomicU64::new(next),
            disturbed: AtomicBool::new(false),
            refused: AtomicBool::new(false),
            search: Mutex::new(search),
        }
    }

    /// Bytes of a request now.
    pub(crate) fn request_size(&self) -> u64 {
        self.size.load(Ordering::Relaxed)
    }

    /// Time since the copy began.
    pub(crate) fn clock(&self) -> Duration {
        blockhaul_io::elapsed(self.started)
    }

    /// Counts a request of `len` bytes that took `time` and ended at `now`, by this clock.
    pub(crate) fn note(&self, len: u64, time: Duration, now: Duration) {
        self.moved.fetch_add(len, Ordering::Relaxed);
        self.requests.fetch_add(1, Ordering::Relaxed);
        let time = micros(time);
        self.waited.fetch_add(time, Ordering::Relaxed);
        if time < self.shortest.load(Ordering::Relaxed) {
            self.shortest.fetch_min(time, Ordering::Relaxed);
        }
        if micros(now) >= self.next_look.load(Ordering::Relaxed) {
            self.look(now);
        }
    }

    /// Lanes had nothing to do: what is measured at the moment says nothing.
    pub(crate) fn disturb(&self) {
        self.disturbed.store(true, Ordering::Relaxed);
    }

    /// A connection beyond those that there are could not be had; true the first time.
    pub(crate) fn no_more_lanes(&self) -> bool {
        let active = self.gate.active().max(1);
        self.search.lock().expect("no panic under this lock").no_more_lanes(active);
        !self.refused.swap(true, Ordering::Relaxed)
    }

    /// The end is near: nothing more is tried.
    pub(crate) fn finish(&self) {
        self.next_look.store(u64::MAX, Ordering::Relaxed);
    }

    fn left(&self) -> u64 {
        let done = self.progress.snapshot();
        done.total.saturating_sub(done.done())
    }

    #[cold]
    fn look(&self, now: Duration) {
        // Another lane is looking.
        let Ok(mut search) = self.search.try_lock() else { return };
        let sample = Sample {
            at: now,
            moved: self.moved.load(Ordering::Relaxed),
            requests: self.requests.load(Ordering::Relaxed),
            waited: Duration::from_micros(self.waited.load(Ordering::Relaxed)),
            shortest: Duration::from_micros(self.shortest.load(Ordering::Relaxed)),
            active: self.gate.active(),
            left: self.left(),
            disturbed: self.disturbed.swap(false, Ordering::Relaxed),
        };
        let before = search.present;
        search.look(&sample);
        let present = search.present;
        let next = if search.over() { u64::MAX } else { micros(search.due) };
        // Not where `finish` was called meanwhile.
        if self.next_look.load(Ordering::Relaxed) != u64::MAX {
            self.next_look.store(next, Ordering::Relaxed);
        }
        if present.size != before.size {
            self.size.store(present.size, Ordering::Relaxed);
            self.progress.set_request_size(present.size);
        }
        if present.lanes != before.lanes {
            self.gate.set_places(present.lanes);
        }
        if present != before {
            log::debug!("{} connections, requests of {} bytes", present.lanes, present.size);
        }
    }
}

fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}
