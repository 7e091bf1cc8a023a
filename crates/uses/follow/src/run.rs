//! The platform of a plan: its provider, copies by `transfer`, and the directory of the state.

use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime};

use blockhaul_block::{Error, Kind};
use blockhaul_catalog::{DeviceSpec, Intent, Registry};
use blockhaul_change_lists::ChangeList;
use blockhaul_engine::{CopyProgress, EngineOptions, Manifest};
use blockhaul_io::{Pool, Runtime, RuntimeConfig, plain};
use blockhaul_transfer::{
    CopyRequest, Endpoint, TransferError, TransferErrorKind, TransferOptions, file_of, full,
    same_place, shell_word,
};

use crate::command::run_command;
use crate::error::{FollowError, FollowErrorKind};
use crate::limits::VerifyScope;
use crate::machine::{FollowMachine, FollowPhase, FollowState, RoundCopy};
use crate::plan::{CutOver, FollowPlan};
use crate::platform::{FollowPlatform, FollowResult, run_follow};
use crate::prediction::{CopyFigures, RoundFigures};
use crate::protocol::{ProviderRequest, ReplyReader, RoundOffer};
use crate::state_file::{StateDir, TargetMark};

/// Time between two looks at what requests the cut-over.
const TICK: Duration = Duration::from_millis(100);

/// Ends a move, or requests its cut-over, from another thread.
#[derive(Debug, Clone, Default)]
pub struct FollowControl(Arc<ControlState>);

#[derive(Debug, Default)]
struct ControlState {
    signal: AtomicI32,
    cut_over: Arc<AtomicBool>,
    copies: Mutex<Vec<Arc<CopyProgress>>>,
}

impl FollowControl {
    /// Ends the move soon, because of this signal. The same command resumes it.
    pub fn cancel(&self, signal: i32) {
        self.0.signal.store(signal, Ordering::Relaxed);
        let copies = self.0.copies.lock().expect("no panic under this lock");
        copies.iter().for_each(|copy| copy.cancel());
    }

    /// The signal that requested the end; 0 for none.
    pub fn signal(&self) -> i32 {
        self.0.signal.load(Ordering::Relaxed)
    }

    /// Set it to request the cut-over that waits for a signal.
    pub fn cut_over(&self) -> Arc<AtomicBool> {
        self.0.cut_over.clone()
    }

    fn is_cancelled(&self) -> bool {
        self.signal() != 0
    }

    /// The counters of a copy, which ends when the move does.
    fn progress(&self) -> Arc<CopyProgress> {
        let progress = Arc::<CopyProgress>::default();
        let mut copies = self.0.copies.lock().expect("no panic under this lock");
        copies.push(progress.clone());
        if self.is_cancelled() {
            progress.cancel();
        }
        progress
    }

    fn forget_copies(&self) {
        self.0.copies.lock().expect("no panic under this lock").clear();
    }
}

/// Reads a plan, and carries it out, or resumes it; SIGUSR1 requests the cut-over of a plan that waits for it. `print`
/// gets lines for users. With `is_dry`, it only says what would be done.
///
/// # Errors
/// If it is not a plan, and those of [`follow`].
pub fn run_plan(
    path: &Path,
    settings: &[String],
    is_dry: bool,
    registry: Registry,
    control: &FollowControl,
    print: &(dyn Fn(&str) + Sync),
) -> Result<(), TransferError> {
    let plan = FollowPlan::read(path, settings)?;
    if is_dry {
        print(&plan.text());
        return Ok(());
    }
    signal_hook::flag::register(signal_hook::consts::SIGUSR1, control.cut_over()).map_err(
        |error| {
            let text = format!("cannot handle SIGUSR1: {}", plain(&error));
            FollowError::new(FollowErrorKind::State, text)
        },
    )?;
    let line = |text: &str| print(&format!("{text}\n"));
    let result = follow(&plan, registry, &RuntimeConfig::default(), control, &line)?;
    line(&result.text(&plan.state));
    Ok(())
}

