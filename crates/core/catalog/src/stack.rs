//! Devices with their layers: assembled, reopened, and for each client.

use std::sync::Arc;

use crate::layer::{Layer, LayerBase};
use crate::opening::{HandleOpener, Intent, OpenFuture, OpenedDevice};
use crate::{Export, ExportClient, Exports, ListedExport, SharedDevice, StorageFigure, Visit};
use blockhaul_block::emulate::emulate;
use blockhaul_block::{Device, Result, fence};

/// An open device, fenced, with its layers; it can open more handles.
#[derive(Clone)]
pub struct Stack {
    pub(crate) device: Arc<dyn Device>,
    /// The storage, then the device of each layer.
    levels: Vec<Arc<dyn Device>>,
    pub(crate) more: Option<Arc<dyn HandleOpener>>,
    pub(crate) layers: Vec<Arc<dyn Layer>>,
    /// The purpose for which it was opened.
    pub(crate) intent: Intent,
}

impl Stack {
    /// Puts layers over an open device, the first innermost.
    pub(crate) async fn new(
        opened: OpenedDevice,
        layers: Vec<Arc<dyn Layer>>,
        intent: Intent,
    ) -> Result<Stack> {
        let OpenedDevice { device, more } = opened;
        let stack = Stack { more, intent, ..Stack::over(device) };
        stack.rebuilt(layers, 0).await
    }
    /// A stack over an existing device: every handle is this one.
    pub fn over(device: Arc<dyn Device>) -> Stack {
        Stack {
            device: fence(emulate(device.clone())),
            levels: vec![device],
            more: None,
            layers: Vec::new(),
            intent: Intent::WRITE,
        }
    }

    /// The first handle.
    pub fn device(&self) -> &Arc<dyn Device> {
        &self.device
    }

    /// The device as an export that all clients share. The empty name selects it, too.
    pub fn shared(&self, name: &str) -> Arc<SharedDevice> {
        SharedDevice::new(name, "", self.device.clone())
    }

    /// The same storage with one more layer, outermost. The levels below are those of this stack.
    ///
    /// # Errors
    /// If the layer cannot be put over the device.
    pub async fn with_layer(&self, layer: Arc<dyn Layer>) -> Result<Stack> {
        let mut layers = self.layers.clone();
        layers.push(layer);
        self.rebuilt(layers, self.layers.len()).await
    }

    /// The same storage without layer `number`, from 0, the innermost. The layers over it are put
    /// over the device below it; they keep their state.
    ///
    /// # Errors
    /// If one of those cannot be put over that device.
    ///
    /// # Panics
    /// If there is no such layer.
    pub async fn without_layer(&self, number: usize) -> Result<Stack> {
        let mut layers = self.layers.clone();
        layers.remove(number);
        self.rebuilt(layers, number).await
    }

    /// This storage with layers of which the first `kept` are those of this stack.
    async fn rebuilt(&self, layers: Vec<Arc<dyn Layer>>, kept: usize) -> Result<Stack> {
        let mut levels = self.levels[..=kept].to_vec();
        let over = LayersOver { layers: &layers, ..self.layers_over(self.intent) };
        let new = over.levels_from(kept, levels[kept].clone()).await?;
        levels.extend(new);
        let top = levels[layers.len()].clone();
        let more = self.more.clone();
        let intent = self.intent;
        Ok(Stack { device: fence(emulate(top)), levels, more, layers, intent })
    }

    fn layers_over(&self, intent: Intent) -> LayersOver<'_> {
        LayersOver { more: self.more.as_ref(), layers: &self.layers, export: None, intent }
    }

    /// Number of layers.
    pub fn layer_count(&self) -> usize {
        self.layers.len()
    }

    /// Whether further handles are separate connections.
    pub fn has_more(&self) -> bool {
        self.more.is_some()
    }

    /// A further handle for another lane; the first one again if all lanes share it.
    ///
    /// # Errors
    /// If the storage cannot be opened again, or a layer cannot be put over the device.
    pub async fn another(&self) -> Result<Arc<dyn Device>> {
        match &self.more {
            None => Ok(self.device.clone()),
            Some(more) => {
                let device = more.another().await?;
                self.layers_over(self.intent.again()).fenced(device).await
            }
        }
    }
}

