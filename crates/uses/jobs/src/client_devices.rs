//! `--per-client`: opens the device anew for each client, in its current state.

use std::sync::Arc;

use blockhaul_block::{Can, Device, Result};
use blockhaul_catalog::{
    DeviceSpec, Export, ExportClient, Exports, Intent, Layer, ListedExport, OpenFuture, Registry,
    Visit,
};

/// A device of which each client gets a new handle.
#[derive(Clone)]
pub struct ClientDevices {
    /// The registry for opening it.
    pub registry: Registry,
    /// The device.
    pub spec: DeviceSpec,
    /// The layers over it, which all clients share.
    pub layers: Vec<Arc<dyn Layer>>,
    /// The purpose of opening it.
    pub intent: Intent,
    /// Clients may write.
    pub write: bool,
    /// Its name and description.
    pub listed: ListedExport,
    /// Whether the export is available under any name.
    pub any_name: bool,
}

impl Exports for ClientDevices {
    fn admit(&self, _client: ExportClient) -> OpenFuture<Arc<dyn Visit>> {
        let visit: Arc<dyn Visit> = Arc::new(FreshVisit(self.clone()));
        Box::pin(std::future::ready(Ok(visit)))
    }
}

impl ClientDevices {
    async fn device(self) -> Result<Arc<dyn Device>> {
        let stack = self.registry.open(&self.spec, self.layers, self.intent).await?;
        let device = stack.device().clone();
        if self.write || !device.facts().can.contains(Can::WRITE) {
            return Ok(device);
        }
        // Some backends accept writes however they were opened.
        blockhaul_transfer::readonly(&self.registry, &device)
    }
}

struct FreshVisit(ClientDevices);

impl Visit for FreshVisit {
    fn list(&self, _tls: bool) -> OpenFuture<Vec<ListedExport>> {
        Box::pin(std::future::ready(Ok(vec![self.0.listed.clone()])))
    }

    fn open(&self, name: &str, _tls: bool) -> OpenFuture<Option<Export>> {
        let ListedExport { name: own, description } = &self.0.listed;
        let known = self.0.any_name || name.is_empty() || name == own;
        if !known {
            return Box::pin(std::future::ready(Ok(None)));
        }
        let name = if self.0.any_name { name } else { own }.to_string();
        let fresh = self.0.clone();
        let description = Some(description.clone());
        Box::pin(async move {
            let device = fresh.device().await?;
            Ok(Some(Export { description, ..Export::own(&name, device) }))
        })
    }
}
