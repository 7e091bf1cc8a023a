//! The files of snapshots, listed.

use std::sync::{Arc, Mutex, PoisonError};

use blockhaul_block::Result;
use blockhaul_catalog::{ObjectEntry, ObjectList, OpenFuture};

use crate::backend::lost;
use crate::repository::Repository;
use crate::snapshot::Snapshot;
use crate::tree::{self, DEPTH_MAX, TreeNode};

/// Files of a page.
const PAGE: usize = 1000;

/// The regular files of snapshots, as `SNAPSHOT/PATH`.
pub(crate) struct SnapshotList(Arc<Mutex<SnapshotWalk>>);

struct SnapshotWalk {
    repository: Repository,
    /// Snapshots that were not visited yet, the next one last.
    snapshots: Vec<Snapshot>,
    /// The time of the snapshot that is visited.
    time: String,
    /// Directories whose entries are visited, each with its name.
    directories: Vec<(String, std::vec::IntoIter<TreeNode>)>,
    /// Beginning of the paths to list.
    below: String,
}

impl SnapshotList {
    /// The files of these snapshots, in this order, below a path.
    pub(crate) fn new(
        repository: Repository,
        mut snapshots: Vec<Snapshot>,
        below: &str,
    ) -> SnapshotList {
        snapshots.reverse();
        let below = below.trim_matches('/').to_owned();
        let (time, directories) = (String::new(), Vec::new());
        let walk = SnapshotWalk { repository, snapshots, time, directories, below };
        SnapshotList(Arc::new(Mutex::new(walk)))
    }
}

impl ObjectList for SnapshotList {
    fn page(&mut self) -> OpenFuture<Vec<ObjectEntry>> {
        let walk = self.0.clone();
        Box::pin(async move {
            let page = move || walk.lock().unwrap_or_else(PoisonError::into_inner).page();
            blockhaul_io::offload(page).await.map_err(lost)?
        })
    }
}

impl SnapshotWalk {
    fn page(&mut self) -> Result<Vec<ObjectEntry>> {
        let mut page = Vec::new();
        while page.len() < PAGE {
            let Some((directory, nodes)) = self.directories.last_mut() else {
                let Some(snapshot) = self.snapshots.pop() else { break };
                self.time = snapshot.shown_time();
                self.enter(snapshot.id.short(), &snapshot.tree)?;
                continue;
            };
            let Some(node) = nodes.next() else {
                self.directories.pop();
                continue;
            };
            let name = format!("{directory}/{}", String::from_utf8_lossy(&node.name));
            if !self.is_listed(&name) {
                continue;
            }
            match (&node.kind[..], node.subtree) {
                ("dir", Some(subtree)) => self.enter(name, &subtree)?,
                ("file", _) => page.push(self.entry(name, &node)),
                _ => {}
            }
        }
        Ok(page)
    }

    fn entry(&self, name: String, node: &TreeNode) -> ObjectEntry {
        ObjectEntry { name, size: node.size, changed: Some(self.time.clone()), etag: None }
    }

    fn enter(&mut self, name: String, tree: &crate::digest::Digest) -> Result<()> {
        if self.directories.len() < DEPTH_MAX {
            let nodes = tree::load(&self.repository, tree)?;
            self.directories.push((name, nodes.into_iter()));
        }
        Ok(())
    }

    /// Whether a file, or what is below a directory, begins with the path to list, or leads there.
    fn is_listed(&self, name: &str) -> bool {
        let path = name.split_once('/').map_or("", |(_, path)| path);
        path.starts_with(&self.below) || self.below.starts_with(&format!("{path}/"))
    }
}
