//! `stats`: counts requests, bytes, errors and time, and prints a table when the device is closed.

use std::fmt::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use blockhaul_block::{Device, Facts, OpKind, Outcome, PendingRequest, Request, Result};
use blockhaul_catalog::{Layer, LayerKind, ParamValues};

use crate::out::LineOutput;

/// The layer `stats`.
pub static STATS: LayerKind = LayerKind {
    name: "stats",
    summary: "counts requests, bytes, errors and time, and prints them on exit",
    manual: "When the device is closed, a table shows for each kind of request their number, how many \
failed, how many bytes they moved, and their average and longest duration.",
    example: r#"
blockhaul serve --layer stats sample:64M --run 'blockhaul copy "$uri" null:'
"#,
    needs_content: false,
    writes_below: true,
    transparent: true,
    params: &[LineOutput::PARAM, LineOutput::APPEND],
    changeable: &[],
    configure: |args| configure(args),
};

fn configure(args: &ParamValues) -> Result<Arc<dyn Layer>> {
    let out = Some(LineOutput::open("stats", args)?);
    Ok(Arc::new(StatsLayer { table: Arc::new(StatsTable { rows: Default::default(), out }) }))
}

/// A stats layer whose owner reads the counts; it prints nothing.
#[derive(Default)]
pub struct StatsLayer {
    table: Arc<StatsTable>,
}

impl StatsLayer {
    /// A layer with all counts 0.
    pub fn new() -> StatsLayer {
        StatsLayer::default()
    }

    /// The counts of one kind of request, over all handles.
    pub fn counts(&self, kind: OpKind) -> OperationCounts {
        self.table.rows[kind as usize].read()
    }
}

impl Layer for StatsLayer {
    fn wrap(&self, inner: Arc<dyn Device>) -> Result<Arc<dyn Device>> {
        Ok(Arc::new(StatsDevice { inner, table: self.table.clone() }))
    }
}

/// The counts of one kind of request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct OperationCounts {
    /// Submitted requests.
    pub requests: u64,
    /// Failed requests.
    pub errors: u64,
    /// Bytes of all successful requests.
    pub bytes: u64,
    /// Sum of the times from submission to completion, in microseconds.
    pub total_us: u64,
    /// The longest time in microseconds.
    pub longest_us: u64,
}

#[derive(Default)]
struct StatsTable {
    /// In the order of [`OpKind::ALL`].
    rows: [StatsRow; 7],
    /// Output for the table.
    out: Option<LineOutput>,
}

#[derive(Default)]
struct StatsRow {
    requests: AtomicU64,
    errors: AtomicU64,
    bytes: AtomicU64,
    total_us: AtomicU64,
    longest_us: AtomicU64,
}

impl StatsRow {
    fn end(&self, len: u64, outcome: &Outcome, started: Instant) {
        let us = u64::try_from(blockhaul_io::elapsed(started).as_micros()).unwrap_or(u64::MAX);
        match outcome {
            Ok(_) => self.bytes.fetch_add(len, Ordering::Relaxed),
            Err(_) => self.errors.fetch_add(1, Ordering::Relaxed),
        };
        self.total_us.fetch_add(us, Ordering::Relaxed);
        self.longest_us.fetch_max(us, Ordering::Relaxed);
    }

    fn read(&self) -> OperationCounts {
        OperationCounts {
            requests: self.requests.load(Ordering::Relaxed),
            errors: self.errors.load(Ordering::Relaxed),
            bytes: self.bytes.load(Ordering::Relaxed),
            total_us: self.total_us.load(Ordering::Relaxed),
            longest_us: self.longest_us.load(Ordering::Relaxed),
        }
    }
}

impl Drop for StatsTable {
    fn drop(&mut self) {
        let Some(out) = &self.out else { return };
        // A layer made only to check its options has nothing to report.
        if self.rows.iter().all(|row| row.read().requests == 0) {
            return;
        }
        let mut text =
            String::from("stats:   requests   errors           bytes  mean us   max us\n");
        for kind in OpKind::ALL {
            let row = self.rows[kind as usize].read();
            if let Some(mean) = row.total_us.checked_div(row.requests) {
                // Writing to a string does not fail.
                let _ = writeln!(
                    text,
                    "{kind:8} {:8} {:8} {:15} {mean:8} {:8}",
                    row.requests, row.errors, row.bytes, row.longest_us
                );
            }
        }
        out.write(&text);
    }
}

struct StatsDevice {
    inner: Arc<dyn Device>,
    table: Arc<StatsTable>,
}

impl Device for StatsDevice {
    fn facts(&self) -> Arc<Facts> {
        self.inner.facts()
    }

    fn submit(&self, request: Request) -> PendingRequest {
        let kind = request.kind();
        let len = request.len;
        let started = blockhaul_io::now();
        self.table.rows[kind as usize].requests.fetch_add(1, Ordering::Relaxed);
        match self.inner.submit(request).now() {
            Ok(outcome) => {
                self.table.rows[kind as usize].end(len, &outcome, started);
                PendingRequest::ready(outcome)
            }
            Err(pending) => {
                let table = self.table.clone();
                PendingRequest::start(async move {
                    let outcome = pending.await;
                    table.rows[kind as usize].end(len, &outcome, started);
                    outcome
                })
            }
        }
    }
}
