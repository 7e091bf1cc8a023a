//! `--per-client`: the device is opened anew for each client, and so is as it is then.

use std::sync::Arc;

use blockhaul_block::{Device, Error, Kind};
use blockhaul_catalog::{Client, Exports, Intent, Layer, Listed, Opening, Registry, Spec, Visit};

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

struct FreshVisit(Fresh);

impl Visit for FreshVisit {
    fn list(&self, _tls: bool) -> Opening<Vec<Listed>> {
        Box::pin(std::future::ready(Ok(vec![self.0.listed.clone()])))
    }

    fn open(&self, name: &str, _tls: bool) -> Opening<Arc<dyn Device>> {
        let known = self.0.any_name || name.is_empty() || name == self.0.listed.name;
        let fresh = self.0.clone();
        Box::pin(async move {
            if !known {
                return Err(Error::new(Kind::NotFound, "there is no export of this name"));
            }
            let stack = fresh.registry.open(&fresh.spec, fresh.layers, fresh.intent).await?;
            let device = stack.device().clone();
            if fresh.write || !device.facts().can.contains(blockhaul_block::Can::WRITE) {
                return Ok(device);
            }
            // Some backends can be written however they were opened.
            crate::devices::readonly(&fresh.registry, &device)
        })
    }
}
