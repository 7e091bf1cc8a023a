//! The open connections: which are admitted, which must leave when there are too many, and how each
//! is notified.

use std::collections::BTreeMap;
use std::future::poll_fn;
use std::os::fd::AsFd as _;
use std::pin::{Pin, pin};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::Poll;
use std::time::{Duration, Instant};

use blockhaul_io::{Completer, Notify, Stream, Ticket};

use crate::connection::{Connection, EndedRequests, ExportCounts};
use crate::disconnect::{DisconnectReason, DisconnectResult};

/// Connections above the limit that may exist for the moment until others have closed.
const LINGERING: usize = 64;

/// Time that every handshake has before another connection may take its place: enough for TLS over
/// a slow path. Until then others wait to be accepted.
const GRACE: Duration = Duration::from_secs(1);

/// The table of open connections.
#[derive(Default)]
pub(crate) struct Clients {
    table: Mutex<ConnectionTable>,
    /// Signals that a connection was closed, or has finished its handshake.
    changed: Notify,
}

#[derive(Default)]
struct ConnectionTable {
    /// In order of their numbers, so that a server in a simulation ends them in the same order each time.
    open: BTreeMap<u64, ConnectionSlot>,
    /// Connections in their handshake, the oldest first.
    new: BTreeMap<u64, Instant>,
    /// Connections that were asked to close and are still open.
    going: usize,
    ended: EndedRequests,
}

struct ConnectionSlot {
    connection: Arc<Connection>,
    stream: Arc<Stream>,
    /// Tells the connection why it must end, once.
    disconnect: Option<Completer<DisconnectReason>>,
    going: bool,
}

impl ConnectionSlot {
    fn disconnect(&mut self, why: DisconnectReason) {
        if let Some(disconnect) = self.disconnect.take() {
            disconnect.complete(why);
        }
    }
}

impl ConnectionTable {
    /// Disconnects the connection that has been in its handshake for longest; returns whether there
    /// is one.
    fn make_room(&mut self) -> bool {
        let Some((id, _)) = self.new.pop_first() else { return false };
        let Some(place) = self.open.get_mut(&id) else { return false };
        place.going = true;
        self.going += 1;
        place.disconnect(DisconnectReason::Crowded);
        true
    }
}

