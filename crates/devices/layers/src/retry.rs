//! `retry`: reopens the device when a request fails, and retries the request.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use blockhaul_block::{
    Can, Device, Error, Facts, Hints, Kind, OpKind, Outcome, PendingRequest, Request, RequestFlags,
    Result,
};
use blockhaul_catalog::{
    HandleOpener, Layer, LayerBase, LayerKind, OpenFuture, ParamKind, ParamValues,
};
use blockhaul_io::Completer;

use crate::declared::param_or;
use crate::flushes::{FlushRecord, loses_data, makes_durable};
use crate::per_disk::PerDisk;
use crate::repeat::{ALL_CLASSES, RepeatableRequest, classes};

/// Maximum delay between two attempts.
const DELAY_MAX: Duration = Duration::from_secs(3600);
/// Why flushes fail with `unflushed=fail`.
const REOPENED: &str = "the device had to be reopened";

/// The layer `retry`.
pub static RETRY: LayerKind = LayerKind {
    name: "retry",
    summary: "reopens the device when a request fails, and retries the request",
    manual: "When a request fails, the layer waits `retry-delay` (twice as long each time with \
`retry-exponential=on`), opens the device below again (which makes a new connection) and \
repeats the request, up to `retries` times; then the error is passed on. Requests that fail at \
the same time share one new connection. Errors that would recur (invalid requests, a full \
disk, a read-only one) are passed on at once, and so are kinds of errors that `errors` does \
not list. A device that cannot be opened again (memory) only gets the repeated request. A \
device that has another size or fewer abilities after it was opened again is not used.

A server that has crashed may have lost writes without a flush. With `unflushed=fail`, all \
flushes fail after a new connection if there were such writes over any of the connections; with \
`trust` the layer assumes that the server is the same, as after a lost network connection. With \
`retry-readonly=on`, every request that would change the device is refused once it had to be \
opened again.

A flush or a FUA request is repeated only after a lost connection, unlike in nbdkit's filter \
of this name. A failure of the storage is passed on: the kernel reports a failed writeback \
once, and the next flush succeeds although the data is lost. After such a failure all flushes \
and FUA requests fail, on all connections, until the last client has disconnected and the \
device is opened again.",
    example: r#"
blockhaul copy --source-layer 'error?error=EIO&read=20%&count=5' \
  --source-layer 'retry?retry-delay=100ms' sample:64M null:
"#,
    needs_content: false,
    writes_below: true,
    transparent: true,
    params: &[
        param_or("retries", ParamKind::Number, "5", "Maximum retries of a request."),
        param_or("retry-delay", ParamKind::Duration, "2s", "Delay before the first retry."),
        param_or("retry-exponential", ParamKind::Switch, "on", "Double the delay each time."),
        param_or(
            "retry-readonly",
            ParamKind::Switch,
            "off",
            "Refuse writes once the device was reopened.",
        ),
        param_or(
            "unflushed",
            ParamKind::Choice(&["trust", "fail"]),
            "trust",
            "How to treat writes that were not flushed when the device failed.",
        ),
        param_or("errors", ParamKind::Text, ALL_CLASSES, "Kinds of errors to retry after."),
    ],
    changeable: &[],
    configure: |args| configure(args),
};

fn configure(args: &ParamValues) -> Result<Arc<dyn Layer>> {
    let plan = RetryOptions {
        retries: args.number("retries").unwrap_or(5),
        delay: args.duration("retry-delay").unwrap_or(Duration::from_secs(2)),
        exponential: args.switch("retry-exponential"),
        readonly: args.switch("retry-readonly"),
        fail_unflushed: args.text("unflushed") == Some("fail"),
        kinds: classes("retry", args.text("errors").unwrap_or(ALL_CLASSES))?,
    };
    Ok(Arc::new(RetryLayer { plan: Arc::new(plan), disks: PerDisk::default() }))
}

struct RetryOptions {
    retries: u64,
    delay: Duration,
    exponential: bool,
    readonly: bool,
    fail_unflushed: bool,
    kinds: Vec<Kind>,
}

/// What the handles to a disk share.
#[derive(Default)]
struct RetryDisk {
    flushes: FlushRecord,
    /// If a flush of one handle covers what the others have changed.
    changes: Arc<Mutex<ChangeCounts>>,
}

/// Changes that were acknowledged.
#[derive(Default)]
struct ChangeCounts {
    /// Their number.
    acknowledged: u64,
    /// The first of them, which were acknowledged before a flush began that has succeeded.
    flushed: u64,
}

struct RetryLayer {
    plan: Arc<RetryOptions>,
    disks: PerDisk<RetryDisk>,
}

