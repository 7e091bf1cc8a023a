//! Ranges that are being used or changed; those that do not go together wait for each other.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use io::Completer;

/// What a range is locked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Hold {
    /// To be changed, with nobody else there.
    Alone,
    /// To be used where it is: by others too, unless they are alone.
    Stay,
    /// To be written; what is there may be carried to the device below meanwhile.
    Write,
    /// To be carried to the device below, by one at a time.
    Carry,
}

impl Hold {
    fn excludes(self, other: Hold) -> bool {
        matches!(
            (self, other),
            (Hold::Alone, _)
                | (_, Hold::Alone)
                | (Hold::Write, Hold::Write)
                | (Hold::Carry, Hold::Carry)
        )
    }
}

/// Locks on ranges of numbers, for tasks of any worker.
#[derive(Default)]
pub(crate) struct RangeLocks(Mutex<Held>);

#[derive(Default)]
struct Held {
    ranges: Vec<(u64, u64, Hold)>,
    waiting: Vec<Completer<()>>,
}

impl Held {
    fn take(&mut self, range: (u64, u64, Hold)) -> bool {
        let (start, end, hold) = range;
        let taken =
            |held: &(u64, u64, Hold)| held.0 < end && start < held.1 && held.2.excludes(hold);
        let free = !self.ranges.iter().any(taken);
        if free {
            self.ranges.push(range);
        }
        free
    }
}

/// A locked range; free again when dropped.
pub(crate) struct RangeLock {
    locks: Arc<RangeLocks>,
    range: (u64, u64, Hold),
}

impl RangeLocks {
    /// Waits until nobody holds a part of `start..end`, and holds it.
    pub(crate) async fn lock(self: &Arc<Self>, start: u64, end: u64) -> RangeLock {
        self.lock_for(Hold::Alone, start, end).await
    }

    /// Waits until nobody holds a part of `start..end` who does not go together with `hold`.
    pub(crate) async fn lock_for(self: &Arc<Self>, hold: Hold, start: u64, end: u64) -> RangeLock {
        let range = (start, end, hold);
        loop {
            let ticket = {
                let mut held = self.held();
                if held.take(range) {
                    return RangeLock { locks: self.clone(), range };
                }
                let (completer, ticket) = io::ticket();
                held.waiting.push(completer);
                ticket
            };
            // Somebody is done; whether it was the right one shows.
            let _ = ticket.await;
        }
    }

    /// The lock if it can be had without waiting.
    pub(crate) fn try_lock_for(
        self: &Arc<Self>,
        hold: Hold,
        start: u64,
        end: u64,
    ) -> Option<RangeLock> {
        let range = (start, end, hold);
        self.held().take(range).then(|| RangeLock { locks: self.clone(), range })
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_does_not_go_together_waits() {
        use Hold::{Alone, Carry, Stay, Write};
        let free_beside = |first, second| {
            let locks = Arc::<RangeLocks>::default();
            let held = locks.try_lock_for(first, 10, 20).unwrap();
            assert!(locks.try_lock_for(second, 0, 10).is_some(), "a neighbour");
            let free = locks.try_lock_for(second, 19, 21).is_some();
            drop(held);
            assert!(locks.try_lock_for(Alone, 0, 99).is_some(), "everything is free again");
            free
        };
        for (first, second, expected) in [
            (Alone, Stay, false),
            (Write, Alone, false),
            (Write, Write, false),
            (Write, Carry, true),
            (Carry, Carry, false),
            (Carry, Stay, true),
            (Stay, Stay, true),
            (Stay, Write, true),
        ] {
            assert_eq!(free_beside(first, second), expected, "{first:?} {second:?}");
            assert_eq!(free_beside(second, first), expected, "{second:?} {first:?}");
        }
    }
}
