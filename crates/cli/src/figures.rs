//! The figures of copies under way, for `--metrics`.

use std::sync::{Arc, Mutex};
use std::time::Instant;

use engine::{LATENCY_BOUNDS, Progress, Rate};

use crate::metrics::{Figures, Page};

/// A copy that is watched.
#[derive(Clone)]
pub struct Watched {
    /// What it is called, where there are several.
    pub name: Option<String>,
    /// Its counters.
    pub progress: Arc<Progress>,
}

/// The page that tells of these copies, which share a limit.
pub fn page(disks: Vec<Watched>, limit: Option<Arc<Rate>>) -> Page {
    let pace = Mutex::new(Pace { since: Instant::now(), done: 0, rate: 0.0 });
    Arc::new(move || text(&disks, limit.as_deref(), &pace))
}

/// Bytes a second between the last two looks that were not too close.
struct Pace {
    since: Instant,
    done: u64,
    rate: f64,
}

impl Pace {
    /// Looks closer than this tell nothing.
    const APART: f64 = 0.5;

    fn note(&mut self, done: u64) -> f64 {
        let passed = self.since.elapsed().as_secs_f64();
        if passed >= Self::APART {
            self.rate = done.saturating_sub(self.done) as f64 / passed;
            (self.since, self.done) = (Instant::now(), done);
        }
        self.rate
    }
}

fn text(disks: &[Watched], limit: Option<&Rate>, pace: &Mutex<Pace>) -> String {
    let mut figures = Figures::default();
    let all: Vec<_> = disks
        .iter()
        .map(|disk| {
            let progress = &disk.progress;
            (disk.name.as_deref(), progress.snapshot(), progress.meters(), progress.routes())
        })
        .collect();
    let labels = |name: Option<&str>, more: &[(&'static str, &'static str)]| {
        let named = name.map(|name| ("disk", name.to_string()));
        let more = more.iter().map(|(key, value)| (*key, (*value).to_string()));
        named.into_iter().chain(more).collect::<Vec<_>>()
    };
    let mut add = |name: &str, kind: &str, help: &str, labels: Vec<(&str, String)>, value: f64| {
        let labels: Vec<_> = labels.iter().map(|(key, value)| (*key, value.as_str())).collect();
        figures.add(name, kind, help, &labels, value);
    };
    for (disk, now, ..) in &all {
        let kinds = [
            ("data", now.data),
            ("zero", now.zeroed),
            ("skipped", now.skipped),
            ("resumed", now.resumed),
        ];
        for (kind, bytes) in kinds {
            let help = "Bytes of the source that are done: written as data, zeroed on the target, \
                        zero there already, copied by an earlier run.";
            let labels = labels(*disk, &[("kind", kind)]);
            add("blockhaul_copy_bytes_total", "counter", help, labels, bytes as f64);
        }
    }
    for (disk, now, ..) in &all {
        let help = "Bytes of the source; 0 while it is not known.";
        let value = now.total as f64;
        add("blockhaul_copy_size_bytes", "gauge", help, labels(*disk, &[]), value);
    }
    for (disk, now, ..) in &all {
        let help = "Bytes that were read again to verify or digest them.";
        let value = now.verified as f64;
        add("blockhaul_copy_verified_bytes_total", "counter", help, labels(*disk, &[]), value);
    }
    let done = all.iter().map(|(_, now, ..)| now.done() + now.verified).sum();
    let rate = pace.lock().expect("no panic under this lock").note(done);
    let help = "Bytes a second of all disks since this page was read last.";
    add("blockhaul_copy_bytes_per_second", "gauge", help, Vec::new(), rate);
    let (bytes, requests) = limit.map_or((0, 0), Rate::limits);
    let help = "Limit on bytes a second; 0 for none.";
    add("blockhaul_copy_limit_bytes_per_second", "gauge", help, Vec::new(), bytes as f64);
    let help = "Limit on requests a second; 0 for none.";
    add("blockhaul_copy_limit_requests_per_second", "gauge", help, Vec::new(), requests as f64);
    for (disk, _, meters, _) in &all {
        let help = "Requests in flight.";
        let value = meters.in_flight as f64;
        add("blockhaul_copy_requests_in_flight", "gauge", help, labels(*disk, &[]), value);
    }
    for (disk, now, ..) in &all {
        let help = "Requests that may be in flight, as far as is found to pay.";
        let value = now.requests as f64;
        add("blockhaul_copy_requests_window", "gauge", help, labels(*disk, &[]), value);
    }
    for (disk, now, ..) in &all {
        let help = "Bytes of a request.";
        let value = now.request_size as f64;
        add("blockhaul_copy_request_size_bytes", "gauge", help, labels(*disk, &[]), value);
    }
    for (disk, now, ..) in &all {
        let help = "Connections in use to each side.";
        let value = now.connections as f64;
        add("blockhaul_copy_connections", "gauge", help, labels(*disk, &[]), value);
    }
    const SIDES: [&str; 2] = ["source", "target"];
    for (disk, _, meters, _) in &all {
        for (side, count) in SIDES.into_iter().zip(meters.retried) {
            let help = "Requests that were repeated.";
            let labels = labels(*disk, &[("side", side)]);
            add("blockhaul_copy_retries_total", "counter", help, labels, count as f64);
        }
    }
    for (disk, _, meters, _) in &all {
        for (side, count) in SIDES.into_iter().zip(meters.reconnected) {
            let help = "Connections that were made again.";
            let labels = labels(*disk, &[("side", side)]);
            add("blockhaul_copy_reconnects_total", "counter", help, labels, count as f64);
        }
    }
    for (disk, .., routes) in &all {
        for (route, bytes) in routes.named() {
            let help = "Bytes by the way they went.";
            let labels = labels(*disk, &[("route", route)]);
            add("blockhaul_copy_route_bytes_total", "counter", help, labels, bytes as f64);
        }
    }
    for (disk, _, meters, _) in &all {
        for (side, latency) in SIDES.into_iter().zip(meters.latency) {
            let labels = labels(*disk, &[("side", side)]);
            let labels: Vec<_> = labels.iter().map(|(key, value)| (*key, value.as_str())).collect();
            figures.histogram(
                "blockhaul_copy_request_seconds",
                "Time until a read of the source, or what changes the target, was answered.",
                &labels,
                (&LATENCY_BOUNDS, &latency.classes, latency.seconds),
            );
        }
    }
    figures.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_line_is_a_figure_and_names_come_in_one_piece() {
        let disk = |name: &str| Watched { name: Some(name.to_string()), progress: Arc::default() };
        let page = page(vec![disk("a"), disk("b\"")], Some(Arc::new(Rate::new(5, 6))))();
        let mut seen: Vec<&str> = Vec::new();
        for line in page.lines() {
            if let Some(rest) = line.strip_prefix("# TYPE ") {
                let name = rest.split(' ').next().unwrap();
                assert!(!seen.contains(&name), "{name} twice");
                seen.push(name);
            } else if !line.starts_with('#') {
                let (head, value) = line.rsplit_once(' ').unwrap();
                assert!(head.starts_with(seen.last().unwrap()), "{line}");
                value.parse::<f64>().unwrap();
            }
        }
        assert!(seen.len() >= 14, "{seen:?}");
        assert!(page.contains("blockhaul_copy_bytes_total{disk=\"a\",kind=\"data\"} 0"), "{page}");
        assert!(page.contains("{disk=\"b\\\"\",side=\"target\",le=\"+Inf\"} 0"), "{page}");
        assert!(page.contains("blockhaul_copy_limit_bytes_per_second 5\n"), "{page}");
    }
}
