//! The nodes of the monitor protocol: disks that `blockdev-add` opens, points in time of them
//! (`copy-before-write`, `snapshot-access`), and the exports of the server, which are nodes of their
//! names.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use blockhaul_block::{Device, fence};
use blockhaul_catalog::{Spec, percent_encode};
use blockhaul_io::plain;
use blockhaul_jobs::{Begin, One, Running, Taken};
use blockhaul_snapshot::{Bitmap, OnFailure, Options, Snapshot, Trim};
use serde_json::{Map, Value};

use crate::commands::{self, Arguments, needed, number, switch, text};
use crate::error::{QmpError, Result};
use crate::monitor::Monitor;
use crate::state::{Node, What};

/// Maximum time for requests in flight to end when a point in time begins.
pub const BARRIER: Duration = Duration::from_secs(30);
/// Longest name of a node, as in QEMU.
const NAME_MAX: usize = 31;
/// Maximum number of nodes.
const NODES_MAX: usize = 1024;
/// Size of a null-co node without one, as in QEMU.
const NULL_SIZE: u64 = 1 << 30;
/// Deepest nesting of nodes in one command.
const DEPTH_MAX: usize = 8;

/// A node or device that commands name.
pub enum Found {
    /// A disk in use.
    Live(Arc<Running>),
    /// A point in time.
    Frozen(Arc<Node>),
}

/// A node as its options describe it; nothing is opened yet.
struct Plan {
    driver: String,
    filename: String,
    spec: Spec,
    layers: Vec<String>,
    children: Vec<String>,
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
            what: What::Disk { spec: plan.spec, layers: plan.layers },
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

    async fn open_disk(&self, node: &Node) -> Result<Arc<Running>> {
        let What::Disk { spec, layers } = &node.what else {
            return Err(QmpError::generic(format!("Node '{}' is not a disk", node.name)));
        };
        let name = self.free_name(&node.name);
        let one = One::described(&name, "", spec.clone(), node.read_only, layers.clone());
        let running = self.table.add_disk(one).await?;
        if name != node.name {
            self.state().moved.push((node.name.clone(), name));
        }
        Ok(running)
    }

    /// A name for the disk of a node: its own, unless the disk of another node has it after a mirror.
    fn free_name(&self, node: &str) -> String {
        let all = self.table.running();
        let is_free = |name: &String| !all.iter().any(|one| one.name == *name);
        // No node has such a name.
        let others = (2..).map(|number| format!("{node}#{number}"));
        let mut names = std::iter::once(node.to_string()).chain(others);
        names.find(is_free).unwrap_or_default()
    }

    /// A node is about to be opened as a part of another one.
    async fn take_child(&self, name: &str) -> Result<()> {
        let Some(running) = self.running(name) else { return Ok(()) };
        if running.served || self.is_used(name) || !running.bitmaps().is_empty() {
            return Err(QmpError::generic(format!("Block device {name} is in use")));
        }
        self.table.remove(name).await;
        Ok(())
    }

    /// What a node is to be opened as.
    fn plan(&self, options: &Arguments, depth: usize) -> Result<Plan> {
        if depth > 0 {
            commands::check_node(options)?;
        }
        if depth > DEPTH_MAX {
            return Err(QmpError::generic("nodes are nested too deeply"));
        }
        let driver = needed(options, "driver");
        let mut plan = match driver {
            "file" | "host_device" => file_plan(options)?,
            "null-co" => {
                let size = number(options, "size").unwrap_or(NULL_SIZE);
                simple("null-co://", Spec::Scheme { scheme: "null".into(), rest: size.to_string() })
            }
            "nbd" => nbd_plan(options)?,
            "raw" => self.raw_plan(options, depth)?,
            "qcow2" => self.qcow2_plan(options, depth)?,
            "throttle" => {
                let layer = self.throttle(needed(options, "throttle-group"))?;
                let mut plan = self.child(options, "file", depth)?;
                plan.layers.extend(layer);
                plan
            }
            _ => return Err(QmpError::generic(format!("driver '{driver}' cannot be used here"))),
        };
        plan.driver = driver.to_string();
        Ok(plan)
    }

    fn raw_plan(&self, options: &Arguments, depth: usize) -> Result<Plan> {
        let mut plan = self.child(options, "file", depth)?;
        let offset = number(options, "offset");
        let size = number(options, "size");
        if offset.is_some() || size.is_some() {
            let range = size.map(|size| format!("&range={size}")).unwrap_or_default();
            plan.layers.push(format!("offset?offset={}{range}", offset.unwrap_or(0)));
        }
        Ok(plan)
    }

