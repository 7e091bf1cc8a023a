//! Plugins in Python with the real interpreter (`python3` on PATH).
#![allow(clippy::unwrap_used)]

mod behaviour;
mod conformance;
mod examples;
mod faults;
mod module;
mod processes;

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use blockhaul_block::{Device, Error, Reply, Request, Result};
use blockhaul_catalog::{DeviceSpec, ExportClient, Exports, Intent, Registry, Shutdown, Visit};
use blockhaul_io::{Data, Reservation, Runtime, RuntimeConfig, Ticket};
use blockhaul_testkit::tools::ScratchDir;

/// Time limit for what happens at once.
const SOON: Duration = Duration::from_secs(60);

/// The callbacks that every plugin needs, over a `bytearray` of 1 MiB; a test's own come behind and
/// replace them.
const DISK: &str = "
import errno, os, time
import nbdkit
API_VERSION = 2
disk = bytearray(1 << 20)
def open(readonly): return 1
def get_size(h): return len(disk)
def pread(h, buf, offset, flags): buf[:] = disk[offset:offset + len(buf)]
def pwrite(h, buf, offset, flags): disk[offset:offset + len(buf)] = buf
";

/// A plugin, open for clients.
struct Plugin {
    exports: Arc<dyn Exports>,
    /// Resolves when the plugin asks the server to stop.
    stop: Ticket<String>,
    _scratch: ScratchDir,
}

impl Plugin {
    /// Starts the plugin of [`DISK`] and `more`; `options` follow the script's name.
    async fn start(more: &str, options: &str) -> Result<Plugin> {
        Plugin::of(&format!("{DISK}{more}"), options).await
    }

    /// Starts a script.
    async fn of(script: &str, options: &str) -> Result<Plugin> {
        let scratch = ScratchDir::new().unwrap();
        let path = scratch.file("disk.py");
        std::fs::write(&path, script).unwrap();
        let (registry, stop) = registry();
        let exports = registry.exports(&spec(&path, options), &[], Intent::WRITE).await?;
        Ok(Plugin { exports: exports.unwrap(), stop, _scratch: scratch })
    }

    async fn visit(&self) -> Result<Arc<dyn Visit>> {
        self.exports.admit(ExportClient::default()).await
    }

    /// A client's device.
    async fn device(&self) -> Result<Arc<dyn Device>> {
        self.device_of("").await
    }

    async fn device_of(&self, name: &str) -> Result<Arc<dyn Device>> {
        Ok(self.visit().await?.open(name, false).await?.unwrap().device)
    }
}

fn registry() -> (Registry, Ticket<String>) {
    let (shutdown, stop) = Shutdown::channel();
    (Registry { backends: blockhaul_python::all(), shutdown, ..Registry::default() }, stop)
}

fn spec(script: &Path, options: &str) -> DeviceSpec {
    DeviceSpec::parse(format!("python:{}{options}", script.display()).as_ref()).unwrap()
}

/// Runs a test on two workers.
fn run<F: Future<Output = ()> + 'static>(test: impl FnOnce() -> F + Send + 'static) {
    let config = RuntimeConfig { workers: 2, ..RuntimeConfig::default() };
    Runtime::start(&config).unwrap().block_on(|| async {
        blockhaul_io::timeout(SOON, test()).await.expect("the test hangs");
    });
}

/// The bytes of a range.
async fn read(device: &Arc<dyn Device>, at: u64, len: usize) -> Result<Vec<u8>, Error> {
    match device.submit(Request::read(at, Reservation::unpooled(len))).await? {
        Reply::Data(data) => Ok(data.bytes().to_vec()),
        Reply::Hole => Ok(vec![0; len]),
        other => panic!("{other:?}"),
    }
}

async fn write(device: &Arc<dyn Device>, at: u64, bytes: &[u8]) -> Result<()> {
    device.submit(Request::write(at, Data::copy_of(bytes))).await.map(drop)
}
