//! `exitlast`: stops the server after its last client.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use blockhaul_block::Result;
use blockhaul_catalog::{ExportClient, GateKind, Shutdown};

use super::rule::{ExportChoice, GateClient, GateRule, gate};

/// The gate `exitlast`.
pub static EXITLAST: GateKind = GateKind {
    name: "exitlast",
    summary: "ends the server when the last client has left",
    manual: "The server stops, as on SIGTERM, when the last client that has opened a device disconnects. \
Clients that only list exports do not count. The server waits for the first client without a \
limit.",
    example: r#"
blockhaul serve --background -U once.sock --layer exitlast sample:64M && \
  blockhaul copy 'nbd+unix:///?socket=once.sock' null:
"#,
    params: &[],
    configure: |_, shutdown| {
        gate(Arc::new(ExitLastRule { opened: AtomicU64::new(0), shutdown: shutdown.clone() }))
    },
};

struct ExitLastRule {
    /// Number of connected clients that have opened an export.
    opened: AtomicU64,
    shutdown: Shutdown,
}

impl GateRule for ExitLastRule {
    fn admit(self: Arc<Self>, _client: &ExportClient) -> Result<Arc<dyn GateClient>> {
        Ok(Arc::new(ExitLastClient { rule: self, opened: AtomicBool::new(false) }))
    }
}

struct ExitLastClient {
    rule: Arc<ExitLastRule>,
    opened: AtomicBool,
}

impl GateClient for ExitLastClient {
    fn open(&self, name: &str, _tls: bool) -> Result<ExportChoice> {
        if !self.opened.swap(true, Ordering::SeqCst) {
            self.rule.opened.fetch_add(1, Ordering::SeqCst);
        }
        Ok(ExportChoice::Name(name.to_string()))
    }
}

impl Drop for ExitLastClient {
    fn drop(&mut self) {
        if !self.opened.load(Ordering::SeqCst) {
            return;
        }
        if self.rule.opened.fetch_sub(1, Ordering::SeqCst) == 1 {
            self.rule.shutdown.request("exitlast: the last client has left");
        }
    }
}
