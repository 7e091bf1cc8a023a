//! Locks on ranges of numbers (bytes, blocks), granted in order of request.
//!
//! Every range, held or waiting, is an entry of one index by start and length. A new entry counts
//! the earlier ones that overlap and exclude it; it is granted when the count is zero. A release
//! visits only the entries that overlap it, so that it wakes exactly those that can proceed, and
//! small ranges cannot overtake a wide one for ever.
//!
//! A task that holds a range must not wait for another one that overlaps it, or for one that could
//! be behind a waiter for the first: that is a deadlock, as with any first-in-first-out lock.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::{Completer, Ticket};

/// What ranges are locked for.
pub trait LockMode: Copy + Eq {
    /// Whether two overlapping ranges with these holds exclude each other; symmetric.
    fn excludes(self, other: Self) -> bool;
}

/// Excludes all others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExclusiveMode;

impl LockMode for ExclusiveMode {
    fn excludes(self, ExclusiveMode: ExclusiveMode) -> bool {
        true
    }
}

/// Locks on ranges of numbers, for tasks of any worker.
pub struct RangeLocks<H: LockMode = ExclusiveMode>(Mutex<LockIndex<H>>);

impl<H: LockMode> Default for RangeLocks<H> {
    fn default() -> RangeLocks<H> {
        let entries = BTreeMap::new();
        let in_class = [0; CLASSES];
        RangeLocks(Mutex::new(LockIndex { entries, in_class, classes: 0, next_id: 0 }))
    }
}

/// Classes of length: class `c` has the lengths from `2^c` to `2^(c+1) - 1`, class 0 also the empty range.
const CLASSES: usize = u64::BITS as usize;

/// The position of an entry in the index. IDs ascend in the order of creation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct LockKey {
    class: u32,
    start: u64,
    id: u64,
}

struct LockEntry<H> {
    end: u64,
    hold: H,
    /// Number of earlier entries that this one waits for.
    blockers: usize,
    /// The waiter; none once the range is held.
    waiting: Option<Completer<()>>,
}

struct LockIndex<H> {
    entries: BTreeMap<LockKey, LockEntry<H>>,
    /// Number of entries in each class.
    in_class: [usize; CLASSES],
    /// A bit for each class that has entries.
    classes: u64,
    next_id: u64,
}

impl<H: LockMode> LockIndex<H> {
    /// Calls `visit` for the entries that overlap `start..end` and exclude `hold`, until it returns
    /// false.
    ///
    /// Entries of one class that overlap begin less than twice the class's length before `start`,
    /// so that few others are visited: of ranges that exclude each other, at most two per class.
    fn visit(
        &mut self,
        (start, end, hold): (u64, u64, H),
        mut visit: impl FnMut(&LockKey, &mut LockEntry<H>) -> bool,
    ) {
        let mut classes = self.classes;
        while classes != 0 {
            let class = classes.trailing_zeros();
            classes &= classes - 1;
            let longest = u64::MAX >> (u64::BITS - 1 - class);
            let from = LockKey { class, start: start.saturating_sub(longest), id: 0 };
            let to = LockKey { class, start: end, id: 0 };
            for (key, entry) in self.entries.range_mut(from..to.max(from)) {
                if entry.end > start && entry.hold.excludes(hold) && !visit(key, entry) {
                    return;
                }
            }
        }
    }

    /// Whether an entry overlaps the range and excludes it.
    fn is_blocked(&mut self, range: (u64, u64, H)) -> bool {
        let mut blocked = false;
        self.visit(range, |_, _| {
            blocked = true;
            false
        });
        blocked
    }

    /// Adds an entry after all others.
    fn add(
        &mut self,
        range: (u64, u64, H),
        blockers: usize,
        waiting: Option<Completer<()>>,
    ) -> LockKey {
        let (start, end, hold) = range;
        let class = u64::BITS - 1 - (end.saturating_sub(start) | 1).leading_zeros();
        let key = LockKey { class, start, id: self.next_id };
        self.next_id += 1;
        self.in_class[class as usize] += 1;
        self.classes |= 1 << class;
        self.entries.insert(key, LockEntry { end, hold, blockers, waiting });
        key
    }

