//! A copy that was checked, and has opened nothing.

use std::path::Path;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::time::Duration;

use blockhaul_catalog::{ClaimOwner, Intent, Layer, Registry, Spec, Stack};
use blockhaul_engine::{
    CopyError, Durable, Engine, JournalOptions, JournalState, Manifest, Options, Rate, Side,
    Summary,
};

use crate::control::CopyControl;
use crate::description::{file_of, is_image, without_secrets};
use crate::direct;
use crate::error::{Result, TransferError, TransferErrorKind, TransferStep};
use crate::journal::{Journal, identity, seen_through};
use crate::layers::{make_layers, over_content, sparing_of_queries};
use crate::manifest_file::ManifestFile;
use crate::open_source::OpenSource;
use crate::rate_limit::rate_limit;
use crate::report::complete_journal;
use crate::request::{CopyRequest, Endpoint};
use crate::selection::CopySelection;

/// Maximum time between flushes of the target, by default.
const JOURNAL_INTERVAL: Duration = Duration::from_secs(5);

/// Interval of checks whether a source that is being opened is still wanted.
pub(crate) const LOOK: Duration = Duration::from_millis(200);

/// Goes on after everything was copied once, with the same engine.
pub trait Follower: Send + Sync {
    /// Refuses a target that the follower cannot use, before the target is touched.
    ///
    /// # Errors
    /// The reason.
    fn check(&self, target: &Stack) -> blockhaul_block::Result<()>;

    /// Copies everything, and the changes that follow, and finishes the engine.
    fn follow(self: Arc<Self>, engine: Engine, target: Stack) -> Following;
}

/// Keeps the facts by which another program continues a copy.
pub trait Recorder: Send + Sync {
    /// Refuses a target other than that of the copy, before it is touched.
    ///
    /// # Errors
    /// If the target is another one.
    fn check(&self, target: &str) -> Result<()>;

    /// Notes the target, which is about to be written. Blocks.
    ///
    /// # Errors
    /// If the note cannot be kept.
    fn begin(&self, target: &str) -> Result<()>;

    /// A listener for ranges that are durable on the target.
    fn durable(&self) -> Durable;
}

/// The run of a [`Follower`].
pub type Following = Pin<Box<dyn Future<Output = Result<Summary, CopyError>>>>;

/// The device that is read.
pub(crate) enum SourceDevice {
    /// Opened by its description, with these layers.
    Described(Vec<Arc<dyn Layer>>),
    /// Open already.
    Open(Stack),
    /// A point in time of a disk in use.
    Snapshot(Stack),
    /// A disk in use; changes follow.
    Live(Stack, Arc<dyn Follower>),
}

/// The device that is written, under the layers of the target.
pub(crate) enum TargetDevice {
    /// Opened by its description.
    Described,
    /// Open already.
    Open(Stack),
}

/// What all stages of a copy know.
pub(crate) struct CopyContext {
    pub(crate) registry: Registry,
    pub(crate) source: Spec,
    pub(crate) target: Spec,
    pub(crate) target_layers: Vec<Arc<dyn Layer>>,
    /// For the journal: layers of source and target that show a part or a form of existing
    /// contents. With one the target is neither emptied nor enlarged.
    pub(crate) seen_through: [String; 2],
    pub(crate) engine: Options,
    pub(crate) journal: Option<Journal>,
    pub(crate) direct: blockhaul_catalog::Direct,
    pub(crate) selection: CopySelection,
    pub(crate) verifies: bool,
    pub(crate) manifest: Option<ManifestFile>,
    pub(crate) control: CopyControl,
    /// The target is neither created nor emptied.
    pub(crate) keeps_target: bool,
    /// Keeps the facts by which the copy is continued later.
    pub(crate) recorder: Option<Arc<dyn Recorder>>,
    /// The opened stacks. A device may wait for the process that serves it when it is dropped, so it is
    /// never dropped on a worker.
    open: Vec<Stack>,
}

/// A copy whose request was checked. Nothing is open.
pub struct CopySetup {
    context: CopyContext,
    source: SourceDevice,
    target: TargetDevice,
}

