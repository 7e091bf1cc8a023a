//! The NBD server and its exports, as the monitor protocol starts and stops them.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use blockhaul_block::{Can, Device};
use blockhaul_catalog::{HandleWrapper, SharedDevice};
use blockhaul_io::{Listener, plain};
use blockhaul_jobs::OpenExport;
use blockhaul_metrics::peer_listener;
use serde_json::{Value, json};

use crate::commands::{self, Arguments, list, needed, switch, text};
use crate::error::{QmpError, Result};
use crate::monitor::Monitor;
use crate::nodes::{NodeDisk, is_well_formed, node_name};
use crate::state::{NbdServer, Node, NodeContents, NodeExport};

/// A device that a guest writes to: an export.
pub struct GuestDevice {
    pub id: String,
    pub node: String,
    /// For `qom-set`.
    pub path: String,
}

impl Monitor {
    /// `nbd-server-start`.
    pub(crate) async fn start_nbd_server(&self, arguments: &Arguments) -> Result<()> {
        if self.is_serving() {
            return Err(QmpError::generic("NBD server already running"));
        }
        if let Some(id) = text(arguments, "tls-creds") {
            return Err(QmpError::generic(format!("No TLS credentials with id '{id}'")));
        }
        if text(arguments, "tls-authz").is_some() {
            return Err(QmpError::generic("Parameter 'tls-authz' is not supported"));
        }
        let (listeners, socket) = self.nbd_listeners(arguments).await?;
        let stop = listeners.into_iter().map(|listener| {
            let (completer, mut stopped) = blockhaul_io::ticket();
            let server = self.server.clone();
            drop(blockhaul_io::spawn(async move {
                peer_listener::unless(&mut stopped, server.listen(listener)).await;
            }));
            completer
        });
        self.state().nbd_server = Some(NbdServer::new(stop.collect(), socket));
        Ok(())
    }

    /// Listeners at the address of `nbd-server-start`, and the path of its Unix socket.
    async fn nbd_listeners(
        &self,
        arguments: &Arguments,
    ) -> Result<(Vec<Listener>, Option<PathBuf>)> {
        let empty = Arguments::new();
        let address = arguments.get("addr").and_then(Value::as_object).unwrap_or(&empty);
        // SocketAddress has its members beside the type, SocketAddressLegacy in "data".
        let data = address.get("data").and_then(Value::as_object).unwrap_or(address);
        let member = |name: &str| {
            let found = data.get(name).and_then(Value::as_str);
            found.ok_or_else(|| QmpError::generic(format!("Parameter 'addr.{name}' is missing")))
        };
        match needed(address, "type") {
            "unix" => {
                let path = std::path::absolute(member("path")?);
                let path = path.map_err(|error| QmpError::generic(plain(&error)))?;
                Ok((vec![listen_unix(&path)?], Some(path)))
            }
            "inet" => Ok((self.listen_tcp(member("host")?, member("port")?).await?, None)),
            other => Err(commands::not_accepted("addr.type", other)),
        }
    }

    async fn listen_tcp(&self, host: &str, port: &str) -> Result<Vec<Listener>> {
        let Ok(number) = port.parse() else {
            return Err(QmpError::generic(format!(
                "Parameter 'port' is not a port number: '{port}'"
            )));
        };
        let host = Some(host).filter(|host| !host.is_empty()).map(str::to_string);
        Ok(self.host.bind_tcp(host, number).await?)
    }

    /// Whether NBD clients can connect.
    pub(crate) fn is_serving(&self) -> bool {
        self.listens_anyway || self.state().nbd_server.is_some()
    }

