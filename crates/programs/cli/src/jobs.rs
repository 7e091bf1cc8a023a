//! `blockhaul copy --job`: several disks in one run, with one budget and one report.

use std::collections::{HashMap, VecDeque};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use blockhaul_engine::{ByKernel, Rate};
use blockhaul_io::{Pool, Remote};

use crate::copy::job::{CopyJob, Report, overlap};
use crate::ends::{full, same_place};
use crate::exit::{self, Failure, Outcome};
use crate::jobfile::{self, Disk};
use crate::progress::{Reporter, Sink};
use crate::session::Session;
use crate::snapshot::{End, Watched};
use crate::{args, brackets, long, signals};

/// Disks copied at a time: enough to keep a path busy while one of them ends or begins.
const PARALLEL: u16 = 4;

/// Runs `blockhaul copy --job FILE`.
pub fn run(args: &args::CopyArgs, file: &Path) -> Outcome {
    let (words, groups) = brackets::take(std::env::args_os().collect()).map_err(Failure::usage)?;
    let given =
        args::given(words).map_err(|error| Failure::usage(exit::joined(&error.to_string())))?;
    // A group could only be the value of an option, and none accepts one.
    drop(groups);
    let listed = jobfile::read(file, &given)?;
    let sink = Reporter::open(args.progress, args.no_progress)?;
    let mut copies = Copies::prepare(listed.common, listed.disks)?;
    copies.run(sink)?;
    copies.end(args.verbose)
}

/// The disks of a job, which share limits and workers.
pub(crate) struct Copies {
    common: args::CopyArgs,
    limit: Option<Arc<Rate>>,
    parallel: usize,
    pool: Pool,
    disks: Vec<Running>,
    /// Once they run.
    session: Option<Session>,
}

impl Copies {
    /// Checks all disks, as far as nothing must be opened for that.
    pub(crate) fn prepare(common: args::CopyArgs, listed: Vec<Disk>) -> Result<Copies, Failure> {
        let limit = long::rate(&common)?;
        let parallel = usize::from(common.parallel.unwrap_or(PARALLEL)).min(listed.len());
        let parallel = common.total_connections.map_or(parallel, |all| parallel.min(all.into()));
        let share = common.total_connections.map(|all| usize::from(all) / parallel);
        let mut disks = Vec::new();
        for disk in listed {
            let mut disk = Running::new(disk, limit.clone(), share)?;
            if let Some(job) = disk.job.as_mut().filter(|_| common.engine.no_zero_copy) {
                job.options.by_kernel = ByKernel::Never;
            }
            disks.push(disk);
        }
        check_together(&disks)?;
        let most = disks.iter().filter_map(|disk| disk.job.as_ref()).map(CopyJob::memory).max();
        let pool = Pool::new(common.total_memory.or(most).unwrap_or(0));
        Ok(Copies { common, limit, parallel, pool, disks, session: None })
    }

    /// Opens all disks, then copies them.
    pub(crate) fn run(&mut self, sink: Option<Sink>) -> Result<(), Failure> {
        let watched = self.disks.iter().map(|disk| disk.watched.clone()).collect();
        let session = Session::start(&self.common, sink, watched, self.limit.clone())?;
        let session = self.session.insert(session);
        let disks = std::mem::take(&mut self.disks);
        let parallel = self.parallel;
        let pool = self.pool.clone();
        self.disks = session.block_on(move || copy_all(disks, parallel, pool));
        Ok(())
    }

    /// The workers, once the disks run.
    pub(crate) fn session(&self) -> Option<&Session> {
        self.session.as_ref()
    }

    /// The outcome of each disk, in the order in which they were listed; `None`: it did not begin.
    pub(crate) fn results(&self) -> impl Iterator<Item = Option<Result<(), &Failure>>> {
        self.disks.iter().map(|disk| Some(disk.result.as_ref()?.as_ref().map(drop)))
    }

    /// A disk has failed after its copy.
    pub(crate) fn fail(&mut self, index: usize, failure: Failure) {
        if let Some(disk) = self.disks.get_mut(index) {
            disk.result = Some(Err(failure));
        }
    }

    /// Prints the report; returns the exit status.
    pub(crate) fn end(mut self, verbose: bool) -> Outcome {
        let signal = self.session.as_ref().map_or(0, Session::signal);
        let outcome = tell(&self.disks, verbose, signal);
        // Not on a worker: this waits for the servers of `[ CMD ]`.
        self.disks.clear();
        if let Some(session) = &mut self.session {
            session.finish(End::from(&outcome));
        }
        outcome
    }
}

/// A disk of the job.
struct Running {
    name: String,
    place: String,
    watched: Watched,
    journal: Option<PathBuf>,
    manifest: Option<PathBuf>,
    /// Taken while a worker has it.
    job: Option<CopyJob>,
    /// The result; `None` before it has begun.
    result: Option<Result<Report, Failure>>,
}

