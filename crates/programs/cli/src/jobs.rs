//! `blockhaul copy --job`: several disks in one run, with one budget and one report.

use std::collections::{HashMap, VecDeque};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use blockhaul_catalog::DeviceSpec;
use blockhaul_engine::{RateLimit, Side};
#[cfg(feature = "formats")]
use blockhaul_formats::OvaDisks;
use blockhaul_io::{Pool, WorkerHandle};
use blockhaul_metrics::ObservedCopy;
use blockhaul_transfer::{
    CopyControl, CopyReport, CopyRequest, CopySetup, OpenCopy, OpenSource, Overlap, TransferError,
    TransferOptions, find_overlap, full, rate_limit, remove_journal, same_place,
};

use crate::copy::{self, copy_options, report};
use crate::exit::{self, CommandFailure, CommandResult};
use crate::jobfile::{self, JobFile, JobFileDisk, JobFileOptions};
use crate::progress::{ProgressOutput, ProgressReporter, ProgressStyle};
use crate::session::CopySession;
use crate::{args, brackets, signals};

/// Disks copied at a time: enough to keep a path busy while one of them ends or begins.
const PARALLEL: u16 = 4;

/// Runs `blockhaul copy --job FILE`.
pub fn run(args: &args::CopyArgs, file: &Path) -> CommandResult {
    let (words, groups) =
        brackets::take(std::env::args_os().collect()).map_err(CommandFailure::usage)?;
    let given = args::given(words)
        .map_err(|error| CommandFailure::usage(exit::joined(&error.to_string())))?;
    // A group could only be the value of an option, and none accepts one.
    drop(groups);
    run_disks(args, jobfile::read(file, &given)?)
}

/// Runs a copy of all disks of an archive.
#[cfg(feature = "formats")]
pub fn run_all(args: &args::CopyArgs, source: DeviceSpec, target: DeviceSpec) -> CommandResult {
    let limits = TransferOptions::from(args);
    let options = TransferOptions { rate: None, rate_file: None, iops: None, ..limits.clone() };
    let disk = JobFileDisk {
        name: String::new(),
        place: source.to_string(),
        source,
        target: Some(target),
        options,
        image: args.image.clone(),
        keys: std::collections::BTreeMap::new(),
    };
    let common = JobFileOptions {
        limits,
        parallel: args.parallel,
        total_memory: args.total_memory,
        total_connections: args.total_connections,
        session: args.into(),
    };
    run_disks(args, JobFile { common, disks: vec![disk] })
}

fn run_disks(args: &args::CopyArgs, file: JobFile) -> CommandResult {
    let JobFile { mut common, disks } = file;
    #[cfg(feature = "formats")]
    let disks = all_disks(disks)?;
    common.session.shows_map = args.progress == Some(ProgressStyle::Map);
    let sink = ProgressReporter::open(args.progress, args.no_progress)?;
    let disks = disks.into_iter().map(DiskRequest::from_file).collect::<Result<Vec<_>, _>>()?;
    if args.dry_run {
        let plan = |disk: DiskRequest| match copy::plan(disk.request) {
            Ok(plan) => Ok((Some(disk.name), plan)),
            Err(failure) => Err(in_disk(&disk.place, &disk.name, &failure)),
        };
        let plans = disks.into_iter().map(plan).collect::<Result<Vec<_>, _>>()?;
        return copy::print_plans(&plans, args.json);
    }
    let mut copies = CopyBatch::prepare(common, disks)?;
    copies.run(sink)?;
    copies.end(args.verbose)
}

/// The disks of a job, with each disk of an archive in place of all of them.
#[cfg(feature = "formats")]
fn all_disks(listed: Vec<JobFileDisk>) -> Result<Vec<JobFileDisk>, CommandFailure> {
    let mut disks = Vec::new();
    for disk in listed {
        let (Some(all), Some(target)) = (OvaDisks::of(&disk.source), &disk.target) else {
            disks.push(disk);
            continue;
        };
        let target = target.to_string();
        let count = async |archive| OvaDisks::count(&archive).await;
        let archive = all.archive()?;
        let read = blockhaul_catalog::Intent::READ;
        let count = crate::image_tools::with_device("source", archive, read, count)?;
        if count > 1 && !target.contains(NUMBER) {
            let text = format!(
                "{}: {} has {count} disks: write {NUMBER} in the target {target} for the number of the disk",
                disk.place, disk.source
            );
            return Err(CommandFailure::usage(text));
        }
        for number in 1..=count {
            let name = format!("{} {number}", disk.name).trim().to_string();
            let target = target.replace(NUMBER, &number.to_string());
            let target = Some(DeviceSpec::parse(target.as_ref())?);
            let options = disk.options.numbered(NUMBER, number);
            let image = disk.image.clone();
            let (place, keys) = (disk.place.clone(), disk.keys.clone());
            let source = all.disk(number);
            disks.push(JobFileDisk { name, place, source, target, options, image, keys });
        }
    }
    Ok(disks)
}

