//! For whoever runs the server: its clients and what they do, sums, an end to one connection or to
//! accepting any, other keys for TLS.

use std::collections::BTreeMap;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use blockhaul_block::{Latency, OpKind};

use crate::connection::{Exported, Identity};
use crate::counters::{Counts, Times};
use crate::disconnect::Disconnected;
use crate::in_flight::WORKERS;
use crate::{Server, Tls};

/// A client that is connected.
#[derive(Debug, Clone)]
pub struct Client {
    /// The number of its connection: from 1 on, none is given twice.
    pub number: u64,
    /// Where it comes from.
    pub address: String,
    /// What it has chosen; none while its handshake lasts.
    pub export: Option<String>,
    /// What TLS tells of it; none without TLS.
    pub identity: Option<Identity>,
    /// Since when it is connected.
    pub age: Duration,
    /// It is asked to end.
    pub leaving: bool,
    /// Its requests.
    pub counts: Counts,
}

/// Figures of a server since it was started.
#[derive(Debug, Clone)]
pub struct Sums {
    /// Connections that are open, handshakes included.
    pub open: usize,
    /// Connections in their handshake.
    pub handshakes: usize,
    /// Connections that were accepted.
    pub accepted: u64,
    /// Connections that were refused because there were too many.
    pub refused: u64,
    /// Handshakes that failed: clients that broke the protocol, could not prove who they are, were too
    /// late or in the way of others.
    pub failed: u64,
    /// Bytes that requests of all clients hold now.
    pub memory: u64,
    /// Bytes that they may hold.
    pub memory_limit: u64,
    /// Requests by export, of clients that are connected and of those that have left.
    pub exports: BTreeMap<String, Exported>,
    /// How long requests took in devices, in the order of [`OpKind::ALL`]. Each that a device worked on
    /// is timed; of those that it answered at once one in 16, which stands for all of them.
    pub latency: [Latency; OpKind::ALL.len()],
}

/// Counters that no connection has.
#[derive(Default)]
pub(crate) struct Control {
    pub(crate) accepted: AtomicU64,
    pub(crate) refused: AtomicU64,
    pub(crate) failed: AtomicU64,
    draining: AtomicBool,
    times: PerWorker,
}

impl Control {
    /// Where the worker that calls notes how long requests took.
    pub(crate) fn times(&self) -> &Times {
        self.times.0[blockhaul_io::worker() % WORKERS].get_or_init(Box::default)
    }
}

/// The times of each worker, made when it has some.
struct PerWorker([OnceLock<Box<Times>>; WORKERS]);

impl Default for PerWorker {
    fn default() -> PerWorker {
        PerWorker([const { OnceLock::new() }; WORKERS])
    }
}

impl Server {
    /// The clients that are connected, by number.
    pub fn clients(&self) -> Vec<Client> {
        let mut clients = self.clients.list(|connection| Client {
            number: connection.id,
            address: connection.peer.clone(),
            export: connection.export().map(str::to_string),
            identity: connection.identity().cloned(),
            age: connection.age(),
            leaving: connection.leave_requested.load(Ordering::Relaxed),
            counts: connection.counters.counts(),
        });
        clients.sort_by_key(|client| client.number);
        clients
    }

    /// Figures since the start.
    pub fn sums(&self) -> Sums {
        let (open, handshakes, exports) = self.clients.sums();
        let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let times = self.control.times.0.iter().filter_map(OnceLock::get);
        Sums {
            open,
            handshakes,
            accepted: count(&self.control.accepted),
            refused: count(&self.control.refused),
            failed: count(&self.control.failed),
            memory: self.config.pool.reserved(),
            memory_limit: self.config.pool.limit(),
            exports,
            latency: Times::sum(times.map(|times| &**times)),
        }
    }

    /// Ends a connection: its requests in progress are finished and answered, as far as the client
    /// reads the answers. The second time it is cut. `None`: there is no such connection.
    pub fn disconnect(&self, number: u64) -> Option<Disconnected> {
        self.clients.disconnect(number)
    }

    /// Accepts no more connections from now on: listeners close. Returns how many there are.
    pub fn drain(&self) -> usize {
        self.control.draining.store(true, Ordering::SeqCst);
        self.closing.notify();
        self.open()
    }

    /// Whether connections are not accepted any more.
    pub(crate) fn is_draining(&self) -> bool {
        self.control.draining.load(Ordering::Relaxed)
    }

    /// From now on handshakes use this; sessions stay as they are.
    pub fn set_tls(&self, tls: Tls) {
        *self.tls.lock().expect("no panic under this lock") = tls;
    }

    pub(crate) fn tls(&self) -> Tls {
        self.tls.lock().expect("no panic under this lock").clone()
    }
}
