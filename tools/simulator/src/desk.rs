//! The jobs and bitmaps of a server: those of the program.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use blockhaul_block::Device;
use blockhaul_catalog::{Backend, BackendTarget, DeviceSpec, Exports, OpenFuture, OpenedDevice};
use blockhaul_jobs::{
    BitmapFiles, ExportConfig, ExportTable, ExportTableConfig, JobError, Jobs, OpenExport,
};
use blockhaul_registry::device_registry;
use blockhaul_server::Server;

/// The device that an office serves unless it has another one.
pub(crate) const OWN: &str = "simulated:";

/// What a server with jobs is started with.
#[derive(Clone)]
pub(crate) struct JobServerConfig {
    /// Where its bitmaps are kept.
    pub(crate) bitmaps: PathBuf,
    /// What it serves instead of its own disk.
    pub(crate) device: Option<String>,
}

/// A server with jobs.
#[derive(Clone)]
pub(crate) struct JobServer {
    pub(crate) table: Arc<ExportTable>,
    pub(crate) export: Arc<OpenExport>,
    pub(crate) jobs: Arc<Jobs>,
}

impl JobServerConfig {
    /// Opens the device. `own`: the disk.
    pub(crate) async fn open(
        self,
        own: Arc<dyn Device>,
    ) -> Result<(JobServer, Arc<dyn Exports>), String> {
        let device = self.device.unwrap_or_else(|| OWN.to_string());
        let spec = DeviceSpec::parse(device.as_ref()).map_err(|error| error.to_string())?;
        let mut registry = device_registry();
        registry.backends.push(Arc::new(DiskBackend(own)));
        let files = BitmapFiles::new(&self.bitmaps).map_err(|error| error.to_string())?;
        let wanted = ExportTableConfig {
            exports: vec![ExportConfig::new("", spec)],
            bitmap_files: Some(files),
            ..ExportTableConfig::new(registry)
        };
        let (table, exports) = open(wanted).await.map_err(|error| error.to_string())?;
        let export = table.exports().into_iter().next().ok_or("nothing is served")?;
        Ok((JobServer { table, export, jobs: Arc::default() }, exports))
    }
}

impl JobServer {
    /// Stops the server in order.
    pub(crate) async fn stop(&self, server: &Server, patience: Duration) -> usize {
        self.jobs.end_service(&self.table, server.stop(patience)).await
    }
}

/// Opens the exports of a server. On a worker.
async fn open(wanted: ExportTableConfig) -> Result<(Arc<ExportTable>, Arc<dyn Exports>), JobError> {
    wanted.check()?;
    let table = Arc::new(ExportTable::new(wanted));
    let exports = table.open().await?;
    Ok((table, exports))
}

/// The disk as a kind of device.
struct DiskBackend(Arc<dyn Device>);

impl Backend for DiskBackend {
    fn schemes(&self) -> &'static [&'static str] {
        &["simulated"]
    }

    fn operand(&self) -> &'static str {
        ""
    }

    fn summary(&self) -> &'static str {
        "the disk of a simulated machine"
    }

    fn open(&self, _target: BackendTarget) -> OpenFuture<OpenedDevice> {
        Box::pin(std::future::ready(Ok(OpenedDevice::from(self.0.clone()))))
    }
}
