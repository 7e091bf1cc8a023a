//! `log`: writes a line when a request begins and one when it ends.
//!
//! ```text
//! 17 read offset=4096 length=512 begin
//! 17 read offset=4096 length=512 ok us=12
//! 18 zero offset=0 length=1048576 flags=FUA|NO_HOLE begin
//! 18 zero offset=0 length=1048576 error="cannot zero: Input/output error" us=3
//! ```
//! The first number counts requests over all handles of the layer.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use blockhaul_block::{Device, Facts, Op, Outcome, PendingRequest, Reply, Request, Result};
use blockhaul_catalog::{Layer, LayerKind, ParamValues};

use crate::out::LineOutput;

/// The layer `log`.
pub static LOG: LayerKind = LayerKind {
    name: "log",
    summary: "logs each request when it begins and when it ends",
    manual: "One line when a request begins and one when it ends, with its offset, length and flags, its \
result and its duration in microseconds. The number at the start of a line counts requests \
over all connections.",
    example: r#"
blockhaul serve --layer 'log?file=requests.log' sample:4M --run 'blockhaul checksum "$uri"'
cat requests.log
"#,
    needs_content: false,
    writes_below: true,
    transparent: true,
    params: &[LineOutput::PARAM, LineOutput::APPEND],
    changeable: &[],
    configure: |args| configure(args),
};

fn configure(args: &ParamValues) -> Result<Arc<dyn Layer>> {
    let journal = RequestLog { out: LineOutput::open("log", args)?, next: AtomicU64::new(1) };
    Ok(Arc::new(LogLayer { journal: Arc::new(journal) }))
}

struct LogLayer {
    journal: Arc<RequestLog>,
}

impl Layer for LogLayer {
    fn wrap(&self, inner: Arc<dyn Device>) -> Result<Arc<dyn Device>> {
        Ok(Arc::new(LogDevice { inner, journal: self.journal.clone() }))
    }
}

struct RequestLog {
    out: LineOutput,
    next: AtomicU64,
}

struct LogDevice {
    inner: Arc<dyn Device>,
    journal: Arc<RequestLog>,
}

impl Device for LogDevice {
    fn facts(&self) -> Arc<Facts> {
        self.inner.facts()
    }

    fn submit(&self, request: Request) -> PendingRequest {
        let id = self.journal.next.fetch_add(1, Ordering::Relaxed);
        let what = describe(&request);
        self.journal.out.write(&format!("{id} {what} begin\n"));
        let started = blockhaul_io::now();
        let journal = self.journal.clone();
        let report = move |outcome: &Outcome| {
            let result = describe_end(outcome);
            let us = blockhaul_io::elapsed(started).as_micros();
            journal.out.write(&format!("{id} {what} {result} us={us}\n"));
        };
        match self.inner.submit(request).now() {
            Ok(outcome) => {
                report(&outcome);
                PendingRequest::ready(outcome)
            }
            Err(pending) => PendingRequest::start(async move {
                let outcome = pending.await;
                report(&outcome);
                outcome
            }),
        }
    }
}

fn describe(request: &Request) -> String {
    let kind = request.kind();
    let mut text = match request.op {
        Op::Flush => kind.to_string(),
        _ => format!("{kind} offset={} length={}", request.at, request.len),
    };
    if !request.flags.is_empty() {
        let names: Vec<_> = request.flags.iter_names().map(|(name, _)| name).collect();
        text.push_str(" flags=");
        text.push_str(&names.join("|"));
    }
    text
}

fn describe_end(outcome: &Outcome) -> String {
    match outcome {
        Ok(Reply::Hole) => "ok hole".into(),
        Ok(Reply::Extents(lists)) => {
            let counts: Vec<_> = lists.iter().map(|list| list.len().to_string()).collect();
            format!("ok extents={}", counts.join(","))
        }
        Ok(_) => "ok".into(),
        // A record remains one line, whatever the device's error text.
        Err(error) => format!("error={:?}", error.text()),
    }
}
