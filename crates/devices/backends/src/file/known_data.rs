//! The last long run of data that was found in a file.
//!
//! SEEK_HOLE searches for the end of a run, however far away it is: on tmpfs, and in reserved space of other
//! file systems, it visits each page. For a client that queries a file in pieces, the rest of the file would be
//! visited for each piece. So the end is kept for 100 times as long as the search took.
//!
//! Only data is kept: it is always correct to call a hole data. Our own holes are cut out of the run at once; a
//! hole that another program has punched may be called data until the time is over.

use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Shortest run in bytes that is kept. A shorter one is found again in a few milliseconds at most.
const LEAST: u64 = 64 << 20;
/// How long a run is kept, as a multiple of the time of the search: searching takes 1 % of the time.
const TIMES: u32 = 100;
/// Shortest search that is not made on a worker again, where others wait for it.
const SLOW: Duration = Duration::from_millis(1);

/// The last long run of data, for all requests of a device.
#[derive(Default)]
pub(super) struct KnownData(Mutex<DataRun>);

#[derive(Default)]
struct DataRun {
    run: Range<u64>,
    /// When the run must be searched for again; none: it is not kept.
    until: Option<Instant>,
    /// Time of the last search of a long run.
    took: Duration,
    /// Number of holes made so far.
    holes: u64,
}

/// A search that has begun.
pub(super) struct DataSearch {
    begun: Instant,
    holes: u64,
}

impl KnownData {
    /// The end of the run that contains `at`, if it is known.
    pub(super) fn end(&self, at: u64) -> Option<u64> {
        let known = self.lock();
        let is_valid = known.until.is_some_and(|until| blockhaul_io::now() < until);
        (is_valid && known.run.contains(&at)).then_some(known.run.end)
    }

    /// Whether the last search of a long run took so long that the next one must not be made on a worker.
    pub(super) fn is_slow(&self) -> bool {
        self.lock().took >= SLOW
    }

    /// Begins the search of a run's end.
    pub(super) fn search(&self) -> DataSearch {
        DataSearch { begun: blockhaul_io::now(), holes: self.lock().holes }
    }

    /// Ends a search: `run` is data.
    pub(super) fn found(&self, search: &DataSearch, run: Range<u64>) {
        if run.end.saturating_sub(run.start) < LEAST {
            return;
        }
        let took = blockhaul_io::elapsed(search.begun);
        let mut known = self.lock();
        // A hole that was made meanwhile may be in it.
        if known.holes == search.holes {
            known.run = run;
            known.took = took;
            known.until = blockhaul_io::now().checked_add(took.saturating_mul(TIMES));
        }
    }

    /// Ends a search that has taken `time`.
    #[cfg(test)]
    pub(super) fn found_after(&self, time: Duration, run: Range<u64>) {
        let begun = blockhaul_io::now().checked_sub(time).unwrap();
        self.found(&DataSearch { begun, ..self.search() }, run);
    }

    /// There may be a hole now. What follows it is kept: clients continue upwards.
    pub(super) fn hole(&self, hole: Range<u64>) {
        let mut known = self.lock();
        known.holes += 1;
        if hole.start <= known.run.start || hole.end < known.run.end {
            known.run.start = known.run.start.max(hole.end);
        } else {
            known.run.end = known.run.end.min(hole.start);
        }
    }

    fn lock(&self) -> MutexGuard<'_, DataRun> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    /// A run that took a minute to find.
    fn known(run: Range<u64>) -> KnownData {
        let known = KnownData::default();
        known.found_after(Duration::from_secs(60), run);
        known
    }

    #[test]
    fn a_long_run_is_kept_for_as_long_as_it_took_to_find() {
        let slow = known(MIB..100 * MIB);
        assert!(slow.is_slow());
        assert_eq!(
            [0, MIB, 99 * MIB, 100 * MIB].map(|at| slow.end(at).is_some()),
            [false, true, true, false]
        );
        assert_eq!(slow.end(50 * MIB), Some(100 * MIB));
        let left = slow.lock().until.unwrap() - blockhaul_io::now();
        let hundred = Duration::from_secs(6000);
        assert!(left > hundred - Duration::from_secs(60) && left < hundred * 2, "{left:?}");
        slow.lock().until = Some(blockhaul_io::now());
        assert_eq!(slow.end(50 * MIB), None);
        let short = known(0..LEAST - 1);
        assert!(!short.is_slow());
        assert_eq!(short.end(0), None);
    }

    #[test]
    fn holes_are_cut_out() {
        for (hole, left) in [
            (0..MIB, MIB..100 * MIB),
            (0..2 * MIB, 2 * MIB..100 * MIB),
            (50 * MIB..60 * MIB, 60 * MIB..100 * MIB),
            (50 * MIB..100 * MIB, MIB..50 * MIB),
            (50 * MIB..200 * MIB, MIB..50 * MIB),
            (100 * MIB..200 * MIB, MIB..100 * MIB),
        ] {
            let known = known(MIB..100 * MIB);
            known.hole(hole.clone());
            assert_eq!(known.lock().run, left, "{hole:?}");
        }
        for whole in [0..200 * MIB, MIB..100 * MIB] {
            let known = known(MIB..100 * MIB);
            known.hole(whole.clone());
            assert_eq!(known.end(50 * MIB), None, "{whole:?}");
        }
    }

    #[test]
    fn a_run_found_while_a_hole_was_made_is_not_kept() {
        let known = KnownData::default();
        let search = known.search();
        known.hole(5..6);
        known.found(&search, 0..LEAST);
        assert_eq!(known.lock().run, 0..0);
        known.found(&known.search(), 0..LEAST);
        assert_eq!(known.lock().run, 0..LEAST);
    }
}
