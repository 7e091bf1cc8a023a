//! A server on a machine that can lose power, with its disk.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use blockhaul_block::Facts;
use blockhaul_catalog::{Registry, Shared, Stack};
use blockhaul_io::simulation::{Machine, choose, random};
use blockhaul_io::{Listener, Pool};
use blockhaul_server::{Config, Limits, Offers, Server, Tls};
use blockhaul_testkit::crash::CrashDevice;
use blockhaul_testkit::fault::FaultDevice;
use blockhaul_testkit::model::{Completion, Model};

/// Memory of a server's requests.
const MEMORY: u64 = 4 << 20;

/// A server, its disk, and where it listens.
pub(crate) struct Site {
    path: PathBuf,
    workers: usize,
    facts: Facts,
    /// Layers between the server and the disk, the first innermost.
    layers: Vec<String>,
    /// The disk while there is no power.
    image: Vec<u8>,
    up: Option<Up>,
}

/// A machine with power.
struct Up {
    machine: Machine,
    disk: Arc<CrashDevice>,
    faults: Arc<FaultDevice>,
    server: Arc<Server>,
    pool: Pool,
}

impl Site {
    /// A site that is off.
    pub(crate) fn new(path: PathBuf, workers: usize, facts: Facts, image: Vec<u8>) -> Site {
        Site { path, workers, facts, layers: Vec::new(), image, up: None }
    }

    /// The same with these layers over its disk.
    pub(crate) fn with_layers(self, layers: Vec<String>) -> Site {
        Site { layers, ..self }
    }

    /// Its address for a client.
    pub(crate) fn uri(&self) -> String {
        format!("nbd+unix:///?socket={}", self.path.display())
    }

    /// Starts the machine and the server; `prepare` adds faults to the disk.
    pub(crate) async fn start(&mut self, prepare: impl FnOnce(&FaultDevice)) -> Result<(), String> {
        let model = Model::with_facts(self.facts.clone()).with_content(self.image.clone());
        let disk = CrashDevice::new(model, Completion::Shuffled(random(u64::MAX)));
        let faults = FaultDevice::over(disk.clone(), random(u64::MAX));
        prepare(&faults);
        let machine = Machine::start(self.workers).map_err(|error| error.to_string())?;
        let (path, device, layers) = (self.path.clone(), faults.clone(), self.layers.clone());
        let started = machine.workers()[0].spawn(move || serve(path, device, layers));
        let (server, pool) = started.await.map_err(|_| "a server did not start")??;
        self.up = Some(Up { machine, disk, faults, server, pool });
        Ok(())
    }

    /// Cuts the power: what was not flushed is lost, torn, or there.
    pub(crate) async fn lose_power(&mut self) {
        let Some(up) = self.up.take() else { return };
        // A lost machine has always been killed.
        let _ = up.machine.kill().await;
        self.image = up.disk.power_cut(random(u64::MAX));
    }

    /// Kills the server's process: the disk keeps everything.
    pub(crate) async fn lose_process(&mut self) {
        let Some(up) = self.up.take() else { return };
        // As above.
        let _ = up.machine.kill().await;
        self.image = up.disk.live();
    }

    /// The disk as clients see it now.
    pub(crate) fn live(&self) -> Vec<u8> {
        self.up.as_ref().map_or_else(|| self.image.clone(), |up| up.disk.live())
    }

    /// The disk after a power cut in the worst case.
    pub(crate) fn durable(&self) -> Vec<u8> {
        self.up.as_ref().map_or_else(|| self.image.clone(), |up| up.disk.durable())
    }

    /// The disk's faults, while it is on.
    pub(crate) fn faults(&self) -> Option<&FaultDevice> {
        self.up.as_ref().map(|up| &*up.faults)
    }

    /// The disk itself, while it is on.
    pub(crate) fn disk(&self) -> Option<&Arc<CrashDevice>> {
        self.up.as_ref().map(|up| &up.disk)
    }

    /// The server, while it is on.
    pub(crate) fn server(&self) -> Option<&Arc<Server>> {
        self.up.as_ref().map(|up| &up.server)
    }

    /// Checks, after all clients have left, that nothing of them is left.
    pub(crate) fn is_tidy(&self) -> Result<(), String> {
        let Some(up) = &self.up else { return Ok(()) };
        let (open, reserved, peak) = (up.server.open(), up.pool.reserved(), up.pool.peak());
        let in_flight = up.faults.in_flight();
        match (open, reserved, in_flight) {
            (0, 0, 0) if peak <= up.pool.limit() => Ok(()),
            _ => Err(format!(
                "all clients have left, but {open} connections, {reserved} bytes of memory and {in_flight} \
                 requests are left (at most {peak} bytes were in use)"
            )),
        }
    }
}

async fn serve(
    path: PathBuf,
    device: Arc<FaultDevice>,
    layers: Vec<String>,
) -> Result<(Arc<Server>, Pool), String> {
    let stack = layered(Stack::over(device), &layers).await?;
    let exports = Shared::new("", "", stack.device().clone());
    let pool = Pool::new(MEMORY);
    let limits = Limits { client_bytes: MEMORY / 2, ..Limits::default() };
    let (offers, tls) = (Offers::default(), Tls::Off);
    let server = Server::new(Config { exports, limits, offers, pool: pool.clone(), tls });
    // Left by the process before, or not there.
    let _ = std::fs::remove_file(&path);
    let listener = Listener::bind_unix(&path).map_err(|error| error.to_string())?;
    drop(blockhaul_io::spawn(server.clone().listen(listener)));
    Ok((server, pool))
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