    fn qcow2_plan(&self, options: &Arguments, depth: usize) -> Result<Plan> {
        let mut plan = self.child(options, "file", depth)?;
        if !plan.layers.is_empty() {
            return Err(QmpError::generic("qcow2 over a part of a device is not supported"));
        }
        let names = match options.get("backing") {
            None => "?names=allow".to_string(),
            Some(Value::Null) => "?names=refuse".to_string(),
            Some(_) => {
                let backing = self.child(options, "backing", depth)?;
                if !backing.layers.is_empty() {
                    return Err(QmpError::generic(
                        "a part of a device as backing is not supported",
                    ));
                }
                plan.children.extend(backing.children);
                let backing = backing.spec.to_string();
                let backing = percent_encode(backing.as_bytes());
                format!("?names=allow&backing={backing}")
            }
        };
        let below = plan.spec.to_string().replace('%', "%25").replace('?', "%3f");
        plan.spec = Spec::Scheme { scheme: "qcow2".into(), rest: below + &names };
        Ok(plan)
    }

    /// The plan of a node below: one that is there already, or in the options.
    fn child(&self, options: &Arguments, role: &str, depth: usize) -> Result<Plan> {
        match options.get(role) {
            Some(Value::Object(inner)) => self.plan(inner, depth + 1),
            Some(Value::String(name)) => {
                let node = self.node(name).ok_or_else(|| QmpError::no_node(name))?;
                let What::Disk { spec, layers } = &node.what else {
                    let text = format!("Node '{name}' cannot be below a node of this driver");
                    return Err(QmpError::generic(text));
                };
                if self.parent(name).is_some() {
                    return Err(QmpError::generic(format!("Block device {name} is in use")));
                }
                Ok(Plan {
                    driver: node.driver.clone(),
                    filename: node.filename.clone(),
                    spec: spec.clone(),
                    layers: layers.clone(),
                    children: vec![name.clone()],
                })
            }
            _ => Err(QmpError::generic(format!("Parameter '{role}' is missing"))),
        }
    }

    /// Names of the nodes that these options give for `role`.
    fn name_of(options: &Arguments, role: &str) -> Result<String> {
        let found = options.get(role).and_then(Value::as_str);
        found.map(str::to_string).ok_or_else(|| {
            QmpError::generic(format!("Parameter '{role}' must be the name of a node here"))
        })
    }

    async fn add_before_write(&self, name: &str, options: &Arguments) -> Result<()> {
        let file = Monitor::name_of(options, "file")?;
        let target = Monitor::name_of(options, "target")?;
        let Found::Live(running) = self.find(&file).await? else {
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
            what: What::BeforeWrite {
                disk: self.node_of(&running),
                begin: Box::new(begin),
                begun: Mutex::default(),
            },
        };
        self.state().nodes.push(Arc::new(node));
        Ok(())
    }

    async fn add_access(&self, name: &str, options: &Arguments) -> Result<()> {
        let of = Monitor::name_of(options, "file")?;
        let below = self.node(&of).ok_or_else(|| QmpError::no_node(&of))?;
        if !matches!(below.what, What::BeforeWrite { .. }) {
            let text = format!("Node '{of}' is not of driver copy-before-write");
            return Err(QmpError::generic(text));
        }
        let node = Node {
            name: name.to_string(),
            driver: "snapshot-access".to_string(),
            filename: below.filename.clone(),
            read_only: true,
            children: vec![of.clone()],
            what: What::Access { of, bitmaps: Mutex::default() },
        };
        self.state().nodes.push(Arc::new(node));
        Ok(())
    }

    /// The point in time of a `copy-before-write` node, which begins at the first call.
    pub(crate) async fn snapshot_of(&self, node: &Node) -> Result<Snapshot> {
        let What::BeforeWrite { disk, begin, begun } = &node.what else {
            return Err(QmpError::generic(format!("Node '{}' keeps no point in time", node.name)));
        };
        let held = begun.lock().expect("no panic under this lock").clone();
        if let Some(snapshot) = held {
            return Ok(snapshot);
        }
        let Found::Live(running) = self.find(disk).await? else {
            return Err(QmpError::no_node(disk));
        };
        let started = self.table.begin_snapshot(&running, begin).await?;
        started.taken.iter().for_each(Taken::settle);
        *begun.lock().expect("no panic under this lock") = Some(started.snapshot.clone());
        Ok(started.snapshot)
    }

    /// The point in time that a `snapshot-access` node shows, if it is one of the disk of `disk`.
    pub(crate) async fn snapshot_over(&self, name: &str, disk: &str) -> Result<Option<Snapshot>> {
        let Some(node) = self.node(name) else { return Ok(None) };
        let What::Access { of, .. } = &node.what else { return Ok(None) };
        let below = self.node(of).ok_or_else(|| QmpError::no_node(of))?;
        match &below.what {
            What::BeforeWrite { disk: own, .. } if own == disk => {
                self.snapshot_of(&below).await.map(Some)
            }
            _ => Ok(None),
        }
    }

