//! The copy engine as an object: connections and what is learned stay while it runs plans, one after
//! another.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use blockhaul_block::{Can, Error, Facts, Kind, Result};
use blockhaul_catalog::Stack;
use blockhaul_io::{Pool, Remote};

use crate::algorithm::Algorithm;
use crate::extra_lanes::extra_lane;
use crate::handle::Retries;
use crate::journal::{Identity, Journal, JournalOptions, Recorded};
use crate::kernel_copy::KernelCopy;
use crate::lane_slots::LaneSlots;
use crate::ledger::{Range, Suspect};
use crate::meter::Meters;
use crate::options::{Options, Summary};
use crate::orders::{Ending, Member, Order, Orders};
use crate::plan::Plan;
use crate::progress::Progress;
use crate::rate::Rate;
use crate::resolved::{GRAIN_MAX, Resolved, check_source, check_target};
use crate::same_disk::SameDisk;
use crate::segment_maker::{Earlier, Making, make};
use crate::selection::Selection;
use crate::shared::{Keeping, Learned, Memory, Parts, Shared, ZeroesFound};
use crate::side::Side;
use crate::sides::Sides;
use crate::signals::{PAUSED, Signals};
use crate::streaming_digest::StreamingDigest;
use crate::tuner::Tuner;

/// Requests under way that compare what was written, all lanes together.
const CHECKS_MAX: u64 = 16;
/// Bytes asked of a source and not arrived, at most, in memories of the copy: a path of 50 ms and 10
/// Gbit/s holds 64 MB.
const LATE: u64 = 2;

/// Copies what plans say from one device to another. Connections, what was learned about them, what was
/// written and not flushed, and the journal stay from one plan to the next. Use it on a worker; lanes are
/// spread over all workers. What is under way ends soon after it is dropped.
pub struct Engine {
    shared: Arc<Shared>,
    sides: Sides,
    options: Options,
    pool: Pool,
    orders: Arc<Orders>,
    /// Lanes that take orders, made or not.
    lanes: usize,
    /// What the options choose, for the first plan.
    selection: Selection,
    /// What an earlier run of the program has recorded, for the first plan.
    earlier: Option<Earlier>,
    /// Plans that have begun.
    runs: u32,
    /// Most lanes that were in use in one run.
    lanes_used: usize,
    started: Instant,
}

/// Stops, slows down and lets go on what an engine does; usable from any thread.
#[derive(Clone)]
pub struct Control(Arc<Shared>);

