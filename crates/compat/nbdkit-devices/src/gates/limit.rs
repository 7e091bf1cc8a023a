//! `limit`: how many clients may be connected at a time.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use blockhaul_block::{Error, Kind, Result};
use blockhaul_catalog::{ExportClient, GateKind, ParamKind};
use blockhaul_io::{Notify, Ticket};

use super::rule::{GateClient, GateRule, gate};
use blockhaul_layers::support::param_or;

/// The gate `limit`.
pub static LIMIT: GateKind = GateKind {
    name: "limit",
    summary: "limits the number of connected clients",
    manual: "Clients beyond `limit` are disconnected before the handshake. Each connection of a client \
counts. 0 is no limit. With `wait` they are not disconnected: they wait until others have left.",
    example: r#"
blockhaul serve --layer 'limit?limit=8' sample:64M --run 'blockhaul copy -C 4 "$uri" null:'
"#,
    params: &[
        param_or("limit", ParamKind::Number, "1", "Maximum number of connections; 0: no limit."),
        param_or("wait", ParamKind::Switch, "off", "Further clients wait."),
    ],
    configure: |args, _| {
        let most = args.number("limit").filter(|&most| most > 0).unwrap_or(u64::MAX);
        let waits = args.switch("wait");
        gate(Arc::new(LimitRule {
            most,
            waits,
            inside: AtomicU64::new(0),
            left: Notify::default(),
        }))
    },
};

struct LimitRule {
    most: u64,
    waits: bool,
    inside: AtomicU64,
    left: Notify,
}

impl GateRule for LimitRule {
    fn admit(self: Arc<Self>, _client: &ExportClient) -> Result<Arc<dyn GateClient>> {
        let more = |inside: u64| (inside < self.most).then_some(inside + 1);
        match self.inside.fetch_update(Ordering::SeqCst, Ordering::SeqCst, more) {
            Ok(_) => Ok(Arc::new(LimitClient(self))),
            Err(_) => Err(Error::new(
                Kind::Refused,
                format!("limit: {} clients are connected already", self.most),
            )),
        }
    }

    fn next_change(&self) -> Option<Ticket<()>> {
        self.waits.then(|| self.left.listen())
    }
}

struct LimitClient(Arc<LimitRule>);

impl GateClient for LimitClient {}

impl Drop for LimitClient {
    fn drop(&mut self) {
        self.0.inside.fetch_sub(1, Ordering::SeqCst);
        self.0.left.notify();
    }
}
