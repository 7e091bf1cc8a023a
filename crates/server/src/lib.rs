//! Serves any [`block::Device`] over NBD.
//!
//! One task per connection reads requests in batches and submits them at once; replies are queued and
//! leave in vectored sends, many at a time. Memory is bounded by what a connection's share of the
//! buffer pool allows: a client that does not read its replies stops being read from, and harms
//! nobody else.
//!
//! - [`Server`]: what is served, to whom, and the orderly stop.
//! - `session`: a connection in transmission. `handshake`: a connection before that.
//! - `reply`: outcomes as NBD replies.

mod hall;
mod handshake;
mod limits;
mod reply;
mod session;

use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};
use std::pin::pin;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use block::{Device, Exports};
use io::{Listener, Pool, Remote, Stream};

use hall::Hall;
pub use limits::Limits;

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
}

impl Default for Offers {
    fn default() -> Offers {
        Offers { structured: true, extended: true, contexts: true }
    }
}

/// Whether clients may or must use TLS.
#[derive(Clone, Default)]
pub enum Tls {
    /// It is not offered.
    #[default]
    Off,
    /// A client that asks for it gets it, others are served without.
    On(Arc<tls::Acceptor>),
    /// Nothing but a client's farewell is answered before it.
    Require(Arc<tls::Acceptor>),
}

/// How to serve.
pub struct Config {
    /// What is served. A client that asks for the empty name gets the first one.
    pub exports: Vec<Export>,
    /// Storage that opens devices for each client, in place of `exports`.
    pub visits: Option<Arc<dyn Exports>>,
    /// What a client may cost.
    pub limits: Limits,
    /// What handshakes offer.
    pub offers: Offers,
    /// Memory for requests of all connections.
    pub pool: Pool,
    /// TLS.
    pub tls: Tls,
}

/// Why a connection ended, other than politely.
pub(crate) struct Ending {
    why: String,
    /// The client could not prove who it is: whoever runs the server should know.
    refused: bool,
}

impl Ending {
    fn refused(why: String) -> Ending {
        Ending { why, refused: true }
    }
}

impl From<String> for Ending {
    fn from(why: String) -> Ending {
        Ending { why, refused: false }
    }
}

/// A server: exports, limits, and the connections that are open. Shared by all workers.
pub struct Server {
    config: Config,
    next: AtomicUsize,
    ids: AtomicU64,
    stopping: AtomicBool,
    /// Connections that wait for memory which others hold.
    starving: AtomicUsize,
    open: Mutex<HashMap<u64, Arc<Stream>>>,
    served: AtomicU64,
}

impl Server {
    /// A server without listeners yet.
    pub fn new(mut config: Config) -> Arc<Server> {
        config.limits.payload = config.limits.payload.max(limits::PAYLOAD_LEAST);
        Arc::new(Server {
            config,
            next: AtomicUsize::new(0),
            ids: AtomicU64::new(1),
            stopping: AtomicBool::new(false),
            starving: AtomicUsize::new(0),
            open: Mutex::default(),
            served: AtomicU64::new(0),
        })
    }

