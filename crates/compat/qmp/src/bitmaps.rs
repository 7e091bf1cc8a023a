//! Dirty bitmaps, as the monitor protocol changes them.

use std::sync::Arc;

use blockhaul_jobs::{DEFAULT_GRANULARITY, NewBitmap, OpenExport};
use blockhaul_snapshot::{BITMAPS_MAX, DirtyBitmap};
use serde_json::{Value, json};

use crate::commands::{Arguments, list, needed, number, switch};
use crate::error::{QmpError, Result};
use crate::monitor::Monitor;
use crate::nodes::{BARRIER, NodeDisk};

impl Monitor {
    /// `block-dirty-bitmap-add`.
    pub(crate) async fn add_bitmap(&self, arguments: &Arguments) -> Result<()> {
        let node = needed(arguments, "node");
        let name = needed(arguments, "name");
        let found = self.find(node).await?;
        if name.is_empty() {
            return Err(QmpError::generic("Bitmap name cannot be empty"));
        }
        let granularity = number(arguments, "granularity").unwrap_or(DEFAULT_GRANULARITY);
        if !granularity.is_power_of_two() || granularity < 512 {
            return Err(QmpError::generic("Granularity must be power of 2 and at least 512"));
        }
        let persistent = switch(arguments, "persistent", false);
        if persistent {
            self.check_storable(node, &found, name, granularity).await?;
        }
        if self.names(&found).iter().any(|other| other == name) {
            return Err(QmpError::generic(format!("Bitmap already exists: {name}")));
        }
        match &found {
            NodeDisk::Live(running) => {
                let bitmap = NewBitmap { name, granularity, kept: persistent };
                self.table.add_bitmap(running, bitmap, BARRIER).await?;
            }
            NodeDisk::Frozen(frozen) => {
                let size = self.live_below(frozen).await?.device();
                let size = size.map(|device| device.facts().size).unwrap_or_default();
                let bitmap = DirtyBitmap::new(name, size, granularity)?;
                let Some(mut own) = frozen.own_bitmaps() else {
                    return Err(QmpError::no_node(node));
                };
                if own.len() >= BITMAPS_MAX {
                    let text = format!(
                        "a node has at most {BITMAPS_MAX} bitmaps: remove one with block-dirty-bitmap-remove"
                    );
                    return Err(QmpError::generic(text));
                }
                own.push(Arc::new(bitmap));
            }
        }
        if switch(arguments, "disabled", false) {
            self.bitmap(node, name).await?.enable(false);
        }
        Ok(())
    }

    /// Refuses a persistent bitmap that neither the directory of bitmaps nor the image of the node can have.
    async fn check_storable(
        &self,
        node: &str,
        found: &NodeDisk,
        name: &str,
        granularity: u64,
    ) -> Result<()> {
        if self.table.config().bitmap_files.is_some() {
            return Ok(());
        }
        match found {
            NodeDisk::Live(running) if running.has_bitmap_store() => {
                running.check_storable(name, granularity).await.map_err(|error| {
                    let why = error.facts();
                    let text = format!("Can't make bitmap '{name}' persistent in '{node}': {why}");
                    QmpError::generic(text)
                })
            }
            _ => Err(QmpError::generic(format!("Can't store persistent bitmaps to {node}"))),
        }
    }

    /// Names of all bitmaps of a node.
    fn names(&self, found: &NodeDisk) -> Vec<String> {
        let of = |bitmaps: &[Arc<DirtyBitmap>]| -> Vec<String> {
            bitmaps.iter().map(|bitmap| bitmap.name().to_string()).collect()
        };
        match found {
            NodeDisk::Live(running) => {
                let mut names = of(&running.bitmaps());
                names.extend(running.inconsistent().iter().map(|(name, _)| name.clone()));
                names
            }
            NodeDisk::Frozen(frozen) => {
                frozen.own_bitmaps().map(|own| of(&own)).unwrap_or_default()
            }
        }
    }