    /// What a `snapshot-access` node shows, with these bitmaps.
    pub(crate) async fn view(
        &self,
        node: &Node,
        bitmaps: Vec<Arc<Bitmap>>,
    ) -> Result<Arc<dyn Device>> {
        let What::Access { of, .. } = &node.what else { return Err(QmpError::no_node(&node.name)) };
        let below = self.node(of).ok_or_else(|| QmpError::no_node(of))?;
        let snapshot = self.snapshot_of(&below).await?;
        let view = snapshot.view(bitmaps, Trim::Releases);
        view.map(fence).ok_or_else(|| QmpError::generic("the point in time has not begun"))
    }

    /// The disk in use that a point in time shows.
    pub(crate) async fn live_below(&self, node: &Node) -> Result<Arc<Running>> {
        let mut name = node.name.clone();
        for _ in 0..DEPTH_MAX {
            let Some(node) = self.node(&name) else { break };
            name = match &node.what {
                What::Access { of, .. } => of.clone(),
                What::BeforeWrite { disk, .. } => disk.clone(),
                What::Disk { .. } => break,
            };
        }
        match self.running(&name) {
            Some(running) => Ok(running),
            None => Err(QmpError::no_node(&name)),
        }
    }

    /// The node of this name, if it was added.
    pub(crate) fn node(&self, name: &str) -> Option<Arc<Node>> {
        self.state().nodes.iter().find(|node| node.name == name).cloned()
    }

    /// The open disk of the node of this name.
    pub(crate) fn running(&self, node: &str) -> Option<Arc<Running>> {
        let all = self.table.running().into_iter().filter(|one| one.shared.is_some());
        // After a mirror, a disk may have the name of another node, also of one that was deleted.
        all.into_iter().find(|one| self.node_of(one) == node)
    }

    /// The name of the node of a disk.
    pub(crate) fn node_of(&self, running: &Running) -> String {
        let name = node_name(running);
        let moved = self.state().moved.iter().find(|(_, to)| to == name).cloned();
        moved.map_or_else(|| name.to_string(), |(from, _)| from)
    }

    /// The node over this one.
    pub(crate) fn parent(&self, name: &str) -> Option<String> {
        let state = self.state();
        let over = |node: &&Arc<Node>| {
            let disk = match &node.what {
                What::BeforeWrite { disk, .. } => Some(disk.as_str()),
                _ => None,
            };
            disk == Some(name) || node.children.iter().any(|child| child == name)
        };
        state.nodes.iter().find(over).map(|node| node.name.clone())
    }

