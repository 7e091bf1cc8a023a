//! What the monitor protocol knows besides the disks, jobs and bitmaps of the server: nodes and exports
//! that clients added, and which nodes jobs use.

use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use blockhaul_catalog::Spec;
use blockhaul_io::Completer;
use blockhaul_jobs::Begin;
use blockhaul_snapshot::{Bitmap, Snapshot};

/// What the protocol knows besides the disks, jobs and bitmaps of the server.
#[derive(Default)]
pub(crate) struct State {
    pub(crate) nodes: Vec<Arc<Node>>,
    pub(crate) objects: Vec<Object>,
    pub(crate) exports: Vec<Export>,
    /// Exports of the server, by identifier, whose guest uses another node than their own.
    pub(crate) drives: Vec<(String, String)>,
    pub(crate) uses: Vec<Use>,
    /// Nodes whose disk has the name of another node, after a mirror.
    pub(crate) moved: Vec<(String, String)>,
    pub(crate) nbd_server: Option<NbdServer>,
}

/// An object that was added.
pub struct Object {
    pub id: String,
    /// Options of the layer of its nodes, if it is a group of limits.
    pub limits: Option<String>,
}

/// A node that was added.
pub struct Node {
    pub name: String,
    pub driver: String,
    /// Its file, or the description of its device.
    pub filename: String,
    pub read_only: bool,
    /// Nodes below it, by name.
    pub children: Vec<String>,
    pub what: What,
}

/// What a node is.
pub enum What {
    /// A disk; what is needed to open it again.
    Disk { spec: Spec, layers: Vec<String> },
    /// Saves old contents of the disk of this node.
    BeforeWrite { disk: String, begin: Box<Begin>, begun: Mutex<Option<Snapshot>> },
    /// Shows the disk as it was; with bitmaps of its own.
    Access { of: String, bitmaps: Mutex<Vec<Arc<Bitmap>>> },
}

/// An export that was added here.
#[derive(Debug, Clone)]
pub struct Export {
    pub id: String,
    /// The node whose disk it shows.
    pub node: String,
    /// The node that the guest's drive was moved to; usually the same.
    pub drive: String,
    /// For clients.
    pub name: String,
}

/// The listeners of `nbd-server-start`; dropped, they end.
pub struct NbdServer {
    _stop: Vec<Completer<()>>,
    socket: Option<PathBuf>,
}

impl NbdServer {
    /// With the listeners that `stop` ends, one of them at a socket of this path.
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

/// Which nodes a job uses, until it ends.
#[derive(Debug, Clone)]
pub struct Use {
    pub job: String,
    pub source: String,
    pub target: String,
    pub bitmap: Option<String>,
}
