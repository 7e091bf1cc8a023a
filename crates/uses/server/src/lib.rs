//! Serves any [`blockhaul_block::Device`] over NBD.
//!
//! One task per connection reads requests in batches and submits them at once; replies are queued
//! and leave in vectored sends, many at a time. Each connection's share of the buffer pool limits
//! its memory: the server stops reading from a client that does not read its replies, without
//! affecting others.
//!
//! - [`Server`]: exports, connections, and the orderly stop. `clients`: the open connections.
//! - `session`: a connection in transmission. `handshake`: a connection before that.
//! - `attached`: clients that use another protocol.
//! - `export_lookup`: the exports as a client sees them. `limits`: limits of clients. `in_flight`:
//!   requests in flight at devices. `storages`: which connections share a storage.
//! - `stop`: the orderly stop. `disconnect`: why a connection ends otherwise.
//! - `reply`: outcomes as NBD replies. `log_fields`: members of log records; `log_limit`: limits
//!   log lines.
//! - `control`: the operator's interface. `counters`: the counters. `service_manager`: messages to
//!   systemd.

#![cfg_attr(not(test), warn(clippy::disallowed_methods))]
#![cfg_attr(not(test), warn(clippy::missing_errors_doc))]

mod attached;
mod clients;
mod connection;
mod control;
mod counters;
mod disconnect;
mod export_lookup;
mod handshake;
mod in_flight;
mod limits;
mod log_fields;
mod log_limit;
mod reply;
mod service_manager;
mod session;
mod stop;
mod storages;

use std::future::poll_fn;
use std::os::fd::OwnedFd;
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::task::Poll;
use std::time::{Duration, Instant};

use blockhaul_block::Flushes;
use blockhaul_catalog::{DeviceSharing, Export, Exports};
use blockhaul_io::{Listener, Pool, Stream, Ticket, WorkerHandle};

pub use attached::AttachedClient;
use clients::{Clients, unless_disconnected};
use connection::Connection;
pub use connection::{ClientTlsIdentity, ExportCounts};
use control::ServerCounters;
pub use control::{ConnectedClient, ServerTotals};
pub use counters::ConnectionCounts;
use disconnect::DisconnectReason;
pub use disconnect::DisconnectResult;
use export_lookup::ExportLookup;
use handshake::ConnectionHandshake;
use in_flight::AllInFlight;
pub use limits::{Limit, Limits};
use log_fields::record;
use log_limit::LogLimit;
pub use service_manager::ServiceNotifier;
use stop::Stop;
use storages::StorageFlushes;

/// What a server offers in its handshakes.
#[derive(Debug, Clone, Copy)]
pub struct Offers {
    /// Structured replies.
    pub structured: bool,
    /// Extended headers.
    pub extended: bool,
    /// Metadata contexts.
    pub contexts: bool,
    /// Block sizes even if the device reports none, with the server's limit as the maximum request.
    /// Otherwise the device's own values are advertised unchanged.
    pub block_sizes: bool,
    /// Smallest preferred block size to advertise, in bytes. If the device reports no block sizes,
    /// any offset, and reads and writes of any length, are advertised with it.
    pub preferred: Option<u32>,
    /// Fixed newstyle: options other than EXPORT_NAME.
    pub fixed_newstyle: bool,
    /// Omitting 124 zeroes after EXPORT_NAME.
    pub no_zeroes: bool,
    /// No negotiation: every client gets the default export, with none of the above.
    pub oldstyle: bool,
    /// NBD begins after an HTTP request to upgrade to it, with TLS around both if that is required.
    pub http: bool,
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
        http: false,
    };
}

impl Default for Offers {
    fn default() -> Offers {
        Offers::ALL
    }
}

/// Whether clients may or must use TLS.
#[derive(Clone, Default)]
pub enum TlsPolicy {
    /// TLS is not offered.
    #[default]
    Off,
    /// A client may use TLS; others are served without it.
    On(Arc<blockhaul_tls::TlsAcceptor>),
    /// Clients must start TLS; until then only a disconnect is accepted.
    Require(Arc<blockhaul_tls::TlsAcceptor>),
}