/// Carries out a plan, or resumes it. `print` gets lines for users.
///
/// # Errors
/// The first error that no other attempt resolves: the same plan can then be carried out again, and resumes the move.
pub fn follow(
    plan: &FollowPlan,
    registry: Registry,
    workers: &RuntimeConfig,
    control: &FollowControl,
    print: &(dyn Fn(&str) + Sync),
) -> Result<FollowResult, FollowError> {
    let runtime = Runtime::start(workers).map_err(|error| {
        FollowError::new(FollowErrorKind::State, format!("cannot start workers: {}", plain(&error)))
    })?;
    let dir = StateDir::open(&plan.state)?;
    let names: Vec<_> = plan.disks.iter().map(|disk| disk.name.clone()).collect();
    let targets: Vec<_> = plan.disks.iter().map(|disk| disk.target.to_string()).collect();
    let (mut machine, marks) = match dir.load(&plan.machine, &targets)? {
        None => {
            // Journals of a move whose state is gone are of other points in time.
            names.iter().try_for_each(|name| dir.remove_journals(name, Path::new("")))?;
            (FollowMachine::new(&plan.machine, &names, plan.limits.clone()), Vec::new())
        }
        Some((state, marks)) => {
            if state.phase == FollowPhase::Complete {
                report_complete(plan, print)?;
            }
            let limits = plan.limits.clone();
            let has_stop = plan.stop.is_some();
            (FollowMachine::resume(&plan.machine, &names, limits, state, has_stop)?, marks)
        }
    };
    let mut run = FollowRun { plan, registry, runtime, control, dir, targets, marks, print };
    let outcome = run_follow(&mut machine, &mut run);
    if control.is_cancelled() && outcome.is_err() {
        let text = "stopped: run the same command again to resume the move";
        return Err(FollowError::new(FollowErrorKind::Cancelled, text));
    }
    let result = outcome?;
    run.dir.write("result.json", &result)?;
    Ok(result)
}

/// Says that an earlier run has completed the move.
fn report_complete(plan: &FollowPlan, print: &(dyn Fn(&str) + Sync)) -> Result<(), FollowError> {
    let state = plan.state.display();
    let files = plan.disks.iter().filter_map(|disk| file_of(&disk.target));
    if let Some(absent) = files.into_iter().find(|file| !file.exists()) {
        return Err(FollowError::new(
            FollowErrorKind::State,
            format!(
                "this move is complete, and {} does not exist any more: remove {state} to move again",
                absent.display()
            ),
        ));
    }
    print(&format!(
        "this move was complete before, and nothing is done: remove {state} to move again"
    ));
    Ok(())
}

/// The storage of a device on this machine.
#[derive(Debug, PartialEq, Eq)]
enum StoragePlace {
    /// A file: device and inode.
    File(u64, u64),
    /// A block device: its number.
    Block(u64),
    /// A file that does not exist yet.
    Absent(PathBuf),
}

impl StoragePlace {
    fn of(spec: &DeviceSpec) -> Option<StoragePlace> {
        const LINKS_MAX: usize = 40;
        let mut path = file_of(spec)?;
        if let Ok(found) = std::fs::metadata(&path) {
            let is_block = found.file_type().is_block_device();
            return Some(if is_block {
                StoragePlace::Block(found.rdev())
            } else {
                StoragePlace::File(found.dev(), found.ino())
            });
        }
        for _ in 0..LINKS_MAX {
            let Ok(link) = std::fs::read_link(&path) else { break };
            path = path.parent().map_or_else(|| link.clone(), |folder| folder.join(&link));
        }
        Some(StoragePlace::Absent(full(&path)))
    }
}

/// Whether two devices are the same storage, as far as their descriptions and the files of this machine tell.
fn is_same(one: &DeviceSpec, other: &DeviceSpec) -> bool {
    let place = StoragePlace::of(one);
    same_place(one, other) || place.is_some() && place == StoragePlace::of(other)
}

/// The platform of a plan.
pub struct FollowRun<'a> {
    plan: &'a FollowPlan,
    registry: Registry,
    runtime: Runtime,
    control: &'a FollowControl,
    dir: StateDir,
    targets: Vec<String>,
    marks: Vec<Option<TargetMark>>,
    print: &'a (dyn Fn(&str) + Sync),
}

