//! The engine: keeps connections and what it learned about them while it copies and reads several
//! plans in turn.
//!
//! - `reads`: plans that are read only. `control`: pause, resume, rate and cancel. `completed`: copies
//!   that an earlier run has completed.

mod completed;
mod control;
mod own_journal;
mod reads;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use blockhaul_block::{Can, Error, Facts, Kind};
use blockhaul_catalog::Stack;
use blockhaul_io::{Pool, WorkerHandle};

use crate::error::{CopyError, Result};
use crate::extra_lanes::extra_lane;
use crate::handle::RetryControl;
use crate::journal::{JournalContent, random_id};
use crate::kernel_copy::KernelCopy;
use crate::lane_slots::LaneSlots;
use crate::ledger::SegmentRange;
use crate::marker::Marker;
use crate::marker::check::{MarkerPresence, check};
use crate::marker::choice::choose;
use crate::meter::MeterSnapshot;
use crate::options::{CopySummary, EngineOptions};
use crate::orders::{CommandReceiver, EndAction, LaneCommand, LaneCommands};
use crate::plan::EnginePlan;
use crate::progress::CopyProgress;
use crate::resolved::{
    EffectiveOptions, block, check_discard, check_release, check_source, check_target,
};
use crate::same_disk::SameDisk;
use crate::segment_maker::{EarlierRuns, SegmentSettings, make};
use crate::segment_queue::SegmentQueue;
use crate::selection::Selection;
use crate::shared::{BufferPools, EngineParts, EngineState, LearnedState, ZeroesFound};
use crate::side::Side;
use crate::sides::DiskPair;
use crate::signals::LaneSignals;
use crate::streaming_digest::StreamingDigest;
use crate::tuner::Tuner;

use self::own_journal::{as_begun, close_journal, identity_there, look_at_edge, own_journal};

pub use self::completed::{check_resumption, completed_earlier};
pub use self::control::EngineControl;

/// Maximum number of verify requests in flight, all lanes together.
const CHECKS_MAX: u64 = 16;
/// Maximum bytes requested from a source and not yet received, in multiples of the copy's memory: a
/// path of 50 ms and 10 Gbit/s holds 64 MB.
const LATE: u64 = 2;

/// Copies the ranges of plans from one device to another, and reads, compares and digests both.
/// Connections, what was learned about them, unflushed writes and the journal persist from one plan
/// to the next. Use it on a worker; lanes
/// are spread over all workers. Work in flight ends soon after the engine is dropped.
pub struct Engine {
    shared: Arc<EngineState>,
    sides: DiskPair,
    options: EngineOptions,
    pool: Pool,
    orders: Arc<LaneCommands>,
    /// Number of lanes that accept orders, dialled or not.
    lanes: usize,
    /// The range that the options select, for the first plan.
    selection: Selection,
    /// The records of an earlier run of the program, for the first plan.
    earlier: Option<EarlierRuns>,
    /// A plan was begun.
    begun: bool,
    /// Number of copies started.
    runs: u32,
    /// Nothing else is copied.
    copied: bool,
    /// Largest number of lanes used in one run.
    lanes_used: usize,
    /// The journal stays after success.
    journal_stays: bool,
    started: Instant,
}

