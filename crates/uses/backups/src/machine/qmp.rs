//! Backups of a machine of QEMU, or of disks of its storage daemon, over the monitor protocol.
//!
//! Each disk gets an overlay that keeps what the machine overwrites (`blockdev-backup` with `sync` `none`), and an
//! export of it, with the bitmap that began at the newest point. The bitmap for the next backup begins in the same
//! transaction.

use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::{Value, json};

use super::qmp_client::QmpClient;
use super::request::{
    BackupNames, IdleDisk, MachineDisk, MachineRequest, check_known, newest_checkpoint, refused,
};
use crate::error::Result;

/// The end of the name of an overlay's file.
const FILE: &str = "-file";
/// Number of times that a job is looked at until it has ended, and the interval.
const LOOKS: u32 = 600;
const LOOK: Duration = Duration::from_millis(100);
/// The remedy for an NBD server that runs already.
const ONE_SERVER: &str = "QEMU has one NBD server: if it runs already, end its exports and stop it \
                          (nbd-server-stop), then back up again";

/// A machine with a monitor.
pub(super) struct QmpMachine {
    client: QmpClient,
    disks: Vec<NodeDisk>,
    /// A backup has started the NBD server of QEMU, which has one server.
    serves: bool,
}

/// A disk of a machine.
#[derive(Debug, Clone)]
struct NodeDisk {
    /// Its name, for the store and the export.
    name: String,
    /// The node with its contents.
    node: String,
    size: u64,
    /// Its bitmaps outlive QEMU.
    persistent: bool,
    bitmaps: Vec<String>,
    /// The bitmap that began at the newest point of its store.
    parent: Option<String>,
    overlay: PathBuf,
    /// The identity of its overlay, job and export, and the node of the overlay.
    id: String,
}

impl NodeDisk {
    /// A disk from what QEMU says about a node.
    fn new(name: &str, about: &Value) -> Option<NodeDisk> {
        let bitmaps = about["dirty-bitmaps"].as_array().into_iter().flatten();
        let bitmaps = bitmaps.filter_map(|bitmap| Some(bitmap["name"].as_str()?.to_string()));
        Some(NodeDisk {
            name: name.to_string(),
            node: about["node-name"].as_str()?.to_string(),
            size: about["image"]["virtual-size"].as_u64()?,
            persistent: about["drv"] == "qcow2",
            bitmaps: bitmaps.collect(),
            parent: None,
            overlay: PathBuf::new(),
            id: String::new(),
        })
    }
}

impl QmpMachine {
    pub(super) fn connect(socket: &Path) -> Result<QmpMachine> {
        Ok(QmpMachine { client: QmpClient::connect(socket)?, disks: Vec::new(), serves: false })
    }

    /// Begins the point in time of all disks.
    pub(super) fn begin(
        &mut self,
        request: &MachineRequest,
        names: &BackupNames,
    ) -> Result<Vec<MachineDisk>> {
        self.disks = self.known_disks(&request.disks)?;
        // What an interrupted backup has left is its nodes and jobs, and likely the server.
        self.serves = self.has_left(names);
        self.clean_up(names);
        let mut made = Vec::with_capacity(self.disks.len());
        for index in 0..self.disks.len() {
            let store = request.stores.join(&self.disks[index].name);
            let newest = newest_checkpoint(&store)?;
            self.settle_bitmaps(index, newest.as_deref(), names)?;
            let disk = &mut self.disks[index];
            disk.parent = newest.filter(|newest| disk.bitmaps.contains(newest));
            disk.id = format!("{}{index}", names.nodes());
            disk.overlay = request.scratch.join(format!("{}{}.overlay", names.prefix, disk.name));
            made.push(MachineDisk {
                name: disk.name.clone(),
                source: names.source(&disk.name)?,
                store,
                bitmap: disk.parent.clone(),
                has_checkpoint: true,
            });
        }
        match self.begin_moment(names) {
            Ok(()) => Ok(made),
            Err(error) => {
                self.clean_up(names);
                let _ = self.settle(&made, names);
                Err(error)
            }
        }
    }

    /// Ends the point in time.
    pub(super) fn end(mut self, disks: &[MachineDisk], names: &BackupNames) -> Result<()> {
        self.clean_up(names);
        self.settle(disks, names)
    }

    /// The disks that are backed up, before the point in time begins.
    pub(super) fn idle_disks(
        &mut self,
        wanted: &[String],
        names: &BackupNames,
    ) -> Result<Vec<IdleDisk>> {
        if self.has_other_exports(names) == Some(true) {
            return Err(refused(format!("its NBD server has other exports; {ONE_SERVER}")));
        }
        let idle = |disk: NodeDisk| {
            let checkpoint = Some(names.checkpoint.clone());
            IdleDisk { name: disk.name, size: disk.size, checkpoints: disk.bitmaps, checkpoint }
        };
        Ok(self.known_disks(wanted)?.into_iter().map(idle).collect())
    }

