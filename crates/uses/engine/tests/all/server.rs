//! A server whose connections are cut, and which may lose unflushed data.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use blockhaul_block::{Can, Device, Error, Facts, Kind, Op, OpKind, PendingRequest, Request};
use blockhaul_catalog::{
    Backend, BackendTarget, DeviceSpec, HandleOpener, Intent, OpenFuture, OpenedDevice, Registry,
    Stack,
};
use blockhaul_testkit::model::ModelDevice;
use blockhaul_testkit::rng::Rng;

/// A server whose connections can be cut.
pub struct Server {
    pub disk: Arc<ModelDevice>,
    pub promise: bool,
    /// On a cut, the connection's unflushed writes are lost, as after a crash.
    pub forgets: bool,
    /// Requests until the next cut, counted down over all connections; a random number follows.
    pub fuse: AtomicU64,
    pub cuts_left: AtomicU64,
    pub refused_dials: AtomicU64,
    pub dials: AtomicU64,
    pub size_later: Mutex<Option<u64>>,
    /// The disk that later connections show.
    pub disk_later: Mutex<Option<Arc<ModelDevice>>>,
    rng: Mutex<Rng>,
}

/// One connection.
struct Connection {
    server: &'static Server,
    size: u64,
    dead: Arc<AtomicBool>,
    /// The previous contents of each unflushed write.
    before: Arc<Mutex<Vec<Before>>>,
}

/// Offset and bytes.
type Before = (u64, Vec<u8>);

impl Server {
    pub fn new(disk: Arc<ModelDevice>, seed: u64) -> Server {
        Server {
            disk,
            promise: true,
            forgets: false,
            fuse: AtomicU64::new(u64::MAX),
            cuts_left: AtomicU64::new(0),
            refused_dials: AtomicU64::new(0),
            dials: AtomicU64::new(0),
            size_later: Mutex::new(None),
            disk_later: Mutex::new(None),
            rng: Mutex::new(Rng::new(seed)),
        }
    }

    pub async fn open(self) -> (Stack, &'static Server) {
        let server: &'static Server = Box::leak(Box::new(self));
        let registry =
            Registry { backends: vec![Arc::new(Listener(server))], ..Registry::default() };
        let spec = DeviceSpec::Scheme { scheme: "cut".into(), rest: String::new() };
        (registry.open(&spec, Vec::new(), Intent::WRITE).await.unwrap(), server)
    }

    fn connect(&'static self) -> Arc<dyn Device> {
        let size = match self.dials.load(Ordering::SeqCst) {
            0 => None,
            _ => *self.size_later.lock().unwrap(),
        };
        let size = size.unwrap_or(self.disk.facts().size);
        let other = self.disk_later.lock().unwrap().clone();
        let other = other.filter(|_| self.dials.load(Ordering::SeqCst) > 0);
        if let Some(other) = other {
            return other;
        }
        Arc::new(Connection { server: self, size, dead: Arc::default(), before: Arc::default() })
    }

    /// Whether this connection is cut now.
    fn burns(&self) -> bool {
        // One request at a time, or two of them use up one cut, and the number of cuts left wraps around.
        let mut rng = self.rng.lock().unwrap();
        if self.cuts_left.load(Ordering::SeqCst) == 0 {
            return false;
        }
        if self.fuse.fetch_sub(1, Ordering::SeqCst) > 1 {
            return false;
        }
        self.fuse.store(rng.between(5, 60), Ordering::SeqCst);
        self.cuts_left.fetch_sub(1, Ordering::SeqCst);
        true
    }
}

struct Listener(&'static Server);

impl Backend for Listener {
    fn schemes(&self) -> &'static [&'static str] {
        &["cut"]
    }

    fn operand(&self) -> &'static str {
        ""
    }

    fn summary(&self) -> &'static str {
        "for tests"
    }

    fn open(&self, _: BackendTarget) -> OpenFuture<OpenedDevice> {
        let device = self.0.connect();
        let more = Arc::new(Listener(self.0));
        Box::pin(async move { Ok(OpenedDevice { device, more: Some(more) }) })
    }
}

impl HandleOpener for Listener {
    fn another(&self) -> OpenFuture<Arc<dyn Device>> {
        let server = self.0;
        server.dials.fetch_add(1, Ordering::SeqCst);
        let refused = server
            .refused_dials
            .fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1))
            .is_ok();
        Box::pin(async move {
            if refused {
                Err(Error::new(Kind::Disconnected, "connection refused"))
            } else {
                Ok(server.connect())
            }
        })
    }
}

impl Connection {
    fn cut(&self) {
        self.dead.store(true, Ordering::SeqCst);
        let before = std::mem::take(&mut *self.before.lock().unwrap());
        if self.server.forgets {
            let mut model = self.server.disk.model();
            for (at, bytes) in before.into_iter().rev() {
                model.bytes_mut()[at as usize..][..bytes.len()].copy_from_slice(&bytes);
            }
        }
    }
}

fn gone() -> Error {
    Error::new(Kind::Disconnected, "the connection was cut")
}

impl Device for Connection {
    fn facts(&self) -> Arc<Facts> {
        let mut facts = Facts::clone(&self.server.disk.facts());
        facts.can.set(Can::MULTI_CONN, self.server.promise);
        facts.zeroed = false;
        facts.size = self.size;
        Arc::new(facts)
    }

    fn submit(&self, request: Request) -> PendingRequest {
        if self.dead.load(Ordering::SeqCst) {
            return gone().into();
        }
        let burns = self.server.burns();
        if burns {
            self.cut();
            if !request.kind().changes() || self.server.rng.lock().unwrap().chance(50) {
                return gone().into();
            }
            // Carried out late, by the server of a lost connection, from its own memory.
            let Request { op, at, len, flags } = request;
            let op = match op {
                Op::Write(data) => Op::Write(blockhaul_io::Data::copy_of(data.bytes())),
                op => op,
            };
            let request = Request { op, at, len, flags };
            let inner = self.server.disk.clone();
            return PendingRequest::start(async move {
                drop(blockhaul_io::spawn(async move {
                    blockhaul_io::sleep(Duration::from_millis(3)).await;
                    let _ = inner.submit(request).await;
                }));
                Err(gone())
            });
        }
        if request.kind().changes() {
            let at = request.at as usize;
            let len = request.len as usize;
            let old = self.server.disk.model().bytes()[at..at + len].to_vec();
            self.before.lock().unwrap().push((at as u64, old));
        }
        let flush = request.kind() == OpKind::Flush;
        let inner = self.server.disk.submit(request);
        let dead = self.dead.clone();
        let before = self.before.clone();
        let mark = before.lock().unwrap().len();
        PendingRequest::start(async move {
            let outcome = inner.await;
            if dead.load(Ordering::SeqCst) {
                return Err(gone());
            }
            if flush && outcome.is_ok() {
                let mut before = before.lock().unwrap();
                let mark = mark.min(before.len());
                before.drain(..mark);
            }
            outcome
        })
    }
}