    /// `nbd-server-stop`: ends exports and clients, too.
    pub(crate) async fn stop_nbd_server(&self) -> Result<()> {
        if !self.is_serving() {
            return Err(QmpError::generic("NBD server not running"));
        }
        if self.listens_anyway {
            let text = "the NBD server was started by the command line, and stops with the program";
            return Err(QmpError::generic(text));
        }
        let server = self.state().nbd_server.take();
        drop(server);
        let all: Vec<_> = self.state().exports.iter().map(|export| export.id.clone()).collect();
        for id in all {
            self.remove_export(&id, true).await?;
        }
        Ok(())
    }

    /// `block-export-add`.
    pub(crate) async fn add_export(&self, arguments: &Arguments) -> Result<()> {
        let id = needed(arguments, "id");
        let node = needed(arguments, "node-name");
        self.check_new_export(id, arguments)?;
        let name = text(arguments, "name").unwrap_or(node);
        self.check_export_name(name)?;
        let found = self.find(node).await;
        let found = found.map_err(|error| {
            if self.node(node).is_none() {
                QmpError::generic(format!("Cannot find device='' nor node-name='{node}'"))
            } else {
                error
            }
        })?;
        self.check_not_target(&self.disk_of(&found).await?)?;
        let shared = match &found {
            NodeDisk::Live(running) => self.live_export(running, name, arguments).await?,
            NodeDisk::Frozen(frozen) => self.frozen_export(frozen, name, arguments).await?,
        };
        self.table.add_name(name, shared)?;
        let disk = match &found {
            NodeDisk::Live(running) => self.node_of(running),
            NodeDisk::Frozen(frozen) => frozen.name.clone(),
        };
        self.state().exports.push(NodeExport {
            id: id.to_string(),
            node: disk,
            drive: node.to_string(),
            name: name.to_string(),
        });
        Ok(())
    }

    /// Refuses an export with a wrong or used identifier, and exports of any kind without a server.
    fn check_new_export(&self, id: &str, arguments: &Arguments) -> Result<()> {
        if !is_well_formed(id) {
            return Err(QmpError::generic("Invalid block export id"));
        }
        if !self.is_serving() {
            return Err(QmpError::generic("NBD server not running"));
        }
        if switch(arguments, "allocation-depth", false) {
            return Err(QmpError::generic("Parameter 'allocation-depth' is not supported"));
        }
        if self.export_ids().iter().any(|other| other == id) {
            return Err(QmpError::generic(format!("Block export id '{id}' is already in use")));
        }
        Ok(())
    }

    fn check_export_name(&self, name: &str) -> Result<()> {
        let frozen = self.state().exports.iter().any(|export| export.name == name)
            || self.table.exports().iter().any(|one| one.served && one.name == name);
        if frozen {
            Err(QmpError::generic(format!("NBD server already has export named '{name}'")))
        } else {
            Ok(())
        }
    }

    /// Refuses bitmaps that the disk does not have, and those that change in an export that does
    /// not.
    async fn check_bitmaps(
        &self,
        running: &OpenExport,
        node: &str,
        bitmaps: &[Value],
        writable: bool,
    ) -> Result<()> {
        for bitmap in bitmaps {
            let found = self.bitmap_named(node, bitmap).await?;
            if !running.bitmaps().iter().any(|own| Arc::ptr_eq(own, &found)) {
                let text = format!("Bitmap '{}' is not one of node '{node}'", found.name());
                return Err(QmpError::generic(text));
            }
            if !writable && found.is_enabled() {
                return Err(QmpError::generic(format!(
                    "Enabled bitmap '{}' incompatible with readonly export",
                    found.name()
                )));
            }
        }
        Ok(())
    }