impl Layer for RetryLayer {
    fn wrap(&self, device: Arc<dyn Device>) -> Result<Arc<dyn Device>> {
        self.device(LayerBase::alone(device))
    }

    fn open(self: Arc<Self>, below: LayerBase) -> OpenFuture<Arc<dyn Device>> {
        Box::pin(std::future::ready(self.device(below)))
    }
}

impl RetryLayer {
    fn device(&self, below: LayerBase) -> Result<Arc<dyn Device>> {
        let disk = self.disks.get(&below, || Ok(RetryDisk::default()))?;
        let LayerBase { device, reopen, .. } = below;
        let below = device.facts();
        // No parked payloads: a write that may be repeated needs its data after the first attempt.
        // Flushes of a reopened device do not report earlier failures.
        let kept = Hints::ZEROED | Hints::CLAIMS_ROOM | Hints::IN_FLIGHT | Hints::EXTENTS;
        let facts = Facts::over(&below).keeping(&below, kept);
        let plan = self.plan.clone();
        let is_shared = facts.can.contains(Can::MULTI_CONN);
        let changes = if is_shared { disk.changes.clone() } else { Arc::default() };
        let opened = changes.lock().unwrap_or_else(PoisonError::into_inner).acknowledged;
        let now = Mutex::new(CurrentDevice { device, generation: 0, opened, opening: None });
        let facts = Arc::new(facts);
        Ok(Arc::new(RetryDevice(Arc::new(RetryHandle { plan, facts, reopen, disk, changes, now }))))
    }
}

struct RetryDevice(Arc<RetryHandle>);

struct RetryHandle {
    plan: Arc<RetryOptions>,
    facts: Arc<Facts>,
    reopen: Option<Arc<dyn HandleOpener>>,
    disk: Arc<RetryDisk>,
    /// Those that a flush of this handle covers.
    changes: Arc<Mutex<ChangeCounts>>,
    now: Mutex<CurrentDevice>,
}

/// What is needed to decide about repeating a request.
#[derive(Clone, Copy)]
struct RequestTraits {
    kind: OpKind,
    flags: RequestFlags,
}

impl RequestTraits {
    fn makes_durable(self) -> bool {
        makes_durable(self.kind, self.flags)
    }
}

/// The current device.
struct CurrentDevice {
    device: Arc<dyn Device>,
    /// How often it was reopened.
    generation: u64,
    /// Number of changes that were acknowledged before it was opened: the server may have started after them,
    /// so that no flush says anything about these.
    opened: u64,
    /// It is being reopened; these tasks wait.
    opening: Option<Vec<Completer<()>>>,
}

/// An attempt at a request.
struct RequestAttempt {
    device: Arc<dyn Device>,
    /// The device's, see [`CurrentDevice::generation`].
    generation: u64,
    /// Number of changes before it: a flush covers these and no others.
    changes: u64,
}

impl Device for RetryDevice {
    fn facts(&self) -> Arc<Facts> {
        self.0.facts.clone()
    }

    fn submit(&self, mut request: Request) -> PendingRequest {
        let shared = &self.0;
        let asked = RequestTraits { kind: request.kind(), flags: request.flags };
        let attempt = match shared.start(asked) {
            Ok(started) => started,
            Err(error) => return error.into(),
        };
        let repeat = RepeatableRequest::of(&mut request);
        let first = match attempt.device.submit(request).now() {
            Ok(outcome) if outcome.is_ok() => {
                let ended = shared.done(asked, &attempt);
                return PendingRequest::ready(ended.and(outcome));
            }
            Ok(outcome) => PendingRequest::ready(outcome),
            Err(pending) => pending,
        };
        let shared = shared.clone();
        PendingRequest::start(async move {
            let outcome = first.await;
            shared.go_on(outcome, attempt, &repeat, asked).await
        })
    }
}

impl RetryHandle {
    fn lock(&self) -> MutexGuard<'_, CurrentDevice> {
        self.now.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Locked after [`RetryHandle::lock`].
    fn changes(&self) -> MutexGuard<'_, ChangeCounts> {
        self.changes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// An attempt at a request over the current device.
    fn start(&self, asked: RequestTraits) -> Result<RequestAttempt> {
        if asked.makes_durable() {
            self.disk.flushes.check()?;
        }
        let now = self.lock();
        if self.plan.readonly && now.generation > 0 && asked.kind.changes() {
            let text = "the device had to be reopened and is now read-only";
            return Err(Error::new(Kind::ReadOnly, text));
        }
        let generation = now.generation;
        // Handles share them: they are locked for nothing else.
        let counts = self.plan.fail_unflushed;
        let changes = if counts { self.changes().acknowledged } else { 0 };
        Ok(RequestAttempt { device: now.device.clone(), generation, changes })
    }