impl Engine {
    /// Opens an engine between `source` and the start of `target`, which must be at least as large
    /// as the range that the options select. Opens the journal and verifies its last records.
    ///
    /// # Errors
    /// If the devices and the options do not fit together, or the journal cannot be used.
    pub async fn open(
        source: &Stack,
        target: &Stack,
        options: &EngineOptions,
        pool: &Pool,
        progress: &Arc<CopyProgress>,
    ) -> Result<Engine> {
        let started = blockhaul_io::now();
        let sides = DiskPair { source: source.clone(), target: target.clone() };
        let selection = checked_selection(&sides, options).await?;
        let there = identity_there(options).await;
        let options = as_begun(options, there.as_ref());
        let retries = RetryControl::new(&options, progress);
        let parts = parts(&sides, &options, pool, &retries, progress);
        let resolved = &parts.resolved;
        // A journal is for the ranges that a bitmap selects when the copy begins.
        let selection = match &options.journal {
            Some(_) => selection.into_ranges(&sides.handle(Side::Source, &retries)).await?,
            None => selection,
        };
        progress.set_total(selection.total());
        let from = source.device().facts();
        let to = target.device().facts();
        progress.set_disk_size(from.size);
        let claimed = options.target_is_zero && !options.trust_zero && !to.zeroed;
        if claimed && there.is_none() {
            check_zeroes(&sides, selection.bounds(), &retries).await?;
        }
        let place = match &there {
            Some(there) => there.place.clone(),
            None if !options.discard_source || options.no_marker => None,
            None => choose(&sides, &selection, options.extents, (resolved, &retries)).await?,
        };
        let opened =
            own_journal(&sides, &options, &selection, (resolved, &retries), place.clone()).await?;
        let (journal, recorded) = opened.unzip();
        let recorded =
            recorded.unwrap_or_else(|| JournalContent { place, ..JournalContent::default() });
        if claimed && recorded.is_earlier && recorded.count == 0 && !recorded.zeroes_checked {
            check_zeroes(&sides, selection.bounds(), &retries).await?;
        }
        let in_blocks = selection.is_whole() && resolved.in_whole_blocks();
        let streaming = options.digest.filter(|_| in_blocks);
        let streaming = streaming.and_then(|algorithm| StreamingDigest::new(algorithm, from.size));
        let parts = EngineParts { journal, streaming, ..parts };
        let given = EngineInput { sides, options, pool: pool.clone(), selection, started };
        let mut engine = Engine::with(parts, given);
        // Report it before the journal is relied on.
        if engine.shared.durability.journal.is_some() && !to.can.contains(Can::FLUSH) {
            let text = "the target cannot be flushed: the journal is valid if this program is killed, but \
                        not if the target's machine loses power";
            engine.shared.warn(text.to_string());
        }
        engine.begin_marker(&recorded).await?;
        let ranges = engine.selection.ranges();
        let earlier = look_at_edge(&engine.shared, &engine.sides, recorded, ranges).await;
        engine.earlier = Some(earlier);
        Ok(engine)
    }

    fn with(parts: EngineParts, given: EngineInput) -> Engine {
        let EngineInput { sides, options, pool, selection, started } = given;
        Engine {
            shared: Arc::new(EngineState::new(parts)),
            sides,
            options,
            pool,
            orders: Arc::default(),
            lanes: 0,
            selection,
            earlier: None,
            begun: false,
            runs: 0,
            copied: false,
            lanes_used: 0,
            journal_stays: false,
            started,
        }
    }

    /// Places the marker of a copy that discards its source, or refuses sides that do not belong together.
    async fn begin_marker(&self, recorded: &JournalContent) -> Result<()> {
        let Some(place) = recorded.place.clone() else { return Ok(()) };
        let journal = self.shared.durability.journal.as_ref();
        let id = journal.map_or_else(random_id, |journal| Ok(journal.file.id()))?;
        let marker = Marker::new(place, id);
        let with = (&self.shared.resolved, &self.shared.retries);
        let beginning = check(&self.sides, &marker, recorded, with).await?;
        self.shared.retries.set_marker(marker.clone());
        let MarkerPresence::Place(old) = beginning else { return Ok(()) };
        self.shared.begin_work().await;
        let placed = self.sides.first_lane(&self.shared, false).place_marker(&marker, &old).await;
        self.shared.signals.end_work();
        placed
    }

    /// Copies all but what is copied last, and removes the marker. Returns the number of lanes.
    async fn copy_all_but_last(&self, queue: &Arc<SegmentQueue>, marker: &Marker) -> usize {
        self.give(LaneCommand::Copy(queue.clone(), EndAction::Flush)).await;
        let lanes = self.shared.report.lanes_used.swap(0, Ordering::Relaxed);
        if !self.shared.stopped() {
            self.shared.begin_work().await;
            let lane = self.sides.first_lane(&self.shared, false);
            if let Err(error) = lane.remove_marker(marker).await {
                self.shared.fail(error);
            }
            self.shared.signals.end_work();
            self.shared.learned.tuner.resume();
            queue.hand_out_last();
        }
        lanes
    }

