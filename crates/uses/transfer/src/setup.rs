//! A copy that was checked, and has opened nothing.

use std::sync::Arc;
use std::time::Duration;

use blockhaul_catalog::{ClaimOwner, DeviceSpec, Intent, Layer, Registry, Stack};
use blockhaul_engine::{EngineOptions, RateLimit, Side};

use crate::context::{CopyContext, Follower, Recorder, SourceDevice, TargetDevice};
use crate::control::CopyControl;
use crate::description::file_of;
use crate::error::{Result, TransferError};
use crate::error_map::ErrorMap;
use crate::journal::{Journal, seen_through};
use crate::layers::{make_layers, over_content};
use crate::manifest_file::ManifestFile;
use crate::open_copy::OpenCopy;
use crate::open_source::OpenSource;
use crate::rate_limit::rate_limit;
use crate::request::{CopyRequest, Endpoint};
use crate::selection::CopySelection;

/// Maximum time between flushes of the target, by default.
const JOURNAL_INTERVAL: Duration = Duration::from_secs(5);

/// A copy whose request was checked. Nothing is open.
pub struct CopySetup {
    context: CopyContext,
    source: SourceDevice,
    target: TargetDevice,
}

impl CopyRequest {
    /// Opens both sides, with all checks that are possible before the target is touched. Runs on a worker.
    ///
    /// # Errors
    /// If fields conflict, a side cannot be opened, or both do not fit. The contents of the target are
    /// unchanged, and nothing stays open.
    pub async fn open(self, registry: &Registry) -> Result<OpenCopy> {
        CopySetup::new(self, registry.clone())?.open().await
    }
}

/// Layers that show what is in a packed file, and the programs that write one.
const UNPACKERS: [(&str, &str); 2] = [("gz", "gzip"), ("xz", "xz")];

/// Refuses layers over the target that cannot be written.
fn check_target_layers(names: &[String]) -> Result<()> {
    let is_named = |name: &str| names.iter().any(|text| text.split('?').next() == Some(name));
    match UNPACKERS.iter().find(|(layer, _)| is_named(layer)) {
        None => Ok(()),
        Some((layer, program)) => Err(TransferError::request(format!(
            "the layer {layer} only reads: for a packed copy write blockhaul copy SOURCE - | {program} > FILE"
        ))),
    }
}

/// Refuses a target that only the commands for a store of backups may change.
fn refuse_store_file(target: &DeviceSpec) -> Result<()> {
    let Some(dir) = file_of(target).and_then(|file| blockhaul_store::store_of_file(&file)) else {
        return Ok(());
    };
    Err(TransferError::request(format!(
        "{target} is a file of the store of backups {}: choose another target; blockhaul pull adds points to a store",
        dir.display()
    )))
}

impl CopySetup {
    /// Makes all checks that are possible without opening a device; reads lists and manifests.
    ///
    /// # Errors
    /// If fields conflict, a description or a layer is invalid, or a file cannot be read.
    pub fn new(request: CopyRequest, registry: Registry) -> Result<CopySetup> {
        let registry = registry.connecting(&request.options.connections());
        let wrong = |error: blockhaul_block::Error| TransferError::of_description(&error);
        for side in [&request.source, &request.target] {
            if let Endpoint::Device(spec) = side
                && *spec != DeviceSpec::Pipe
            {
                registry.target(spec, Intent::READ).map_err(wrong)?;
            }
        }
        if let (Endpoint::Device(target), false) = (&request.target, request.options.into_store) {
            refuse_store_file(target)?;
        }
        let names = [&request.options.source_layer, &request.options.target_layer];
        check_target_layers(names[1])?;
        let source_layers = make_layers(&registry, names[0]).map_err(wrong)?;
        let target_layers = make_layers(&registry, names[1]).map_err(wrong)?;
        let through = |names| over_content(&registry, names).map(|over| seen_through(&over));
        let seen_through = [through(names[0]).map_err(wrong)?, through(names[1]).map_err(wrong)?];
        request.check()?;
        let selection = CopySelection::read(&request.options)?;
        let map = request.options.error_map.as_deref();
        let map = map.map(|path| ErrorMap::read(path, request.options.restart)).transpose()?;
        let CopyRequest { source, target, options, rate, progress } = request;
        let limit = match rate {
            Some(rate) => Some(rate),
            None => rate_limit(&options)?,
        };
        let mut engine = EngineOptions { rate: limit, ..options.engine() };
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
            error_map: map.map(Arc::new),
            open: Vec::new(),
        };
        if context.journal.is_some()
            && let Endpoint::Device(spec) = &target
            && *spec != DeviceSpec::Pipe
            && !context.registry.can_have_journal(spec)
        {
            let why = "a copy to this target cannot be continued, and has no journal";
            let error = context.cannot_copy(why).at(Some(Side::Target));
            return Err(error.and(": leave out --journal"));
        }
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
    pub fn engine(&mut self) -> &mut EngineOptions {
        &mut self.context.engine
    }

    /// The limit of the rate, if there is one.
    pub fn rate(&self) -> Option<Arc<RateLimit>> {
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
    pub fn specs(&self) -> [&DeviceSpec; 2] {
        [&self.context.source, &self.context.target]
    }

    /// Whether the copy can have a journal: not with pipes, and not to all kinds of targets.
    pub fn can_have_journal(&self) -> bool {
        self.context.can_have_journal()
    }

    /// Whether parts of the source are discarded.
    pub fn discards_source(&self) -> bool {
        self.context.engine.discard_source
    }

    /// Maximum bytes of payloads in flight.
    pub fn memory(&self) -> u64 {
        self.context.engine.memory()
    }

    /// Opens both sides, with all checks that are possible before the target is touched. Runs on a worker.
    ///
    /// # Errors
    /// If a side cannot be opened, or both do not fit. The contents of the target are unchanged, and nothing
    /// stays open.
    pub async fn open(self) -> Result<OpenCopy> {
        self.open_source().await?.open_target().await
    }

    /// The parts that a plan needs: the target is not opened as one.
    pub(crate) fn into_planning(self) -> (CopyContext, SourceDevice) {
        (self.context, self.source)
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
