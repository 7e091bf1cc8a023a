//! Clients that use another protocol than NBD, with the same exports, limits, counters and control.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use blockhaul_block::{Device, Flushes, OpKind};
use blockhaul_catalog::{DeviceSharing, Export};
use blockhaul_io::{Pool, Stream};

use crate::disconnect::DisconnectReason;
use crate::export_lookup::{ExportLookup, Visitor};
use crate::log_fields::record;
use crate::{ConnectionEntry, Server};

/// A client that has opened an export. It leaves when this is dropped.
pub struct AttachedClient {
    entered: ConnectionEntry,
    export: Export,
    flushes: Arc<Flushes>,
    visitor: Visitor,
}

impl Server {
    /// Admits a client that has connected to a local socket, and opens an export for it; the empty
    /// name selects the default one. Its socket is shut down for reading when the client is to end.
    ///
    /// # Errors
    /// If there are too many clients, a gate refuses it, or the export cannot be opened; it is logged.
    pub async fn attach(
        self: &Arc<Self>,
        socket: OwnedFd,
        export: &str,
    ) -> Result<AttachedClient, String> {
        let entered = self.enter(socket).ok_or("not admitted")?;
        let connection = entered.connection.clone();
        if self.is_stopping() || self.is_draining() {
            return Err("the server stops".into());
        }
        let opened = self.open_for(&entered, export).await;
        let (export, visitor) = opened.inspect_err(|why| {
            self.control.failed.fetch_add(1, Ordering::Relaxed);
            self.log_limit().ended(&connection, why, true);
        })?;
        if !self.clients.settle(connection.id) {
            return Err(DisconnectReason::Crowded.to_string());
        }
        connection.chose(&export.name);
        let id = connection.id;
        let peer = &connection.peer;
        let name = &export.name;
        record!(Info, connection; "connection {id} from {peer} uses export \"{name}\"");
        let flushes = self.flushes(&export);
        Ok(AttachedClient { entered, export, flushes, visitor })
    }

    async fn open_for(
        &self,
        entered: &ConnectionEntry,
        export: &str,
    ) -> Result<(Export, Visitor), String> {
        let connection = entered.connection.clone();
        let stream = entered.stream.clone();
        let entering =
            ExportLookup::enter(&self.config, self.limits(), &self.unopened, connection, stream);
        let mut lookup = entering.await?;
        let found = lookup.find(export).await;
        let export = found.map_err(|refusal| refusal.text)?;
        Ok((export, lookup.visitor()))
    }
}

impl AttachedClient {
    /// The client's socket.
    pub fn stream(&self) -> &Arc<Stream> {
        &self.entered.stream
    }

    /// The number of its connection.
    pub fn number(&self) -> u64 {
        self.entered.connection.id
    }

    /// The device of its export, fenced.
    pub fn device(&self) -> &Arc<dyn Device> {
        &self.export.device
    }

    /// Name of its export.
    pub fn export(&self) -> &str {
        &self.export.name
    }

    /// Flushes of all clients of the storage.
    pub fn flushes(&self) -> &Arc<Flushes> {
        &self.flushes
    }

    /// Its share of the memory for requests.
    pub fn pool(&self) -> Pool {
        let limits = self.entered.server.limits();
        self.entered.server.share(&limits, self.export.device.facts().in_flight)
    }

    /// The device of the export as it is now, for clients whose disk may change its size; none if
    /// each client has a device of its own, or it cannot be opened.
    pub async fn reopen(&self) -> Option<Arc<dyn Device>> {
        if !matches!(self.export.sharing, DeviceSharing::All(_)) {
            return None;
        }
        let opened = self.visitor.visit.open(&self.export.name, false).await;
        opened.ok().flatten().map(|export| export.device)
    }

    /// A device has a request that did not complete at once. On the worker that submitted it.
    pub fn begun(&self) {
        self.entered.server.all_in_flight.add();
        self.entered.connection.counters.one_more_in_progress();
    }

    /// It has completed. On the same worker.
    pub fn ended(&self) {
        let server = &self.entered.server;
        // It never changes.
        server.all_in_flight.remove(1, server.config.limits.requests_all);
        self.entered.connection.counters.one_less_in_progress();
    }

    /// A request was answered; `bytes` is none for one that failed.
    pub fn answered(&self, kind: OpKind, bytes: Option<u64>) {
        self.entered.connection.counters.answered_by_many(kind, bytes);
    }

    /// So many requests took this time each.
    pub fn took(&self, kind: OpKind, time: Duration, count: u64) {
        self.entered.server.control.times().took(kind, time, count);
    }

    /// Logs how it has ended.
    pub fn log_end(&self, result: &Result<(), String>) {
        let connection = &self.entered.connection;
        let id = connection.id;
        match result {
            Ok(()) => record!(Info, connection; "connection {id} ended"),
            Err(why) => self.entered.server.log_limit().ended(connection, why, false),
        }
    }
}

impl Drop for AttachedClient {
    fn drop(&mut self) {
        // Storage with a device for each client closes it with the socket.
        self.entered.stream.shutdown();
        self.entered.server.served.fetch_add(1, Ordering::Relaxed);
    }
}
