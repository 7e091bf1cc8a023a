//! A copy whose source is open.

use std::os::fd::AsFd as _;

use blockhaul_block::Facts;
use blockhaul_catalog::{DeviceSpec, Intent, Stack};
use blockhaul_engine::{CopyError, JournalState};

use crate::context::{
    CopyContext, SourceDevice, SourceKind, SourceSide, TargetDevice, is_absent, len_of, of_journal,
};
use crate::description::{file_of, same_place};
use crate::error::{Result, TransferError, TransferErrorKind, TransferStep};
use crate::error_map;
use crate::open_copy::OpenCopy;
use crate::pipe::{open_input, open_output};

/// A copy whose source is open. Drop it outside of workers: that may wait for the process that serves the
/// source.
pub struct OpenSource {
    context: CopyContext,
    source: SourceSide,
    target: TargetDevice,
}

impl OpenSource {
    pub(crate) async fn open(
        mut context: CopyContext,
        source: SourceDevice,
        target: TargetDevice,
    ) -> Result<OpenSource> {
        match context.begin(source).await {
            Ok(source) => Ok(OpenSource { context, source, target }),
            Err(error) => {
                context.close().await;
                Err(error)
            }
        }
    }

    /// Opens and checks the target, without changing its contents. Runs on a worker.
    ///
    /// # Errors
    /// If the target cannot be opened, or both sides do not fit. Nothing stays open.
    pub async fn open_target(self) -> Result<OpenCopy> {
        OpenCopy::open(self.context, self.source, self.target).await
    }
}

impl CopyContext {
    async fn begin(&mut self, source: SourceDevice) -> Result<SourceSide> {
        if self.source == DeviceSpec::Pipe {
            return open_input().map(SourceSide::FromPipe);
        }
        if self.target == DeviceSpec::Pipe {
            let output = open_output()?;
            let intent = self.source_intent(false);
            let source = self.open_source(source, intent).await?;
            let files = blockhaul_backends::identity_of(output.as_fd());
            self.check_apart(&source.device().facts().files, files.as_slice())?;
            return Ok(SourceSide::ToPipe(source, output));
        }
        self.begin_device(source).await
    }

    /// Opens the source, with all checks that do not need the target, including whether other files
    /// of the copy can be made.
    async fn begin_device(&mut self, source: SourceDevice) -> Result<SourceSide> {
        self.check_files()?;
        let is_complete = self.discarding_journal()? == Some(JournalState::Complete);
        let kind = match &source {
            _ if is_complete => SourceKind::CopiedEarlier,
            SourceDevice::Described(_) | SourceDevice::Open(_) => SourceKind::Still,
            SourceDevice::Snapshot(_) => SourceKind::Snapshot,
            SourceDevice::Live(_, follower) => SourceKind::Live(follower.clone()),
        };
        let intent = self.source_intent(is_complete);
        let opened = self.open_source(source, intent).await;
        let source =
            opened.map_err(|error| if is_complete { self.beside_journal(error) } else { error })?;
        self.check_source(&source.device().facts())?;
        if let Some(map) = &self.error_map {
            map.fit(source.device().facts().size)?;
        }
        if !is_complete {
            self.check_target_file(&source)?;
            self.check_readable(&source).await?;
            if let Some(manifest) = &mut self.manifest {
                manifest.begin([&self.source, &self.target])?;
            }
        }
        Ok(SourceSide::Device(source, kind))
    }

    fn source_intent(&self, is_complete: bool) -> Intent {
        // What is in use by another program is not discarded.
        let discards = self.engine.discard_source && !is_complete;
        if discards { Intent::TARGET } else { Intent::READ }
    }

    /// Checks the journal and the file of the manifest.
    fn check_files(&self) -> Result<()> {
        if let Some(journal) = &self.journal {
            let path = &journal.path;
            blockhaul_engine::check_journal(path, journal.restart).map_err(of_journal)?;
            let beside = DeviceSpec::Path(path.clone());
            if same_place(&beside, &self.source) || same_place(&beside, &self.target) {
                let text = format!(
                    "cannot create the journal {beside}: it is the source or the target: choose another \
                     name"
                );
                let kind = TransferErrorKind::Other;
                return Err(TransferError::new(kind, TransferStep::Journal, text));
            }
        }
        self.check_error_map()?;
        self.manifest.as_ref().map_or(Ok(()), |manifest| manifest.check())
    }