/// How to serve.
pub struct ServerConfig {
    /// The exports: one device ([`SharedDevice`](blockhaul_catalog::SharedDevice)), several
    /// ([`NamedStorages`](blockhaul_catalog::NamedStorages)), storage that opens devices for each client, or
    /// the program's own table. They may change while clients are connected: clients keep what they
    /// have opened.
    pub exports: Arc<dyn Exports>,
    /// The initial limits of clients ([`Server::set_limits`]).
    pub limits: Limits,
    /// What handshakes offer.
    pub offers: Offers,
    /// Memory for requests of all connections.
    pub pool: Pool,
    /// The initial TLS settings ([`Server::set_tls`]).
    pub tls: TlsPolicy,
}

impl ServerConfig {
    /// The default limits and offers, memory for them, and no TLS.
    pub fn new(exports: Arc<dyn Exports>) -> ServerConfig {
        let limits = Limits::default();
        let pool = Pool::new(limits.all_bytes);
        ServerConfig { exports, limits, offers: Offers::ALL, pool, tls: TlsPolicy::Off }
    }
}

/// A server: exports, limits, and the open connections. Shared by all workers.
pub struct Server {
    config: ServerConfig,
    next: AtomicUsize,
    ids: AtomicU64,
    stopping: AtomicBool,
    /// Signals listeners to close: the server stops, or drains.
    closing: blockhaul_io::Notify,
    /// When the stop began, and its time limits.
    stop: OnceLock<Stop>,
    /// Number of connections that wait for memory held by others.
    starving: AtomicUsize,
    /// Signals that one begins to wait.
    hungry: blockhaul_io::Notify,
    /// Memory besides the pool for one small request of each connection: others may hold the pool
    /// for as long as [`Limits::stalled`].
    aside: Pool,
    clients: Clients,
    /// Requests in progress.
    all_in_flight: Arc<AllInFlight>,
    /// Number of requests answered ESHUTDOWN because their devices held them for too long.
    given_up: AtomicUsize,
    /// What the connections of an export share.
    storages: StorageFlushes,
    served: AtomicU64,
    tls: Mutex<TlsPolicy>,
    limits: Mutex<Arc<Limits>>,
    control: ServerCounters,
    log_limit: Mutex<LogLimit>,
    /// The same for exports that could not be opened.
    unopened: Mutex<LogLimit>,
    /// The same for options that no client should send.
    odd: Mutex<LogLimit>,
}

/// Interval of attempts to accept a connection while the system has no descriptor or memory for it.
const ACCEPT_AGAIN: Duration = Duration::from_millis(100);

/// Interval of log lines of a listener that cannot accept connections: it tries many times a
/// second.
const UNACCEPTED_AGAIN: Duration = Duration::from_secs(10);

/// Maximum time for a device to close before its client's socket is shut down.
const CLOSING: Duration = Duration::from_secs(10);

impl Server {
    /// A server without listeners yet.
    pub fn new(mut config: ServerConfig) -> Arc<Server> {
        config.limits.payload = config.limits.payload.max(limits::PAYLOAD_LEAST);
        let aside = Pool::new((config.pool.limit() / limits::ASIDE_PART).max(limits::SMALL));
        Arc::new(Server {
            tls: Mutex::new(config.tls.clone()),
            limits: Mutex::new(Arc::new(config.limits.clone())),
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
            all_in_flight: Arc::default(),
            given_up: AtomicUsize::new(0),
            storages: StorageFlushes::default(),
            served: AtomicU64::new(0),
            control: ServerCounters::default(),
            log_limit: Mutex::default(),
            unopened: Mutex::default(),
            odd: Mutex::default(),
        })
    }

