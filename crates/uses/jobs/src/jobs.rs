//! Jobs of a server: backups and mirrors of exports in use.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::time::{Duration, Instant};

use blockhaul_block::{Device, Error};
use blockhaul_catalog::{Spec, Stack};
use blockhaul_engine::Progress;
use blockhaul_io::{FifoLock, Notify, Pool};
use blockhaul_snapshot::{BITMAP_CONTEXT, Snapshot, Stats};
use blockhaul_transfer::{
    CopyControl, CopyReport, CopyRequest, CopySetup, Endpoint, NamedOption, OpenCopy,
    TransferErrorKind, TransferOptions,
};
use serde_json::{Value, json};

use crate::compression::CompressingLayer;
use crate::error::JobError;
use crate::export::{OpenExport, TargetGuard};
use crate::export_table::ExportTable;
use crate::job_errors::{ErrorAction, ErrorPolicies, ErrorPolicy};
use crate::job_files::JobRecord;
use crate::job_state::JobStatus;
use crate::mirror::{CopyMode, InitialCopy, Mirror, MirrorCompletion, MirrorSetup};
use crate::snapshot::{BitmapStep, FrozenBitmap, OpenSnapshot, SnapshotConfig};

/// Number of ended jobs that are remembered.
const ENDED_MAX: usize = 100;
/// Interval at which a pending job looks whether its group has ended.
const LOOK: Duration = Duration::from_millis(100);

/// The options of `copy` that a job takes: those that need no terminal, no other file, and no source
/// that is there only once.
const JOB_OPTIONS: &[&str] = &[
    "allocated",
    "connections",
    "destination-is-zero",
    "direct",
    "iops",
    "min-rate",
    "multi-conn",
    "no-extents",
    "rate",
    "request-size",
    "requests",
    "retries",
    "retry-delay",
    "sparse",
    "target-layer",
    "timeout",
    "verify",
];

/// The jobs of a server: backups and mirrors of its exports.
#[derive(Default)]
pub struct Jobs {
    /// Also those of earlier servers.
    list: Mutex<VecDeque<Arc<Job>>>,
    last: AtomicU64,
    observer: Arc<OnceLock<JobObserver>>,
    /// One interrupted job is resumed or forgotten at a time.
    pub(crate) resuming: Arc<FifoLock>,
}

/// Is called for what happens to jobs, from any worker; must not block.
pub type JobObserver = Box<dyn Fn(&Job, &JobEvent) + Send + Sync>;

/// What has happened to a job.
#[derive(Debug)]
pub enum JobEvent {
    /// It has another state.
    Status(JobStatus),
    /// A mirror could complete.
    Ready,
    /// It waits until it is finalized.
    Pending,
    /// It has ended; [`Job::outcome`] says how.
    Ended,
    /// A request has failed.
    Error {
        /// It was one of the source.
        is_read: bool,
        /// What is done about it.
        action: ErrorAction,
        /// Why it has failed.
        text: String,
    },
}

/// A job that runs or has ended.
pub struct Job {
    id: u64,
    export: String,
    target: String,
    work: JobWork,
    /// It writes to a disk of the server.
    writing: Mutex<Option<TargetGuard>>,
    progress: Arc<Progress>,
    control: CopyControl,
    settings: JobSettings,
    errors: Arc<ErrorPolicies>,
    status: Mutex<JobStatus>,
    /// Bytes per second; 0: no limit.
    speed: AtomicU64,
    /// It was asked to end.
    cancelled: AtomicBool,
    /// It was asked to end its pending state.
    finalized: AtomicBool,
    /// How a mirror is to end once it is finalized.
    completion: Mutex<Option<MirrorCompletion>>,
    started: Instant,
    ended: OnceLock<JobEnd>,
    changed: Notify,
    observer: Arc<OnceLock<JobObserver>>,
    /// It outlives the server.
    record: Option<Arc<JobRecord>>,
    /// The server ends before it.
    interrupted: AtomicBool,
}

/// How a job is controlled.
#[derive(Debug, Clone, Default)]
pub struct JobSettings {
    /// The name of the job; `None`: `job` and its number.
    pub name: Option<String>,
    /// Whether the job waits until it is finalized ([`Job::finalize`]) once everything is copied.
    pub finalized_by_hand: bool,
    /// Whether the job stays in the list of the monitor protocol until it is dismissed.
    pub dismissed_by_hand: bool,
    /// What the job does after errors of the source.
    pub on_source_error: ErrorPolicy,
    /// What the job does after errors of the target.
    pub on_target_error: ErrorPolicy,
    /// Bytes per second; 0: no limit.
    pub speed: u64,
    /// Whether the target stores the data compressed, if it can.
    pub compress: bool,
}

