//! Servers for tests of the client: our own on a Unix socket, and scripted ones.

use std::ffi::OsStr;
use std::sync::Arc;
use std::time::Duration;

use blockhaul_block::{ContextSet, Device, Error, Reply, Request};
use blockhaul_catalog::{DeviceSpec, Intent, Registry, Stack};
use blockhaul_io::{Data, Listener, Reservation, Runtime};
use blockhaul_server::{Limits, Offers, Server, ServerConfig};
use blockhaul_testkit::model::Model;
use blockhaul_testkit::peer::{Offer, ScriptedServer};
use blockhaul_testkit::tools::ScratchDir;
use blockhaul_wire::ReplyForm;

/// A server that stops when this is dropped, on a worker.
pub struct Serving {
    pub server: Arc<Server>,
    scratch: ScratchDir,
}

/// Serves a device from this worker, without emulation: the client side must add it.
pub fn serve(device: Arc<dyn Device>, offers: Offers, limits: Limits, pool: u64) -> Serving {
    let scratch = ScratchDir::new().unwrap();
    let device = blockhaul_block::fence(device);
    let pool = blockhaul_io::Pool::new(pool);
    let exports = blockhaul_catalog::SharedDevice::new("", "", device);
    let tls = blockhaul_server::TlsPolicy::Off;
    let server = Server::new(ServerConfig { exports, limits, offers, pool, tls });
    let listener = Listener::bind_unix(&scratch.socket("server")).unwrap();
    drop(blockhaul_io::spawn(server.clone().listen(listener)));
    Serving { server, scratch }
}

impl Serving {
    /// Opens the default export by its URI, as programs do.
    pub async fn open(
        &self,
        options: blockhaul_client::ConnectOptions,
    ) -> blockhaul_block::Result<Stack> {
        open(&self.uri(), options).await
    }

    pub fn uri(&self) -> String {
        format!("nbd+unix:///?socket={}", self.scratch.socket("server").display())
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        let server = self.server.clone();
        drop(blockhaul_io::spawn(async move { server.stop(Duration::from_secs(1)).await }));
    }
}

/// Opens a URI.
pub async fn open(
    uri: &str,
    options: blockhaul_client::ConnectOptions,
) -> blockhaul_block::Result<Stack> {
    let registry = Registry {
        backends: blockhaul_client::all(options),
        path: blockhaul_backends::PATH_SCHEME,
        ..Registry::default()
    };
    registry.open(&DeviceSpec::parse(OsStr::new(uri))?, Vec::new(), Intent::WRITE).await
}

/// Opens a device that is not a connection.
pub async fn open_local(spec: &str) -> blockhaul_block::Result<Arc<dyn Device>> {
    let registry = Registry {
        backends: blockhaul_backends::all(),
        path: blockhaul_backends::PATH_SCHEME,
        ..Registry::default()
    };
    let stack =
        registry.open(&DeviceSpec::parse(OsStr::new(spec))?, Vec::new(), Intent::WRITE).await?;
    Ok(stack.device().clone())
}

pub const SIZE: u64 = 1 << 20;
pub const FORMS: [ReplyForm; 3] = [ReplyForm::Simple, ReplyForm::Structured, ReplyForm::Extended];
pub const CHUNKS: [ReplyForm; 2] = [ReplyForm::Structured, ReplyForm::Extended];

pub fn content(at: u64, len: u64) -> Vec<u8> {
    (at..at + len).map(|at| (at % 251) as u8 + 1).collect()
}

pub fn offer() -> Offer {
    Offer::new(Model::new(SIZE).with_content(content(0, SIZE)))
}

/// For servers that reply, however busy the machine is.
pub fn options() -> blockhaul_client::ConnectOptions {
    let patience = Duration::from_secs(60);
    blockhaul_client::ConnectOptions {
        connect_timeout: patience,
        timeout: patience,
        ..blockhaul_client::ConnectOptions::default()
    }
}

/// For servers that do not reply.
pub fn hasty() -> blockhaul_client::ConnectOptions {
    blockhaul_client::ConnectOptions { timeout: Duration::from_millis(300), ..options() }
}

/// Runs a part of a test on a worker; it must end in time.
pub fn on_worker<M, F>(make: M) -> F::Output
where
    M: FnOnce() -> F + Send + 'static,
    F: Future + 'static,
    F::Output: Send + 'static,
{
    let runtime = Runtime::start(&blockhaul_io::RuntimeConfig {
        workers: 1,
        ..blockhaul_io::RuntimeConfig::default()
    })
    .unwrap();
    runtime.block_on(move || async move {
        let limit = Duration::from_secs(120);
        blockhaul_io::timeout(limit, make()).await.expect("it hangs")
    })
}

/// Opens the server's export and passes it to `work`.
pub fn with<F, T>(
    server: &ScriptedServer,
    options: blockhaul_client::ConnectOptions,
    work: impl FnOnce(Arc<dyn Device>) -> F + Send + 'static,
) -> Result<T, Error>
where
    F: Future<Output = T> + 'static,
    T: Send + 'static,
{
    let uri = server.uri();
    on_worker(move || async move {
        let device = open(&uri, options).await?.device().clone();
        Ok(work(device).await)
    })
}

pub async fn read(device: &dyn Device, at: u64, len: usize) -> Result<Vec<u8>, Error> {
    bytes(device.submit(Request::read(at, Reservation::unpooled(len))).await, len)
}

pub fn bytes(outcome: Result<Reply, Error>, len: usize) -> Result<Vec<u8>, Error> {
    match outcome? {
        Reply::Data(data) => Ok(data.bytes().to_vec()),
        Reply::Hole => Ok(vec![0; len]),
        other => panic!("{other:?}"),
    }
}

/// What a client does with every usable server.
pub async fn use_it(device: Arc<dyn Device>) -> Result<(), Error> {
    let facts = device.facts();
    assert_eq!(facts.size, SIZE);
    assert_eq!(read(&*device, 1000, 5000).await?, content(1000, 5000));
    device.submit(Request::write(3000, Data::copy_of(b"hello"))).await?;
    device.submit(Request::zero(5000, 100)).await?;
    device.submit(Request::flush()).await?;
    let mut expected = content(2990, 20);
    expected[10..15].copy_from_slice(b"hello");
    assert_eq!(read(&*device, 2990, 20).await?, expected);
    assert_eq!(read(&*device, 5000, 100).await?, [0; 100]);
    let Reply::Extents(lists) =
        device.submit(Request::extents(0, SIZE, ContextSet::first())).await?
    else {
        panic!("no extents")
    };
    assert!(lists[0].total() > 0);
    Ok(())
}