impl Running {
    fn new(disk: Disk, limit: Option<Arc<Rate>>, share: Option<usize>) -> Result<Running, Failure> {
        let Disk { name, place, args, groups, .. } = disk;
        let at = |failure: Failure| {
            Failure::new(failure.status(), format!("{place}: disk {name}: {failure}"))
        };
        let mut job = CopyJob::new(&args, &groups).map_err(at)?;
        if args.discard_source && args.journal.is_none() {
            // When the job runs again, disks without one are copied from the beginning.
            let text = "discard-source needs a journal: add journal = \"FILE\"";
            return Err(at(Failure::usage(text)));
        }
        job.options.rate = limit;
        if let Some(share) = share {
            job.options.connections = job.options.connections.min(share);
        }
        if let Some(journal) = &mut job.journal {
            // An increment is complete when its manifest exists: the next one begins with that.
            journal.keep = args.since.is_none();
        }
        let ends = job.shown_ends();
        let progress = job.progress.clone();
        let watched = Watched { name: Some(name.clone()), ends, progress, ..Watched::default() };
        let journal = args.journal;
        let manifest = args.manifest;
        Ok(Running { name, place, watched, journal, manifest, job: Some(job), result: None })
    }
}

/// Refuses disks that conflict with each other.
fn check_together(disks: &[Running]) -> Result<(), Failure> {
    let mut files: HashMap<PathBuf, (&Path, &Running)> = HashMap::new();
    for disk in disks {
        for file in [&disk.journal, &disk.manifest].into_iter().flatten() {
            if let Some((_, other)) = files.insert(full(file), (file, disk)) {
                let place = &disk.place;
                let name = &disk.name;
                let file = file.display();
                let text = format!("{place}: disk {name}: disk {} also writes {file}", other.name);
                return Err(Failure::usage(text));
            }
        }
    }
    for (file, disk) in files.into_values() {
        let beside = blockhaul_catalog::Spec::Path(file.to_path_buf());
        let is_beside =
            |job: &CopyJob| [job.ends().0, job.ends().1].map(|end| same_place(&beside, end));
        let taken =
            |other: &&Running| other.job.as_ref().is_some_and(|job| is_beside(job) != [false; 2]);
        if let Some(other) = disks.iter().find(taken) {
            let place = &disk.place;
            let name = &disk.name;
            let file = file.display();
            let text = format!(
                "{place}: disk {name}: {file} is the source or target of disk {}: choose another name",
                other.name
            );
            return Err(Failure::usage(text));
        }
    }
    for (index, disk) in disks.iter().enumerate() {
        for (other_index, other) in disks.iter().enumerate() {
            let (Some(one), Some(two)) = (&disk.job, &other.job) else { continue };
            let (source, target) = one.ends();
            let (_, other_target) = two.ends();
            let place = &disk.place;
            let name = &disk.name;
            if other_index < index && same_place(target, other_target) {
                let text = format!("{place}: disk {name}: disk {} has the same target", other.name);
                return Err(Failure::usage(text));
            }
            let discards = [one, two].iter().any(|job| job.options.discard_source);
            if other_index < index && discards && same_place(source, two.ends().0) {
                let text = format!(
                    "{place}: disk {name}: disk {} has the same source, and discard-source leaves \
                     nothing for the other",
                    other.name
                );
                return Err(Failure::usage(text));
            }
            if other_index != index && same_place(source, other_target) {
                let text = format!(
                    "{place}: disk {name}: its source is the target of disk {}",
                    other.name
                );
                return Err(Failure::usage(text));
            }
        }
    }
    Ok(())
}

/// Opens all disks, then copies them, `parallel` at a time.
async fn copy_all(mut disks: Vec<Running>, parallel: usize, pool: Pool) -> Vec<Running> {
    // All checks come before a target is touched.
    if !open_each(&mut disks, CopyJob::prepare_source).await
        || !open_each(&mut disks, CopyJob::check_both).await
        || !are_apart(&mut disks)
        || !open_each(&mut disks, CopyJob::prepare_target).await
    {
        return disks;
    }
    let waiting: VecDeque<_> = (0..disks.len()).collect();
    let waiting = Arc::new(Mutex::new(waiting));
    let disks = Arc::new(Mutex::new(disks));
    let runners: Vec<_> = (0..parallel)
        .map(|_| blockhaul_io::start(run_some(waiting.clone(), disks.clone(), pool.clone())))
        .collect();
    for runner in runners {
        runner.await;
    }
    std::mem::take(&mut *disks.lock().expect("no panic under this lock"))
}