    /// An export of a disk in use. A point in time begins, if the node keeps one.
    async fn live_export(
        &self,
        running: &OpenExport,
        name: &str,
        arguments: &Arguments,
    ) -> Result<Arc<SharedDevice>> {
        let node = needed(arguments, "node-name");
        let writable = switch(arguments, "writable", false);
        if let Some(over) = self.node(node).filter(is_before_write) {
            self.snapshot_of(&over).await?;
        }
        self.check_bitmaps(running, node, list(arguments, "bitmaps"), writable).await?;
        let Some(shared) = &running.shared else { return Err(QmpError::no_node(&running.name)) };
        let can = shared.switch().device().facts().can;
        if writable && !can.contains(Can::WRITE) {
            return Err(QmpError::generic("Block node is read-only"));
        }
        let table = self.table.clone();
        let readonly: HandleWrapper =
            Arc::new(move |device: Arc<dyn Device>| table.readonly(&device));
        let description = needed(arguments, "description");
        Ok(shared.beside(name, description, (!writable).then_some(readonly)))
    }

    /// An export of a point in time.
    async fn frozen_export(
        &self,
        frozen: &Node,
        name: &str,
        arguments: &Arguments,
    ) -> Result<Arc<SharedDevice>> {
        let node = needed(arguments, "node-name");
        let mut shown = Vec::new();
        for bitmap in list(arguments, "bitmaps") {
            shown.push(self.bitmap_named(node, bitmap).await?);
        }
        let view = self.view(frozen, shown).await?;
        let writable = switch(arguments, "writable", false);
        let view = if writable { view } else { self.table.readonly(&view)? };
        Ok(SharedDevice::new(name, needed(arguments, "description"), view))
    }

    /// `block-export-del`.
    pub(crate) async fn remove_export(&self, id: &str, hard: bool) -> Result<()> {
        let found = self.state().exports.iter().find(|export| export.id == id).cloned();
        let Some(export) = found else {
            let text = if self.export_ids().iter().any(|other| other == id) {
                format!("export '{id}' is one of the command line")
            } else {
                format!("Export '{id}' is not found")
            };
            return Err(QmpError::generic(text));
        };
        let clients = self.server.clients();
        let clients: Vec<_> =
            clients.iter().filter(|client| client.export.as_ref() == Some(&export.name)).collect();
        if !clients.is_empty() && !hard {
            let text = format!("export '{id}' still in use");
            return Err(QmpError::generic(text));
        }
        self.table.remove_name(&export.name);
        for client in clients {
            self.server.disconnect(client.number);
        }
        self.state().exports.retain(|other| other.id != id);
        self.queues.send_event("BLOCK_EXPORT_DELETED", json!({ "id": id }));
        Ok(())
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
            && let NodeContents::BeforeWrite { disk, .. } = &node.contents
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

    /// Identifiers of all exports: those that were added here, and those of the server.
    fn export_ids(&self) -> Vec<String> {
        self.devices().into_iter().map(|device| device.id).collect()
    }

    /// Everything that guests write to.
    pub(crate) fn devices(&self) -> Vec<GuestDevice> {
        let served = self.table.exports();
        let served = served.iter().filter(|one| one.served && one.shared.is_some());
        let served = served.map(|one| GuestDevice {
            id: node_name(one).to_string(),
            node: self.node_of(one),
            path: format!("/blockhaul/exports/{}", node_name(one)),
        });
        let mut all: Vec<_> = served.collect();
        let state = self.state();
        all.extend(state.exports.iter().map(|export| GuestDevice {
            id: export.id.clone(),
            node: export.node.clone(),
            path: format!("/blockhaul/exports/{}", export.id),
        }));
        all
    }

    /// `query-block-exports`.
    pub(crate) fn described_exports(&self) -> Value {
        let described = |device: GuestDevice| {
            json!({
                "id": device.id, "type": "nbd", "node-name": device.node, "shutting-down": false,
            })
        };
        self.devices().into_iter().rev().map(described).collect()
    }
}

fn is_before_write(node: &Arc<Node>) -> bool {
    matches!(node.contents, NodeContents::BeforeWrite { .. })
}

fn listen_unix(path: &Path) -> Result<Listener> {
    let listener = Listener::replace_unix(path);
    listener.map_err(|error| {
        let path = path.display();
        let why = plain(&error);
        QmpError::generic(format!("Failed to bind socket to {path}: {why}"))
    })
}