impl FollowRun<'_> {
    fn command(&self, name: &str, script: &str) -> Result<(), FollowError> {
        let failed = |why| {
            FollowError::new(
                FollowErrorKind::Command,
                format!("the command {name} ({script}): {why}"),
            )
        };
        let is_cancelled = || self.control.is_cancelled();
        let mut log = |line: &str| {
            log::info!("{name}: {line}");
            Ok(())
        };
        run_command(script, self.plan.timeout, &is_cancelled, &mut log).map_err(failed)
    }

    /// The file of a target, if it is one.
    fn target_file(&self, disk: usize) -> Option<PathBuf> {
        file_of(&self.plan.disks[disk].target)
    }

    /// Refuses two disks with one target.
    fn check_targets(&self) -> Result<(), FollowError> {
        let disks = &self.plan.disks;
        for (index, disk) in disks.iter().enumerate() {
            if let Some(other) =
                disks[..index].iter().find(|other| is_same(&other.target, &disk.target))
            {
                let text = format!("disks {} and {} have the same target", other.name, disk.name);
                return Err(FollowError::new(FollowErrorKind::Plan, text));
            }
        }
        Ok(())
    }

    /// Refuses a source of two disks, and one that is the target of a disk.
    fn check_sources(&self, copies: &[RoundCopy]) -> Result<(), FollowError> {
        let mut specs: Vec<DeviceSpec> = Vec::with_capacity(copies.len());
        for copy in copies {
            let spec = OfferedSource::new(&copy.offer)?.spec;
            if specs.iter().any(|other| is_same(other, &spec)) {
                return Err(FollowError::provider(format!("{spec} is the source of two disks")));
            }
            if let Some(disk) = self.plan.disks.iter().find(|disk| is_same(&disk.target, &spec)) {
                let text = format!("the source {spec} is the target of disk {}", disk.name);
                return Err(FollowError::provider(text));
            }
            specs.push(spec);
        }
        Ok(())
    }

    fn mark_targets(&mut self) {
        let marks = (0..self.plan.disks.len()).map(|disk| TargetMark::of(&self.target_file(disk)?));
        self.marks = marks.collect();
    }

    /// How to copy a disk.
    fn options(
        &self,
        copy: &RoundCopy,
        source: &OfferedSource,
    ) -> Result<TransferOptions, FollowError> {
        let name = &self.plan.disks[copy.disk].name;
        let round = copy.offer.round;
        // A journal goes on with the same point in time only.
        let part = if copy.full.is_some() { "-full" } else { "" };
        let journal =
            self.dir.file(&format!("{name}.{}{part}.journal", file_name(&copy.offer.epoch)));
        self.dir.remove_journals(name, &journal)?;
        let mut options = TransferOptions {
            flush: true,
            journal: Some(journal),
            verify: copy.last && self.plan.limits.verify == VerifyScope::Written,
            ..TransferOptions::default()
        };
        if copy.full.is_none() {
            options.ranges = copy.offer.ranges.clone();
            options.bitmap = copy.offer.bitmap.clone();
        } else if self.plan.adopt
            && round == 1
            && self.target_file(copy.disk).is_none_or(|file| file.exists())
        {
            let manifest = self.dir.file(&format!("{name}.adopted"));
            let found = self.manifest(&self.plan.disks[copy.disk].target, source.size)?;
            self.dir.write_text(&format!("{name}.adopted"), &found.to_string())?;
            options.journal = None;
            options.since = Some(manifest);
        }
        Ok(options)
    }

    /// The digests of a disk of this size.
    fn manifest(&self, spec: &DeviceSpec, size: u64) -> Result<Manifest, FollowError> {
        let (registry, device) = (self.registry.clone(), spec.clone());
        let progress = self.control.progress();
        let made = self.runtime.block_on(move || async move {
            let stack = registry.open(&device, Vec::new(), Intent::READ).await?;
            let pool = Pool::new(EngineOptions::default().memory());
            let found = stack.device().facts().size;
            if found < size {
                let text = format!("it has {found} bytes, and the disk has {size}");
                return Err(Error::new(Kind::Invalid, text));
            }
            // A target may be larger.
            let ranges = (found > size).then(|| Arc::from([(0, size)]));
            let options = EngineOptions { ranges, ..EngineOptions::default() };
            let made = blockhaul_engine::manifest(&stack, None, &options, &pool, &progress).await;
            made.map_err(|failed| failed.error)
        });
        made.map_err(|error| {
            let text = format!("cannot read {spec}: {}", error.located());
            FollowError::new(FollowErrorKind::Copy(TransferErrorKind::Open), text)
        })
    }

    /// Compares a disk with its target by digests, and keeps them. Where they differ, if they do.
    fn compare(&self, copy: &RoundCopy) -> Result<Option<String>, FollowError> {
        let OfferedSource { spec, size } = OfferedSource::new(&copy.offer)?;
        let disk = &self.plan.disks[copy.disk];
        let [source, target] = std::thread::scope(|scope| {
            let source = scope.spawn(|| self.manifest(&spec, size));
            let target = self.manifest(&disk.target, size);
            [source.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)), target]
        });
        let (source, target) = (source?, target?);
        let differences = source.differences(&target);
        match differences.iter().find(|&&(at, _)| at < size) {
            Some((at, len)) => Ok(Some(format!("in the {len} bytes at offset {at}"))),
            None => {
                self.dir.write_text(&format!("{}.manifest", disk.name), &source.to_string())?;
                Ok(None)
            }
        }
    }

    /// Copies one disk; the bytes that were written, and read.
    fn copy_disk(&self, copy: &RoundCopy) -> Result<(u64, u64), FollowError> {
        let source = OfferedSource::new(&copy.offer)?;
        let options = self.options(copy, &source)?;
        let target = self.plan.disks[copy.disk].target.clone();
        let reads_all = options.since.is_some();
        let (registry, progress) = (self.registry.clone(), self.control.progress());
        // The server is asked for the bitmap, too.
        let connecting = registry.clone().connecting(&options.connections());
        let copied = self.runtime.block_on(move || async move {
            let OfferedSource { spec, size } = source;
            let opened = connecting.open(&spec, Vec::new(), Intent::READ).await;
            let stack = opened.map_err(|error| {
                let text = format!("cannot open the source {spec}: {}", error.located());
                let kind = match error.kind() {
                    Kind::TimedOut | Kind::Disconnected => TransferErrorKind::Connection,
                    _ => TransferErrorKind::Open,
                };
                FollowError::new(FollowErrorKind::Copy(kind), text)
            })?;
            let found = stack.device().facts().size;
            if found != size {
                return Err(FollowError::provider(format!(
                    "the source {spec} has {found} bytes, and the provider says {size}"
                )));
            }
            let source = Endpoint::Open(spec, stack);
            let request = CopyRequest {
                options,
                progress,
                ..CopyRequest::new(source, Endpoint::Device(target))
            };
            let open = request.open(&registry).await?;
            let pool = Pool::new(open.memory());
            Ok(open.run(pool).await?)
        });
        let report = copied?;
        for warning in &report.warnings {
            log::warn!("{}: {warning}", copy.offer.disk);
        }
        let written = report.summary.data;
        Ok((written, if reads_all { copy.offer.size } else { written }))
    }
}