/// Opens a side of each disk; false: one cannot be opened.
async fn open_each<F, O>(disks: &mut [Running], open: F) -> bool
where
    F: Fn(CopyJob) -> O + Send + Copy + 'static,
    O: Future<Output = (Result<(), Failure>, CopyJob)> + 'static,
{
    // One after another: errors are reported in the file's order.
    for (index, disk) in disks.iter_mut().enumerate() {
        let Some(job) = disk.job.take() else { continue };
        let result = match Remote::to(index).spawn(move || open(job)).await {
            Ok((result, job)) => {
                disk.job = Some(job);
                result
            }
            Err(_) => Err(ended()),
        };
        if let Err(failure) = result {
            disk.result = Some(Err(failure));
            return false;
        }
    }
    true
}

/// Checks the storage of all open sides: no disk may have the target of another one as a side.
/// False: one has.
fn are_apart(disks: &mut [Running]) -> bool {
    let jobs: Vec<_> = disks.iter().map(|disk| disk.job.as_ref()).collect();
    let Some((index, what, other)) = overlap(&jobs) else { return true };
    let text = format!("{what} of disk {}: choose another target", disks[other].name);
    disks[index].result = Some(Err(Failure::usage(text)));
    false
}

/// Copies disks until none is left.
async fn run_some(
    waiting: Arc<Mutex<VecDeque<usize>>>,
    disks: Arc<Mutex<Vec<Running>>>,
    pool: Pool,
) {
    loop {
        let next = waiting.lock().expect("no panic under this lock").pop_front();
        let Some(index) = next else { return };
        let job = {
            let mut disks = disks.lock().expect("no panic under this lock");
            match &mut disks[index] {
                // Stopped before its turn.
                disk if disk.watched.progress.is_cancelled() => None,
                disk => disk.job.take(),
            }
        };
        let Some(job) = job else { continue };
        let pool = pool.clone();
        // On the worker where it was opened.
        let ran = Remote::to(index).spawn(move || job.run(pool)).await;
        let disk = &mut disks.lock().expect("no panic under this lock")[index];
        match ran {
            Ok((result, job)) => {
                let is_stopped = result.is_err() && disk.watched.progress.is_cancelled();
                let stopped = || Failure::new(exit::FAILED, job.stopped());
                let result = if is_stopped { Err(stopped()) } else { result };
                disk.job = Some(job);
                // Set here only.
                let _ = disk.watched.result.set(result.as_ref().err().map(Failure::to_string));
                match &result {
                    Err(failure) if is_stopped => log::warn!("disk {}: {failure}", disk.name),
                    Err(failure) => log::warn!("disk {} failed: {failure}", disk.name),
                    Ok(_) => {}
                }
                disk.result = Some(result);
            }
            Err(_) => disk.result = Some(Err(ended())),
        }
    }
}

fn ended() -> Failure {
    Failure::new(exit::FAILED, "a worker ended before its disk")
}

/// Prints the report, in the file's order; returns the exit status.
fn tell(disks: &[Running], verbose: bool, signal: i32) -> Outcome {
    let mut failed = Vec::new();
    for disk in disks {
        if let Some(Ok(report)) = &disk.result {
            report.tell(verbose, &format!("disk {}: ", disk.name), false)?;
        } else {
            failed.push(disk);
        }
    }
    let first = failed.iter().find_map(|disk| match &disk.result {
        Some(Err(failure)) => Some((*disk, failure)),
        _ => None,
    });
    let Some(any) = failed.first() else {
        // They are not needed any more, unless something was discarded at the source.
        let removable = disks.iter().filter(|disk| {
            disk.result.as_ref().is_some_and(|result| {
                result.as_ref().is_ok_and(|report| !report.summary.journal_stays)
            })
        });
        removable.filter_map(|disk| disk.journal.as_deref()).for_each(long::remove);
        return Ok(0);
    };
    let complete = disks.len() - failed.len();
    let counts = format!("{complete} of {} disks are complete", disks.len());
    let next = if disks.iter().all(|disk| disk.journal.is_some()) {
        "run it again to resume"
    } else {
        "run it again; disks with a journal resume"
    };
    if signal != 0 {
        let text = format!("stopped by a signal: {counts}: {next}");
        return Err(Failure::new(signals::status(signal), text));
    }
    let Some((disk, failure)) = first else {
        return Err(Failure::new(exit::FAILED, format!("disk {} was not started", any.name)));
    };
    let others: Vec<_> = failed
        .iter()
        .filter(|other| other.name != disk.name && other.result.is_some())
        .map(|other| other.name.as_str())
        .collect();
    let others = if others.is_empty() {
        String::new()
    } else {
        format!("; also failed: {}", others.join(", "))
    };
    let begun = disks.iter().any(|disk| disk.watched.progress.snapshot().done() > 0);
    let counts = if begun { counts } else { "nothing was copied".to_string() };
    let text = format!("disk {}: {failure}{others}; {counts}", disk.name);
    Err(Failure::new(failure.status(), text))
}
