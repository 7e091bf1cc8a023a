//! The state of a worker thread, and access to it from its tasks.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::sync::Arc;

use async_task::Runnable;

#[cfg(feature = "simulation")]
pub(crate) use self::current::replace_worker;
pub(crate) use self::current::{set_worker, try_with_worker, with_worker};
use crate::driver::Driver;
use crate::inbox::{Inbox, InboxItem};
use crate::table::OpTable;
use crate::timers::Timers;

/// The state of a worker thread.
pub(crate) struct Worker {
    pub(crate) inbox: Arc<Inbox>,
    /// The inboxes of all workers of the runtime, its own included.
    pub(crate) peers: Vec<Arc<Inbox>>,
    /// Tasks that are ready, in the order in which they became so.
    pub(crate) ready: RefCell<VecDeque<Runnable>>,
    pub(crate) engine: Cell<&'static str>,
    pub(crate) driver: RefCell<Box<dyn Driver>>,
    pub(crate) ops: RefCell<OpTable>,
    pub(crate) timers: RefCell<Timers>,
    /// Number of tasks that wait for a writable socket.
    pub(crate) ahead: Cell<usize>,
    /// Bytes sent and received since the last turn of the driver.
    pub(crate) moved: Cell<usize>,
}

impl Worker {
    /// Queues a task that became ready: here, or through the inbox from other threads.
    pub(crate) fn scheduler(&self) -> impl Fn(Runnable) + Send + Sync + use<> {
        let inbox = self.inbox.clone();
        move |runnable| {
            let mut task = Some(runnable);
            try_with_worker(|worker| {
                if Arc::ptr_eq(&worker.inbox, &inbox) {
                    worker.ready.borrow_mut().extend(task.take());
                }
            });
            if let Some(task) = task {
                inbox.push(InboxItem::Run(task));
            }
        }
    }
}

/// Counts bytes that were sent or received.
pub(crate) fn moved(bytes: usize) {
    try_with_worker(|worker| worker.moved.update(|moved| moved.saturating_add(bytes)));
}

/// The current worker's number.
pub fn worker() -> usize {
    with_worker(|worker| worker.inbox.worker)
}

/// Number of workers of the current runtime.
pub fn worker_count() -> usize {
    with_worker(|worker| worker.peers.len())
}

/// Name of the engine in use: `uring` or `threads`.
pub fn engine_name() -> &'static str {
    with_worker(|worker| worker.engine.get())
}

/// A thread has one worker for life.
#[cfg(not(feature = "simulation"))]
mod current {
    use std::cell::OnceCell;

    use super::Worker;

    thread_local! {
        static CURRENT: OnceCell<Worker> = const { OnceCell::new() };
    }

    /// Makes `worker` the current thread's, once per thread.
    pub(crate) fn set_worker(worker: Worker) {
        let fresh = CURRENT.with(|current| current.set(worker).is_ok());
        assert!(fresh, "a new thread has no worker yet");
    }

    /// Runs `f` with the current thread's worker. Panics outside a worker.
    pub(crate) fn with_worker<R>(f: impl FnOnce(&Worker) -> R) -> R {
        CURRENT.with(|current| f(current.get().expect("called outside of a worker thread")))
    }

    /// Runs `f` with the current thread's worker, unless there is none or it is ending.
    pub(crate) fn try_with_worker<R>(f: impl FnOnce(&Worker) -> R) -> Option<R> {
        CURRENT.try_with(|current| current.get().map(f)).ok().flatten()
    }
}

/// A simulation runs many workers on one thread, one at a time.
#[cfg(feature = "simulation")]
mod current {
    use std::cell::RefCell;
    use std::rc::Rc;

    use super::Worker;

    thread_local! {
        static CURRENT: RefCell<Option<Rc<Worker>>> = const { RefCell::new(None) };
    }

    /// Makes `worker` the current thread's, once per thread.
    pub(crate) fn set_worker(worker: Worker) {
        let before = replace_worker(Some(Rc::new(worker)));
        assert!(before.is_none(), "a new thread has no worker yet");
    }

    /// Makes `worker` the current thread's; returns the one before.
    pub(crate) fn replace_worker(worker: Option<Rc<Worker>>) -> Option<Rc<Worker>> {
        CURRENT.with(|current| current.replace(worker))
    }

    /// Runs `f` with the current thread's worker. Panics outside a worker.
    pub(crate) fn with_worker<R>(f: impl FnOnce(&Worker) -> R) -> R {
        let worker = CURRENT.with(|current| current.borrow().clone());
        f(&worker.expect("called outside of a worker thread"))
    }

    /// Runs `f` with the current thread's worker, unless there is none or it is ending.
    pub(crate) fn try_with_worker<R>(f: impl FnOnce(&Worker) -> R) -> Option<R> {
        let worker = CURRENT.try_with(|current| current.borrow().clone()).ok().flatten();
        worker.map(|worker| f(&worker))
    }
}
