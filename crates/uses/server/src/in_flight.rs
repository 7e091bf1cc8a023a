//! Requests in flight at devices: those of a connection, and the total.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use blockhaul_io::{Completer, Ticket};
use blockhaul_wire::request::RequestHeader;
use slab::Slab;

/// The requests of one connection in flight at its device.
#[derive(Default)]
pub(crate) struct InFlight(RefCell<Slab<SubmittedRequest>>);

/// A request and when it was submitted to the device.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SubmittedRequest {
    pub(crate) header: RequestHeader,
    since: Instant,
}

impl InFlight {
    /// Adds a request; returns its ticket.
    pub(crate) fn add(&self, header: RequestHeader) -> usize {
        self.0.borrow_mut().insert(SubmittedRequest { header, since: blockhaul_io::now() })
    }

    /// The request has completed: its time. `None`: it was given up and has its reply.
    pub(crate) fn finish(&self, ticket: usize) -> Option<Duration> {
        // Tickets are not reused after `give_up`: nothing is added any more.
        let request = self.0.borrow_mut().try_remove(ticket);
        request.map(|request| blockhaul_io::elapsed(request.since))
    }

    /// Number of requests.
    pub(crate) fn count(&self) -> usize {
        self.0.borrow().len()
    }

    /// Removes all of them.
    pub(crate) fn give_up(&self) -> Vec<SubmittedRequest> {
        self.0.take().into_iter().map(|(_, request)| request).collect()
    }
}

impl fmt::Display for SubmittedRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let RequestHeader { command, offset, length, .. } = self.header;
        let age = blockhaul_io::elapsed(self.since).as_secs_f32();
        write!(
            f,
            "{command:?} of {length} bytes at {offset}, which the device holds for {age:.1} s"
        )
    }
}

/// Number of requests in progress on all connections: each worker counts its own, and has the
/// connections that wait for other requests to end.
pub(crate) struct AllInFlight(Box<[WorkerCounter]>);

/// A counter in its own cache lines. Only its worker writes to it.
#[repr(align(64))]
#[derive(Default)]
struct WorkerCounter {
    count: AtomicUsize,
    /// The number of entries in `waiting`. A waiter writes this and then reads `count`; the end of
    /// a request writes `count` and then reads this: one of them sees the other.
    waiters: AtomicUsize,
    /// Places granted to waiters that have no request yet.
    given: AtomicUsize,
    waiting: Mutex<VecDeque<Completer<RequestSlot>>>,
}

impl Default for AllInFlight {
    fn default() -> AllInFlight {
        AllInFlight((0..WORKERS).map(|_| WorkerCounter::default()).collect())
    }
}

/// Number of counters; further workers share them, which is slower but still correct.
pub(crate) const WORKERS: usize = 64;

/// The share of a limit that each worker has.
fn part(limit: usize) -> usize {
    (limit / blockhaul_io::worker_count().clamp(1, WORKERS)).max(1)
}

/// The permission to start one more request after a wait. On drop, it passes to the next waiter,
/// unless a request has taken the place.
pub(crate) struct RequestSlot {
    all: Arc<AllInFlight>,
    slot: usize,
    part: usize,
}

impl Drop for RequestSlot {
    fn drop(&mut self) {
        self.all.0[self.slot].given.fetch_sub(1, Ordering::SeqCst);
        self.all.admit(self.slot, self.part);
    }
}

impl WorkerCounter {
    fn waiting(&self) -> MutexGuard<'_, VecDeque<Completer<RequestSlot>>> {
        self.waiting.lock().expect("no panic under this lock")
    }
}

impl AllInFlight {
    /// The index of this worker's counter.
    fn slot() -> usize {
        blockhaul_io::worker() % WORKERS
    }

    fn own(&self) -> &WorkerCounter {
        &self.0[Self::slot()]
    }

