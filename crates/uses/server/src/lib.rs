//! Serves any [`blockhaul_block::Device`] over NBD.
//!
//! One task per connection reads requests in batches and submits them at once; replies are queued and
//! leave in vectored sends, many at a time. Memory is bounded by what a connection's share of the
//! buffer pool allows: a client that does not read its replies stops being read from, and harms
//! nobody else.
//!
//! - [`Server`]: what is served, to whom, and the orderly stop. `clients`: the connections that are open.
//! - `session`: a connection in transmission. `handshake`: a connection before that.
//! - `hall`: what a client may choose from. `limits`: what it may cost. `held`: requests that devices
//!   hold. `storages`: which connections share a storage.
//! - `stop`: the orderly stop. `reply`: outcomes as NBD replies. `records`: what the log says, by member.
//! - `control`: what whoever runs the server sees and may do. `tally`: what is counted.
#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

mod clients;
mod complaints;
mod connection;
mod control;
mod hall;
mod handshake;
mod held;
mod limits;
mod records;
mod reply;
mod session;
mod stop;
mod storages;
mod tally;

use std::future::poll_fn;
use std::os::fd::OwnedFd;
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::task::Poll;
use std::time::{Duration, Instant};

use blockhaul_block::{Device, Flushes};
use blockhaul_catalog::Exports;
use blockhaul_io::{Listener, Pool, Remote, Stream, Ticket};

use clients::{Clients, Leave, unless_told};
use complaints::Complaints;
use connection::Connection;
pub use connection::{Exported, Identity};
use control::Control;
pub use control::{Client, Disconnected, Sums};
use hall::Hall;
use held::Everywhere;
pub use limits::{Limit, Limits};
use records::record;
use stop::Stop;
use storages::Storages;
pub use tally::{Counts, LATENCY_BOUNDS, Latency};

/// Something that clients can ask for by name.
#[derive(Clone)]
pub struct Export {
    /// The name; empty for the default export.
    pub name: String,
    /// Text for people; empty: the device's own.
    pub description: String,
    /// The device, fenced.
    pub device: Arc<dyn Device>,
}

/// What a server offers in its handshakes.
#[derive(Debug, Clone, Copy)]
pub struct Offers {
    /// Structured replies.
    pub structured: bool,
    /// Extended headers.
    pub extended: bool,
    /// Metadata contexts.
    pub contexts: bool,
    /// Block sizes also where the device has nothing to say about them, and no longest request beyond
    /// what is served at once. Without, what the device says is told as it says it.
    pub block_sizes: bool,
    /// The least preferred block size that is told, in bytes. Where the device has nothing to say about
    /// block sizes, any offset, and reads and writes of any length, are told with it.
    pub preferred: Option<u32>,
    /// Fixed newstyle: options other than a plain choice of an export.
    pub fixed_newstyle: bool,
    /// Leaving out 124 zeroes where a client chooses an export in the plain way.
    pub no_zeroes: bool,
    /// No negotiation at all: every client gets the default export, with nothing of the above.
    pub oldstyle: bool,
}

impl Offers {
    /// Everything.
    pub const ALL: Offers = Offers {
        structured: true,
        extended: true,
        contexts: true,
        block_sizes: true,
        preferred: None,
        fixed_newstyle: true,
        no_zeroes: true,
        oldstyle: false,
    };
}

impl Default for Offers {
    fn default() -> Offers {
        Offers::ALL
    }
}

/// Whether clients may or must use TLS.
#[derive(Clone, Default)]
pub enum Tls {
    /// It is not offered.
    #[default]
    Off,
    /// A client that asks for it gets it, others are served without.
    On(Arc<blockhaul_tls::Acceptor>),
    /// Nothing but a client's farewell is answered before it.
    Require(Arc<blockhaul_tls::Acceptor>),
}

/// How to serve.
pub struct Config {
    /// What is served. A client that asks for the empty name gets the export of that name, or else the
    /// first one.
    pub exports: Vec<Export>,
    /// Storage that opens devices for each client, in place of `exports`.
    pub visits: Option<Arc<dyn Exports>>,
    /// What a client may cost.
    pub limits: Limits,
    /// What handshakes offer.
    pub offers: Offers,
    /// Memory for requests of all connections.
    pub pool: Pool,
    /// TLS, to begin with ([`Server::set_tls`]).
    pub tls: Tls,
}

/// Why a connection ended, other than politely.
pub(crate) struct Ending {
    why: String,
    cause: Cause,
}