/// Layers to be put over a device.
#[derive(Clone, Copy)]
struct LayersOver<'a> {
    /// Opens the device again, if further handles are separate connections.
    more: Option<&'a Arc<dyn HandleOpener>>,
    /// The first is the innermost.
    layers: &'a [Arc<dyn Layer>],
    /// The export that the device is, by its name.
    export: Option<&'a str>,
    intent: Intent,
}

impl LayersOver<'_> {
    /// The device with all layers, behind the fence.
    async fn fenced(self, device: Arc<dyn Device>) -> Result<Arc<dyn Device>> {
        Ok(fence(self.emulated(device).await?))
    }

    /// The device with all layers and the emulation.
    async fn emulated(self, device: Arc<dyn Device>) -> Result<Arc<dyn Device>> {
        let levels = self.levels_from(0, device.clone()).await?;
        Ok(emulate(levels.into_iter().next_back().unwrap_or(device)))
    }

    /// The devices of the layers from `first` on, over the device of those before.
    async fn levels_from(
        self,
        first: usize,
        mut device: Arc<dyn Device>,
    ) -> Result<Vec<Arc<dyn Device>>> {
        let LayersOver { more, layers, export, intent } = self;
        let mut levels = Vec::with_capacity(layers.len() - first);
        for (index, layer) in layers.iter().enumerate().skip(first) {
            let reopen = more.cloned().map(|more| {
                let intent = intent.again();
                let layers = layers[..index].to_vec();
                Arc::new(StackOpener { more, layers, intent }) as Arc<dyn HandleOpener>
            });
            let export = export.map(String::from);
            let below = LayerBase { device: emulate(device), intent, reopen, export };
            device = layer.clone().open(below).await?;
            levels.push(device.clone());
        }
        Ok(levels)
    }
}

/// Opens the lower part of a stack again.
struct StackOpener {
    more: Arc<dyn HandleOpener>,
    layers: Vec<Arc<dyn Layer>>,
    intent: Intent,
}

impl HandleOpener for StackOpener {
    fn another(&self) -> OpenFuture<Arc<dyn Device>> {
        let more = self.more.clone();
        let layers = self.layers.clone();
        let intent = self.intent;
        Box::pin(async move {
            let device = more.another().await?;
            let over = LayersOver { more: Some(&more), layers: &layers, export: None, intent };
            over.emulated(device).await
        })
    }
}

/// Exports with layers over each device, the last one outermost; fenced.
pub(crate) struct LayeredExports {
    pub(crate) inner: Arc<dyn Exports>,
    pub(crate) layers: Arc<[Arc<dyn Layer>]>,
    /// The purpose for which the devices are opened.
    pub(crate) intent: Intent,
}

impl Exports for LayeredExports {
    fn admit(&self, client: ExportClient) -> OpenFuture<Arc<dyn Visit>> {
        let admitted = self.inner.admit(client);
        let layers = self.layers.clone();
        let intent = self.intent;
        Box::pin(async move {
            let visit = LayeredVisit { inner: admitted.await?, layers, intent };
            Ok(Arc::new(visit) as Arc<dyn Visit>)
        })
    }

    fn state(&self) -> Option<String> {
        self.inner.state()
    }

    fn figures(&self) -> Vec<StorageFigure> {
        self.inner.figures()
    }
}

struct LayeredVisit {
    inner: Arc<dyn Visit>,
    layers: Arc<[Arc<dyn Layer>]>,
    intent: Intent,
}

impl Visit for LayeredVisit {
    fn list(&self, tls: bool) -> OpenFuture<Vec<ListedExport>> {
        self.inner.list(tls)
    }

    fn open(&self, name: &str, tls: bool) -> OpenFuture<Option<Export>> {
        let opening = self.inner.open(name, tls);
        let layers = self.layers.clone();
        let name = name.to_string();
        let intent = self.intent;
        Box::pin(async move {
            let Some(mut export) = opening.await? else { return Ok(None) };
            let export_name = Some(name.as_str());
            let over = LayersOver { more: None, layers: &layers, export: export_name, intent };
            export.device = over.fenced(export.device).await?;
            Ok(Some(export))
        })
    }

    fn gone(&self) {
        self.inner.gone();
    }

    fn unreachable(&self) {
        self.inner.unreachable();
    }
}
