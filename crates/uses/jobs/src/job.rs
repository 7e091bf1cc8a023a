//! One job: its state, its progress, and how it is controlled.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::time::{Duration, Instant, SystemTime};

use blockhaul_block::Error;
use blockhaul_engine::CopyProgress;
use blockhaul_io::Notify;
use blockhaul_snapshot::{Snapshot, SnapshotStats};
use blockhaul_transfer::{CopyControl, CopyReport, TransferErrorKind};

use crate::error::JobError;
use crate::export::{OpenExport, TargetGuard};
use crate::job_config::{JobSettings, JobTarget};
use crate::job_errors::{ErrorAction, ErrorPolicies};
use crate::job_files::JobRecord;
use crate::job_rate::ReportedRate;
use crate::job_state::JobStatus;
use crate::mirror::{Mirror, MirrorCompletion};

/// Interval at which a pending job looks whether its group has ended.
const LOOK: Duration = Duration::from_millis(100);

/// A function that is called for each event of a job, from any worker; it must not block.
pub type JobObserver = Box<dyn Fn(&Job, &JobEvent) + Send + Sync>;

/// An event of a job.
#[derive(Debug)]
pub enum JobEvent {
    /// The job has another state.
    Status(JobStatus),
    /// A mirror could complete.
    Ready,
    /// The job waits until it is finalized.
    Pending,
    /// The job has ended; [`Job::outcome`] says how.
    Ended,
    /// A request has failed.
    Error {
        /// Whether the request was one of the source.
        is_read: bool,
        /// The action that follows.
        action: ErrorAction,
        /// The error: device, offset and cause.
        text: String,
    },
}

/// A job that runs or has ended.
pub struct Job {
    id: u64,
    export: String,
    disk_size: u64,
    target: String,
    pub(crate) work: JobWork,
    /// The claim on the target, if that is a disk of the server.
    writing: Mutex<Option<TargetGuard>>,
    pub(crate) progress: Arc<CopyProgress>,
    control: CopyControl,
    settings: JobSettings,
    errors: Arc<ErrorPolicies>,
    status: Mutex<JobStatus>,
    /// Bytes per second; 0: no limit.
    speed: AtomicU64,
    /// Whether the job was asked to end.
    cancelled: AtomicBool,
    /// Whether the job was finalized.
    finalized: AtomicBool,
    /// How a mirror is to end once it is finalized.
    completion: Mutex<Option<MirrorCompletion>>,
    pub(crate) started: Instant,
    pub(crate) pace: Mutex<ReportedRate>,
    pub(crate) ended: OnceLock<JobEnd>,
    changed: Notify,
    observer: Arc<OnceLock<JobObserver>>,
    /// The record of a job that outlives the server.
    record: Option<Arc<JobRecord>>,
    /// Whether the server ends before the job.
    interrupted: AtomicBool,
}

/// The work of a job.
pub(crate) enum JobWork {
    /// Copies a point in time, or a disk that does not change.
    Backup(BackupSnapshot),
    /// Copies the disk, and what is written to it meanwhile.
    Mirror(Arc<Mirror>),
    /// None: a job of an earlier server, with its record.
    Interrupted(Arc<JobRecord>),
}

/// The point in time of a backup; none: the disk does not change. It ends with the job, which is
/// remembered: the disk is not kept open.
#[derive(Default)]
pub(crate) struct BackupSnapshot {
    snapshot: Mutex<Option<Snapshot>>,
    last: OnceLock<SnapshotStats>,
}

impl BackupSnapshot {
    pub(crate) fn new(snapshot: Option<Snapshot>) -> BackupSnapshot {
        BackupSnapshot { snapshot: Mutex::new(snapshot), last: OnceLock::new() }
    }

    fn is_lost(&self) -> bool {
        self.snapshot().as_ref().is_some_and(Snapshot::is_lost)
    }

    /// The figures of now, or of its end.
    pub(crate) fn stats(&self) -> SnapshotStats {
        let now = self.snapshot().as_ref().map(Snapshot::stats);
        now.or_else(|| self.last.get().cloned()).unwrap_or_default()
    }

