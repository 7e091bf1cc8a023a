//! Counters of a copy, readable without locks.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use crate::disk_map::{ByteOutcome, DiskMap, MapSnapshot};
use crate::meter::{CopyMeter, MeterSnapshot};
use crate::route_counters::{CopyRouteCounters, RouteBytes};

/// Maximum time until a waiting task notices that the copy was stopped.
pub(crate) const STOP_STEP: Duration = Duration::from_millis(100);

/// Is called, from any worker, with bytes that are done: as data, and as zeroes or not at all. Must
/// not block for long.
type ProgressCallback = dyn Fn(u64, u64) + Send + Sync;

struct ProgressListener(Box<ProgressCallback>);

impl std::fmt::Debug for ProgressListener {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.write_str("ProgressListener")
    }
}

/// Counters of a running copy, in bytes.
#[derive(Debug, Default)]
pub struct CopyProgress {
    total: AtomicU64,
    data: AtomicU64,
    zeroed: AtomicU64,
    skipped: AtomicU64,
    resumed: AtomicU64,
    verified: AtomicU64,
    discarded: AtomicU64,
    not_discarded: AtomicU64,
    connections: AtomicUsize,
    requests: AtomicUsize,
    request_size: AtomicU64,
    cancelled: AtomicBool,
    complete: AtomicBool,
    wants_map: AtomicBool,
    map: OnceLock<DiskMap>,
    preparing: AtomicBool,
    listener: OnceLock<ProgressListener>,
    /// The work that this is a part of.
    whole: OnceLock<Arc<CopyProgress>>,
    pub(crate) counters: CopyRouteCounters,
    pub(crate) meter: CopyMeter,
}

/// A snapshot of the counters, in bytes, and the tuned settings.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ProgressSnapshot {
    /// Size of the source; 0 if unknown (a pipe).
    pub total: u64,
    /// Written as data.
    pub data: u64,
    /// Zeroed on the target.
    pub zeroed: u64,
    /// Zeroes that were already on the target.
    pub skipped: u64,
    /// Copied by an earlier run.
    pub resumed: u64,
    /// Compared by the verification that follows the copy.
    pub verified: u64,
    /// Lanes in use, that is, connections to each side; 0 before the first.
    pub connections: usize,
    /// Requests that all these lanes together may have in flight.
    pub requests: usize,
    /// Request size in bytes.
    pub request_size: u64,
    /// The target is being prepared, and nothing is copied yet.
    pub is_preparing: bool,
}

impl ProgressSnapshot {
    /// Bytes of the source that are done.
    pub fn done(&self) -> u64 {
        self.data + self.zeroed + self.skipped + self.resumed
    }
}

impl CopyProgress {
    /// Counters at zero.
    pub fn new() -> CopyProgress {
        CopyProgress::default()
    }

    /// A snapshot of the counters.
    pub fn snapshot(&self) -> ProgressSnapshot {
        ProgressSnapshot {
            total: self.total.load(Ordering::Relaxed),
            data: self.data.load(Ordering::Relaxed),
            zeroed: self.zeroed.load(Ordering::Relaxed),
            skipped: self.skipped.load(Ordering::Relaxed),
            resumed: self.resumed.load(Ordering::Relaxed),
            verified: self.verified.load(Ordering::Relaxed),
            connections: self.connections.load(Ordering::Relaxed),
            requests: self.requests.load(Ordering::Relaxed),
            request_size: self.request_size.load(Ordering::Relaxed),
            is_preparing: self.preparing.load(Ordering::Relaxed),
        }
    }

    /// Counters of a part of this work: its total is added to the one here, and all its bytes count here as data,
    /// also those that are only read.
    pub fn part(self: &Arc<Self>) -> Arc<CopyProgress> {
        let part = CopyProgress::new();
        let _ = part.whole.set(self.clone());
        Arc::new(part)
    }

    /// Sets the counters of work that is not done by the engine: bytes that are done, of all of them.
    pub fn set_done(&self, done: u64, total: u64) {
        self.total.store(total, Ordering::Relaxed);
        self.data.store(done, Ordering::Relaxed);
    }

    /// Says whether the target is being prepared, for example emptied.
    pub fn set_preparing(&self, preparing: bool) {
        self.preparing.store(preparing, Ordering::Relaxed);
    }

    /// Bytes by route so far.
    pub fn routes(&self) -> RouteBytes {
        let ProgressSnapshot { data, zeroed, skipped, .. } = self.snapshot();
        self.counters.routes(data, zeroed, skipped)
    }

    /// Bytes discarded at the source so far, and bytes that could not be discarded.
    pub fn discarded(&self) -> (u64, u64) {
        (self.discarded.load(Ordering::Relaxed), self.not_discarded.load(Ordering::Relaxed))
    }

    /// Keeps a map of the disk from now on, if it is called before the copy begins. A copy from a
    /// pipe has none.
    pub fn keep_map(&self) {
        self.wants_map.store(true, Ordering::Relaxed);
    }

    /// The map of the disk; `None` without [`CopyProgress::keep_map`], or while the size is unknown.
    pub fn map(&self) -> Option<MapSnapshot> {
        self.map.get().map(DiskMap::read)
    }

    /// The disk that is copied has `size` bytes; later sizes do not change the map.
    pub(crate) fn set_disk_size(&self, size: u64) {
        if self.wants_map.load(Ordering::Relaxed)
            && let Some(map) = DiskMap::new(size)
        {
            let _ = self.map.set(map);
        }
    }

