//! Points in time of disks: nodes of `copy-before-write` and `snapshot-access`.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use blockhaul_block::{Device, fence};
use blockhaul_jobs::{FrozenBitmap, OpenExport, SnapshotConfig};
use blockhaul_snapshot::{DirtyBitmap, OnFailure, PointOptions, Snapshot, ViewTrim};
use serde_json::Value;

use crate::commands::{Arguments, needed, number, text};
use crate::error::{QmpError, Result};
use crate::monitor::Monitor;
use crate::nodes::{BARRIER, NodeDisk, file_of};
use crate::state::{Node, NodeContents};

/// Maximum number of nodes from a point in time down to its disk.
const DEPTH_MAX: usize = 8;

impl Monitor {
    pub(crate) async fn add_before_write(&self, name: &str, options: &Arguments) -> Result<()> {
        let file = name_of(options, "file")?;
        let target = name_of(options, "target")?;
        let NodeDisk::Live(running) = self.find(&file).await? else {
            return Err(QmpError::generic(format!("Node '{file}' does not change")));
        };
        let Some(target_node) = self.node(&target) else { return Err(QmpError::no_node(&target)) };
        let mut begin = begin_of(options)?;
        begin.options.directory = file_of(&target_node).and_then(Path::parent).map(PathBuf::from);
        if let Some(bitmap) = options.get("bitmap").and_then(Value::as_object) {
            let node = needed(bitmap, "node");
            let bitmap = needed(bitmap, "name");
            // What is not in it could be left out of the point in time; all of it is shown.
            self.bitmap(node, bitmap).await?;
        }
        let node = Node {
            name: name.to_string(),
            driver: "copy-before-write".to_string(),
            filename: running.storage(),
            read_only: false,
            children: vec![target],
            contents: NodeContents::BeforeWrite {
                disk: self.node_of(&running),
                begin: Box::new(begin),
                snapshot: Mutex::default(),
            },
        };
        self.state().nodes.push(Arc::new(node));
        Ok(())
    }

    pub(crate) async fn add_access(&self, name: &str, options: &Arguments) -> Result<()> {
        let before_write = name_of(options, "file")?;
        let below = self.node(&before_write).ok_or_else(|| QmpError::no_node(&before_write))?;
        if !matches!(below.contents, NodeContents::BeforeWrite { .. }) {
            let text = format!("Node '{before_write}' is not of driver copy-before-write");
            return Err(QmpError::generic(text));
        }
        let node = Node {
            name: name.to_string(),
            driver: "snapshot-access".to_string(),
            filename: below.filename.clone(),
            read_only: true,
            children: vec![before_write.clone()],
            contents: NodeContents::Access { before_write, bitmaps: Mutex::default() },
        };
        self.state().nodes.push(Arc::new(node));
        Ok(())
    }

    /// The point in time of a `copy-before-write` node, which begins at the first call.
    pub(crate) async fn snapshot_of(&self, node: &Node) -> Result<Snapshot> {
        let NodeContents::BeforeWrite { disk, begin, snapshot } = &node.contents else {
            return Err(QmpError::generic(format!("Node '{}' keeps no point in time", node.name)));
        };
        let held = snapshot.lock().expect("no panic under this lock").clone();
        if let Some(snapshot) = held {
            return Ok(snapshot);
        }
        let NodeDisk::Live(running) = self.find(disk).await? else {
            return Err(QmpError::no_node(disk));
        };
        let started = self.table.begin_snapshot(&running, begin).await?;
        started.frozen.iter().for_each(FrozenBitmap::settle);
        *snapshot.lock().expect("no panic under this lock") = Some(started.snapshot.clone());
        Ok(started.snapshot)
    }

    /// The point in time that a `snapshot-access` node shows, if it is one of the disk of `disk`.
    pub(crate) async fn snapshot_over(&self, name: &str, disk: &str) -> Result<Option<Snapshot>> {
        let Some(node) = self.node(name) else { return Ok(None) };
        let NodeContents::Access { before_write, .. } = &node.contents else { return Ok(None) };
        let below = self.node(before_write).ok_or_else(|| QmpError::no_node(before_write))?;
        match &below.contents {
            NodeContents::BeforeWrite { disk: own, .. } if own == disk => {
                self.snapshot_of(&below).await.map(Some)
            }
            _ => Ok(None),
        }
    }

    /// The device that a `snapshot-access` node shows, with these bitmaps.
    pub(crate) async fn view(
        &self,
        node: &Node,
        bitmaps: Vec<Arc<DirtyBitmap>>,
    ) -> Result<Arc<dyn Device>> {
        let NodeContents::Access { before_write, .. } = &node.contents else {
            return Err(QmpError::no_node(&node.name));
        };
        let below = self.node(before_write).ok_or_else(|| QmpError::no_node(before_write))?;
        let snapshot = self.snapshot_of(&below).await?;
        let view = snapshot.view(bitmaps, ViewTrim::Releases);
        view.map(fence).ok_or_else(|| QmpError::generic("the point in time has not begun"))
    }

    /// The disk in use that a point in time shows.
    pub(crate) async fn live_below(&self, node: &Node) -> Result<Arc<OpenExport>> {
        let mut name = node.name.clone();
        for _ in 0..DEPTH_MAX {
            let Some(node) = self.node(&name) else { break };
            name = match &node.contents {
                NodeContents::Access { before_write, .. } => before_write.clone(),
                NodeContents::BeforeWrite { disk, .. } => disk.clone(),
                NodeContents::Disk { .. } => break,
            };
        }
        match self.running(&name) {
            Some(running) => Ok(running),
            None => Err(QmpError::no_node(&name)),
        }
    }
}

/// How a `copy-before-write` node keeps old contents.
fn begin_of(options: &Arguments) -> Result<SnapshotConfig> {
    let mut kept = PointOptions {
        // Without a time limit writes wait for the file system, as in QEMU.
        guest_timeout: Duration::from_secs(number(options, "cbw-timeout").unwrap_or(0)),
        on_failure: on_failure(text(options, "on-cbw-error")),
        ..PointOptions::default()
    };
    if let Some(size) = number(options, "min-cluster-size") {
        kept.block = size.max(kept.block);
    }
    Ok(SnapshotConfig {
        options: kept,
        bitmap: None,
        clears: false,
        start: None,
        trim: ViewTrim::Releases,
        within: BARRIER,
    })
}

/// The option `on-cbw-error`, with QEMU's default.
pub fn on_failure(given: Option<&str>) -> OnFailure {
    match given {
        Some("break-snapshot") => OnFailure::BreakSnapshot,
        _ => OnFailure::FailWrite,
    }
}

impl Node {
    /// The bitmaps of a point in time.
    pub fn own_bitmaps(&self) -> Option<MutexGuard<'_, Vec<Arc<DirtyBitmap>>>> {
        match &self.contents {
            NodeContents::Access { bitmaps, .. } => {
                Some(bitmaps.lock().expect("no panic under this lock"))
            }
            _ => None,
        }
    }
}

/// The name of the node that these options give for `role`.
fn name_of(options: &Arguments, role: &str) -> Result<String> {
    let found = options.get(role).and_then(Value::as_str);
    found.map(str::to_string).ok_or_else(|| {
        QmpError::generic(format!("Parameter '{role}' must be the name of a node here"))
    })
}
