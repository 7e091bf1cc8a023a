//! How the workers of a runtime end: all at once, when none of them has anything left to do.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::inbox::{Inbox, InboxItem};

/// Shared by the workers of a runtime. A worker that ended by itself would leave nobody to do what
/// another one still wants from it: a cache on the other worker is written back where it was
/// opened.
#[derive(Default)]
pub(crate) struct WorkerShutdown {
    /// Number of tasks that must end before any worker does.
    last: AtomicUsize,
    agreement: Mutex<Agreement>,
}

#[derive(Default)]
struct Agreement {
    /// Whether each worker has to stop and had nothing to do when it last looked.
    idle: Vec<bool>,
    /// All workers were idle at one moment: they end.
    reached: bool,
}

impl WorkerShutdown {
    pub(crate) fn new(workers: usize) -> WorkerShutdown {
        let agreement = Agreement { idle: vec![false; workers], reached: false };
        WorkerShutdown { last: AtomicUsize::new(0), agreement: Mutex::new(agreement) }
    }

    /// Worker `index` has to stop and has nothing to do. True: all workers end now. A worker
    /// whose inbox is closed has never started.
    #[cold]
    pub(crate) fn agree(&self, index: usize, workers: &[Arc<Inbox>]) -> bool {
        let mut agreement = self.lock();
        agreement.idle[index] = true;
        // No task runs anywhere once all are idle, and what one has sent to another is in an inbox.
        let mut all = workers.iter().zip(&agreement.idle);
        let reached = self.last.load(Ordering::SeqCst) == 0
            && all.all(|(inbox, idle)| inbox.is_closed() || (*idle && inbox.is_empty()));
        if reached && !agreement.reached {
            agreement.reached = true;
            drop(agreement);
            for (_, peer) in workers.iter().enumerate().filter(|(other, _)| *other != index) {
                peer.push(InboxItem::Stop);
            }
            return true;
        }
        agreement.reached
    }

    /// Worker `index` is about to run tasks again. False: the workers have agreed to end.
    #[cold]
    pub(crate) fn withdraw(&self, index: usize) -> bool {
        let mut agreement = self.lock();
        agreement.idle[index] = agreement.reached;
        !agreement.reached
    }

    fn lock(&self) -> MutexGuard<'_, Agreement> {
        self.agreement.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A task that must end before the workers do.
pub(crate) struct ShutdownDelay(Arc<WorkerShutdown>);

impl ShutdownDelay {
    pub(crate) fn new(ending: &Arc<WorkerShutdown>) -> ShutdownDelay {
        ending.last.fetch_add(1, Ordering::SeqCst);
        ShutdownDelay(ending.clone())
    }
}

impl Drop for ShutdownDelay {
    fn drop(&mut self) {
        // The worker that drops it, which is not idle, looks at the number next.
        self.0.last.fetch_sub(1, Ordering::SeqCst);
    }
}