/// Whose doing it is that a connection ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Cause {
    /// The client's, or its network's.
    Client,
    /// The client could not prove who it is.
    Refused,
    /// This server's, or of whoever runs it.
    Server,
}

impl Ending {
    fn refused(why: String) -> Ending {
        Ending { why, cause: Cause::Refused }
    }
}

impl From<String> for Ending {
    fn from(why: String) -> Ending {
        Ending { why, cause: Cause::Client }
    }
}

/// A server: exports, limits, and the connections that are open. Shared by all workers.
pub struct Server {
    config: Config,
    next: AtomicUsize,
    ids: AtomicU64,
    stopping: AtomicBool,
    /// Notified when listeners are to close: the server stops, or accepts no more.
    closing: blockhaul_io::Notify,
    /// When the stop began, and how patient it is.
    stop: OnceLock<Stop>,
    /// Connections that wait for memory which others hold.
    starving: AtomicUsize,
    /// Notified when one begins to.
    hungry: blockhaul_io::Notify,
    /// Memory beside the pool for one small request of each connection: others may hold the pool for as
    /// long as [`Limits::stalled`].
    aside: Pool,
    clients: Clients,
    /// Requests in progress.
    everywhere: Arc<Everywhere>,
    /// Requests that were answered ESHUTDOWN because their devices held them for too long.
    given_up: AtomicUsize,
    /// What the connections of an export have in common.
    storages: Storages,
    served: AtomicU64,
    tls: Mutex<Tls>,
    control: Control,
    complaints: Mutex<Complaints>,
    /// The same of exports that could not be opened.
    unopened: Mutex<Complaints>,
    /// Of options that no client should send.
    odd: Mutex<Complaints>,
}

/// Time between two attempts to accept a connection where the system has no descriptor or memory for it.
const ACCEPT_AGAIN: Duration = Duration::from_millis(100);

/// Time between two log lines of a listener that cannot accept connections: it tries many times a second.
const UNACCEPTED_AGAIN: Duration = Duration::from_secs(10);

/// Time that a device has to close before its client is let go.
const CLOSING: Duration = Duration::from_secs(10);

impl Server {
    /// A server without listeners yet.
    pub fn new(mut config: Config) -> Arc<Server> {
        config.limits.payload = config.limits.payload.max(limits::PAYLOAD_LEAST);
        let aside = Pool::new((config.pool.limit() / limits::ASIDE_PART).max(limits::SMALL));
        Arc::new(Server {
            tls: Mutex::new(config.tls.clone()),
            config,
            next: AtomicUsize::new(0),
            ids: AtomicU64::new(1),
            stopping: AtomicBool::new(false),
            closing: blockhaul_io::Notify::default(),
            stop: OnceLock::new(),
            starving: AtomicUsize::new(0),
            hungry: blockhaul_io::Notify::default(),
            aside,
            clients: Clients::default(),
            everywhere: Arc::default(),
            given_up: AtomicUsize::new(0),
            storages: Storages::default(),
            served: AtomicU64::new(0),
            control: Control::default(),
            complaints: Mutex::default(),
            unopened: Mutex::default(),
            odd: Mutex::default(),
        })
    }

    /// Accepts connections until [`Server::stop`] or [`Server::drain`] and spreads them over the workers. Any number of
    /// listeners may run.
    pub async fn listen(self: Arc<Self>, listener: Listener) {
        let mut said = None;
        loop {
            let mut closing = self.closing.listen();
            if self.is_stopping() || self.is_draining() {
                return;
            }
            if self.wait_for_places(&mut closing).await.is_none() {
                return;
            }
            match until(&mut closing, listener.accept()).await {
                None => return,
                Some(Ok(fd)) => self.hand_over(fd),
                Some(Err(error)) => {
                    let is_news = said.is_none_or(|said: Instant| {
                        blockhaul_io::elapsed(said) >= UNACCEPTED_AGAIN
                    });
                    if is_news {
                        said = Some(blockhaul_io::now());
                        log::warn!(error:% = error; "cannot accept connections: {error}");
                    }
                    let changed = self.clients.changed();
                    // EMFILE, ENFILE: a crowd that says nothing keeps nobody out.
                    if matches!(error.raw_os_error(), Some(24 | 23)) {
                        self.clients.cut_oldest();
                    }
                    // Others may end; trying at once would spin.
                    let _ = blockhaul_io::timeout(ACCEPT_AGAIN, changed).await;
                }
            }
        }
    }

