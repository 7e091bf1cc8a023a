//! The copy engine: keeps connections and what it learned about them while it runs several plans in
//! turn.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use blockhaul_block::{Can, Error, Facts, Kind, Result};
use blockhaul_catalog::Stack;
use blockhaul_io::{Pool, Remote};

use crate::algorithm::Algorithm;
use crate::extra_lanes::extra_lane;
use crate::handle::Retries;
use crate::journal::{Identity, Journal, JournalOptions, Recorded, SelectedParts};
use crate::kernel_copy::KernelCopy;
use crate::lane_slots::LaneSlots;
use crate::ledger::{Range, Suspect};
use crate::meter::Meters;
use crate::options::{Options, Summary};
use crate::orders::{Ending, Member, Order, Orders};
use crate::plan::Plan;
use crate::progress::Progress;
use crate::rate::Rate;
use crate::resolved::{GRAIN_MAX, Resolved, check_discard, check_source, check_target};
use crate::same_disk::SameDisk;
use crate::segment_maker::{Earlier, Making, make};
use crate::selection::Selection;
use crate::shared::{Keeping, Learned, Memory, Parts, Shared, ZeroesFound};
use crate::side::Side;
use crate::sides::Sides;
use crate::signals::{PAUSED, Signals};
use crate::streaming_digest::StreamingDigest;
use crate::tuner::Tuner;

/// Maximum number of verify requests in flight, all lanes together.
const CHECKS_MAX: u64 = 16;
/// Maximum bytes requested from a source and not yet received, in multiples of the copy's memory: a
/// path of 50 ms and 10 Gbit/s holds 64 MB.
const LATE: u64 = 2;

/// Copies the ranges of plans from one device to another. Connections, what was learned about them,
/// unflushed writes and the journal persist from one plan to the next. Use it on a worker; lanes
/// are spread over all workers. Work in flight ends soon after the engine is dropped.
pub struct Engine {
    shared: Arc<Shared>,
    sides: Sides,
    options: Options,
    pool: Pool,
    orders: Arc<Orders>,
    /// Number of lanes that accept orders, dialled or not.
    lanes: usize,
    /// The range that the options select, for the first plan.
    selection: Selection,
    /// The records of an earlier run of the program, for the first plan.
    earlier: Option<Earlier>,
    /// Number of plans started.
    runs: u32,
    /// Largest number of lanes used in one run.
    lanes_used: usize,
    started: Instant,
}

/// Pauses, resumes, throttles and cancels an engine; usable from any thread.
#[derive(Clone)]
pub struct Control(Arc<Shared>);

