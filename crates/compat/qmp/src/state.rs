//! State of the monitor besides the disks, jobs and bitmaps of the server: nodes, objects and exports that
//! clients added, and the nodes of jobs.

use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use blockhaul_catalog::DeviceSpec;
use blockhaul_io::Completer;
use blockhaul_jobs::SnapshotConfig;
use blockhaul_snapshot::{DirtyBitmap, Snapshot};

/// State of the monitor besides the disks, jobs and bitmaps of the server.
#[derive(Default)]
pub(crate) struct MonitorState {
    pub(crate) nodes: Vec<Arc<Node>>,
    pub(crate) objects: Vec<QomObject>,
    pub(crate) exports: Vec<NodeExport>,
    /// Exports of the server, by identifier, whose guest uses another node than their own.
    pub(crate) drives: Vec<(String, String)>,
    pub(crate) job_nodes: Vec<JobNodes>,
    /// Nodes whose disk has the name of another node, after a mirror.
    pub(crate) moved: Vec<(String, String)>,
    pub(crate) nbd_server: Option<NbdServer>,
}

/// An object that was added.
pub struct QomObject {
    pub id: String,
    /// Options of the layer of a node, if the object is a group of limits.
    pub limits: Option<String>,
}

/// A node that was added.
pub struct Node {
    pub name: String,
    pub driver: String,
    /// The file of the node, or the description of its device.
    pub filename: String,
    pub read_only: bool,
    /// Nodes below this one, by name.
    pub children: Vec<String>,
    pub contents: NodeContents,
}

/// Contents of a node.
pub enum NodeContents {
    /// A disk, with its description.
    Disk { spec: DeviceSpec, layers: Vec<String> },
    /// Saves old contents of the disk of the node `disk`; `snapshot` is the point in time, once it has begun.
    BeforeWrite { disk: String, begin: Box<SnapshotConfig>, snapshot: Mutex<Option<Snapshot>> },
    /// Shows the point in time of the node `before_write`; with bitmaps of its own.
    Access { before_write: String, bitmaps: Mutex<Vec<Arc<DirtyBitmap>>> },
}

/// An export that was added here.
#[derive(Debug, Clone)]
pub struct NodeExport {
    pub id: String,
    /// The node whose disk the export shows.
    pub node: String,
    /// The node that the guest's drive was moved to; usually the same.
    pub drive: String,
    /// The name for clients.
    pub name: String,
}

/// Listeners of `nbd-server-start`, which end on drop.
pub struct NbdServer {
    _stop: Vec<Completer<()>>,
    socket: Option<PathBuf>,
}

impl NbdServer {
    /// The listeners that `stop` ends, one of them at a socket of this path.
    pub fn new(stop: Vec<Completer<()>>, socket: Option<PathBuf>) -> NbdServer {
        NbdServer { _stop: stop, socket }
    }
}

impl Drop for NbdServer {
    fn drop(&mut self) {
        if let Some(path) = self.socket.take() {
            // What cannot be removed is an empty name.
            let _ = std::fs::remove_file(path);
        }
    }
}

/// The nodes of a job, until the job ends.
#[derive(Debug, Clone)]
pub struct JobNodes {
    pub job: String,
    pub source: String,
    pub target: String,
    pub bitmap: Option<String>,
}
