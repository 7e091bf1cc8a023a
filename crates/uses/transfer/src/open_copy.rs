//! A copy whose two sides are open and checked.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use blockhaul_backends::StorageRelation;
use blockhaul_block::{Can, Facts, FileId, Kind};
use blockhaul_catalog::{Intent, Stack};
use blockhaul_engine::{
    CopyError, CopySummary, Engine, EngineOptions, Manifest, Side, VerificationResult,
};
use blockhaul_io::Pool;

use crate::context::{
    CopyContext, Follower, SourceKind, SourceSide, TargetContents, TargetDevice, of_journal,
};
use crate::control::CopyControl;
use crate::direct;
use crate::error::{Result, TransferError, TransferErrorKind, TransferStep};
use crate::error_map::only_failed;
use crate::journal::Journal;
use crate::report::CopyReport;
use crate::salvage::{self, SecondPass};

/// Shortest run of zeroes, in bytes, for which a hole is made in an overwritten file, by default.
const SPARSE_OVER: u32 = 64 << 10;

/// A copy whose two sides are open and checked. The contents of the target are unchanged. Drop it outside
/// of workers, or [close](OpenCopy::close) it.
pub struct OpenCopy {
    context: CopyContext,
    sides: Sides,
}

enum Sides {
    /// The target is opened when the pipe has data.
    FromPipe(OwnedFd, TargetDevice),
    ToPipe(Stack, OwnedFd),
    Devices(Devices),
    /// Everything was copied by an earlier run, with this result.
    Completed(Devices, Box<CopySummary>),
}

/// Two open devices.
struct Devices {
    source: Stack,
    kind: SourceKind,
    target: Stack,
    contents: TargetContents,
}

/// The results of the copy and of its verification.
type Results = (Result<CopySummary, CopyError>, Option<Result<VerificationResult, CopyError>>);

impl OpenCopy {
    pub(crate) async fn open(
        mut context: CopyContext,
        source: SourceSide,
        target: TargetDevice,
    ) -> Result<OpenCopy> {
        let sides = match source {
            SourceSide::FromPipe(input) => Ok(Sides::FromPipe(input, target)),
            SourceSide::ToPipe(source, output) => Ok(Sides::ToPipe(source, output)),
            SourceSide::Device(source, kind) => context.open_both(source, kind, target).await,
        };
        match sides {
            Ok(sides) => Ok(OpenCopy { context, sides }),
            Err(error) => {
                context.close().await;
                Err(error)
            }
        }
    }

    /// Resizes and empties the target, so that the copy itself begins at once. Runs on a worker.
    ///
    /// # Errors
    /// If the target cannot be resized or emptied. Nothing stays open.
    pub async fn prepare_target(mut self) -> Result<OpenCopy> {
        let contents = match &mut self.sides {
            Sides::Devices(devices) => {
                std::mem::replace(&mut devices.contents, TargetContents::Ready)
            }
            _ => TargetContents::Ready,
        };
        match self.context.touch(contents).await {
            Ok(()) => Ok(self),
            Err(error) => {
                self.close().await;
                Err(error)
            }
        }
    }

    /// Controls the copy.
    pub fn control(&self) -> CopyControl {
        self.context.control.clone()
    }

    /// Maximum bytes of payloads in flight.
    pub fn memory(&self) -> u64 {
        self.context.engine.memory()
    }

    /// Closes both sides. Runs on a worker.
    pub async fn close(self) {
        let OpenCopy { context, sides } = self;
        drop(sides);
        context.close().await;
    }