/// The number of a disk, in the name of a target.
#[cfg(feature = "formats")]
const NUMBER: &str = "{}";

/// A disk to copy.
pub(crate) struct DiskRequest {
    /// Its name for messages.
    pub(crate) name: String,
    /// Its position in the file, for messages.
    pub(crate) place: String,
    pub(crate) request: CopyRequest,
}

impl DiskRequest {
    /// The copy of a disk in a file of `copy`.
    fn from_file(disk: JobFileDisk) -> Result<DiskRequest, CommandFailure> {
        let target = disk.target.clone();
        let target = target.ok_or_else(|| CommandFailure::usage("a disk has no target"))?;
        DiskRequest::with_target(disk, target)
    }

    /// The copy of a disk to `target`, after the checks for which nothing is opened.
    pub(crate) fn with_target(
        disk: JobFileDisk,
        target: DeviceSpec,
    ) -> Result<DiskRequest, CommandFailure> {
        let JobFileDisk { name, place, source, options, image, .. } = disk;
        let checked = copy_options::checked_request(&image, options, [source, target]);
        let request = checked.map_err(|failure| in_disk(&place, &name, &failure))?;
        Ok(DiskRequest { name, place, request })
    }
}

/// The failure of a disk, with its position in the file.
fn in_disk(place: &str, name: &str, failure: &CommandFailure) -> CommandFailure {
    CommandFailure::new(failure.status(), format!("{place}: disk {name}: {failure}"))
}

/// The disks of a job, which share limits and workers.
pub(crate) struct CopyBatch {
    common: JobFileOptions,
    limit: Option<Arc<RateLimit>>,
    parallel: usize,
    pool: Pool,
    disks: Vec<DiskCopy>,
    /// Of the disks, until they run.
    setups: Vec<CopySetup>,
    /// Once they run.
    session: Option<CopySession>,
}

impl CopyBatch {
    /// Checks all disks, as far as nothing must be opened for that.
    pub(crate) fn prepare(
        common: JobFileOptions,
        listed: Vec<DiskRequest>,
    ) -> Result<CopyBatch, CommandFailure> {
        let limit = rate_limit(&common.limits)?;
        let parallel = usize::from(common.parallel.unwrap_or(PARALLEL)).min(listed.len());
        let parallel = common.total_connections.map_or(parallel, |all| parallel.min(all.into()));
        let share = common.total_connections.map(|all| usize::from(all) / parallel);
        let mut disks = Vec::new();
        let mut setups = Vec::new();
        for disk in listed {
            let (disk, mut setup) = DiskCopy::new(disk, &common, limit.clone())?;
            if let Some(share) = share {
                let engine = setup.engine();
                engine.connections = engine.connections.min(share);
                engine.connections_max = engine.connections_max.min(share);
            }
            disks.push(disk);
            setups.push(setup);
        }
        check_together(&disks)?;
        let most = setups.iter().map(CopySetup::memory).max();
        let pool = Pool::new(common.total_memory.or(most).unwrap_or(0));
        Ok(CopyBatch { common, limit, parallel, pool, disks, setups, session: None })
    }

    /// Opens all disks, then copies them.
    pub(crate) fn run(&mut self, sink: Option<ProgressOutput>) -> Result<(), CommandFailure> {
        let watched = self.disks.iter().map(|disk| disk.watched.clone()).collect();
        let session = CopySession::start(&self.common.session, sink, watched, self.limit.clone())?;
        let session = self.session.insert(session);
        let disks = std::mem::take(&mut self.disks);
        let setups = std::mem::take(&mut self.setups);
        let parallel = self.parallel;
        let pool = self.pool.clone();
        self.disks = session.block_on(move || copy_all(disks, setups, parallel, pool));
        Ok(())
    }

    /// The workers, once the disks run.
    pub(crate) fn session(&self) -> Option<&CopySession> {
        self.session.as_ref()
    }

    /// The outcome of each disk, in the order in which they were listed; `None`: it did not begin.
    pub(crate) fn results(&self) -> impl Iterator<Item = Option<Result<(), &CommandFailure>>> {
        self.disks.iter().map(|disk| Some(disk.result.as_ref()?.as_ref().map(drop)))
    }

    /// A disk has failed after its copy.
    pub(crate) fn fail(&mut self, index: usize, failure: CommandFailure) {
        if let Some(disk) = self.disks.get_mut(index) {
            disk.result = Some(Err(failure));
        }
    }

    /// Prints the report; returns the exit status.
    pub(crate) fn end(mut self, verbose: bool) -> CommandResult {
        let signal = self.session.as_ref().map_or(0, CopySession::signal);
        let outcome = tell(&self.disks, verbose, signal);
        if let Some(session) = &mut self.session {
            session.finish(exit::command_end(&outcome));
        }
        outcome
    }
}

