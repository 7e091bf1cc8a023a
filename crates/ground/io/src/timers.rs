//! The timers of one worker, ordered by their deadlines.

use std::collections::BTreeMap;
use std::task::Waker;
use std::time::Instant;

/// A deadline, and a number that distinguishes equal deadlines.
pub(crate) type TimerKey = (Instant, u64);

/// The waiters by deadline.
#[derive(Default)]
pub(crate) struct Timers {
    set: BTreeMap<TimerKey, Waker>,
    next: u64,
}

impl Timers {
    /// Takes out everything due at `now`.
    pub(crate) fn due(&mut self, now: Instant) -> Vec<Waker> {
        let mut due = Vec::new();
        while let Some(entry) = self.set.first_entry() {
            if entry.key().0 > now {
                break;
            }
            due.push(entry.remove());
        }
        due
    }

    /// The earliest deadline.
    pub(crate) fn earliest(&self) -> Option<Instant> {
        self.set.keys().next().map(|key| key.0)
    }

    /// A place for a deadline, for [`Timers::set`].
    pub(crate) fn place(&mut self, deadline: Instant) -> TimerKey {
        self.next += 1;
        (deadline, self.next)
    }

    /// Wakes `waker` at the deadline of a place.
    pub(crate) fn set(&mut self, place: TimerKey, waker: Waker) {
        self.set.insert(place, waker);
    }

    /// Removes a place.
    pub(crate) fn remove(&mut self, place: TimerKey) {
        self.set.remove(&place);
    }
}