    /// Copies, with buffers of `pool`, and closes both sides. Runs on a worker.
    ///
    /// # Errors
    /// If a side fails, or the verification finds a difference. [`CopyControl::target_state`] then has the
    /// state of the target.
    pub async fn run(self, pool: Pool) -> Result<CopyReport> {
        let OpenCopy { mut context, sides } = self;
        let result = match sides {
            Sides::FromPipe(input, target) => context.read_pipe(input, target, &pool).await,
            Sides::ToPipe(source, output) => context.write_pipe(&source, output, &pool).await,
            Sides::Devices(devices) => context.copy(devices, &pool).await,
            Sides::Completed(_, summary) => Ok(context.report_of_earlier_run(*summary)),
        };
        context.close().await;
        result
    }

    /// The files and block devices of source and target; `None` for a copy with a pipe.
    fn files(&self) -> Option<[Vec<FileId>; 2]> {
        let (Sides::Devices(devices) | Sides::Completed(devices, _)) = &self.sides else {
            return None;
        };
        let Devices { source, target, .. } = devices;
        Some([source, target].map(|side| side.device().facts().files.clone()))
    }
}

/// Two copies that share storage.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Overlap {
    /// The index of the copy with the side that overlaps.
    pub index: usize,
    /// The side that overlaps.
    pub side: Side,
    /// The index of the copy whose target overlaps.
    pub other: usize,
}

/// The first of several copies with a side that is the target of another one.
pub fn find_overlap(copies: &[&OpenCopy]) -> Option<Overlap> {
    let files: Vec<_> = copies.iter().map(|copy| copy.files()).collect();
    let parts: Vec<_> = copies.iter().map(|copy| copy.context.shows_a_part()).collect();
    for (index, (one, part)) in files.iter().zip(&parts).enumerate() {
        for (other, (two, other_part)) in files.iter().zip(&parts).enumerate() {
            let (Some([source, target]), Some([_, taken])) = (one, two) else { continue };
            let meets = |side: usize, files: &[FileId]| {
                match blockhaul_backends::shared(files, taken) {
                    StorageRelation::Nothing => false,
                    // Layers select the part, and the parts may differ.
                    StorageRelation::Part => !part[side] && !other_part[1],
                    StorageRelation::Same => true,
                }
            };
            if other != index && meets(0, source) {
                return Some(Overlap { index, side: Side::Source, other });
            }
            if other < index && meets(1, target) {
                return Some(Overlap { index, side: Side::Target, other });
            }
        }
    }
    None
}

impl CopyContext {
    async fn open_both(
        &mut self,
        source: Stack,
        kind: SourceKind,
        target: TargetDevice,
    ) -> Result<Sides> {
        self.check_wanted()?;
        if matches!(kind, SourceKind::CopiedEarlier) {
            return self.open_completed(source).await;
        }
        let size = source.device().facts().size;
        let kept = self.target_is_kept();
        let intent = if kept {
            Intent::TARGET
        } else {
            Intent::target(size).overwriting(self.may_overwrite(&source).await)
        };
        let intent = intent.direct(direct::target(self.direct, &self.source, size));
        let (target, contents) = self.open_target(target, intent).await?;
        let facts = target.device().facts();
        self.engine.flush |= facts.flush_publishes || facts.loses_unflushed;
        self.control.set_replaced(facts.flush_publishes);
        if intent.overwrites && self.engine.sampled && !target.device().facts().zeroed {
            // Freeing blocks one by one takes longer than writing them.
            self.engine.sparse = self.engine.sparse.max(SPARSE_OVER);
        }
        self.check_sides(&source, &kind, &target)?;
        self.control.progress().expect(size);
        Ok(Sides::Devices(Devices { source, kind, target, contents }))
    }

    fn check_sides(&self, source: &Stack, kind: &SourceKind, target: &Stack) -> Result<()> {
        let [from, to] = [source, target].map(|side| side.device().facts());
        self.check_target(&from, &to)?;
        self.check_discard(&from, &to)?;
        self.check_apart(&from.files, &to.files)?;
        if let SourceKind::Live(follower) = kind {
            let checked = follower.check(target);
            return checked.map_err(|error| {
                TransferError::engine(TransferStep::CheckSides, CopyError::at_target(error))
            });
        }
        if !self.selection.is_some() && to.grows_from.is_none() && to.size > from.size {
            let (target, rest) = (&self.target, to.size - from.size);
            log::warn!(
                "{target} is larger than the source: its last {rest} bytes are left unchanged"
            );
        }
        Ok(())
    }

