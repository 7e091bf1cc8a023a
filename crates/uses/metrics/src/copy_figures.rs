//! The metrics of running copies.

use std::sync::{Arc, Mutex};
use std::time::Instant;

use blockhaul_block::LATENCY_BOUNDS;
use blockhaul_engine::{MeterSnapshot, ProgressSnapshot, RateLimit, RouteBytes};

use crate::copy_state::CopyObserver;
use crate::text::{MetricsWriter, TextSource, seconds_since_1970};

/// Returns the source of the metrics of these copies.
pub fn copy_text(observer: Arc<CopyObserver>) -> TextSource {
    let pace = Mutex::new(SampledRate { since: blockhaul_io::now(), done: 0, rate: 0.0 });
    let began = seconds_since_1970();
    Arc::new(move |figures| write(figures, &observer, began, &pace))
}

/// Bytes per second between the last two samples that were far enough apart.
struct SampledRate {
    since: Instant,
    done: u64,
    rate: f64,
}

impl SampledRate {
    /// Minimum interval of samples.
    const APART: f64 = 0.5;

    fn note(&mut self, done: u64) -> f64 {
        let passed = blockhaul_io::elapsed(self.since).as_secs_f64();
        if passed >= Self::APART {
            self.rate = done.saturating_sub(self.done) as f64 / passed;
            (self.since, self.done) = (blockhaul_io::now(), done);
        }
        self.rate
    }
}

/// The sides of a copy, in the order of the pairs in its counters.
const SIDES: [&str; 2] = ["source", "target"];

/// The counters of a disk at one moment.
struct DiskCounters<'a> {
    name: Option<&'a str>,
    now: ProgressSnapshot,
    meters: MeterSnapshot,
    routes: RouteBytes,
}

impl DiskCounters<'_> {
    /// The label of the disk, if there are several, and one more.
    fn labels<'a>(&'a self, more: Option<(&'a str, &'a str)>) -> Vec<(&'a str, &'a str)> {
        self.name.map(|name| ("disk", name)).into_iter().chain(more).collect()
    }
}

/// A writer of the metrics of copies: metrics of one name are consecutive, disk by disk.
struct CopyFigures<'a> {
    figures: MetricsWriter,
    disks: Vec<DiskCounters<'a>>,
}

