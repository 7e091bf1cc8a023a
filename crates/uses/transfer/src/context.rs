//! What all stages of a copy know, and their steps with one side.

use std::os::fd::OwnedFd;
use std::path::Path;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::time::Duration;

use blockhaul_backends::StorageRelation;
use blockhaul_block::{Facts, FileId};
use blockhaul_catalog::{
    DeviceSpec, DirectMode, Intent, Layer, Preparation, Registry, Stack, TargetMaking,
};
use blockhaul_engine::{
    CopyError, CopySummary, DurableCallback, Engine, EngineOptions, JournalOptions, JournalState,
    Manifest, Side,
};

use crate::control::CopyControl;
use crate::description::{file_of, is_image, same_storage, without_secrets};
use crate::direct;
use crate::error::{Result, TransferError, TransferErrorKind, TransferStep};
use crate::error_map::ErrorMap;
use crate::journal::{Journal, identity};
use crate::layers::sparing_of_queries;
use crate::manifest_file::ManifestFile;
use crate::printable::one_line;
use crate::report::complete_journal;
use crate::salvage::SalvageLayer;
use crate::selection::CopySelection;

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
    fn follow(self: Arc<Self>, engine: Engine, target: Stack) -> FollowFuture;
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
    fn durable(&self) -> DurableCallback;
}

/// The run of a [`Follower`].
pub type FollowFuture = Pin<Box<dyn Future<Output = Result<CopySummary, CopyError>>>>;

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

/// How a source differs from a device that nobody else uses.
pub(crate) enum SourceKind {
    /// It does not change.
    Still,
    /// It is a point in time of a disk in use, and not needed after the copy.
    Snapshot,
    /// It changes, and the follower copies the changes.
    Live(Arc<dyn Follower>),
    /// The journal says that an earlier run has copied and discarded everything.
    CopiedEarlier,
}

/// What is read, and where it goes.
pub(crate) enum SourceSide {
    /// A pipe, to a device.
    FromPipe(OwnedFd),
    /// A device, to a pipe.
    ToPipe(Stack, OwnedFd),
    /// A device, to a device.
    Device(Stack, SourceKind),
}

/// Whether a target can be written.
pub(crate) enum TargetContents {
    /// It is resized or emptied before.
    Unprepared(Preparation),
    /// At once.
    Ready,
}

/// What all stages of a copy know.
pub(crate) struct CopyContext {
    pub(crate) registry: Registry,
    pub(crate) source: DeviceSpec,
    pub(crate) target: DeviceSpec,
    pub(crate) target_layers: Vec<Arc<dyn Layer>>,
    /// For the journal: layers of source and target that show a part or a form of existing
    /// contents. With one the target is neither emptied nor enlarged.
    pub(crate) seen_through: [String; 2],
    pub(crate) engine: EngineOptions,
    pub(crate) journal: Option<Journal>,
    pub(crate) direct: DirectMode,
    pub(crate) selection: CopySelection,
    pub(crate) verifies: bool,
    pub(crate) manifest: Option<ManifestFile>,
    pub(crate) control: CopyControl,
    /// The target is neither created nor emptied.
    pub(crate) keeps_target: bool,
    /// Keeps the facts by which the copy is continued later.
    pub(crate) recorder: Option<Arc<dyn Recorder>>,
    /// The ranges that cannot be read, which are left out.
    pub(crate) error_map: Option<Arc<ErrorMap>>,
    /// The opened stacks. A device may wait for the process that serves it when it is dropped, so it is
    /// never dropped on a worker.
    pub(crate) open: Vec<Stack>,
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