    /// Opens the target for reading, and checks that the journal, which is complete, is that of this
    /// copy.
    async fn open_completed(&mut self, source: Stack) -> Result<Sides> {
        let layers = std::mem::take(&mut self.target_layers);
        let size = source.device().facts().size;
        let intent = Intent::READ.direct(direct::target(self.direct, &self.source, size));
        let opened = self.registry.open(&self.target, layers, intent).await;
        let target = opened.map_err(|error| {
            let target = self.target.to_string();
            self.beside_journal(TransferError::opening(Side::Target, &target, &error))
        })?;
        self.keep_open(&target);
        let journal = self.journal_options(&source.device().facts(), None);
        let options = EngineOptions { journal, ..self.engine.clone() };
        let pool = Pool::new(options.memory());
        let progress = self.control.progress();
        let checked =
            blockhaul_engine::completed_earlier(&source, &target, &options, &pool, progress).await;
        let summary = Box::new(checked.map_err(of_journal)?);
        let (kind, contents) = (SourceKind::CopiedEarlier, TargetContents::Ready);
        Ok(Sides::Completed(Devices { source, kind, target, contents }, summary))
    }

    fn report_of_earlier_run(&self, summary: CopySummary) -> CopyReport {
        let path = self.journal.as_ref().map(|journal| journal.path.as_path());
        CopyReport::of_earlier_run(path.unwrap_or("".as_ref()), &self.shown_target(), summary)
    }

    /// Checks that the target can hold the source before anything is written.
    fn check_target(&self, from: &Facts, to: &Facts) -> Result<()> {
        self.check_writable(to)?;
        if to.flush_publishes && self.engine.discard_source {
            let why = "the target exists only when all of it is written, so that nothing can be discarded at the source \
                       before";
            return Err(self.cannot_copy(why).and(": leave out --discard-source"));
        }
        self.check_replaced(to)?;
        self.check_size(from, to)
    }

    /// Refuses a part of the source for a target that is replaced as a whole: the rest of it would be lost.
    pub(crate) fn check_replaced(&self, to: &Facts) -> Result<()> {
        // A new version keeps the rest of the one before.
        if !to.flush_publishes || self.makes_version() || !self.selection.is_some() {
            return Ok(());
        }
        let why = "the target is replaced as a whole, and keeps nothing beside the selected part";
        let error = self.cannot_copy(why).at(Some(Side::Target));
        Err(error.and(": copy all of the source, or choose a file"))
    }

    /// Checks that the target can be written.
    pub(crate) fn check_writable(&self, to: &Facts) -> Result<()> {
        if to.can.contains(Can::WRITE) {
            return Ok(());
        }
        let error = self.cannot_copy("the target is read-only").at(Some(Side::Target));
        Err(error.and(": choose another target, or have its server allow writing"))
    }

    /// Checks that the target is large enough. A new version that keeps the rest of the one before must be of a disk of its
    /// size.
    pub(crate) fn check_size(&self, from: &Facts, to: &Facts) -> Result<()> {
        if self.makes_version() && self.selection.is_some() && from.size < to.size {
            let why = format!(
                "the source ({} bytes) is smaller than the earlier version ({} bytes), of which the rest is kept: it \
                 was resized, or is another disk",
                from.size, to.size
            );
            return Err(self
                .cannot_copy(why)
                .at(Some(Side::Source))
                .and(": copy all of the source"));
        }
        let needed = self.selection.target_size(from.size);
        if to.size < needed {
            let what = if needed < from.size { "end of the range" } else { "source" };
            let why = format!(
                "the target ({} bytes) is smaller than the {what} ({needed} bytes)",
                to.size
            );
            return Err(self.cannot_copy(why).at(Some(Side::Target)).and(": make it larger"));
        }
        Ok(())
    }

