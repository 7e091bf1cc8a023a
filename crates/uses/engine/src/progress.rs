//! Counters of a copy, read without locks by whoever shows them.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use crate::meter::{Meter, Meters};
use crate::route_counters::{Counters, Routes};

/// Waits notice after this at the latest that the copy was stopped.
pub(crate) const STOP_STEP: Duration = Duration::from_millis(100);

/// Counters of a copy under way, in bytes.
#[derive(Debug, Default)]
pub struct Progress {
    total: AtomicU64,
    data: AtomicU64,
    zeroed: AtomicU64,
    skipped: AtomicU64,
    resumed: AtomicU64,
    verified: AtomicU64,
    connections: AtomicUsize,
    requests: AtomicUsize,
    request_size: AtomicU64,
    cancelled: AtomicBool,
    complete: AtomicBool,
    pub(crate) counters: Counters,
    pub(crate) meter: Meter,
}

/// The counters at one moment, in bytes, and what was found to pay.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Snapshot {
    /// Size of the source; 0 while it is not known (a pipe).
    pub total: u64,
    /// Written as data.
    pub data: u64,
    /// Zeroed on the target.
    pub zeroed: u64,
    /// Zeroes that the target had already.
    pub skipped: u64,
    /// Copied by an earlier run.
    pub resumed: u64,
    /// Compared by the verification that follows the copy.
    pub verified: u64,
    /// Lanes in use, which is connections to each side; 0 before the first.
    pub connections: usize,
    /// Requests that these lanes may have in flight, all together.
    pub requests: usize,
    /// Bytes of a request.
    pub request_size: u64,
}

impl Snapshot {
    /// Bytes of the source that are done.
    pub fn done(&self) -> u64 {
        self.data + self.zeroed + self.skipped + self.resumed
    }
}

impl Progress {
    /// Counters at zero.
    pub fn new() -> Progress {
        Progress::default()
    }

    /// The counters now.
    pub fn snapshot(&self) -> Snapshot {
        Snapshot {
            total: self.total.load(Ordering::Relaxed),
            data: self.data.load(Ordering::Relaxed),
            zeroed: self.zeroed.load(Ordering::Relaxed),
            skipped: self.skipped.load(Ordering::Relaxed),
            resumed: self.resumed.load(Ordering::Relaxed),
            verified: self.verified.load(Ordering::Relaxed),
            connections: self.connections.load(Ordering::Relaxed),
            requests: self.requests.load(Ordering::Relaxed),
            request_size: self.request_size.load(Ordering::Relaxed),
        }
    }

    /// Which ways the bytes went so far.
    pub fn routes(&self) -> Routes {
        let Snapshot { data, zeroed, skipped, .. } = self.snapshot();
        self.counters.routes(data, zeroed, skipped)
    }

    /// How long requests take, and what else can be measured.
    pub fn meters(&self) -> Meters {
        self.meter.read()
    }

    /// Asks the copy to stop: nothing more is submitted, what is in flight is awaited.
    pub fn cancel(&self) {
        self.cancelled.store(true, Ordering::Relaxed);
    }

    /// Whether all is copied: what is left of the run changes the target no more.
    pub fn is_complete(&self) -> bool {
        self.complete.load(Ordering::Relaxed)
    }

    pub(crate) fn set_complete(&self) {
        self.complete.store(true, Ordering::Relaxed);
    }

    /// Whether the copy was asked to stop.
    pub fn is_cancelled(&self) -> bool {
        self.cancelled.load(Ordering::Relaxed)
    }

    /// So many bytes of the total are not to be copied.
    pub(crate) fn leave_out(&self, bytes: u64) {
        self.total.fetch_sub(bytes, Ordering::Relaxed);
    }

    /// The source is known to have so many bytes, before the copy begins.
    pub fn expect(&self, bytes: u64) {
        self.set_total(bytes);
    }

    pub(crate) fn set_total(&self, bytes: u64) {
        self.total.store(bytes, Ordering::Relaxed);
        // What was read before, to know what to copy, is no verification.
        self.verified.store(0, Ordering::Relaxed);
    }

    /// So many bytes more are to be copied.
    pub(crate) fn add_total(&self, bytes: u64) {
        self.total.fetch_add(bytes, Ordering::Relaxed);
    }

    pub(crate) fn add_data(&self, bytes: u64) {
        self.data.fetch_add(bytes, Ordering::Relaxed);
    }

    pub(crate) fn add_zeroed(&self, bytes: u64) {
        self.zeroed.fetch_add(bytes, Ordering::Relaxed);
    }

    pub(crate) fn add_skipped(&self, bytes: u64) {
        self.skipped.fetch_add(bytes, Ordering::Relaxed);
    }

    pub(crate) fn add_resumed(&self, bytes: u64) {
        self.resumed.fetch_add(bytes, Ordering::Relaxed);
    }

    pub(crate) fn add_verified(&self, bytes: u64) {
        self.verified.fetch_add(bytes, Ordering::Relaxed);
    }

    pub(crate) fn set_connections(&self, lanes: usize) {
        self.connections.store(lanes, Ordering::Relaxed);
    }

    pub(crate) fn set_request_size(&self, bytes: u64) {
        self.request_size.store(bytes, Ordering::Relaxed);
    }

    /// A window went from `before` requests to `now`.
    pub(crate) fn change_requests(&self, before: usize, now: usize) {
        if now >= before {
            self.requests.fetch_add(now - before, Ordering::Relaxed);
        } else {
            self.requests.fetch_sub(before - now, Ordering::Relaxed);
        }
    }
}
