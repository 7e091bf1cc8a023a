//! One copy of one disk: opens both sides, checks them, runs the engine, reports failures.

use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::pin::{Pin, pin};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::time::Duration;

use blockhaul_backends::Shared;
use blockhaul_block::{Can, Facts, FileId, Kind, Latency};
use blockhaul_catalog::{ClaimOwner, Intent, Layer, Preparation, Registry, Spec, Stack};
use blockhaul_engine::{
    Control, CopyError, Durable, Engine, JournalOptions, JournalState, Manifest, Options, Progress,
    Side, Summary, Verified,
};
use blockhaul_io::{Interest, Pool};

use crate::brackets::Groups;
use crate::copy::asked;
use crate::copy::manifest::ManifestFile;
use crate::direct::{self, Wanted};
use crate::ends::{self, file_of, path_of, same_place};
use crate::exit::{self, Failure, plain};
use crate::long::{self, Journal};
use crate::part::Part;
use crate::{args, devices, out, signals};

/// Maximum bytes that a file accepts through a pipe of unknown length. With direct I/O it is made
/// that large and truncated at the end; these are tried in order: the limit of large file systems,
/// and of ext4 with blocks of 4096.
const PIPE_SIZES: [u64; 2] = [1 << 60, (16 << 40) - 4096];

/// Shortest run of zeroes, in bytes, for which a hole is made in an overwritten file, by default.
const SPARSE_OVER: u32 = 64 << 10;

/// Interval of checks whether a source that is being opened is still wanted.
const LOOK: Duration = Duration::from_millis(200);

/// Controls the engine of a job; requests from before it copies apply when it does.
#[derive(Clone, Default)]
pub(crate) struct JobControl(Arc<Controlled>);

#[derive(Default)]
struct Controlled {
    engine: OnceLock<Control>,
    early: Mutex<Early>,
}

/// What was requested before the engine was there.
#[derive(Default)]
struct Early {
    paused: bool,
    rate: Option<u64>,
}

impl JobControl {
    /// The engine is there.
    fn set(&self, control: Control) {
        let early = self.early();
        if early.paused {
            control.pause();
        }
        if let Some(bytes) = early.rate {
            let (_, requests) = control.rate_limits();
            control.set_rate(bytes, requests);
        }
        // Set once: a job copies once.
        let _ = self.0.engine.set(control);
    }

    /// Starts no more requests, or continues.
    pub(crate) fn pause(&self, paused: bool) {
        let mut early = self.early();
        early.paused = paused;
        match self.0.engine.get() {
            Some(control) if paused => control.pause(),
            Some(control) => control.resume(),
            None => {}
        }
    }

    /// Limits the bytes per second; 0: no limit.
    pub(crate) fn limit(&self, bytes: u64) {
        let mut early = self.early();
        early.rate = Some(bytes);
        if let Some(control) = self.0.engine.get() {
            let (_, requests) = control.rate_limits();
            control.set_rate(bytes, requests);
        }
    }

    /// Ends the run soon.
    pub(crate) fn cancel(&self) {
        if let Some(control) = self.0.engine.get() {
            control.cancel();
        }
    }

    fn early(&self) -> MutexGuard<'_, Early> {
        self.0.early.lock().expect("no panic under this lock")
    }
}

/// What goes on after everything was copied once, with the same engine.
pub(crate) trait Follower: Send + Sync {
    /// Refuses a target that it cannot use, before the target is touched.
    fn check(&self, target: &Stack) -> blockhaul_block::Result<()>;

    /// Copies everything, and what follows, and finishes the engine.
    fn follow(self: Arc<Self>, engine: Engine, target: Stack) -> Following;
}

/// Keeps what is needed to continue a job with another program.
pub(crate) trait Recorder: Send + Sync {
    /// Refuses a target other than that of the job, before it is touched.
    fn check(&self, target: &str) -> Result<(), Failure>;

    /// Notes the target, which is about to be written. Blocks.
    fn begin(&self, target: &str) -> Result<(), Failure>;

    /// Called with what is durable there.
    fn durable(&self) -> Durable;
}

type Following = Pin<Box<dyn Future<Output = Result<Summary, CopyError>>>>;

/// A copy that is about to run.
pub(crate) struct CopyJob {
    registry: Registry,
    source: Spec,
    source_layers: Vec<Arc<dyn Layer>>,
    target: Spec,
    target_layers: Vec<Arc<dyn Layer>>,
    /// For the journal: layers of source and target that show a part or a form of existing
    /// contents. With one the target is neither emptied nor enlarged.
    seen_through: [String; 2],
    pub(crate) options: Options,
    pub(crate) journal: Option<Journal>,
    direct: Wanted,
    part: Part,
    verify: bool,
    manifest: Option<ManifestFile>,
    pub(crate) progress: Arc<Progress>,
    /// A source that is open already: a point in time of a disk in use.
    given: Option<Stack>,
    /// A target that is open already, and keeps what is not overwritten.
    given_target: Option<Stack>,
    /// The target is neither created nor emptied.
    keeps_target: bool,
    /// The source is one.
    is_snapshot: bool,
    /// Runs the engine.
    follower: Option<Arc<dyn Follower>>,
    /// Keeps what is needed to continue it later.
    recorder: Option<Arc<dyn Recorder>>,
    /// Controls the engine, once it copies.
    control: JobControl,
    /// The opened stacks.
    open: Vec<Stack>,
    /// The source, once it is open and all checks without the target are done.
    first: Option<Stack>,
    /// Both sides, once they are open and checked.
    ready: Option<(Stack, Stack)>,
    /// What the target still needs before it is written.
    preparation: Option<Preparation>,
    /// The target may have been resized, emptied or written.
    touched: bool,
    /// The journal says that an earlier run has completed the copy and discarded its source.
    is_complete: bool,
    /// The same, once it is known to be this copy.
    completed: Option<Summary>,
}