/// The source of an offer.
struct OfferedSource {
    spec: DeviceSpec,
    size: u64,
}

impl OfferedSource {
    fn new(offer: &RoundOffer) -> Result<OfferedSource, FollowError> {
        let spec = DeviceSpec::parse(offer.source.as_ref())
            .map_err(|error| FollowError::provider(format!("source: {}", error.text())))?;
        if spec == DeviceSpec::Pipe {
            return Err(FollowError::provider("source: a pipe cannot be read again"));
        }
        Ok(OfferedSource { spec, size: offer.size })
    }
}

/// A name for a file that is another one for each epoch.
fn file_name(epoch: &str) -> String {
    blake3::hash(epoch.as_bytes()).to_hex()[..32].to_string()
}

impl FollowPlatform for FollowRun<'_> {
    fn now(&self) -> f64 {
        SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs_f64()
    }

    fn save(&mut self, state: &FollowState) -> Result<(), FollowError> {
        // What this round writes is no doubt for the next run, another file is one.
        let marks = if state.offers.is_some() {
            let disks = 0..self.plan.disks.len();
            disks
                .map(|disk| Some(TargetMark::of(&self.target_file(disk)?)?.while_written()))
                .collect()
        } else {
            self.marks.clone()
        };
        self.dir.save(&self.plan.machine, &self.targets, state, &marks)?;
        // A step that is complete stays so.
        if self.control.is_cancelled() {
            return Err(FollowError::new(FollowErrorKind::Cancelled, "stopped"));
        }
        Ok(())
    }

    fn ask(&mut self, request: &ProviderRequest) -> Result<(Vec<RoundOffer>, f64), FollowError> {
        let begin = Instant::now();
        let text = serde_json::to_string(request)
            .map_err(|error| FollowError::provider(error.to_string()))?;
        let script = format!("{} {}", self.plan.provider, shell_word(&text));
        let mut reader = ReplyReader::new(request);
        let mut wrong = None;
        let is_cancelled = || self.control.is_cancelled();
        let mut line = |line: &str| {
            reader.line(line).map_err(|error| {
                wrong = Some(error.clone());
                error.to_string()
            })
        };
        let ran = run_command(&script, self.plan.timeout, &is_cancelled, &mut line);
        if let Some(error) = wrong {
            return Err(error);
        }
        ran.map_err(|why| {
            FollowError::provider(format!("the provider ({}) failed: {why}", self.plan.provider))
        })?;
        Ok((reader.finish()?, begin.elapsed().as_secs_f64()))
    }

    fn changed_targets(&mut self) -> Vec<(usize, String)> {
        let mut changed = Vec::new();
        for disk in 0..self.plan.disks.len() {
            if self.target_file(disk).is_some_and(|file| !file.exists()) {
                changed.push((disk, "the target does not exist any more".to_string()));
            }
        }
        for (disk, mark) in self.marks.iter().enumerate() {
            let Some(mark) = mark else { continue };
            let found = self.target_file(disk).and_then(|file| TargetMark::of(&file));
            if !found.is_some_and(|found| mark.fits(&found)) {
                changed.push((disk, "the target was changed since the last round".to_string()));
            }
        }
        changed
    }

    fn selected(&mut self, copy: &RoundCopy) -> Result<Option<u64>, FollowError> {
        let Some(path) = &copy.offer.ranges else { return Ok(None) };
        let wrong = |why: String| {
            let text = format!("the list {}: {why}", path.display());
            FollowError::provider(text).of_disk(&copy.offer.disk)
        };
        // To open a pipe could take for ever.
        let found = std::fs::metadata(path).map_err(|error| wrong(plain(&error)))?;
        if !found.is_file() {
            return Err(wrong("it is not a regular file".into()));
        }
        let file = std::fs::File::open(path).map_err(|error| wrong(plain(&error)))?;
        let list = ChangeList::read(file).map_err(|error| wrong(error.to_string()))?;
        let fitted = list.fit(copy.offer.size).map_err(|error| wrong(error.to_string()))?;
        if let Some(incomplete) = fitted.incomplete {
            return Err(wrong(incomplete.error.to_string()));
        }
        Ok(Some(fitted.ranges.iter().map(|range| range.1).sum()))
    }

    fn copy(&mut self, copies: &[RoundCopy]) -> Result<CopyFigures, FollowError> {
        let begin = Instant::now();
        self.check_targets()?;
        self.check_sources(copies)?;
        self.marks.clear();
        let this = &*self;
        let outcomes: Vec<_> = std::thread::scope(|scope| {
            let copy = |copy: &RoundCopy| {
                this.copy_disk(copy).map_err(|error| error.of_disk(&copy.offer.disk))
            };
            let threads: Vec<_> = copies.iter().map(|one| scope.spawn(move || copy(one))).collect();
            let join = |thread: std::thread::ScopedJoinHandle<'_, _>| {
                thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            };
            threads.into_iter().map(join).collect()
        });
        self.control.forget_copies();
        let mut figures = CopyFigures::default();
        for outcome in outcomes {
            let (written, read) = outcome?;
            figures.bytes += written;
            figures.read += read;
        }
        // Files that the copies have made, and links that somebody has made meanwhile.
        self.check_targets()?;
        self.mark_targets();
        Ok(CopyFigures { seconds: begin.elapsed().as_secs_f64(), ..figures })
    }

    fn hold(&mut self, until: Option<f64>) -> Result<bool, FollowError> {
        let flag = self.control.cut_over();
        loop {
            if self.control.is_cancelled() {
                return Err(FollowError::new(FollowErrorKind::Cancelled, "stopped"));
            }
            let is_due = match &self.plan.cut_over {
                CutOver::Now => true,
                CutOver::At(time) => self.now() >= *time,
                CutOver::Signal => flag.load(Ordering::Relaxed),
                CutOver::File(path) => path.exists(),
            };
            if is_due {
                return Ok(true);
            }
            if until.is_some_and(|until| self.now() >= until) {
                return Ok(false);
            }
            std::thread::sleep(TICK);
        }
    }

    fn stop(&mut self) -> Result<(), FollowError> {
        self.plan.stop.as_ref().map_or(Ok(()), |script| self.command("stop", script))
    }

    fn verify(&mut self, copies: &[RoundCopy]) -> Result<Option<(usize, String)>, FollowError> {
        if self.plan.limits.verify != VerifyScope::All {
            return Ok(None);
        }
        for copy in copies {
            let found = self.compare(copy).map_err(|error| error.of_disk(&copy.offer.disk));
            self.control.forget_copies();
            if let Some(why) = found? {
                return Ok(Some((copy.disk, why)));
            }
        }
        Ok(None)
    }

    fn start(&mut self) -> Result<(), FollowError> {
        self.plan.start.as_ref().map_or(Ok(()), |script| self.command("start", script))
    }

    fn round(&mut self, figures: &RoundFigures) {
        (self.print)(&round_text(figures));
    }

    fn phase(&mut self, phase: FollowPhase, predicted: Option<f64>) {
        let text = match phase {
            FollowPhase::Rounds | FollowPhase::LastRound | FollowPhase::Complete => return,
            FollowPhase::Holding => {
                let downtime = predicted.map_or(String::new(), |seconds| {
                    format!("; predicted downtime {seconds:.1} s")
                });
                format!("waiting for the cut-over{downtime}")
            }
            FollowPhase::Stopping => "stopping the machine".into(),
            FollowPhase::Verifying => "verifying".into(),
            FollowPhase::Starting => "starting the machine at its new place".into(),
            FollowPhase::Ending => "removing what the provider has made".into(),
        };
        (self.print)(&text);
    }
}

