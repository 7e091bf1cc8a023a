//! A server on a machine that can lose power, with its disk.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use blockhaul_block::{Device, Facts, Kind};
use blockhaul_catalog::{Barrier, Exports, Registry, SharedDevice, Stack};
use blockhaul_io::simulation::{SimulatedMachine, choose, random};
use blockhaul_io::{Listener, Pool, WorkerHandle};
use blockhaul_server::{Limits, Offers, Server, ServerConfig, TlsPolicy};
use blockhaul_testkit::crash::CrashDevice;
use blockhaul_testkit::fault::FaultDevice;
use blockhaul_testkit::model::{CompletionOrder, Model};
use blockhaul_tls::{TlsAcceptor, TlsCredentials};

use crate::desk::{JobServer, JobServerConfig};
use crate::per_client;
use crate::witness::{FlushHook, FlushObserver};

/// Memory of a server's requests.
const MEMORY: u64 = 4 << 20;
/// The pre-shared key of server and clients.
const KEY: &str = "alice:000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f\n";
/// Time that a layer's exchange waits for requests in flight.
const SWAP: Duration = Duration::from_secs(10);
/// Time that clients have to read their last replies when a server stops.
const STOP: Duration = Duration::from_secs(5);

/// A server, its disk, and where it listens.
pub(crate) struct ServerSite {
    path: PathBuf,
    workers: usize,
    facts: Facts,
    /// Layers between the server and the disk, the first innermost.
    layers: Vec<String>,
    /// The disk while there is no power.
    image: Vec<u8>,
    /// The disk while it has power, but no process serves it: what was not flushed is not durable.
    idle: Option<Arc<CrashDevice>>,
    /// The file of keys, if the server requires TLS.
    keys: Option<PathBuf>,
    /// It has jobs and bitmaps.
    office: Option<JobServerConfig>,
    /// Each client opens the disk for itself.
    per_client: bool,
    /// Sees its flushes.
    look: FlushHook,
    up: Option<PoweredMachine>,
}

/// A machine with power.
struct PoweredMachine {
    machine: SimulatedMachine,
    disk: Arc<CrashDevice>,
    faults: Arc<FaultDevice>,
    served: DiskServer,
    /// A layer that was added while the server runs is on top.
    has_more: bool,
}

/// A server, and what it serves.
#[derive(Clone)]
struct DiskServer {
    server: Arc<Server>,
    kind: ServerKind,
    pool: Pool,
}

/// How a server keeps its device.
#[derive(Clone)]
enum ServerKind {
    /// By itself.
    Plain(Arc<SharedDevice>, Stack),
    /// For each client.
    PerClient,
    /// In a table of exports, which have jobs.
    Desk(JobServer),
}

/// What a server begins with.
struct ServerStart {
    path: PathBuf,
    device: Arc<dyn Device>,
    layers: Vec<String>,
    keys: Option<PathBuf>,
    office: Option<JobServerConfig>,
    per_client: bool,
}

impl ServerSite {
    /// A site that is off.
    pub(crate) fn new(path: PathBuf, workers: usize, facts: Facts, image: Vec<u8>) -> ServerSite {
        let layers = Vec::new();
        let look = FlushHook::default();
        ServerSite {
            path,
            workers,
            facts,
            layers,
            image,
            idle: None,
            keys: None,
            office: None,
            per_client: false,
            look,
            up: None,
        }
    }

    /// The same with these layers over its disk.
    pub(crate) fn with_layers(self, layers: Vec<String>) -> ServerSite {
        ServerSite { layers, ..self }
    }

    /// The same with a disk that each client opens for itself.
    pub(crate) fn with_device_per_client(self) -> ServerSite {
        ServerSite { per_client: true, ..self }
    }

    /// The same with TLS, which clients must use.
    pub(crate) fn with_tls(self) -> Result<ServerSite, String> {
        let keys = self.path.with_extension("keys");
        std::fs::write(&keys, KEY).map_err(|error| format!("{}: {error}", keys.display()))?;
        Ok(ServerSite { keys: Some(keys), ..self })
    }

    /// The same with jobs and bitmaps.
    pub(crate) fn with_jobs(self, office: JobServerConfig) -> ServerSite {
        ServerSite { office: Some(office), ..self }
    }

    /// Serves this device from the next start on, and not its disk.
    pub(crate) fn serve_instead(&mut self, uri: String) {
        if let Some(office) = &mut self.office {
            office.device = Some(uri);
        }
    }

    /// What sees each flush of its disk.
    pub(crate) fn look(&self) -> &FlushHook {
        &self.look
    }

    /// Its address for a client.
    pub(crate) fn uri(&self) -> String {
        self.uri_over(&self.path)
    }