    /// Whether the copy can have a journal.
    pub(crate) fn can_have_journal(&self) -> bool {
        let is_pipe = [&self.source, &self.target].contains(&&DeviceSpec::Pipe);
        !is_pipe && self.registry.can_have_journal(&self.target)
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
                return self.skipping_errors(stack).await;
            }
        };
        let intent = intent.direct(direct::source(self.direct, &self.source));
        let opened = self.open_described(layers, intent).await?;
        self.keep_open(&opened);
        self.skipping_errors(opened).await
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

    /// The source under the layer that reads bad sectors as zeroes, if they are skipped.
    async fn skipping_errors(&self, source: Stack) -> Result<Stack> {
        let Some(map) = &self.error_map else { return Ok(source) };
        let layer = SalvageLayer { map: map.clone(), has_journal: self.journal.is_some() };
        let over = source.with_layer(Arc::new(layer)).await;
        over.map_err(|error| TransferError::of_description(&error))
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
    pub(crate) fn journal_options(
        &self,
        source: &Facts,
        made: Option<&Manifest>,
    ) -> Option<JournalOptions> {
        let journal = self.journal.as_ref()?;
        let mut options = journal.options(&self.source, &self.target, self.engine.discard_source);
        // After a stop during verification, the copy need not be repeated.
        options.keep |= self.verifies;
        if let Some(version) = &source.version {
            options.source += &format!(" in the version {}", one_line(version));
        }
        options.source += &self.seen_through[0];
        options.target += &self.seen_through[1];
        options.source += &self.selection.identity(made);
        if self.error_map.is_some() {
            options.source += " without what cannot be read";
        }
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
            || self.reads_again()
            || self.target_stays()
            || (self.selection.is_some() && (self.target_is_there() || self.makes_version()))
    }

    /// Whether the copy makes a new version of a target that keeps earlier ones.
    pub(crate) fn makes_version(&self) -> bool {
        self.registry.target_making(&self.target) == TargetMaking::NewVersion
    }

    /// Whether an earlier run has tried everything: only what has failed is read again.
    pub(crate) fn reads_again(&self) -> bool {
        self.error_map.as_ref().is_some_and(|map| map.is_tried())
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

    pub(crate) async fn open_target(
        &mut self,
        target: TargetDevice,
        intent: Intent,
    ) -> Result<(Stack, TargetContents)> {
        let layers = std::mem::take(&mut self.target_layers);
        let (opened, contents) = match target {
            TargetDevice::Open(mut stack) => {
                for layer in layers {
                    let over = stack.with_layer(layer).await;
                    stack = over.map_err(|error| TransferError::of_description(&error))?;
                }
                (stack, TargetContents::Ready)
            }
            TargetDevice::Described => {
                let opened = self.registry.open_target(&self.target, layers, intent).await;
                let (stack, preparation) = opened.map_err(|error| self.target_error(&error))?;
                (stack, TargetContents::Unprepared(preparation))
            }
        };
        self.keep_open(&opened);
        Ok((opened, contents))
    }

    pub(crate) fn target_error(&self, error: &blockhaul_block::Error) -> TransferError {
        TransferError::opening(Side::Target, &self.target.to_string(), error)
    }

    /// Refuses a source and a target that share storage, by their files.
    pub(crate) fn check_apart(&self, source: &[FileId], target: &[FileId]) -> Result<()> {
        let shared = blockhaul_backends::shared(source, target);
        let (from, to) = (&self.source, &self.target);
        let text = match shared {
            StorageRelation::Nothing => return Ok(()),
            // Layers select the part, and the parts may differ.
            StorageRelation::Part if self.shows_a_part() != [false; 2] => return Ok(()),
            StorageRelation::Part => {
                format!("source {from} and target {to} overlap: choose another target")
            }
            StorageRelation::Same => same_storage(from, to),
        };
        Err(TransferError::new(TransferErrorKind::Request, TransferStep::CheckSides, text))
    }

    /// Prepares the target for the copy. Its contents may be lost from here on.
    pub(crate) async fn touch(&mut self, contents: TargetContents) -> Result<()> {
        let TargetContents::Unprepared(preparation) = contents else { return Ok(()) };
        // Whatever happens from here on: the old journal describes contents that are about to be
        // lost.
        if let Some(journal) = self.journal.as_ref().filter(|journal| journal.restart) {
            blockhaul_engine::discard_journal(&journal.path).map_err(of_journal)?;
        }
        self.control.progress().set_preparing(true);
        let record = self.journal.as_ref().map(Journal::record_file);
        let prepared = preparation.run_with(record).await;
        self.control.progress().set_preparing(false);
        prepared.map_err(|error| self.target_error(&error))?;
        self.control.touch();
        Ok(())
    }

    /// Refuses to go on after a cancel.
    pub(crate) fn check_wanted(&self) -> Result<()> {
        if self.control.progress().is_cancelled() {
            let text = "stopped before the target was opened";
            return Err(stopped(TransferStep::OpenTarget, text));
        }
        Ok(())
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
