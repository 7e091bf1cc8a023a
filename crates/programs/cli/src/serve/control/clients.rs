//! Requests about clients.

use std::sync::{Arc, Weak};

use blockhaul_block::OpKind;
use blockhaul_control::{ClientStatus, Refusal, TlsIdentity};
use blockhaul_server::{ConnectedClient, ConnectionCounts, DisconnectResult, Server};
use serde_json::{Value, json};

use super::operations::{ControlReply, Operations};
use crate::serve::stop::{StopReason, Stopper};

impl Operations {
    /// The connected clients.
    pub fn clients(&self) -> Vec<ClientStatus> {
        self.server.clients().into_iter().map(status).collect()
    }

    pub(super) fn disconnect(&self, number: u64) -> ControlReply {
        let ended = self.server.disconnect(number);
        if ended.is_some() {
            log::info!(connection = number; "connection {number}: disconnected on request");
        }
        match ended {
            Some(DisconnectResult::Requested) => Ok(json!({ "done": "told" })),
            Some(DisconnectResult::Cut) => Ok(json!({ "done": "cut" })),
            None => Err(Refusal::absent(format!("there is no client {number}"))),
        }
    }

    /// Accepts no more clients, and stops when the last one has left.
    pub(super) fn drain(&self) -> Value {
        log::info!("draining on request of the control socket: no more clients are accepted");
        let clients = self.server.drain();
        let clients_are = if clients == 1 { "client is" } else { "clients are" };
        self.notify.status(&format!("draining: {clients} {clients_are} still connected"));
        let server = Arc::downgrade(&self.server);
        let stopper = self.stopper.clone();
        drop(self.worker.spawn(move || end_when_empty(server, stopper)));
        json!({ "clients": clients })
    }
}

/// Ends the server when its last client has disconnected. Does not keep its exports open.
async fn end_when_empty(server: Weak<Server>, stopper: Stopper) {
    while let Some(server) = server.upgrade() {
        let changed = server.changed();
        if server.open() == 0 {
            return stopper.stop(StopReason::Asked);
        }
        drop(server);
        // Lost when the server has ended, which is detected above.
        let _ = changed.await;
    }
}

fn status(client: ConnectedClient) -> ClientStatus {
    let ConnectionCounts { requests, bytes, errors, in_flight, .. } = client.counts;
    let named = |counts: [u64; OpKind::ALL.len()]| {
        let names = OpKind::ALL.into_iter().map(|kind| kind.name().to_string());
        names.zip(counts).collect()
    };
    let tls = client.identity.map(|tls| TlsIdentity { version: tls.version, name: tls.name });
    ClientStatus {
        number: client.number,
        address: client.address,
        export: client.export,
        tls,
        in_flight,
        requests: named(requests),
        bytes: named(bytes),
        errors,
        age: client.age.as_secs_f64(),
        leaving: client.leaving,
    }
}
