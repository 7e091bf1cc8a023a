//! What a job does when a request of its source or target fails: the error policies of QEMU's jobs.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, Weak};
use std::time::Duration;

use blockhaul_block::{
    Device, Error, Facts, Kind, OpKind, PendingRequest, Request, RequestFlags, Result,
};
use blockhaul_catalog::Layer;
use blockhaul_control::ErrorPolicy;
use blockhaul_io::Notify;
use blockhaul_layers::support::RepeatableRequest;

use crate::compression::KEPT_HINTS;
use crate::job::Job;

/// First and longest time before an ignored request is repeated.
const BACK_OFF: [Duration; 2] = [Duration::from_millis(50), Duration::from_secs(5)];

/// The action that follows from an error under a policy.
fn action(policy: ErrorPolicy, kind: Kind) -> ErrorAction {
    match (policy, kind) {
        // To repeat these makes no sense.
        (_, Kind::ShuttingDown | Kind::Usage | Kind::Invalid) => ErrorAction::Report,
        // The handle does not work any more: the engine replaces it, and this layer cannot.
        (_, Kind::Disconnected | Kind::TimedOut) => ErrorAction::Report,
        (ErrorPolicy::Ignore, _) => ErrorAction::Ignore,
        (ErrorPolicy::Stop, _) | (ErrorPolicy::Enospc, Kind::NoSpace) => ErrorAction::Stop,
        (ErrorPolicy::Report | ErrorPolicy::Enospc, _) => ErrorAction::Report,
    }
}

/// The action that follows from an error.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ErrorAction {
    /// The job fails.
    Report,
    /// The request is repeated.
    Ignore,
    /// The job pauses.
    Stop,
}

impl ErrorAction {
    /// Its name in events.
    pub fn name(self) -> &'static str {
        match self {
            ErrorAction::Report => "report",
            ErrorAction::Ignore => "ignore",
            ErrorAction::Stop => "stop",
        }
    }
}

/// The policies of a job, and the requests that wait for its resumption.
#[derive(Default)]
pub struct ErrorPolicies {
    source: ErrorPolicy,
    target: ErrorPolicy,
    job: OnceLock<Weak<Job>>,
    /// Requests wait until the job is resumed.
    stopped: AtomicBool,
    /// The kind of the latest error, until the job is resumed.
    status: Mutex<Option<Kind>>,
    resumed: Notify,
}

impl ErrorPolicies {
    /// Policies for errors of the source and of the target.
    pub fn new(source: ErrorPolicy, target: ErrorPolicy) -> Arc<ErrorPolicies> {
        Arc::new(ErrorPolicies { source, target, ..ErrorPolicies::default() })
    }

    /// The layer over the source.
    pub fn over_source(self: &Arc<ErrorPolicies>) -> Arc<dyn Layer> {
        Arc::new(PolicyLayer { errors: self.clone(), on_error: self.source, is_source: true })
    }

    /// The layer over the target.
    pub fn over_target(self: &Arc<ErrorPolicies>) -> Arc<dyn Layer> {
        Arc::new(PolicyLayer { errors: self.clone(), on_error: self.target, is_source: false })
    }

    /// Whether a layer is needed over the source.
    pub fn watches_source(&self) -> bool {
        self.source != ErrorPolicy::Report
    }

    /// Whether a layer is needed over the target.
    pub fn watches_target(&self) -> bool {
        self.target != ErrorPolicy::Report
    }

    /// The job that these are for.
    pub fn set_job(&self, job: &Arc<Job>) {
        let _ = self.job.set(Arc::downgrade(job));
    }

