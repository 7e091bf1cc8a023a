//! `retry-request`: repeats a failed request on the same connection.

use std::sync::Arc;
use std::time::Duration;

use blockhaul_block::{Device, Facts, Hints, Kind, PendingRequest, Request, Result};
use blockhaul_catalog::{Layer, LayerKind, ParamKind, ParamValues};

use crate::declared::{opened, param_or};
use crate::flushes::{FlushRecord, makes_durable};
use crate::per_disk::PerDisk;
use crate::repeat::{ALL_CLASSES, RepeatableRequest, classes};

/// The layer `retry-request`.
pub static RETRY_REQUEST: LayerKind = LayerKind {
    name: "retry-request",
    summary: "retries failed requests a few times",
    manual: "For sources that fail temporarily but stay connected. Each request is repeated up to `retries` \
times, `delay` apart; then its error is passed on. Errors that would recur (invalid requests, \
a full disk, a read-only one) are passed on at once, and so are kinds of errors that `errors` \
does not list. `retry` also opens the device again.

A flush or a FUA request is not repeated, unlike in nbdkit's filter of this name: the kernel \
reports a failed writeback once, and the next flush succeeds although the data is lost. After \
one has failed, all later ones fail until the device is opened again.",
    example: r#"
blockhaul serve --layer 'error?read=20%&count=5' --layer 'retry-request?delay=100ms' \
  sample:64M --run 'blockhaul checksum "$uri"'
"#,
    needs_content: false,
    writes_below: true,
    transparent: true,
    params: &[
        param_or("retries", ParamKind::Number, "2", "Maximum retries of a request."),
        param_or("delay", ParamKind::Duration, "2s", "Delay between retries."),
        param_or("errors", ParamKind::Text, ALL_CLASSES, "Kinds of errors to retry after."),
    ],
    changeable: &[],
    configure: |args| configure(args),
};

fn configure(args: &ParamValues) -> Result<Arc<dyn Layer>> {
    let retries = args.number("retries").unwrap_or(2);
    let delay = args.duration("delay").unwrap_or(Duration::from_secs(2));
    let kinds = classes("retry-request", args.text("errors").unwrap_or(ALL_CLASSES))?;
    let plan = Arc::new(RetryRequestOptions { retries, delay, kinds });
    let disks = PerDisk::<FlushRecord>::default();
    opened(move |below| {
        let flushes = disks.get(&below, || Ok(FlushRecord::default()))?;
        let inner = flushes.guard(below.device);
        let below = inner.facts();
        // No parked payloads: a write that may be repeated needs its data after the first attempt.
        let kept = Hints::ZEROED
            | Hints::CLAIMS_ROOM
            | Hints::FLUSH_FAILURES_STAY
            | Hints::IN_FLIGHT
            | Hints::EXTENTS;
        let facts = Facts::over(&below).keeping(&below, kept);
        Ok(Arc::new(RetryRequestDevice { inner, facts: Arc::new(facts), plan: plan.clone() }))
    })
}

struct RetryRequestOptions {
    retries: u64,
    delay: Duration,
    kinds: Vec<Kind>,
}

struct RetryRequestDevice {
    inner: Arc<dyn Device>,
    facts: Arc<Facts>,
    plan: Arc<RetryRequestOptions>,
}

impl Device for RetryRequestDevice {
    fn facts(&self) -> Arc<Facts> {
        self.facts.clone()
    }

    fn submit(&self, mut request: Request) -> PendingRequest {
        // A failed flush is not repeated: the repetition may succeed although data is lost.
        if makes_durable(request.kind(), request.flags) {
            return self.inner.submit(request);
        }
        let repeat = RepeatableRequest::of(&mut request);
        let first = match self.inner.submit(request).now() {
            Ok(Ok(reply)) => return PendingRequest::ready(Ok(reply)),
            Ok(Err(error)) => PendingRequest::ready(Err(error)),
            Err(pending) => pending,
        };
        let inner = self.inner.clone();
        let plan = self.plan.clone();
        PendingRequest::start(async move {
            let mut outcome = first.await;
            for _ in 0..plan.retries {
                match &outcome {
                    Err(error) if plan.kinds.contains(&error.kind()) => {}
                    _ => break,
                }
                blockhaul_io::sleep(plan.delay).await;
                outcome = inner.submit(repeat.request().await?).await;
            }
            outcome
        })
    }
}