/// A disk of the job.
struct DiskCopy {
    name: String,
    place: String,
    watched: ObservedCopy,
    journal: Option<PathBuf>,
    manifest: Option<PathBuf>,
    error_map: Option<PathBuf>,
    /// Source and target.
    specs: [DeviceSpec; 2],
    discards_source: bool,
    control: CopyControl,
    /// The result; `None` before it has begun.
    result: Option<Result<CopyReport, CommandFailure>>,
}

impl DiskCopy {
    fn new(
        disk: DiskRequest,
        common: &JobFileOptions,
        limit: Option<Arc<RateLimit>>,
    ) -> Result<(DiskCopy, CopySetup), CommandFailure> {
        let DiskRequest { name, place, mut request } = disk;
        request.rate = limit;
        request.options.no_zero_copy |= common.limits.no_zero_copy;
        let TransferOptions { journal, manifest, error_map, since, .. } = request.options.clone();
        let setup = copy_options::set_up(request);
        let mut setup = setup.map_err(|error| in_disk(&place, &name, &error.into()))?;
        if since.is_none() {
            // An increment is complete when its manifest exists: the next one begins with that.
            setup.keep_journal();
        }
        let control = setup.control();
        let ends = copy::shown_ends(&setup);
        let progress = control.progress().clone();
        let watched =
            ObservedCopy { name: Some(name.clone()), ends, progress, ..ObservedCopy::default() };
        let disk = DiskCopy {
            name,
            place,
            watched,
            journal,
            manifest,
            error_map,
            specs: setup.specs().map(DeviceSpec::clone),
            discards_source: setup.discards_source(),
            control,
            result: None,
        };
        Ok((disk, setup))
    }

    /// Notes the result of its copy.
    fn end(&mut self, result: Result<CopyReport, CommandFailure>) {
        let is_stopped = result.is_err() && self.control.progress().is_cancelled();
        let result = if is_stopped {
            let text = format!("stopped by a signal{}", self.control.target_state());
            Err(CommandFailure::new(exit::FAILED, text))
        } else {
            result
        };
        // Set here only.
        let _ = self.watched.result.set(result.as_ref().err().map(CommandFailure::to_string));
        match &result {
            Err(failure) if is_stopped => log::warn!("disk {}: {failure}", self.name),
            Err(failure) => log::warn!("disk {} failed: {failure}", self.name),
            Ok(_) => {}
        }
        self.result = Some(result);
    }
}

/// Refuses disks that conflict with each other.
fn check_together(disks: &[DiskCopy]) -> Result<(), CommandFailure> {
    let mut files: HashMap<PathBuf, (&Path, &DiskCopy)> = HashMap::new();
    for disk in disks {
        for file in [&disk.journal, &disk.manifest, &disk.error_map].into_iter().flatten() {
            if let Some((_, other)) = files.insert(full(file), (file, disk)) {
                let place = &disk.place;
                let name = &disk.name;
                let file = file.display();
                let text = format!("{place}: disk {name}: disk {} also writes {file}", other.name);
                return Err(CommandFailure::usage(text));
            }
        }
    }
    for (file, disk) in files.into_values() {
        let beside = DeviceSpec::Path(file.to_path_buf());
        let is_side = |other: &&DiskCopy| other.specs.iter().any(|spec| same_place(&beside, spec));
        if let Some(other) = disks.iter().find(is_side) {
            let place = &disk.place;
            let name = &disk.name;
            let file = file.display();
            let text = format!(
                "{place}: disk {name}: {file} is the source or target of disk {}: choose another name",
                other.name
            );
            return Err(CommandFailure::usage(text));
        }
    }
    for (index, disk) in disks.iter().enumerate() {
        for (other_index, other) in disks.iter().enumerate() {
            let [source, target] = &disk.specs;
            let [other_source, other_target] = &other.specs;
            let place = &disk.place;
            let name = &disk.name;
            if other_index < index && same_place(target, other_target) {
                let text = format!("{place}: disk {name}: disk {} has the same target", other.name);
                return Err(CommandFailure::usage(text));
            }
            let discards = disk.discards_source || other.discards_source;
            if other_index < index && discards && same_place(source, other_source) {
                let text = format!(
                    "{place}: disk {name}: disk {} has the same source, and discard-source leaves \
                     nothing for the other",
                    other.name
                );
                return Err(CommandFailure::usage(text));
            }
            if other_index != index && same_place(source, other_target) {
                let text = format!(
                    "{place}: disk {name}: its source is the target of disk {}",
                    other.name
                );
                return Err(CommandFailure::usage(text));
            }
        }
    }
    Ok(())
}