    /// The disks of the machine that are backed up. Without a name: those of its devices that it can write.
    fn known_disks(&mut self, wanted: &[String]) -> Result<Vec<NodeDisk>> {
        let devices = self.client.run("query-block", json!({})).unwrap_or_default();
        let mut disks: Vec<NodeDisk> = Vec::new();
        for device in devices.as_array().into_iter().flatten() {
            let inserted = &device["inserted"];
            if device["removable"] == true || inserted["ro"] == true {
                continue;
            }
            let of_node = inserted["node-name"].as_str();
            let path = device["qdev"].as_str().filter(|path| !path.starts_with('/'));
            let name =
                device["device"].as_str().filter(|name| !name.is_empty()).or(path).or(of_node);
            disks.extend(name.and_then(|name| NodeDisk::new(name, inserted)));
        }
        if !wanted.is_empty() {
            let nodes = self.client.run("query-named-block-nodes", json!({ "flat": true }))?;
            let nodes = nodes.as_array().into_iter().flatten();
            disks.extend(nodes.filter_map(|node| NodeDisk::new(node["node-name"].as_str()?, node)));
        }
        let known: Vec<&str> = disks.iter().map(|disk| disk.name.as_str()).collect();
        check_known(wanted, &known)?;
        if !wanted.is_empty() {
            let found = |name: &String| disks.iter().find(|disk| disk.name == *name).cloned();
            disks = wanted.iter().filter_map(found).collect();
        }
        if disks.is_empty() {
            return Err(refused(
                "the machine has no disk that it can write: name one with --disk".into(),
            ));
        }
        Ok(disks)
    }

    /// Makes the overlays and the server, and begins the moment of all disks.
    fn begin_moment(&mut self, names: &BackupNames) -> Result<()> {
        let disks = self.disks.clone();
        for disk in &disks {
            self.add_overlay(disk)?;
        }
        let server =
            json!({ "addr": { "type": "unix", "data": { "path": path_text(&names.socket)? } } });
        self.client
            .run("nbd-server-start", server)
            .map_err(|error| error.and(&format!("; {ONE_SERVER}")))?;
        self.serves = true;
        let mut actions = Vec::new();
        for disk in &disks {
            actions.push(json!({ "type": "blockdev-backup", "data": {
                "job-id": disk.id, "device": disk.node, "target": disk.id, "sync": "none" } }));
            if let Some(parent) = &disk.parent {
                let bitmap = json!({ "node": disk.node, "name": parent });
                actions.push(json!({ "type": "block-dirty-bitmap-disable", "data": bitmap }));
            }
            actions.push(json!({ "type": "block-dirty-bitmap-add", "data": {
                "node": disk.node, "name": names.checkpoint, "persistent": disk.persistent } }));
        }
        self.client.run("transaction", json!({ "actions": actions }))?;
        for disk in &mut self.disks {
            disk.bitmaps.push(names.checkpoint.clone());
        }
        for disk in &disks {
            let bitmaps = disk.parent.iter().map(|name| json!({ "node": disk.node, "name": name }));
            self.client.run(
                "block-export-add",
                json!({
                "type": "nbd", "id": disk.id, "node-name": disk.id, "name": disk.name,
                "bitmaps": bitmaps.collect::<Vec<_>>() }),
            )?;
        }
        Ok(())
    }

    /// Makes the overlay of a disk, as a node.
    fn add_overlay(&mut self, disk: &NodeDisk) -> Result<()> {
        let node = &disk.id;
        let file = format!("{node}{FILE}");
        let path = path_text(&disk.overlay)?;
        self.create(node, json!({ "driver": "file", "filename": path, "size": 0 }))?;
        let added =
            json!({ "driver": "file", "node-name": file, "filename": path, "discard": "unmap" });
        self.client.run("blockdev-add", added)?;
        self.create(node, json!({ "driver": "qcow2", "file": file, "size": disk.size }))?;
        self.client.run(
            "blockdev-add",
            json!({
            "driver": "qcow2", "node-name": node, "backing": disk.node, "file": file,
            "discard": "unmap" }),
        )?;
        Ok(())
    }

    /// Runs a job that creates an image.
    fn create(&mut self, id: &str, options: Value) -> Result<()> {
        self.client.run("blockdev-create", json!({ "job-id": id, "options": options }))?;
        for _ in 0..LOOKS {
            let jobs = self.client.run("query-jobs", json!({}))?;
            let job = jobs.as_array().into_iter().flatten().find(|job| job["id"] == id);
            let Some(job) = job.filter(|job| job["status"] != "concluded") else {
                let error = job.and_then(|job| job["error"].as_str()).map(str::to_string);
                if job.is_some() {
                    self.client.run("job-dismiss", json!({ "id": id }))?;
                }
                return error.map_or(Ok(()), |why| {
                    Err(refused(format!("cannot create an overlay: {why}")))
                });
            };
            log::trace!("job {id} is {}", job["status"]);
            std::thread::sleep(LOOK);
        }
        Err(refused("an overlay was not created in a minute".into()))
    }