    /// Waits until another connection may be accepted; none when `closing` comes first.
    async fn wait_for_places(&self, closing: &mut Ticket<()>) -> Option<()> {
        let Limits { connections, handshakes, .. } = self.config.limits;
        while self.clients.is_crowded_for(connections, handshakes).is_some() {
            let changed = self.clients.changed();
            // Again, for what has changed meanwhile.
            if let Some(time) = self.clients.is_crowded_for(connections, handshakes) {
                let _ = until(closing, blockhaul_io::timeout(time, changed)).await?;
            }
        }
        Some(())
    }

    /// Serves one connection on some worker, in the background.
    pub fn hand_over(self: &Arc<Self>, fd: OwnedFd) {
        let Some(entered) = self.enter(fd) else { return };
        let worker = self.next.fetch_add(1, Ordering::Relaxed);
        let server = self.clone();
        drop(Remote::to(worker).spawn(move || server.attend(entered)));
    }

    /// Serves one connection on this worker, to its end.
    pub async fn serve(self: Arc<Self>, fd: OwnedFd) {
        if let Some(entered) = self.enter(fd) {
            self.attend(entered).await;
        }
    }

    /// Enters a connection into the table of open ones, if it may be served.
    fn enter(self: &Arc<Self>, fd: OwnedFd) -> Option<Entered> {
        // A client whose machine is gone must not hold its place for ever; without this it does.
        let _ = rustix::net::sockopt::set_socket_keepalive(&fd, true);
        let stream = match Stream::new(fd) {
            Ok(stream) => Arc::new(stream),
            Err(error) => {
                log::warn!(error:% = error; "refused a connection: {error}");
                return None;
            }
        };
        let id = self.ids.fetch_add(1, Ordering::Relaxed);
        let Limits { connections, handshakes, .. } = self.config.limits;
        let connection = Arc::new(Connection::new(id, stream.peer().to_string()));
        let entry = (connection.clone(), stream.clone());
        let Some(told) = self.clients.enter(entry.0, entry.1, connections, handshakes) else {
            self.control.refused.fetch_add(1, Ordering::Relaxed);
            let error = format!("{connections} are open already");
            self.complaints().ended(&connection, &error, true);
            return None;
        };
        self.control.accepted.fetch_add(1, Ordering::Relaxed);
        Some(Entered { server: self.clone(), connection, stream, told })
    }

    async fn attend(self: Arc<Self>, mut entered: Entered) {
        // The stop may have begun before the connection was entered.
        if self.is_stopping() {
            return;
        }
        let connection = entered.connection.clone();
        let (id, peer) = (connection.id, &connection.peer);
        record!(Debug, connection; "connection {id} from {peer}");
        let ended = self.converse(&mut entered).await;
        if ended.is_err() && connection.export().is_none() {
            self.control.failed.fetch_add(1, Ordering::Relaxed);
        }
        let failed = ended.is_err();
        match ended {
            Ok(()) => record!(Debug, connection; "connection {id} ended"),
            Err(Ending { why: error, cause: Cause::Server }) => {
                record!(Info, connection, error; "connection {id} from {peer}: {error}");
            }
            Err(Ending { why, cause }) => {
                self.complaints().ended(&connection, &why, cause == Cause::Refused);
            }
        }
        // A device in whose callback something hangs may have the socket, too: the client is not to wait.
        // Who was served waits for the device to be closed, but not for ever.
        if failed || connection.export().is_none() || self.config.visits.is_none() {
            entered.stream.shutdown();
        } else {
            let stream = Arc::downgrade(&entered.stream);
            drop(blockhaul_io::spawn(async move {
                blockhaul_io::sleep(CLOSING).await;
                if let Some(stream) = stream.upgrade() {
                    stream.shutdown();
                }
            }));
        }
        self.served.fetch_add(1, Ordering::Relaxed);
    }

