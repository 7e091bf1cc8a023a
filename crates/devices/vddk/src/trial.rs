//! Whether reads go on while the library answers a query.

use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Whether reads go on during a query on another handle.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ReadOverlap {
    /// Not measured yet.
    Unknown,
    Yes,
    /// A query holds up all reads, or there is no other handle.
    No,
}

/// Measures that, with one query during reads.
#[derive(Debug, Default)]
pub(crate) struct OverlapTrial {
    found: AtomicU8,
    running: AtomicBool,
    /// When transfers have ended during the trial.
    ends: Mutex<Vec<Instant>>,
}

/// Shorter queries hold up nothing that matters.
const SHORT: Duration = Duration::from_millis(20);
/// Ends that are closer to one another count as one.
const APART: Duration = Duration::from_millis(1);
/// Maximum number of ends that are kept.
const ENDS_MAX: usize = 60_000;

impl OverlapTrial {
    pub(crate) fn overlap(&self) -> ReadOverlap {
        match self.found.load(Ordering::Relaxed) {
            0 => ReadOverlap::Unknown,
            1 => ReadOverlap::Yes,
            _ => ReadOverlap::No,
        }
    }

    pub(crate) fn set(&self, overlap: ReadOverlap) {
        let number = match overlap {
            ReadOverlap::Unknown => 0,
            ReadOverlap::Yes => 1,
            ReadOverlap::No => 2,
        };
        self.found.store(number, Ordering::Relaxed);
    }

    /// Begins a trial, unless one is under way.
    pub(crate) fn begin(&self) -> bool {
        !self.running.swap(true, Ordering::Relaxed)
    }

    /// A trial ends, or does not take place.
    pub(crate) fn give_up(&self) {
        self.running.store(false, Ordering::Relaxed);
    }

    /// A transfer has ended.
    pub(crate) fn transfer_ended(&self) {
        if !self.running.load(Ordering::Relaxed) {
            return;
        }
        let now = blockhaul_io::now();
        let mut ends = self.ends.lock().unwrap_or_else(PoisonError::into_inner);
        let close = ends.last().is_some_and(|last| now.saturating_duration_since(*last) < APART);
        if !close && ends.len() < ENDS_MAX {
            ends.push(now);
        }
    }

    /// Runs a query on a handle of its own. `busy`: whether transfers are under way.
    pub(crate) fn during<T>(&self, busy: impl Fn() -> bool, query: impl FnOnce() -> T) -> T {
        if self.overlap() != ReadOverlap::Unknown {
            return query();
        }
        let started = blockhaul_io::now();
        let busy_before = busy();
        let result = query();
        let took = blockhaul_io::elapsed(started);
        let ends = std::mem::take(&mut *self.ends.lock().unwrap_or_else(PoisonError::into_inner));
        self.set(verdict(started, took, &ends, busy_before && busy()));
        self.give_up();
        let during = match self.overlap() {
            ReadOverlap::Unknown => "are not measured",
            ReadOverlap::Yes => "went on",
            ReadOverlap::No => "waited",
        };
        log::debug!("vddk: a query took {} ms; reads meanwhile {during}", took.as_millis());
        result
    }
}

/// What follows from a query and the ends of transfers. Those near its beginning and its end may have
/// waited for it, or it for them.
fn verdict(started: Instant, took: Duration, ends: &[Instant], busy: bool) -> ReadOverlap {
    let middle = started + took / 4..started + took * 3 / 4;
    if took < SHORT || ends.iter().any(|end| middle.contains(end)) {
        return ReadOverlap::Yes;
    }
    if busy { ReadOverlap::No } else { ReadOverlap::Unknown }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn transfers_that_end_in_the_middle_of_a_query_overlap() {
        let start = Instant::now();
        let second = Duration::from_secs(1);
        let at = |percent: u32| start + second * percent / 100;
        assert_eq!(verdict(start, second, &[at(50)], true), ReadOverlap::Yes);
        assert_eq!(verdict(start, second, &[at(1), at(99)], true), ReadOverlap::No);
        assert_eq!(verdict(start, second, &[at(1), at(99)], false), ReadOverlap::Unknown);
        assert_eq!(verdict(start, second / 100, &[], true), ReadOverlap::Yes);
    }

    #[test]
    fn one_trial_runs_at_a_time() {
        let trial = OverlapTrial::default();
        assert!(trial.begin() && !trial.begin());
        trial.during(|| true, || std::thread::sleep(SHORT * 2));
        assert_eq!(trial.overlap(), ReadOverlap::No);
        assert!(trial.begin());
        trial.during(|| true, || std::thread::sleep(SHORT * 2));
        assert_eq!(trial.overlap(), ReadOverlap::No, "it is measured once");
    }
}