impl CopySetup {
    /// Makes all checks that are possible without opening a device; reads lists and manifests.
    ///
    /// # Errors
    /// If fields conflict, a description or a layer is invalid, or a file cannot be read.
    pub fn new(request: CopyRequest, registry: Registry) -> Result<CopySetup> {
        let wrong = |error: blockhaul_block::Error| TransferError::of_description(&error);
        for side in [&request.source, &request.target] {
            if let Endpoint::Device(spec) = side
                && *spec != Spec::Pipe
            {
                registry.target(spec, Intent::READ).map_err(wrong)?;
            }
        }
        let names = [&request.options.source_layer, &request.options.target_layer];
        let source_layers = make_layers(&registry, names[0]).map_err(wrong)?;
        let target_layers = make_layers(&registry, names[1]).map_err(wrong)?;
        let through = |names| over_content(&registry, names).map(|over| seen_through(&over));
        let seen_through = [through(names[0]).map_err(wrong)?, through(names[1]).map_err(wrong)?];
        request.check()?;
        let selection = CopySelection::read(&request.options)?;
        let CopyRequest { source, target, options, rate, progress } = request;
        let limit = match rate {
            Some(rate) => Some(rate),
            None => rate_limit(&options)?,
        };
        let mut engine = Options { rate: limit, ..options.engine() };
        selection.set(&mut engine);
        let journal = options.journal.map(|path| Journal {
            path,
            restart: options.restart,
            interval: options.journal_interval.unwrap_or(JOURNAL_INTERVAL),
            keep: false,
        });
        let context = CopyContext {
            registry,
            source: source.spec().clone(),
            target: target.spec().clone(),
            target_layers,
            seen_through,
            engine,
            control: CopyControl::new(progress, journal.is_some(), options.verify),
            journal,
            direct: options.direct,
            selection,
            verifies: options.verify,
            manifest: options.manifest.map(ManifestFile::new),
            keeps_target: matches!(target, Endpoint::Open(..)),
            recorder: None,
            open: Vec::new(),
        };
        let source = match source {
            Endpoint::Device(_) => SourceDevice::Described(source_layers),
            Endpoint::Open(_, stack) => SourceDevice::Open(stack),
        };
        let target = match target {
            Endpoint::Device(_) => TargetDevice::Described,
            Endpoint::Open(_, stack) => TargetDevice::Open(stack),
        };
        Ok(CopySetup { context, source, target })
    }

    /// The same copy; messages about storage that is in use call it `label`.
    #[must_use]
    pub fn called(mut self, label: String) -> CopySetup {
        self.context.registry = self.context.registry.owned_by(ClaimOwner::new(label));
        self
    }

    /// Reads this point in time of a disk in use. Data that is safe on the target is released there,
    /// where possible, so that later writes to the disk need not be saved.
    pub fn read_snapshot(&mut self, source: Stack) {
        self.source = SourceDevice::Snapshot(source);
    }

    /// Reads this disk in use; `follower` copies its changes.
    pub fn follow(&mut self, source: Stack, follower: Arc<dyn Follower>) {
        self.source = SourceDevice::Live(source, follower);
    }

    /// Keeps the facts for a later continuation in `recorder`.
    pub fn record(&mut self, recorder: Arc<dyn Recorder>) {
        self.context.recorder = Some(recorder);
    }

    /// Keeps of the target what is not overwritten.
    pub fn keep_target(&mut self) {
        self.context.keeps_target = true;
    }

    /// Keeps the journal after success: the copy belongs together with others that may fail.
    pub fn keep_journal(&mut self) {
        if let Some(journal) = &mut self.context.journal {
            journal.keep = true;
        }
    }

    /// Puts one more layer over the target, outermost.
    pub fn put_over_target(&mut self, layer: Arc<dyn Layer>) {
        self.context.target_layers.push(layer);
    }

    /// The options of the engine, which may be changed until the copy runs.
    pub fn engine(&mut self) -> &mut Options {
        &mut self.context.engine
    }

    /// The limit of the rate, if there is one.
    pub fn rate(&self) -> Option<Arc<Rate>> {
        self.context.engine.rate.clone()
    }

    /// Controls the copy.
    pub fn control(&self) -> CopyControl {
        self.context.control.clone()
    }

    /// The owner of the claims of both sides.
    pub fn owner(&self) -> ClaimOwner {
        self.context.registry.owner.clone()
    }

    /// The descriptions of source and target.
    pub fn specs(&self) -> [&Spec; 2] {
        [&self.context.source, &self.context.target]
    }

    /// Whether parts of the source are discarded.
    pub fn discards_source(&self) -> bool {
        self.context.engine.discard_source
    }

    /// Maximum bytes of payloads in flight.
    pub fn memory(&self) -> u64 {
        self.context.engine.memory()
    }

    /// Opens the source and makes all checks that are possible without the target. Runs on a worker.
    ///
    /// # Errors
    /// If the source cannot be opened, or a file of the copy cannot be made. Nothing stays open.
    pub async fn open_source(self) -> Result<OpenSource> {
        let CopySetup { context, source, target } = self;
        OpenSource::open(context, source, target).await
    }
}

impl CopyContext {
    /// The target for readers who did not write its description.
    pub(crate) fn shown_target(&self) -> String {
        without_secrets(&self.target.to_string())
    }

    /// Remembers an open stack until the end of the copy.
    pub(crate) fn keep_open(&mut self, stack: &Stack) {
        self.open.push(stack.clone());
    }

    /// Closes everything, outside of workers.
    pub(crate) async fn close(self) {
        // Fails only when the program ends.
        let _ = blockhaul_io::offload(move || drop(self)).await;
    }

