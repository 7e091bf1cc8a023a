//! Tunes the number of connections and the request size while copying.
//!
//! More is not always faster: some servers answer each call more slowly the more connections there
//! are, others have a cost per call that only larger requests make up for, or a limit per
//! connection. So one setting at a time is changed, up and down, and kept only if that made the
//! copy faster by a margin, twice in a row. Local copies begin with the settings measured to be
//! best for them and end before the first step; if requests take long, steps begin at once. `climb`
//! has the steps; this module has the measurements and applies the changes. The number of requests
//! in flight on each connection is tuned separately, in `window`.

mod climb;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use blockhaul_block::Facts;
use blockhaul_io::Pool;

use self::climb::{Bounds, Climb, Sample, Setting};
use crate::lane_slots::LaneSlots;
use crate::options::MAX_REQUEST;
use crate::progress::CopyProgress;
use crate::resolved::EffectiveOptions;

/// Limits of the request sizes that are tried.
pub(crate) const SIZE_MIN: u64 = 64 << 10;
pub(crate) const SIZE_MAX: u64 = 8 << 20;
// Digests that are computed while copying need whole blocks.
const _: () = assert!(SIZE_MIN.is_multiple_of(crate::algorithm::BLOCK));

/// State of the search shared by all lanes of a copy.
pub(crate) struct Tuner {
    started: Instant,
    slots: Arc<LaneSlots>,
    progress: Arc<CopyProgress>,
    size: AtomicU64,
    moved: AtomicU64,
    requests: AtomicU64,
    /// Sum of the request times, and the shortest, in microseconds.
    waited: AtomicU64,
    shortest: AtomicU64,
    /// Time of the next check, in microseconds from the start.
    next_look: AtomicU64,
    disturbed: AtomicBool,
    /// A connection could not be made.
    refused: AtomicBool,
    climb: Mutex<Climb>,
    /// Nothing is tuned.
    fixed: bool,
}

impl Tuner {
    /// A tuner for a copy between these devices.
    pub(crate) fn of(
        resolved: &EffectiveOptions,
        from: &Facts,
        to: &Facts,
        pool: &Pool,
        (slots, progress): (Arc<LaneSlots>, Arc<CopyProgress>),
    ) -> Tuner {
        let begin = Setting { lanes: resolved.connections_first, size: resolved.request_size };
        let minimum = from.block.minimum.max(to.block.minimum);
        let preferred = from.block.preferred.max(to.block.preferred);
        let maximum = from.block.maximum.min(to.block.maximum).min(MAX_REQUEST);
        let size = if resolved.adaptive_size && begin.size.is_power_of_two() {
            let least = SIZE_MIN.max(minimum.max(preferred).into());
            let most = SIZE_MAX.min(maximum.into()).min(resolved.queue_size);
            (least.min(begin.size), most.max(begin.size))
        } else {
            (begin.size, begin.size)
        };
        let lanes = if resolved.connections_max > resolved.connections {
            (1, resolved.connections_max)
        } else {
            (begin.lanes, begin.lanes)
        };
        let bounds = Bounds { lanes, usual: resolved.connections, size, memory: pool.limit() };
        let climb = Climb::new(begin, bounds);
        // A rate limit makes measurements meaningless.
        let fixed = resolved.is_limited() || climb.over();
        let next = if fixed { u64::MAX } else { micros(climb.due) };
        progress.set_request_size(begin.size);
        Tuner {
            started: blockhaul_io::now(),
            slots,
            progress,
            size: AtomicU64::new(begin.size),
            moved: AtomicU64::new(0),
            requests: AtomicU64::new(0),
            waited: AtomicU64::new(0),
            shortest: AtomicU64::new(u64::MAX),
            next_look: AtomicU64::new(next),
            disturbed: AtomicBool::new(false),
            refused: AtomicBool::new(false),
            climb: Mutex::new(climb),
            fixed,
        }
    }

    /// Current request size in bytes.
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

    /// Lanes were idle: the current measurement is void.
    pub(crate) fn disturb(&self) {
        self.disturbed.store(true, Ordering::Relaxed);
    }

    /// A further connection could not be made; true the first time.
    pub(crate) fn no_more_lanes(&self) -> bool {
        let active = self.slots.active().max(1);
        self.climb.lock().expect("no panic under this lock").no_more_lanes(active);
        !self.refused.swap(true, Ordering::Relaxed)
    }

    /// Another run begins after [`Tuner::finish`].
    pub(crate) fn resume(&self) {
        self.disturb();
        let climb = self.climb.lock().expect("no panic under this lock");
        if !self.fixed && !climb.over() {
            self.next_look.store(micros(climb.due), Ordering::Relaxed);
        }
    }

    /// The end is near: stops tuning.
    pub(crate) fn finish(&self) {
        self.next_look.store(u64::MAX, Ordering::Relaxed);
    }

    fn left(&self) -> u64 {
        let done = self.progress.snapshot();
        done.total.saturating_sub(done.done())
    }

    #[cold]
    fn look(&self, now: Duration) {
        // Another lane is checking.
        let Ok(mut climb) = self.climb.try_lock() else { return };
        let sample = Sample {
            at: now,
            moved: self.moved.load(Ordering::Relaxed),
            requests: self.requests.load(Ordering::Relaxed),
            waited: Duration::from_micros(self.waited.load(Ordering::Relaxed)),
            shortest: Duration::from_micros(self.shortest.load(Ordering::Relaxed)),
            active: self.slots.active(),
            left: self.left(),
            disturbed: self.disturbed.swap(false, Ordering::Relaxed),
        };
        let before = climb.present;
        climb.look(&sample);
        let present = climb.present;
        let next = if climb.over() { u64::MAX } else { micros(climb.due) };
        // Not if `finish` was called meanwhile.
        if self.next_look.load(Ordering::Relaxed) != u64::MAX {
            self.next_look.store(next, Ordering::Relaxed);
        }
        if present.size != before.size {
            self.size.store(present.size, Ordering::Relaxed);
            self.progress.set_request_size(present.size);
        }
        if present.lanes != before.lanes {
            self.slots.set_places(present.lanes);
        }
        if present != before {
            log::debug!("{} connections, requests of {} bytes", present.lanes, present.size);
        }
    }
}

fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}