    /// Accepts connections until [`Server::stop`] or [`Server::drain`] and spreads them over the
    /// workers. Any number of listeners may run.
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
                    // EMFILE, ENFILE: many silent clients must not lock out others.
                    if matches!(error.raw_os_error(), Some(24 | 23)) {
                        self.clients.cut_oldest();
                    }
                    // Other connections may end; retrying at once would spin.
                    let _ = blockhaul_io::timeout(ACCEPT_AGAIN, changed).await;
                }
            }
        }
    }

    /// Waits until another connection may be accepted; none if `closing` comes first.
    async fn wait_for_places(&self, closing: &mut Ticket<()>) -> Option<()> {
        let places = || {
            let limits = self.limits();
            self.clients.is_crowded_for(limits.connections, limits.handshakes)
        };
        while places().is_some() {
            let changed = self.clients.changed();
            // Check again, as the state may have changed.
            if let Some(time) = places() {
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
        drop(WorkerHandle::to(worker).spawn(move || server.attend(entered)));
    }

    /// Serves one connection on this worker, to its end.
    pub async fn serve(self: Arc<Self>, fd: OwnedFd) {
        if let Some(entered) = self.enter(fd) {
            self.attend(entered).await;
        }
    }

    /// Adds a connection to the table of open ones, if it may be served.
    fn enter(self: &Arc<Self>, fd: OwnedFd) -> Option<ConnectionEntry> {
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
        let Limits { connections, handshakes, .. } = *self.limits();
        let connection = Arc::new(Connection::new(id, stream.peer().to_string()));
        let entry = (connection.clone(), stream.clone());
        let Some(disconnect) = self.clients.enter(entry.0, entry.1, connections, handshakes) else {
            self.control.refused.fetch_add(1, Ordering::Relaxed);
            let error = format!("{connections} are open already");
            self.log_limit().ended(&connection, &error, true);
            return None;
        };
        self.control.accepted.fetch_add(1, Ordering::Relaxed);
        Some(ConnectionEntry { server: self.clone(), connection, stream, disconnect })
    }

    async fn attend(self: Arc<Self>, mut entered: ConnectionEntry) {
        // The stop may have begun before the connection was added.
        if self.is_stopping() {
            return;
        }
        let connection = entered.connection.clone();
        let id = connection.id;
        let peer = &connection.peer;
        record!(Debug, connection; "connection {id} from {peer}");
        let ended = self.converse(&mut entered).await;
        if ended.is_err() && connection.export().is_none() {
            self.control.failed.fetch_add(1, Ordering::Relaxed);
        }
        match &ended {
            Ok(_) => record!(Debug, connection; "connection {id} ended"),
            Err(why @ (DisconnectReason::Stopping | DisconnectReason::Operator)) => {
                let error = why.to_string();
                record!(Info, connection, error; "connection {id} from {peer}: {error}");
            }
            Err(DisconnectReason::Left(why)) => {
                record!(Debug, connection, error = why.as_str(); "connection {id} ended: {why}");
            }
            Err(why) => {
                let refused = matches!(why, DisconnectReason::Refused(_));
                self.log_limit().ended(&connection, &why.to_string(), refused);
            }
        }
        match ended {
            Ok(Some(DeviceSharing::Own)) => shut_when_closed(&entered.stream),
            // No device has to be closed, or closing must not be awaited: a device with a hanging
            // callback may use the socket, too.
            _ => entered.stream.shutdown(),
        }
        self.served.fetch_add(1, Ordering::Relaxed);
    }

    /// Runs the handshake and serves the client. Returns what was served, if it has chosen an
    /// export.
    async fn converse(
        self: &Arc<Self>,
        entered: &mut ConnectionEntry,
    ) -> Result<Option<DeviceSharing>, DisconnectReason> {
        let connection = entered.connection.clone();
        let stream = entered.stream.clone();
        let disconnect = &mut entered.disconnect;
        // Storage that admits one client at a time may make it wait.
        let config = &self.config;
        let unopened = &self.unopened;
        let limits = self.limits();
        let entering = ExportLookup::enter(
            config,
            limits.clone(),
            unopened,
            connection.clone(),
            stream.clone(),
        );
        let mut lookup = unless_disconnected(disconnect, || true, entering).await??;
        let time = limits.handshake;
        let greeting = ConnectionHandshake {
            server: self,
            tls: self.tls(),
            connection: &connection,
            lookup: &mut lookup,
            stream: &stream,
        };
        let greeting = async {
            let greeting = greeting.run();
            match time {
                Duration::ZERO => greeting.await,
                time => blockhaul_io::timeout(time, greeting)
                    .await
                    .map_err(|_| format!("no handshake within {} s", time.as_secs_f32()))?,
            }
        };
        let chosen = unless_disconnected(disconnect, || true, greeting).await??;
        let Some(chosen) = chosen else { return Ok(None) };
        let sharing = chosen.export.sharing.clone();
        let visitor = lookup.visitor();
        let limits = (*limits).clone();
        session::run(self.clone(), connection, stream, chosen, visitor, limits, disconnect).await?;
        Ok(Some(sharing))
    }

    fn log_limit(&self) -> MutexGuard<'_, LogLimit> {
        self.log_limit.lock().expect("no panic under this lock")
    }

    /// The limits of clients that connect now.
    fn limits(&self) -> Arc<Limits> {
        self.limits.lock().expect("no panic under this lock").clone()
    }

    /// A connection's share of the memory: what its device suggests, if anything, but enough for
    /// the largest request.
    fn share(&self, limits: &Limits, in_flight: Option<u64>) -> Pool {
        let least = Pool::cost(limits.payload as usize);
        let bytes = in_flight.map_or(limits.client_bytes, |bytes| bytes.max(least));
        self.config.pool.share(bytes)
    }

    /// A connection's share of the memory for small requests.
    fn share_aside(&self) -> Pool {
        self.aside.share(limits::SMALL)
    }

    fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::Relaxed)
    }

    /// The flushes of the storage behind a client's export.
    fn flushes(&self, export: &Export) -> Arc<Flushes> {
        match &export.sharing {
            DeviceSharing::All(flushes) => flushes.clone(),
            // Clients may have separate storage, and shared storage reports to all of them.
            DeviceSharing::Own if export.device.facts().flush_failures_stay => Arc::default(),
            DeviceSharing::Own => self.storages.flushes(&export.name),
        }
    }

    /// The settings of the stop, once it has begun.
    fn stop_order(&self) -> Option<Stop> {
        self.is_stopping().then(|| self.stop.get().copied()).flatten()
    }

    /// Marks a connection as waiting for memory held by others, until this is dropped.
    fn starving(&self) -> MemoryWaiter<'_> {
        self.starving.fetch_add(1, Ordering::Relaxed);
        self.hungry.notify();
        MemoryWaiter(&self.starving)
    }

    fn is_starving(&self) -> bool {
        self.starving.load(Ordering::Relaxed) > 0
    }

    /// A ticket that completes when a connection has ended, or has finished its handshake; take it
    /// before checking the state.
    pub fn changed(&self) -> Ticket<()> {
        self.clients.changed()
    }

    /// Number of open connections.
    pub fn open(&self) -> usize {
        self.clients.count()
    }

    /// Number of connections that have ended.
    pub fn served(&self) -> u64 {
        self.served.load(Ordering::Relaxed)
    }
}