    /// Checks the file of ranges that cannot be read.
    pub(crate) fn check_error_map(&self) -> Result<()> {
        let Some(map) = &self.error_map else { return Ok(()) };
        let beside = DeviceSpec::Path(map.path().to_path_buf());
        if same_place(&beside, &self.source) || same_place(&beside, &self.target) {
            let why = "it is the source or the target: choose another name";
            return Err(error_map::failed(map.path(), why));
        }
        let target_is_gone = file_of(&self.target).is_some_and(|path| is_absent(&path));
        if map.is_tried() && target_is_gone {
            let why = format!(
                "it records a copy, but {} does not exist: check the name, or remove the map to copy everything",
                self.target
            );
            return Err(error_map::failed(map.path(), &why));
        }
        if self.goes_on() && is_absent(map.path()) {
            let why = "it is gone, and the journal records a copy with it: use --restart to copy everything again";
            return Err(error_map::failed(map.path(), why));
        }
        Ok(())
    }

    /// Checks that the source has the range to copy.
    pub(crate) fn check_source(&mut self, from: &Facts) -> Result<()> {
        if let Some(bitmap) = self.selection.missing(from) {
            return Err(self.cannot_copy(format_args!(
                "the source has no bitmap {bitmap:?}: list its contexts with blockhaul info, and have its \
                 server export the bitmap"
            )));
        }
        let fits = self.selection.fit(from.size, &mut self.engine);
        fits.map_err(|why| self.cannot_copy(why))?;
        let end = self.selection.end();
        if end > from.size {
            return Err(self.cannot_copy(format_args!(
                "the source has {} bytes, but the range ends at {end}",
                from.size
            )));
        }
        Ok(())
    }

    /// Refuses a target that is absent where it must not be, and to empty one for an empty source.
    pub(crate) fn check_target_file(&self, source: &Stack) -> Result<()> {
        let target = &self.target;
        let is_gone = file_of(target).is_some_and(|path| is_absent(&path));
        if self.selection.is_increment() && is_gone && !self.keeps_target {
            return Err(TransferError::misfit(format!(
                "{target} does not exist: an increment needs the earlier copy; copy all of the source first"
            )));
        }
        let is_new = is_gone && !self.keeps_target && !self.goes_on();
        if self.selection.has_list_over_copy() && is_new {
            log::warn!("{target} does not exist: the new file has only the ranges of the list");
        }
        if self.goes_on() && is_gone {
            let next = match self.discarding_journal()? {
                Some(_) => "what it records was discarded at the source: put the target back",
                None => "check the name, or use --restart to copy everything again",
            };
            return Err(TransferError::misfit(format!(
                "{target} does not exist, but the journal records a copy: {next}"
            )));
        }
        let is_empty = source.device().facts().size == 0 && !self.selection.is_some();
        if is_empty && let Some(lost) = file_of(target).and_then(|path| len_of(&path)) {
            return Err(TransferError::misfit(format!(
                "the source {} is empty: {lost} bytes of {target} would be lost; remove the target first if \
                 that is intended",
                self.source
            )));
        }
        Ok(())
    }

    /// Checks that the source can be read, if the target is emptied next.
    async fn check_readable(&self, source: &Stack) -> Result<()> {
        if self.target_is_kept() {
            return Ok(());
        }
        // A part of the source may be readable if not all of it is.
        let size = source.device().facts().size;
        let end = if self.selection.is_some() { 0 } else { size };
        let reached = blockhaul_engine::check_source(end, source.device()).await;
        let failed =
            |error| TransferError::engine(TransferStep::OpenSource, CopyError::at_source(error));
        reached.map_err(failed)
    }
}
