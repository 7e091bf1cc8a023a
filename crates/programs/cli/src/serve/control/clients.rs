//! Requests about clients.

use std::sync::{Arc, Weak};

use blockhaul_block::OpKind;
use blockhaul_server::{Client, Counts, Disconnected, Server};
use serde_json::{Map, Value, json};

use super::operations::{Operations, Refusal, Reply};
use crate::serve::stop::{Stop, Stopper};

impl Operations {
    pub(super) fn list_clients(&self) -> Value {
        json!({ "clients": self.server.clients().iter().map(client).collect::<Vec<_>>() })
    }

    pub(super) fn disconnect(&self, number: u64) -> Reply {
        let ended = self.server.disconnect(number);
        if ended.is_some() {
            log::info!(connection = number; "connection {number}: disconnected on request");
        }
        match ended {
            Some(Disconnected::Requested) => Ok(json!({ "done": "told" })),
            Some(Disconnected::Cut) => Ok(json!({ "done": "cut" })),
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
            return stopper.stop(Stop::Asked);
        }
        drop(server);
        // Lost when the server has ended, which is detected above.
        let _ = changed.await;
    }
}

/// A client, as `ctl clients` prints it.
pub fn client(client: &Client) -> Value {
    let Counts { requests, bytes, errors, in_flight, .. } = client.counts;
    let named = |counts: [u64; OpKind::ALL.len()]| {
        let all = OpKind::ALL.into_iter().zip(counts);
        all.map(|(kind, count)| (kind.name().to_string(), json!(count))).collect::<Map<_, _>>()
    };
    let tls = client.identity.as_ref();
    json!({
        "number": client.number,
        "address": client.address,
        "export": client.export,
        "tls": tls.map(|tls| json!({ "version": tls.version, "name": tls.name })),
        "in_flight": in_flight,
        "requests": named(requests),
        "bytes": named(bytes),
        "errors": errors,
        "age": client.age.as_secs_f64(),
        "leaving": client.leaving,
    })
}