    /// An error of the request, of both sides together or of their files.
    pub(crate) fn cannot_copy(&self, why: impl std::fmt::Display) -> TransferError {
        TransferError::misfit(format!("cannot copy {} to {}: {why}", self.source, self.target))
    }

    pub(crate) async fn open_source(
        &mut self,
        source: SourceDevice,
        intent: Intent,
    ) -> Result<Stack> {
        let layers = match source {
            SourceDevice::Described(layers) => layers,
            SourceDevice::Open(stack)
            | SourceDevice::Snapshot(stack)
            | SourceDevice::Live(stack, _) => {
                self.keep_open(&stack);
                return Ok(stack);
            }
        };
        let intent = intent.direct(direct::source(self.direct, &self.source));
        let opened = self.open_described(layers, intent).await?;
        self.keep_open(&opened);
        Ok(opened)
    }

    async fn open_described(&self, layers: Vec<Arc<dyn Layer>>, intent: Intent) -> Result<Stack> {
        // It may take long (a passphrase, a server that does not reply), and has changed nothing.
        let mut opening = pin!(self.registry.open(&self.source, layers, intent));
        let opened = loop {
            if let Ok(opened) = blockhaul_io::timeout(LOOK, opening.as_mut()).await {
                break opened;
            }
            if self.control.progress().is_cancelled() {
                let text = "stopped before the source was open";
                return Err(stopped(TransferStep::OpenSource, text));
            }
        };
        let opened = match opened {
            Ok(opened) => sparing_of_queries(opened).await,
            Err(error) => Err(error),
        };
        opened
            .map_err(|error| TransferError::opening(Side::Source, &self.source.to_string(), &error))
    }

    /// The state of the journal, if it is to be continued and discards what it records.
    pub(crate) fn discarding_journal(&self) -> Result<Option<JournalState>> {
        let Some(journal) = self.journal.as_ref().filter(|journal| !journal.restart) else {
            return Ok(None);
        };
        blockhaul_engine::discarding_journal(&journal.path).map_err(of_journal)
    }

    /// Says what a complete journal means, if a side cannot be opened that it is checked with.
    pub(crate) fn beside_journal(&self, error: TransferError) -> TransferError {
        match &self.journal {
            Some(journal) => {
                error.and(&format!("; {}", complete_journal(&journal.path, &self.shown_target())))
            }
            None => error,
        }
    }

    /// The engine's options for the journal. `made`: the manifest of the source.
    pub(crate) fn journal_options(&self, made: Option<&Manifest>) -> Option<JournalOptions> {
        let journal = self.journal.as_ref()?;
        let mut options = journal.options(&self.source, &self.target, self.engine.discard_source);
        // After a stop during verification, the copy need not be repeated.
        options.keep |= self.verifies;
        options.source += &self.seen_through[0];
        options.target += &self.seen_through[1];
        options.source += &self.selection.identity(made);
        Some(options)
    }

    /// Whether an earlier run is continued: its writes remain.
    pub(crate) fn goes_on(&self) -> bool {
        self.journal.as_ref().is_some_and(Journal::goes_on)
    }

    /// Whether the target is neither created nor emptied.
    pub(crate) fn target_is_kept(&self) -> bool {
        self.keeps_target
            || self.goes_on()
            || self.target_stays()
            || (self.selection.is_some() && self.target_is_there())
    }

    /// Whether the target keeps its contents, because it shows a part or a form of them.
    pub(crate) fn target_stays(&self) -> bool {
        !self.seen_through[1].is_empty()
    }

    pub(crate) fn target_is_there(&self) -> bool {
        match file_of(&self.target) {
            Some(path) => !is_absent(&path),
            // An image that is not in a file.
            None => is_image(&self.target),
        }
    }

    /// Identifies the target for a later continuation.
    pub(crate) fn target_identity(&self) -> String {
        identity(&self.target, false)
    }

    /// Whether layers show only a part of the source, or of the target.
    pub(crate) fn shows_a_part(&self) -> [bool; 2] {
        [0, 1].map(|side| !self.seen_through[side].is_empty())
    }
}

/// The copy was cancelled in this step.
pub(crate) fn stopped(step: TransferStep, text: &str) -> TransferError {
    TransferError::new(TransferErrorKind::Other, step, text)
}

/// The journal cannot be used.
pub(crate) fn of_journal(error: impl Into<CopyError>) -> TransferError {
    TransferError::engine(TransferStep::Journal, error)
}

/// The length of a regular file that is not empty.
pub(crate) fn len_of(path: &Path) -> Option<u64> {
    let data = std::fs::metadata(path).ok().filter(std::fs::Metadata::is_file)?;
    (data.len() > 0).then_some(data.len())
}

pub(crate) fn is_absent(path: &Path) -> bool {
    matches!(std::fs::metadata(path), Err(error) if error.kind() == std::io::ErrorKind::NotFound)
}
