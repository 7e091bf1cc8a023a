//! Ranges that are being changed; overlapping ones wait for each other.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use io::Completer;

/// Locks on ranges of numbers, for tasks of any worker.
#[derive(Default)]
pub(crate) struct RangeLocks(Mutex<Held>);

#[derive(Default)]
struct Held {
    ranges: Vec<(u64, u64)>,
    waiting: Vec<Completer<()>>,
}

/// A locked range; free again when dropped.
pub(crate) struct RangeLock {
    locks: Arc<RangeLocks>,
    range: (u64, u64),
}

impl RangeLocks {
    /// Waits until nobody holds a part of `start..end`, and holds it.
    pub(crate) async fn lock(self: &Arc<Self>, start: u64, end: u64) -> RangeLock {
        loop {
            let ticket = {
                let mut held = self.held();
                if !held.ranges.iter().any(|range| range.0 < end && start < range.1) {
                    held.ranges.push((start, end));
                    return RangeLock { locks: self.clone(), range: (start, end) };
                }
                let (completer, ticket) = io::ticket();
                held.waiting.push(completer);
                ticket
            };
            // Somebody is done; whether it was the right one shows.
            let _ = ticket.await;
        }
    }

    fn held(&self) -> MutexGuard<'_, Held> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for RangeLock {
    fn drop(&mut self) {
        let waiting = {
            let mut held = self.locks.held();
            let mine = held.ranges.iter().position(|range| *range == self.range);
            mine.map(|mine| held.ranges.swap_remove(mine));
            std::mem::take(&mut held.waiting)
        };
        waiting.into_iter().for_each(|completer| completer.complete(()));
    }
}
