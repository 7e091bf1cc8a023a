//! A connection: who is at the other end, what was chosen and done; and what is remembered of those that
//! have ended.

use std::collections::BTreeMap;
use std::sync::OnceLock;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use crate::tally::{Counts, Tally};

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
            since: blockhaul_io::now(),
            identity: OnceLock::new(),
            export: OnceLock::new(),
            told: AtomicBool::new(false),
            tally: Tally::default(),
        }
    }

    /// TLS is up, which it comes once.
    pub(crate) fn secured(&self, about: &blockhaul_tls::About) {
        let (version, name) = (about.version.clone(), about.peer.clone());
        self.identity.get_or_init(|| Identity { version, name });
    }

    /// The client has chosen an export, which it does once.
    pub(crate) fn chose(&self, export: &str) {
        self.export.get_or_init(|| export.to_string());
    }

    /// What TLS tells of the client; none without TLS, or before it is up.
    pub(crate) fn identity(&self) -> Option<&Identity> {
        self.identity.get()
    }

    /// Since when it is open.
    pub(crate) fn age(&self) -> Duration {
        blockhaul_io::elapsed(self.since)
    }

    /// What the client has chosen; none while its handshake lasts.
    pub(crate) fn export(&self) -> Option<&str> {
        self.export.get().map(String::as_str)
    }

    /// Who the client has proved to be.
    pub(crate) fn user(&self) -> Option<&str> {
        self.identity()?.name.as_deref()
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

/// Exports whose connections that have ended are counted by name. Where clients can make up names,
/// those beyond are counted together.
const NAMES: usize = 256;
/// The name of those beyond.
const OTHERS: &str = "(others)";

/// What clients of one export did.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Exported {
    /// Clients that are connected.
    pub clients: u64,
    /// Their requests, and those of clients that have left.
    pub counts: Counts,
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

#[cfg(test)]
mod tests {
    use blockhaul_block::OpKind;

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