    /// A plan for what the options select: all of the source, ranges, or the extents of a bitmap.
    /// No range can be added to it.
    pub fn plan(&self) -> EnginePlan {
        self.plan_of(self.selection.clone())
    }

    fn plan_of(&self, selection: Selection) -> EnginePlan {
        EnginePlan::of(selection, self.source_facts(), self.shared.learned.slots.clone())
    }

    /// An empty plan; ranges can be added before and while it runs.
    pub fn empty_plan(&self) -> EnginePlan {
        let target = self.sides.target.device().facts();
        let source = self.source_facts();
        let minimum = source.block.minimum.max(target.block.minimum);
        EnginePlan::empty(minimum, source, self.shared.learned.slots.clone())
    }

    /// Copies the ranges of a plan. They are written on return, but may not be durable before
    /// [`Engine::flush`]. Returns the summary of this run. Another plan may follow, also for the
    /// same ranges; it does not rely on zeroes that were on the target before the first plan.
    ///
    /// # Errors
    /// The first error that retries did not resolve, or [`Kind::ShuttingDown`] after a cancel; no
    /// other plan can follow. [`Kind::Invalid`] for a plan that has run before and, with a journal,
    /// for a second plan or one that is not the options' plan; so with [`EngineOptions::discard_source`].
    pub async fn run(&mut self, plan: &EnginePlan) -> Result<CopySummary> {
        self.carry_out(plan, EndAction::Round).await
    }

    /// Flushes the target, if it supports flush.
    ///
    /// # Errors
    /// If the flush failed and writing again did not help.
    pub async fn flush(&mut self) -> Result<()> {
        self.shared.outcome()?;
        self.give(LaneCommand::End(EndAction::Flush)).await;
        self.shared.outcome()
    }

    /// Runs the last plan, makes it durable if the options ask for that, removes the journal or
    /// records there that everything is copied, and computes the requested digest. Returns the summary
    /// of all runs. The engine can still read.
    ///
    /// # Errors
    /// Those of [`Engine::run`] and [`Engine::flush`].
    pub async fn complete(&mut self, plan: &EnginePlan) -> Result<CopySummary> {
        self.carry_out(plan, EndAction::Copy).await?;
        self.completed().await
    }

    /// Closes the connections that the engine has made. The journal is then free for another copy.
    pub async fn close(self) {
        self.give(LaneCommand::Close).await;
    }

    /// Finishes after the last plan, like [`Engine::complete`] and [`Engine::close`].
    ///
    /// # Errors
    /// The first error that retries did not resolve; [`Kind::ShuttingDown`] after a cancel.
    pub async fn finish(mut self) -> Result<CopySummary> {
        self.give(LaneCommand::End(EndAction::Copy)).await;
        let summary = self.completed().await;
        self.close().await;
        summary
    }

    /// Runs the last plan and finishes.
    ///
    /// # Errors
    /// Those of [`Engine::complete`].
    pub async fn run_last(mut self, plan: &EnginePlan) -> Result<CopySummary> {
        let summary = self.complete(plan).await;
        self.close().await;
        summary
    }

    /// A handle to control the engine.
    pub fn control(&self) -> EngineControl {
        EngineControl(self.shared.clone())
    }

    /// The summary of all runs so far, also after an error or a cancel.
    pub fn summary(&self) -> CopySummary {
        CopySummary {
            lanes: self.lanes_used,
            elapsed: blockhaul_io::elapsed(self.started),
            ..self.counted()
        }
    }

    /// Counters other than bytes.
    pub fn meters(&self) -> MeterSnapshot {
        self.shared.progress.meters()
    }

