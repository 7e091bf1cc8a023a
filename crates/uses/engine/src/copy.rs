//! The copy of one device to another: a plan, lanes that carry it out, and what they share.

use std::rc::Rc;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::time::Duration;

use blockhaul_block::{Can, Device, Error, Facts, Kind, Result};
use blockhaul_catalog::Stack;
use blockhaul_io::{Pool, Remote};

use crate::end::{End, Retries};
use crate::flushes::Flushes;
use crate::fold::Fold;
use crate::further::further_lane;
use crate::gate::Gate;
use crate::job::{Job, Keeping};
use crate::journal::{Identity, Journal, JournalOptions, Recorded};
use crate::lane::Lane;
use crate::ledger::Suspect;
use crate::offload::Offload;
use crate::options::{Options, Summary};
use crate::plan::{Earlier, Making, Plan};
use crate::progress::{Progress, Snapshot};
use crate::selection::Selection;
use crate::settled::{GRAIN_MAX, Settled, check_source, check_target};
use crate::side::Side;
use crate::trust::Trust;
use crate::tuner::Tuner;

/// Requests under way that compare what was written, all lanes together.
const CHECKS_MAX: u64 = 16;
/// Bytes asked of a source and not arrived, at most, in memories of the copy: a path of 50 ms and 10
/// Gbit/s holds 64 MB.
const LATE: u64 = 2;

/// Copies all of `source` to the start of `target`, which must be at least as large. Call it on a
/// worker; lanes are spread over all workers.
pub async fn copy(
    source: &Stack,
    target: &Stack,
    options: &Options,
    pool: &Pool,
    progress: &Arc<Progress>,
) -> Result<Summary> {
    let started = blockhaul_io::now();
    let (from, to) = (source.device().facts(), target.device().facts());
    let minimum = from.block.minimum.max(to.block.minimum);
    let selection = Selection::new(options, &from, minimum)?;
    let range = selection.bounds();
    check_source(range.1, &from)?;
    check_target(range.1, &to)?;
    if options.journal.is_some() && options.bitmap.is_some() {
        let text = "a copy by a bitmap has no journal: the bitmap may say something else next time";
        return Err(Error::new(Kind::Invalid, text));
    }
    progress.set_total(selection.total());
    let options = &as_begun(options).await;
    let settled = Settled::new(options, source.device(), target.device(), pool);
    let plan = Arc::new(Plan::new());
    let retries = Retries::new(options, progress);
    let segment = settled.segment;
    let opened = match &options.journal {
        None => None,
        Some(journal) => {
            let told = (settled.segment, range);
            Some(open_journal(journal, told, source, target, &retries).await?)
        }
    };
    let (journal, recorded) = opened.unzip();
    let in_blocks = selection.is_whole() && settled.in_whole_blocks();
    let fold = options.digest.filter(|_| in_blocks);
    let fold = fold.and_then(|algorithm| Fold::new(algorithm, from.size));
    let mut grain = u64::from(to.block.preferred.max(to.block.minimum).min(GRAIN_MAX));
    if fold.is_some() {
        grain = grain.max(crate::algorithm::BLOCK);
    }
    let told = options.target_is_zero && !options.trust_zero && !to.zeroed;
    if told && recorded.as_ref().is_none_or(|recorded| recorded.segments.is_empty()) {
        check_zeroes(target, range, &retries).await?;
    }
    let gate = Arc::new(Gate::new(settled.connections_first));
    let tuner = Tuner::of(&settled, &from, &to, pool, (gate.clone(), progress.clone()));
    let job = Arc::new(Job {
        journal,
        fold,
        gate,
        flushes: Flushes::default(),
        tuner,
        plan: plan.clone(),
        // Of its own: nobody waits for a buffer of the pool that they hold one of.
        check_pool: Pool::new(CHECKS_MAX * Pool::cost(settled.request_size as usize)),
        settled,
        retries: retries.clone(),
        progress: progress.clone(),
        pool: pool.clone(),
        // Digests keep what came too early until its turn.
        late: (from.claims_room && options.digest.is_none())
            .then(|| Pool::new(pool.limit().saturating_mul(LATE))),
        first_error: Mutex::new(None),
        trust: Trust::new(),
        offload: Offload::new(options.by_kernel),
        one_disk: AtomicBool::new(false),
        zeroes_in: Mutex::default(),
        lanes: AtomicUsize::new(0),
        lanes_made: AtomicU32::new(0),
        warnings: Mutex::default(),
    });
    // Said before it may matter.
    if job.journal.is_some() && !to.can.contains(Can::FLUSH) {
        let text = "the target cannot be flushed: the journal is safe if this program is killed, not \
                    if the target's machine loses power";
        job.warn(text.to_string());
    }
    let recorded = recorded.unwrap_or_default();
    let earlier = job.look_at_edge(recorded, range, source, target).await;
    let making = blockhaul_io::spawn(plan.clone().make(Making {
        target: (!options.zero_all).then(|| job.end(Side::Target, target)),
        target_is_zero: job.settled.target_is_zero,
        allocated: options.allocated,
        grain,
        extents: options.extents,
        whole: if options.zero_all { (false, false) } else { job.whole_zeroes(&to) },
        selection,
        earlier,
        ..Making::of(job.end(Side::Source, source), segment, progress)
    }));
    job.clone().carry_out(range, source, target).await;
    if let Err(error) = making.await {
        job.fail(error);
    }
    job.outcome()?;
    if let Some(journal) = &job.journal {
        job.close_journal(journal).await;
    }
    progress.set_complete();
    // What is read for a digest is no part of the copy.
    let done = progress.snapshot();
    let digest = match options.digest {
        None => None,
        Some(algorithm) => Some(match job.digest() {
            Some(digest) => digest,
            None => crate::digest::digest(source, algorithm, options, pool, progress).await?,
        }),
    };
    Ok(Summary { digest, elapsed: blockhaul_io::elapsed(started), ..job.summary(&done) })
}

