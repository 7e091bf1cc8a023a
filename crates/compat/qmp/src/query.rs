//! Queries of the monitor protocol about the program and its nodes.

use blockhaul_block::Can;
use blockhaul_jobs::OpenExport;
use serde_json::{Value, json};

use crate::exports::GuestDevice;
use crate::monitor::Monitor;
use crate::state::{Node, NodeContents};

/// The version of QEMU whose commands are offered, which clients compare.
const VERSION: [u32; 3] = [10, 0, 13];

/// The version, for the greeting and `query-version`.
pub fn version() -> Value {
    let [major, minor, micro] = VERSION;
    json!({
        "qemu": { "major": major, "minor": minor, "micro": micro },
        "package": concat!("blockhaul ", env!("CARGO_PKG_VERSION")),
    })
}

/// The greeting, which a client reads first.
pub fn greeting() -> Value {
    json!({ "QMP": { "version": version(), "capabilities": [] } })
}

impl Monitor {
    /// `query-named-block-nodes`: the disks, then what was added besides.
    pub(crate) fn described_nodes(&self) -> Value {
        let mut all = Vec::new();
        for running in self.table.exports() {
            if running.shared.is_some() && running.snapshot_of.is_none() {
                all.push(self.described_disk(&running));
            }
        }
        let nodes = self.state().nodes.clone();
        for node in nodes {
            if self.running(&node.name).is_none() {
                all.push(self.described_node(&node));
            }
        }
        Value::Array(all)
    }

    /// A disk that is open.
    fn described_disk(&self, running: &OpenExport) -> Value {
        let name = self.node_of(running);
        let node = self.node(&name);
        let facts = running.device().map(|device| device.facts());
        let size = facts.as_ref().map_or(0, |facts| facts.size);
        let read_only = facts.as_ref().is_none_or(|facts| !facts.can.contains(Can::WRITE));
        let storage = running.storage();
        let (driver, filename) = match &node {
            Some(node) => (node.driver.clone(), node.filename.clone()),
            None => driver_of(&storage),
        };
        let mut described = common(&name, &driver, &filename, size, read_only);
        let bitmaps = self.described_bitmaps(&name, running);
        if !bitmaps.is_empty() {
            described["dirty-bitmaps"] = Value::Array(bitmaps);
        }
        described
    }

    /// A node without an open disk of its own.
    fn described_node(&self, node: &Node) -> Value {
        let below = match &node.contents {
            NodeContents::BeforeWrite { disk, .. } => self.running(disk),
            NodeContents::Access { before_write, .. } => match self.node(before_write).as_deref() {
                Some(Node { contents: NodeContents::BeforeWrite { disk, .. }, .. }) => {
                    self.running(disk)
                }
                _ => None,
            },
            NodeContents::Disk { .. } => {
                self.parent(&node.name).and_then(|parent| self.running(&parent))
            }
        };
        let size = below.and_then(|running| running.device());
        let size = size.map_or(0, |device| device.facts().size);
        let mut described = common(&node.name, &node.driver, &node.filename, size, node.read_only);
        if let Some(own) = node.own_bitmaps() {
            let own = own.iter().map(|bitmap| {
                json!({
                    "name": bitmap.name(), "count": bitmap.dirty_bytes(),
                    "granularity": bitmap.granularity(), "recording": bitmap.is_enabled(),
                    "busy": false, "persistent": false,
                })
            });
            described["dirty-bitmaps"] = own.collect();
        }
        described
    }

    /// `query-block`: what guests write to, that is, the exports.
    pub(crate) fn described_devices(&self) -> Value {
        let described = |device: GuestDevice| {
            let running = self.running(&device.node)?;
            Some(json!({
                "device": device.id,
                "qdev": device.path,
                "type": "unknown",
                "locked": false,
                "removable": false,
                "inserted": self.described_disk(&running),
            }))
        };
        self.devices().into_iter().filter_map(described).collect()
    }
}

/// The driver and the file name of a device of the command line.
fn driver_of(storage: &str) -> (String, String) {
    match storage.strip_prefix("qcow2:") {
        Some(below) => {
            let path = below.split('?').next().unwrap_or(below);
            ("qcow2".to_string(), path.replace("%3f", "?").replace("%25", "%"))
        }
        None => ("raw".to_string(), storage.to_string()),
    }
}

/// Members of every node, as in QEMU.
fn common(name: &str, driver: &str, filename: &str, size: u64, read_only: bool) -> Value {
    let format = if driver == "file" || driver == "host_device" { "raw" } else { driver };
    json!({
        "node-name": name,
        "drv": driver,
        "file": filename,
        "ro": read_only,
        "active": true,
        "encrypted": false,
        "backing_file_depth": 0,
        "detect_zeroes": "off",
        "write_threshold": 0,
        "bps": 0, "bps_rd": 0, "bps_wr": 0,
        "iops": 0, "iops_rd": 0, "iops_wr": 0,
        "cache": { "writeback": true, "direct": false, "no-flush": false },
        "image": {
            "filename": filename,
            "format": format,
            "virtual-size": size,
        },
    })
}
