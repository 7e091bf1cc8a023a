//! A disk that each client opens for itself, as the devices of plugins are.

use std::future::ready;
use std::sync::Arc;

use blockhaul_block::Device;
use blockhaul_catalog::{
    Backend, BackendTarget, DeviceSpec, Export, ExportClient, Exports, Intent, ListedExport,
    OpenFuture, OpenedDevice, Registry, Visit,
};

/// The exports of such a disk, with these layers over each of its devices, the first innermost.
pub(crate) async fn exports(
    disk: Arc<dyn Device>,
    layers: &[String],
) -> Result<Arc<dyn Exports>, String> {
    let backends: Vec<Arc<dyn Backend>> = vec![Arc::new(PerClient(disk))];
    let registry = Registry { backends, layers: blockhaul_layers::all(), ..Registry::default() };
    let layers = layers.iter().map(|layer| registry.layer(layer)).collect::<Result<Vec<_>, _>>();
    let layers = layers.map_err(|error| error.to_string())?;
    let spec = DeviceSpec::parse("per-client:".as_ref()).map_err(|error| error.to_string())?;
    let exports = registry.exports(&spec, &layers, Intent::WRITE).await;
    exports.map_err(|error| error.to_string())?.ok_or_else(|| "it is not per client".to_string())
}

#[derive(Clone)]
struct PerClient(Arc<dyn Device>);

impl Backend for PerClient {
    fn schemes(&self) -> &'static [&'static str] {
        &["per-client"]
    }

    fn operand(&self) -> &'static str {
        ""
    }

    fn summary(&self) -> &'static str {
        "the disk of a simulated machine, opened for each client"
    }

    fn open(&self, _target: BackendTarget) -> OpenFuture<OpenedDevice> {
        Box::pin(ready(Ok(OpenedDevice::from(self.0.clone()))))
    }

    fn exports(&self, _target: &BackendTarget) -> Option<OpenFuture<Arc<dyn Exports>>> {
        Some(Box::pin(ready(Ok(Arc::new(self.clone()) as Arc<dyn Exports>))))
    }
}

impl Exports for PerClient {
    fn admit(&self, _client: ExportClient) -> OpenFuture<Arc<dyn Visit>> {
        Box::pin(ready(Ok(Arc::new(self.clone()) as Arc<dyn Visit>)))
    }
}

impl Visit for PerClient {
    fn list(&self, _tls: bool) -> OpenFuture<Vec<ListedExport>> {
        Box::pin(ready(Ok(Vec::new())))
    }

    fn open(&self, name: &str, _tls: bool) -> OpenFuture<Option<Export>> {
        Box::pin(ready(Ok(Some(Export::own(name, self.0.clone())))))
    }
}