/// Opens all disks, then copies them, `parallel` at a time.
async fn copy_all(
    mut disks: Vec<DiskCopy>,
    setups: Vec<CopySetup>,
    parallel: usize,
    pool: Pool,
) -> Vec<DiskCopy> {
    let Some(open) = open_all(&mut disks, setups).await else { return disks };
    let waiting = Arc::new(Mutex::new(open.into_iter().enumerate().collect()));
    let disks = Arc::new(Mutex::new(disks));
    let runners: Vec<_> = (0..parallel)
        .map(|_| blockhaul_io::start(run_some(Arc::clone(&waiting), disks.clone(), pool.clone())))
        .collect();
    for runner in runners {
        runner.await;
    }
    std::mem::take(&mut *disks.lock().expect("no panic under this lock"))
}

/// Opens both sides of all disks. All checks come before a target is touched. `None`: one has failed.
async fn open_all(disks: &mut [DiskCopy], setups: Vec<CopySetup>) -> Option<Vec<OpenCopy>> {
    let sources = step_each(disks, setups, CopySetup::open_source).await?;
    let open = step_each(disks, sources, OpenSource::open_target).await?;
    if let Some(Overlap { index, side, other }) = find_overlap(&open.iter().collect::<Vec<_>>()) {
        let what = match side {
            Side::Source => "its source overlaps the target",
            Side::Target => "its target overlaps the target",
        };
        let text = format!("{what} of disk {}: choose another target", disks[other].name);
        disks[index].result = Some(Err(CommandFailure::usage(text)));
        close(open).await;
        return None;
    }
    step_each(disks, open, OpenCopy::prepare_target).await
}

/// Takes a step with each copy; `None`: one has failed.
async fn step_each<A, B, F, O>(disks: &mut [DiskCopy], copies: Vec<A>, step: F) -> Option<Vec<B>>
where
    A: Send + 'static,
    B: Send + 'static,
    F: Fn(A) -> O + Send + Copy + 'static,
    O: Future<Output = Result<B, TransferError>> + 'static,
{
    let mut done = Vec::with_capacity(copies.len());
    let mut left = copies.into_iter().enumerate();
    // One after another: errors are reported in the file's order.
    while let Some((index, copy)) = left.next() {
        let stepped = WorkerHandle::to(index).spawn(move || step(copy)).await;
        match stepped.map_err(|_| ended()).and_then(|result| result.map_err(CommandFailure::from)) {
            Ok(copy) => done.push(copy),
            Err(failure) => {
                disks[index].result = Some(Err(failure));
                close((done, left)).await;
                return None;
            }
        }
    }
    Some(done)
}

/// Closes devices, outside of workers: this waits for the servers of `[ CMD ]`.
async fn close<T: Send + 'static>(open: T) {
    // Fails only when the program ends.
    let _ = blockhaul_io::offload(move || drop(open)).await;
}

/// Copies disks until none is left.
async fn run_some(
    waiting: Arc<Mutex<VecDeque<(usize, OpenCopy)>>>,
    disks: Arc<Mutex<Vec<DiskCopy>>>,
    pool: Pool,
) {
    loop {
        let next = waiting.lock().expect("no panic under this lock").pop_front();
        let Some((index, copy)) = next else { return };
        let control = copy.control();
        // Stopped before its turn.
        if control.progress().is_cancelled() {
            close(copy).await;
            continue;
        }
        let pool = pool.clone();
        // On the worker where it was opened.
        let ran = WorkerHandle::to(index).spawn(move || copy.run(pool)).await;
        let ran = ran.map_err(|_| ended()).and_then(|result| result.map_err(CommandFailure::from));
        let disk = &mut disks.lock().expect("no panic under this lock")[index];
        disk.end(ran);
    }
}

fn ended() -> CommandFailure {
    CommandFailure::new(exit::FAILED, "a worker ended before its disk")
}

/// Prints the report, in the file's order; returns the exit status.
fn tell(disks: &[DiskCopy], verbose: bool, signal: i32) -> CommandResult {
    let mut failed = Vec::new();
    for disk in disks {
        if let Some(Ok(report)) = &disk.result {
            report::print(report, verbose, &format!("disk {}: ", disk.name))?;
            report::print_digest(report, &report::DigestLine::Named, false)?;
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
        removable.filter_map(|disk| disk.journal.as_deref()).for_each(remove_journal);
        let reports = disks.iter().filter_map(|disk| disk.result.as_ref()?.as_ref().ok());
        return Ok(reports.map(report::status).max().unwrap_or(0));
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
        return Err(CommandFailure::new(signals::status(signal), text));
    }
    let Some((disk, failure)) = first else {
        return Err(CommandFailure::new(
            exit::FAILED,
            format!("disk {} was not started", any.name),
        ));
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
    Err(CommandFailure::new(failure.status(), text))
}
