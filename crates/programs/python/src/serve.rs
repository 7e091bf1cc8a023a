//! `PythonServer` (`Serving` in Python): a server in this process.

use std::ffi::OsString;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use blockhaul_block::{Device, Error, Kind, Result};
use blockhaul_catalog::{Exports, Intent, Layer, Stack};
use blockhaul_io::{Listener, WorkerHandle};
use blockhaul_registry::device_registry;
use blockhaul_server::{Server, ServerConfig};
use pyo3::prelude::*;

use crate::error::of_device;
use crate::object::{self, Threads};
use crate::opening::spec;
use crate::workers::Generation;
use crate::{wait, workers};

/// Time that clients have to read their last replies when the server stops.
const PATIENCE: Duration = Duration::from_secs(1);

/// A server in this process.
#[pyclass(frozen, name = "Serving", module = "blockhaul._blockhaul")]
pub(crate) struct PythonServer {
    running: Mutex<Option<ServerThreads>>,
    /// Where it listens.
    #[pyo3(get)]
    uri: String,
    generation: Generation,
}

struct ServerThreads {
    started: ServerResources,
    /// What calls the methods of an object. Dropped after the server.
    threads: Option<Threads>,
    remote: WorkerHandle,
    unix: Option<PathBuf>,
}

/// What was started on a worker.
struct ServerResources {
    server: Arc<Server>,
    /// Keeps the device open; nothing if each client has its own.
    _stack: Option<Stack>,
    address: Option<SocketAddr>,
}

/// What to serve, and where.
struct ServerOptions {
    words: Vec<OsString>,
    /// An object instead of words.
    device: Option<Arc<dyn Device>>,
    layers: Vec<String>,
    readonly: bool,
    name: String,
    unix: Option<PathBuf>,
    tcp: Option<SocketAddr>,
}

impl ServerOptions {
    async fn start(self) -> Result<ServerResources> {
        let (exports, stack) = self.exports().await?;
        let server = Server::new(ServerConfig::new(exports));
        let cannot = |error| Error::system("cannot listen", error);
        let listener = match (&self.unix, self.tcp) {
            (Some(path), _) => Listener::bind_unix(path).map_err(cannot)?,
            (None, Some(address)) => Listener::bind_tcp(address).map_err(cannot)?,
            (None, None) => return Err(Error::new(Kind::Usage, "no socket to listen on")),
        };
        let address = listener.local_tcp();
        drop(blockhaul_io::spawn(server.clone().listen(listener)));
        Ok(ServerResources { server, _stack: stack, address })
    }

    async fn exports(&self) -> Result<(Arc<dyn Exports>, Option<Stack>)> {
        let registry = device_registry();
        let layers = self.layers.iter().map(|text| registry.layer(text));
        let mut layers = layers.collect::<Result<Vec<Arc<dyn Layer>>>>()?;
        if self.readonly {
            layers.push(registry.layer("readonly")?);
        }
        if let Some(device) = &self.device {
            let mut stack = Stack::over(device.clone());
            for layer in layers {
                stack = stack.with_layer(layer).await?;
            }
            return Ok((stack.shared(&self.name), Some(stack)));
        }
        let spec = spec(&self.words)?;
        let intent = if self.readonly { Intent::READ } else { Intent::WRITE };
        if let Some(exports) = registry.exports(&spec, &layers, intent).await? {
            return Ok((exports, None));
        }
        let stack = registry.open(&spec, layers, intent).await?;
        Ok((stack.shared(&self.name), Some(stack)))
    }
}

#[pymethods]
impl PythonServer {
    #[new]
    #[pyo3(signature = (words, *, layers=Vec::new(), readonly=false, name=String::new(), unix=None, tcp=None,
                        object=None, threads=1))]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments")]
    fn new(
        py: Python<'_>,
        words: Vec<OsString>,
        layers: Vec<String>,
        readonly: bool,
        name: String,
        unix: Option<PathBuf>,
        tcp: Option<&str>,
        object: Option<Bound<'_, PyAny>>,
        threads: usize,
    ) -> PyResult<PythonServer> {
        let tcp = tcp.map(str::parse::<SocketAddr>).transpose()?;
        let runtime = workers::runtime()?;
        let remote = workers::remote(&runtime);
        let made = object.map(|object| object::device(&object, threads)).transpose()?;
        let (device, threads) = made.unzip();
        let named = name.clone();
        let place = unix.clone();
        let wanted =
            ServerOptions { words, device, layers, readonly, name: named, unix: place, tcp };
        let started = wait::run(py, &remote, move || wanted.start());
        let started = match started.and_then(|done| done.map_err(|error| of_device(&error))) {
            Ok(started) => started,
            Err(error) => {
                py.detach(move || drop(threads));
                return Err(error);
            }
        };
        let uri = uri(&name, unix.as_deref(), started.address);
        let running = ServerThreads { started, threads, remote, unix };
        let running = Mutex::new(Some(running));
        let generation = Generation::current();
        Ok(PythonServer { running, uri, generation })
    }

    /// Number of connected clients.
    #[getter]
    fn clients(&self) -> usize {
        let running = self.running.lock().expect("no panic under this lock");
        running.as_ref().map_or(0, |running| running.started.server.open())
    }

    /// Stops: finishes requests in progress, disconnects clients, closes the device. Returns the number
    /// of requests that the device has not finished in time. Does nothing when it has stopped.
    fn stop(&self, py: Python<'_>) -> PyResult<usize> {
        self.generation.check()?;
        let running = self.running.lock().expect("no panic under this lock").take();
        let Some(ServerThreads { started, threads, remote, unix }) = running else { return Ok(0) };
        let server = started.server.clone();
        let held = wait::run(py, &remote, move || async move { server.stop(PATIENCE).await });
        py.detach(move || {
            if let Some(path) = unix {
                // It may have been removed already.
                let _ = std::fs::remove_file(path);
            }
            // Not on a worker: it may wait for a server of its own, or for methods of an object.
            drop(started);
            drop(threads);
        });
        held
    }
}

impl Drop for PythonServer {
    fn drop(&mut self) {
        let running = self.running.lock().expect("no panic under this lock").take();
        let Some(running) = running else { return };
        if !self.generation.is_current() {
            // It belongs to the parent process.
            return std::mem::forget(running);
        }
        let server = running.started.server.clone();
        drop(running.remote.spawn(move || async move { server.stop(PATIENCE).await }));
        if let Some(path) = &running.unix {
            let _ = std::fs::remove_file(path);
        }
        let _ = std::thread::Builder::new().name("closing".into()).spawn(move || drop(running));
    }
}

/// The URI of an export.
fn uri(name: &str, unix: Option<&std::path::Path>, tcp: Option<SocketAddr>) -> String {
    use blockhaul_wire::uri::{Transport, Uri};
    use std::os::unix::ffi::OsStrExt as _;
    let transport = match (unix, tcp) {
        (Some(path), _) => Transport::Unix { socket: path.as_os_str().as_bytes().to_vec() },
        (None, Some(tcp)) => Transport::Tcp { host: tcp.ip().to_string(), port: tcp.port() },
        (None, None) => return String::new(),
    };
    Uri { transport, export: name.to_string(), tls: None }.to_string()
}
