//! The jobs and bitmaps of a server: those of the program.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use blockhaul_block::Device;
use blockhaul_catalog::{Backend, Exports, Opened, Opening, Spec, Target};
use blockhaul_jobs::{BitmapFiles, JobError, Jobs, One, Running, Table, WantedExports};
use blockhaul_registry::{ConnectionLimits, device_registry};
use blockhaul_server::Server;
use blockhaul_transfer::{CopyRequest, CopySetup, TransferError, TransferOptions};

/// Time without a byte after which a connection of a served device is dropped.
const SILENCE: Duration = Duration::from_secs(60);

/// The device that an office serves unless it has another one.
pub(crate) const OWN: &str = "simulated:";

/// What a server with jobs is started with.
#[derive(Clone)]
pub(crate) struct Office {
    /// Where its bitmaps are kept.
    pub(crate) bitmaps: PathBuf,
    /// What it serves instead of its own disk.
    pub(crate) device: Option<String>,
}

/// A server with jobs.
#[derive(Clone)]
pub(crate) struct Desk {
    pub(crate) table: Arc<Table>,
    pub(crate) export: Arc<Running>,
    pub(crate) jobs: Arc<Jobs>,
}

impl Office {
    /// Opens the device. `own`: the disk.
    pub(crate) async fn open(
        self,
        own: Arc<dyn Device>,
    ) -> Result<(Desk, Arc<dyn Exports>), String> {
        let device = self.device.unwrap_or_else(|| OWN.to_string());
        let spec = Spec::parse(device.as_ref()).map_err(|error| error.to_string())?;
        let limits = ConnectionLimits { timeout: SILENCE, ..ConnectionLimits::default() };
        let mut registry = device_registry(&limits, &[]);
        registry.backends.push(Arc::new(Own(own)));
        let files = BitmapFiles::new(&self.bitmaps).map_err(|error| error.to_string())?;
        let wanted = WantedExports {
            registry,
            exports: vec![One::described("", "", spec, false, Vec::new())],
            layers: Vec::new(),
            any_name: false,
            per_client: false,
            trace: false,
            bitmap_files: Some(files),
            job_files: None,
            set_up,
        };
        let (table, exports) = open(wanted).await.map_err(|error| error.to_string())?;
        let export = table.running().into_iter().next().ok_or("nothing is served")?;
        Ok((Desk { table, export, jobs: Arc::default() }, exports))
    }
}

impl Desk {
    /// Stops the server in order.
    pub(crate) async fn stop(&self, server: &Server, patience: Duration) -> usize {
        self.jobs.end_service(&self.table, server.stop(patience)).await
    }
}

/// Opens the exports of a server. On a worker.
async fn open(wanted: WantedExports) -> Result<(Arc<Table>, Arc<dyn Exports>), JobError> {
    wanted.check()?;
    let table = Arc::new(Table::new(wanted)?);
    let exports = table.open().await?;
    Ok((table, exports))
}

/// Sets up the copy of a job.
fn set_up(request: CopyRequest) -> Result<CopySetup, TransferError> {
    let TransferOptions { timeout, min_rate, .. } = request.options;
    let registry = device_registry(&ConnectionLimits { timeout, min_rate }, request.contexts());
    CopySetup::new(request, registry.for_command())
}

/// The disk as a kind of device.
struct Own(Arc<dyn Device>);

impl Backend for Own {
    fn schemes(&self) -> &'static [&'static str] {
        &["simulated"]
    }

    fn operand(&self) -> &'static str {
        ""
    }

    fn summary(&self) -> &'static str {
        "the disk of a simulated machine"
    }

    fn open(&self, _target: Target) -> Opening<Opened> {
        Box::pin(std::future::ready(Ok(Opened::from(self.0.clone()))))
    }
}