impl Engine {
    /// Opens an engine between `source` and the start of `target`, which must be at least as large
    /// as the range that the options select. Opens the journal and verifies its last records.
    ///
    /// # Errors
    /// If the devices and the options do not fit together, or the journal cannot be used.
    pub async fn open(
        source: &Stack,
        target: &Stack,
        options: &Options,
        pool: &Pool,
        progress: &Arc<Progress>,
    ) -> Result<Engine> {
        let started = blockhaul_io::now();
        let sides = Sides { source: source.clone(), target: target.clone() };
        if options.discard_source {
            check_discard(&source.device().facts(), &target.device().facts())?;
            if options.digest.is_some() {
                let text = "a digest may need the source again, which is to be discarded";
                return Err(Error::new(Kind::Invalid, text).on(&source.device().facts().name));
            }
        }
        let selection = selected(&sides, options)?;
        let options = as_begun(options).await;
        let resolved = Resolved::new(&options, source.device(), target.device(), pool);
        let retries = Retries::new(&options, progress);
        // A journal is for the ranges that a bitmap selects when the copy begins.
        let selection = match &options.journal {
            Some(_) => selection.into_ranges(&sides.handle(Side::Source, &retries)).await?,
            None => selection,
        };
        progress.set_total(selection.total());
        progress.set_disk_size(source.device().facts().size);
        let opened = match &options.journal {
            None => None,
            Some(journal) => {
                // An export may be unreadable where its bitmap is clean.
                let partial = options.bitmap.is_some() || options.ranges.is_some();
                let only = partial.then(|| selection.ranges());
                let source = sides.handle(Side::Source, &retries);
                let sample = match options.discard_source {
                    // Earlier runs have changed it.
                    true => [0; 32],
                    false => crate::sample::digest(source, only).await?,
                };
                let identity = Identity {
                    discards: options.discard_source,
                    ..identity(journal, &resolved, &selection, &sides, sample)
                };
                let parts = SelectedParts::new(selection.ranges(), resolved.segment);
                Some(open_journal(journal, identity, parts).await?)
            }
        };
        let (journal, recorded) = opened.unzip();
        let recorded = recorded.unwrap_or_default();
        let to = target.device().facts();
        let claimed = options.target_is_zero && !options.trust_zero && !to.zeroed;
        if claimed && recorded.segments.is_empty() {
            check_zeroes(&sides, selection.bounds(), &retries).await?;
        }
        let in_blocks = selection.is_whole() && resolved.in_whole_blocks();
        let streaming = options.digest.filter(|_| in_blocks);
        let size = source.device().facts().size;
        let streaming = streaming.and_then(|algorithm| StreamingDigest::new(algorithm, size));
        let signals: Arc<Signals> = Arc::default();
        let slots = LaneSlots::new(resolved.connections_first, signals.clone());
        let shared = Arc::new(Shared::new(Parts {
            learned: learned(&resolved, &sides, &options, pool, (Arc::new(slots), progress)),
            memory: memory(&resolved, &sides, &options, pool),
            resolved,
            signals,
            progress: progress.clone(),
            retries,
            journal,
            streaming,
        }));
        // Report it before the journal is relied on.
        if shared.durability.journal.is_some() && !to.can.contains(Can::FLUSH) {
            let text = "the target cannot be flushed: the journal is valid if this program is killed, but \
                        not if the target's machine loses power";
            shared.warn(text.to_string());
        }
        let earlier = look_at_edge(&shared, &sides, recorded, selection.ranges()).await;
        let mut engine = Engine {
            shared,
            sides,
            options,
            pool: pool.clone(),
            orders: Arc::default(),
            lanes: 0,
            selection,
            earlier: Some(earlier),
            runs: 0,
            lanes_used: 0,
            started,
        };
        engine.start_first_lane();
        Ok(engine)
    }

    /// A plan for what the options select: all of the source, ranges, or the extents of a bitmap.
    /// No range can be added to it.
    pub fn plan(&self) -> Plan {
        Plan::of(self.selection.clone(), self.source_facts(), self.shared.learned.slots.clone())
    }

    /// An empty plan; ranges can be added before and while it runs.
    pub fn empty_plan(&self) -> Plan {
        let target = self.sides.target.device().facts();
        let source = self.source_facts();
        let minimum = source.block.minimum.max(target.block.minimum);
        Plan::empty(minimum, source, self.shared.learned.slots.clone())
    }

    /// Copies the ranges of a plan. They are written on return, but may not be durable before
    /// [`Engine::flush`]. Returns the summary of this run. Another plan may follow, also for the
    /// same ranges; it does not rely on zeroes that were on the target before the first plan.
    ///
    /// # Errors
    /// The first error that retries did not resolve, or [`Kind::ShuttingDown`] after a cancel; no
    /// other plan can follow. [`Kind::Invalid`] for a plan that has run before and, with a journal,
    /// for a second plan or one that is not the options' plan; so with [`Options::discard_source`].
    pub async fn run(&mut self, plan: &Plan) -> Result<Summary> {
        self.carry_out(plan, Ending::Round).await
    }

    /// Flushes the target, if it supports flush.
    ///
    /// # Errors
    /// If the flush failed and writing again did not help.
    pub async fn flush(&mut self) -> Result<()> {
        self.shared.outcome()?;
        self.give(Order::End(Ending::Flush)).await;
        self.shared.outcome()
    }

    /// Finishes: flushes the target if the options ask for it, closes the extra connections,
    /// removes the journal and computes the requested digest. Returns the summary of all runs.
    ///
    /// # Errors
    /// The first error that retries did not resolve; [`Kind::ShuttingDown`] after a cancel.
    pub async fn finish(self) -> Result<Summary> {
        self.give(Order::End(Ending::Copy)).await;
        self.completed().await
    }

    /// Runs the last plan and finishes, like [`Engine::run`] and [`Engine::finish`]; each lane ends
    /// as soon as it has no more work.
    ///
    /// # Errors
    /// Those of both functions.
    pub async fn run_last(mut self, plan: &Plan) -> Result<Summary> {
        self.carry_out(plan, Ending::Copy).await?;
        self.completed().await
    }

    /// A handle to control the engine.
    pub fn control(&self) -> Control {
        Control(self.shared.clone())
    }

