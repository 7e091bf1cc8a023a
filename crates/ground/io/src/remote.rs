//! Calls into a worker from anywhere.

use std::fmt;
use std::sync::Arc;

use crate::context::with_worker;
use crate::ending::ShutdownDelay;
use crate::inbox::{Inbox, InboxItem};
use crate::sync::{Ticket, ticket};
use crate::task;

/// A handle to one worker, usable from any thread.
#[derive(Clone)]
pub struct WorkerHandle(pub(crate) Arc<Inbox>);

impl WorkerHandle {
    /// A handle to worker `index` (modulo their number) of the current runtime.
    pub fn to(index: usize) -> WorkerHandle {
        with_worker(|worker| WorkerHandle(worker.peers[index % worker.peers.len()].clone()))
    }

    /// Number of the worker, from 0.
    pub fn worker(&self) -> usize {
        self.0.worker
    }

    /// Runs `make` on the worker and the future that it returns as a task there; the ticket yields
    /// the output, or `LostCompletion` if the worker ends first.
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
        self.0.push(InboxItem::Call(call));
        ticket
    }

    /// Like [`WorkerHandle::spawn`], for work that must finish before the program ends (unwritten data):
    /// no worker of the runtime ends before this task. False: the worker has already ended.
    pub fn spawn_last<M, F>(&self, make: M) -> bool
    where
        M: FnOnce() -> F + Send + 'static,
        F: Future<Output = ()> + 'static,
    {
        if self.0.is_closed() {
            return false;
        }
        let ending = ShutdownDelay::new(&self.0.ending);
        let call = Box::new(move || {
            drop(task::start(async move {
                make().await;
                drop(ending);
            }));
        });
        self.0.push(InboxItem::Call(call))
    }
}

/// Another, idle worker of the runtime, if there is one.
pub fn idle_worker() -> Option<WorkerHandle> {
    with_worker(|worker| {
        let (before, after) = worker.peers.split_at(worker.inbox.worker);
        let mut others = after[1..].iter().chain(before);
        others.find(|other| other.is_asleep()).cloned().map(WorkerHandle)
    })
}

impl fmt::Debug for WorkerHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "WorkerHandle(worker {})", self.0.worker)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::time::Duration;

    use crate::{Runtime, RuntimeConfig, WorkerHandle};

    #[test]
    fn a_runtime_ends_after_what_must_be_done_before() {
        let runtime =
            Runtime::start(&RuntimeConfig { workers: 2, ..RuntimeConfig::default() }).unwrap();
        let (sender, done) = mpsc::channel();
        let other = runtime.block_on(|| async { WorkerHandle::to(1) });
        let later = sender.clone();
        assert!(other.spawn_last(move || async move {
            crate::sleep(Duration::from_millis(50)).await;
            // On another worker, which must still be there.
            let _ = WorkerHandle::to(0)
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

    #[test]
    fn a_worker_without_work_stays_while_another_one_is_busy() {
        let runtime =
            Runtime::start(&RuntimeConfig { workers: 2, ..RuntimeConfig::default() }).unwrap();
        let (sender, done) = mpsc::channel();
        let (started, begun) = mpsc::channel();
        drop(runtime.workers()[1].spawn(move || async move {
            started.send(()).unwrap();
            // Blocks the worker: the runtime stops meanwhile, and the other one is idle.
            std::thread::sleep(Duration::from_millis(100));
            let other = WorkerHandle::to(0);
            assert!(other.spawn_last(move || async move {
                crate::sleep(Duration::from_millis(10)).await;
                sender.send("last").unwrap();
            }));
        }));
        begun.recv().unwrap();
        drop(runtime);
        assert_eq!(done.recv(), Ok("last"));
    }
}