/// The results of the copy and of its verification.
type Ran = (Result<Summary, CopyError>, Option<Result<Verified, CopyError>>);

/// The result of a copy, for users.
pub(crate) struct Report {
    pub(crate) text: String,
    /// It is printed without --verbose, too.
    is_news: bool,
    /// The counters behind it.
    pub(crate) summary: Summary,
    /// Bytes that the verification compared.
    pub(crate) verified: u64,
    /// The line with the digest.
    digest: Option<String>,
    warnings: Vec<String>,
    /// The exit status of the command.
    pub(crate) status: u8,
}

impl Report {
    /// Standard output was closed early. Like other programs that write to a pipe, prints no
    /// message, but does not report success either.
    fn unread() -> Report {
        let text = "standard output was closed before the end".to_string();
        let status = signals::status(signal_hook::consts::SIGPIPE);
        let summary = Summary::default();
        let verified = 0;
        let warnings = Vec::new();
        Report { text, is_news: false, summary, verified, digest: None, warnings, status }
    }

    /// An earlier run has completed the copy, and discarded its source.
    fn of_earlier_run(journal: &Path, target: &str, summary: Summary) -> Report {
        let text = format!("nothing is copied: {}", of_complete_journal(journal, target));
        let warnings = Vec::new();
        Report { text, is_news: true, summary, verified: 0, digest: None, warnings, status: 0 }
    }

    /// Prints the report and the digest. Each line begins with `disk`.
    pub(crate) fn tell(&self, verbose: bool, disk: &str, to_pipe: bool) -> Result<(), Failure> {
        for warning in &self.warnings {
            let warning = out::one_line(&format!("{disk}warning: {warning}"));
            out::error(&format!("blockhaul: copy: {warning}\n"));
        }
        if verbose || self.is_news {
            let text = out::one_line(&format!("{disk}{}", self.text));
            out::error(&format!("blockhaul: copy: {text}\n"));
        }
        match &self.digest {
            None => {}
            Some(line) if to_pipe => out::error(line),
            Some(line) => drop(out::print(line.as_bytes())?),
        }
        Ok(())
    }
}

/// What a complete journal of a copy that discards its source means.
fn of_complete_journal(journal: &Path, target: &str) -> String {
    let journal = journal.display();
    format!(
        "the journal {journal} shows that this copy is complete and that its source was discarded, so {target} \
         may be the only copy; for another backup, use another journal and another target; remove {journal} \
         only if the source has new contents"
    )
}

/// The first of several open copies with a side that is the target of another one: its index, what
/// overlaps, and the index of the other.
pub(crate) fn overlap(jobs: &[Option<&CopyJob>]) -> Option<(usize, &'static str, usize)> {
    let files: Vec<_> = jobs.iter().map(|job| job.and_then(CopyJob::files)).collect();
    let parts: Vec<_> = jobs.iter().map(|job| job.map(CopyJob::shows_a_part)).collect();
    for (index, (one, part)) in files.iter().zip(&parts).enumerate() {
        for (other_index, (other, other_part)) in files.iter().zip(&parts).enumerate() {
            let (Some([source, target]), Some(part)) = (one, part) else { continue };
            let (Some([_, taken]), Some([_, taken_part])) = (other, other_part) else { continue };
            let meets = |side: usize, files: &[FileId]| {
                match blockhaul_backends::shared(files, taken) {
                    Shared::Nothing => false,
                    // Layers select the part, and the parts may differ.
                    Shared::Part => !part[side] && !taken_part,
                    Shared::Same => true,
                }
            };
            if other_index != index && meets(0, source) {
                return Some((index, "its source overlaps the target", other_index));
            }
            if other_index < index && meets(1, target) {
                return Some((index, "its target overlaps the target", other_index));
            }
        }
    }
    None
}

impl CopyJob {
    /// The same copy; messages about storage that is in use call it `label`.
    pub(crate) fn called(self, label: String) -> CopyJob {
        CopyJob { registry: self.registry.owned_by(ClaimOwner::new(label)), ..self }
    }

    /// The owner of the claims of its sides.
    pub(crate) fn owner(&self) -> ClaimOwner {
        self.registry.owner.clone()
    }

    /// Parses the arguments, with all checks possible without opening anything.
    pub(crate) fn new(args: &args::CopyArgs, groups: &Groups) -> Result<CopyJob, Failure> {
        let (Some(source), Some(target)) = (&args.source, &args.target) else {
            return Err(Failure::usage("give a source and a target, or --job with a file"));
        };
        CopyJob::between(args, groups.spec(source)?, groups.spec(target)?)
    }