    /// Removes an entry; `granted` gets the entries that are now free to proceed.
    fn remove(&mut self, key: LockKey, granted: &mut Vec<Completer<()>>) {
        let Some(entry) = self.entries.remove(&key) else { return };
        self.in_class[key.class as usize] -= 1;
        if self.in_class[key.class as usize] == 0 {
            self.classes &= !(1 << key.class);
        }
        self.visit((key.start, entry.end, entry.hold), |other, later| {
            if other.id > key.id {
                later.blockers -= 1;
                if later.blockers == 0 {
                    granted.extend(later.waiting.take());
                }
            }
            true
        });
    }
}

/// A locked range; released on drop.
pub struct RangeLock<H: LockMode = ExclusiveMode> {
    locks: Arc<RangeLocks<H>>,
    key: LockKey,
}

impl RangeLocks {
    /// Waits until no other task holds a part of `start..end`, and holds it.
    pub async fn lock(self: &Arc<Self>, start: u64, end: u64) -> RangeLock {
        self.lock_for(ExclusiveMode, start, end).await
    }
}

impl<H: LockMode> RangeLocks<H> {
    /// Waits until no hold that excludes `hold` covers a part of `start..end`, nor has waited for
    /// one longer, and holds it. Dropping the future gives up the place in the queue.
    pub async fn lock_for(self: &Arc<Self>, hold: H, start: u64, end: u64) -> RangeLock<H> {
        let (lock, granted) = self.enter((start, end, hold));
        if let Some(ticket) = granted {
            // The sender is in the index until the range is granted, so it is never lost before.
            let _ = ticket.await;
        }
        lock
    }

    /// The lock if it is free now.
    pub fn try_lock_for(self: &Arc<Self>, hold: H, start: u64, end: u64) -> Option<RangeLock<H>> {
        let range = (start, end, hold);
        let mut index = self.index();
        if index.is_blocked(range) {
            return None;
        }
        let key = index.add(range, 0, None);
        Some(RangeLock { locks: self.clone(), key })
    }

    /// Adds the range to the index. If it must wait, the ticket completes when it is held.
    fn enter(self: &Arc<Self>, range: (u64, u64, H)) -> (RangeLock<H>, Option<Ticket<()>>) {
        let mut index = self.index();
        let mut blockers = 0;
        index.visit(range, |_, _| {
            blockers += 1;
            true
        });
        let (completer, ticket) = match blockers {
            0 => (None, None),
            _ => {
                let (completer, ticket) = crate::ticket();
                (Some(completer), Some(ticket))
            }
        };
        let key = index.add(range, blockers, completer);
        (RangeLock { locks: self.clone(), key }, ticket)
    }

    fn index(&self) -> MutexGuard<'_, LockIndex<H>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<H: LockMode> Drop for RangeLock<H> {
    fn drop(&mut self) {
        let mut granted = Vec::new();
        self.locks.index().remove(self.key, &mut granted);
        for completer in granted {
            completer.complete(());
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::future::Future;
    use std::pin::Pin;
    use std::task::{Context, Poll, Waker};

    use super::*;

    /// Reads are shared, writes exclude all others.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    enum Use {
        Read,
        Write,
    }

    impl LockMode for Use {
        fn excludes(self, other: Use) -> bool {
            self == Use::Write || other == Use::Write
        }
    }

    type Locks = Arc<RangeLocks<Use>>;
    type Waiting = Pin<Box<dyn Future<Output = RangeLock<Use>>>>;

    fn wait(locks: &Locks, hold: Use, start: u64, end: u64) -> Waiting {
        let locks = locks.clone();
        Box::pin(async move { locks.lock_for(hold, start, end).await })
    }

    fn poll(waiting: &mut Waiting) -> Option<RangeLock<Use>> {
        match waiting.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(lock) => Some(lock),
            Poll::Pending => None,
        }
    }

    #[test]
    fn a_wide_range_is_not_overtaken_by_small_ones() {
        let locks = Locks::default();
        let first = locks.try_lock_for(Use::Write, 10, 11).unwrap();
        let mut wide = wait(&locks, Use::Write, 0, 1 << 40);
        assert!(poll(&mut wide).is_none());
        let mut small = wait(&locks, Use::Write, 20, 21);
        assert!(poll(&mut small).is_none(), "it came after the wide range");
        assert!(locks.try_lock_for(Use::Read, 30, 31).is_none());
        let elsewhere = locks.try_lock_for(Use::Write, 1 << 40, 1 << 41);
        assert!(elsewhere.is_some(), "nobody waits for this range");
        drop(first);
        let held = poll(&mut wide).unwrap();
        assert!(poll(&mut small).is_none());
        drop(held);
        assert!(poll(&mut small).is_some());
    }