    /// The job has ended.
    pub(crate) fn end(&self) {
        let mut snapshot = self.snapshot();
        if let Some(snapshot) = &*snapshot {
            let _ = self.last.set(snapshot.stats());
        }
        let ended = snapshot.take();
        drop(snapshot);
        // Not under the lock: its files are closed.
        drop(ended);
    }

    fn snapshot(&self) -> MutexGuard<'_, Option<Snapshot>> {
        self.snapshot.lock().expect("no panic under this lock")
    }
}

/// How a job has ended.
pub(crate) struct JobEnd {
    pub(crate) after: Duration,
    /// Seconds since 1970; none for a job of an earlier server.
    pub(crate) time: Option<f64>,
    /// The result in one sentence.
    pub(crate) summary: Option<String>,
    /// The report, or why it failed.
    pub(crate) result: Result<String, JobError>,
    /// Whether the job was cancelled on request.
    pub(crate) cancelled: bool,
}

/// The parts of a job that begins, besides its work and its copy.
pub(crate) struct JobStart {
    pub(crate) export: String,
    /// Bytes of the disk; 0 if that is unknown.
    pub(crate) disk_size: u64,
    pub(crate) target: String,
    pub(crate) writing: Option<TargetGuard>,
    pub(crate) settings: JobSettings,
    pub(crate) errors: Arc<ErrorPolicies>,
    pub(crate) record: Option<Arc<JobRecord>>,
}

impl JobStart {
    /// The parts of a job of an export, which writes to this target.
    pub(crate) fn new(
        export: &OpenExport,
        target: &JobTarget,
        writing: Option<TargetGuard>,
        settings: JobSettings,
        record: Option<Arc<JobRecord>>,
    ) -> JobStart {
        let errors = ErrorPolicies::new(settings.on_source_error, settings.on_target_error);
        let disk_size = export.device().map_or(0, |device| device.facts().size);
        let (export, target) = (export.name.clone(), target.spec().to_string());
        JobStart { export, disk_size, target, writing, settings, errors, record }
    }
}

impl Job {
    /// A job that has not begun.
    pub(crate) fn new(
        id: u64,
        start: JobStart,
        work: JobWork,
        control: CopyControl,
        observer: &Arc<OnceLock<JobObserver>>,
    ) -> Job {
        let JobStart { export, disk_size, target, writing, settings, errors, record } = start;
        Job {
            id,
            export,
            disk_size,
            target,
            work,
            writing: Mutex::new(writing),
            progress: control.progress().clone(),
            control,
            speed: AtomicU64::new(settings.speed),
            settings,
            errors,
            status: Mutex::new(JobStatus::Created),
            cancelled: AtomicBool::new(false),
            finalized: AtomicBool::new(false),
            completion: Mutex::default(),
            started: blockhaul_io::now(),
            pace: Mutex::new(ReportedRate::new()),
            ended: OnceLock::new(),
            changed: Notify::default(),
            observer: observer.clone(),
            record,
            interrupted: AtomicBool::new(false),
        }
    }

    /// A job of an earlier server.
    pub(crate) fn from_record(
        record: &Arc<JobRecord>,
        observer: &Arc<OnceLock<JobObserver>>,
    ) -> Job {
        let text = "the server ended before the job".to_string();
        let end = JobEnd {
            after: Duration::ZERO,
            time: None,
            summary: None,
            result: Err(JobError::new(TransferErrorKind::Connection, text)),
            cancelled: false,
        };
        let work = JobWork::Interrupted(record.clone());
        let start = JobStart {
            export: record.text("export"),
            disk_size: 0,
            target: record.text("target"),
            writing: None,
            settings: JobSettings { dismissed_by_hand: true, ..JobSettings::from_record(record) },
            errors: Arc::default(),
            record: None,
        };
        Job {
            status: Mutex::new(JobStatus::Concluded),
            ended: OnceLock::from(end),
            ..Job::new(record.id(), start, work, CopyControl::default(), observer)
        }
    }

