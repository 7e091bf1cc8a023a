//! Requests that devices hold: those of a connection, by name, and how many there are in all.

use std::cell::RefCell;
use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use blockhaul_wire::request::Header;
use slab::Slab;

/// The requests of one connection that its device holds.
#[derive(Default)]
pub(crate) struct InFlight(RefCell<Slab<Request>>);

/// A request and when it was handed to the device.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Request {
    pub(crate) header: Header,
    since: Instant,
}

impl InFlight {
    /// Notes a request; what is returned is its ticket.
    pub(crate) fn add(&self, header: Header) -> usize {
        self.0.borrow_mut().insert(Request { header, since: Instant::now() })
    }

    /// The request is finished: how long it took. `None`: it was given up and has its answer.
    pub(crate) fn finish(&self, ticket: usize) -> Option<Duration> {
        // Tickets are not used again after `give_up`: nothing is added any more.
        let request = self.0.borrow_mut().try_remove(ticket);
        request.map(|request| request.since.elapsed())
    }

    /// How many there are.
    pub(crate) fn count(&self) -> usize {
        self.0.borrow().len()
    }

    /// Takes all of them away.
    pub(crate) fn give_up(&self) -> Vec<Request> {
        self.0.take().into_iter().map(|(_, request)| request).collect()
    }
}

impl fmt::Display for Request {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Header { command, offset, length, .. } = self.header;
        let age = self.since.elapsed().as_secs_f32();
        write!(
            f,
            "{command:?} of {length} bytes at {offset}, which the device holds for {age:.1} s"
        )
    }
}

/// How many requests are in progress on all connections: each worker counts its own.
pub(crate) struct AllInFlight(Box<[Worker]>);

/// A counter in a cache line of its own. Only its worker writes to it.
#[repr(align(64))]
#[derive(Default)]
struct Worker(AtomicUsize);

impl Default for AllInFlight {
    fn default() -> AllInFlight {
        AllInFlight((0..WORKERS).map(|_| Worker::default()).collect())
    }
}

/// Counters; workers beyond share them, which costs them some time and is right all the same.
pub(crate) const WORKERS: usize = 64;

impl AllInFlight {
    fn own(&self) -> &AtomicUsize {
        &self.0[blockhaul_io::worker() % WORKERS].0
    }

    pub(crate) fn add(&self) {
        self.own().fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn remove(&self, count: usize) {
        self.own().fetch_sub(count, Ordering::Relaxed);
    }

    /// How many there are on all workers, as far as can be told from one of them.
    pub(crate) fn count(&self) -> usize {
        self.0.iter().map(|worker| worker.0.load(Ordering::Relaxed)).sum()
    }

    /// Whether this worker has its part of so many requests.
    pub(crate) fn is_full(&self, limit: usize) -> bool {
        let part = limit / blockhaul_io::worker_count().clamp(1, WORKERS);
        self.own().load(Ordering::Relaxed) >= part.max(1)
    }
}