    /// The same for these ends.
    pub(crate) fn between(
        args: &args::CopyArgs,
        source: Spec,
        target: Spec,
    ) -> Result<CopyJob, Failure> {
        let source = crate::image_format::chosen(source, &args.image)?;
        let registry =
            devices::registry_asking(args.timeout, args.min_rate, args.bitmap.as_slice())
                .for_command();
        for spec in [&source, &target].into_iter().filter(|spec| **spec != Spec::Pipe) {
            registry.target(spec, Intent::READ)?;
        }
        let source_layers = devices::layers(&registry, &args.source_layer)?;
        let target_layers = devices::layers(&registry, &args.target_layer)?;
        let seen_through = [&args.source_layer, &args.target_layer].map(|layers| {
            devices::over_content(&registry, layers).map(|over| long::seen_through(&over))
        });
        let [source_through, target_through] = seen_through;
        let seen_through = [source_through?, target_through?];
        asked::check_ends(args, &source, &target)?;
        asked::warn_of_formats(args, &source, &target);
        let part = Part::new(args, &source, &target)?;
        let mut options = asked::options(args);
        part.set(&mut options);
        let journal = args.journal.clone().map(|path| Journal {
            path,
            restart: args.restart,
            interval: args.journal_interval,
            keep: false,
        });
        Ok(CopyJob {
            registry,
            source,
            source_layers,
            target,
            target_layers,
            seen_through,
            options,
            journal,
            direct: args.direct,
            part,
            verify: args.verify,
            manifest: args.manifest.clone().map(ManifestFile::new),
            progress: Arc::new(Progress::new()),
            given: None,
            given_target: None,
            keeps_target: false,
            is_snapshot: false,
            follower: None,
            recorder: None,
            control: JobControl::default(),
            open: Vec::new(),
            first: None,
            ready: None,
            preparation: None,
            touched: false,
            is_complete: false,
            completed: None,
        })
    }

    /// Copies from this point in time of a disk in use. What is safe on the target is released
    /// there, where possible, so that later writes to the disk need not be saved.
    pub(crate) fn read_from(&mut self, source: Stack) {
        self.given = Some(source);
        self.is_snapshot = true;
    }

    /// Copies from this disk in use; `follower` copies what changes meanwhile.
    pub(crate) fn follow(&mut self, source: Stack, follower: Arc<dyn Follower>) {
        self.given = Some(source);
        self.follower = Some(follower);
    }

    /// Writes to this open device, under these layers: it is neither created nor emptied.
    pub(crate) fn write_to(&mut self, target: Stack) {
        self.given_target = Some(target);
        self.keeps_target = true;
    }

    /// Keeps here what is needed to continue it later.
    pub(crate) fn record(&mut self, recorder: Arc<dyn Recorder>) {
        self.recorder = Some(recorder);
    }

    /// Keeps of the target what is not overwritten.
    pub(crate) fn keep_target(&mut self) {
        self.keeps_target = true;
    }

    /// Puts one more layer over the target, outermost.
    pub(crate) fn put_over_target(&mut self, layer: Arc<dyn Layer>) {
        self.target_layers.push(layer);
    }

    /// Controls the engine, once it copies.
    pub(crate) fn control(&self) -> JobControl {
        self.control.clone()
    }

    /// Whether the target keeps its contents, because it shows a part or a form of them.
    fn target_stays(&self) -> bool {
        !self.seen_through[1].is_empty()
    }

    /// Both sides as they were typed.
    pub(crate) fn ends(&self) -> (&Spec, &Spec) {
        (&self.source, &self.target)
    }

    /// Both sides for a page that other users may read.
    pub(crate) fn shown_ends(&self) -> [String; 2] {
        [&self.source, &self.target].map(|spec| ends::without_secrets(&spec.to_string()))
    }

    /// Maximum bytes of payloads in flight.
    pub(crate) fn memory(&self) -> u64 {
        self.options.memory()
    }

