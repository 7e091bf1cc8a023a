//! Counters of a running copy other than bytes: request times, requests in flight, retries.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use crate::side::Side;

/// Upper bounds of the histogram classes in seconds; one more class holds longer times.
pub const LATENCY_BOUNDS: [f64; 16] = [
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5,
    5.0, 10.0,
];

/// Request times.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Latency {
    /// Number of requests per class: those of [`LATENCY_BOUNDS`], and longer ones.
    pub classes: [u64; LATENCY_BOUNDS.len() + 1],
    /// Sum of all request times in seconds.
    pub seconds: f64,
}

/// A snapshot of a copy's counters other than bytes.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Meters {
    /// Requests in flight: pieces being read or written.
    pub in_flight: usize,
    /// Repeated requests: to the source, to the target.
    pub retried: [u64; 2],
    /// Replaced connections: to the source, to the target.
    pub reconnected: [u64; 2],
    /// Times until the reply: of reads of the source, and of requests that change the target.
    pub latency: [Latency; 2],
}

/// The counters behind [`Meters`].
#[derive(Debug, Default)]
pub(crate) struct Meter {
    in_flight: AtomicUsize,
    retried: [AtomicU64; 2],
    reconnected: [AtomicU64; 2],
    times: [Times; 2],
}

#[derive(Debug, Default)]
struct Times {
    classes: [AtomicU64; LATENCY_BOUNDS.len() + 1],
    nanoseconds: AtomicU64,
}

impl Meter {
    pub(crate) fn begin(&self) {
        self.in_flight.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn end(&self) {
        self.in_flight.fetch_sub(1, Ordering::Relaxed);
    }

    pub(crate) fn retried(&self, side: Side) {
        self.retried[side as usize].fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn reconnected(&self, side: Side) {
        self.reconnected[side as usize].fetch_add(1, Ordering::Relaxed);
    }

    /// A request completed after `time`.
    pub(crate) fn took(&self, side: Side, time: Duration) {
        let times = &self.times[side as usize];
        let seconds = time.as_secs_f64();
        let class = LATENCY_BOUNDS.partition_point(|&bound| bound < seconds);
        times.classes[class].fetch_add(1, Ordering::Relaxed);
        let nanoseconds = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        times.nanoseconds.fetch_add(nanoseconds, Ordering::Relaxed);
    }

    pub(crate) fn read(&self) -> Meters {
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let latency = |times: &Times| Latency {
            classes: times.classes.each_ref().map(load),
            seconds: load(&times.nanoseconds) as f64 / 1e9,
        };
        Meters {
            in_flight: self.in_flight.load(Ordering::Relaxed),
            retried: self.retried.each_ref().map(load),
            reconnected: self.reconnected.each_ref().map(load),
            latency: self.times.each_ref().map(latency),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_sorted_by_upper_bounds() {
        let meter = Meter::default();
        for micros in [0, 100, 101, 10_000_000, 10_000_001, 60_000_000] {
            meter.took(Side::Target, Duration::from_micros(micros));
        }
        let [source, target] = meter.read().latency;
        assert_eq!(source, Latency::default());
        assert_eq!((target.classes[0], target.classes[1]), (2, 1));
        assert_eq!((target.classes[15], target.classes[16]), (1, 2));
        assert!((target.seconds - 80.000_202).abs() < 1e-6, "{}", target.seconds);
    }
}
