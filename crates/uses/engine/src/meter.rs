//! Counters of a running copy other than bytes: request times, requests in flight, retries.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use blockhaul_block::{LatencyCounters, LatencySnapshot};

use crate::side::Side;

/// The state of a copy at one moment, beside its bytes.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
#[non_exhaustive]
pub struct MeterSnapshot {
    /// Requests in flight: pieces being read or written.
    pub in_flight: usize,
    /// Repeated requests: to the source, to the target.
    pub retried: [u64; 2],
    /// Replaced connections: to the source, to the target.
    pub reconnected: [u64; 2],
    /// Times until the reply: of reads of the source, and of requests that change the target.
    pub latency: [LatencySnapshot; 2],
}

/// The counters behind [`MeterSnapshot`].
#[derive(Debug, Default)]
pub(crate) struct CopyMeter {
    in_flight: AtomicUsize,
    ended: AtomicU64,
    retried: [AtomicU64; 2],
    reconnected: [AtomicU64; 2],
    latency: [LatencyCounters; 2],
}

impl CopyMeter {
    pub(crate) fn begin(&self) {
        self.in_flight.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn end(&self) {
        self.in_flight.fetch_sub(1, Ordering::Relaxed);
        self.ended.fetch_add(1, Ordering::Relaxed);
    }

    /// The number of ended requests once one has ended that begins from now on.
    pub(crate) fn next_to_end(&self) -> u64 {
        let in_flight = self.in_flight.load(Ordering::Relaxed) as u64;
        self.ended.load(Ordering::Relaxed) + in_flight + 1
    }

    /// Whether as many requests have ended, or none is left.
    pub(crate) fn has_ended(&self, number: u64) -> bool {
        self.ended.load(Ordering::Relaxed) >= number || self.in_flight.load(Ordering::Relaxed) == 0
    }

    pub(crate) fn retried(&self, side: Side) {
        self.retried[side as usize].fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn reconnected(&self, side: Side) {
        self.reconnected[side as usize].fetch_add(1, Ordering::Relaxed);
    }

    /// A request completed after `time`.
    pub(crate) fn took(&self, side: Side, time: Duration) {
        self.latency[side as usize].record(time, 1);
    }

    pub(crate) fn read(&self) -> MeterSnapshot {
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        MeterSnapshot {
            in_flight: self.in_flight.load(Ordering::Relaxed),
            retried: self.retried.each_ref().map(load),
            reconnected: self.reconnected.each_ref().map(load),
            latency: self.latency.each_ref().map(LatencyCounters::read),
        }
    }
}