/// What a job does.
enum JobWork {
    /// Copies a point in time, or a disk that does not change.
    Backup(BackupSnapshot),
    /// Copies the disk, and what is written to it meanwhile.
    Mirror(Arc<Mirror>),
    /// Nothing: a job of an earlier server.
    Interrupted,
}

/// The point in time of a backup; none: the disk does not change. It ends with the job, which is
/// remembered: the disk is not kept open.
#[derive(Default)]
struct BackupSnapshot {
    snapshot: Mutex<Option<Snapshot>>,
    last: OnceLock<Stats>,
}

impl BackupSnapshot {
    fn new(snapshot: Option<Snapshot>) -> BackupSnapshot {
        BackupSnapshot { snapshot: Mutex::new(snapshot), last: OnceLock::new() }
    }

    fn is_lost(&self) -> bool {
        self.snapshot().as_ref().is_some_and(Snapshot::is_lost)
    }

    /// The figures of now, or of its end.
    fn stats(&self) -> Stats {
        let now = self.snapshot().as_ref().map(Snapshot::stats);
        now.or_else(|| self.last.get().cloned()).unwrap_or_default()
    }

    /// The job has ended.
    fn end(&self) {
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
struct JobEnd {
    after: Duration,
    /// The report, or why it failed.
    result: Result<String, JobError>,
    /// On request.
    cancelled: bool,
}

/// The target of a job.
#[derive(Clone)]
pub enum JobTarget {
    /// A target in the notation of `copy`.
    Spec(Spec),
    /// The description of an open device, which is neither created nor emptied, and its disk, if it is
    /// one of the server.
    Open(Spec, Stack, Option<Arc<OpenExport>>),
}

impl From<Spec> for JobTarget {
    fn from(spec: Spec) -> JobTarget {
        JobTarget::Spec(spec)
    }
}

impl JobTarget {
    /// The description of the target.
    pub fn spec(&self) -> &Spec {
        match self {
            JobTarget::Spec(spec) | JobTarget::Open(spec, ..) => spec,
        }
    }

    /// A disk of the server is its target from now on.
    async fn begin(&self) -> Result<Option<TargetGuard>, JobError> {
        let JobTarget::Open(spec, _, Some(running)) = self else { return Ok(None) };
        if let Spec::Scheme { scheme, rest } = spec
            && blockhaul_client::is_own_export(&format!("{scheme}:{rest}")).await.unwrap_or(false)
        {
            let text = format!("{spec} is an export of this server: choose another target");
            return Err(JobError::new(TransferErrorKind::Open, text));
        }
        running.begin_writing().map(Some)
    }
}

/// A backup of one or more disks.
pub struct BackupConfig {
    /// The disks, all at one point in time.
    pub disks: Vec<BackupDisk>,
    /// Whether the others are cancelled if one fails, and a rate is for all together.
    pub grouped: bool,
    /// Changes of bitmaps at the point in time, once nothing can fail any more.
    pub bitmap_steps: Vec<BitmapStep>,
}

/// One disk of a backup.
pub struct BackupDisk {
    /// The disk.
    pub export: Arc<OpenExport>,
    /// The target of the copy.
    pub target: JobTarget,
    /// Options of the copy by the names of the command line, such as `retries`.
    pub options: Vec<NamedOption>,
    /// What is read.
    pub source: BackupSource,
    /// The bitmap that selects what is copied; `None`: everything.
    pub selects: Option<String>,
    /// How the job is controlled.
    pub settings: JobSettings,
    /// The job of an earlier server that this one continues.
    pub resumes: Option<Arc<JobRecord>>,
}

impl BackupConfig {
    /// A backup of these disks as one group.
    pub fn new(disks: Vec<BackupDisk>) -> BackupConfig {
        BackupConfig { disks, grouped: true, bitmap_steps: Vec::new() }
    }
}

impl BackupDisk {
    /// A backup of the disk at a point in time that begins now; if `begin` names a bitmap, of what that
    /// marks. The target keeps what a backup with a bitmap does not overwrite.
    pub fn new(
        export: Arc<OpenExport>,
        target: impl Into<JobTarget>,
        begin: SnapshotConfig,
    ) -> BackupDisk {
        BackupDisk {
            export,
            target: target.into(),
            options: Vec::new(),
            selects: begin.bitmap.clone(),
            source: BackupSource::Now(begin),
            settings: JobSettings::default(),
            resumes: None,
        }
    }
}

/// What a backup reads.
pub enum BackupSource {
    /// A point in time that begins now.
    Now(SnapshotConfig),
    /// This device, which does not change, and what was dirty there.
    Still(Arc<dyn Device>, Option<FrozenBitmap>),
}

/// One disk of a backup that has begun.
struct DiskJob {
    export: Arc<OpenExport>,
    /// The point in time, which ends with the job.
    snapshot: Option<Snapshot>,
    frozen: Option<FrozenBitmap>,
    job: Arc<Job>,
}

/// What a job begins with, besides its copy.
struct JobStart<'a> {
    export: &'a OpenExport,
    target: &'a JobTarget,
    writing: Option<TargetGuard>,
    work: JobWork,
    settings: JobSettings,
    errors: Arc<ErrorPolicies>,
    record: Option<Arc<JobRecord>>,
}

impl Jobs {
    /// With the jobs of earlier servers.
    pub fn from_records(found: &[Arc<JobRecord>]) -> Jobs {
        let jobs = Jobs::default();
        let last = found.iter().map(|record| record.id()).max().unwrap_or(0);
        jobs.last.store(last, Ordering::Relaxed);
        let list =
            found.iter().map(|record| Job::from_record(record, &jobs.observer)).map(Arc::new);
        jobs.lock().extend(list);
        jobs
    }