    /// Accepts connections until [`Server::stop`] and spreads them over the workers. Any number of
    /// listeners may run. Returns when the server stops.
    pub async fn listen(self: Arc<Self>, listener: Listener) {
        while !self.stopping.load(Ordering::Relaxed) {
            // Looks up now and then, for the stop.
            let accepted = match io::timeout(Duration::from_millis(100), listener.accept()).await {
                Ok(accepted) => accepted,
                Err(io::Elapsed) => continue,
            };
            match accepted {
                Ok(fd) => self.hand_over(fd),
                Err(error) => {
                    // Out of descriptors or memory: others may end; trying at once would spin.
                    log::warn!("cannot accept a connection: {error}");
                    io::sleep(Duration::from_millis(100)).await;
                }
            }
        }
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
                log::warn!("refused a connection: {error}");
                return None;
            }
        };
        let id = self.ids.fetch_add(1, Ordering::Relaxed);
        let mut open = self.open.lock().expect("no panic under this lock");
        if open.len() >= self.config.limits.connections {
            log::warn!("refused a connection: {} are open already", open.len());
            return None;
        }
        open.insert(id, stream.clone());
        drop(open);
        Some(Entered { server: self.clone(), id, stream })
    }

    async fn attend(self: Arc<Self>, entered: Entered) {
        // The stop may have begun before the connection was entered.
        if self.is_stopping() {
            return;
        }
        let (id, peer) = (entered.id, entered.stream.peer());
        log::debug!("connection {id} from {peer}");
        match self.converse(entered.stream.clone()).await {
            Ok(()) => log::debug!("connection {id} ended"),
            Err(Ending { why, refused: true }) => {
                log::warn!("refused connection {id} from {peer}: {why}");
            }
            Err(Ending { why, .. }) => log::info!("connection {id} from {peer}: {why}"),
        }
        self.served.fetch_add(1, Ordering::Relaxed);
    }

    async fn converse(self: &Arc<Self>, stream: Arc<Stream>) -> Result<(), Ending> {
        let limits = &self.config.limits;
        let mut hall = self.admit(&stream).await?;
        let greeted = match limits.handshake {
            Duration::ZERO => handshake::run(&self.config, &mut hall, &stream).await,
            time => io::timeout(time, handshake::run(&self.config, &mut hall, &stream))
                .await
                .map_err(|_| format!("no handshake within {} s", time.as_secs_f32()))?,
        };
        let Some(chosen) = greeted? else { return Ok(()) };
        Ok(session::run(self.clone(), stream, chosen, hall.visit()).await?)
    }

    /// Lets a client in. Storage that takes one at a time may keep it waiting: not over a stop.
    async fn admit(&self, stream: &Arc<Stream>) -> Result<Hall<'_>, String> {
        let mut entering = pin!(Hall::enter(&self.config, stream.clone()));
        loop {
            match io::timeout(Duration::from_millis(100), entering.as_mut()).await {
                Ok(entered) => return entered,
                Err(io::Elapsed) if self.is_stopping() => return Err("the server stops".into()),
                Err(io::Elapsed) => {}
            }
        }
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

    fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::Relaxed)
    }

    /// Says that a connection waits for memory that others hold, until this is dropped.
    fn starving(&self) -> Starving<'_> {
        self.starving.fetch_add(1, Ordering::Relaxed);
        Starving(&self.starving)
    }

    fn is_starving(&self) -> bool {
        self.starving.load(Ordering::Relaxed) > 0
    }

    /// Connections that are open now.
    pub fn open(&self) -> usize {
        self.open.lock().expect("no panic under this lock").len()
    }

    /// Connections that have ended.
    pub fn served(&self) -> u64 {
        self.served.load(Ordering::Relaxed)
    }

    /// Orderly stop: nothing new is read, what is in progress is finished and answered. After
    /// `patience` connections are cut. Returns the number of connections that were still open
    /// `patience` later: their devices hold on to requests.
    pub async fn stop(&self, patience: Duration) -> usize {
        self.stopping.store(true, Ordering::SeqCst);
        self.shutdown_all(rustix::net::Shutdown::Read);
        if !self.wait_until_empty(patience).await {
            log::info!("cutting {} connections that take too long", self.open());
            self.shutdown_all(rustix::net::Shutdown::Both);
            self.wait_until_empty(patience).await;
        }
        self.open()
    }

    fn shutdown_all(&self, how: rustix::net::Shutdown) {
        for stream in self.open.lock().expect("no panic under this lock").values() {
            // Fails only for connections that the client has ended.
            let _ = rustix::net::shutdown(stream.as_fd(), how);
        }
    }

    async fn wait_until_empty(&self, patience: Duration) -> bool {
        let deadline = Instant::now() + patience;
        while self.open() > 0 {
            if Instant::now() >= deadline {
                return false;
            }
            io::sleep(Duration::from_millis(2)).await;
        }
        true
    }
}

/// A connection and its place in the table of open ones.
struct Entered {
    server: Arc<Server>,
    id: u64,
    stream: Arc<Stream>,
}

impl Drop for Entered {
    fn drop(&mut self) {
        self.server.open.lock().expect("no panic under this lock").remove(&self.id);
    }
}

/// One connection that waits for memory.
struct Starving<'a>(&'a AtomicUsize);

impl Drop for Starving<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}
