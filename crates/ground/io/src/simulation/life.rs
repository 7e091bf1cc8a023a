//! How long the tasks of a worker live.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::task::Waker;

/// The tasks of one worker. Tasks that hold each other's wakers are found only here.
#[derive(Default)]
pub(super) struct WorkerTasks {
    over: Cell<bool>,
    wakers: RefCell<BTreeMap<u64, Waker>>,
    next: Cell<u64>,
}

impl WorkerTasks {
    /// Ends it: every task that is polled from now on drops its future. Returns those to poll.
    pub(super) fn end(&self) -> Vec<Waker> {
        self.over.set(true);
        std::mem::take(&mut *self.wakers.borrow_mut()).into_values().collect()
    }

    /// Whether it has ended.
    pub(super) fn is_over(&self) -> bool {
        self.over.get()
    }

    /// Adds a task, to be woken at the end; returns its number.
    pub(super) fn add(&self, waker: Waker) -> u64 {
        let number = self.next.get();
        self.next.set(number + 1);
        self.wakers.borrow_mut().insert(number, waker);
        number
    }

    /// Removes a task that ends before.
    pub(super) fn remove(&self, number: u64) {
        let waker = self.wakers.borrow_mut().remove(&number);
        // Outside of the borrow: the last waker of a task drops it.
        drop(waker);
    }
}
