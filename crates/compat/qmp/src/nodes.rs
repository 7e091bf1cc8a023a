//! The nodes of the monitor protocol: disks that `blockdev-add` opens, and the exports of the server, which are
//! nodes of their names.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use blockhaul_io::plain;
use blockhaul_jobs::{ExportConfig, Job, OpenExport};

use crate::commands::{Arguments, needed, switch, text};
use crate::error::{QmpError, Result};
use crate::monitor::Monitor;
use crate::state::{Node, NodeContents};

/// Maximum time for requests in flight to end when a point in time begins.
pub const BARRIER: Duration = Duration::from_secs(30);

/// Longest name of a node, as in QEMU.
const NAME_MAX: usize = 31;

/// Maximum number of nodes.
const NODES_MAX: usize = 1024;

/// The disk of a node or device that a command names.
pub enum NodeDisk {
    /// A disk in use.
    Live(Arc<OpenExport>),
    /// A point in time.
    Frozen(Arc<Node>),
}

impl Monitor {
    /// `blockdev-add`.
    pub(crate) async fn add_node(&self, options: &Arguments) -> Result<()> {
        let Some(name) = text(options, "node-name") else {
            return Err(QmpError::generic("'node-name' must be specified for the root node"));
        };
        self.check_name(name)?;
        match needed(options, "driver") {
            "copy-before-write" => return self.add_before_write(name, options).await,
            "snapshot-access" => return self.add_access(name, options).await,
            _ => {}
        }
        let plan = self.plan(options, 0)?;
        let read_only = switch(options, "read-only", false);
        for child in &plan.children {
            self.take_child(child).await?;
        }
        let node = Node {
            name: name.to_string(),
            driver: plan.driver,
            filename: plan.filename,
            read_only,
            children: plan.children,
            contents: NodeContents::Disk { spec: plan.spec, layers: plan.layers },
        };
        let auto = switch(options, "auto-read-only", false);
        let node = self.open(node, auto).await?;
        self.state().nodes.push(Arc::new(node));
        Ok(())
    }

    fn check_name(&self, name: &str) -> Result<()> {
        if !is_well_formed(name) {
            return Err(QmpError::generic(format!("Invalid node-name: '{name}'")));
        }
        if name.len() > NAME_MAX {
            return Err(QmpError::generic("Node name too long"));
        }
        if self.node(name).is_some() || self.running(name).is_some() {
            return Err(QmpError::generic(format!("Duplicate nodes with node-name='{name}'")));
        }
        if self.state().nodes.len() >= NODES_MAX {
            return Err(QmpError::generic(format!("there are {NODES_MAX} nodes already")));
        }
        Ok(())
    }

    /// Opens the disk of a node.
    async fn open(&self, mut node: Node, auto_read_only: bool) -> Result<Node> {
        if let Some(errno) = file_of(&node).and_then(|path| std::fs::metadata(path).err()) {
            let why = plain(&errno);
            return Err(QmpError::generic(format!("Could not open '{}': {why}", node.filename)));
        }
        match self.open_disk(&node).await {
            Ok(_) => Ok(node),
            Err(_) if auto_read_only && !node.read_only => {
                node.read_only = true;
                self.open_disk(&node).await?;
                Ok(node)
            }
            Err(error) => Err(error),
        }
    }

    async fn open_disk(&self, node: &Node) -> Result<Arc<OpenExport>> {
        let NodeContents::Disk { spec, layers } = &node.contents else {
            return Err(QmpError::generic(format!("Node '{}' is not a disk", node.name)));
        };
        let name = self.free_name(&node.name);
        let one = ExportConfig::described(&name, "", spec.clone(), node.read_only, layers.clone());
        let running = self.table.add_disk(one).await?;
        if name != node.name {
            self.state().moved.push((node.name.clone(), name));
        }
        Ok(running)
    }

    /// A name for the disk of a node: its own, unless the disk of another node has it after a mirror.
    fn free_name(&self, node: &str) -> String {
        let all = self.table.exports();
        let is_free = |name: &String| !all.iter().any(|one| one.name == *name);
        // No node has such a name.
        let others = (2..).map(|number| format!("{node}#{number}"));
        let mut names = std::iter::once(node.to_string()).chain(others);
        names.find(is_free).unwrap_or_default()
    }

    /// A node is about to be opened as a part of another one.
    async fn take_child(&self, name: &str) -> Result<()> {
        let Some(running) = self.running(name) else { return Ok(()) };
        // Its image keeps them.
        let keeps = running.has_bitmap_store() && running.bitmaps().iter().all(|one| one.is_kept());
        let is_marked = !keeps && !running.bitmaps().is_empty();
        if running.served || self.is_used(name) || is_marked {
            return Err(QmpError::generic(format!("Block device {name} is in use")));
        }
        self.close_disk(name, &running.name).await;
        Ok(())
    }

    /// Closes the disk of a node; `disk`: the name of the disk, which after a mirror may be that of another node.
    async fn close_disk(&self, node: &str, disk: &str) {
        self.table.remove(disk).await;
        // A later disk of that name is one of its own node.
        self.state().moved.retain(|(from, to)| (from.as_str(), to.as_str()) != (node, disk));
    }

