//! Passes items from other threads to a worker, and wakes it.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use async_task::Runnable;

use crate::ending::WorkerShutdown;
use crate::sys::Wakeup;

/// Items that other threads pass to a worker.
pub(crate) struct Inbox {
    pub(crate) worker: usize,
    queue: Mutex<InboxQueue>,
    /// The worker sleeps in its driver, or is about to: a push must wake it.
    asleep: AtomicBool,
    pub(crate) wakeup: Arc<Wakeup>,
    pub(crate) ending: Arc<WorkerShutdown>,
}

#[derive(Default)]
struct InboxQueue {
    items: VecDeque<InboxItem>,
    closed: bool,
}

pub(crate) enum InboxItem {
    Run(Runnable),
    Call(Box<dyn FnOnce() + Send>),
    Stop,
}

impl Inbox {
    pub(crate) fn new(worker: usize, ending: Arc<WorkerShutdown>) -> std::io::Result<Inbox> {
        Ok(Inbox {
            worker,
            ending,
            queue: Mutex::default(),
            asleep: AtomicBool::new(false),
            wakeup: Arc::new(Wakeup::new()?),
        })
    }

    /// Adds an item; false (item dropped) if the worker has ended.
    pub(crate) fn push(&self, item: InboxItem) -> bool {
        {
            let mut queue = self.queue.lock().expect("no panic under this lock");
            if queue.closed {
                drop(queue);
                // A runnable belongs to its worker's thread and must not be dropped on another.
                if let InboxItem::Run(runnable) = item {
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

    pub(crate) fn take(&self) -> VecDeque<InboxItem> {
        std::mem::take(&mut self.queue.lock().expect("no panic under this lock").items)
    }

    pub(crate) fn close(&self) -> VecDeque<InboxItem> {
        let mut queue = self.queue.lock().expect("no panic under this lock");
        queue.closed = true;
        std::mem::take(&mut queue.items)
    }

    /// Announces sleep; false if there is work to do first.
    pub(crate) fn prepare_sleep(&self) -> bool {
        self.asleep.store(true, Ordering::SeqCst);
        let empty = self.queue.lock().expect("no panic under this lock").items.is_empty();
        if !empty {
            self.awake();
        }
        empty
    }

    /// Whether the worker has ended, or could not be started.
    pub(crate) fn is_closed(&self) -> bool {
        self.queue.lock().expect("no panic under this lock").closed
    }

    /// Whether no item waits.
    pub(crate) fn is_empty(&self) -> bool {
        self.queue.lock().expect("no panic under this lock").items.is_empty()
    }

    /// Whether the worker sleeps, as far as another thread can see.
    pub(crate) fn is_asleep(&self) -> bool {
        self.asleep.load(Ordering::Relaxed)
    }

    pub(crate) fn awake(&self) {
        self.asleep.store(false, Ordering::SeqCst);
    }
}