    /// Checks that the source can be discarded, once the target is flushed.
    fn check_discard(&self, from: &Facts, to: &Facts) -> Result<()> {
        if !self.engine.discard_source {
            return Ok(());
        }
        let checked = blockhaul_engine::check_discard(from, to);
        checked.map_err(|error| TransferError::misfit(error.to_string()))
    }

    /// Whether an existing target may keep its blocks. It is emptied if it is assumed to be zero,
    /// if many holes would have to be made, and for a journal, which recognizes a fresh target.
    async fn may_overwrite(&self, source: &Stack) -> bool {
        let is_fresh =
            self.engine.target_is_zero || self.journal.is_some() || self.selection.is_some();
        !is_fresh && self.target_is_there() && blockhaul_engine::is_coarse(source).await
    }

    /// Prepares the target of a copy that may be continued later. What is verified counts only as a
    /// whole.
    async fn touch_recorded(&mut self, target: &Stack, contents: TargetContents) -> Result<()> {
        let Some(recorder) = self.recorder.clone() else { return self.touch(contents).await };
        recorder.check(&self.target_identity())?;
        self.touch(contents).await?;
        let identity = self.target_identity();
        let durable = recorder.durable();
        let begun = blockhaul_io::offload(move || recorder.begin(&identity)).await;
        begun.unwrap_or_else(|lost| {
            let kind = TransferErrorKind::Other;
            Err(TransferError::new(kind, TransferStep::OpenTarget, lost.to_string()))
        })?;
        if target.device().facts().can.contains(Can::FLUSH | Can::MULTI_CONN) && !self.verifies {
            self.engine.durable = Some(durable);
        }
        Ok(())
    }

    async fn copy(&mut self, devices: Devices, pool: &Pool) -> Result<CopyReport> {
        let Devices { source, kind, target, contents } = devices;
        let mut made = self.manifest_before(&source, pool).await?;
        // A target that exists only as a whole has its own record: no part of it is durable before.
        let is_published = target.device().facts().flush_publishes;
        let journal = self.journal_options(&source.device().facts(), made.as_ref());
        self.engine.journal = journal.filter(|_| !is_published);
        if self.can_release(&source, &kind, &target) {
            self.engine.no_marker = !self.engine.discard_source;
            self.engine.discard_source = true;
        }
        if let Some(map) = self.error_map.clone() {
            // A journal without its map is refused: the map is there first.
            salvage::save(map).await?;
        }
        self.touch_recorded(&target, contents).await?;
        if self.reads_again() {
            let mut summary = CopySummary::default();
            summary.size = source.device().facts().size;
            if let Some(map) = &self.error_map {
                log::warn!("{}", only_failed(map.path()));
            }
            let text = "only what had failed was read again".to_string();
            let report = CopyReport::complete(&self.source, text, summary);
            return self.read_again(&source, &target, report).await;
        }
        let (copied, verified) = self.run_engine(&source, kind, &target, pool).await;
        let summary = copied.map_err(|error| TransferError::engine(TransferStep::Copy, error))?;
        let journal = self.journal.as_ref();
        let mut report =
            CopyReport::of_devices(&self.source, journal, summary, self.control.progress());
        if let Some(verified) = verified {
            report.add_verified(&self.verified(journal, verified)?);
        }
        if let Some((file, made)) = self.manifest.as_mut().zip(made.take()) {
            file.write(&made)?;
            report.text += &format!("; manifest with digest {}", made.digest());
        }
        if self.error_map.is_some() {
            return self.read_again(&source, &target, report).await;
        }
        Ok(report)
    }

