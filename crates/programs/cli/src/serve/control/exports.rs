//! Requests about exports and their layers.

use std::ffi::{OsStr, OsString};
use std::sync::Arc;

use blockhaul_block::Can;
use blockhaul_catalog::{AdjustableLayer, DeviceSpec};
use blockhaul_control::{DeviceDescription, ExportStatus, LayerChange, LayerStatus, Refusal};
use blockhaul_jobs::{ExportConfig, OpenExport};
use serde_json::json;

use super::bitmaps::bitmaps;
use super::operations::{ControlReply, Operations};

impl Operations {
    /// Changes a setting of a layer.
    pub(super) fn set(&self, export: &str, layer: &str, name: &str, value: &str) -> ControlReply {
        let (layers, place) = self.layer(export, layer)?;
        let layer = &layers[place];
        layer.set(name, value).map_err(|error| Refusal::usage(error.text()))?;
        log::info!(layer = layer.name(); "layer {}: {name}={value}", layer.name());
        Ok(json!({ "layer": status(layer) }))
    }

    /// Opens another export.
    pub(super) async fn add_export(&self, name: &str, one: ExportConfig) -> ControlReply {
        let warnings = self.table.add(one).await?;
        log::info!(export = name; "added export {name:?}");
        Ok(json!({ "done": "added", "warnings": warnings }))
    }

    /// Removes an unused export; with `force` also one in use.
    pub(super) async fn remove_export(&self, name: &str, force: bool) -> ControlReply {
        let all = self.exports();
        let found = all.iter().find(|one| one.name == name);
        let found = found.ok_or_else(|| self.no_export(name))?;
        let clients = found.clients;
        if clients > 0 && !force {
            let are = if clients == 1 { "client uses" } else { "clients use" };
            let text =
                format!("{clients} {are} export {name:?}: disconnect them first, or use --force");
            return Err(Refusal::failed(text));
        }
        if !self.table.remove(name).await {
            return Err(self.no_export(name));
        }
        log::info!(export = name; "removed export {name:?}");
        Ok(json!({ "done": "removed", "clients": clients }))
    }

    /// Puts a layer over an export.
    pub(super) async fn add_layer(&self, change: LayerChange) -> ControlReply {
        let LayerChange { export, layer, seconds } = change;
        let found = self.export(&export)?;
        self.table.add_layer(&found, &layer, seconds.0).await?;
        log::info!(export = &*export; "added layer {layer} to export {export:?}");
        Ok(json!({ "layers": layers(&found) }))
    }

    /// Removes a layer of an export.
    pub(super) async fn remove_layer(&self, change: LayerChange) -> ControlReply {
        let LayerChange { export, layer, seconds } = change;
        let found = self.export(&export)?;
        let (_, place) = self.layer(&export, &layer)?;
        self.table.remove_layer(&found, place, seconds.0).await?;
        log::info!(export = &*export; "removed layer {layer} of export {export:?}");
        Ok(json!({ "layers": layers(&found) }))
    }

    fn no_export(&self, export: &str) -> Refusal {
        let running = self.table.exports();
        let known: Vec<_> = running.iter().map(|one| format!("{:?}", one.name)).collect();
        let known = if known.is_empty() {
            "none is served".to_string()
        } else {
            format!("known are {}", known.join(", "))
        };
        Refusal::absent(format!("there is no export {export:?}; {known}"))
    }

    pub(super) fn export(&self, name: &str) -> Result<Arc<OpenExport>, Refusal> {
        self.table.find(name).ok_or_else(|| self.no_export(name))
    }

    /// The layers of an export, and which of them has this name; `NAME:N` selects the nth of that
    /// name, counted from the storage.
    fn layer(
        &self,
        export: &str,
        layer: &str,
    ) -> Result<(Vec<Arc<AdjustableLayer>>, usize), Refusal> {
        let layers = self.export(export)?.layers();
        let (name, place) = match layer.split_once(':') {
            Some((name, place)) => (name, place.parse::<usize>().ok()),
            None => (layer, None),
        };
        let named: Vec<_> = (0..layers.len()).filter(|&at| layers[at].name() == name).collect();
        match (&named[..], place) {
            (&[only], None) => Ok((layers, only)),
            (all, Some(place)) if (1..=all.len()).contains(&place) => Ok((layers, all[place - 1])),
            ([], _) => {
                let known: Vec<_> = layers.iter().map(|one| one.name()).collect();
                let known = if known.is_empty() {
                    "it has none".to_string()
                } else {
                    format!("known are {}", known.join(", "))
                };
                let text = format!("export {export:?} has no layer {name:?}; {known}");
                Err(Refusal::absent(text))
            }
            (all, _) => {
                let known: Vec<_> =
                    (1..=all.len()).map(|place| format!("{name}:{place}")).collect();
                let text = format!(
                    "export {export:?} has no layer {layer:?} alone; known are {}",
                    known.join(", ")
                );
                Err(Refusal::absent(text))
            }
        }
    }

    /// The exports.
    pub fn exports(&self) -> Vec<ExportStatus> {
        let sums = self.server.sums().exports;
        let running = self.table.exports();
        let only = running.len() == 1;
        running
            .iter()
            .map(|one| {
                let below = |name: &str| {
                    let rest = name.strip_prefix(one.name.as_str());
                    rest.is_some_and(|rest| one.name.is_empty() || rest.starts_with('/'))
                };
                let its = |name: &String| {
                    only || *name == one.name || (!one.is_one_device() && below(name))
                };
                let clients: u64 =
                    sums.iter().filter(|(name, _)| its(name)).map(|(_, sum)| sum.clients).sum();
                let facts = one.device().map(|device| device.facts());
                ExportStatus {
                    name: one.name.clone(),
                    description: one.description.clone(),
                    device: one.storage(),
                    size: facts.as_ref().map(|facts| facts.size),
                    served: one.served,
                    readonly: facts.as_ref().map(|facts| !facts.can.contains(Can::WRITE)),
                    clients,
                    state: one.state(),
                    bitmaps: bitmaps(one),
                    layers: layers(one),
                }
            })
            .collect()
    }
}

/// An export in the form of a request.
pub(super) fn described(
    name: &str,
    device: DeviceDescription,
    description: &str,
    readonly: bool,
    layers: Vec<String>,
) -> Result<ExportConfig, Refusal> {
    let spec = spec("export-add: \"device\"", device)?;
    Ok(ExportConfig::described(name, description, spec, readonly, layers))
}

/// The device that a member describes; `member` begins messages.
pub(super) fn spec(member: &str, device: DeviceDescription) -> Result<DeviceSpec, Refusal> {
    let wrong = |what| Refusal::usage(format!("{member} {what}"));
    match device {
        DeviceDescription::Command(words) if words.is_empty() => Err(wrong("is an empty list")),
        DeviceDescription::Command(words) => {
            Ok(DeviceSpec::Command(words.into_iter().map(OsString::from).collect()))
        }
        DeviceDescription::Text(text) => match DeviceSpec::parse(OsStr::new(&text)) {
            Err(error) => Err(Refusal::usage(error.text())),
            Ok(DeviceSpec::Pipe) => Err(wrong("cannot be the standard output of the server")),
            Ok(spec) => Ok(spec),
        },
    }
}

fn layers(export: &OpenExport) -> Vec<LayerStatus> {
    export.layers().iter().map(|layer| status(layer)).collect()
}

fn status(layer: &AdjustableLayer) -> LayerStatus {
    LayerStatus {
        name: layer.name().to_string(),
        options: layer.values().into_iter().collect(),
        changeable: layer.changeable().iter().map(ToString::to_string).collect(),
    }
}