    /// The same over another socket, which leads there.
    pub(crate) fn uri_over(&self, socket: &Path) -> String {
        let socket = socket.display();
        match &self.keys {
            None => format!("nbd+unix:///?socket={socket}"),
            Some(keys) => {
                format!("nbds+unix://alice@/?socket={socket}&tls-psk-file={}", keys.display())
            }
        }
    }

    /// The socket on which it listens.
    pub(crate) fn socket(&self) -> &Path {
        &self.path
    }

    /// Starts the machine and the server; `prepare` adds faults to the disk.
    pub(crate) async fn start(&mut self, prepare: impl FnOnce(&FaultDevice)) -> Result<(), String> {
        let disk = self.idle.take().unwrap_or_else(|| {
            let model = Model::with_facts(self.facts.clone()).with_content(self.image.clone());
            CrashDevice::new(model, CompletionOrder::Shuffled(random(u64::MAX)))
        });
        let faults = FaultDevice::over(disk.clone(), random(u64::MAX));
        prepare(&faults);
        let machine = SimulatedMachine::start(self.workers).map_err(|error| error.to_string())?;
        let beginning = ServerStart {
            path: self.path.clone(),
            device: FlushObserver::over(faults.clone(), self.look.clone()),
            layers: self.layers.clone(),
            keys: self.keys.clone(),
            office: self.office.clone(),
            per_client: self.per_client,
        };
        let started = machine.workers()[0].spawn(move || serve(beginning));
        let served = started.await.map_err(|_| "a server did not start")??;
        self.up = Some(PoweredMachine { machine, disk, faults, served, has_more: false });
        Ok(())
    }

    /// Stops the server in order, then ends its process.
    pub(crate) async fn stop(&mut self) -> Result<(), String> {
        self.quit().await?;
        self.lose_process().await;
        Ok(())
    }

    /// Stops the server in order.
    pub(crate) async fn quit(&self) -> Result<(), String> {
        let Some(up) = &self.up else { return Ok(()) };
        let DiskServer { server, kind, .. } = up.served.clone();
        if random(2) == 0 {
            server.drain();
            pause().await;
        }
        let stopped = up.machine.workers()[0].spawn(move || async move {
            match kind {
                ServerKind::Plain(..) | ServerKind::PerClient => server.stop(STOP).await,
                ServerKind::Desk(desk) => desk.stop(&server, STOP).await,
            }
        });
        stopped.await.map_err(|_| "a server did not stop")?;
        Ok(())
    }

    /// Uses the keys anew for later connections.
    pub(crate) fn reload(&self) -> Result<(), String> {
        if let Some(up) = &self.up {
            up.served.server.set_tls(tls(self.keys.as_deref())?);
        }
        Ok(())
    }

    /// Adds a layer under the clients of the server, or removes the one that was added.
    pub(crate) async fn change_layers(&mut self) -> Result<(), String> {
        let Some(up) = &mut self.up else { return Ok(()) };
        let ServerKind::Plain(shared, stack) = up.served.kind.clone() else { return Ok(()) };
        let has_more = up.has_more;
        let extra = has_more.then_some(self.layers.len());
        let below = shared.clone();
        let exchanged = up.machine.workers()[0].spawn(move || exchange(below, stack, extra));
        let stack = exchanged.await.map_err(|_| "a layer was not exchanged")??;
        if let Some(stack) = stack {
            (up.served.kind, up.has_more) = (ServerKind::Plain(shared, stack), !has_more);
        }
        Ok(())
    }

    /// Cuts the power: what was not flushed is lost, torn, or there.
    pub(crate) async fn lose_power(&mut self) {
        self.lose_process().await;
        if let Some(disk) = self.idle.take() {
            self.image = disk.power_cut(random(u64::MAX));
        }
    }

    /// Kills the server's process: the disk keeps everything as long as it has power.
    pub(crate) async fn lose_process(&mut self) {
        let Some(up) = self.up.take() else { return };
        // A lost machine has always been killed.
        let _ = up.machine.kill().await;
        self.idle = Some(up.disk);
    }

    /// The disk as clients see it now.
    pub(crate) fn live(&self) -> Vec<u8> {
        self.disk().map_or_else(|| self.image.clone(), |disk| disk.live())
    }

    /// The disk after a power cut in the worst case.
    pub(crate) fn durable(&self) -> Vec<u8> {
        self.disk().map_or_else(|| self.image.clone(), |disk| disk.durable())
    }

    /// The disk's faults, while it is on.
    pub(crate) fn faults(&self) -> Option<&FaultDevice> {
        self.up.as_ref().map(|up| &*up.faults)
    }

