//! Counters of a running copy other than bytes: request times, requests in flight, retries.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use blockhaul_block::{Latency, LatencyCounters};

use crate::side::Side;

/// The state of a copy at one moment, beside its bytes.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
#[non_exhaustive]
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
    latency: [LatencyCounters; 2],
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
        self.latency[side as usize].record(time, 1);
    }

    pub(crate) fn read(&self) -> Meters {
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Meters {
            in_flight: self.in_flight.load(Ordering::Relaxed),
            retried: self.retried.each_ref().map(load),
            reconnected: self.reconnected.each_ref().map(load),
            latency: self.latency.each_ref().map(LatencyCounters::read),
        }
    }
}
