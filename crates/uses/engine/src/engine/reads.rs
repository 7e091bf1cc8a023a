//! Plans that are read only: verification, comparison, manifests, digests.

use std::sync::Arc;

use blockhaul_block::{Error, Kind};
use blockhaul_catalog::Stack;
use blockhaul_io::{Pool, Task};

use super::{Engine, EngineInput, parts};
use crate::algorithm::{DigestAlgorithm, Hasher};
use crate::digest::{DigestReadAhead, PIECE};
use crate::error::{CopyError, Result};
use crate::handle::RetryControl;
use crate::manifest::{BLOCK, Manifest, unit_of};
use crate::options::EngineOptions;
use crate::orders::LaneCommand;
use crate::progress::CopyProgress;
use crate::reading::{SourceScan, UnitDigests};
use crate::resolved::keeps_one_handle;
use crate::segment::SEGMENT;
use crate::segment_maker::{SegmentSettings, make};
use crate::segment_queue::SegmentQueue;
use crate::selection::Selection;
use crate::shared::EngineParts;
use crate::side::Side;
use crate::sides::DiskPair;
use crate::verify::{VerificationResult, drop_cached};

/// What is read, and what for.
struct ScanRequest {
    selection: Selection,
    /// Both sides are read and compared.
    compares: bool,
    /// Unit size in bytes of the requested digests.
    unit: Option<u64>,
    /// A failure to get extents is an error.
    strict: bool,
}

impl Engine {
    /// Opens an engine that reads `source`, and compares it with `target` if there is one. It
    /// cannot copy. The number of connections to each side is that of the options; it uses those
    /// beyond the first only if the server promises that all show one disk.
    ///
    /// # Errors
    /// If the options do not fit the source.
    pub fn open_to_read(
        source: &Stack,
        target: Option<&Stack>,
        options: &EngineOptions,
        pool: &Pool,
        progress: &Arc<CopyProgress>,
    ) -> Result<Engine> {
        let started = blockhaul_io::now();
        // A target that is not read needs no connections of its own.
        let target = target.cloned().unwrap_or_else(|| Stack::over(source.device().clone()));
        let sides = DiskPair { source: source.clone(), target };
        let facts = [&sides.source, &sides.target].map(|side| side.device().facts());
        let is_single = keeps_one_handle(options, &facts[0], &facts[1]);
        let options = EngineOptions {
            connections: if is_single { 1 } else { options.connections },
            adaptive_connections: false,
            adaptive_size: false,
            request_size: BLOCK as u32,
            discard_source: false,
            ..options.clone()
        };
        let selection = sides.selection(&options)?;
        let retries = RetryControl::new(&options, progress);
        let parts =
            EngineParts { reads_only: true, ..parts(&sides, &options, pool, &retries, progress) };
        let given = EngineInput { sides, options, pool: pool.clone(), selection, started };
        Ok(Engine::with(parts, given))
    }

    /// Reads the source and the start of the target again, as far as the options select them for a
    /// copy, and compares them. Call it when the writes have completed. If the options ask for a
    /// flush, the page cache of a target that lends its file is dropped first, so that reads return
    /// what is on storage.
    ///
    /// # Errors
    /// [`Kind::Io`] without a request names the offset of the first difference; more can be read
    /// after it. Otherwise the first error that retries did not resolve, or [`Kind::ShuttingDown`]
    /// after a cancel.
    pub async fn verify(&mut self) -> Result<VerificationResult> {
        let size = self.source_facts().size;
        let selection = self.selection.clone();
        let unit = selection.is_whole().then(|| unit_of(size));
        if self.options.flush || self.options.journal.is_some() {
            drop_cached(&self.sides.target, selection.ranges()).await;
        }
        let before = self.shared.progress.snapshot().verified;
        let wanted = ScanRequest { selection, compares: true, unit, strict: false };
        let (units, differs_at) = self.read(wanted).await?;
        if let Some(at) = differs_at {
            let text = format!(
                "source and target differ, first at offset {at}: the source changed during the copy, or one \
                 of them returns wrong data; copy again"
            );
            let name = &self.sides.target.device().facts().name;
            return Err(CopyError::at_target(Error::new(Kind::Io, text).on(name)));
        }
        let range = (0, size);
        let digest = unit.map(|unit| Manifest { size, unit, range, units }.digest());
        Ok(VerificationResult { bytes: self.shared.progress.snapshot().verified - before, digest })
    }

    /// Compares all of the source with the target: the offset of the first difference, if there is
    /// one. Bytes of the source beyond the end of the target count as equal if they are zero; those
    /// of a longer target are not read.
    ///
    /// # Errors
    /// The first error that retries did not resolve; that of an extents request or a read names the
    /// request ([`Error::request`]). [`Kind::ShuttingDown`] after a cancel.
    pub async fn compare(&mut self) -> Result<Option<u64>> {
        let selection = Selection::all(self.source_facts().size);
        self.shared.progress.set_total(selection.total());
        let wanted = ScanRequest { selection, compares: true, unit: None, strict: true };
        Ok(self.read(wanted).await?.1)
    }