/// A line about a round.
fn round_text(figures: &RoundFigures) -> String {
    let last = if figures.last { "last round" } else { "round" };
    let mut text = format!(
        "{last} {}: {:.1} MB in {:.1} s, {:.1} MB/s",
        figures.number,
        figures.bytes as f64 / 1e6,
        figures.make_seconds + figures.copy_seconds,
        figures.rate() / 1e6
    );
    if let Some(rate) = figures.dirty_rate() {
        text += &format!("; the machine changes {:.1} MB/s", rate / 1e6);
    }
    for (disk, why) in &figures.full {
        text += &format!("; all of {disk} ({why})");
    }
    if let Some(predicted) = figures.predicted {
        text += &format!("; predicted downtime {predicted:.1} s");
    }
    text
}

impl FollowResult {
    /// The result, for users.
    pub fn text(&self, state: &Path) -> String {
        let predicted =
            self.predicted.map_or(String::new(), |seconds| format!(", predicted {seconds:.1} s"));
        let bytes: u64 = self.rounds.iter().map(|round| round.bytes).sum();
        format!(
            "moved: {} rounds, {:.1} MB; down for {:.1} s, of which the last round took {:.1} s{predicted}; result: \
             {}",
            self.rounds.len(),
            bytes as f64 / 1e6,
            self.downtime,
            self.copied,
            state.join("result.json").display()
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_storage_is_recognized_through_links() {
        let dir = tempfile::tempdir().unwrap();
        let spec = |name: &str| DeviceSpec::Path(dir.path().join(name));
        std::os::unix::fs::symlink("new.raw", dir.path().join("dangling")).unwrap();
        std::fs::write(dir.path().join("file"), "x").unwrap();
        std::fs::hard_link(dir.path().join("file"), dir.path().join("hard")).unwrap();
        std::os::unix::fs::symlink("file", dir.path().join("link")).unwrap();
        for (one, other) in [("new.raw", "dangling"), ("file", "hard"), ("file", "link")] {
            assert!(is_same(&spec(one), &spec(other)), "{one} {other}");
        }
        for (one, other) in [("new.raw", "other.raw"), ("file", "dangling"), ("file", "none")] {
            assert!(!is_same(&spec(one), &spec(other)), "{one} {other}");
        }
    }
}