    /// The summary of all runs so far, also after an error or a cancel.
    pub fn summary(&self) -> Summary {
        Summary {
            lanes: self.lanes_used,
            elapsed: blockhaul_io::elapsed(self.started),
            ..self.counted()
        }
    }

    /// Counters other than bytes.
    pub fn meters(&self) -> Meters {
        self.shared.progress.meters()
    }

    fn source_facts(&self) -> Arc<Facts> {
        self.sides.source.device().facts()
    }

    async fn carry_out(&mut self, plan: &Plan, ending: Ending) -> Result<Summary> {
        self.shared.outcome()?;
        let once = self.options.journal.is_some() || self.options.discard_source;
        if once && (self.runs > 0 || plan.added().is_some()) {
            let text = "a journal, or a source that is discarded, is for one plan, of what the options \
                        choose";
            return Err(Error::new(Kind::Invalid, text));
        }
        let (began, mut before) = (blockhaul_io::now(), self.counted());
        let bytes = plan.begin(&self.shared.progress)?;
        if self.runs == 0 {
            self.shared.progress.set_total(bytes);
            before.size = 0;
        } else {
            self.shared.progress.add_total(bytes);
            self.shared.learned.tuner.resume();
            self.shared.learned.same_disk.renew();
            self.shared.retries.forget_proof();
        }
        self.runs += 1;
        let queue = plan.queue();
        self.shared.begin(queue);
        if self.shared.stopped() {
            // Stopped just now: no other task stops the queue.
            queue.stop();
        }
        let making = self.making(plan);
        let making = blockhaul_io::spawn(make(queue.clone(), making));
        self.start_lanes(plan);
        self.give(Order::Run(queue.clone(), ending)).await;
        if let Err(error) = making.await {
            self.shared.fail(error);
        }
        self.shared.end();
        let lanes = self.shared.report.lanes_used.load(Ordering::Relaxed);
        self.lanes_used = self.lanes_used.max(lanes);
        let outcome = self.shared.outcome();
        // No lane waits for a range any more.
        queue.stop();
        outcome?;
        Ok(Summary {
            lanes,
            elapsed: blockhaul_io::elapsed(began),
            ..self.counted().since(&before)
        })
    }

    /// The settings that segments of a plan are made with.
    fn making(&mut self, plan: &Plan) -> Making {
        let (shared, options) = (&self.shared, &self.options);
        let to = self.sides.target.device().facts();
        let mut grain = u64::from(to.block.preferred.max(to.block.minimum).min(GRAIN_MAX));
        if shared.streaming.is_some() {
            grain = grain.max(crate::algorithm::BLOCK);
        }
        let target = self.sides.handle(Side::Target, &shared.retries);
        let source = self.sides.handle(Side::Source, &shared.retries);
        let target_is_zero = shared.target_is_zero.load(Ordering::Relaxed);
        Making {
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
            added: plan.added().cloned(),
            earlier: self.earlier.take().unwrap_or_default(),
            ..Making::of(source, shared.resolved.segment, &shared.progress)
        }
    }

    fn start_first_lane(&mut self) {
        let (shared, sides) = (self.shared.clone(), self.sides.clone());
        let orders = self.orders.join();
        self.lanes = 1;
        drop(blockhaul_io::start(first_lane(shared, sides, orders)));
    }

    /// Gives orders to as many lanes as a plan can use: a segment is copied by one lane.
    fn start_lanes(&mut self, plan: &Plan) {
        let resolved = &self.shared.resolved;
        let mut useful = resolved.connections_max;
        if plan.added().is_none() {
            let range = plan.selection().bounds();
            let segments =
                range.1.div_ceil(resolved.segment).saturating_sub(range.0 / resolved.segment);
            useful = useful.min(usize::try_from(segments).unwrap_or(usize::MAX));
        }
        for index in self.lanes..useful {
            let (shared, sides) = (self.shared.clone(), self.sides.clone());
            let orders = self.orders.join();
            // A missing worker is detected when the lane gets an order.
            drop(Remote::to(index).spawn(move || extra_lane(shared, index, sides, orders)));
        }
        self.lanes = self.lanes.max(useful);
    }

    async fn give(&self, order: Order) {
        if !self.orders.give(order).await {
            self.shared.fail(Error::new(Kind::Io, "a worker ended before its lane"));
        }
    }

