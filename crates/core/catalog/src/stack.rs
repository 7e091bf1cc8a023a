//! Devices with their layers: assembled, opened again, and for each client.

use std::sync::Arc;

use crate::layer::{Below, Layer};
use crate::opening::{Another, Intent, Opening};
use crate::{Client, Export, Exports, Listed, Visit};
use blockhaul_block::emulate::emulate;
use blockhaul_block::{Device, Result, fence};

/// An open device, fenced, with its layers, and the way to more handles.
#[derive(Clone)]
pub struct Stack {
    pub(crate) device: Arc<dyn Device>,
    pub(crate) more: Option<Arc<dyn Another>>,
    pub(crate) layers: Vec<Arc<dyn Layer>>,
    /// What it was opened for.
    pub(crate) intent: Intent,
}

impl Stack {
    /// A stack over a device that is there already: every handle is this one.
    pub fn over(device: Arc<dyn Device>) -> Stack {
        Stack {
            device: fence(emulate(device)),
            more: None,
            layers: Vec::new(),
            intent: Intent::WRITE,
        }
    }

    /// The first handle.
    pub fn device(&self) -> &Arc<dyn Device> {
        &self.device
    }

    /// Whether further handles are connections of their own.
    pub fn has_more(&self) -> bool {
        self.more.is_some()
    }

    /// A further handle for another lane; the first one again where all lanes share it.
    pub async fn another(&self) -> Result<Arc<dyn Device>> {
        match &self.more {
            None => Ok(self.device.clone()),
            Some(more) => {
                let (device, intent) = (more.another().await?, self.intent.again());
                assemble(device, &self.more, &self.layers, None, intent).await
            }
        }
    }
}

/// The device with its layers, the first innermost, and the fence before all.
pub(crate) async fn assemble(
    device: Arc<dyn Device>,
    more: &Option<Arc<dyn Another>>,
    layers: &[Arc<dyn Layer>],
    export: Option<&str>,
    intent: Intent,
) -> Result<Arc<dyn Device>> {
    Ok(fence(emulate(pile(device, more, layers, export, intent).await?)))
}

async fn pile(
    mut device: Arc<dyn Device>,
    more: &Option<Arc<dyn Another>>,
    layers: &[Arc<dyn Layer>],
    export: Option<&str>,
    intent: Intent,
) -> Result<Arc<dyn Device>> {
    for (index, layer) in layers.iter().enumerate() {
        let reopen = more.clone().map(|more| {
            let intent = intent.again();
            Arc::new(Again { more, layers: layers[..index].to_vec(), intent }) as Arc<dyn Another>
        });
        let export = export.map(String::from);
        let below = Below { device: emulate(device), intent, reopen, export };
        device = layer.clone().open(below).await?;
    }
    Ok(device)
}

/// The way to open the lower part of a stack again.
struct Again {
    more: Arc<dyn Another>,
    layers: Vec<Arc<dyn Layer>>,
    intent: Intent,
}

impl Another for Again {
    fn another(&self) -> Opening<Arc<dyn Device>> {
        let (more, layers) = (self.more.clone(), self.layers.clone());
        let intent = self.intent;
        Box::pin(async move {
            let device = more.another().await?;
            Ok(emulate(pile(device, &Some(more), &layers, None, intent).await?))
        })
    }
}

/// Exports with layers over each device, the last one outermost; fenced.
pub(crate) struct Layered {
    pub(crate) inner: Arc<dyn Exports>,
    pub(crate) layers: Arc<[Arc<dyn Layer>]>,
    /// What the devices are opened for.
    pub(crate) intent: Intent,
}

impl Exports for Layered {
    fn admit(&self, client: Client) -> Opening<Arc<dyn Visit>> {
        let (admitted, layers) = (self.inner.admit(client), self.layers.clone());
        let intent = self.intent;
        Box::pin(async move {
            let visit = LayeredVisit { inner: admitted.await?, layers, intent };
            Ok(Arc::new(visit) as Arc<dyn Visit>)
        })
    }

    fn state(&self) -> Option<String> {
        self.inner.state()
    }
}

struct LayeredVisit {
    inner: Arc<dyn Visit>,
    layers: Arc<[Arc<dyn Layer>]>,
    intent: Intent,
}

impl Visit for LayeredVisit {
    fn list(&self, tls: bool) -> Opening<Vec<Listed>> {
        self.inner.list(tls)
    }

    fn open(&self, name: &str, tls: bool) -> Opening<Option<Export>> {
        let (opening, layers) = (self.inner.open(name, tls), self.layers.clone());
        let (name, intent) = (name.to_string(), self.intent);
        Box::pin(async move {
            let Some(mut export) = opening.await? else { return Ok(None) };
            export.device = assemble(export.device, &None, &layers, Some(&name), intent).await?;
            Ok(Some(export))
        })
    }

    fn gone(&self) {
        self.inner.gone();
    }
}