    /// Removes what a backup has made in the machine, as far as it is there.
    fn clean_up(&mut self, names: &BackupNames) {
        for id in self.own("query-block-exports", "id", names) {
            // The export of a client that leaves may be gone by now.
            let _ = self.client.run("block-export-del", json!({ "id": id, "mode": "hard" }));
        }
        // Stopping the server ends the exports of others, too. What is removed later says until then, also after a
        // kill, that the server is that of a backup.
        if std::mem::take(&mut self.serves) && self.has_other_exports(names) == Some(false) {
            let _ = self.client.run("nbd-server-stop", json!({}));
        }
        for id in self.own("query-jobs", "id", names) {
            self.end_job(&id, names);
        }
        // The images before their files.
        let mut nodes = self.own("query-named-block-nodes", "node-name", names);
        nodes.sort_by_key(|node| node.ends_with(FILE));
        for node in nodes {
            self.remove_node(&node, names);
        }
        for disk in &self.disks {
            // It may be absent.
            let _ = std::fs::remove_file(&disk.overlay);
        }
    }

    /// Whether an interrupted backup has left something in the machine.
    fn has_left(&mut self, names: &BackupNames) -> bool {
        const MADE: [(&str, &str); 3] = [
            ("query-block-exports", "id"),
            ("query-jobs", "id"),
            ("query-named-block-nodes", "node-name"),
        ];
        MADE.iter().any(|(command, member)| !self.own(command, member, names).is_empty())
    }

    /// Whether the server has exports of others; `None`: QEMU does not list them.
    fn has_other_exports(&mut self, names: &BackupNames) -> Option<bool> {
        let listed = self.client.run("query-block-exports", json!({})).unwrap_or_default();
        let is_other = |export: &Value| {
            // One of this backup may be listed until its clients are gone.
            let is_own = export["id"].as_str().is_some_and(|id| id.starts_with(names.nodes()));
            export["type"] == "nbd" && !is_own
        };
        listed.as_array().map(|all| all.iter().any(is_other))
    }

    /// Ends a job, and waits until it is gone.
    fn end_job(&mut self, id: &str, names: &BackupNames) {
        // It may have ended already.
        let _ = self.client.run("job-cancel", json!({ "id": id }));
        for _ in 0..LOOKS {
            // Only a job that has concluded can be dismissed, and most dismiss themselves.
            let is_dismissed = self.client.run("job-dismiss", json!({ "id": id })).is_ok();
            if is_dismissed || !self.own("query-jobs", "id", names).iter().any(|one| one == id) {
                break;
            }
            std::thread::sleep(LOOK);
        }
    }

    /// The names of what a backup has made, in the list that a command returns.
    fn own(&mut self, command: &str, member: &str, names: &BackupNames) -> Vec<String> {
        let listed = self.client.run(command, json!({})).unwrap_or_default();
        let listed = listed.as_array().into_iter().flatten();
        let found = listed.filter_map(|one| one[member].as_str());
        found.filter(|name| name.starts_with(names.nodes())).map(String::from).collect()
    }

    /// Removes a node that may still be in use for a moment.
    fn remove_node(&mut self, node: &str, names: &BackupNames) {
        for _ in 0..LOOKS {
            let is_removed = self.client.run("blockdev-del", json!({ "node-name": node })).is_ok();
            let left = self.own("query-named-block-nodes", "node-name", names);
            if is_removed || !left.iter().any(|one| one == node) {
                return;
            }
            std::thread::sleep(LOOK);
        }
    }

    /// Settles the bitmaps of all disks, by the newest points of their stores.
    fn settle(&mut self, disks: &[MachineDisk], names: &BackupNames) -> Result<()> {
        for (index, disk) in disks.iter().enumerate() {
            let newest = newest_checkpoint(&disk.store)?;
            self.settle_bitmaps(index, newest.as_deref(), names)?;
        }
        Ok(())
    }

    /// Keeps only the bitmap of the newest point: what others have recorded is merged into it.
    fn settle_bitmaps(
        &mut self,
        index: usize,
        newest: Option<&str>,
        names: &BackupNames,
    ) -> Result<()> {
        let Some(disk) = self.disks.get_mut(index) else { return Ok(()) };
        let kept = newest.filter(|newest| disk.bitmaps.iter().any(|name| name == newest));
        let is_other = |name: &String| names.is_own(name) && kept != Some(name.as_str());
        let others: Vec<String> =
            disk.bitmaps.iter().filter(|name| is_other(name)).cloned().collect();
        let node = disk.node.clone();
        disk.bitmaps.retain(|name| !others.contains(name));
        if let Some(kept) = kept.filter(|_| !others.is_empty()) {
            // Older ones have recorded what is in the newest point already: later ones count.
            let later: Vec<_> = others.iter().filter(|name| name.as_str() > kept).collect();
            if !later.is_empty() {
                let merged = json!({ "node": node, "target": kept, "bitmaps": later });
                self.client.run("block-dirty-bitmap-merge", merged)?;
                self.client
                    .run("block-dirty-bitmap-enable", json!({ "node": node, "name": kept }))?;
            }
        }
        for name in &others {
            self.client.run("block-dirty-bitmap-remove", json!({ "node": node, "name": name }))?;
        }
        Ok(())
    }
}

fn path_text(path: &Path) -> Result<&str> {
    path.to_str().ok_or_else(|| refused(format!("{}: the name is not UTF-8", path.display())))
}