    /// The final summary, after all lanes have ended.
    async fn completed(&self) -> Result<Summary> {
        self.shared.outcome()?;
        if let Some(journal) = &self.shared.durability.journal {
            close_journal(&self.shared, journal);
        }
        self.shared.progress.set_complete();
        // Reads for the digest are not part of the copy.
        let counted = self.counted();
        let digest = match self.options.digest {
            None => None,
            Some(algorithm) => Some(self.digest(algorithm).await?),
        };
        let elapsed = blockhaul_io::elapsed(self.started);
        Ok(Summary { digest, lanes: self.lanes_used, elapsed, ..counted })
    }

    async fn digest(&self, algorithm: Algorithm) -> Result<String> {
        if self.runs == 1
            && let Some(digest) = self.shared.digest()
        {
            return Ok(digest);
        }
        let (source, progress) = (&self.sides.source, &self.shared.progress);
        crate::digest::digest(source, algorithm, &self.options, &self.pool, progress).await
    }

    /// The counters so far, without the digest, the lanes and the elapsed time.
    fn counted(&self) -> Summary {
        let done = self.shared.progress.snapshot();
        Summary {
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
            ..Summary::default()
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

impl Control {
    /// Starts no new request from now on; those in flight complete. The journal is still written.
    pub fn pause(&self) {
        self.0.signals.set(PAUSED, true);
        self.0.learned.slots.wake();
    }

    /// Waits until no request is in flight after [`Control::pause`].
    pub async fn paused(&self) {
        self.0.signals.quiet().await;
    }

    /// Continues after [`Control::pause`].
    pub fn resume(&self) {
        self.0.signals.set(PAUSED, false);
    }

    /// Whether the engine is paused.
    pub fn is_paused(&self) -> bool {
        self.0.signals.is(PAUSED)
    }

    /// Limits bytes and requests per second from now on; 0: no limit. If the options hold a rate,
    /// this changes it for all engines that share it.
    pub fn set_rate(&self, bytes: u64, requests: u64) {
        self.rate().set(bytes, requests);
        self.0.learned.tuner.disturb();
    }

    /// The limits in bytes and requests per second; 0: no limit.
    pub fn rate_limits(&self) -> (u64, u64) {
        self.rate().limits()
    }

    fn rate(&self) -> &Arc<Rate> {
        self.0.resolved.rate()
    }

    /// Ends the run soon, paused or not: submits nothing more and waits for what is in flight.
    /// [`Engine::summary`] returns the work done until then.
    pub fn cancel(&self) {
        self.0.progress.cancel();
        self.0.wake();
    }
}

/// The first lane, which exists from the start, takes its orders.
async fn first_lane(shared: Arc<Shared>, sides: Sides, mut orders: Member) {
    let lane = sides.first_lane(&shared, true);
    while let Some(order) = orders.next().await {
        let last = order.is_last();
        match order {
            Order::Run(queue, ending) => lane.run(&queue, ending).await,
            Order::End(ending) => lane.end(ending).await,
        }
        if last {
            // No lane will provide a proof any more.
            shared.learned.same_disk.settle(None);
            // Drop what the lane holds before the copy ends: the journal is then free for the next
            // copy.
            drop((lane, shared));
            orders.done();
            return;
        }
        orders.done();
    }
}

/// The range of the source that the options select, if both sides support it.
fn selected(sides: &Sides, options: &Options) -> Result<Selection> {
    let (from, to) = (sides.source.device().facts(), sides.target.device().facts());
    let minimum = from.block.minimum.max(to.block.minimum);
    let selection = Selection::new(options, &from, minimum)?;
    let end = selection.bounds().1;
    check_source(end, &from)?;
    check_target(end, &to)?;
    Ok(selection)
}

/// The options, with the segment size of the journal that this copy continues. Without an explicit
/// size the number of connections and requests, which may differ now, would determine it.
async fn as_begun(options: &Options) -> Options {
    let mut options = options.clone();
    if let Some(journal) = options.journal.clone().filter(|_| options.spread)
        && let Ok(Some(segment)) =
            blockhaul_io::offload(move || Journal::segment_there(&journal)).await
    {
        options.segment = segment;
        options.spread = false;
    }
    options
}

fn learned(
    resolved: &Resolved,
    sides: &Sides,
    options: &Options,
    pool: &Pool,
    (slots, progress): (Arc<LaneSlots>, &Arc<Progress>),
) -> Learned {
    let (from, to) = (sides.source.device().facts(), sides.target.device().facts());
    Learned {
        tuner: Tuner::of(resolved, &from, &to, pool, (slots.clone(), progress.clone())),
        slots,
        kernel_copy: KernelCopy::new(options.by_kernel),
        same_disk: SameDisk::new(),
        one_disk: AtomicBool::new(false),
        zeroes: ZeroesFound::default(),
    }
}

fn memory(resolved: &Resolved, sides: &Sides, options: &Options, pool: &Pool) -> Memory {
    let claims_room = sides.source.device().facts().claims_room;
    Memory {
        // A digest buffers what arrives early until its turn.
        late: (claims_room && options.digest.is_none())
            .then(|| Pool::new(pool.limit().saturating_mul(LATE))),
        // A separate pool: no task that waits for a buffer of the main pool holds one of these.
        checks: Pool::new(CHECKS_MAX * Pool::cost(resolved.request_size as usize)),
        pool: pool.clone(),
    }
}

/// Checks samples of a target that is assumed to read as zeroes; fails if one of them does not.
async fn check_zeroes(sides: &Sides, range: Range, retries: &Arc<Retries>) -> Result<()> {
    let target = sides.handle(Side::Target, retries);
    let name = target.facts().name.clone();
    let Some(at) = crate::sample::first_content(target, range).await? else { return Ok(()) };
    let text = format!(
        "it does not read as zeroes: there is data at offset {at}: leave out --destination-is-zero, or use \
         --trust to keep that data"
    );
    Err(Error::new(Kind::Invalid, text).on(&name))
}

/// What identifies a copy in its journal.
fn identity(
    options: &JournalOptions,
    resolved: &Resolved,
    selection: &Selection,
    sides: &Sides,
    sample: [u8; 32],
) -> Identity {
    Identity {
        segment: resolved.segment,
        range: selection.bounds(),
        source_size: sides.source.device().facts().size,
        target_size: sides.target.device().facts().size,
        sample,
        source: options.source.clone(),
        target: options.target.clone(),
        ranges: selection.digest(),
        discards: false,
    }
}

async fn open_journal(
    options: &JournalOptions,
    identity: Identity,
    parts: SelectedParts,
) -> Result<(Keeping, Recorded)> {
    let wanted = options.clone();
    let opened = blockhaul_io::offload(move || Journal::open(&wanted, &identity)).await;
    let (file, recorded) =
        opened.map_err(|lost| Error::new(Kind::Io, "journal").because(lost))??;
    let (keep, interval, parts) = (options.keep, options.interval, Mutex::new(parts));
    Ok((Keeping { file, keep, interval, parts }, recorded))
}

/// Compares the data that earlier runs recorded last. If it differs, none of their records is used.
async fn look_at_edge(
    shared: &Arc<Shared>,
    sides: &Sides,
    recorded: Recorded,
    ranges: &[Range],
) -> Earlier {
    if recorded.segments.is_empty() {
        return Earlier::default();
    }
    if shared.resolved.discard_source {
        // The source does not hold it any more.
        return Earlier { recorded, check: false };
    }
    let segment = shared.resolved.segment;
    let lane = sides.first_lane(shared, false);
    shared.signals.begin_work();
    for number in &recorded.edge {
        let (at, end) = (number * segment, (number + 1) * segment);
        // Only what is copied: the target keeps the rest.
        let first = ranges.partition_point(|range| range.1 <= at);
        for range in ranges[first..].iter().take_while(|range| range.0 < end) {
            let range = (range.0.max(at), range.1.min(end));
            lane.recheck(Suspect { range, again: false }).await;
        }
    }
    lane.finish(Ending::Copy).await;
    shared.signals.end_work();
    let check = shared.retries.rewritten.load(Ordering::Relaxed) > 0;
    if check {
        let text = "the target does not contain what the journal recorded last: comparing everything that \
                    it recorded";
        shared.warn(text.to_string());
    }
    Earlier { recorded, check }
}

/// Whether one lane handles zero ranges of any length: those to be zeroed, and those to be skipped.
fn whole_zeroes(shared: &Shared, target: &Facts, target_is_zero: bool) -> (bool, bool) {
    // If zeroes are hashed or written out, spread them over all lanes.
    let cheap = shared.streaming.as_ref().is_none_or(|streaming| !streaming.hashes_zeroes());
    (cheap && (target_is_zero || !target.emulated.contains(Can::ZERO)), cheap)
}

/// After success, the journal is not needed any more.
fn close_journal(shared: &Shared, journal: &Keeping) {
    if !journal.keep
        && let Err(error) = journal.file.remove()
    {
        shared.warn(format!("cannot remove the journal: {error}"));
    }
}
