//! Calls into a worker from anywhere.

use std::collections::VecDeque;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use async_task::Runnable;

use crate::sync::{Ticket, ticket};
use crate::sys::Wakeup;
use crate::task;

/// A handle on one worker, usable from any thread.
#[derive(Clone)]
pub struct Remote(pub(crate) Arc<Inbox>);

/// What other threads leave for a worker.
pub(crate) struct Inbox {
    pub(crate) worker: usize,
    queue: Mutex<Queue>,
    /// The worker is about to wait in its driver, or does: whoever leaves something must wake it.
    asleep: AtomicBool,
    pub(crate) wakeup: Wakeup,
}

#[derive(Default)]
struct Queue {
    items: VecDeque<Item>,
    closed: bool,
}

pub(crate) enum Item {
    Run(Runnable),
    Call(Box<dyn FnOnce() + Send>),
    Stop,
}

impl Inbox {
    pub(crate) fn new(worker: usize) -> std::io::Result<Inbox> {
        Ok(Inbox {
            worker,
            queue: Mutex::default(),
            asleep: AtomicBool::new(false),
            wakeup: Wakeup::new()?,
        })
    }

    /// Leaves an item; false (item dropped) when the worker has ended.
    pub(crate) fn push(&self, item: Item) -> bool {
        {
            let mut queue = self.queue.lock().expect("no panic under this lock");
            if queue.closed {
                drop(queue);
                // A runnable belongs to its worker's thread and must not be dropped on another.
                if let Item::Run(runnable) = item {
                    std::mem::forget(runnable);
                }
                return false;
            }
            queue.items.push_back(item);
        }
        if self.asleep.swap(false, Ordering::SeqCst) {
            self.wakeup.wake();
        }
        true
    }

    pub(crate) fn take(&self) -> VecDeque<Item> {
        std::mem::take(&mut self.queue.lock().expect("no panic under this lock").items)
    }

    pub(crate) fn close(&self) -> VecDeque<Item> {
        let mut queue = self.queue.lock().expect("no panic under this lock");
        queue.closed = true;
        std::mem::take(&mut queue.items)
    }

    /// Announces sleep; false if there is something to do first.
    pub(crate) fn prepare_sleep(&self) -> bool {
        self.asleep.store(true, Ordering::SeqCst);
        let empty = self.queue.lock().expect("no panic under this lock").items.is_empty();
        if !empty {
            self.awake();
        }
        empty
    }

    pub(crate) fn awake(&self) {
        self.asleep.store(false, Ordering::SeqCst);
    }
}

impl Remote {
    /// Number of the worker, from 0.
    pub fn worker(&self) -> usize {
        self.0.worker
    }

    /// Runs `make` on the worker and the future that it returns as a task there; the ticket yields
    /// the output, or `Lost` if the worker ends first.
    pub fn spawn<M, F>(&self, make: M) -> Ticket<F::Output>
    where
        M: FnOnce() -> F + Send + 'static,
        F: Future + 'static,
        F::Output: Send + 'static,
    {
        let (completer, ticket) = ticket();
        let call = Box::new(move || {
            drop(task::start(async move { completer.complete(make().await) }));
        });
        self.0.push(Item::Call(call));
        ticket
    }
}

impl fmt::Debug for Remote {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Remote(worker {})", self.0.worker)
    }
}
