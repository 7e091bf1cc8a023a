//! The metrics of a server, for all its clients together and for each export.

use blockhaul_block::{LATENCY_BOUNDS, OpKind};
use blockhaul_server::{ExportCounts, ServerTotals};

use crate::text::MetricsWriter;

/// Adds the metrics of a server: its connections, memory, exports and requests.
pub fn add_server(figures: &mut MetricsWriter, sums: &ServerTotals) {
    let one = |figures: &mut MetricsWriter, name: &str, kind: &str, help: &str, value: f64| {
        figures.add(&format!("blockhaul_serve_{name}"), kind, help, &[], value);
    };
    let help = "Open connections, including handshakes.";
    one(figures, "connections", "gauge", help, sums.open as f64);
    let help = "Connections in their handshake.";
    one(figures, "handshakes", "gauge", help, sums.handshakes as f64);
    let results = [("accepted", sums.accepted), ("refused", sums.refused)];
    for (result, count) in results {
        let help = "Connections accepted, and connections refused because there were too many.";
        let name = "blockhaul_serve_connections_total";
        figures.add(name, "counter", help, &[("result", result)], count as f64);
    }
    let help = "Handshakes that failed: protocol error, failed authentication, timeout, or disconnected to \
                admit others.";
    one(figures, "handshakes_failed_total", "counter", help, sums.failed as f64);
    let help = "Memory in use by requests of all clients.";
    one(figures, "memory_bytes", "gauge", help, sums.memory as f64);
    let help = "Memory limit for requests.";
    one(figures, "memory_limit_bytes", "gauge", help, sums.memory_limit as f64);
    exports(figures, sums);
    for (kind, latency) in OpKind::ALL.into_iter().zip(&sums.latency) {
        figures.histogram(
            "blockhaul_serve_request_duration_seconds",
            "Duration of requests in devices. Of requests that complete at once, one in 16 is measured and \
             represents all.",
            &[("kind", kind.name())],
            (&LATENCY_BOUNDS, &latency.classes, latency.seconds),
        );
    }
}

/// The metrics of each export. Metrics of one name are consecutive.
fn exports(figures: &mut MetricsWriter, sums: &ServerTotals) {
    type Value = fn(&ExportCounts) -> u64;
    let single: [(&str, &str, &str, Value); 3] = [
        ("clients", "gauge", "Connected clients.", |one| one.clients),
        ("requests_in_flight", "gauge", "Requests in progress in devices.", |one| {
            one.counts.in_flight
        }),
        ("request_errors_total", "counter", "Requests that failed.", |one| one.counts.errors),
    ];
    for (name, kind, help, value) in single {
        for (export, one) in &sums.exports {
            let labels = [("export", export.as_str())];
            let name = format!("blockhaul_serve_{name}");
            figures.add(&name, kind, help, &labels, value(one) as f64);
        }
    }
    type ByKind = fn(&ExportCounts) -> [u64; OpKind::ALL.len()];
    let by_kind: [(&str, &str, ByKind); 2] = [
        ("requests_total", "Requests that completed.", |one| one.counts.requests),
        ("bytes_total", "Bytes of requests that succeeded.", |one| one.counts.bytes),
    ];
    for (name, help, values) in by_kind {
        for (export, one) in &sums.exports {
            for (kind, value) in OpKind::ALL.into_iter().zip(values(one)) {
                let labels = [("export", export.as_str()), ("kind", kind.name())];
                let name = format!("blockhaul_serve_{name}");
                figures.add(&name, "counter", help, &labels, value as f64);
            }
        }
    }
}