    /// Ends the job with this result; `lost`: why its point in time is lost.
    pub(crate) fn end(&self, result: Result<CopyReport, JobError>, lost: Option<String>) {
        let cancelled = self.cancelled.load(Ordering::Relaxed);
        let after = blockhaul_io::elapsed(self.started);
        let summary = result.as_ref().ok().map(|report| self.summary(report, after));
        let result = match (result, lost) {
            // It was complete before the snapshot was lost, or noticed.
            (Ok(report), _) => Ok(report.text_without_discards()),
            (Err(failure), Some(lost)) if !cancelled => {
                Err(failure.reworded(format!("{} ({lost})", failure.facts())))
            }
            (Err(failure), _) => Err(failure),
        };
        let id = self.id;
        let kind = self.kind();
        let target = &self.target;
        match &result {
            Ok(_) => log::info!("job {id}: {kind} to {target} is complete"),
            Err(_) if self.is_interrupted() => log::info!("job {id}: interrupted"),
            Err(_) if cancelled => log::info!("job {id}: cancelled"),
            Err(failure) => log::error!("job {id}: {kind} to {target}: {failure}"),
        }
        let is_complete = result.is_ok();
        // A request to cancel may come too late.
        let cancelled = cancelled && !is_complete;
        // Whoever sees the end finds the disks free.
        if let JobWork::Backup(snapshot) = &self.work {
            snapshot.end();
        }
        drop(self.writing.lock().expect("no panic under this lock").take());
        // In milliseconds, which every reader of JSON understands alike.
        let time = SystemTime::UNIX_EPOCH.elapsed().ok();
        let time = time.map(|since| since.as_millis() as f64 / 1000.0);
        let _ = self.ended.set(JobEnd { after, time, summary, result, cancelled });
        if is_complete {
            self.enter(JobStatus::Waiting);
            self.enter(JobStatus::Pending);
        } else {
            self.enter(JobStatus::Aborting);
        }
        // Whoever hears of the end finds the job in its last state.
        let by_hand = self.settings.dismissed_by_hand;
        let last = if by_hand { JobStatus::Concluded } else { JobStatus::Null };
        *self.status.lock().expect("no panic under this lock") = last;
        self.send_event(&JobEvent::Ended);
        self.send_event(&JobEvent::Status(JobStatus::Concluded));
        if !by_hand {
            self.send_event(&JobEvent::Status(JobStatus::Null));
        }
        self.changed.notify();
        if let Some(mirror) = self.mirror() {
            mirror.has_ended();
        }
    }

    /// Changes the state of the job, if the state leads there.
    pub(crate) fn enter(&self, next: JobStatus) {
        {
            let mut status = self.status.lock().expect("no panic under this lock");
            if !status.leads_to(next) {
                return;
            }
            *status = next;
        }
        self.send_event(&JobEvent::Status(next));
    }

    pub(crate) fn send_event(&self, happened: &JobEvent) {
        if let Some(observer) = self.observer.get() {
            observer(self, happened);
        }
    }

    /// The state of the job.
    pub fn status(&self) -> JobStatus {
        *self.status.lock().expect("no panic under this lock")
    }

    /// The number of the job, from 1, never reused by a server.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// Bytes of the disk; 0 if that is unknown.
    pub(crate) fn disk_size(&self) -> u64 {
        self.disk_size
    }

    /// The name of the export.
    pub fn export(&self) -> &str {
        &self.export
    }

    /// The description of the target.
    pub fn target(&self) -> &str {
        &self.target
    }

    /// The name of the job.
    pub fn name(&self) -> String {
        self.settings.name.clone().unwrap_or_else(|| format!("job{}", self.id))
    }

    /// How the job is controlled.
    pub fn settings(&self) -> &JobSettings {
        &self.settings
    }

    /// The limit in bytes per second; 0: none.
    pub fn speed(&self) -> u64 {
        self.speed.load(Ordering::Relaxed)
    }