    pub(crate) fn add(&self) {
        self.own().count.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn remove(self: &Arc<Self>, count: usize, limit: usize) {
        let own = self.own();
        own.count.fetch_sub(count, Ordering::SeqCst);
        if own.waiters.load(Ordering::SeqCst) > 0 {
            self.admit(Self::slot(), part(limit));
        }
    }

    /// The total on all workers, as far as one worker can see.
    pub(crate) fn count(&self) -> usize {
        self.0.iter().map(|worker| worker.count.load(Ordering::Relaxed)).sum()
    }

    /// Whether this worker has its share of `limit` requests, or others wait for a place.
    pub(crate) fn is_full(&self, limit: usize) -> bool {
        let own = self.own();
        own.count.load(Ordering::Relaxed) >= part(limit) || own.waiters.load(Ordering::Relaxed) > 0
    }

    /// Waits for a place, after earlier waiters. The caller adds a request before dropping it.
    pub(crate) fn wait(self: &Arc<Self>, limit: usize) -> Ticket<RequestSlot> {
        let (completer, ticket) = blockhaul_io::ticket();
        let own = self.own();
        {
            let mut waiting = own.waiting();
            waiting.push_back(completer);
            own.waiters.store(waiting.len(), Ordering::SeqCst);
        }
        // A request may have ended before we were in the queue.
        self.admit(Self::slot(), part(limit));
        ticket
    }

    /// Grants free places of a worker to its waiters, in order.
    fn admit(self: &Arc<Self>, slot: usize, part: usize) {
        let own = &self.0[slot];
        let mut admitted = Vec::new();
        {
            let mut waiting = own.waiting();
            let taken = own.count.load(Ordering::SeqCst) + own.given.load(Ordering::SeqCst);
            let mut free = part.saturating_sub(taken);
            while free > 0
                && let Some(completer) = waiting.pop_front()
            {
                if !completer.is_abandoned() {
                    admitted.push(completer);
                    free -= 1;
                }
            }
            own.given.fetch_add(admitted.len(), Ordering::SeqCst);
            own.waiters.store(waiting.len(), Ordering::SeqCst);
        }
        for completer in admitted {
            completer.complete(RequestSlot { all: self.clone(), slot, part });
        }
    }
}

#[cfg(test)]
mod tests {
    use std::future::Future as _;
    use std::pin::Pin;
    use std::task::{Context, Waker};

    use blockhaul_io::{IoEngine, Runtime, RuntimeConfig};

    use super::*;

    #[test]
    fn places_go_to_those_who_wait_in_order_one_for_each_request_that_ends() {
        let config = RuntimeConfig { workers: 1, engine: IoEngine::Threads };
        Runtime::start(&config).unwrap().block_on(|| async {
            const LIMIT: usize = 2;
            let all = Arc::new(AllInFlight::default());
            let mut cx = Context::from_waker(Waker::noop());
            let mut place = |ticket: &mut Ticket<RequestSlot>| match Pin::new(ticket).poll(&mut cx)
            {
                std::task::Poll::Ready(place) => place.ok(),
                std::task::Poll::Pending => None,
            };
            all.add();
            assert!(!all.is_full(LIMIT));
            all.add();
            assert!(all.is_full(LIMIT));
            let mut waits: Vec<_> = (0..4).map(|_| all.wait(LIMIT)).collect();
            assert!(waits.iter_mut().all(|wait| place(wait).is_none()));

            all.remove(1, LIMIT);
            assert!(all.is_full(LIMIT), "nobody goes before those who wait");
            let first = place(&mut waits[0]).expect("the first one's turn");
            assert!(waits[1..].iter_mut().all(|wait| place(wait).is_none()), "one for one");
            all.add();
            drop(first);
            assert!(waits[1..].iter_mut().all(|wait| place(wait).is_none()), "the place is taken");

            // A waiter that has gone, or starts no request, passes its place to the next.
            all.remove(1, LIMIT);
            drop(waits.remove(1));
            let third = place(&mut waits[1]).expect("the place of one that has gone");
            drop(third);
            let last = place(&mut waits[2]).expect("the place of one that did not need it");
            drop(last);
            all.remove(1, LIMIT);
            assert!(!all.is_full(LIMIT));
        });
    }
}