/// The options, with segments as in the journal that a copy goes on with. Who does not say how large
/// they are may have other connections or requests than the time before, on which it depends.
async fn as_begun(options: &Options) -> Options {
    let mut options = options.clone();
    if let Some(journal) = options.journal.clone().filter(|_| options.spread)
        && let Ok(Some(segment)) =
            blockhaul_io::offload(move || Journal::segment_there(&journal)).await
    {
        (options.segment, options.spread) = (segment, false);
    }
    options
}

/// Looks at samples of a target that is said to read as zeroes; an error where one of them does not.
async fn check_zeroes(target: &Stack, range: (u64, u64), retries: &Arc<Retries>) -> Result<()> {
    let device = target.device().clone();
    let name = &device.facts().name.clone();
    let end = End::new(Side::Target, target.clone(), device, retries.clone());
    let Some(at) = crate::sample::first_content(Rc::new(end), range).await? else { return Ok(()) };
    let text = format!(
        "it is said to read as zeroes, but there is something else at offset {at}: leave out \
         --destination-is-zero, or give --trust if that may stay"
    );
    Err(Error::new(Kind::Invalid, text).on(name))
}

async fn open_journal(
    options: &JournalOptions,
    (segment, range): (u64, (u64, u64)),
    source: &Stack,
    target: &Stack,
    retries: &Arc<Retries>,
) -> Result<(Keeping, Recorded)> {
    let end = End::new(Side::Source, source.clone(), source.device().clone(), retries.clone());
    let identity = Identity {
        segment,
        range,
        source_size: source.device().facts().size,
        target_size: target.device().facts().size,
        sample: crate::sample::digest(end).await?,
        source: options.source.clone(),
        target: options.target.clone(),
    };
    let (wanted, interval) = (options.clone(), options.interval);
    let opened = blockhaul_io::offload(move || Journal::open(&wanted, &identity)).await;
    let (file, recorded) =
        opened.map_err(|lost| Error::new(Kind::Io, "journal").because(lost))??;
    Ok((Keeping { file, keep: options.keep, interval }, recorded))
}

