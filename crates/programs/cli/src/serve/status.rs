//! `--page`: the state of a server as JSON.

use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use blockhaul_block::OpKind;
use blockhaul_control::ExportStatus;
use blockhaul_jobs::Job;
use blockhaul_metrics::{StateSource as Status, latencies};
use blockhaul_transfer::without_secrets;
use serde_json::{Value, json};

use super::control::{Operations, SharedOperations, reply};

/// Maximum number of clients and of exports in a snapshot; their numbers are always complete.
const SHOWN_MAX: usize = 200;

/// The snapshots of a server.
pub struct StatusPage {
    /// The server. It does not keep its exports open.
    operations: SharedOperations,
    started: Instant,
    /// The last snapshot.
    end: OnceLock<Value>,
}

impl StatusPage {
    /// Those of this server, which may start later.
    pub fn new(operations: &SharedOperations) -> StatusPage {
        StatusPage { operations: operations.clone(), started: Instant::now(), end: OnceLock::new() }
    }

    /// Makes snapshots; the last one after the end.
    pub fn status(self: &Arc<StatusPage>) -> Status {
        let page = self.clone();
        Arc::new(move || page.end.get().cloned().unwrap_or_else(|| page.now()))
    }

    /// Takes the last snapshot, when the server has stopped.
    pub fn end(&self, operations: &Operations) {
        let mut last = self.snapshot(operations);
        last["finished"] = true.into();
        // A second end changes nothing.
        let _ = self.end.set(last);
    }

    fn now(&self) -> Value {
        let mut snapshot = json!({ "command": "serve", "finished": false });
        self.operations.with(|operations| snapshot = self.snapshot(operations));
        snapshot
    }

    fn snapshot(&self, operations: &Operations) -> Value {
        let sums = operations.server.sums();
        let by_kind =
            |counts: fn(&blockhaul_server::ConnectionCounts) -> [u64; OpKind::ALL.len()]| {
                let kinds = OpKind::ALL.into_iter().enumerate().map(|(index, kind)| {
                    let all = sums.exports.values().map(|export| counts(&export.counts)[index]);
                    (kind.name().to_string(), Value::from(all.sum::<u64>()))
                });
                Value::Object(kinds.collect())
            };
        let mut clients = operations.clients();
        clients.truncate(SHOWN_MAX);
        let mut exports = operations.exports();
        let exports_count = exports.len();
        exports.truncate(SHOWN_MAX);
        let moved = |export: &ExportStatus| {
            let counts = sums.exports.get(&export.name).map(|one| one.counts.bytes);
            let kinds = OpKind::ALL.map(OpKind::name).into_iter();
            json!(kinds.zip(counts.unwrap_or_default()).collect::<BTreeMap<_, _>>())
        };
        let exports: Vec<_> =
            exports.iter().map(|export| without_parameters(export, moved(export))).collect();
        let all = operations.jobs.all();
        let jobs: Vec<_> =
            all[all.len().saturating_sub(SHOWN_MAX)..].iter().map(|job| shown_job(job)).collect();
        let errors = sums.exports.values().map(|export| export.counts.errors).sum::<u64>();
        let in_flight = sums.exports.values().map(|export| export.counts.in_flight).sum::<u64>();
        let kinds = OpKind::ALL.into_iter().map(OpKind::name);
        json!({
            "command": "serve",
            "version": env!("CARGO_PKG_VERSION"),
            "finished": false,
            "elapsed": self.started.elapsed().as_secs_f64(),
            "connections": sums.open,
            "handshakes": sums.handshakes,
            "accepted": sums.accepted,
            "refused": sums.refused,
            "handshakes_failed": sums.failed,
            "memory": sums.memory,
            "memory_limit": sums.memory_limit,
            "in_flight": in_flight,
            "requests": by_kind(|counts| counts.requests),
            "bytes": by_kind(|counts| counts.bytes),
            "errors": errors,
            "latency": latencies(kinds.zip(sums.latency)),
            "clients": clients,
            "exports": exports,
            "exports_count": exports_count,
            "tls": operations.secured.audience(),
            "jobs": jobs,
        })
    }
}

/// An export without what only its operator may read: parameters of the device and of layers.
fn without_parameters(export: &ExportStatus, bytes: Value) -> Value {
    let mut shown = json!(export);
    shown["bytes"] = bytes;
    shown["device"] = without_secrets(&export.device).into();
    shown["layers"] = export.layers.iter().map(|layer| &*layer.name).collect();
    shown
}

/// A job without parameters of its target.
fn shown_job(job: &Job) -> Value {
    let mut reply = reply(job);
    reply.report.target = without_secrets(&reply.report.target);
    json!(reply)
}
