//! `--per-client`: the device is opened anew for each client, and so is as it is then.

use std::sync::Arc;

use blockhaul_block::{Can, Device, Result};
use blockhaul_catalog::{
    Client, Export, Exports, Intent, Layer, Listed, Opening, Registry, Spec, Visit,
};

/// A device that each client gets a handle of.
#[derive(Clone)]
pub struct Fresh {
    /// What can be opened.
    pub registry: Registry,
    /// What is opened.
    pub spec: Spec,
    /// With these layers over it, which all clients share.
    pub layers: Vec<Arc<dyn Layer>>,
    /// What for.
    pub intent: Intent,
    /// Clients may write.
    pub write: bool,
    /// Its name, and what it is.
    pub listed: Listed,
    /// It is had by whatever name.
    pub any_name: bool,
}

impl Exports for Fresh {
    fn admit(&self, _client: Client) -> Opening<Arc<dyn Visit>> {
        let visit: Arc<dyn Visit> = Arc::new(FreshVisit(self.clone()));
        Box::pin(std::future::ready(Ok(visit)))
    }
}

impl Fresh {
    async fn device(self) -> Result<Arc<dyn Device>> {
        let stack = self.registry.open(&self.spec, self.layers, self.intent).await?;
        let device = stack.device().clone();
        if self.write || !device.facts().can.contains(Can::WRITE) {
            return Ok(device);
        }
        // Some backends can be written however they were opened.
        crate::devices::readonly(&self.registry, &device)
    }
}

struct FreshVisit(Fresh);

impl Visit for FreshVisit {
    fn list(&self, _tls: bool) -> Opening<Vec<Listed>> {
        Box::pin(std::future::ready(Ok(vec![self.0.listed.clone()])))
    }

    fn open(&self, name: &str, _tls: bool) -> Opening<Option<Export>> {
        let Listed { name: own, description } = &self.0.listed;
        let known = self.0.any_name || name.is_empty() || name == own;
        if !known {
            return Box::pin(std::future::ready(Ok(None)));
        }
        let name = if self.0.any_name { name } else { own }.to_string();
        let (fresh, description) = (self.0.clone(), Some(description.clone()));
        Box::pin(async move {
            let device = fresh.device().await?;
            Ok(Some(Export { description, ..Export::own(&name, device) }))
        })
    }
}
