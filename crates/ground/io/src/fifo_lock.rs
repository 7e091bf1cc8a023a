//! A lock for tasks of any worker, granted in order of request: some plugins need one connection at
//! a time.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

use crate::Completer;

/// A first-in-first-out lock that can be held across waits.
#[derive(Default)]
pub struct FifoLock(Mutex<LockQueue>);

#[derive(Default)]
struct LockQueue {
    taken: bool,
    waiting: VecDeque<Completer<FifoGuard>>,
}

/// Holds the lock; on drop, passes it on.
pub struct FifoGuard(Arc<FifoLock>);

impl FifoLock {
    /// The lock, if nobody holds it.
    pub fn try_lock(self: &Arc<FifoLock>) -> Option<FifoGuard> {
        let mut queue = self.0.lock().expect("no panic under this lock");
        let is_free = !std::mem::replace(&mut queue.taken, true);
        is_free.then(|| FifoGuard(self.clone()))
    }

    /// Waits for the lock, first come first served.
    pub async fn lock(self: &Arc<FifoLock>) -> Option<FifoGuard> {
        let ticket = {
            let mut queue = self.0.lock().expect("no panic under this lock");
            if !std::mem::replace(&mut queue.taken, true) {
                return Some(FifoGuard(self.clone()));
            }
            let (completer, ticket) = crate::ticket();
            queue.waiting.push_back(completer);
            ticket
        };
        ticket.await.ok()
    }
}

impl Drop for FifoGuard {
    fn drop(&mut self) {
        let next = {
            let mut queue = self.0.0.lock().expect("no panic under this lock");
            let next = loop {
                match queue.waiting.pop_front() {
                    Some(completer) if completer.is_abandoned() => {}
                    next => break next,
                }
            };
            queue.taken = next.is_some();
            next
        };
        if let Some(next) = next {
            // If the waiter has given up, this drops the guard, which passes the lock on.
            next.complete(FifoGuard(self.0.clone()));
        }
    }
}