    /// The disk itself, while it has power.
    pub(crate) fn disk(&self) -> Option<&Arc<CrashDevice>> {
        self.up.as_ref().map(|up| &up.disk).or(self.idle.as_ref())
    }

    /// The server, while it is on.
    pub(crate) fn server(&self) -> Option<&Arc<Server>> {
        self.up.as_ref().map(|up| &up.served.server)
    }

    /// Its jobs, while it is on.
    pub(crate) fn desk(&self) -> Option<(WorkerHandle, JobServer)> {
        let up = self.up.as_ref()?;
        match &up.served.kind {
            ServerKind::Plain(..) | ServerKind::PerClient => None,
            ServerKind::Desk(desk) => Some((up.machine.workers()[0].clone(), desk.clone())),
        }
    }

    /// Checks, after all clients have left, that nothing of them is left.
    pub(crate) fn is_tidy(&self) -> Result<(), String> {
        let Some(up) = &self.up else { return Ok(()) };
        let DiskServer { server, pool, .. } = &up.served;
        let open = server.open();
        let reserved = pool.reserved();
        let peak = pool.peak();
        let in_flight = up.faults.in_flight();
        match (open, reserved, in_flight) {
            (0, 0, 0) if peak <= pool.limit() => Ok(()),
            _ => Err(format!(
                "all clients have left, but {open} connections, {reserved} bytes of memory and {in_flight} \
                 requests are left (at most {peak} bytes were in use)"
            )),
        }
    }
}

async fn serve(beginning: ServerStart) -> Result<DiskServer, String> {
    let ServerStart { path, device, layers, keys, office, per_client } = beginning;
    let (kind, exports) = match office {
        None if per_client => (ServerKind::PerClient, per_client::exports(device, &layers).await?),
        None => {
            let stack = layered(Stack::over(device), &layers).await?;
            let shared = SharedDevice::new("", "", stack.device().clone());
            (ServerKind::Plain(shared.clone(), stack), shared as Arc<dyn Exports>)
        }
        Some(office) => {
            let (desk, exports) = office.open(device).await?;
            (ServerKind::Desk(desk), exports)
        }
    };
    let pool = Pool::new(MEMORY);
    let limits = Limits { client_bytes: MEMORY / 2, ..Limits::default() };
    let offers = Offers::default();
    let tls = tls(keys.as_deref())?;
    let server = Server::new(ServerConfig { exports, limits, offers, pool: pool.clone(), tls });
    // Left by the process before, or not there.
    let _ = std::fs::remove_file(&path);
    let listener = Listener::bind_unix(&path).map_err(|error| error.to_string())?;
    drop(blockhaul_io::spawn(server.clone().listen(listener)));
    Ok(DiskServer { server, kind, pool })
}

fn tls(keys: Option<&Path>) -> Result<TlsPolicy, String> {
    let Some(keys) = keys else { return Ok(TlsPolicy::Off) };
    let acceptor = TlsAcceptor::new(&TlsCredentials::Keys(keys.to_path_buf()), false);
    Ok(TlsPolicy::Require(Arc::new(acceptor.map_err(|error| error.to_string())?)))
}

/// Exchanges the device of a server for one with a layer more, or without the layer of this number;
/// the new stack, or none if requests do not end in time.
async fn exchange(
    shared: Arc<SharedDevice>,
    stack: Stack,
    extra: Option<usize>,
) -> Result<Option<Stack>, String> {
    let stack = match extra {
        Some(number) => stack.without_layer(number).await.map_err(|error| error.to_string())?,
        None => layered(stack, &["extents-cache".to_string()]).await?,
    };
    let device = stack.device().clone();
    let swapped = shared.switch().swap(device, Barrier::Within(SWAP), async || Ok(()));
    match swapped.await {
        Ok(_) => Ok(Some(stack)),
        Err(error) if error.kind() == Kind::TimedOut => Ok(None),
        Err(error) => Err(format!("a layer cannot be exchanged: {error}")),
    }
}

/// The stack with these layers over it, the first innermost.
pub(crate) async fn layered(mut stack: Stack, layers: &[String]) -> Result<Stack, String> {
    let registry = Registry { layers: blockhaul_layers::all(), ..Registry::default() };
    for text in layers {
        let layer = registry.layer(text).map_err(|error| error.to_string())?;
        stack = stack.with_layer(layer).await.map_err(|error| error.to_string())?;
    }
    Ok(stack)
}

/// A pause without power.
pub(crate) async fn pause() {
    let most = if choose("long pause", 20_000) { 40_000 } else { 50 };
    blockhaul_io::sleep(Duration::from_millis(random(most))).await;
}