impl Job {
    /// Compares what earlier runs recorded last. Where that is different, nothing that they recorded
    /// is relied on.
    async fn look_at_edge(
        self: &Arc<Job>,
        recorded: Recorded,
        (start, end): (u64, u64),
        source: &Stack,
        target: &Stack,
    ) -> Earlier {
        if recorded.segments.is_empty() {
            return Earlier::default();
        }
        let segment = self.settled.segment;
        let [from, to] = [source, target].map(|stack| stack.device().clone());
        let lane = self.clone().lane((source, from), (target, to), false);
        for number in &recorded.edge {
            let at = number * segment;
            let range = (at.max(start), (at + segment).min(end));
            lane.recheck(Suspect { range, again: false }).await;
        }
        lane.finish().await;
        let check = self.retries.rewritten.load(Ordering::Relaxed) > 0;
        if check {
            let text = "the target does not hold what the journal recorded last: everything that it \
                        recorded is compared";
            self.warn(text.to_string());
        }
        Earlier { recorded, check }
    }

    /// Copies what the plan says, in as many lanes as are of use.
    async fn carry_out(self: Arc<Job>, range: (u64, u64), source: &Stack, target: &Stack) {
        let segment = self.settled.segment;
        // A segment is for one lane.
        let segments = range.1.div_ceil(segment).saturating_sub(range.0 / segment);
        let useful = usize::try_from(segments).unwrap_or(usize::MAX);
        let further = 1..self.settled.connections_max.min(useful);
        let further = further.map(|index| {
            let (job, source, target) = (self.clone(), source.clone(), target.clone());
            Remote::to(index).spawn(move || further_lane(job, index, source, target))
        });
        let further: Vec<_> = further.collect();
        self.clone().first_lane(source, target).await;
        for lane in further {
            if lane.await.is_err() {
                self.fail(Error::new(Kind::Io, "a worker ended before its lane"));
            }
        }
    }

    /// Why the copy is not complete, if it is not.
    fn outcome(&self) -> Result<()> {
        if let Some(error) = self.first_error.lock().expect("no panic under this lock").take() {
            return Err(error);
        }
        if self.progress.is_cancelled() {
            return Err(Error::new(Kind::ShuttingDown, "stopped before the end of the copy"));
        }
        Ok(())
    }

    /// What came of it, but for the digest and the time it took.
    fn summary(&self, done: &Snapshot) -> Summary {
        let mut warnings = self.warnings.lock().expect("no panic under this lock");
        Summary {
            size: done.total,
            data: done.data,
            zeroed: done.zeroed,
            skipped: done.skipped,
            resumed: done.resumed,
            lanes: self.lanes.load(Ordering::Relaxed),
            requests: done.requests,
            request_size: done.request_size,
            routes: self.progress.routes(),
            retried: self.retries.summary(),
            digest: None,
            elapsed: Duration::ZERO,
            warnings: std::mem::take(&mut *warnings),
        }
    }

    /// A handle of its own for what is asked beside the lanes.
    fn end(&self, side: Side, stack: &Stack) -> Rc<End> {
        let device = stack.device().clone();
        Rc::new(End::new(side, stack.clone(), device, self.retries.clone()))
    }

    /// Whether zeroes in any length are for one lane: those to be zeroed, and those that need not.
    fn whole_zeroes(&self, target: &Facts) -> (bool, bool) {
        // Who hashes or writes zeroes has all lanes do it.
        let cheap = self.fold.as_ref().is_none_or(|fold| !fold.hashes_zeroes());
        let skipped = self.settled.target_is_zero;
        (cheap && (skipped || !target.emulated.contains(Can::ZERO)), cheap)
    }

    /// After success the journal has no more to say.
    async fn close_journal(self: &Arc<Job>, journal: &Keeping) {
        if !journal.keep
            && let Err(error) = journal.file.remove()
        {
            self.warn(format!("cannot remove the journal: {error}"));
        }
    }

    async fn first_lane(self: Arc<Job>, source: &Stack, target: &Stack) {
        let [from, to] = [source, target].map(|stack| stack.device().clone());
        self.clone().lane((source, from), (target, to), true).run().await;
        // Nobody will bring a proof any more.
        self.trust.settle(None);
    }

    pub(crate) fn lane(
        self: Arc<Job>,
        (source, from): (&Stack, Arc<dyn Device>),
        (target, to): (&Stack, Arc<dyn Device>),
        first: bool,
    ) -> std::rc::Rc<Lane> {
        let source = End::new(Side::Source, source.clone(), from, self.retries.clone());
        let target = End::new(Side::Target, target.clone(), to, self.retries.clone());
        Lane::new(self, source, target, first)
    }
}
