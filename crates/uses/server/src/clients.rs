//! The connections that are open: who is let in, who must go when it is crowded, and how each is told.

use std::collections::{BTreeMap, HashMap};
use std::future::poll_fn;
use std::os::fd::AsFd as _;
use std::pin::{Pin, pin};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::Poll;
use std::time::{Duration, Instant};

use blockhaul_io::{Completer, Notify, Stream, Ticket};

use crate::connection::{Connection, Ended, Exported};

/// Connections above the limit that may be there for the moment that it takes those to go which were
/// told to.
const LINGERING: usize = 64;

/// Why a connection has to end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Leave {
    /// The server stops.
    Stop,
    /// Others want its place, and it has not finished its handshake.
    Crowded,
    /// Whoever runs the server wants it.
    Unwanted,
}

/// What a connection that is to leave has heard.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Leaving {
    /// It was told now.
    Told,
    /// It had been told before, and is cut now.
    Already,
}

/// Time that every handshake has before another connection may take its place: one over TLS and half
/// the world. Until then others wait to be accepted.
const GRACE: Duration = Duration::from_secs(1);

/// The table of open connections.
#[derive(Default)]
pub(crate) struct Clients {
    table: Mutex<Table>,
    /// Somebody has left, or has finished a handshake.
    changed: Notify,
}

#[derive(Default)]
struct Table {
    open: HashMap<u64, Place>,
    /// Those that have not finished their handshake, the oldest first.
    new: BTreeMap<u64, Instant>,
    /// Those that were told to go and are still there.
    going: usize,
    ended: Ended,
}

struct Place {
    connection: Arc<Connection>,
    stream: Arc<Stream>,
    leave: Option<Completer<Leave>>,
    going: bool,
}

impl Table {
    /// Tells the connection that has been in its handshake for longest to go; whether there is one.
    fn make_room(&mut self) -> bool {
        let Some((id, _)) = self.new.pop_first() else { return false };
        let Some(place) = self.open.get_mut(&id) else { return false };
        place.going = true;
        self.going += 1;
        if let Some(leave) = place.leave.take() {
            leave.complete(Leave::Crowded);
        }
        true
    }
}

impl Clients {
    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().expect("no panic under this lock")
    }

    /// Enters a connection, unless there are `connections` already. Where some of them are still in
    /// their handshake, or more than `handshakes` are, the oldest of those goes instead: a crowd that
    /// says nothing keeps nobody out. What is returned says when it must go.
    pub(crate) fn enter(
        &self,
        connection: Arc<Connection>,
        stream: Arc<Stream>,
        connections: usize,
        handshakes: usize,
    ) -> Option<Ticket<Leave>> {
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
        table.open.insert(id, Place { connection, stream, leave: Some(completer), going: false });
        table.new.insert(id, blockhaul_io::now());
        Some(ticket)
    }

    /// Tells the connection that has been in its handshake for longest to go, where there is no descriptor
    /// for others, if it has had its time.
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

    /// How long others had better wait to be accepted, unless somebody leaves or finishes a handshake
    /// before ([`Clients::changed`]): those whose place they would take have not had their time yet, or are
    /// still going.
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

    /// A ticket that completes when a connection is gone or has finished its handshake.
    pub(crate) fn changed(&self) -> Ticket<()> {
        self.changed.listen()
    }

    /// The connection has finished its handshake: its place is its own, unless (false) another has it by
    /// now.
    pub(crate) fn settle(&self, id: u64) -> bool {
        let settled = self.table().new.remove(&id).is_some();
        self.changed.notify();
        settled
    }

    /// The connection is gone.
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

    /// Connections that are open.
    pub(crate) fn count(&self) -> usize {
        self.table().open.len()
    }

    /// What there is to say about each of them, in no order.
    pub(crate) fn list<T>(&self, what: impl Fn(&Connection) -> T) -> Vec<T> {
        self.table().open.values().map(|place| what(&place.connection)).collect()
    }

    /// How many are open, how many of them in their handshake, and what was done by export.
    pub(crate) fn sums(&self) -> (usize, usize, BTreeMap<String, Exported>) {
        let table = self.table();
        let open = table.open.values().map(|place| &*place.connection);
        (table.open.len(), table.new.len(), table.ended.with(open))
    }

    /// Tells one of them to go, and ends what it sends; cuts it the second time.
    pub(crate) fn disconnect(&self, id: u64) -> Option<Leaving> {
        let mut table = self.table();
        let place = table.open.get_mut(&id)?;
        if place.connection.told.swap(true, Ordering::Relaxed) {
            place.stream.shutdown();
            return Some(Leaving::Already);
        }
        if let Some(leave) = place.leave.take() {
            leave.complete(Leave::Unwanted);
        }
        place.stream.shutdown_receive();
        Some(Leaving::Told)
    }

    /// Tells all of them to go, and ends what they send.
    pub(crate) fn stop(&self) {
        for place in self.table().open.values_mut() {
            if let Some(leave) = place.leave.take() {
                leave.complete(Leave::Stop);
            }
            // Fails only for connections that the client has ended.
            let _ = rustix::net::shutdown(place.stream.as_fd(), rustix::net::Shutdown::Read);
        }
    }

    /// Cuts all of them.
    pub(crate) fn cut(&self) {
        self.table().open.values().for_each(|place| place.stream.shutdown());
    }
}

/// Does some work, unless the connection must go before it is done. Once it waits, it is asked whether
/// it must only where `look` says that there may be a reason: a look costs more than a short request.
pub(crate) async fn unless_told<T>(
    told: &mut Ticket<Leave>,
    look: impl Fn() -> bool,
    work: impl Future<Output = T>,
) -> Result<T, Leave> {
    let mut work = pin!(work);
    let mut waits = false;
    poll_fn(|cx| {
        // Both are polled by one task, whose waker stays the same.
        if !waits || look() {
            waits = true;
            // Nobody drops the other end before telling, but for the end of the whole server.
            if let Poll::Ready(leave) = Pin::new(&mut *told).poll(cx) {
                return Poll::Ready(Err(leave.unwrap_or(Leave::Stop)));
            }
        }
        work.as_mut().poll(cx).map(Ok)
    })
    .await
}
