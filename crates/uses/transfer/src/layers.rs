//! Layers by their names.

use std::sync::Arc;

use blockhaul_block::{Can, Device, Result};
use blockhaul_catalog::{AdjustableLayer, AnyKind, AnyLayer, Layer, Registry, Stack};

/// Makes the named layers, first innermost. Gates are only checked: they decide about clients, and
/// there are none here.
///
/// # Errors
/// If a name is unknown, or an option of a layer is invalid.
pub fn make_layers(registry: &Registry, names: &[String]) -> Result<Vec<Arc<dyn Layer>>> {
    let mut layers = Vec::new();
    for name in names {
        match registry.layer_or_gate(name)? {
            AnyLayer::Layer(layer) => layers.push(layer),
            AnyLayer::Gate(_) => {}
        }
    }
    Ok(layers)
}

/// The named kind of layer or gate.
///
/// # Errors
/// If the name is unknown.
pub fn layer_kind(registry: &Registry, text: &str) -> Result<AnyKind> {
    registry.kind(text.split('?').next().unwrap_or(text))
}

/// Makes the named layers and gates, which can be changed while they are in use.
///
/// # Errors
/// If a name is unknown, or an option of a layer is invalid.
pub fn adjustable_layers(
    registry: &Registry,
    names: &[String],
) -> Result<Vec<Arc<AdjustableLayer>>> {
    names.iter().map(|name| AdjustableLayer::new(registry, name).map(Arc::new)).collect()
}

/// Whether changes reach the device below a layer ([`blockhaul_catalog::LayerKind::writes_below`]);
/// yes for an unknown layer.
pub fn writes_below(registry: &Registry, text: &str) -> bool {
    layer_kind(registry, text).map_or(true, |kind| kind.writes_below())
}

/// The device behind a layer that refuses to change it, also where the device cannot be changed now: it may be
/// exchanged for one that can.
///
/// # Errors
/// If the layer cannot be put over the device.
pub fn readonly(registry: &Registry, device: &Arc<dyn Device>) -> Result<Arc<dyn Device>> {
    let layer: Arc<dyn Layer> = registry.layer("readonly")?;
    Ok(Stack::over(layer.wrap(device.clone())?).device().clone())
}

/// The layers that show existing contents ([`blockhaul_catalog::LayerKind::needs_content`]).
pub(crate) fn over_content<'a>(registry: &Registry, names: &'a [String]) -> Result<Vec<&'a str>> {
    let mut over = Vec::new();
    for text in names {
        if layer_kind(registry, text)?.needs_content() {
            over.push(text.as_str());
        }
    }
    Ok(over)
}

/// The source with its extents cached, if queries for them turn out to be slow. Files of this
/// machine are left as they are.
///
/// # Errors
/// If the layer cannot be put over the source.
pub async fn sparing_of_queries(source: Stack) -> Result<Stack> {
    let facts = source.device().facts();
    let asks = facts.can.contains(Can::EXTENTS) && !facts.emulated.contains(Can::EXTENTS);
    if !asks || !facts.files.is_empty() {
        return Ok(source);
    }
    let registry = Registry { layers: blockhaul_layers::all(), ..Registry::default() };
    source.with_layer(registry.layer(SPARING)?).await
}

/// Queries above this are slow: a copy waits for them rather than for data. The memory is for a million extents;
/// a copy needs each once, in order.
const SPARING: &str = "extents-cache?slow=20ms&memory=16M";