    /// `ok`, `nospace` or `failed`.
    pub fn io_status(&self) -> &'static str {
        self.errors.io_status()
    }

    /// Bytes that are done, and the total as far as it is known.
    pub fn bytes(&self) -> (u64, u64) {
        let now = self.progress.snapshot();
        let done = now.done();
        let (ready, changed) = match self.mirror() {
            Some(mirror) => (mirror.is_ready(), mirror.changed_bytes()),
            None => (false, 0),
        };
        let is_copied = ready || matches!(self.ended.get(), Some(JobEnd { result: Ok(_), .. }));
        let copied = is_copied || matches!(self.status(), JobStatus::Waiting | JobStatus::Pending);
        let total = if copied { done } else { now.total.max(done) };
        (done, total.saturating_add(changed))
    }

    /// The error of a job that has ended, if it has failed, and whether it was cancelled.
    pub fn outcome(&self) -> Option<(Option<String>, bool)> {
        let end = self.ended.get()?;
        Some((end.result.as_ref().err().map(ToString::to_string), end.cancelled))
    }

    /// The error of a job that has ended and failed.
    pub fn failure(&self) -> Option<&JobError> {
        self.ended.get()?.result.as_ref().err()
    }

    /// Reports that a request of the job has failed. With `ErrorAction::Stop` the job pauses.
    pub(crate) fn report_error(&self, is_read: bool, action: ErrorAction, error: &Error) {
        self.send_event(&JobEvent::Error { is_read, action, text: error.located() });
        if action != ErrorAction::Report
            && let Some(mirror) = self.mirror()
        {
            mirror.release_clients();
        }
        if action == ErrorAction::Stop {
            self.pause(true);
        }
    }

    /// Whether the point in time that the job reads is lost: to repeat a request makes no sense.
    pub(crate) fn has_lost_its_source(&self) -> bool {
        matches!(&self.work, JobWork::Backup(snapshot) if snapshot.is_lost())
    }

    /// Notes that a mirror could complete.
    pub(crate) fn has_become_ready(&self) {
        if self.status() == JobStatus::Running {
            self.enter(JobStatus::Ready);
            self.send_event(&JobEvent::Ready);
        }
    }

    /// Whether the job was asked to end, or stopped with its group.
    pub(crate) fn is_ending(&self) -> bool {
        self.cancelled.load(Ordering::Relaxed) || self.progress.is_cancelled()
    }

    /// Waits until the job is finalized, or `over` is true.
    pub(crate) async fn is_finalized(&self, over: impl Fn() -> bool) {
        loop {
            let changed = self.changed.listen();
            let by_hand = self.settings.finalized_by_hand;
            if !by_hand || self.finalized.load(Ordering::SeqCst) || over() {
                return;
            }
            // Jobs of the group are cancelled without a notice here.
            let _ = blockhaul_io::timeout(LOOK, changed).await;
        }
    }

    /// Ends the pending state of the job.
    pub fn finalize(&self) {
        self.finalized.store(true, Ordering::SeqCst);
        self.changed.notify();
        let completion = self.completion.lock().expect("no panic under this lock").take();
        if let (Some(mirror), Some(completion)) = (self.mirror(), completion) {
            mirror.complete(completion);
        }
    }

    /// Asks a mirror to end; one that is finalized by hand ends then. False: the job is no mirror.
    pub fn complete(&self, completion: MirrorCompletion) -> bool {
        let Some(mirror) = self.mirror() else { return false };
        if !self.settings.finalized_by_hand {
            mirror.complete(completion);
            return true;
        }
        *self.completion.lock().expect("no panic under this lock") = Some(completion);
        self.enter(JobStatus::Waiting);
        self.enter(JobStatus::Pending);
        self.send_event(&JobEvent::Pending);
        true
    }

    /// Forgets an ended job in the monitor protocol.
    pub fn dismiss(&self) {
        self.enter(JobStatus::Null);
    }

    /// `backup` or `mirror`.
    pub fn kind(&self) -> &'static str {
        match &self.work {
            JobWork::Backup(_) => "backup",
            JobWork::Interrupted(record) if record.is_backup() => "backup",
            JobWork::Mirror(_) | JobWork::Interrupted(_) => "mirror",
        }
    }

    /// The record of a job of an earlier server that was not cancelled: it can be resumed.
    pub fn resumable(&self) -> Option<&Arc<JobRecord>> {
        match &self.work {
            JobWork::Interrupted(record) if !self.is_ending() => Some(record),
            _ => None,
        }
    }

    /// The record of the job, if it outlives the server.
    pub(crate) fn record(&self) -> Option<&Arc<JobRecord>> {
        self.record.as_ref()
    }

    /// The server ends before the job. False: the job does not outlive it.
    pub(crate) fn interrupt(&self) -> bool {
        let outlives = self.record.is_some();
        self.interrupted.store(outlives, Ordering::SeqCst);
        outlives
    }

    /// Whether the server ends before it.
    pub(crate) fn is_interrupted(&self) -> bool {
        self.interrupted.load(Ordering::SeqCst)
    }

    /// Forgets a job of an earlier server.
    pub fn forget(&self) {
        self.cancelled.store(true, Ordering::Relaxed);
        self.dismiss();
    }

    /// The mirror, if the job is one.
    pub fn mirror(&self) -> Option<&Arc<Mirror>> {
        match &self.work {
            JobWork::Backup(_) | JobWork::Interrupted(_) => None,
            JobWork::Mirror(mirror) => Some(mirror),
        }
    }

    /// Whether the job has ended.
    pub fn is_over(&self) -> bool {
        self.ended.get().is_some()
    }

    /// Waits until the job has ended.
    pub async fn over(&self) {
        loop {
            let changed = self.changed.listen();
            if self.is_over() {
                return;
            }
            // This side keeps the sender.
            let _ = changed.await;
        }
    }

    /// Waits until the job has ended, and returns its report: a line for users.
    ///
    /// # Errors
    /// Why the job has failed, or that it was cancelled.
    pub async fn result(&self) -> Result<String, JobError> {
        self.over().await;
        self.ended.get().map_or_else(|| Err(Error::misfit().into()), |end| end.result.clone())
    }

    /// Waits until a mirror could complete, or the job has ended.
    pub async fn ready(&self) {
        match self.mirror() {
            Some(mirror) => mirror.ready(|| self.is_over()).await,
            None => self.over().await,
        }
    }

    /// Ends the job soon, on request.
    pub fn cancel(&self) {
        self.cancelled.store(true, Ordering::Relaxed);
        self.stop();
    }

    /// Ends the job soon.
    pub(crate) fn stop(&self) {
        self.control.cancel();
        self.errors.resume();
        self.changed.notify();
        if let Some(mirror) = self.mirror() {
            mirror.wake();
        }
    }

    /// Starts no more requests, or continues. The point in time stays. False: clients wait for the end of the
    /// job just now, or it has ended.
    pub fn pause(&self, paused: bool) -> bool {
        if self.is_over() {
            return false;
        }
        self.control.pause(paused);
        let is_cutting_over = self.mirror().is_some_and(|mirror| {
            mirror.wake();
            mirror.is_cutting_over()
        });
        if paused && is_cutting_over {
            // Clients wait for it.
            self.control.pause(false);
            return false;
        }
        if paused {
            let was_ready = self.status() == JobStatus::Ready;
            self.enter(if was_ready { JobStatus::Standby } else { JobStatus::Paused });
        } else {
            let was_ready = self.status() == JobStatus::Standby;
            self.enter(if was_ready { JobStatus::Ready } else { JobStatus::Running });
            if self.mirror().is_some_and(|mirror| mirror.is_ready()) {
                self.has_become_ready();
            }
            self.errors.resume();
        }
        true
    }

    /// Limits the bytes per second; 0: no limit. False: the job has ended.
    pub fn limit(&self, bytes: u64) -> bool {
        if self.is_over() {
            return false;
        }
        self.speed.store(bytes, Ordering::Relaxed);
        self.control.limit(bytes);
        true
    }
}
