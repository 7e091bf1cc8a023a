//! For whoever runs the server: its clients and what they do, sums, an end to one connection or to
//! accepting any, other keys for TLS.

use std::collections::BTreeMap;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use block::OpKind;

use crate::clients::Leaving;
use crate::held::WORKERS;
use crate::tally::{Counts, Latency, Tally, Times};
use crate::{Server, Tls};

/// Exports whose connections that have ended are counted by name. Where clients can make up names,
/// those beyond are counted together.
const NAMES: usize = 256;
/// The name of those beyond.
const OTHERS: &str = "(others)";

/// An open connection.
#[derive(Debug)]
pub(crate) struct Connection {
    pub(crate) id: u64,
    /// Where it comes from.
    pub(crate) peer: String,
    since: Instant,
    identity: OnceLock<Identity>,
    /// The export that the client has chosen: its handshake is over.
    export: OnceLock<String>,
    /// It was told to end: whoever waits for requests looks.
    pub(crate) told: AtomicBool,
    pub(crate) tally: Tally,
}

impl Connection {
    pub(crate) fn new(id: u64, peer: String) -> Connection {
        Connection {
            id,
            peer,
            since: Instant::now(),
            identity: OnceLock::new(),
            export: OnceLock::new(),
            told: AtomicBool::new(false),
            tally: Tally::default(),
        }
    }

    /// TLS is up, which it comes once.
    pub(crate) fn secured(&self, about: &tls::About) {
        let (version, name) = (about.version.clone(), about.peer.clone());
        self.identity.get_or_init(|| Identity { version, name });
    }

    /// The client has chosen an export, which it does once.
    pub(crate) fn chose(&self, export: &str) {
        self.export.get_or_init(|| export.to_string());
    }

    pub(crate) fn export(&self) -> Option<&str> {
        self.export.get().map(String::as_str)
    }

    /// Who the client has proved to be.
    pub(crate) fn user(&self) -> Option<&str> {
        self.identity.get()?.name.as_deref()
    }
}

/// What TLS tells of a client.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Identity {
    /// The version of TLS, as `TLSv1.3`.
    pub version: String,
    /// Who the client has proved to be: a user, or the name in its certificate.
    pub name: Option<String>,
}

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
    /// It was told to end.
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

/// What clients of one export did.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Exported {
    /// Clients that are connected.
    pub clients: u64,
    /// Their requests, and those of clients that have left.
    pub counts: Counts,
}

/// What [`Server::disconnect`] did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Disconnected {
    /// No further request is read; what is in progress is finished and answered.
    Told,
    /// It had been told before: the connection is cut.
    Cut,
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
        self.times.0[io::worker() % WORKERS].get_or_init(Box::default)
    }
}

/// The times of each worker, made when it has some.
struct PerWorker([OnceLock<Box<Times>>; WORKERS]);

impl Default for PerWorker {
    fn default() -> PerWorker {
        PerWorker([const { OnceLock::new() }; WORKERS])
    }
}

/// Requests of connections that have ended, by export.
#[derive(Default)]
pub(crate) struct Ended(BTreeMap<String, Counts>);

impl Ended {
    pub(crate) fn add(&mut self, connection: &Connection) {
        let Some(export) = connection.export() else { return };
        let mut counts = connection.tally.counts();
        // What it still held was given up.
        counts.in_flight = 0;
        let known = self.0.len() < NAMES || self.0.contains_key(export);
        *self.0.entry(if known { export } else { OTHERS }.to_string()).or_default() += counts;
    }

    /// By export, those that are open included.
    pub(crate) fn with<'a>(
        &self,
        open: impl Iterator<Item = &'a Connection>,
    ) -> BTreeMap<String, Exported> {
        let ended = self.0.iter().map(|(name, &counts)| {
            let exported = Exported { clients: 0, counts };
            (name.clone(), exported)
        });
        let mut all: BTreeMap<String, Exported> = ended.collect();
        for connection in open {
            let Some(export) = connection.export() else { continue };
            let known = all.len() < NAMES || all.contains_key(export);
            let name = if known { export } else { OTHERS };
            let one = all.entry(name.to_string()).or_default();
            one.clients += 1;
            one.counts += connection.tally.counts();
        }
        all
    }
}

impl Server {
    /// The clients that are connected, by number.
    pub fn clients(&self) -> Vec<Client> {
        let mut clients = self.clients.list(|connection| Client {
            number: connection.id,
            address: connection.peer.clone(),
            export: connection.export().map(str::to_string),
            identity: connection.identity.get().cloned(),
            age: connection.since.elapsed(),
            leaving: connection.told.load(Ordering::Relaxed),
            counts: connection.tally.counts(),
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
        match self.clients.disconnect(number)? {
            Leaving::Told => Some(Disconnected::Told),
            Leaving::Already => Some(Disconnected::Cut),
        }
    }

    /// Accepts no more connections from now on: listeners close. Returns how many there are.
    pub fn drain(&self) -> usize {
        self.control.draining.store(true, Ordering::SeqCst);
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

#[cfg(test)]
mod tests {
    use super::*;

    fn connection(id: u64, export: &str) -> Connection {
        let connection = Connection::new(id, String::new());
        connection.chose(export);
        connection.tally.answered(OpKind::Read, Some(1));
        connection
    }

    #[test]
    fn those_that_have_ended_are_counted_with_those_that_are_open() {
        let mut ended = Ended::default();
        ended.add(&connection(1, "a"));
        ended.add(&Connection::new(2, String::new()));
        let open = [connection(3, "a"), connection(4, "b")];
        let sums = ended.with(open.iter());
        assert_eq!((sums["a"].clients, sums["a"].counts.requests[0]), (1, 2));
        assert_eq!((sums["b"].clients, sums["b"].counts.requests[0]), (1, 1));
        assert_eq!(sums.len(), 2);
    }

    #[test]
    fn names_that_clients_make_up_take_no_memory_for_ever() {
        let mut ended = Ended::default();
        for id in 0..2 * NAMES as u64 {
            ended.add(&connection(id, &format!("e{id}")));
        }
        let sums = ended.with([].into_iter());
        assert_eq!(sums.len(), NAMES + 1);
        assert_eq!(sums[OTHERS].counts.requests[0], NAMES as u64);
    }
}