    async fn converse(self: &Arc<Self>, entered: &mut Entered) -> Result<(), Ending> {
        let (connection, stream) = (entered.connection.clone(), entered.stream.clone());
        let told = &mut entered.told;
        // Storage that takes one client at a time may keep it waiting.
        let (config, unopened) = (&self.config, &self.unopened);
        let entering = Hall::enter(config, unopened, connection.clone(), stream.clone());
        let admitting = unless_told(told, || true, entering);
        let mut hall = match admitting.await {
            Ok(admitted) => admitted?,
            Err(leave) => return Err(self.cut(leave)),
        };
        let time = self.config.limits.handshake;
        let tls = self.tls();
        let settle = || match self.clients.settle(connection.id) {
            true => Ok(()),
            false => Err(self.cut(Leave::Crowded)),
        };
        let (hall_of, odd) = (&mut hall, &self.odd);
        let greeting =
            handshake::run(&self.config, &tls, &connection, hall_of, &stream, &settle, odd);
        let greeting = async {
            match time {
                Duration::ZERO => greeting.await,
                time => blockhaul_io::timeout(time, greeting)
                    .await
                    .map_err(|_| format!("no handshake within {} s", time.as_secs_f32()))?,
            }
        };
        let chosen = match unless_told(told, || true, greeting).await {
            Ok(greeted) => greeted?,
            Err(leave) => return Err(self.cut(leave)),
        };
        let Some(chosen) = chosen else { return Ok(()) };
        Ok(session::run(self.clone(), connection, stream, chosen, hall.guest(), told).await?)
    }

    /// Why a connection ends that was told to leave before it had an export.
    fn cut(&self, leave: Leave) -> Ending {
        let (why, cause) = match leave {
            Leave::Stop => ("cut in its handshake: the server stops", Cause::Server),
            Leave::Unwanted => {
                ("disconnected in its handshake by whoever runs the server", Cause::Server)
            }
            // Whoever runs the server is to know that there is a crowd.
            Leave::Crowded => (
                "cut: too many connections, and this one has not finished its handshake for longest",
                Cause::Client,
            ),
        };
        Ending { why: why.to_string(), cause }
    }

    fn complaints(&self) -> MutexGuard<'_, Complaints> {
        self.complaints.lock().expect("no panic under this lock")
    }

    fn limits(&self) -> &Limits {
        &self.config.limits
    }

    /// A connection's part of the memory: what its device is worth, if it says so, but enough for the
    /// largest request.
    fn share(&self, in_flight: Option<u64>) -> Pool {
        let limits = &self.config.limits;
        let least = Pool::cost(limits.payload as usize);
        let bytes = in_flight.map_or(limits.client_bytes, |bytes| bytes.max(least));
        self.config.pool.share(bytes)
    }

    /// A connection's part of the memory for small requests.
    fn share_aside(&self) -> Pool {
        self.aside.share(limits::SMALL)
    }

    fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::Relaxed)
    }

    /// The flushes of the storage behind an export that a client has chosen.
    fn flushes(&self, export: &str, device: &dyn Device) -> Arc<Flushes> {
        match self.config.visits {
            // Clients may have storage of their own, and what they share reports to all of them.
            Some(_) if device.facts().flush_failures_stay => Arc::default(),
            Some(_) => self.storages.flushes(export, false),
            None => self.storages.flushes(export, true),
        }
    }

    /// How the stop goes on, once it has begun.
    fn stop_order(&self) -> Option<Stop> {
        self.is_stopping().then(|| self.stop.get().copied()).flatten()
    }

    /// Says that a connection waits for memory that others hold, until this is dropped.
    fn starving(&self) -> Starving<'_> {
        self.starving.fetch_add(1, Ordering::Relaxed);
        self.hungry.notify();
        Starving(&self.starving)
    }

    fn is_starving(&self) -> bool {
        self.starving.load(Ordering::Relaxed) > 0
    }

    /// A ticket that completes when a connection has ended, or has finished its handshake; take it before looking
    /// at what there is.
    pub fn changed(&self) -> Ticket<()> {
        self.clients.changed()
    }

    /// Connections that are open now.
    pub fn open(&self) -> usize {
        self.clients.count()
    }

    /// Connections that have ended.
    pub fn served(&self) -> u64 {
        self.served.load(Ordering::Relaxed)
    }
}

/// Does some work, unless the condition behind the ticket comes first.
async fn until<T>(condition: &mut Ticket<()>, work: impl Future<Output = T>) -> Option<T> {
    let mut work = pin!(work);
    poll_fn(|cx| match Pin::new(&mut *condition).poll(cx) {
        Poll::Ready(_) => Poll::Ready(None),
        Poll::Pending => work.as_mut().poll(cx).map(Some),
    })
    .await
}

/// A connection and its place in the table of open ones.
struct Entered {
    server: Arc<Server>,
    connection: Arc<Connection>,
    stream: Arc<Stream>,
    /// Says when it must leave.
    told: Ticket<Leave>,
}

impl Drop for Entered {
    fn drop(&mut self) {
        self.server.clients.leave(self.connection.id);
    }
}

/// One connection that waits for memory.
struct Starving<'a>(&'a AtomicUsize);

impl Drop for Starving<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}
