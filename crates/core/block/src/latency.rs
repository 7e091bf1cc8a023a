//! How long requests take, sorted into classes: one histogram for the server, the engine and their metrics.

use std::ops::AddAssign;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Upper bounds of the classes, in seconds, ascending. What took longer is in a class of its own.
pub const LATENCY_BOUNDS: [f64; 19] = [
    0.00001, 0.000025, 0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05,
    0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
];

const CLASSES: usize = LATENCY_BOUNDS.len() + 1;

/// A histogram of times at one moment.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
#[non_exhaustive]
pub struct LatencySnapshot {
    /// Requests by time: one class for each of [`LATENCY_BOUNDS`], and one for longer times.
    pub classes: [u64; CLASSES],
    /// The sum of all times, in seconds.
    pub seconds: f64,
}

impl AddAssign for LatencySnapshot {
    fn add_assign(&mut self, other: LatencySnapshot) {
        for (sum, class) in self.classes.iter_mut().zip(other.classes) {
            *sum += class;
        }
        self.seconds += other.seconds;
    }
}

/// The counters behind [`LatencySnapshot`], which any thread may change.
#[derive(Debug, Default)]
pub struct LatencyCounters {
    classes: [AtomicU64; CLASSES],
    nanoseconds: AtomicU64,
}

impl LatencyCounters {
    /// Counts `count` requests that took `time` each.
    pub fn record(&self, time: Duration, count: u64) {
        let seconds = time.as_secs_f64();
        let class = LATENCY_BOUNDS.partition_point(|&bound| bound < seconds);
        self.classes[class].fetch_add(count, Ordering::Relaxed);
        let nanoseconds = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        self.nanoseconds.fetch_add(nanoseconds.saturating_mul(count), Ordering::Relaxed);
    }

    /// The histogram so far. Requests that end meanwhile may be counted in a part of it.
    pub fn read(&self) -> LatencySnapshot {
        LatencySnapshot {
            classes: self.classes.each_ref().map(|class| class.load(Ordering::Relaxed)),
            seconds: self.nanoseconds.load(Ordering::Relaxed) as f64 / 1e9,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_sorted_by_upper_bounds() {
        let counters = LatencyCounters::default();
        for micros in [0, 10, 11, 10_000_000, 10_000_001, 60_000_000] {
            counters.record(Duration::from_micros(micros), 1);
        }
        counters.record(Duration::from_micros(26), 16);
        let latency = counters.read();
        assert_eq!(latency.classes[..4], [2, 1, 16, 0]);
        assert_eq!(latency.classes[18..], [1, 2]);
        assert!((latency.seconds - 80.000_438).abs() < 1e-6, "{}", latency.seconds);
        let mut sum = latency;
        sum += latency;
        assert_eq!((sum.classes[2], sum.classes[19]), (32, 4));
    }
}
