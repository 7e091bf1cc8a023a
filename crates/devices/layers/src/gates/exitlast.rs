//! `exitlast`: the server ends with its last client.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use blockhaul_block::Result;
use blockhaul_catalog::{Client, LayerKind, Param};

use super::{Choice, Guest, Rule, gate};

/// The layer `exitlast`.
pub static EXITLAST: LayerKind = LayerKind {
    name: "exitlast",
    summary: "ends the server when the last client has left",
    manual: "The server stops, as by SIGTERM, when no client is left that has opened a device. Clients \
that only ask for the list of exports do not count, and before the first one comes the server waits as \
long as it takes.",
    example: r#"
blockhaul serve -U once.sock --layer exitlast sample:64M && \
  blockhaul copy 'nbd+unix:///?socket=once.sock' null:
"#,
    needs_content: false,
    writes_below: true,
    params: NONE,
    changeable: &[],
    configure: |_| gate(Arc::new(Last(AtomicU64::new(0)))),
};

const NONE: &[Param] = &[];

/// How many clients have opened something.
struct Last(AtomicU64);

impl Rule for Last {
    fn admit(self: Arc<Self>, _client: &Client) -> Result<Arc<dyn Guest>> {
        Ok(Arc::new(Inside { rule: self, opened: AtomicBool::new(false) }))
    }
}

struct Inside {
    rule: Arc<Last>,
    opened: AtomicBool,
}

impl Guest for Inside {
    fn open(&self, name: &str, _tls: bool) -> Result<Choice> {
        if !self.opened.swap(true, Ordering::SeqCst) {
            self.rule.0.fetch_add(1, Ordering::SeqCst);
        }
        Ok(Choice::Name(name.to_string()))
    }
}

impl Drop for Inside {
    fn drop(&mut self) {
        if self.opened.load(Ordering::SeqCst) && self.rule.0.fetch_sub(1, Ordering::SeqCst) == 1 {
            blockhaul_os::end_this_process();
        }
    }
}