    /// A bitmap of a node.
    pub(crate) async fn bitmap(&self, node: &str, name: &str) -> Result<Arc<DirtyBitmap>> {
        let found = self.find(node).await?;
        let all: Vec<Arc<DirtyBitmap>> = match &found {
            NodeDisk::Live(running) => {
                if running.inconsistent().iter().any(|(other, _)| other == name) {
                    return Err(QmpError::generic(format!(
                        "Bitmap '{name}' is inconsistent and cannot be used"
                    )));
                }
                running.bitmaps().clone()
            }
            NodeDisk::Frozen(frozen) => {
                frozen.own_bitmaps().map(|own| own.clone()).unwrap_or_default()
            }
        };
        let found = all.into_iter().find(|bitmap| bitmap.name() == name);
        found.ok_or_else(|| QmpError::no_bitmap(name))
    }

    /// The bitmap that a list names: a name, of `node`, or an object with another node.
    pub(crate) async fn bitmap_named(&self, node: &str, value: &Value) -> Result<Arc<DirtyBitmap>> {
        match value {
            Value::String(name) => self.bitmap(node, name).await,
            Value::Object(both) => self.bitmap(needed(both, "node"), needed(both, "name")).await,
            _ => Err(QmpError::generic("Invalid parameter type for 'bitmaps', expected: object")),
        }
    }

    /// A bitmap of a node, for a command that changes it: a bitmap that a job uses is refused.
    pub(crate) async fn free_bitmap(&self, node: &str, name: &str) -> Result<Arc<DirtyBitmap>> {
        let bitmap = self.bitmap(node, name).await?;
        if self.is_bitmap_used(node, name) {
            return Err(QmpError::generic(format!(
                "Bitmap '{name}' is currently in use by another operation and cannot be used"
            )));
        }
        Ok(bitmap)
    }

    fn is_bitmap_used(&self, node: &str, name: &str) -> bool {
        let state = self.state();
        let sources = state.job_nodes.iter().filter(|one| one.source == node);
        let mut users = sources.filter(|one| one.bitmap.as_deref() == Some(name));
        users.any(|one| self.active_job(&one.job).is_some())
    }

    /// `block-dirty-bitmap-remove`.
    pub(crate) async fn remove_bitmap(&self, node: &str, name: &str) -> Result<()> {
        let found = self.find(node).await?;
        if let NodeDisk::Live(running) = &found {
            let inconsistent = running.inconsistent().iter().any(|(other, _)| other == name);
            if !inconsistent {
                self.free_bitmap(node, name).await?;
            }
            return Ok(self.table.remove_bitmap(running, name).await?);
        }
        self.free_bitmap(node, name).await?;
        if let NodeDisk::Frozen(frozen) = &found
            && let Some(mut own) = frozen.own_bitmaps()
        {
            own.retain(|bitmap| bitmap.name() != name);
        }
        Ok(())
    }

    /// The target and the sources of `block-dirty-bitmap-merge`.
    pub(crate) async fn merged(
        &self,
        arguments: &Arguments,
    ) -> Result<(Arc<DirtyBitmap>, Vec<Arc<DirtyBitmap>>)> {
        let node = needed(arguments, "node");
        let target = self.free_bitmap(node, needed(arguments, "target")).await?;
        let mut from = Vec::new();
        for value in list(arguments, "bitmaps") {
            from.push(self.bitmap_named(node, value).await?);
        }
        if from.iter().any(|bitmap| bitmap.size() != target.size()) {
            return Err(QmpError::generic("Bitmaps are of different sizes and can't be merged"));
        }
        Ok((target, from))
    }

    /// The bitmaps of a disk, for the members `dirty-bitmaps`.
    pub(crate) fn described_bitmaps(&self, node: &str, running: &OpenExport) -> Vec<Value> {
        let keeps = self.table.config().bitmap_files.is_some() || running.has_bitmap_store();
        let sound = running.bitmaps().clone();
        let sound = sound.iter().map(|bitmap| {
            json!({
                "name": bitmap.name(),
                "count": bitmap.dirty_bytes(),
                "granularity": bitmap.granularity(),
                "recording": bitmap.is_enabled(),
                "busy": self.is_bitmap_used(node, bitmap.name()),
                "persistent": keeps && bitmap.is_kept(),
            })
        });
        let broken = running.inconsistent().clone();
        let broken = broken.iter().map(|(name, _)| {
            json!({
                "name": name, "count": 0, "granularity": DEFAULT_GRANULARITY, "recording": false, "busy": false,
                "persistent": true, "inconsistent": true,
            })
        });
        sound.chain(broken).collect()
    }
}