    /// The node or device of this name; a disk that was closed for a node over it is opened again.
    pub(crate) async fn find(&self, name: &str) -> Result<NodeDisk> {
        if let Some(running) = self.running(name) {
            return Ok(NodeDisk::Live(running));
        }
        let export = self.state().exports.iter().find(|one| one.id == name).cloned();
        if let Some(running) = export.and_then(|export| self.running(&export.node)) {
            return Ok(NodeDisk::Live(running));
        }
        let node = self.node(name).ok_or_else(|| QmpError::no_node(name))?;
        match &node.contents {
            NodeContents::Access { .. } => Ok(NodeDisk::Frozen(node)),
            NodeContents::BeforeWrite { disk, .. } => match self.running(disk) {
                Some(running) => Ok(NodeDisk::Live(running)),
                None => Err(QmpError::no_node(disk)),
            },
            NodeContents::Disk { .. } => match self.parent(name) {
                Some(parent) => {
                    Err(QmpError::generic(format!("Node '{name}' is in use by node '{parent}'")))
                }
                None => Ok(NodeDisk::Live(self.open_disk(&node).await?)),
            },
        }
    }

    /// The node of this name, if it was added.
    pub(crate) fn node(&self, name: &str) -> Option<Arc<Node>> {
        self.state().nodes.iter().find(|node| node.name == name).cloned()
    }

    /// The open disk of the node of this name.
    pub(crate) fn running(&self, node: &str) -> Option<Arc<OpenExport>> {
        let all = self.table.exports().into_iter().filter(|one| one.shared.is_some());
        // After a mirror, a disk may have the name of another node, also of one that was deleted.
        all.into_iter().find(|one| self.node_of(one) == node)
    }

    /// The name of the node of a disk.
    pub(crate) fn node_of(&self, running: &OpenExport) -> String {
        let name = node_name(running);
        let moved = self.state().moved.iter().find(|(_, to)| to == name).cloned();
        moved.map_or_else(|| name.to_string(), |(from, _)| from)
    }

    /// The node over this one.
    pub(crate) fn parent(&self, name: &str) -> Option<String> {
        let state = self.state();
        let over = |node: &&Arc<Node>| {
            let disk = match &node.contents {
                NodeContents::BeforeWrite { disk, .. } => Some(disk.as_str()),
                _ => None,
            };
            disk == Some(name) || node.children.iter().any(|child| child == name)
        };
        state.nodes.iter().find(over).map(|node| node.name.clone())
    }

    /// The node of the disk that was found, or is below.
    pub(crate) async fn disk_of(&self, found: &NodeDisk) -> Result<String> {
        Ok(match found {
            NodeDisk::Live(running) => self.node_of(running),
            NodeDisk::Frozen(frozen) => self.node_of(&*self.live_below(frozen).await?),
        })
    }

    /// `blockdev-del`.
    pub(crate) async fn delete_node(&self, name: &str) -> Result<()> {
        let Some(node) = self.node(name) else {
            let text = match self.running(name) {
                Some(_) => format!("Node {name} is in use"),
                None => format!("Failed to find node with node-name='{name}'"),
            };
            return Err(QmpError::generic(text));
        };
        if self.parent(name).is_some() {
            return Err(QmpError::generic(format!("Block device {name} is in use")));
        }
        let is_served = self.running(name).is_some_and(|running| running.served);
        if is_served || self.is_used(name) {
            return Err(QmpError::generic(format!("Node {name} is in use")));
        }
        match &node.contents {
            NodeContents::Disk { .. } => {
                if let Some(running) = self.running(name) {
                    self.close_disk(name, &running.name).await;
                }
            }
            NodeContents::BeforeWrite { disk, snapshot, .. } => {
                let snapshot = snapshot.lock().expect("no panic under this lock").take();
                if let (Some(snapshot), Some(running)) = (snapshot, self.running(disk)) {
                    self.table.end_snapshot(&running, &snapshot).await;
                }
            }
            NodeContents::Access { .. } => {}
        }
        let mut state = self.state();
        state.nodes.retain(|node| node.name != name);
        state.moved.retain(|(from, _)| from != name);
        Ok(())
    }

    /// Whether an export or a job uses a node, or a guest device was moved to it.
    pub(crate) fn is_used(&self, name: &str) -> bool {
        let job = self.user(name).is_some();
        job || self.state().exports.iter().any(|export| export.node == name || export.drive == name)
    }

    /// The kind of the job that uses a node as its source or target.
    pub(crate) fn user(&self, name: &str) -> Option<&'static str> {
        let state = self.state();
        let mut users =
            state.job_nodes.iter().filter(|one| one.target == name || one.source == name);
        users.find_map(|one| self.active_job(&one.job)).map(|job| job.kind())
    }

    /// Refuses a disk that a job writes: no bitmap and no point in time sees the writes of the job, and clients
    /// would see a part of its data.
    pub(crate) fn check_not_target(&self, node: &str) -> Result<()> {
        let state = self.state();
        let mut writers = state.job_nodes.iter().filter(|one| one.target == node);
        match writers.find_map(|one| self.active_job(&one.job)) {
            None => Ok(()),
            Some(job) => Err(QmpError::busy(node, job.kind())),
        }
    }

    /// The job of this name, unless it is over.
    pub(crate) fn active_job(&self, name: &str) -> Option<Arc<Job>> {
        self.jobs.named(name).filter(|job| !job.status().is_over())
    }
}

/// The name of the node of an open disk.
pub fn node_name(running: &OpenExport) -> &str {
    if running.name.is_empty() { "disk" } else { &running.name }
}

/// Whether QEMU takes this as the name of a node, an export or a job.
pub fn is_well_formed(name: &str) -> bool {
    let mut letters = name.chars();
    letters.next().is_some_and(|first| first.is_ascii_alphabetic())
        && letters.all(|letter| letter.is_ascii_alphanumeric() || "-._".contains(letter))
}

/// The file of a node, if it is in one.
pub fn file_of(node: &Node) -> Option<&Path> {
    node.filename.starts_with('/').then(|| Path::new(&node.filename))
}
