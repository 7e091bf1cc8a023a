//! Calls into a worker from anywhere.

use std::collections::VecDeque;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use async_task::Runnable;

use crate::sync::{Ticket, ticket};
use crate::sys::Wakeup;
use crate::task;
use crate::worker::try_with_worker;

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
    /// Tasks of all workers of the runtime that it does not end before.
    pub(crate) last: Arc<AtomicUsize>,
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
    pub(crate) fn new(worker: usize, last: Arc<AtomicUsize>) -> std::io::Result<Inbox> {
        Ok(Inbox {
            worker,
            last,
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

    /// Whether the worker waits, as far as can be told from another one.
    pub(crate) fn is_asleep(&self) -> bool {
        self.asleep.load(Ordering::Relaxed)
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

impl Remote {
    /// As [`Remote::spawn`], for what must be done before the program ends (what was not written yet):
    /// no worker of the runtime ends before this task has. False: the worker has ended already.
    pub fn spawn_last<M, F>(&self, make: M) -> bool
    where
        M: FnOnce() -> F + Send + 'static,
        F: Future<Output = ()> + 'static,
    {
        if self.0.queue.lock().expect("no panic under this lock").closed {
            return false;
        }
        let ending = Last::new(&self.0.last);
        let call = Box::new(move || {
            drop(task::start(async move {
                make().await;
                drop(ending);
            }));
        });
        self.0.push(Item::Call(call))
    }
}

/// A task that the runtime does not end before.
struct Last(Arc<AtomicUsize>);

impl Last {
    fn new(count: &Arc<AtomicUsize>) -> Last {
        count.fetch_add(1, Ordering::SeqCst);
        Last(count.clone())
    }
}

impl Drop for Last {
    fn drop(&mut self) {
        if self.0.fetch_sub(1, Ordering::SeqCst) == 1 {
            // Whoever only waits for this looks again.
            try_with_worker(|worker| worker.wake_peers());
        }
    }
}

impl fmt::Debug for Remote {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Remote(worker {})", self.0.worker)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::time::Duration;

    use crate::{Config, Remote, Runtime};

    #[test]
    fn a_runtime_ends_after_what_must_be_done_before() {
        let runtime = Runtime::start(&Config { workers: 2, ..Config::default() }).unwrap();
        let (sender, done) = mpsc::channel();
        let other = runtime.block_on(|| async { Remote::to(1) });
        let later = sender.clone();
        assert!(other.spawn_last(move || async move {
            crate::sleep(Duration::from_millis(50)).await;
            // On another worker, which must be there still.
            let _ = Remote::to(0)
                .spawn(|| async { crate::sleep(Duration::from_millis(50)).await })
                .await;
            later.send("last").unwrap();
        }));
        drop(other.spawn(move || async move {
            crate::sleep(Duration::from_secs(3600)).await;
            sender.send("never").unwrap();
        }));
        drop(runtime);
        assert_eq!(done.recv(), Ok("last"));
        assert!(done.recv().is_err(), "what merely waits is dropped");
        assert!(!other.spawn_last(|| async {}), "the worker has ended");
    }
}