    /// Reads again what has failed, once everything else is on the target.
    async fn read_again(
        &self,
        source: &Stack,
        target: &Stack,
        report: CopyReport,
    ) -> Result<CopyReport> {
        let Some(map) = &self.error_map else { return Ok(report) };
        let is_first = !map.is_tried();
        map.set_tried();
        salvage::save(map.clone()).await?;
        let below = source.without_layer(source.layer_count().saturating_sub(1)).await;
        let source = &below.map_err(|error| TransferError::of_description(&error))?;
        let progress = self.control.progress();
        SecondPass { source, target, map, progress }.run().await?;
        Ok(report.with_unread(map.path(), map.totals(), is_first))
    }

    /// The result of the verification, after which the journal is not needed.
    fn verified(
        &self,
        journal: Option<&Journal>,
        verified: Result<VerificationResult, CopyError>,
    ) -> Result<VerificationResult> {
        let verified = verified.map_err(|error| self.different(error));
        if let Some(journal) = journal {
            journal.after_verification(&verified);
        }
        verified
    }

    /// Copies and then verifies over the same connections. `None`: no verification is wanted, or
    /// the copy has failed.
    async fn run_engine(
        &self,
        source: &Stack,
        kind: SourceKind,
        target: &Stack,
        pool: &Pool,
    ) -> Results {
        let progress = self.control.progress();
        let opened = Engine::open(source, target, &self.engine, pool, progress).await;
        let mut engine = match opened {
            Ok(engine) => engine,
            Err(error) => return (Err(error), None),
        };
        self.control.set_engine(engine.control());
        if let SourceKind::Live(follower) = kind {
            return (follow(follower, engine, target).await, None);
        }
        let plan = engine.plan();
        let copied = engine.complete(&plan).await;
        let verified =
            if self.verifies && copied.is_ok() { Some(engine.verify().await) } else { None };
        engine.close().await;
        (copied, verified)
    }

    /// Whether a point in time may be released where it is copied: it is not read again, and a
    /// connection to the target that is made again shows the same disk.
    fn can_release(&self, source: &Stack, kind: &SourceKind, target: &Stack) -> bool {
        let from = source.device().facts();
        let to = target.device().facts();
        let is_read_again = self.verifies || self.engine.digest.is_some();
        matches!(kind, SourceKind::Snapshot)
            && !is_read_again
            && to.can.contains(Can::MULTI_CONN)
            && blockhaul_engine::check_release(&from, &to).is_ok()
    }

    /// The source's manifest, if required. It is made before the copy: later changes are copied
    /// again by the next increment, and never mistaken for copied.
    async fn manifest_before(&mut self, source: &Stack, pool: &Pool) -> Result<Option<Manifest>> {
        let progress = self.control.progress();
        let failed = |error| TransferError::engine(TransferStep::Manifest, error);
        let changed = self.selection.changed(source, &mut self.engine, pool, progress).await;
        let made = changed.map_err(failed)?;
        if made.is_some() || self.manifest.is_none() {
            return Ok(made);
        }
        let now = blockhaul_engine::manifest(source, None, &self.engine, pool, progress).await;
        Ok(Some(now.map_err(failed)?))
    }

    /// A failed verification: the sides differ, or one cannot be read.
    fn different(&self, failed: CopyError) -> TransferError {
        let error = &failed.error;
        if error.kind() == Kind::Io && error.request().is_none() {
            let (source, target) = (&self.source, &self.target);
            let text = format!("verification of {target} against {source}: {error}");
            let kind = TransferErrorKind::Difference;
            return TransferError::new(kind, TransferStep::Verification, text);
        }
        let failed = TransferError::engine(TransferStep::Verification, failed);
        let text = format!("verification: {}", failed.facts());
        failed.reworded(text)
    }
}

async fn follow(
    follower: Arc<dyn Follower>,
    engine: Engine,
    target: &Stack,
) -> Result<CopySummary, CopyError> {
    follower.follow(engine, target.clone()).await
}