impl CopyFigures<'_> {
    /// A metric of the whole copy.
    fn one(&mut self, name: &str, help: &str, value: f64) {
        self.figures.add(&format!("blockhaul_copy_{name}"), "gauge", help, &[], value);
    }

    /// A metric of each disk. If its name ends in `_total` it only grows.
    fn each(&mut self, name: &str, help: &str, value: impl Fn(&DiskCounters<'_>) -> u64) {
        self.by(name, help, "", |disk| [("", value(disk))]);
    }

    /// A metric of each disk for each value of a label.
    fn by<const N: usize>(
        &mut self,
        name: &str,
        help: &str,
        label: &str,
        values: impl Fn(&DiskCounters<'_>) -> [(&'static str, u64); N],
    ) {
        let kind = if name.ends_with("_total") { "counter" } else { "gauge" };
        let name = format!("blockhaul_copy_{name}");
        for disk in &self.disks {
            for (which, value) in values(disk) {
                let labels = disk.labels((!label.is_empty()).then_some((label, which)));
                self.figures.add(&name, kind, help, &labels, value as f64);
            }
        }
    }

    /// When the command began, and how it ended. After the end these stay in a file.
    fn course(&mut self, observer: &CopyObserver, began: f64) {
        let help = "When the command began, in seconds since 1970.";
        self.one("start_time_seconds", help, began);
        let help = "Whether the command has ended.";
        self.one("finished", help, f64::from(u8::from(observer.end().is_some())));
        if let Some(end) = observer.end() {
            let help = "When the command ended, in seconds since 1970.";
            let ended = observer.view().end_time.unwrap_or_default();
            self.one("end_time_seconds", help, ended);
            let help = "Exit status of the command; 0 for success.";
            self.one("exit_status", help, f64::from(end.status));
        }
    }

    fn bytes(&mut self) {
        let help = "Bytes of the source that are complete: written as data, zeroed on the target, zero there \
                    already, copied by an earlier run.";
        self.by("bytes_total", help, "kind", |disk| {
            let now = &disk.now;
            [
                ("data", now.data),
                ("zero", now.zeroed),
                ("skipped", now.skipped),
                ("resumed", now.resumed),
            ]
        });
        self.each("size_bytes", "Bytes of the source; 0 while unknown.", |disk| disk.now.total);
        let help = "Bytes read again to verify or digest them.";
        self.each("verified_bytes_total", help, |disk| disk.now.verified);
    }

    fn speed(&mut self, rate: f64, limit: Option<&RateLimit>) {
        let help = "Bytes per second of all disks since the last scrape.";
        self.one("bytes_per_second", help, rate);
        let (bytes, requests) = limit.map_or((0, 0), RateLimit::limits);
        let help = "Limit of bytes per second; 0 for none.";
        self.one("limit_bytes_per_second", help, bytes as f64);
        let help = "Limit of requests per second; 0 for none.";
        self.one("limit_requests_per_second", help, requests as f64);
    }

    fn requests(&mut self) {
        self.each("requests_in_flight", "Requests in flight.", |disk| disk.meters.in_flight as u64);
        let help = "Current limit of requests in flight (adaptive).";
        self.each("requests_window", help, |disk| disk.now.requests as u64);
        self.each("request_size_bytes", "Request size in bytes.", |disk| disk.now.request_size);
        let help = "Connections in use, to each side.";
        self.each("connections", help, |disk| disk.now.connections as u64);
        let sides = |[source, target]: [u64; 2]| [(SIDES[0], source), (SIDES[1], target)];
        let help = "Requests that were retried.";
        self.by("retries_total", help, "side", |disk| sides(disk.meters.retried));
        let help = "Connections that were reestablished.";
        self.by("reconnects_total", help, "side", |disk| sides(disk.meters.reconnected));
        self.by("route_bytes_total", "Bytes by route.", "route", |disk| disk.routes.named());
    }

    /// Request times.
    fn latencies(&mut self) {
        for disk in &self.disks {
            for (side, latency) in SIDES.into_iter().zip(disk.meters.latency) {
                self.figures.histogram(
                    "blockhaul_copy_request_duration_seconds",
                    "Duration of reads of the source, and of requests that change the target.",
                    &disk.labels(Some(("side", side))),
                    (&LATENCY_BOUNDS, &latency.classes, latency.seconds),
                );
            }
        }
    }
}

fn write(
    figures: MetricsWriter,
    observer: &CopyObserver,
    began: f64,
    pace: &Mutex<SampledRate>,
) -> String {
    let disks: Vec<_> = observer
        .disks()
        .iter()
        .map(|disk| DiskCounters {
            name: disk.name.as_deref(),
            now: disk.progress.snapshot(),
            meters: disk.progress.meters(),
            routes: disk.progress.routes(),
        })
        .collect();
    let done = disks.iter().map(|disk| disk.now.done() + disk.now.verified).sum();
    let rate = pace.lock().expect("no panic under this lock").note(done);
    let mut page = CopyFigures { figures, disks };
    page.course(observer, began);
    page.bytes();
    page.speed(rate, observer.limit());
    page.requests();
    page.latencies();
    page.figures.finish()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::copy_state::{CommandEnd, ObservedCopy};

    #[test]
    fn every_line_is_a_figure_and_names_come_in_one_piece() {
        let disk =
            |name: &str| ObservedCopy { name: Some(name.to_string()), ..ObservedCopy::default() };
        let limit = Some(Arc::new(RateLimit::new(5, 6)));
        let observer = Arc::new(CopyObserver::new(vec![disk("a"), disk("b\"")], limit));
        let text = copy_text(observer.clone());
        let running = text(MetricsWriter::default());
        assert!(running.contains("blockhaul_copy_finished 0\n"), "{running}");
        assert!(!running.contains("blockhaul_copy_exit_status"), "{running}");
        observer.finish(CommandEnd { status: 5, error: None });
        let page = text(MetricsWriter::default());
        assert!(page.contains("blockhaul_copy_exit_status 5\n"), "{page}");
        assert!(page.starts_with("# HELP blockhaul_copy_start_time_seconds "), "{page}");
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