    /// An attempt has succeeded; an error if that proves nothing.
    fn done(&self, asked: RequestTraits, attempt: &RequestAttempt) -> Result<()> {
        let RequestTraits { kind, flags } = asked;
        if self.plan.fail_unflushed && (kind.changes() || kind == OpKind::Flush) {
            let fua = flags.contains(RequestFlags::FUA);
            let now = self.lock();
            let mut changes = self.changes();
            if now.generation != attempt.generation {
                // Changed through a device that was replaced meanwhile.
                if kind.changes() && !fua {
                    self.disk.flushes.fail(&Error::new(Kind::Io, REOPENED));
                }
            } else if kind == OpKind::Flush {
                if now.opened <= changes.flushed {
                    changes.flushed = changes.flushed.max(attempt.changes);
                }
            } else if !fua {
                changes.acknowledged += 1;
            }
        }
        if asked.makes_durable() { self.disk.flushes.check() } else { Ok(()) }
    }

    /// Whether a request that failed with this error may be repeated.
    fn may_repeat(&self, asked: RequestTraits, error: &Error) -> bool {
        if asked.makes_durable() {
            if loses_data(asked.kind, error) {
                self.disk.flushes.fail(error);
                return false;
            }
            // Over the same device a repeated flush proves nothing.
            if self.reopen.is_none() {
                return false;
            }
        }
        self.plan.kinds.contains(&error.kind())
    }

    /// The first attempt has ended.
    async fn go_on(
        &self,
        mut outcome: Outcome,
        mut attempt: RequestAttempt,
        repeat: &RepeatableRequest,
        asked: RequestTraits,
    ) -> Outcome {
        let mut delay = self.plan.delay;
        for number in 0.. {
            let error = match outcome {
                Ok(reply) => return self.done(asked, &attempt).map(|()| reply),
                Err(error) => error,
            };
            if !self.may_repeat(asked, &error) || number >= self.plan.retries {
                return Err(error);
            }
            blockhaul_io::sleep(delay).await;
            if self.plan.exponential {
                delay = delay.saturating_mul(2).min(DELAY_MAX);
            }
            if let Err(error) = self.again(attempt.generation).await {
                outcome = Err(unopened(error));
                continue;
            }
            let request = repeat.request().await?;
            attempt = self.start(asked)?;
            outcome = attempt.device.submit(request).await;
        }
        Err(Error::new(Kind::Io, "tried again without end"))
    }

    /// Reopens the device, unless another task has done so since this generation.
    async fn again(&self, generation: u64) -> Result<()> {
        let Some(reopen) = &self.reopen else { return Ok(()) };
        let wait = {
            let mut now = self.lock();
            if now.generation > generation {
                return Ok(());
            }
            match &mut now.opening {
                Some(waiting) => {
                    let (completer, ticket) = blockhaul_io::ticket();
                    waiting.push(completer);
                    Some(ticket)
                }
                None => {
                    now.opening = Some(Vec::new());
                    None
                }
            }
        };
        if let Some(ticket) = wait {
            // The next attempt shows whether it worked.
            let _ = ticket.await;
            return Ok(());
        }
        let opened = reopen.another().await.and_then(|device| self.fits(device));
        let mut now = self.lock();
        let waiting = now.opening.take().unwrap_or_default();
        let result = opened.map(|device| {
            let mut changes = self.changes();
            if self.plan.fail_unflushed && changes.acknowledged > changes.flushed {
                changes.flushed = changes.acknowledged;
                self.disk.flushes.fail(&Error::new(Kind::Io, REOPENED));
            }
            now.opened = changes.acknowledged;
            drop(changes);
            now.generation += 1;
            std::mem::replace(&mut now.device, device)
        });
        drop(now);
        waiting.into_iter().for_each(|completer| completer.complete(()));
        result.map(drop)
    }

    fn fits(&self, device: Arc<dyn Device>) -> Result<Arc<dyn Device>> {
        let new = device.facts();
        let old = &self.facts;
        let same = new.size == old.size
            && new.can.contains(old.can)
            && new.contexts == old.contexts
            && new.block.minimum <= old.block.minimum
            && new.block.maximum >= old.block.maximum;
        if same {
            Ok(device)
        } else {
            Err(Error::new(
                Kind::Io,
                "the reopened device is another one: its size or abilities differ",
            ))
        }
    }
}

/// The error of a device that cannot be opened again. No flush has failed by that, and the socket of a
/// server that is not there comes when the server starts.
fn unopened(error: Error) -> Error {
    let error = match error.kind() {
        Kind::NotFound => Error::new(Kind::Disconnected, error.to_string()),
        _ => error,
    };
    error.before_flush()
}