    /// The number of a new job.
    pub(crate) fn next(&self) -> u64 {
        self.last.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// Calls `observer` from now on. Only the first one counts.
    pub fn observe(&self, observer: JobObserver) {
        let _ = self.observer.set(observer);
    }

    /// Begins a backup: a job for each disk. On a worker; returns when the point in time has begun,
    /// and all that can be refused without the target was refused.
    ///
    /// A group is complete as a whole or not at all: if one disk fails, the others are cancelled.
    ///
    /// # Errors
    /// If options or a description are invalid, the export lacks a bitmap, a target is in use, or the point
    /// in time cannot begin. Bitmaps are as they were then. A target that cannot be opened makes the job
    /// fail.
    pub async fn backup(
        self: &Arc<Self>,
        table: &Arc<ExportTable>,
        config: BackupConfig,
    ) -> Result<Vec<Arc<Job>>, JobError> {
        let BackupConfig { disks, grouped, bitmap_steps } = config;
        let copies = copies(table, &disks, grouped)?;
        let mut writing = Vec::new();
        for disk in &disks {
            writing.push(disk.target.begin().await?);
        }
        let record = self.backup_records(table, &disks, grouped).await?;
        let mut all =
            Jobs::begin_snapshots(table, &disks, &record, &bitmap_steps).await?.into_iter();
        let mut begun = Vec::new();
        let mut running = Vec::new();
        let starts = disks.into_iter().zip(copies).zip(record).zip(writing);
        for (((item, mut copy), record), writing) in starts {
            let BackupDisk { export, target, source, settings, resumes, .. } = item;
            let (device, snapshot, frozen) = match source {
                BackupSource::Still(device, frozen) => (device, None, frozen),
                BackupSource::Now(_) => {
                    let OpenSnapshot { snapshot, view, frozen } =
                        all.next().ok_or_else(Error::misfit)?;
                    (view, Some(snapshot), frozen)
                }
            };
            let errors = ErrorPolicies::new(settings.on_source_error, settings.on_target_error);
            copy.read_snapshot(with_source_policy(&errors, Stack::over(device)).await?);
            if resumes.is_some_and(|record| record.has_target()) {
                copy.keep_target();
            }
            let work = JobWork::Backup(BackupSnapshot::new(snapshot.clone()));
            let start = JobStart {
                export: &export,
                target: &target,
                writing,
                work,
                settings,
                errors,
                record,
            };
            let job = self.begin(start, &mut copy);
            begun.push(DiskJob { export, snapshot, frozen, job });
            running.push(copy);
        }
        let jobs: Vec<_> = begun.iter().map(|disk| disk.job.clone()).collect();
        if grouped {
            drop(blockhaul_io::spawn(run_group(table.clone(), begun, running)));
        } else {
            for (disk, copy) in begun.into_iter().zip(running) {
                drop(blockhaul_io::spawn(run_group(table.clone(), vec![disk], vec![copy])));
            }
        }
        Ok(jobs)
    }

    /// Begins a mirror. On a worker; returns when changes of the disk are noted, and all that can be
    /// refused without the target was refused.
    ///
    /// # Errors
    /// If options or the description are invalid, the target is in use, or changes of the disk cannot be
    /// noted. A target that cannot be opened makes the job fail.
    pub async fn mirror(
        self: &Arc<Self>,
        table: &Arc<ExportTable>,
        config: MirrorConfig,
    ) -> Result<Arc<Job>, JobError> {
        if config.options.iter().any(|option| option.name == "verify") {
            return Err(JobError::request("mirror: --verify cannot be used here"));
        }
        let mut copy =
            copy(table, "mirror", &config.export, &config.target, &config.options, None)?;
        let writing = config.target.begin().await?;
        let record = self.mirror_record(table, &config).await?;
        let MirrorConfig { export, target, within, initial, copy_mode, settings, resumes, .. } =
            config;
        let is_resumed = resumes.is_some();
        if initial != InitialCopy::All || resumes.is_some_and(|record| record.has_target()) {
            copy.keep_target();
        }
        let errors = ErrorPolicies::new(settings.on_source_error, settings.on_target_error);
        let setup = MirrorSetup {
            target: target.spec().to_string(),
            progress: copy.control().progress().clone(),
            within,
            initial,
            copy_mode,
            errors_wait: errors.watches_target(),
            is_to_node: matches!(target, JobTarget::Open(..)),
            target_owner: copy.owner(),
            record: record.clone(),
            is_resumed,
        };
        let (mirror, source) = begin_mirror(table, &export, setup).await?;
        copy.follow(with_source_policy(&errors, source).await?, mirror.clone());
        let work = JobWork::Mirror(mirror.clone());
        let start =
            JobStart { export: &export, target: &target, writing, work, settings, errors, record };
        let job = self.begin(start, &mut copy);
        let running = job.clone();
        let watched = job.clone();
        let followed = mirror.clone();
        drop(blockhaul_io::spawn(async move {
            followed.ready(|| watched.is_over()).await;
            if followed.is_ready() {
                watched.has_become_ready();
            }
        }));
        drop(blockhaul_io::spawn(async move {
            let pool = Pool::new(copy.memory());
            let result = match copy.open().await {
                Ok(copy) => copy.run(pool).await,
                Err(error) => Err(error),
            };
            let result = result.map_err(JobError::from);
            mirror.give_up(result.is_ok(), running.is_interrupted()).await;
            running.end(result, None);
        }));
        Ok(job)
    }

    /// Lists a job as running. Its copy, which is begun afterwards, is set up for it.
    fn begin(&self, start: JobStart<'_>, copy: &mut CopySetup) -> Arc<Job> {
        let JobStart { export, target, writing, work, settings, errors, record } = start;
        if let Some(record) = &record {
            copy.record(record.clone());
        }
        if settings.compress {
            copy.put_over_target(Arc::new(CompressingLayer));
        }
        if errors.watches_target() {
            copy.put_over_target(errors.over_target());
        }
        let control = copy.control();
        if settings.speed > 0 {
            control.limit(settings.speed);
        }
        let job = Arc::new(Job {
            id: record.as_ref().map_or_else(|| self.next(), |record| record.id()),
            export: export.name.clone(),
            target: target.spec().to_string(),
            work,
            writing: Mutex::new(writing),
            progress: copy.control().progress().clone(),
            control,
            speed: AtomicU64::new(settings.speed),
            settings,
            errors: errors.clone(),
            status: Mutex::new(JobStatus::Created),
            cancelled: AtomicBool::new(false),
            finalized: AtomicBool::new(false),
            completion: Mutex::default(),
            started: blockhaul_io::now(),
            ended: OnceLock::new(),
            changed: Notify::default(),
            observer: self.observer.clone(),
            record,
            interrupted: AtomicBool::new(false),
        });
        errors.set_job(&job);
        self.remember(job.clone());
        job.tell(&JobEvent::Status(JobStatus::Created));
        job.enter(JobStatus::Running);
        job
    }

    fn remember(&self, job: Arc<Job>) {
        let mut list = self.lock();
        // The one that this continues.
        list.retain(|other| other.id != job.id);
        let is_past = |job: &Arc<Job>| job.is_over() && job.resumable().is_none();
        if list.iter().filter(|job| is_past(job)).count() > ENDED_MAX
            && let Some(place) = list.iter().position(is_past)
        {
            list.remove(place);
        }
        list.push_back(job);
    }

    /// All jobs, in the order in which they began.
    pub fn all(&self) -> Vec<Arc<Job>> {
        self.lock().iter().cloned().collect()
    }

    /// The job of this number.
    pub fn find(&self, id: u64) -> Option<Arc<Job>> {
        self.lock().iter().find(|job| job.id == id).cloned()
    }

    /// The job of this name that was not dismissed.
    pub fn named(&self, name: &str) -> Option<Arc<Job>> {
        let list = self.lock();
        list.iter().find(|job| job.status() != JobStatus::Null && job.name() == name).cloned()
    }

    /// Ends the jobs and the clients of a server that stops, and keeps the bitmaps of its exports.
    /// `clients` ends the clients; returns its result.
    pub async fn end_service<T>(&self, table: &ExportTable, clients: impl Future<Output = T>) -> T {
        table.close().await;
        self.stop().await;
        let ended = clients.await;
        // What devices hold is marked already.
        table.keep_all_bitmaps().await;
        ended
    }

    /// Cancels all jobs and waits until they have ended.
    async fn stop(&self) {
        for job in self.all() {
            if !job.is_over() {
                if job.record.is_some() {
                    log::warn!("the server stops: job {} is interrupted", job.id);
                    job.interrupted.store(true, Ordering::SeqCst);
                } else {
                    log::warn!("the server stops: job {} is cancelled", job.id);
                }
                job.cancel();
                job.over().await;
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<Arc<Job>>> {
        self.list.lock().expect("no panic under this lock")
    }
}

/// What a mirror is to do.
pub struct MirrorConfig {
    /// The disk.
    pub export: Arc<OpenExport>,
    /// The target of the copy.
    pub target: JobTarget,
    /// Options of the copy by the names of the command line, such as `retries`.
    pub options: Vec<NamedOption>,
    /// Maximum time for requests in flight to end when the job begins.
    pub within: Duration,
    /// What is copied before changes are.
    pub initial: InitialCopy,
    /// When the target has what clients write.
    pub copy_mode: CopyMode,
    /// How the job is controlled.
    pub settings: JobSettings,
    /// The job of an earlier server that this one continues.
    pub resumes: Option<Arc<JobRecord>>,
}

/// Begins to note what clients write, and makes the job outlive the server.
async fn begin_mirror(
    table: &Arc<ExportTable>,
    export: &Arc<OpenExport>,
    setup: MirrorSetup,
) -> Result<(Arc<Mirror>, Stack), JobError> {
    let fresh = setup.record.clone().filter(|_| !setup.is_resumed);
    let begun = Mirror::begin(table, export, setup).await;
    match (begun, fresh) {
        (Ok(begun), None) => Ok(begun),
        (Ok(begun), Some(record)) => match record.persist().await {
            Ok(()) => Ok(begun),
            Err(failure) => {
                begun.0.give_up(false, false).await;
                Err(failure)
            }
        },
        (Err(failure), fresh) => {
            let remove = move || fresh.iter().for_each(|record| record.remove());
            let _ = blockhaul_io::offload(remove).await;
            Err(failure)
        }
    }
}

/// A source under the error policy.
async fn with_source_policy(errors: &Arc<ErrorPolicies>, source: Stack) -> Result<Stack, JobError> {
    if errors.watches_source() {
        Ok(source.with_layer(errors.over_source()).await?)
    } else {
        Ok(source)
    }
}

/// Copies the disks of a backup.
async fn run_group(table: Arc<ExportTable>, disks: Vec<DiskJob>, copies: Vec<CopySetup>) {
    let mut results = copy_group(&disks, copies).await;
    if results.iter().all(Result::is_ok) && !finalize_group(&disks).await {
        let text = "the group was cancelled before it was finalized";
        results.iter_mut().for_each(|result| *result = Err(JobError::other(text)));
    }
    let failed = results.iter().any(Result::is_err);
    for (disk, result) in disks.iter().zip(results) {
        let mut lost = None;
        if let Some(record) = &disk.job.record
            && (result.is_ok() || !disk.job.is_interrupted())
        {
            // The end of the snapshot takes the layer away.
            if let Some(map) = record.map() {
                disk.export.maps().retain(|other| !other.is_same(&map));
            }
            let record = record.clone();
            let _ = blockhaul_io::offload(move || record.remove()).await;
        }
        if let Some(snapshot) = &disk.snapshot {
            lost = snapshot.stats().broken;
            table.end_snapshot(&disk.export, snapshot).await;
        }
        if let Some(frozen) = &disk.frozen {
            if failed { frozen.give_back() } else { frozen.settle() }
        }
        disk.job.end(result, lost);
    }
}

/// All disks are copied: waits until their jobs are finalized. False: one was cancelled.
async fn finalize_group(disks: &[DiskJob]) -> bool {
    disks.iter().for_each(|disk| disk.job.enter(JobStatus::Waiting));
    for disk in disks {
        disk.job.enter(JobStatus::Pending);
        if disk.job.settings.finalized_by_hand {
            disk.job.tell(&JobEvent::Pending);
        }
    }
    for disk in disks {
        disk.job.is_finalized(|| disks.iter().any(|disk| disk.job.is_ending())).await;
    }
    !disks.iter().any(|disk| disk.job.is_ending())
}

/// Copies all disks; once one has failed, the others end soon.
async fn copy_group(
    disks: &[DiskJob],
    copies: Vec<CopySetup>,
) -> Vec<Result<CopyReport, JobError>> {
    let pool = Pool::new(copies.first().map_or(0, CopySetup::memory));
    let copies = match open_group(copies).await {
        Ok(copies) => copies,
        Err((index, failure)) => {
            let others = |_| Err(group_failure(disks, index, &failure));
            let mut results: Vec<_> = disks.iter().map(others).collect();
            results[index] = Err(failure);
            return results;
        }
    };
    let jobs: Arc<[Arc<Job>]> = disks.iter().map(|disk| disk.job.clone()).collect();
    let first = Arc::new(OnceLock::new());
    let running: Vec<_> = copies
        .into_iter()
        .enumerate()
        .map(|(index, copy)| {
            let pool = pool.clone();
            let jobs = jobs.clone();
            let first = first.clone();
            blockhaul_io::start(async move {
                let result = copy.run(pool).await;
                if result.is_err() {
                    // The others fail because of it.
                    let _ = first.set(index);
                    jobs.iter().for_each(|job| job.stop());
                }
                result.map_err(JobError::from)
            })
        })
        .collect();
    let mut results = Vec::new();
    for one in running {
        results.push(one.await);
    }
    if let Some(&first) = first.get() {
        let result = results.remove(first);
        if let Err(failure) = &result {
            results
                .iter_mut()
                .for_each(|result| *result = Err(group_failure(disks, first, failure)));
        }
        results.insert(first, result);
    }
    results
}

/// Opens all disks: all checks come before a target is touched. Fails with the index of the disk that
/// cannot be opened.
async fn open_group(copies: Vec<CopySetup>) -> Result<Vec<OpenCopy>, (usize, JobError)> {
    let mut opened = Vec::new();
    for (index, copy) in copies.into_iter().enumerate() {
        match copy.open().await {
            Ok(copy) => opened.push(copy),
            Err(error) => {
                // Not on a worker: it may wait for the server of `[ CMD ]`.
                let _ = blockhaul_io::offload(move || drop(opened)).await;
                return Err((index, error.into()));
            }
        }
    }
    Ok(opened)
}

/// Why the other disks of a group are not complete.
fn group_failure(disks: &[DiskJob], failed: usize, failure: &JobError) -> JobError {
    let name = &disks[failed].export.name;
    let why = failure.facts();
    failure.reworded(format!("the backup of export {name:?}, of the same group, has failed: {why}"))
}

/// The copies of the disks of a backup.
fn copies(
    table: &ExportTable,
    disks: &[BackupDisk],
    grouped: bool,
) -> Result<Vec<CopySetup>, JobError> {
    let mut copies = Vec::new();
    let mut rate = None;
    for (index, item) in disks.iter().enumerate() {
        if grouped && disks[..index].iter().any(|other| other.export.name == item.export.name) {
            let name = &item.export.name;
            let text = format!("backup: export {name:?} is in the group twice");
            return Err(JobError::request(text));
        }
        let mut copy = copy(
            table,
            "backup",
            &item.export,
            &item.target,
            &item.options,
            item.selects.as_deref(),
        )?;
        if grouped {
            let engine = copy.engine();
            rate = rate.or(engine.rate.take());
            engine.rate.clone_from(&rate);
        }
        copies.push(copy);
    }
    Ok(copies)
}

/// The copy of a job.
fn copy(
    table: &ExportTable,
    command: &str,
    export: &OpenExport,
    target: &JobTarget,
    options: &[NamedOption],
    bitmap: Option<&str>,
) -> Result<CopySetup, JobError> {
    let wrong = |why: String| JobError::request(format!("{command}: {why}"));
    if let Some(option) = options.iter().find(|one| !JOB_OPTIONS.contains(&one.name.as_str())) {
        return Err(wrong(format!("--{} cannot be used here", option.name)));
    }
    let mut options =
        TransferOptions::from_named(options).map_err(|error| wrong(error.to_string()))?;
    options.flush = true;
    options.bitmap = bitmap.map(|name| format!("{BITMAP_CONTEXT}{name}"));
    let named = Spec::Path(export.storage().into());
    let target = match target {
        JobTarget::Spec(spec) => Endpoint::Device(spec.clone()),
        JobTarget::Open(spec, stack, _) => Endpoint::Open(spec.clone(), stack.clone()),
    };
    let request = CopyRequest { options, ..CopyRequest::new(Endpoint::Device(named), target) };
    let options = request.options.clone();
    let copy = CopySetup::new(request, table.config().registry.clone())?;
    (table.config().on_copy)(&options, copy.specs());
    Ok(copy.called(format!("the {command} of export {:?}", export.name)))
}

impl Job {
    /// Notes how it has ended; `lost`: why its point in time is lost.
    fn end(&self, result: Result<CopyReport, JobError>, lost: Option<String>) {
        let cancelled = self.cancelled.load(Ordering::Relaxed);
        let result = match (result, lost) {
            // It was complete before the snapshot was lost, or noticed.
            (Ok(report), _) => Ok(report.text),
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
        let after = blockhaul_io::elapsed(self.started);
        let is_complete = result.is_ok();
        // A request to cancel may come too late.
        let cancelled = cancelled && !is_complete;
        let _ = self.ended.set(JobEnd { after, result, cancelled });
        if let JobWork::Backup(moment) = &self.work {
            moment.end();
        }
        drop(self.writing.lock().expect("no panic under this lock").take());
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
        self.tell(&JobEvent::Ended);
        self.tell(&JobEvent::Status(JobStatus::Concluded));
        if !by_hand {
            self.tell(&JobEvent::Status(JobStatus::Null));
        }
        self.changed.notify();
        if let Some(mirror) = self.mirror() {
            mirror.has_ended();
        }
    }

    /// Changes its state, if that leads there.
    fn enter(&self, next: JobStatus) {
        {
            let mut status = self.status.lock().expect("no panic under this lock");
            if !status.leads_to(next) {
                return;
            }
            *status = next;
        }
        self.tell(&JobEvent::Status(next));
    }

    fn tell(&self, happened: &JobEvent) {
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

    /// A request of it has failed. With `ErrorAction::Stop` it pauses.
    pub(crate) fn report_error(&self, is_read: bool, action: ErrorAction, error: &Error) {
        self.tell(&JobEvent::Error { is_read, action, text: error.located() });
        if action != ErrorAction::Report
            && let Some(mirror) = self.mirror()
        {
            mirror.release_clients();
        }
        if action == ErrorAction::Stop {
            self.pause(true);
        }
    }

    /// Whether what it reads is lost for good: to repeat a request makes no sense.
    pub(crate) fn has_lost_its_source(&self) -> bool {
        matches!(&self.work, JobWork::Backup(moment) if moment.is_lost())
    }

    /// A mirror could complete.
    fn has_become_ready(&self) {
        if self.status() == JobStatus::Running {
            self.enter(JobStatus::Ready);
            self.tell(&JobEvent::Ready);
        }
    }

    /// Whether the job was asked to end, or stopped with its group.
    pub(crate) fn is_ending(&self) -> bool {
        self.cancelled.load(Ordering::Relaxed) || self.progress.is_cancelled()
    }

    /// Waits until it is finalized, or `over`.
    async fn is_finalized(&self, over: impl Fn() -> bool) {
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
        self.tell(&JobEvent::Pending);
        true
    }

    /// Forgets an ended job in the monitor protocol.
    pub fn dismiss(&self) {
        self.enter(JobStatus::Null);
    }

    /// `backup` or `mirror`.
    pub fn kind(&self) -> &'static str {
        match self.work {
            JobWork::Backup(_) => "backup",
            JobWork::Interrupted
                if self.record.as_ref().is_some_and(|record| record.is_backup()) =>
            {
                "backup"
            }
            JobWork::Mirror(_) | JobWork::Interrupted => "mirror",
        }
    }

    /// A job of an earlier server.
    fn from_record(record: &Arc<JobRecord>, observer: &Arc<OnceLock<JobObserver>>) -> Job {
        let text = "the server ended before the job".to_string();
        let end = JobEnd {
            after: Duration::ZERO,
            result: Err(JobError::new(TransferErrorKind::Connection, text)),
            cancelled: false,
        };
        let settings = JobSettings { dismissed_by_hand: true, ..JobSettings::from_record(record) };
        let control = CopyControl::default();
        Job {
            id: record.id(),
            export: record.text("export"),
            target: record.text("target"),
            work: JobWork::Interrupted,
            writing: Mutex::default(),
            progress: control.progress().clone(),
            control,
            speed: AtomicU64::new(settings.speed),
            settings,
            errors: Arc::default(),
            status: Mutex::new(JobStatus::Concluded),
            cancelled: AtomicBool::new(false),
            finalized: AtomicBool::new(false),
            completion: Mutex::default(),
            started: blockhaul_io::now(),
            ended: OnceLock::from(end),
            changed: Notify::default(),
            observer: observer.clone(),
            record: Some(record.clone()),
            interrupted: AtomicBool::new(false),
        }
    }

    /// What it needs to be resumed, if it is a job of an earlier server that was not cancelled.
    pub fn resumable(&self) -> Option<&Arc<JobRecord>> {
        let is_earlier = matches!(self.work, JobWork::Interrupted);
        self.record.as_ref().filter(|_| is_earlier && !self.is_ending())
    }

    /// Whether the server ends before it.
    fn is_interrupted(&self) -> bool {
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
            JobWork::Backup(_) | JobWork::Interrupted => None,
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

    /// Ends it soon.
    fn stop(&self) {
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

    fn state(&self) -> &'static str {
        match (self.ended.get(), self.status()) {
            (Some(JobEnd { result: Ok(_), .. }), _) => "completed",
            (Some(JobEnd { cancelled: true, .. }), _) => "cancelled",
            (Some(_), _) if self.resumable().is_some() => "interrupted",
            (Some(_), _) if matches!(self.work, JobWork::Interrupted) => "cancelled",
            (Some(_), _) => "failed",
            (None, JobStatus::Paused | JobStatus::Standby) => "paused",
            (None, JobStatus::Pending) => "pending",
            (None, _) => match self.mirror() {
                Some(mirror) if mirror.is_completing() => "completing",
                Some(mirror) if mirror.is_ready() => "ready",
                _ => "running",
            },
        }
    }

    /// For the control socket.
    pub fn described(&self) -> Value {
        let now = self.progress.snapshot();
        let ended = self.ended.get();
        let seconds = ended.map_or_else(|| blockhaul_io::elapsed(self.started), |end| end.after);
        let mut described = json!({
            "job": self.id,
            "name": self.name(),
            "type": self.kind(),
            "export": self.export,
            "target": self.target,
            "state": self.state(),
            "io_status": self.io_status(),
            "done": now.done(),
            "total": now.total,
            "seconds": seconds.as_secs_f64(),
            "result": ended.and_then(|end| end.result.as_ref().ok()),
            "error": ended.and_then(|end| end.result.as_ref().err()).map(ToString::to_string),
        });
        let more = match &self.work {
            JobWork::Interrupted => {
                self.record.as_ref().map(|record| record.described()).unwrap_or_default()
            }
            JobWork::Mirror(mirror) => mirror.described(),
            JobWork::Backup(moment) => {
                let stats = moment.stats();
                json!({
                    "released": self.progress.discarded().0,
                    "saved": stats.saved,
                    "kept": stats.kept,
                    "writes_delayed": stats.waits,
                    "longest_delay": stats.longest_wait.as_secs_f64(),
                })
            }
        };
        if let (Value::Object(described), Value::Object(more)) = (&mut described, more) {
            described.extend(more);
        }
        described
    }
}