    /// The node or device of this name; a disk that was closed for a node over it is opened again.
    pub(crate) async fn find(&self, name: &str) -> Result<Found> {
        if let Some(running) = self.running(name) {
            return Ok(Found::Live(running));
        }
        let export = self.state().exports.iter().find(|one| one.id == name).cloned();
        if let Some(running) = export.and_then(|export| self.running(&export.node)) {
            return Ok(Found::Live(running));
        }
        let node = self.node(name).ok_or_else(|| QmpError::no_node(name))?;
        match &node.what {
            What::Access { .. } => Ok(Found::Frozen(node)),
            What::BeforeWrite { disk, .. } => match self.running(disk) {
                Some(running) => Ok(Found::Live(running)),
                None => Err(QmpError::no_node(disk)),
            },
            What::Disk { .. } => match self.parent(name) {
                Some(parent) => {
                    Err(QmpError::generic(format!("Node '{name}' is in use by node '{parent}'")))
                }
                None => Ok(Found::Live(self.open_disk(&node).await?)),
            },
        }
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
        match &node.what {
            What::Disk { .. } => {
                if let Some(running) = self.running(name) {
                    self.table.remove(&running.name).await;
                }
            }
            What::BeforeWrite { disk, begun, .. } => {
                let begun = begun.lock().expect("no panic under this lock").take();
                if let (Some(snapshot), Some(running)) = (begun, self.running(disk)) {
                    self.table.end_snapshot(&running, &snapshot).await;
                }
            }
            What::Access { .. } => {}
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

    /// The kind of the job that uses a node as its target.
    pub(crate) fn user(&self, name: &str) -> Option<&'static str> {
        let state = self.state();
        let uses = state.uses.iter().filter(|one| one.target == name || one.source == name);
        uses.filter_map(|one| self.jobs.named(&one.job))
            .find(|job| !job.status().is_over())
            .map(|job| job.kind())
    }

    /// The node of the disk that was found, or is below.
    pub(crate) async fn disk_of(&self, found: &Found) -> Result<String> {
        Ok(match found {
            Found::Live(running) => self.node_of(running),
            Found::Frozen(frozen) => self.node_of(&*self.live_below(frozen).await?),
        })
    }

    /// Refuses a disk that a job writes: no bitmap and no point in time sees what it writes, and clients
    /// would see a part of it.
    pub(crate) fn check_not_target(&self, node: &str) -> Result<()> {
        let state = self.state();
        let uses = state.uses.iter().filter(|one| one.target == node);
        let mut jobs = uses.filter_map(|one| self.jobs.named(&one.job));
        match jobs.find(|job| !job.status().is_over()) {
            None => Ok(()),
            Some(job) => Err(QmpError::busy(node, job.kind())),
        }
    }

    /// `qom-set` of the property `drive`: an export goes on with another node. A point in time
    /// begins when an export goes on with its node.
    pub(crate) async fn move_drive(&self, arguments: &Arguments) -> Result<()> {
        let path = needed(arguments, "path");
        let found = self.devices().into_iter().find(|device| device.path == path);
        let Some(device) = found else {
            return Err(QmpError::generic(format!("Device '{path}' not found")));
        };
        if needed(arguments, "property") != "drive" {
            let property = needed(arguments, "property");
            return Err(QmpError::generic(format!("Property '{property}' not found")));
        }
        let value = needed(arguments, "value");
        if let Some(node) = self.node(value)
            && let What::BeforeWrite { disk, .. } = &node.what
            && *disk == device.node
        {
            self.snapshot_of(&node).await?;
        } else if value != device.node {
            return Err(QmpError::generic(format!(
                "Node '{value}' is neither the disk of the device nor a copy-before-write node over it"
            )));
        }
        let mut state = self.state();
        match state.exports.iter_mut().find(|export| export.id == device.id) {
            Some(export) => export.drive = value.to_string(),
            None => {
                state.drives.retain(|(id, _)| *id != device.id);
                if value != device.node {
                    state.drives.push((device.id, value.to_string()));
                }
            }
        }
        Ok(())
    }
}

/// The name of the node of an open disk.
pub fn node_name(running: &Running) -> &str {
    if running.name.is_empty() { "disk" } else { &running.name }
}

/// Whether QEMU takes this as the name of a node, an export or a job.
pub fn is_well_formed(name: &str) -> bool {
    let mut letters = name.chars();
    letters.next().is_some_and(|first| first.is_ascii_alphabetic())
        && letters.all(|letter| letter.is_ascii_alphanumeric() || "-._".contains(letter))
}

/// The file of a node, if it is in one.
fn file_of(node: &Node) -> Option<&Path> {
    node.filename.starts_with('/').then(|| Path::new(&node.filename))
}

fn simple(filename: &str, spec: Spec) -> Plan {
    Plan {
        driver: String::new(),
        filename: filename.to_string(),
        spec,
        layers: Vec::new(),
        children: Vec::new(),
    }
}

fn file_plan(options: &Arguments) -> Result<Plan> {
    let path = std::path::absolute(needed(options, "filename"));
    let path = path.map_err(|error| QmpError::generic(plain(&error)))?;
    let shown = path.display().to_string();
    Ok(simple(&shown, Spec::Path(path)))
}

fn nbd_plan(options: &Arguments) -> Result<Plan> {
    let empty = Map::new();
    let server = options.get("server").and_then(Value::as_object).unwrap_or(&empty);
    let export = text(options, "export").unwrap_or_default();
    let escaped = |text: &str| percent_encode(text.as_bytes());
    let uri = match needed(server, "type") {
        "unix" => {
            let socket = escaped(needed(server, "path"));
            format!("nbd+unix:///{}?socket={socket}", escaped(export))
        }
        "inet" => {
            let host = needed(server, "host");
            let port = needed(server, "port");
            let host = if host.contains(':') { format!("[{host}]") } else { host.to_string() };
            format!("nbd://{host}:{port}/{}", escaped(export))
        }
        other => return Err(commands::not_accepted("type", other)),
    };
    let spec = Spec::parse(uri.as_ref())?;
    Ok(simple(&uri, spec))
}

/// How a `copy-before-write` node keeps old contents.
fn begin_of(options: &Arguments) -> Result<Begin> {
    let mut kept = Options {
        // Without a time limit writes wait for the file system, as in QEMU.
        guest_timeout: Duration::from_secs(number(options, "cbw-timeout").unwrap_or(0)),
        on_failure: on_failure(text(options, "on-cbw-error")),
        ..Options::default()
    };
    if let Some(size) = number(options, "min-cluster-size") {
        kept.block = size.max(kept.block);
    }
    Ok(Begin {
        options: kept,
        bitmap: None,
        clears: false,
        start: None,
        trim: Trim::Releases,
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
    pub fn own_bitmaps(&self) -> Option<MutexGuard<'_, Vec<Arc<Bitmap>>>> {
        match &self.what {
            What::Access { bitmaps, .. } => Some(bitmaps.lock().expect("no panic under this lock")),
            _ => None,
        }
    }
}