    #[test]
    fn a_waiter_that_gives_up_blocks_nobody() {
        let locks = Locks::default();
        let held = locks.try_lock_for(Use::Read, 0, 10).unwrap();
        let mut writer = wait(&locks, Use::Write, 5, 15);
        assert!(poll(&mut writer).is_none());
        let mut reader = wait(&locks, Use::Read, 0, 20);
        assert!(poll(&mut reader).is_none(), "behind the writer");
        drop(writer);
        assert!(poll(&mut reader).is_some(), "reads go together");
        drop(held);
        assert!(locks.index().entries.is_empty());
        assert_eq!(locks.index().classes, 0);
    }

    #[test]
    fn a_release_wakes_only_those_that_can_go_on() {
        let locks = Locks::default();
        let held = [1, 2, 3].map(|at| locks.try_lock_for(Use::Write, at, at + 1).unwrap());
        let (_beside, beside) = locks.enter((3, 4, Use::Write));
        let (_around, around) = locks.enter((1, 3, Use::Write));
        let mut beside = beside.unwrap();
        let mut around = around.unwrap();
        let is_woken = |ticket: &mut Ticket<()>| {
            Pin::new(ticket).poll(&mut Context::from_waker(Waker::noop())).is_ready()
        };
        let [first, second, third] = held;
        drop(second);
        assert!(!is_woken(&mut around), "1 is still held");
        drop(third);
        assert!(is_woken(&mut beside));
        assert!(!is_woken(&mut around));
        drop(first);
        assert!(is_woken(&mut around));
    }

    /// A reference model of the locks that checks all entries each time.
    #[derive(Default)]
    struct Model {
        queue: Vec<(u64, u64, u64, Use)>,
    }

    impl Model {
        fn is_held(&self, id: u64) -> bool {
            let mine = self.queue.iter().position(|entry| entry.0 == id).unwrap();
            let (_, start, end, hold) = self.queue[mine];
            !self.queue[..mine]
                .iter()
                .any(|other| other.1 < end && start < other.2 && other.3.excludes(hold))
        }
    }

    #[test]
    fn random_ranges_are_granted_as_a_queue_grants_them() {
        for seed in 1..=300_u64 {
            let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
            let mut random = move |below: u64| {
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                state % below
            };
            let locks = Locks::default();
            let mut model = Model::default();
            let mut all: Vec<(u64, Option<Waiting>, Option<RangeLock<Use>>)> = Vec::new();
            for id in 0..200 {
                if random(3) > 0 {
                    let start = random(64) << random(50);
                    let end = start + 1 + (random(64) << random(50));
                    let hold = if random(2) == 0 { Use::Read } else { Use::Write };
                    model.queue.push((id, start, end, hold));
                    let mut waiting = wait(&locks, hold, start, end);
                    let lock = poll(&mut waiting);
                    all.push((id, Some(waiting).filter(|_| lock.is_none()), lock));
                } else if !all.is_empty() {
                    // Released, or given up while it waits.
                    let (id, ..) = all.swap_remove(random(all.len() as u64) as usize);
                    model.queue.retain(|entry| entry.0 != id);
                }
                for (id, waiting, lock) in &mut all {
                    if let Some(future) = waiting
                        && let Some(granted) = poll(future)
                    {
                        *lock = Some(granted);
                        *waiting = None;
                    }
                    assert_eq!(lock.is_some(), model.is_held(*id), "seed {seed}, entry {id}");
                }
            }
            drop(all);
            assert!(locks.index().entries.is_empty(), "seed {seed}");
        }
    }

    #[test]
    fn ranges_up_to_the_last_number() {
        let locks = Locks::default();
        let all = locks.try_lock_for(Use::Write, 0, u64::MAX).unwrap();
        assert!(locks.try_lock_for(Use::Read, u64::MAX - 1, u64::MAX).is_none());
        drop(all);
        let last = locks.try_lock_for(Use::Write, u64::MAX - 1, u64::MAX).unwrap();
        assert!(locks.try_lock_for(Use::Write, 0, u64::MAX).is_none());
        assert!(locks.try_lock_for(Use::Write, 0, u64::MAX - 1).is_some());
        drop(last);
    }
}
