//! Whether queries for extents are slow: measured on those that callers send anyway.

use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Queries that are measured. A source whose first ones are quick is left alone.
const MEASURED: usize = 8;
/// Fewest queries that show a source to be slow, as most of them: one may be slow by chance.
const ENOUGH: usize = 2;
/// Shortest query that holds up reads: below this, reads may be slow themselves.
const HELD_UP: Duration = Duration::from_millis(10);

/// What is known of the time that queries take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum QueryPace {
    /// Still being measured.
    Unknown,
    Quick,
    Slow,
}

const UNKNOWN: u8 = 0;
const QUICK: u8 = 1;
const SLOW: u8 = 2;

/// Measures queries until it is clear whether they are slow.
pub(super) struct PaceMeter {
    /// A query that takes longer than this is slow; none: all are.
    limit: Option<Duration>,
    pace: AtomicU8,
    /// Queries under way while the pace is unknown.
    under_way: AtomicU64,
    state: Mutex<PaceState>,
}

#[derive(Default)]
struct PaceState {
    /// The time of each measured query, and whether it was a nuisance.
    seen: Vec<(Duration, bool)>,
    /// When the first read was submitted while a query was under way.
    read_since: Option<Instant>,
    /// A read that was submitted then has ended.
    read_ended: bool,
}

/// A query under way; one that is dropped was lost, and does not count.
pub(super) struct TimedQuery {
    measure: Arc<PaceMeter>,
    since: Instant,
}

impl Drop for TimedQuery {
    fn drop(&mut self) {
        self.measure.under_way.fetch_sub(1, Ordering::Relaxed);
    }
}

impl PaceMeter {
    /// Queries above `limit` are slow; without a limit all are.
    pub(super) fn new(limit: Option<Duration>) -> PaceMeter {
        let pace = AtomicU8::new(if limit.is_some() { UNKNOWN } else { SLOW });
        PaceMeter { limit, pace, under_way: AtomicU64::new(0), state: Mutex::default() }
    }

    pub(super) fn pace(&self) -> QueryPace {
        match self.pace.load(Ordering::Relaxed) {
            UNKNOWN => QueryPace::Unknown,
            QUICK => QueryPace::Quick,
            _ => QueryPace::Slow,
        }
    }

    /// Whether the end of a read that is submitted now should be reported: a query is being
    /// measured. `read_ended` reports it.
    pub(super) fn read_begins(&self) -> bool {
        if self.under_way.load(Ordering::Relaxed) == 0 {
            return false;
        }
        let mut state = self.lock();
        state.read_since.get_or_insert_with(blockhaul_io::now);
        true
    }

    /// A read has ended that began while a query was under way.
    pub(super) fn read_ended(&self) {
        if self.under_way.load(Ordering::Relaxed) > 0 {
            self.lock().read_ended = true;
        }
    }

    /// A query begins; none if the pace is known.
    pub(super) fn begin(self: &Arc<PaceMeter>) -> Option<TimedQuery> {
        if self.pace() != QueryPace::Unknown {
            return None;
        }
        if self.under_way.fetch_add(1, Ordering::Relaxed) == 0 {
            let mut state = self.lock();
            (state.read_since, state.read_ended) = (None, false);
        }
        Some(TimedQuery { measure: self.clone(), since: blockhaul_io::now() })
    }

    /// A query has ended. Returns the pace with the median of the times, once they are known.
    pub(super) fn end(&self, query: &TimedQuery) -> Option<(QueryPace, Duration)> {
        let limit = self.limit?;
        let mut state = self.lock();
        if self.pace() != QueryPace::Unknown {
            return None;
        }
        let taken = blockhaul_io::elapsed(query.since);
        // Reads from the second half may just not have had enough time.
        let early = |since: Instant| blockhaul_io::elapsed(since) >= taken / 2;
        let waits = state.read_since.is_some_and(early) && !state.read_ended;
        let is_slow = taken > limit || (taken >= HELD_UP && waits);
        state.seen.push((taken, is_slow));
        let slow = state.seen.iter().filter(|seen| seen.1).count();
        let pace = match state.seen.len() {
            count if count >= ENOUGH && slow * 2 > count => QueryPace::Slow,
            MEASURED.. => QueryPace::Quick,
            _ => return None,
        };
        state.seen.sort_unstable();
        let median = state.seen[state.seen.len() / 2].0;
        self.pace.store(if pace == QueryPace::Slow { SLOW } else { QUICK }, Ordering::Relaxed);
        Some((pace, median))
    }

    fn lock(&self) -> MutexGuard<'_, PaceState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The decision after queries that took so many milliseconds.
    fn after(times: &[u64]) -> Option<QueryPace> {
        let measure = Arc::new(PaceMeter::new(Some(Duration::from_millis(20))));
        let mut decided = None;
        for &time in times {
            let mut query = measure.begin().unwrap();
            query.since = blockhaul_io::now() - Duration::from_millis(time);
            decided = measure.end(&query).map(|(pace, _)| pace);
        }
        assert_eq!(decided.unwrap_or(QueryPace::Unknown), measure.pace());
        decided
    }

    #[test]
    fn most_of_several_queries_decide() {
        assert_eq!(after(&[500]), None);
        assert_eq!(after(&[500, 500]), Some(QueryPace::Slow));
        assert_eq!(after(&[500, 1]), None);
        assert_eq!(after(&[1, 500, 500]), Some(QueryPace::Slow));
        assert_eq!(after(&[500, 1, 1, 1, 1, 1, 1]), None);
        assert_eq!(after(&[500, 1, 1, 1, 1, 1, 1, 1]), Some(QueryPace::Quick));
    }

    #[test]
    fn queries_that_hold_up_reads_are_slow() {
        let decide = |reads_end: bool| {
            let measure = Arc::new(PaceMeter::new(Some(Duration::from_secs(9))));
            assert!(!measure.read_begins(), "no query is under way");
            let mut decided = None;
            for _ in 0..MEASURED {
                let Some(query) = measure.begin() else { break };
                assert!(measure.read_begins());
                std::thread::sleep(HELD_UP);
                if reads_end {
                    measure.read_ended();
                }
                decided = measure.end(&query).map(|(pace, _)| pace);
            }
            decided
        };
        assert_eq!(decide(false), Some(QueryPace::Slow));
        assert_eq!(decide(true), Some(QueryPace::Quick));
    }

    #[test]
    fn a_lost_query_does_not_count() {
        let measure = Arc::new(PaceMeter::new(Some(Duration::ZERO)));
        drop(measure.begin());
        assert!(!measure.read_begins() && measure.pace() == QueryPace::Unknown);
        assert_eq!(PaceMeter::new(None).pace(), QueryPace::Slow);
    }
}