impl Clients {
    fn table(&self) -> MutexGuard<'_, ConnectionTable> {
        self.table.lock().expect("no panic under this lock")
    }

    /// Adds a connection, unless there are `connections` already. If some of them are still in
    /// their handshake, or more than `handshakes` are, the oldest of those is disconnected instead:
    /// many silent clients lock out no others. The returned ticket says when the connection must
    /// end.
    pub(crate) fn enter(
        &self,
        connection: Arc<Connection>,
        stream: Arc<Stream>,
        connections: usize,
        handshakes: usize,
    ) -> Option<Ticket<DisconnectReason>> {
        let id = connection.id;
        let mut table = self.table();
        let full = table.open.len() - table.going >= connections;
        if full && !table.make_room() {
            return None;
        }
        if table.new.len() >= handshakes.max(1) && !full {
            table.make_room();
        }
        let (completer, ticket) = blockhaul_io::ticket();
        let place =
            ConnectionSlot { connection, stream, disconnect: Some(completer), going: false };
        table.open.insert(id, place);
        table.new.insert(id, blockhaul_io::now());
        Some(ticket)
    }

    /// Disconnects the connection that has been in its handshake for longest, if its time is over;
    /// for when the process has no descriptors left.
    pub(crate) fn cut_oldest(&self) {
        let mut table = self.table();
        let old = table
            .new
            .first_key_value()
            .is_some_and(|(_, since)| blockhaul_io::elapsed(*since) >= GRACE);
        if old && table.going < LINGERING {
            table.make_room();
        }
    }

    /// How long new connections should wait to be accepted, unless [`Clients::changed`] completes
    /// first: those whose place they would take still have time, or are closing.
    pub(crate) fn is_crowded_for(&self, connections: usize, handshakes: usize) -> Option<Duration> {
        let table = self.table();
        if table.going >= LINGERING {
            return Some(GRACE);
        }
        let full = table.open.len() - table.going >= connections;
        if !full && table.new.len() < handshakes {
            return None;
        }
        let (_, since) = table.new.first_key_value()?;
        GRACE.checked_sub(blockhaul_io::elapsed(*since)).filter(|left| !left.is_zero())
    }

    /// A ticket that completes when a connection was closed or has finished its handshake.
    pub(crate) fn changed(&self) -> Ticket<()> {
        self.changed.listen()
    }

    /// The connection has finished its handshake and keeps its place, unless (false) another one
    /// has taken it.
    pub(crate) fn settle(&self, id: u64) -> bool {
        let settled = self.table().new.remove(&id).is_some();
        self.changed.notify();
        settled
    }

    /// The connection was closed.
    pub(crate) fn leave(&self, id: u64) {
        let mut table = self.table();
        table.new.remove(&id);
        if let Some(place) = table.open.remove(&id) {
            table.going -= usize::from(place.going);
            table.ended.add(&place.connection);
            // Dropping a place may close its socket: not under the lock.
            drop(table);
            self.changed.notify();
        }
    }

    /// Number of open connections.
    pub(crate) fn count(&self) -> usize {
        self.table().open.len()
    }

    /// Applies `what` to each of them, the oldest first.
    pub(crate) fn list<T>(&self, what: impl Fn(&Connection) -> T) -> Vec<T> {
        self.table().open.values().map(|place| what(&place.connection)).collect()
    }

    /// The number of open connections, the number of those in their handshake, and the counters by
    /// export.
    pub(crate) fn sums(&self) -> (usize, usize, BTreeMap<String, ExportCounts>) {
        let table = self.table();
        let open = table.open.values().map(|place| &*place.connection);
        (table.open.len(), table.new.len(), table.ended.with(open))
    }

    /// Asks a connection to end, and stops reading from it; cuts it the second time.
    pub(crate) fn disconnect(&self, id: u64) -> Option<DisconnectResult> {
        let mut table = self.table();
        let place = table.open.get_mut(&id)?;
        if place.connection.leave_requested.swap(true, Ordering::Relaxed) {
            place.stream.shutdown();
            return Some(DisconnectResult::Cut);
        }
        place.disconnect(DisconnectReason::Operator);
        place.stream.shutdown_receive();
        Some(DisconnectResult::Requested)
    }

    /// Asks all connections to end, and stops reading from them.
    pub(crate) fn stop(&self) {
        for place in self.table().open.values_mut() {
            place.disconnect(DisconnectReason::Stopping);
            // Fails only for connections that the client has already closed.
            let _ = rustix::net::shutdown(place.stream.as_fd(), rustix::net::Shutdown::Read);
        }
    }

    /// Cuts all of them.
    pub(crate) fn cut(&self) {
        self.table().open.values().for_each(|place| place.stream.shutdown());
    }
}

/// Runs `work`, unless the connection must end first. While the work waits, the ticket is polled
/// only if `look` reports a possible reason: polling costs more than a short request.
pub(crate) async fn unless_disconnected<T>(
    disconnect: &mut Ticket<DisconnectReason>,
    look: impl Fn() -> bool,
    work: impl Future<Output = T>,
) -> Result<T, DisconnectReason> {
    let mut work = pin!(work);
    let mut waits = false;
    poll_fn(|cx| {
        // Both are polled by one task, whose waker stays the same.
        if !waits || look() {
            waits = true;
            // The other end is dropped unused only when the server ends.
            if let Poll::Ready(why) = Pin::new(&mut *disconnect).poll(cx) {
                return Poll::Ready(Err(why.unwrap_or(DisconnectReason::Stopping)));
            }
        }
        work.as_mut().poll(cx).map(Ok)
    })
    .await
}
