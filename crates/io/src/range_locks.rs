//! Ranges that are being used or changed; those that do not go together wait for each other.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::Completer;

/// What ranges are locked for.
pub trait Hold: Copy + Eq {
    /// Whether overlapping ranges cannot be held for both; the same in both directions.
    fn excludes(self, other: Self) -> bool;
}

/// Nobody else is there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Alone;

impl Hold for Alone {
    fn excludes(self, Alone: Alone) -> bool {
        true
    }
}

/// Locks on ranges of numbers, for tasks of any worker.
pub struct RangeLocks<H: Hold = Alone>(Mutex<Held<H>>);

struct Held<H> {
    ranges: Vec<(u64, u64, H)>,
    waiting: Vec<Completer<()>>,
}

impl<H: Hold> Default for RangeLocks<H> {
    fn default() -> RangeLocks<H> {
        RangeLocks(Mutex::new(Held { ranges: Vec::new(), waiting: Vec::new() }))
    }
}

impl<H: Hold> Held<H> {
    fn take(&mut self, range: (u64, u64, H)) -> bool {
        let (start, end, hold) = range;
        let taken = |held: &(u64, u64, H)| held.0 < end && start < held.1 && held.2.excludes(hold);
        let free = !self.ranges.iter().any(taken);
        if free {
            self.ranges.push(range);
        }
        free
    }
}

/// A locked range; free again when dropped.
pub struct RangeLock<H: Hold = Alone> {
    locks: Arc<RangeLocks<H>>,
    range: (u64, u64, H),
}

impl RangeLocks {
    /// Waits until nobody holds a part of `start..end`, and holds it.
    pub async fn lock(self: &Arc<Self>, start: u64, end: u64) -> RangeLock {
        self.lock_for(Alone, start, end).await
    }
}

impl<H: Hold> RangeLocks<H> {
    /// Waits until nobody holds a part of `start..end` who does not go together with `hold`.
    pub async fn lock_for(self: &Arc<Self>, hold: H, start: u64, end: u64) -> RangeLock<H> {
        let range = (start, end, hold);
        loop {
            let ticket = {
                let mut held = self.held();
                if held.take(range) {
                    return RangeLock { locks: self.clone(), range };
                }
                let (completer, ticket) = crate::ticket();
                held.waiting.push(completer);
                ticket
            };
            // Somebody is done; whether it was the right one shows.
            let _ = ticket.await;
        }
    }

    /// The lock if it can be had without waiting.
    pub fn try_lock_for(self: &Arc<Self>, hold: H, start: u64, end: u64) -> Option<RangeLock<H>> {
        let range = (start, end, hold);
        self.held().take(range).then(|| RangeLock { locks: self.clone(), range })
    }

    fn held(&self) -> MutexGuard<'_, Held<H>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<H: Hold> Drop for RangeLock<H> {
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