    /// The state of a copy that was stopped, and the next step.
    pub(crate) fn stopped(&self) -> &'static str {
        match (self.progress.is_complete(), &self.journal, self.touched) {
            (true, Some(_), _) if self.verify => {
                "stopped by a signal: all data is copied, but not verified: run it again to verify it"
            }
            (true, None, _) if self.verify => {
                "stopped by a signal: all data is copied, but not verified: copy it again, or compare both \
                 sides with blockhaul compare"
            }
            (true, ..) => {
                "stopped by a signal: all data is copied, but its digest is unknown: run blockhaul \
                 checksum"
            }
            (false, Some(_), _) => "stopped by a signal: run it again to resume",
            (false, None, true) if self.progress.discarded().0 > 0 => {
                "stopped by a signal; the target is incomplete"
            }
            (false, None, true) => "stopped by a signal; the target is incomplete: copy it again",
            (false, None, false) => "stopped by a signal; the target was not changed",
        }
    }

    /// Whether the target may contain a part of the source.
    pub(crate) fn has_left_a_part(&self) -> bool {
        self.touched && !self.progress.is_complete()
    }

    /// Opens the source and makes all checks that are possible before the target is touched. For
    /// devices, not for pipes.
    pub(crate) async fn prepare_source(mut self) -> (Result<(), Failure>, CopyJob) {
        let opened = self.open_first().await;
        let result = opened.map(|source| self.first = Some(source));
        (result, self)
    }

    /// Opens and checks the target, too, without changing its contents.
    pub(crate) async fn check_both(mut self) -> (Result<(), Failure>, CopyJob) {
        let opened = self.open_both().await;
        let result = opened.map(|ready| self.ready = Some(ready));
        (result, self)
    }

    /// Resizes and empties the target, so that the copy itself begins at once.
    pub(crate) async fn prepare_target(mut self) -> (Result<(), Failure>, CopyJob) {
        let result = self.touch().await;
        (result, self)
    }

    /// The files and block devices of the source and of the target, once both are open.
    pub(crate) fn files(&self) -> Option<[Vec<FileId>; 2]> {
        let (source, target) = self.ready.as_ref()?;
        Some([source, target].map(|side| side.device().facts().files.clone()))
    }

    /// Whether layers show only a part of the source, or of the target.
    pub(crate) fn shows_a_part(&self) -> [bool; 2] {
        [0, 1].map(|side| !self.seen_through[side].is_empty())
    }

    pub(crate) async fn run(mut self, pool: Pool) -> (Result<Report, Failure>, CopyJob) {
        let result = self.copy(pool).await;
        (result, self)
    }

    async fn copy(&mut self, pool: Pool) -> Result<Report, Failure> {
        let summary = match (&self.source, &self.target) {
            (Spec::Pipe, _) => self.read_pipe(&pool).await?,
            (_, Spec::Pipe) => {
                let fd = standard(std::io::stdout().as_fd().try_clone_to_owned())?;
                if !ends::is_heard(&fd) {
                    let text = "cannot write to standard output: it is closed, or /dev/null: the copy \
                                would be lost; to read only, copy to null:";
                    return Err(Failure::new(exit::OPEN, text));
                }
                let source = self.open_source().await?;
                self.check_apart(&source.device().facts().files, &files_of(&fd))?;
                let copied = blockhaul_engine::copy_to_pipe(
                    &source,
                    fd,
                    &self.options,
                    &pool,
                    &self.progress,
                )
                .await;
                match copied {
                    Ok(summary) => summary,
                    // The reader has closed the pipe, for a reason that only it knows.
                    Err(error)
                        if error.kind() == Kind::Disconnected
                            && error.error.request().is_none() =>
                    {
                        return Ok(Report::unread());
                    }
                    Err(error) => return Err(self.failed(error)),
                }
            }
            _ => return self.between_devices(&pool).await,
        };
        // Its warnings were already logged.
        let digest = self.digest_line(&summary);
        let text = summary.to_string();
        let warnings = Vec::new();
        Ok(Report { text, is_news: false, summary, verified: 0, digest, warnings, status: 0 })
    }

    /// Opens the source, with all checks that do not need the target, including whether other files
    /// of the copy can be made.
    async fn open_first(&mut self) -> Result<Stack, Failure> {
        if let Some(Journal { path, restart, .. }) = &self.journal {
            blockhaul_engine::check_journal(path, *restart).map_err(|error| self.failed(error))?;
            let beside = Spec::Path(path.clone());
            if same_place(&beside, &self.source) || same_place(&beside, &self.target) {
                let text = format!(
                    "cannot create the journal {beside}: it is the source or the target: choose another \
                     name"
                );
                return Err(Failure::new(exit::FAILED, text));
            }
        }
        if let Some(kept) = &self.manifest {
            kept.check()?;
        }
        self.is_complete = self.discarding_journal()? == Some(JournalState::Complete);
        let source = self.open_source().await.map_err(|failure| self.beside_journal(failure))?;
        self.check_source(&source.device().facts())?;
        if self.is_complete {
            return Ok(source);
        }
        let file_is_gone = file_of(&self.target).is_some_and(|path| is_absent(&path));
        if self.part.is_increment() && file_is_gone && !self.keeps_target {
            let text = format!(
                "{} does not exist: an increment needs the earlier copy; copy all of the source first",
                self.target
            );
            return Err(Failure::new(exit::OPEN, text));
        }
        if self.part.has_list() && file_is_gone && !self.keeps_target && !self.goes_on() {
            log::warn!(
                "{} does not exist: the new file has only the ranges of the list",
                self.target
            );
        }
        if self.goes_on() && file_is_gone {
            let next = match self.discarding_journal()? {
                Some(_) => "what it records was discarded at the source: put the target back",
                None => "check the name, or use --restart to copy everything again",
            };
            let target = &self.target;
            let text = format!("{target} does not exist, but the journal records a copy: {next}");
            return Err(Failure::new(exit::OPEN, text));
        }
        let is_empty = source.device().facts().size == 0 && !self.part.is_some();
        if is_empty && let Some(lost) = file_of(&self.target).and_then(|path| len_of(&path)) {
            let text = format!(
                "the source {} is empty: {lost} bytes of {} would be lost; remove the target first if \
                 that is intended",
                self.source, self.target
            );
            return Err(Failure::new(exit::OPEN, text));
        }
        if !self.target_is_kept() {
            // It is emptied next. A part of the source may be readable if not all of it is.
            let end = if self.part.is_some() { 0 } else { source.device().facts().size };
            let reached = blockhaul_engine::check_source(end, source.device()).await;
            reached.map_err(|error| self.failed(CopyError::at_source(error)))?;
        }
        if let Some(kept) = &mut self.manifest {
            kept.begin([&self.source, &self.target])?;
        }
        Ok(source)
    }

    /// The state of the journal, if it is to be continued and discards what it records.
    fn discarding_journal(&self) -> Result<Option<JournalState>, Failure> {
        let Some(journal) = self.journal.as_ref().filter(|journal| !journal.restart) else {
            return Ok(None);
        };
        blockhaul_engine::discarding_journal(&journal.path).map_err(|error| self.failed(error))
    }

    /// Says what a complete journal means, if a side cannot be opened that it is checked with.
    fn beside_journal(&self, failure: Failure) -> Failure {
        match &self.journal {
            Some(journal) if self.is_complete => {
                let [_, target] = self.shown_ends();
                failure.and(&format!("; {}", of_complete_journal(&journal.path, &target)))
            }
            _ => failure,
        }
    }

    /// Opens the target for reading, and checks that the journal, which is complete, is that of this
    /// copy.
    async fn open_completed(&mut self, source: &Stack) -> Result<Stack, Failure> {
        let layers = std::mem::take(&mut self.target_layers);
        let size = source.device().facts().size;
        let intent = Intent::READ.direct(direct::target(self.direct, &self.source, size));
        let opened = self.registry.open(&self.target, layers, intent).await;
        let target = opened.map_err(|error| {
            let failure = Failure::opening("target", &self.target.to_string(), &error);
            self.beside_journal(failure)
        })?;
        self.open.push(target.clone());
        let options = Options { journal: self.journal_options(None), ..self.options.clone() };
        let pool = Pool::new(self.memory());
        let progress = &self.progress;
        let checked =
            blockhaul_engine::completed_earlier(source, &target, &options, &pool, progress).await;
        self.completed = Some(checked.map_err(|error| self.failed(error))?);
        Ok(target)
    }

    /// The engine's options for the journal. `made`: the manifest of the source.
    fn journal_options(&self, made: Option<&Manifest>) -> Option<JournalOptions> {
        let journal = self.journal.as_ref()?;
        let mut options = journal.options(&self.source, &self.target, self.options.discard_source);
        // After a stop during verification, the copy need not be repeated.
        options.keep |= self.verify;
        options.source += &self.seen_through[0];
        options.target += &self.seen_through[1];
        options.source += &self.part.identity(made);
        Some(options)
    }

    /// Whether an earlier run is continued: its writes remain.
    fn goes_on(&self) -> bool {
        self.journal.as_ref().is_some_and(Journal::goes_on)
    }

    /// Whether the target is neither created nor emptied.
    fn target_is_kept(&self) -> bool {
        self.keeps_target
            || self.goes_on()
            || self.target_stays()
            || (self.part.is_some() && self.target_is_there())
    }

    fn target_is_there(&self) -> bool {
        match file_of(&self.target) {
            Some(path) => !is_absent(&path),
            // An image that is not in a file.
            None => ends::is_image(&self.target),
        }
    }

    async fn open_both(&mut self) -> Result<(Stack, Stack), Failure> {
        let source = match self.first.take() {
            Some(source) => source,
            None => self.open_first().await?,
        };
        if self.progress.is_cancelled() {
            return Err(Failure::new(exit::FAILED, "stopped before the target was opened"));
        }
        if self.is_complete {
            let target = self.open_completed(&source).await?;
            return Ok((source, target));
        }
        let size = source.device().facts().size;
        let kept = self.target_is_kept();
        let intent = if kept {
            Intent::TARGET
        } else {
            Intent::target(size).overwriting(self.may_overwrite(&source).await)
        };
        let intent = intent.direct(direct::target(self.direct, &self.source, size));
        let target = self.open_target(intent).await?;
        if intent.overwrites && self.options.sampled && !target.device().facts().zeroed {
            // Freeing blocks one by one takes longer than writing them.
            self.options.sparse = self.options.sparse.max(SPARSE_OVER);
        }
        self.check_target(&source, &target)?;
        let [from, to] = [&source, &target].map(|side| side.device().facts());
        self.check_discard(&from, &to)?;
        self.check_apart(&from.files, &to.files)?;
        if let Some(follower) = &self.follower {
            follower.check(&target).map_err(|error| self.failed(CopyError::at_target(error)))?;
        } else if !self.part.is_some() && to.grows_from.is_none() && to.size > size {
            let (target, rest) = (&self.target, to.size - size);
            log::warn!(
                "{target} is larger than the source: its last {rest} bytes are left unchanged"
            );
        }
        self.progress.expect(size);
        Ok((source, target))
    }

    /// Prepares the open and checked target for the copy. Its contents may be lost from here on.
    async fn touch(&mut self) -> Result<(), Failure> {
        let Some(preparation) = self.preparation.take() else { return Ok(()) };
        // Whatever happens from here on: the old journal describes contents that are about to be
        // lost.
        if let Some(journal) = self.journal.as_ref().filter(|journal| journal.restart) {
            blockhaul_engine::discard_journal(&journal.path).map_err(|error| self.failed(error))?;
        }
        let prepared = preparation.run().await;
        prepared.map_err(|error| Failure::opening("target", &self.target.to_string(), &error))?;
        self.touched = true;
        Ok(())
    }

    /// The same, for a job that may be continued later. What is verified counts only as a whole.
    async fn touch_recorded(&mut self, target: &Stack) -> Result<(), Failure> {
        let Some(recorder) = self.recorder.clone() else { return self.touch().await };
        recorder.check(&long::identity(&self.target, false))?;
        self.touch().await?;
        let identity = long::identity(&self.target, false);
        let durable = recorder.durable();
        let begun = blockhaul_io::offload(move || recorder.begin(&identity)).await;
        begun.unwrap_or_else(|lost| Err(Failure::new(exit::FAILED, lost.to_string())))?;
        if target.device().facts().can.contains(Can::FLUSH | Can::MULTI_CONN) && !self.verify {
            self.options.durable = Some(durable);
        }
        Ok(())
    }

    /// Refuses a source and a target that share storage, by their files.
    fn check_apart(&self, source: &[FileId], target: &[FileId]) -> Result<(), Failure> {
        let shared = blockhaul_backends::shared(source, target);
        let from = &self.source;
        let to = &self.target;
        let text = match shared {
            Shared::Nothing => return Ok(()),
            // Layers select the part, and the parts may differ.
            Shared::Part if self.shows_a_part() != [false; 2] => return Ok(()),
            Shared::Part => format!("source {from} and target {to} overlap: choose another target"),
            Shared::Same => ends::same_storage(from, to),
        };
        Err(Failure::usage(text))
    }

    /// Whether an existing target may keep its blocks. It is emptied if it is assumed to be zero,
    /// if many holes would have to be made, and for a journal, which recognizes a fresh target.
    async fn may_overwrite(&self, source: &Stack) -> bool {
        let options = &self.options;
        let fresh = options.target_is_zero || self.journal.is_some() || self.part.is_some();
        !fresh && self.target_is_there() && blockhaul_engine::is_coarse(source).await
    }

    async fn between_devices(&mut self, pool: &Pool) -> Result<Report, Failure> {
        let (source, target) = match self.ready.take() {
            Some(ready) => ready,
            None => self.open_both().await?,
        };
        if let Some((journal, summary)) = self.journal.as_ref().zip(self.completed.take()) {
            let [_, target] = self.shown_ends();
            return Ok(Report::of_earlier_run(&journal.path, &target, summary));
        }
        let mut made = self.manifest_before(&source, pool).await?;
        self.options.journal = self.journal_options(made.as_ref());
        self.options.discard_source |= self.can_release(&source, &target);
        self.touch_recorded(&target).await?;
        let (copied, verified) = self.run_engine(&source, &target, pool).await;
        let summary = copied.map_err(|error| self.failed(error))?;
        // Its warnings were already logged.
        let mut warnings = Vec::new();
        if summary.retried.is_trouble() {
            warnings.push(summary.retried.to_string());
        }
        if summary.not_discarded > 0 {
            warnings.push(format!(
                "{} bytes could not be discarded at the source",
                summary.not_discarded
            ));
        }
        let mut text = summary.to_string() + &self.times();
        if let Some(journal) = self.journal.as_ref().filter(|_| summary.journal_stays) {
            text += &format!("; the journal {} stays", journal.path.display());
        }
        let mut compared = 0;
        if let Some(verified) = verified {
            let verified = verified.map_err(|error| self.different(error));
            if let Some(journal) = &self.journal {
                journal.after_verification(&verified);
            }
            let verified = verified?;
            compared = verified.bytes;
            text += &format!("; verified {} bytes", verified.bytes);
            if let Some(digest) = verified.digest {
                text += &format!(", digest {digest}");
            }
        }
        if let Some((kept, made)) = self.manifest.as_mut().zip(made.take()) {
            kept.write(&made)?;
            text += &format!("; manifest with digest {}", made.digest());
        }
        let digest = self.digest_line(&summary);
        Ok(Report {
            text,
            is_news: false,
            summary,
            verified: compared,
            digest,
            warnings,
            status: 0,
        })
    }

    /// Copies and then verifies over the same connections. `None`: no verification is wanted, or
    /// the copy has failed.
    async fn run_engine(&self, source: &Stack, target: &Stack, pool: &Pool) -> Ran {
        let opened = Engine::open(source, target, &self.options, pool, &self.progress).await;
        let mut engine = match opened {
            Ok(engine) => engine,
            Err(error) => return (Err(error), None),
        };
        self.control.set(engine.control());
        if let Some(follower) = &self.follower {
            return (follower.clone().follow(engine, target.clone()).await, None);
        }
        let plan = engine.plan();
        let copied = engine.complete(&plan).await;
        let verified =
            if self.verify && copied.is_ok() { Some(engine.verify().await) } else { None };
        engine.close().await;
        (copied, verified)
    }

    /// Whether a point in time may be released where it is copied: it is not read again, and a
    /// connection to the target that is made again shows the same disk.
    fn can_release(&self, source: &Stack, target: &Stack) -> bool {
        let from = source.device().facts();
        let to = target.device().facts();
        let is_read_again = self.verify || self.options.digest.is_some();
        self.is_snapshot
            && !is_read_again
            && to.can.contains(Can::MULTI_CONN)
            && blockhaul_engine::check_discard(&from, &to).is_ok()
    }

    /// The source's manifest, if required. It is made before the copy: later changes are copied
    /// again by the next --since, and never mistaken for copied.
    async fn manifest_before(
        &mut self,
        source: &Stack,
        pool: &Pool,
    ) -> Result<Option<Manifest>, Failure> {
        let options = &mut self.options;
        let progress = &self.progress;
        let changed = self.part.changed(source, options, pool, progress).await;
        let mut made = changed.map_err(|error| self.failed(error))?;
        if made.is_none() && self.manifest.is_some() {
            let now =
                blockhaul_engine::manifest(source, None, &self.options, pool, &self.progress).await;
            made = Some(now.map_err(|error| self.failed(error))?);
        }
        Ok(made)
    }

    /// Request times on each side, to show which one is slow.
    fn times(&self) -> String {
        let mean = |latency: Latency| {
            let requests: u64 = latency.classes.iter().sum();
            (requests > 0).then(|| 1e3 * latency.seconds / requests as f64)
        };
        let told = ["a read", "a write"].into_iter().zip(self.progress.meters().latency);
        let told: Vec<_> = told
            .filter_map(|(what, latency)| Some(format!("{what} took {:.3} ms", mean(latency)?)))
            .collect();
        if told.is_empty() { String::new() } else { format!("; on average {}", told.join(", ")) }
    }

    /// Digest and name, like b3sum and others.
    fn digest_line(&self, summary: &Summary) -> Option<String> {
        summary.digest.as_ref().map(|digest| format!("{digest}  {}\n", self.source))
    }

    async fn read_pipe(&mut self, pool: &Pool) -> Result<Summary, Failure> {
        let fd = standard(std::io::stdin().as_fd().try_clone_to_owned())?;
        if ends::is_put_in_place(&fd) {
            let text = "cannot read standard input: it is closed, or /dev/null";
            return Err(Failure::new(exit::OPEN, text));
        }
        let grown =
            path_of(&self.target).filter(|path| !self.target_stays() && is_file_or_absent(path));
        self.refuse_empty_pipe(&fd).await?;
        let input = files_of(&fd);
        let target = match &grown {
            None => {
                let target = self.open_target(Intent::TARGET).await?;
                self.check_apart(&input, &target.device().facts().files)?;
                self.touch().await?;
                target
            }
            Some(_) => self.open_growing(&input).await?,
        };
        let copied =
            blockhaul_engine::copy_from_pipe(fd, &target, &self.options, pool, &self.progress)
                .await;
        drop(target);
        if let Some(path) = grown {
            cut(&path, self.progress.snapshot().done())?;
        }
        copied.map_err(|error| self.failed(error))
    }

    /// Refuses to empty a file because standard input has no data, for example because the program
    /// before the pipe failed.
    async fn refuse_empty_pipe(&self, fd: &OwnedFd) -> Result<(), Failure> {
        let Some(lost) = file_of(&self.target).and_then(|path| len_of(&path)) else {
            return Ok(());
        };
        if ends::is_stream(fd) {
            let mut ready = pin!(blockhaul_io::ready(fd, Interest::Readable));
            // An error is reported when it is read.
            while blockhaul_io::timeout(LOOK, ready.as_mut()).await.is_err() {
                if self.progress.is_cancelled() {
                    return Err(Failure::new(exit::FAILED, "stopped before the pipe had data"));
                }
            }
        }
        if !ends::has_no_data(fd) {
            return Ok(());
        }
        let text = format!(
            "standard input is empty: {lost} bytes of {} would be lost; remove the target first if that \
             is intended",
            self.target
        );
        Err(Failure::new(exit::OPEN, text))
    }

    async fn open_source(&mut self) -> Result<Stack, Failure> {
        if let Some(given) = self.given.take() {
            self.open.push(given.clone());
            return Ok(given);
        }
        let layers = std::mem::take(&mut self.source_layers);
        // What is in use by another program is not discarded.
        let discards = self.options.discard_source && !self.is_complete;
        let intent = if discards { Intent::TARGET } else { Intent::READ };
        let intent = intent.direct(direct::source(self.direct, &self.source));
        // It may take long (a passphrase, a server that does not reply), and has changed nothing.
        let mut opening = pin!(self.registry.open(&self.source, layers, intent));
        let opened = loop {
            if let Ok(opened) = blockhaul_io::timeout(LOOK, opening.as_mut()).await {
                break opened;
            }
            if self.progress.is_cancelled() {
                return Err(Failure::new(exit::FAILED, "stopped before the source was open"));
            }
        };
        let opened = match opened {
            Ok(opened) => devices::sparing_of_queries(opened).await,
            Err(error) => Err(error),
        };
        let opened =
            opened.map_err(|error| Failure::opening("source", &self.source.to_string(), &error))?;
        self.open.push(opened.clone());
        Ok(opened)
    }

    async fn open_target(&mut self, intent: Intent) -> Result<Stack, Failure> {
        let layers = std::mem::take(&mut self.target_layers);
        if let Some(mut given) = self.given_target.take() {
            for layer in layers {
                given = given.with_layer(layer).await?;
            }
            self.open.push(given.clone());
            return Ok(given);
        }
        let opened = self.registry.open_target(&self.target, layers, intent).await;
        let (opened, preparation) =
            opened.map_err(|error| Failure::opening("target", &self.target.to_string(), &error))?;
        self.preparation = Some(preparation);
        self.open.push(opened.clone());
        Ok(opened)
    }

    /// A file for a pipe of unknown length, emptied. `input`: the file behind the pipe.
    async fn open_growing(&mut self, input: &[FileId]) -> Result<Stack, Failure> {
        let layers = std::mem::take(&mut self.target_layers);
        let mut last = Failure::new(exit::FULL, "no size fits");
        for size in PIPE_SIZES {
            let intent = Intent::growing(size);
            let opened = self.registry.open_target(&self.target, layers.clone(), intent).await;
            let (stack, preparation) = match opened {
                Ok(opened) => opened,
                Err(error) => {
                    last = Failure::opening("target", &self.target.to_string(), &error);
                    continue;
                }
            };
            self.check_apart(input, &stack.device().facts().files)?;
            self.preparation = Some(preparation);
            // Some file systems refuse a size only when it is set.
            match self.touch().await {
                Ok(()) => return Ok(stack),
                Err(failure) => last = failure,
            }
        }
        Err(last)
    }

    /// Checks that the source has the range to copy.
    fn check_source(&mut self, from: &Facts) -> Result<(), Failure> {
        if let Some(bitmap) = self.part.missing(from) {
            let text = format!(
                "cannot copy {} to {}: the source has no bitmap {bitmap:?}: list its contexts with \
                 blockhaul info, and have its server export the bitmap",
                self.source, self.target
            );
            return Err(Failure::new(exit::OPEN, text));
        }
        self.part.fit(from.size, &mut self.options).map_err(|why| {
            let text = format!("cannot copy {} to {}: {why}", self.source, self.target);
            Failure::new(exit::OPEN, text)
        })?;
        if self.part.end() > from.size {
            let text = format!(
                "cannot copy {} to {}: the source has {} bytes, but the range ends at {}",
                self.source,
                self.target,
                from.size,
                self.part.end()
            );
            return Err(Failure::new(exit::OPEN, text));
        }
        Ok(())
    }

    /// Checks that the target can hold the source before anything is written.
    fn check_target(&self, source: &Stack, target: &Stack) -> Result<(), Failure> {
        let from = source.device().facts();
        let to = target.device().facts();
        if !to.can.contains(Can::WRITE) {
            let text = format!(
                "cannot copy {} to {}: the target is read-only: choose another target, or have its server \
                 allow writing",
                self.source, self.target
            );
            return Err(Failure::new(exit::OPEN, text));
        }
        let needed = self.part.target_size(from.size);
        if to.size < needed {
            let what = if needed < from.size { "end of the range" } else { "source" };
            let text = format!(
                "cannot copy {} to {}: the target ({} bytes) is smaller than the {what} ({needed} \
                 bytes): make it larger",
                self.source, self.target, to.size
            );
            return Err(Failure::new(exit::OPEN, text));
        }
        Ok(())
    }

    /// Checks that the source can be discarded, once the target is flushed.
    fn check_discard(&self, from: &Facts, to: &Facts) -> Result<(), Failure> {
        if !self.options.discard_source {
            return Ok(());
        }
        let checked = blockhaul_engine::check_discard(from, to);
        checked.map_err(|error| Failure::new(exit::OPEN, error.to_string()))
    }

    /// After a copy without a journal that did not end: that it must not begin again, if parts of the
    /// source are gone.
    pub(crate) fn gone(&self) -> Option<String> {
        let (discarded, _) = self.progress.discarded();
        (discarded > 0 && self.journal.is_none()).then(|| {
            format!(
                "; {discarded} bytes that were copied are discarded at the source, and are on the target \
                 only: do not copy them again"
            )
        })
    }

    /// The failed side, and a remedy.
    fn failed(&self, failed: impl Into<CopyError>) -> Failure {
        let CopyError { side, error, .. } = failed.into();
        let (status, what) = match side {
            Some(Side::Source) => (exit::SOURCE, "the source failed: "),
            Some(Side::Target) => (exit::TARGET, "the target failed: "),
            None => (exit::FAILED, ""),
        };
        let status = match error.kind() {
            Kind::NoSpace if side == Some(Side::Target) => exit::FULL,
            Kind::Disconnected | Kind::TimedOut | Kind::ShuttingDown => exit::LOST,
            Kind::Usage if side.is_none() => exit::USAGE,
            _ => status,
        };
        Failure::new(status, format!("{what}{}", error.located())).with_remedy(&error, false)
    }

    /// A failed verification: the sides differ, or one cannot be read.
    fn different(&self, failed: CopyError) -> Failure {
        let error = &failed.error;
        if error.kind() == Kind::Io && error.request().is_none() {
            let source = &self.source;
            let target = &self.target;
            let text = format!("verification of {target} against {source}: {error}");
            return Failure::new(exit::DIFFERENT, text);
        }
        let failure = self.failed(failed);
        Failure::new(failure.status(), format!("verification: {failure}"))
    }
}