    /// Reads the source, or the one range that the options select, and returns the digests of its
    /// units. `like`: use the unit length and the range of this manifest.
    ///
    /// # Errors
    /// The first error that retries did not resolve; [`Kind::ShuttingDown`] after a cancel.
    pub async fn manifest(&mut self, like: Option<&Manifest>) -> Result<Manifest> {
        let facts = self.source_facts();
        let mut chosen = EngineOptions { bitmap: None, ..self.options.clone() };
        let mut unit = unit_of(facts.size);
        if let Some(like) = like {
            unit = like.unit;
            // A device that now has another size is digested to its end.
            let to_end = like.range.1 == like.size;
            let end = if to_end { facts.size } else { like.range.1.min(facts.size) };
            let start = like.range.0.min(end);
            let whole = like.range == (0, like.size);
            chosen.ranges = (!whole).then(|| Arc::from([(start, end - start)]));
        }
        let selection = Selection::new(&chosen, &facts, 1)?;
        let range = selection.bounds();
        let wanted = ScanRequest { selection, compares: false, unit: Some(unit), strict: false };
        let (units, _) = self.read(wanted).await?;
        Ok(Manifest { size: facts.size, unit, range, units })
    }

    /// Reads all of the source over its first connection and returns its digest in hexadecimal.
    /// Holes are not read, but all algorithms except blksum must hash their zeroes.
    ///
    /// # Errors
    /// The first error that retries did not resolve; [`Kind::ShuttingDown`] after a cancel.
    pub async fn digest(&mut self, algorithm: DigestAlgorithm) -> Result<String> {
        let shared = self.shared.clone();
        let options = self.options.clone();
        let [teller, reader] = [(); 2].map(|()| self.sides.handle(Side::Source, &shared.retries));
        let size = teller.facts().size;
        let (queue, making) = self.begin_reading(SegmentSettings {
            extents: options.extents,
            grain: PIECE,
            whole: (true, true),
            ..SegmentSettings::of(teller, SEGMENT, &shared.progress)
        })?;
        // One task reads for all connections.
        let requests = options.requests.saturating_mul(options.connections.max(1));
        let ahead =
            DigestReadAhead::new(&shared, reader, &self.pool, (requests, !options.adaptive));
        let mut hasher = Hasher::new(algorithm);
        if let Err(error) = ahead.hash(&queue, &mut hasher).await {
            shared.fail(error);
        }
        self.end_reading(&queue, making).await?;
        Ok(hasher.finish(size))
    }

    /// Reads over all lanes: the digests of the units that are not all zero, and the offset of the
    /// first difference.
    async fn read(&mut self, wanted: ScanRequest) -> Result<(UnitDigests, Option<u64>)> {
        let ScanRequest { selection, compares, unit, strict } = wanted;
        let shared = self.shared.clone();
        let extents = self.options.extents;
        // A unit is read by one lane.
        let segment = shared.resolved.segment.max(unit.unwrap_or(BLOCK));
        let bounds = selection.bounds();
        let handle = |side| self.sides.handle(side, &shared.retries);
        let (queue, making) = self.begin_reading(SegmentSettings {
            target: compares.then(|| handle(Side::Target)),
            // Digests are of whole blocks.
            grain: if unit.is_some() { BLOCK } else { 1 },
            new: unit.is_none(),
            extents,
            strict: strict && extents,
            whole: (!compares, true),
            selection,
            // Skipped bytes count for a copy only.
            ..SegmentSettings::of(handle(Side::Source), segment, &Arc::new(CopyProgress::new()))
        })?;
        let reading = Arc::new(SourceScan::new(compares, unit, &self.pool));
        self.start_lanes(Some(bounds), segment);
        self.give(LaneCommand::Read(queue.clone(), reading.clone())).await;
        self.end_reading(&queue, making).await?;
        Ok(reading.take_results())
    }

    /// Starts to make the segments of a reading.
    fn begin_reading(
        &mut self,
        making: SegmentSettings,
    ) -> Result<(Arc<SegmentQueue>, Task<Result<()>>)> {
        self.shared.outcome()?;
        let queue = self.plan_of(making.selection.clone()).queue().clone();
        self.begin(&queue);
        let making = blockhaul_io::spawn(make(queue.clone(), making));
        Ok((queue, making))
    }

    async fn end_reading(&self, queue: &SegmentQueue, making: Task<Result<()>>) -> Result<()> {
        queue.stop();
        if let Err(error) = making.await {
            self.shared.fail(error);
        }
        self.shared.end();
        self.shared.outcome()
    }
}
