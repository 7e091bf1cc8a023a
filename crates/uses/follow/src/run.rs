//! The platform of a plan: its provider, copies by `transfer`, and the directory of the state.

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
    CopyRequest, Endpoint, TransferError, TransferErrorKind, TransferOptions, file_of, shell_word,
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
        None => (FollowMachine::new(&plan.machine, &names, plan.limits.clone()), Vec::new()),
        Some((state, marks)) => {
            let limits = plan.limits.clone();
            (FollowMachine::resume(&plan.machine, &names, limits, state)?, marks)
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
        let journal = self.dir.file(&format!("{name}.{}.journal", file_name(&copy.offer.epoch)));
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
        // What this round writes is no doubt for the next run.
        let marks = if state.offers.is_some() { &[][..] } else { &self.marks };
        self.dir.save(&self.plan.machine, &self.targets, state, marks)?;
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
        for (disk, mark) in self.marks.iter().enumerate() {
            let Some(mark) = mark else { continue };
            if self.target_file(disk).and_then(|file| TargetMark::of(&file)) != Some(*mark) {
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