fn standard(fd: std::io::Result<OwnedFd>) -> Result<OwnedFd, Failure> {
    fd.map_err(|error| {
        Failure::new(exit::OPEN, format!("the standard stream is not open: {}", plain(&error)))
    })
}

/// The file or block device of a standard stream, if it is one.
fn files_of(fd: impl AsFd) -> Vec<FileId> {
    blockhaul_backends::identity_of(fd).into_iter().collect()
}

/// The length of a regular file that is not empty.
fn len_of(path: &Path) -> Option<u64> {
    let data = std::fs::metadata(path).ok().filter(std::fs::Metadata::is_file)?;
    (data.len() > 0).then_some(data.len())
}

fn is_absent(path: &Path) -> bool {
    matches!(std::fs::metadata(path), Err(error) if error.kind() == std::io::ErrorKind::NotFound)
}

fn is_file_or_absent(path: &Path) -> bool {
    match std::fs::metadata(path) {
        Ok(data) => data.is_file(),
        Err(error) => error.kind() == std::io::ErrorKind::NotFound,
    }
}

/// Truncates a file to the length of the pipe's data.
fn cut(path: &Path, size: u64) -> Result<(), Failure> {
    let file = std::fs::File::options().write(true).open(path);
    file.and_then(|file| file.set_len(size)).map_err(|error| {
        let text = format!("cannot truncate {} to {size} bytes: {}", path.display(), plain(&error));
        Failure::new(exit::TARGET, text)
    })
}