    fn source_facts(&self) -> Arc<Facts> {
        self.sides.source.device().facts()
    }

    async fn carry_out(&mut self, plan: &EnginePlan, ending: EndAction) -> Result<CopySummary> {
        self.shared.outcome()?;
        if self.copied || self.shared.reads_only {
            let text =
                "nothing can be copied by an engine that only reads, or has completed its copy";
            return Err(Error::new(Kind::Invalid, text).into());
        }
        let once = self.options.journal.is_some() || self.options.discard_source;
        if once && (self.runs > 0 || plan.added().is_some()) {
            let text = "a journal, or a source that is discarded, is for one plan, of what the options \
                        choose";
            return Err(Error::new(Kind::Invalid, text).into());
        }
        let began = blockhaul_io::now();
        let mut before = self.counted();
        let bytes = plan.begin(&self.shared.progress)?;
        if self.runs == 0 {
            self.shared.progress.set_total(bytes);
            before.size = 0;
        } else {
            self.shared.progress.add_total(bytes);
            self.shared.learned.same_disk.renew();
        }
        if self.begun {
            self.shared.learned.tuner.resume();
        }
        self.runs += 1;
        self.copied = ending == EndAction::Copy;
        let queue = plan.queue();
        self.begin(queue);
        let making = self.making(plan);
        let making = blockhaul_io::spawn(make(queue.clone(), making));
        let bounds = plan.added().is_none().then(|| plan.selection().bounds());
        self.start_lanes(bounds, self.shared.resolved.segment);
        let mut lanes = 0;
        if let Some(marker) = self.shared.retries.marker().cloned() {
            lanes = self.copy_all_but_last(queue, &marker).await;
        }
        self.give(LaneCommand::Copy(queue.clone(), ending)).await;
        if let Err(error) = making.await {
            self.shared.fail(error);
        }
        self.shared.end();
        self.shared.target_is_zero.store(false, Ordering::Relaxed);
        lanes = lanes.max(self.shared.report.lanes_used.load(Ordering::Relaxed));
        self.lanes_used = self.lanes_used.max(lanes);
        let outcome = self.shared.outcome();
        // No lane waits for a range any more.
        queue.stop();
        outcome?;
        Ok(CopySummary {
            lanes,
            elapsed: blockhaul_io::elapsed(began),
            ..self.counted().since(&before)
        })
    }

    /// The settings that segments of a plan are made with.
    fn making(&mut self, plan: &EnginePlan) -> SegmentSettings {
        let shared = &self.shared;
        let options = &self.options;
        let to = self.sides.target.device().facts();
        let mut grain = u64::from(block(&to));
        if shared.streaming.is_some() {
            grain = grain.max(crate::algorithm::BLOCK);
        }
        let target = self.sides.handle(Side::Target, &shared.retries);
        let source = self.sides.handle(Side::Source, &shared.retries);
        let target_is_zero = shared.target_is_zero.load(Ordering::Relaxed);
        SegmentSettings {
            target: (!options.zero_all).then_some(target),
            target_is_zero,
            allocated: options.allocated,
            grain,
            extents: options.extents,
            whole: if options.zero_all {
                (false, false)
            } else {
                whole_zeroes(shared, &to, target_is_zero)
            },
            selection: plan.selection().clone(),
            last: shared.retries.marker().map(|marker| marker.place.range()),
            added: plan.added().cloned(),
            earlier: self.earlier.take().unwrap_or_default(),
            ..SegmentSettings::of(source, shared.resolved.segment, &shared.progress)
        }
    }

    /// Lanes take segments from this queue from now on.
    fn begin(&mut self, queue: &Arc<SegmentQueue>) {
        if std::mem::replace(&mut self.begun, true) {
            // The source may have changed.
            self.shared.retries.forget_proof();
        }
        self.shared.begin(queue);
        if self.shared.stopped() {
            // Stopped just now: no other task stops the queue.
            queue.stop();
        }
    }

