//! What came of a load, as text and JSON.

use std::collections::BTreeMap;

use serde::Serialize;

use super::histogram::Percentiles;
use super::{AccessOrder, LoadResult, LoadWork};
use crate::error::{MeasureError, Result};
use crate::text::number;

/// The whole report.
#[derive(Clone, Debug, Serialize)]
pub struct LoadReport {
    /// The server as it was typed.
    pub device: String,
    /// Size of the export in bytes.
    pub size: u64,
    /// Whether it went through TLS.
    pub tls: bool,
    /// Connections.
    pub connections: usize,
    /// Requests in flight on each of them.
    pub requests_in_flight: usize,
    /// Bytes of a request.
    pub request_size: u64,
    /// `random` or `sequential`.
    pub pattern: &'static str,
    /// Requests of 100 that read.
    pub reads_percent: u64,
    /// Bytes from the beginning of the device that were used.
    pub span: u64,
    /// Where random requests went.
    pub seed: u64,
    /// From the first request to the last reply.
    pub took_s: f64,
    /// Requests that were answered.
    pub requests: u64,
    /// Bytes of successful requests.
    pub bytes: u64,
    /// Requests in a second.
    pub requests_per_second: f64,
    /// Bytes in a second.
    pub bytes_per_second: f64,
    /// How long requests took.
    pub latency: Option<Percentiles>,
    /// Processor time of this program.
    pub own_cpu_s: f64,
    /// Requests that the server refused.
    pub errors: u64,
    /// The same, by kind.
    pub error_kinds: BTreeMap<String, u64>,
}

impl LoadReport {
    pub(super) fn new(device: String, work: &LoadWork, measured: &LoadResult) -> LoadReport {
        let tally = &measured.tally;
        let took_s = measured.took.as_secs_f64();
        LoadReport {
            device,
            size: measured.size,
            tls: measured.tls,
            connections: work.connections,
            requests_in_flight: work.requests,
            request_size: work.size,
            pattern: match work.order {
                AccessOrder::Random => "random",
                AccessOrder::Sequential => "sequential",
            },
            reads_percent: work.reads,
            span: work.span_of(measured.size),
            seed: work.seed,
            took_s,
            requests: tally.requests,
            bytes: tally.bytes,
            requests_per_second: tally.requests as f64 / took_s,
            bytes_per_second: tally.bytes as f64 / took_s,
            latency: tally.latency.percentiles(),
            own_cpu_s: measured.own_cpu.as_secs_f64(),
            errors: tally.errors.values().sum(),
            error_kinds: tally.errors.clone(),
        }
    }

    pub(super) fn json(&self) -> Result<String> {
        serde_json::to_string_pretty(self)
            .map(|text| text + "\n")
            .map_err(|error| MeasureError::new(format!("cannot print JSON: {error}")))
    }

    pub(super) fn text(&self) -> String {
        let what = match self.reads_percent {
            100 => "reads".to_owned(),
            0 => "writes".to_owned(),
            reads => format!("requests, {reads} of 100 reads,"),
        };
        let mut out = format!(
            "{}: {} connections, {} requests on each, {} {what} of {} bytes in {} bytes{}\n",
            self.device,
            self.connections,
            self.requests_in_flight,
            self.pattern,
            self.request_size,
            self.span,
            if self.tls { ", TLS" } else { "" },
        );
        let mut line = |name: &str, text: String| out.push_str(&format!("{name:10} {text}\n"));
        line(
            "requests",
            format!(
                "{} in {} s: {}/s",
                self.requests,
                number(self.took_s),
                number(self.requests_per_second)
            ),
        );
        let rate = number(self.bytes_per_second / 1e6);
        line("bytes", format!("{}: {rate} MB/s", self.bytes));
        if let Some(latency) = &self.latency {
            let text = format!(
                "median {} us, 90 % {}, 99 % {}, 99.9 % {}, maximum {}",
                number(latency.median_us),
                number(latency.p90_us),
                number(latency.p99_us),
                number(latency.p999_us),
                number(latency.max_us)
            );
            line("latency", text);
        }
        let each = self.own_cpu_s * 1e6 / self.requests.max(1) as f64;
        let text = format!("{} s, {} us per request", number(self.own_cpu_s), number(each));
        line("own CPU", text);
        let kinds: Vec<String> =
            self.error_kinds.iter().map(|(kind, count)| format!("{count} {kind}")).collect();
        if kinds.is_empty() {
            line("errors", "0".to_owned());
        } else {
            line("errors", format!("{}: {}", self.errors, kinds.join(", ")));
        }
        out
    }
}