/// Shuts down the socket of a client after its device was closed, that is, when the stream has no
/// other holder; at the latest after [`CLOSING`].
fn shut_when_closed(stream: &Arc<Stream>) {
    let stream = Arc::downgrade(stream);
    drop(blockhaul_io::spawn(async move {
        blockhaul_io::sleep(CLOSING).await;
        if let Some(stream) = stream.upgrade() {
            stream.shutdown();
        }
    }));
}

/// Runs `work`, unless the ticket completes first.
async fn until<T>(condition: &mut Ticket<()>, work: impl Future<Output = T>) -> Option<T> {
    let mut work = pin!(work);
    poll_fn(|cx| match Pin::new(&mut *condition).poll(cx) {
        Poll::Ready(_) => Poll::Ready(None),
        Poll::Pending => work.as_mut().poll(cx).map(Some),
    })
    .await
}

/// A connection and its place in the table of open ones.
struct ConnectionEntry {
    server: Arc<Server>,
    connection: Arc<Connection>,
    stream: Arc<Stream>,
    /// Tells the connection when and why it must end.
    disconnect: Ticket<DisconnectReason>,
}

impl Drop for ConnectionEntry {
    fn drop(&mut self) {
        if std::thread::panicking() {
            // Requests in progress hold the socket, too: the client must not wait for them.
            self.stream.shutdown();
        }
        self.server.clients.leave(self.connection.id);
    }
}

/// One connection that waits for memory.
struct MemoryWaiter<'a>(&'a AtomicUsize);

impl Drop for MemoryWaiter<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}