    /// Gives orders to as many lanes as a plan within `bounds` can use: a segment is for one lane.
    /// `None`: the plan can grow.
    fn start_lanes(&mut self, bounds: Option<SegmentRange>, segment: u64) {
        let mut useful = self.shared.resolved.connections_max;
        if let Some((start, end)) = bounds {
            let segments = end.div_ceil(segment).saturating_sub(start / segment);
            useful = useful.min(usize::try_from(segments).unwrap_or(usize::MAX));
        }
        // The first lane settles what the others wait for.
        for index in self.lanes..useful.max(1) {
            let shared = self.shared.clone();
            let sides = self.sides.clone();
            let orders = self.orders.join();
            if index == 0 {
                drop(blockhaul_io::start(first_lane(shared, sides, orders)));
                continue;
            }
            // A missing worker is detected when the lane gets an order.
            drop(WorkerHandle::to(index).spawn(move || extra_lane(shared, index, sides, orders)));
        }
        self.lanes = self.lanes.max(useful.max(1));
    }

    async fn give(&self, order: LaneCommand) {
        if !self.orders.give(order).await {
            self.shared.fail(Error::new(Kind::Io, "a worker ended before its lane"));
        }
    }

    /// The final summary, when nothing else is copied.
    async fn completed(&mut self) -> Result<CopySummary> {
        self.copied = true;
        self.shared.outcome()?;
        if let Some(journal) = &self.shared.durability.journal {
            self.journal_stays = close_journal(&self.shared, journal).await;
        }
        self.shared.progress.set_complete();
        // Reads for the digest are not part of the copy.
        let counted = self.counted();
        let digest = match self.options.digest {
            None => None,
            Some(algorithm) => Some(match self.shared.digest().filter(|_| self.runs == 1) {
                Some(digest) => digest,
                None => self.digest(algorithm).await?,
            }),
        };
        let elapsed = blockhaul_io::elapsed(self.started);
        Ok(CopySummary { digest, lanes: self.lanes_used, elapsed, ..counted })
    }

    /// The counters so far, without the digest, the lanes and the elapsed time.
    fn counted(&self) -> CopySummary {
        let done = self.shared.progress.snapshot();
        CopySummary {
            size: done.total,
            data: done.data,
            zeroed: done.zeroed,
            skipped: done.skipped,
            resumed: done.resumed,
            discarded: self.shared.progress.discarded().0,
            not_discarded: self.shared.progress.discarded().1,
            requests: done.requests,
            request_size: done.request_size,
            routes: self.shared.progress.routes(),
            retried: self.shared.retries.summary(),
            warnings: self.shared.warnings(),
            journal_stays: self.journal_stays,
            ..CopySummary::default()
        }
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        // A dropped run has ended.
        self.shared.retries.fail();
        self.shared.wake();
        self.orders.close();
    }
}

/// The first lane, which exists from the start, takes its orders.
async fn first_lane(shared: Arc<EngineState>, sides: DiskPair, mut orders: CommandReceiver) {
    let lane = sides.first_lane(&shared, true);
    while let Some(order) = orders.next().await {
        match order {
            LaneCommand::Copy(queue, ending) => {
                lane.copy(&queue, ending).await;
                if ending == EndAction::Copy {
                    // No lane will provide a proof any more.
                    shared.learned.same_disk.settle(None);
                }
                if shared.stopped() {
                    // A cancel by way of the progress wakes nobody that waits for other lanes.
                    shared.wake();
                }
            }
            LaneCommand::Read(queue, reading) => lane.read_segments(&queue, &reading).await,
            LaneCommand::End(ending) => lane.end(ending).await,
            LaneCommand::Close => {
                drop((lane, shared));
                orders.done();
                return;
            }
        }
        orders.done();
    }
}

