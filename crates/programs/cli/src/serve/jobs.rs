//! Jobs of a server: backups and mirrors of exports in use.

use std::collections::VecDeque;
use std::ffi::OsString;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::time::{Duration, Instant};

use blockhaul_catalog::{Spec, Stack};
use blockhaul_engine::Progress;
use blockhaul_io::{Notify, Pool};
use blockhaul_snapshot::{BITMAP_CONTEXT, Snapshot};
use serde_json::{Value, json};

use super::exports::{Running, Table};
use super::mirror::Mirror;
use super::snapshots::{Begin, Begun, Taken};
use crate::args::{self, Command};
use crate::copy::job::{Job as Copy, JobControl, Report, overlap};
use crate::exit::Failure;
use crate::long;

/// Number of ended jobs that are remembered.
const ENDED_MAX: usize = 100;

/// The options of `copy` that a backup takes: those that need no terminal, no other file, and a
/// source that is there only once.
const ALLOWED: &[&str] = &[
    "allocated",
    "connections",
    "destination-is-zero",
    "direct",
    "iops",
    "min-rate",
    "multi-conn",
    "no-extents",
    "no-progress",
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

/// The jobs of a server.
#[derive(Default)]
pub struct Jobs {
    list: Mutex<VecDeque<Arc<Job>>>,
    last: AtomicU64,
}

/// A job that runs or has ended.
pub struct Job {
    id: u64,
    export: String,
    target: String,
    work: Work,
    progress: Arc<Progress>,
    control: JobControl,
    /// It was asked to end.
    cancelled: AtomicBool,
    started: Instant,
    ended: OnceLock<End>,
    changed: Notify,
}

/// What a job does.
enum Work {
    /// Copies this point in time.
    Backup(Snapshot),
    /// Copies the disk, and what is written to it meanwhile.
    Mirror(Arc<Mirror>),
}

/// How a job has ended.
struct End {
    after: Duration,
    /// The report, or why it failed.
    result: Result<String, Failure>,
    /// On request.
    cancelled: bool,
}

/// What a backup is to do.
pub struct Wanted {
    /// Exports and their targets: one, or a group at one point in time.
    pub disks: Vec<(Arc<Running>, Spec)>,
    /// Options of `copy`, as words. A rate is for all disks together.
    pub options: Vec<String>,
    /// The point in time. The bitmap that is handed over to it selects what is copied.
    pub begin: Begin,
}

/// One disk of a backup that has begun.
struct Disk {
    export: Arc<Running>,
    snapshot: Snapshot,
    taken: Option<Taken>,
    job: Arc<Job>,
}

impl Jobs {
    /// Begins a backup: a job for each disk. On a worker; returns when the point in time has begun,
    /// and all that can be refused without the target was refused.
    ///
    /// A group is complete as a whole or not at all: if one disk fails, the others are cancelled.
    pub async fn backup(
        self: &Arc<Self>,
        table: &Arc<Table>,
        wanted: Wanted,
    ) -> Result<Vec<Arc<Job>>, Failure> {
        let Wanted { disks, options, begin } = wanted;
        let bitmap = begin.bitmap.as_deref();
        let mut copies = Vec::new();
        let mut rate = None;
        for (index, (export, target)) in disks.iter().enumerate() {
            if disks[..index].iter().any(|(other, _)| other.name == export.name) {
                let text = format!("backup: export {:?} is in the group twice", export.name);
                return Err(Failure::usage(text));
            }
            let mut copy = copy("backup", export, target, &options, bitmap)?;
            rate = rate.or(copy.options.rate.take());
            copy.options.rate.clone_from(&rate);
            copies.push(copy);
        }
        let exports: Vec<_> = disks.iter().map(|(export, _)| &**export).collect();
        let all = table.begin_snapshots(&exports, &begin).await?;
        let mut begun = Vec::new();
        for (((export, target), copy), one) in disks.iter().zip(&mut copies).zip(all) {
            let Begun { snapshot, view, taken } = one;
            copy.read_from(Stack::over(view));
            let job = self.begin(export, target, copy, Work::Backup(snapshot.clone()));
            begun.push(Disk { export: export.clone(), snapshot, taken, job });
        }
        let jobs: Vec<_> = begun.iter().map(|disk| disk.job.clone()).collect();
        drop(blockhaul_io::spawn(run_group(table.clone(), begun, copies)));
        Ok(jobs)
    }

    /// Begins a mirror. On a worker; returns when changes of the disk are noted, and all that can be
    /// refused without the target was refused.
    pub async fn mirror(
        self: &Arc<Self>,
        table: &Arc<Table>,
        export: Arc<Running>,
        target: Spec,
        options: &[String],
        within: Duration,
    ) -> Result<Arc<Job>, Failure> {
        if options.iter().any(|option| option.starts_with("--verify")) {
            return Err(Failure::usage("mirror: --verify cannot be used here"));
        }
        let mut copy = copy("mirror", &export, &target, options, None)?;
        let progress = copy.progress.clone();
        let begun = Mirror::begin(table, &export, target.to_string(), progress, within);
        let (mirror, source) = begun.await?;
        copy.follow(source, mirror.clone());
        let job = self.begin(&export, &target, &copy, Work::Mirror(mirror.clone()));
        let running = job.clone();
        drop(blockhaul_io::spawn(async move {
            let (result, copy) = {
                let pool = Pool::new(copy.memory());
                copy.run(pool).await
            };
            mirror.give_up().await;
            let _ = blockhaul_io::offload(move || drop(copy)).await;
            running.end(result, None);
        }));
        Ok(job)
    }

    fn begin(&self, export: &Running, target: &Spec, copy: &Copy, work: Work) -> Arc<Job> {
        let job = Arc::new(Job {
            id: self.last.fetch_add(1, Ordering::Relaxed) + 1,
            export: export.name.clone(),
            target: target.to_string(),
            work,
            progress: copy.progress.clone(),
            control: copy.control(),
            cancelled: AtomicBool::new(false),
            started: blockhaul_io::now(),
            ended: OnceLock::new(),
            changed: Notify::default(),
        });
        self.remember(job.clone());
        job
    }

    fn remember(&self, job: Arc<Job>) {
        let mut list = self.lock();
        let ended = list.iter().filter(|job| job.is_over()).count();
        if ended > ENDED_MAX
            && let Some(place) = list.iter().position(|job| job.is_over())
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

    /// Cancels all jobs and waits until they have ended.
    pub async fn stop(&self) {
        for job in self.all() {
            if !job.is_over() {
                log::warn!("the server stops: job {} is cancelled", job.id);
                job.cancel();
                job.over().await;
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<Arc<Job>>> {
        self.list.lock().expect("no panic under this lock")
    }
}

/// Copies the disks of a backup.
async fn run_group(table: Arc<Table>, disks: Vec<Disk>, copies: Vec<Copy>) {
    let (results, copies) = copy_group(&disks, copies).await;
    // Not on a worker: it may wait for the server of `[ CMD ]`.
    let _ = blockhaul_io::offload(move || drop(copies)).await;
    let failed = results.iter().any(Result::is_err);
    for (disk, result) in disks.iter().zip(results) {
        let lost = disk.snapshot.stats().broken;
        table.end_snapshot(&disk.export, &disk.snapshot).await;
        if failed && let Some(taken) = &disk.taken {
            taken.give_back();
        }
        disk.job.end(result, lost);
    }
}

/// Copies all disks; once one has failed, the others end soon.
async fn copy_group(
    disks: &[Disk],
    copies: Vec<Copy>,
) -> (Vec<Result<Report, Failure>>, Vec<Copy>) {
    let (mut open, mut refused) = (Vec::new(), None);
    // All checks come before a target is touched.
    for (index, copy) in copies.into_iter().enumerate() {
        let (result, copy) = if disks.len() > 1 && refused.is_none() {
            copy.check_both().await
        } else {
            (Ok(()), copy)
        };
        refused = refused.or(result.err().map(|failure| (index, failure)));
        open.push(copy);
    }
    if refused.is_none()
        && let Some((index, what, other)) = overlap(&open.iter().map(Some).collect::<Vec<_>>())
    {
        let text =
            format!("{what} of export {:?}: choose another target", disks[other].export.name);
        refused = Some((index, Failure::usage(text)));
    }
    if let Some((index, failure)) = refused {
        let mut results: Vec<_> =
            open.iter().map(|_| Err(for_others(disks, index, &failure))).collect();
        results[index] = Err(failure);
        return (results, open);
    }
    let jobs: Arc<[Arc<Job>]> = disks.iter().map(|disk| disk.job.clone()).collect();
    let memory = open.first().map_or(0, Copy::memory);
    let pool = Pool::new(memory);
    let first = Arc::new(OnceLock::new());
    let running: Vec<_> = open
        .into_iter()
        .enumerate()
        .map(|(index, copy)| {
            let (pool, jobs, first) = (pool.clone(), jobs.clone(), first.clone());
            blockhaul_io::start(async move {
                let (result, copy) = copy.run(pool).await;
                if result.is_err() {
                    // The others fail because of it.
                    let _ = first.set(index);
                    jobs.iter().for_each(|job| job.stop());
                }
                (result, copy)
            })
        })
        .collect();
    let (mut results, mut ended) = (Vec::new(), Vec::new());
    for one in running {
        let (result, copy) = one.await;
        results.push(result);
        ended.push(copy);
    }
    if let Some(&first) = first.get() {
        let result = results.remove(first);
        if let Err(failure) = &result {
            results.iter_mut().for_each(|result| *result = Err(for_others(disks, first, failure)));
        }
        results.insert(first, result);
    }
    (results, ended)
}

/// Why the other disks of a group are not complete.
fn for_others(disks: &[Disk], failed: usize, failure: &Failure) -> Failure {
    let name = &disks[failed].export.name;
    let text = format!("the backup of export {name:?}, of the same group, has failed: {failure}");
    Failure::new(failure.status(), text)
}

/// The copy of a job.
fn copy(
    command: &str,
    export: &Running,
    target: &Spec,
    options: &[String],
    bitmap: Option<&str>,
) -> Result<Copy, Failure> {
    let args = copy_options(command, options, bitmap)?;
    let named = Spec::Path(export.storage().into());
    let mut copy = Copy::between(&args, named, target.clone())?;
    copy.options.flush = true;
    copy.options.rate = long::rate(&args)?;
    Ok(copy)
}

/// The options of a copy that is a job.
fn copy_options(
    command: &str,
    options: &[String],
    bitmap: Option<&str>,
) -> Result<args::Copy, Failure> {
    let mut words: Vec<OsString> = ["blockhaul", "copy", "--no-progress"].map(Into::into).into();
    words.extend(options.iter().map(Into::into));
    words.extend(["source", "target"].map(Into::into));
    let wrong = |error: clap::Error| {
        let text = error.render().to_string();
        let text = text.lines().map(str::trim).take_while(|line| !line.is_empty());
        let text = text.collect::<Vec<_>>().join(" ");
        Failure::usage(format!("{command}: {}", text.trim_start_matches("error: ")))
    };
    for given in args::given(words.clone()).map_err(wrong)? {
        if !ALLOWED.contains(&given.name.as_str()) {
            return Err(Failure::usage(format!("{command}: --{} cannot be used here", given.name)));
        }
    }
    if let Some(name) = bitmap {
        words.insert(2, format!("--bitmap={BITMAP_CONTEXT}{name}").into());
    }
    match args::parse(words).map_err(wrong)?.command {
        Command::Copy(args) => Ok(*args),
        _ => Err(Failure::usage(format!("{command}: these are not options of copy"))),
    }
}

impl Job {
    /// Notes how it has ended; `lost`: why its point in time is lost.
    fn end(&self, result: Result<Report, Failure>, lost: Option<String>) {
        let cancelled = self.cancelled.load(Ordering::Relaxed);
        let result = match (result, lost) {
            // It was complete before the snapshot was lost, or noticed.
            (Ok(report), _) => Ok(report.text),
            (Err(failure), Some(lost)) if !cancelled => {
                Err(Failure::new(failure.status(), format!("{failure} ({lost})")))
            }
            (Err(failure), _) => Err(failure),
        };
        let (id, kind, target) = (self.id, self.kind(), &self.target);
        match &result {
            Ok(_) => log::info!("job {id}: {kind} to {target} is complete"),
            Err(_) if cancelled => log::info!("job {id}: cancelled"),
            Err(failure) => log::error!("job {id}: {kind} to {target}: {failure}"),
        }
        let after = blockhaul_io::elapsed(self.started);
        let _ = self.ended.set(End { after, result, cancelled });
        self.changed.notify();
        if let Some(mirror) = self.mirror() {
            mirror.has_ended();
        }
    }

    fn kind(&self) -> &'static str {
        match self.work {
            Work::Backup(_) => "backup",
            Work::Mirror(_) => "mirror",
        }
    }

    /// The mirror, if it is one.
    pub fn mirror(&self) -> Option<&Arc<Mirror>> {
        match &self.work {
            Work::Backup(_) => None,
            Work::Mirror(mirror) => Some(mirror),
        }
    }

    /// Whether it has ended.
    pub fn is_over(&self) -> bool {
        self.ended.get().is_some()
    }

    /// Waits until it has ended.
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

    /// Waits until it could complete, or has ended.
    pub async fn ready(&self) {
        match self.mirror() {
            Some(mirror) => mirror.ready(|| self.is_over()).await,
            None => self.over().await,
        }
    }

    /// Ends it soon, on request.
    pub fn cancel(&self) {
        self.cancelled.store(true, Ordering::Relaxed);
        self.stop();
    }

    /// Ends it soon.
    fn stop(&self) {
        self.progress.cancel();
        if let Some(control) = self.control.get() {
            control.cancel();
        }
        if let Some(mirror) = self.mirror() {
            mirror.wake();
        }
    }

    /// Starts no more requests until it is resumed. The snapshot stays. False: it is not copying.
    pub fn pause(&self, paused: bool) -> bool {
        let Some(control) = self.control.get().filter(|_| !self.is_over()) else { return false };
        match paused {
            true => control.pause(),
            false => control.resume(),
        }
        if let Some(mirror) = self.mirror() {
            mirror.wake();
            if paused && mirror.is_cutting() {
                // Clients wait for it.
                control.resume();
                return false;
            }
        }
        true
    }

    /// Limits the bytes per second; 0: no limit. False: it is not copying.
    pub fn limit(&self, bytes: u64) -> bool {
        let Some(control) = self.control.get().filter(|_| !self.is_over()) else { return false };
        let (_, requests) = control.rate_limits();
        control.set_rate(bytes, requests);
        true
    }

    fn state(&self) -> &'static str {
        match self.ended.get() {
            Some(End { result: Ok(_), .. }) => "completed",
            Some(End { cancelled: true, .. }) => "cancelled",
            Some(_) => "failed",
            None if self.control.get().is_some_and(|control| control.is_paused()) => "paused",
            None => match self.mirror() {
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
            "type": self.kind(),
            "export": self.export,
            "target": self.target,
            "state": self.state(),
            "done": now.done(),
            "total": now.total,
            "seconds": seconds.as_secs_f64(),
            "result": ended.and_then(|end| end.result.as_ref().ok()),
            "error": ended.and_then(|end| end.result.as_ref().err()).map(ToString::to_string),
            "exit_status": ended.map(|end| end.result.as_ref().map_or_else(Failure::status, |_| 0)),
        });
        let more = match &self.work {
            Work::Mirror(mirror) => mirror.described(),
            Work::Backup(snapshot) => {
                let stats = snapshot.stats();
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
