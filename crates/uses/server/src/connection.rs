//! A connection: its peer, its export and its counters; and the counters of those that have ended.

use std::collections::BTreeMap;
use std::sync::OnceLock;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use crate::counters::{ConnectionCounters, ConnectionCounts};

/// An open connection.
#[derive(Debug)]
pub(crate) struct Connection {
    pub(crate) id: u64,
    /// The peer's address.
    pub(crate) peer: String,
    since: Instant,
    identity: OnceLock<ClientTlsIdentity>,
    /// The chosen export, once the handshake is over.
    export: OnceLock<String>,
    /// The connection is asked to end; checked where it waits for requests.
    pub(crate) leave_requested: AtomicBool,
    pub(crate) counters: ConnectionCounters,
}

impl Connection {
    pub(crate) fn new(id: u64, peer: String) -> Connection {
        Connection {
            id,
            peer,
            since: blockhaul_io::now(),
            identity: OnceLock::new(),
            export: OnceLock::new(),
            leave_requested: AtomicBool::new(false),
            counters: ConnectionCounters::default(),
        }
    }

    /// TLS is established; called once.
    pub(crate) fn secured(&self, about: &blockhaul_tls::TlsSessionInfo) {
        let version = about.version.clone();
        let name = about.peer.clone();
        self.identity.get_or_init(|| ClientTlsIdentity { version, name });
    }

    /// The client has chosen an export; called once.
    pub(crate) fn chose(&self, export: &str) {
        self.export.get_or_init(|| export.to_string());
    }

    /// The client's TLS identity; none without TLS, or before it is established.
    pub(crate) fn identity(&self) -> Option<&ClientTlsIdentity> {
        self.identity.get()
    }

    /// Time since it was opened.
    pub(crate) fn age(&self) -> Duration {
        blockhaul_io::elapsed(self.since)
    }

    /// The chosen export; none during the handshake.
    pub(crate) fn export(&self) -> Option<&str> {
        self.export.get().map(String::as_str)
    }

    /// The client's authenticated identity.
    pub(crate) fn user(&self) -> Option<&str> {
        self.identity()?.name.as_deref()
    }
}

/// The TLS identity of a client.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClientTlsIdentity {
    /// The version of TLS, as `TLSv1.3`.
    pub version: String,
    /// The authenticated identity: a user, or the name in the client's certificate.
    pub name: Option<String>,
}

/// Maximum number of exports whose ended connections are counted by name. Clients may be able to
/// make up names, so the rest is counted together.
const NAMES: usize = 256;
/// The name under which the rest is counted.
const OTHERS: &str = "(others)";

/// Counters of the clients of one export.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ExportCounts {
    /// Connected clients.
    pub clients: u64,
    /// Requests of connected and disconnected clients.
    pub counts: ConnectionCounts,
}

/// Requests of connections that have ended, by export.
#[derive(Default)]
pub(crate) struct EndedRequests(BTreeMap<String, ConnectionCounts>);

impl EndedRequests {
    pub(crate) fn add(&mut self, connection: &Connection) {
        let Some(export) = connection.export() else { return };
        let mut counts = connection.counters.counts();
        // Requests still in flight were abandoned.
        counts.in_flight = 0;
        let known = self.0.len() < NAMES || self.0.contains_key(export);
        *self.0.entry(if known { export } else { OTHERS }.to_string()).or_default() += counts;
    }

    /// The counters by export, including open connections.
    pub(crate) fn with<'a>(
        &self,
        open: impl Iterator<Item = &'a Connection>,
    ) -> BTreeMap<String, ExportCounts> {
        let ended = self.0.iter().map(|(name, &counts)| {
            let exported = ExportCounts { clients: 0, counts };
            (name.clone(), exported)
        });
        let mut all: BTreeMap<String, ExportCounts> = ended.collect();
        for connection in open {
            let Some(export) = connection.export() else { continue };
            let known = all.len() < NAMES || all.contains_key(export);
            let name = if known { export } else { OTHERS };
            let one = all.entry(name.to_string()).or_default();
            one.clients += 1;
            one.counts += connection.counters.counts();
        }
        all
    }
}

#[cfg(test)]
mod tests {
    use blockhaul_block::OpKind;

    use super::*;

    fn connection(id: u64, export: &str) -> Connection {
        let connection = Connection::new(id, String::new());
        connection.chose(export);
        connection.counters.answered(OpKind::Read, Some(1));
        connection
    }

    #[test]
    fn those_that_have_ended_are_counted_with_those_that_are_open() {
        let mut ended = EndedRequests::default();
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
        let mut ended = EndedRequests::default();
        for id in 0..2 * NAMES as u64 {
            ended.add(&connection(id, &format!("e{id}")));
        }
        let sums = ended.with([].into_iter());
        assert_eq!(sums.len(), NAMES + 1);
        assert_eq!(sums[OTHERS].counts.requests[0], NAMES as u64);
    }
}