/// What the options select of the source, if the devices fit it and one another.
async fn checked_selection(sides: &DiskPair, options: &EngineOptions) -> Result<Selection> {
    let from = sides.source.device().facts();
    let to = sides.target.device().facts();
    if options.discard_source {
        let check = if options.no_marker { check_release } else { check_discard };
        check(&from, &to)?;
        if options.digest.is_some() {
            let text = "a digest may need the source again, which is to be discarded";
            return Err(CopyError::at_source(Error::new(Kind::Invalid, text).on(&from.name)));
        }
    }
    let selection = sides.selection(options)?;
    let end = selection.bounds().1;
    check_source(end, sides.source.device()).await.map_err(CopyError::at_source)?;
    check_target(end, sides.target.device()).await.map_err(CopyError::at_target)?;
    Ok(selection)
}

/// What the caller of an engine has given it.
struct EngineInput {
    sides: DiskPair,
    options: EngineOptions,
    pool: Pool,
    selection: Selection,
    started: Instant,
}

/// The state of an engine without journal and digest.
fn parts(
    sides: &DiskPair,
    options: &EngineOptions,
    pool: &Pool,
    retries: &Arc<RetryControl>,
    progress: &Arc<CopyProgress>,
) -> EngineParts {
    let resolved =
        EffectiveOptions::new(options, sides.source.device(), sides.target.device(), pool);
    let signals: Arc<LaneSignals> = Arc::default();
    let slots = LaneSlots::new(resolved.connections_first, signals.clone());
    EngineParts {
        learned: learned(&resolved, sides, options, pool, (Arc::new(slots), progress)),
        memory: memory(&resolved, sides, options, pool),
        resolved,
        signals,
        progress: progress.clone(),
        retries: retries.clone(),
        journal: None,
        listener: options.durable.clone(),
        streaming: None,
        reads_only: false,
    }
}

fn learned(
    resolved: &EffectiveOptions,
    sides: &DiskPair,
    options: &EngineOptions,
    pool: &Pool,
    (slots, progress): (Arc<LaneSlots>, &Arc<CopyProgress>),
) -> LearnedState {
    let from = sides.source.device().facts();
    let to = sides.target.device().facts();
    LearnedState {
        tuner: Tuner::of(resolved, &from, &to, pool, (slots.clone(), progress.clone())),
        slots,
        kernel_copy: KernelCopy::new(options.by_kernel),
        same_disk: SameDisk::new(),
        one_disk: AtomicBool::new(false),
        zeroes: ZeroesFound::default(),
    }
}

fn memory(
    resolved: &EffectiveOptions,
    sides: &DiskPair,
    options: &EngineOptions,
    pool: &Pool,
) -> BufferPools {
    let claims_room = sides.source.device().facts().claims_room;
    BufferPools {
        // A digest buffers what arrives early until its turn.
        late: (claims_room && options.digest.is_none())
            .then(|| Pool::new(pool.limit().saturating_mul(LATE))),
        // A separate pool: no task that waits for a buffer of the main pool holds one of these.
        checks: Pool::new(CHECKS_MAX * Pool::cost(resolved.request_size as usize)),
        pool: pool.clone(),
    }
}

/// Checks samples of a target that is assumed to read as zeroes; fails if one of them does not.
async fn check_zeroes(
    sides: &DiskPair,
    range: SegmentRange,
    retries: &Arc<RetryControl>,
) -> Result<()> {
    let target = sides.handle(Side::Target, retries);
    let name = target.facts().name.clone();
    let Some(at) = crate::sample::first_content(target, range).await? else { return Ok(()) };
    let text = format!(
        "it does not read as zeroes: there is data at offset {at}: leave out --destination-is-zero, or use \
         --trust to keep that data"
    );
    Err(CopyError::at_target(Error::new(Kind::Invalid, text).on(&name)))
}

/// Whether one lane handles zero ranges of any length: those to be zeroed, and those to be skipped.
fn whole_zeroes(shared: &EngineState, target: &Facts, target_is_zero: bool) -> (bool, bool) {
    // If zeroes are hashed or written out, spread them over all lanes.
    let cheap = shared.streaming.as_ref().is_none_or(|streaming| !streaming.hashes_zeroes());
    (cheap && (target_is_zero || !target.emulated.contains(Can::ZERO)), cheap)
}