    /// `ok`, `nospace` or `failed`: the state of the devices, as QEMU names it.
    pub fn io_status(&self) -> &'static str {
        match *self.status() {
            None => "ok",
            Some(Kind::NoSpace) => "nospace",
            Some(_) => "failed",
        }
    }

    /// The job goes on, or ends: waiting requests are repeated.
    pub fn resume(&self) {
        *self.status() = None;
        self.stopped.store(false, Ordering::SeqCst);
        self.resumed.notify();
    }

    fn status(&self) -> MutexGuard<'_, Option<Kind>> {
        self.status.lock().expect("no panic under this lock")
    }

    fn job(&self) -> Option<Arc<Job>> {
        self.job.get().and_then(Weak::upgrade)
    }

    /// Notes an error, and pauses the job if the policy says so.
    fn note(&self, error: &Error, action: ErrorAction, is_read: bool) {
        let Some(job) = self.job() else { return };
        log::warn!("job {}: {error}: {}", job.id(), action.name());
        if action == ErrorAction::Stop {
            *self.status() = Some(error.kind());
            self.stopped.store(true, Ordering::SeqCst);
        }
        job.report_error(is_read, action, error);
    }

    /// Waits until the request is to be repeated. False: the job ends.
    async fn wait(&self, action: ErrorAction, attempt: u32) -> bool {
        let ends = || self.job().is_none_or(|job| job.is_ending() || job.is_over());
        match action {
            ErrorAction::Report => false,
            ErrorAction::Ignore => {
                let longer = BACK_OFF[0].saturating_mul(1 << attempt.min(10));
                blockhaul_io::sleep(longer.min(BACK_OFF[1])).await;
                !ends()
            }
            ErrorAction::Stop => loop {
                let resumed = self.resumed.listen();
                if ends() {
                    return false;
                }
                if !self.stopped.load(Ordering::SeqCst) {
                    return true;
                }
                // This side keeps the sender.
                let _ = resumed.await;
            },
        }
    }
}

/// The layer that applies a policy.
struct PolicyLayer {
    errors: Arc<ErrorPolicies>,
    on_error: ErrorPolicy,
    is_source: bool,
}

impl Layer for PolicyLayer {
    fn wrap(&self, inner: Arc<dyn Device>) -> Result<Arc<dyn Device>> {
        let below = inner.facts();
        let mut facts = Facts::over(&below).keeping(&below, KEPT_HINTS);
        // Requests are passed on with their flags.
        facts.compression = below.compression;
        let facts = Arc::new(facts);
        let errors = self.errors.clone();
        let on_error = self.on_error;
        let is_source = self.is_source;
        Ok(Arc::new(PolicyDevice { facts, inner, errors, on_error, is_source }))
    }
}

#[derive(Clone)]
struct PolicyDevice {
    facts: Arc<Facts>,
    inner: Arc<dyn Device>,
    errors: Arc<ErrorPolicies>,
    on_error: ErrorPolicy,
    is_source: bool,
}

impl PolicyDevice {
    /// The action that follows from an error. A failed flush is not repeated: the repetition may succeed
    /// although data is lost. Extents are only hints.
    fn action(&self, kind: OpKind, flags: RequestFlags, error: &Error) -> ErrorAction {
        let is_repeatable = match kind {
            OpKind::Read => self.is_source,
            OpKind::Write | OpKind::Zero => !self.is_source && !flags.contains(RequestFlags::FUA),
            OpKind::Trim | OpKind::Flush | OpKind::Cache | OpKind::Extents => false,
        };
        let refused = matches!(error.kind(), Kind::Unsupported | Kind::TooLarge);
        let lost = self.is_source && self.errors.job().is_some_and(|job| job.has_lost_its_source());
        if is_repeatable && !refused && !lost {
            action(self.on_error, error.kind())
        } else {
            ErrorAction::Report
        }
    }
}

impl Device for PolicyDevice {
    fn facts(&self) -> Arc<Facts> {
        self.facts.clone()
    }

    fn submit(&self, mut request: Request) -> PendingRequest {
        let kind = request.kind();
        let flags = request.flags;
        let repeat = RepeatableRequest::of(&mut request);
        let first = match self.inner.submit(request).now() {
            Ok(Ok(reply)) => return PendingRequest::ready(Ok(reply)),
            Ok(Err(error)) => PendingRequest::ready(Err(error)),
            Err(pending) => pending,
        };
        let this = self.clone();
        PendingRequest::start(async move {
            let mut outcome = first.await;
            let mut attempt = 0;
            while let Err(error) = &outcome {
                let action = this.action(kind, flags, error);
                if action == ErrorAction::Report {
                    break;
                }
                this.errors.note(error, action, this.is_source);
                if !this.errors.wait(action, attempt).await {
                    break;
                }
                attempt += 1;
                outcome = this.inner.submit(repeat.request().await?).await;
            }
            outcome
        })
    }
}