impl Engine {
    /// An engine between `source` and the start of `target`, which must be at least as large as what the
    /// options choose. A journal is opened, and what it says last is compared.
    ///
    /// # Errors
    /// Where the devices or the options do not go together, or the journal cannot be used.
    pub async fn open(
        source: &Stack,
        target: &Stack,
        options: &Options,
        pool: &Pool,
        progress: &Arc<Progress>,
    ) -> Result<Engine> {
        let started = blockhaul_io::now();
        let sides = Sides { source: source.clone(), target: target.clone() };
        let selection = selected(&sides, options)?;
        progress.set_total(selection.total());
        let options = as_begun(options).await;
        let resolved = Resolved::new(&options, source.device(), target.device(), pool);
        let retries = Retries::new(&options, progress);
        let opened = match &options.journal {
            None => None,
            Some(journal) => {
                let identity = identity(journal, &resolved, &selection, &sides, &retries).await?;
                Some(open_journal(journal, identity).await?)
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
        // Said before it may matter.
        if shared.durability.journal.is_some() && !to.can.contains(Can::FLUSH) {
            let text = "the target cannot be flushed: the journal is safe if this program is killed, \
                        not if the target's machine loses power";
            shared.warn(text.to_string());
        }
        let earlier = look_at_edge(&shared, &sides, recorded, selection.bounds()).await;
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

    /// A plan for what the options choose: all of the source, ranges, or by a bitmap. Nothing can be added
    /// to it.
    pub fn plan(&self) -> Plan {
        Plan::of(self.selection.clone(), self.source_facts(), self.shared.learned.slots.clone())
    }

    /// An empty plan, to which ranges are added, before and while it runs.
    pub fn empty_plan(&self) -> Plan {
        let target = self.sides.target.device().facts();
        let source = self.source_facts();
        let minimum = source.block.minimum.max(target.block.minimum);
        Plan::empty(minimum, source, self.shared.learned.slots.clone())
    }

    /// Copies what a plan says. It is on the target then, but may not be durable before [`Engine::flush`].
    /// Returns what this run has done. Another plan may follow, also for the same ranges; where zeroes were
    /// on the target before the first is not relied on then.
    ///
    /// # Errors
    /// The first error that could not be overcome, or [`Kind::ShuttingDown`] after a cancel; no other plan
    /// can follow. [`Kind::Invalid`] for a plan that has run before, for a second plan with a journal, and
    /// for a plan that is not the options' with a journal.
    pub async fn run(&mut self, plan: &Plan) -> Result<Summary> {
        self.carry_out(plan, Ending::Round).await
    }

    /// Makes durable what was copied, as far as the target can be flushed.
    ///
    /// # Errors
    /// Where that failed and writing again did not help.
    pub async fn flush(&mut self) -> Result<()> {
        self.shared.outcome()?;
        self.give(Order::End(Ending::Flush)).await;
        self.shared.outcome()
    }

    /// Ends: makes durable what was copied where the options ask for it, closes the further connections,
    /// removes the journal and computes the digest that is asked for. Returns what all runs together have
    /// done.
    ///
    /// # Errors
    /// The first error that could not be overcome; [`Kind::ShuttingDown`] after a cancel.
    pub async fn finish(self) -> Result<Summary> {
        self.give(Order::End(Ending::Copy)).await;
        self.completed().await
    }

    /// Runs the last plan and ends, as [`Engine::run`] and [`Engine::finish`]; each lane ends as soon as it
    /// has nothing more to do.
    ///
    /// # Errors
    /// As both of them.
    pub async fn run_last(mut self, plan: &Plan) -> Result<Summary> {
        self.carry_out(plan, Ending::Copy).await?;
        self.completed().await
    }

    /// A handle to control it by.
    pub fn control(&self) -> Control {
        Control(self.shared.clone())
    }

    /// What all runs together have done so far, also after an error or a cancel.
    pub fn summary(&self) -> Summary {
        Summary {
            lanes: self.lanes_used,
            elapsed: blockhaul_io::elapsed(self.started),
            ..self.counted()
        }
    }

    /// What can be measured beside bytes.
    pub fn meters(&self) -> Meters {
        self.shared.progress.meters()
    }

    fn source_facts(&self) -> Arc<Facts> {
        self.sides.source.device().facts()
    }

    async fn carry_out(&mut self, plan: &Plan, ending: Ending) -> Result<Summary> {
        self.shared.outcome()?;
        if self.options.journal.is_some() && (self.runs > 0 || plan.added().is_some()) {
            let text = "a journal is for one plan, of what the options choose";
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
            // Stopped just now: nobody else tells the queue.
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
        // Nobody waits for a range any more.
        queue.stop();
        outcome?;
        Ok(Summary {
            lanes,
            elapsed: blockhaul_io::elapsed(began),
            ..self.counted().since(&before)
        })
    }

    /// What segments of a plan are made of.
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

    /// Has as many lanes take orders as may be of use for a plan: a segment is for one lane.
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
            // Whether its worker is there shows when it has an order.
            drop(Remote::to(index).spawn(move || extra_lane(shared, index, sides, orders)));
        }
        self.lanes = self.lanes.max(useful);
    }

    async fn give(&self, order: Order) {
        if !self.orders.give(order).await {
            self.shared.fail(Error::new(Kind::Io, "a worker ended before its lane"));
        }
    }

    /// After all lanes have ended.
    async fn completed(&self) -> Result<Summary> {
        self.shared.outcome()?;
        if let Some(journal) = &self.shared.durability.journal {
            close_journal(&self.shared, journal);
        }
        self.shared.progress.set_complete();
        // What is read for a digest is no part of the copy.
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

    /// What was counted so far, but for the digest, the lanes and the time it took.
    fn counted(&self) -> Summary {
        let done = self.shared.progress.snapshot();
        Summary {
            size: done.total,
            data: done.data,
            zeroed: done.zeroed,
            skipped: done.skipped,
            resumed: done.resumed,
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
        // A run that was dropped is over.
        self.shared.retries.fail();
        self.shared.wake();
        self.orders.close();
    }
}

impl Control {
    /// No new request starts from now on; what is under way completes. A journal is kept meanwhile.
    pub fn pause(&self) {
        self.0.signals.set(PAUSED, true);
        self.0.learned.slots.wake();
    }

    /// Waits until nothing is under way any more after [`Control::pause`].
    pub async fn paused(&self) {
        self.0.signals.quiet().await;
    }

    /// Goes on after [`Control::pause`].
    pub fn resume(&self) {
        self.0.signals.set(PAUSED, false);
    }

    /// Whether it is paused.
    pub fn is_paused(&self) -> bool {
        self.0.signals.is(PAUSED)
    }

    /// At most so many bytes and requests per second from now on; 0 is no limit. Where the options have a
    /// rate, this changes it for all who share it.
    pub fn set_rate(&self, bytes: u64, requests: u64) {
        self.rate().set(bytes, requests);
        self.0.learned.tuner.disturb();
    }

    /// The limits in bytes and requests per second; 0 is none.
    pub fn rate_limits(&self) -> (u64, u64) {
        self.rate().limits()
    }

    fn rate(&self) -> &Arc<Rate> {
        self.0.resolved.rate()
    }

    /// Ends the run soon, paused or not: nothing more is submitted, what is in flight is awaited. What was
    /// done until then is in [`Engine::summary`].
    pub fn cancel(&self) {
        self.0.progress.cancel();
        self.0.wake();
    }
}

/// The first lane takes orders: it is there from the beginning.
async fn first_lane(shared: Arc<Shared>, sides: Sides, mut orders: Member) {
    let lane = sides.first_lane(&shared, true);
    while let Some(order) = orders.next().await {
        let last = order.is_last();
        match order {
            Order::Run(queue, ending) => lane.run(&queue, ending).await,
            Order::End(ending) => lane.end(ending).await,
        }
        if last {
            // Nobody will bring a proof any more.
            shared.learned.same_disk.settle(None);
            // What it holds is gone before the copy ends: a journal is free for the next one.
            drop((lane, shared));
            orders.done();
            return;
        }
        orders.done();
    }
}

/// What the options choose of the source, where both sides can do that.
fn selected(sides: &Sides, options: &Options) -> Result<Selection> {
    let (from, to) = (sides.source.device().facts(), sides.target.device().facts());
    let minimum = from.block.minimum.max(to.block.minimum);
    let selection = Selection::new(options, &from, minimum)?;
    let end = selection.bounds().1;
    check_source(end, &from)?;
    check_target(end, &to)?;
    if options.journal.is_some() && options.bitmap.is_some() {
        let text = "a copy by a bitmap has no journal: the bitmap may say something else next time";
        return Err(Error::new(Kind::Invalid, text));
    }
    Ok(selection)
}

/// The options, with segments as in the journal that a copy goes on with. Who does not say how large
/// they are may have other connections or requests than the time before, on which it depends.
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
        // Digests keep what came too early until its turn.
        late: (claims_room && options.digest.is_none())
            .then(|| Pool::new(pool.limit().saturating_mul(LATE))),
        // Of its own: nobody waits for a buffer of the pool that they hold one of.
        checks: Pool::new(CHECKS_MAX * Pool::cost(resolved.request_size as usize)),
        pool: pool.clone(),
    }
}

/// Looks at samples of a target that is said to read as zeroes; an error where one of them does not.
async fn check_zeroes(sides: &Sides, range: Range, retries: &Arc<Retries>) -> Result<()> {
    let target = sides.handle(Side::Target, retries);
    let name = target.facts().name.clone();
    let Some(at) = crate::sample::first_content(target, range).await? else { return Ok(()) };
    let text = format!(
        "it is said to read as zeroes, but there is something else at offset {at}: leave out \
         --destination-is-zero, or give --trust if that may stay"
    );
    Err(Error::new(Kind::Invalid, text).on(&name))
}

/// What tells a copy from others to its journal.
async fn identity(
    options: &JournalOptions,
    resolved: &Resolved,
    selection: &Selection,
    sides: &Sides,
    retries: &Arc<Retries>,
) -> Result<Identity> {
    Ok(Identity {
        segment: resolved.segment,
        range: selection.bounds(),
        source_size: sides.source.device().facts().size,
        target_size: sides.target.device().facts().size,
        sample: crate::sample::digest(sides.handle(Side::Source, retries)).await?,
        source: options.source.clone(),
        target: options.target.clone(),
    })
}

async fn open_journal(options: &JournalOptions, identity: Identity) -> Result<(Keeping, Recorded)> {
    let wanted = options.clone();
    let opened = blockhaul_io::offload(move || Journal::open(&wanted, &identity)).await;
    let (file, recorded) =
        opened.map_err(|lost| Error::new(Kind::Io, "journal").because(lost))??;
    Ok((Keeping { file, keep: options.keep, interval: options.interval }, recorded))
}

/// Compares what earlier runs recorded last. Where that is different, nothing that they recorded is
/// relied on.
async fn look_at_edge(
    shared: &Arc<Shared>,
    sides: &Sides,
    recorded: Recorded,
    (start, end): Range,
) -> Earlier {
    if recorded.segments.is_empty() {
        return Earlier::default();
    }
    let segment = shared.resolved.segment;
    let lane = sides.first_lane(shared, false);
    shared.signals.begin_work();
    for number in &recorded.edge {
        let at = number * segment;
        let range = (at.max(start), (at + segment).min(end));
        lane.recheck(Suspect { range, again: false }).await;
    }
    lane.finish(Ending::Copy).await;
    shared.signals.end_work();
    let check = shared.retries.rewritten.load(Ordering::Relaxed) > 0;
    if check {
        let text = "the target does not hold what the journal recorded last: everything that it \
                    recorded is compared";
        shared.warn(text.to_string());
    }
    Earlier { recorded, check }
}

/// Whether zeroes in any length are for one lane: those to be zeroed, and those that need not.
fn whole_zeroes(shared: &Shared, target: &Facts, target_is_zero: bool) -> (bool, bool) {
    // Who hashes or writes zeroes has all lanes do it.
    let cheap = shared.streaming.as_ref().is_none_or(|streaming| !streaming.hashes_zeroes());
    (cheap && (target_is_zero || !target.emulated.contains(Can::ZERO)), cheap)
}

/// After success the journal has no more to say.
fn close_journal(shared: &Shared, journal: &Keeping) {
    if !journal.keep
        && let Err(error) = journal.file.remove()
    {
        shared.warn(format!("cannot remove the journal: {error}"));
    }
}