    /// Calls `listener` from now on with each number of bytes that is counted: of data, and of all
    /// others. A verification counts as data. Only the first listener is called.
    pub fn listen(&self, listener: impl Fn(u64, u64) + Send + Sync + 'static) {
        let _ = self.listener.set(ProgressListener(Box::new(listener)));
    }

    fn note(&self, fate: ByteOutcome, at: u64, bytes: u64) {
        if let Some(map) = self.map.get() {
            map.add(fate, at, bytes);
        }
        if let Some(whole) = self.whole.get() {
            whole.data.fetch_add(bytes, Ordering::Relaxed);
        }
        if let Some(ProgressListener(call)) = self.listener.get() {
            match fate {
                ByteOutcome::Data | ByteOutcome::Verified => call(bytes, 0),
                ByteOutcome::Zero | ByteOutcome::Resumed => call(0, bytes),
            }
        }
    }

    /// Request times and other measurements.
    pub fn meters(&self) -> MeterSnapshot {
        self.meter.read()
    }

    /// Asks the copy to stop: submits nothing more and waits for what is in flight.
    pub fn cancel(&self) {
        self.cancelled.store(true, Ordering::Relaxed);
    }

    /// Whether everything is copied: the rest of the run does not change the target.
    pub fn is_complete(&self) -> bool {
        self.complete.load(Ordering::Relaxed)
    }

    pub(crate) fn set_complete(&self) {
        self.complete.store(true, Ordering::Relaxed);
    }

    /// Whether the copy was asked to stop.
    pub fn is_cancelled(&self) -> bool {
        self.cancelled.load(Ordering::Relaxed)
            || self.whole.get().is_some_and(|whole| whole.is_cancelled())
    }

    /// Excludes `bytes` bytes of the total from the copy.
    pub(crate) fn leave_out(&self, bytes: u64) {
        self.total.fetch_sub(bytes, Ordering::Relaxed);
        if let Some(whole) = self.whole.get() {
            whole.total.fetch_sub(bytes, Ordering::Relaxed);
        }
    }

    /// Sets the size of the source before the copy begins.
    pub fn expect(&self, bytes: u64) {
        self.set_total(bytes);
    }

    pub(crate) fn set_total(&self, bytes: u64) {
        let before = self.total.swap(bytes, Ordering::Relaxed);
        if let Some(whole) = self.whole.get() {
            whole.total.fetch_add(bytes, Ordering::Relaxed);
            whole.total.fetch_sub(before, Ordering::Relaxed);
        }
        // Reads that only determined what to copy do not count as verification.
        self.verified.store(0, Ordering::Relaxed);
    }

    /// Adds `bytes` bytes to copy.
    pub(crate) fn add_total(&self, bytes: u64) {
        self.total.fetch_add(bytes, Ordering::Relaxed);
        if let Some(whole) = self.whole.get() {
            whole.total.fetch_add(bytes, Ordering::Relaxed);
        }
    }

    pub(crate) fn add_data(&self, at: u64, bytes: u64) {
        self.data.fetch_add(bytes, Ordering::Relaxed);
        self.note(ByteOutcome::Data, at, bytes);
    }

    pub(crate) fn add_zeroed(&self, at: u64, bytes: u64) {
        self.zeroed.fetch_add(bytes, Ordering::Relaxed);
        self.note(ByteOutcome::Zero, at, bytes);
    }

    pub(crate) fn add_skipped(&self, at: u64, bytes: u64) {
        self.skipped.fetch_add(bytes, Ordering::Relaxed);
        self.note(ByteOutcome::Zero, at, bytes);
    }

    pub(crate) fn add_resumed(&self, at: u64, bytes: u64) {
        self.resumed.fetch_add(bytes, Ordering::Relaxed);
        self.note(ByteOutcome::Resumed, at, bytes);
    }

    pub(crate) fn add_verified(&self, at: u64, bytes: u64) {
        self.verified.fetch_add(bytes, Ordering::Relaxed);
        self.note(ByteOutcome::Verified, at, bytes);
    }

    pub(crate) fn add_discarded(&self, bytes: u64) {
        self.discarded.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Counts bytes that could not be discarded; true for the first ones.
    pub(crate) fn add_kept(&self, bytes: u64) -> bool {
        self.not_discarded.fetch_add(bytes, Ordering::Relaxed) == 0
    }

    pub(crate) fn set_connections(&self, lanes: usize) {
        self.connections.store(lanes, Ordering::Relaxed);
    }

    pub(crate) fn set_request_size(&self, bytes: u64) {
        self.request_size.store(bytes, Ordering::Relaxed);
    }

    /// A window changed from `before` requests to `now`.
    pub(crate) fn change_requests(&self, before: usize, now: usize) {
        if now >= before {
            self.requests.fetch_add(now - before, Ordering::Relaxed);
        } else {
            self.requests.fetch_sub(before - now, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_count_in_the_whole() {
        let whole = Arc::new(CopyProgress::new());
        let [one, other] = [whole.part(), whole.part()];
        one.expect(10);
        one.expect(30);
        other.expect(20);
        one.add_verified(0, 5);
        other.add_skipped(0, 7);
        other.leave_out(2);
        let now = whole.snapshot();
        assert_eq!((now.total, now.data), (48, 12));
        whole.cancel();
        assert!(one.is_cancelled());
    }
}
