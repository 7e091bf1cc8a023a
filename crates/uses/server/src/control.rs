//! The operator's interface to the server: clients and their counters, sums, disconnecting a
//! client, draining, new TLS keys.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use blockhaul_block::{LatencySnapshot, OpKind};

use crate::connection::{ClientTlsIdentity, ExportCounts};
use crate::counters::{ConnectionCounts, RequestTimes};
use crate::disconnect::DisconnectResult;
use crate::in_flight::WORKERS;
use crate::limits::PAYLOAD_LEAST;
use crate::{Limits, Server, TlsPolicy};

/// A connected client.
#[derive(Debug, Clone)]
pub struct ConnectedClient {
    /// The number of its connection: from 1, never reused.
    pub number: u64,
    /// The peer's address.
    pub address: String,
    /// The chosen export; none during the handshake.
    pub export: Option<String>,
    /// Its TLS identity; none without TLS.
    pub identity: Option<ClientTlsIdentity>,
    /// Time since it connected.
    pub age: Duration,
    /// It was asked to end.
    pub leaving: bool,
    /// Its requests.
    pub counts: ConnectionCounts,
}

/// Counters of a server since it started.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct ServerTotals {
    /// Open connections, including handshakes.
    pub open: usize,
    /// Connections in their handshake.
    pub handshakes: usize,
    /// Accepted connections.
    pub accepted: u64,
    /// Connections refused because there were too many.
    pub refused: u64,
    /// Failed handshakes: clients that violated the protocol, failed to authenticate, took too long
    /// or gave way to others.
    pub failed: u64,
    /// Bytes that requests of all clients hold now.
    pub memory: u64,
    /// Maximum bytes that they may hold.
    pub memory_limit: u64,
    /// Requests by export, of connected and disconnected clients.
    pub exports: BTreeMap<String, ExportCounts>,
    /// Request times in devices, in the order of [`OpKind::ALL`]. Every request in flight at a
    /// device is timed; of those completed at once one in 16, which is counted for all of them.
    pub latency: [LatencySnapshot; OpKind::ALL.len()],
}

/// Counters that do not belong to a connection.
#[derive(Default)]
pub(crate) struct ServerCounters {
    pub(crate) accepted: AtomicU64,
    pub(crate) refused: AtomicU64,
    pub(crate) failed: AtomicU64,
    draining: AtomicBool,
    times: PerWorker,
}

impl ServerCounters {
    /// Request times of the current worker.
    pub(crate) fn times(&self) -> &RequestTimes {
        self.times.0[blockhaul_io::worker() % WORKERS].get_or_init(Box::default)
    }
}

/// Times of each worker, allocated on first use.
struct PerWorker([OnceLock<Box<RequestTimes>>; WORKERS]);

impl Default for PerWorker {
    fn default() -> PerWorker {
        PerWorker([const { OnceLock::new() }; WORKERS])
    }
}

impl Server {
    /// The connected clients, by number.
    pub fn clients(&self) -> Vec<ConnectedClient> {
        let mut clients = self.clients.list(|connection| ConnectedClient {
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

    /// The counters since the start.
    pub fn sums(&self) -> ServerTotals {
        let (open, handshakes, exports) = self.clients.sums();
        let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let times = self.control.times.0.iter().filter_map(OnceLock::get);
        ServerTotals {
            open,
            handshakes,
            accepted: count(&self.control.accepted),
            refused: count(&self.control.refused),
            failed: count(&self.control.failed),
            memory: self.config.pool.reserved(),
            memory_limit: self.config.pool.limit(),
            exports,
            latency: RequestTimes::sum(times.map(|times| &**times)),
        }
    }

    /// Ends a connection: its requests in progress are finished and answered, as far as the client
    /// reads the replies. The second time it is cut. `None`: there is no such connection.
    pub fn disconnect(&self, number: u64) -> Option<DisconnectResult> {
        self.clients.disconnect(number)
    }

    /// Stops accepting connections: closes the listeners. Returns the number of open connections.
    pub fn drain(&self) -> usize {
        self.control.draining.store(true, Ordering::SeqCst);
        self.closing.notify();
        self.open()
    }

    /// Whether the server has stopped accepting connections.
    pub(crate) fn is_draining(&self) -> bool {
        self.control.draining.load(Ordering::Relaxed)
    }

    /// Uses this for later handshakes; existing sessions do not change.
    pub fn set_tls(&self, tls: TlsPolicy) {
        *self.tls.lock().expect("no panic under this lock") = tls;
    }

    /// Uses these limits for clients that connect from now on. Those of all clients together
    /// ([`Limits::OF_ALL`]) stay as they are.
    pub fn set_limits(&self, limits: Limits) {
        let mut current = self.limits.lock().expect("no panic under this lock");
        let Limits { requests_all, all_bytes, .. } = **current;
        let payload = limits.payload.max(PAYLOAD_LEAST);
        *current = Arc::new(Limits { requests_all, all_bytes, payload, ..limits });
    }

    pub(crate) fn tls(&self) -> TlsPolicy {
        self.tls.lock().expect("no panic under this lock").clone()
    }
}
