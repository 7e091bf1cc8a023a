//! Reading one or two devices to the end: verification, manifests, comparison.
//!
//! What a device says reads as zeroes is not read, and not hashed either: the digests leave out what is
//! zero, so that the work is that of the data, not of the size.

mod blocks;
mod units;

use std::cell::RefCell;
use std::collections::VecDeque;
use std::num::NonZero;
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use blockhaul_block::{Access, Can, Error, FileRange, Kind, Result};
use blockhaul_catalog::Stack;
use blockhaul_io::{Pool, Remote, Task};
use rustix::fs::{Advice, fadvise};

pub(crate) use self::blocks::read;
use self::blocks::{Found, find, first_difference, room};
use self::units::Units;
use crate::end::{End, Retries};
use crate::manifest::{Digest, Manifest, unit_of};
use crate::options::{Options, SEGMENT};
use crate::plan::{Making, Plan};
use crate::progress::Progress;
use crate::segment::{Segment, What};
use crate::selection::Selection;
use crate::side::Side;
use crate::window::Window;
use crate::zeroes::is_zero;

/// Bytes of a digest block. Part of the digest's definition: do not change.
const BLOCK: u64 = 256 << 10;
/// Blocks that one walker has in flight at least: a disk wants a few at a time even where they merely
/// wait for each other.
const IN_FLIGHT: usize = 8;

/// What a verification found to be the same.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Verified {
    /// Bytes compared, known zeroes included.
    pub bytes: u64,
    /// Digest of the content, in hexadecimal, as that of a [`Manifest`]; none where only a part was
    /// copied.
    pub digest: Option<String>,
}

/// Reads `source` and the start of `target` again, as far as the options choose it for a copy, and
/// compares them. An error of kind `Io` names the first offset that differs. Call it on a worker after
/// the writes have completed. After a copy that flushes, what the page cache holds of a target that lends
/// its file is dropped first, so that reads show what the storage has.
pub async fn verify(
    source: &Stack,
    target: &Stack,
    options: &Options,
    pool: &Pool,
    progress: &Arc<Progress>,
) -> Result<Verified> {
    let facts = source.device().facts();
    let minimum = facts.block.minimum.max(target.device().facts().block.minimum);
    let selection = Selection::new(options, &facts, minimum)?;
    let whole = selection.is_whole();
    let unit = whole.then(|| unit_of(facts.size));
    let before = progress.snapshot().verified;
    if options.flush || options.journal.is_some() {
        drop_cached(target, selection.ranges()).await;
    }
    let reading = Reading { source, target: Some(target), unit, strict: false, selection };
    let (units, differs_at) = reading.walk(options, pool, progress).await?;
    if let Some(at) = differs_at {
        let text = format!(
            "source and target differ, first at offset {at}: the source changed during the copy, or \
             one of them returns wrong data; copy again"
        );
        return Err(Error::new(Kind::Io, text).on(&target.device().facts().name));
    }
    let digest = unit.map(|unit| {
        let (size, range) = (facts.size, (0, facts.size));
        Manifest { size, unit, range, units }.digest()
    });
    Ok(Verified { bytes: progress.snapshot().verified - before, digest })
}

/// Drops what the page cache holds of these ranges of a target, as far as it lends its file. Pages that
/// could not be written back are marked as clean by most file systems, and would be read from memory.
async fn drop_cached(target: &Stack, ranges: &[(u64, u64)]) {
    let (device, mut lent) = (target.device(), Vec::new());
    for &(mut at, end) in ranges {
        while at < end
            && let Some(piece) = device.file_at(at, end - at, Access::Read)
        {
            at += piece.len;
            lent.push(piece);
        }
    }
    let dropped = blockhaul_io::offload(move || {
        lent.into_iter().try_for_each(|FileRange { file, at, len, .. }| {
            fadvise(&file, at, NonZero::new(len), Advice::DontNeed)
        })
    });
    match dropped.await {
        Ok(Ok(())) => {}
        refused => log::debug!("the page cache is not dropped before verification: {refused:?}"),
    }
}

/// Reads `source`, or the one range that the options choose, and returns the digests of its units.
/// `like`: units of the same length and the range of this one. Call it on a worker.
pub async fn manifest(
    source: &Stack,
    like: Option<&Manifest>,
    options: &Options,
    pool: &Pool,
    progress: &Arc<Progress>,
) -> Result<Manifest> {
    let facts = source.device().facts();
    let mut chosen = Options { bitmap: None, ..options.clone() };
    let mut unit = unit_of(facts.size);
    if let Some(like) = like {
        unit = like.unit;
        // A device that has another size now is digested to its end.
        let end = if like.range.1 == like.size { facts.size } else { like.range.1.min(facts.size) };
        let start = like.range.0.min(end);
        chosen.ranges = (like.range != (0, like.size)).then(|| Arc::from([(start, end - start)]));
    }
    let selection = Selection::new(&chosen, &facts, 1)?;
    let range = selection.bounds();
    let reading = Reading { source, target: None, unit: Some(unit), strict: false, selection };
    let (units, _) = reading.walk(options, pool, progress).await?;
    Ok(Manifest { size: facts.size, unit, range, units })
}

/// What is read, and why.
pub(crate) struct Reading<'a> {
    pub(crate) source: &'a Stack,
    /// Compared with it.
    pub(crate) target: Option<&'a Stack>,
    /// Digests are wanted of pieces of this many bytes.
    pub(crate) unit: Option<u64>,
    /// Extents that cannot be had are an error.
    pub(crate) strict: bool,
    pub(crate) selection: Selection,
}

type Digests = Vec<(u64, Digest)>;

impl Reading<'_> {
    /// Reads: the digests of the units of the source that are not all zero, in order, and where the
    /// two first differ.
    pub(crate) async fn walk(
        self,
        options: &Options,
        pool: &Pool,
        progress: &Arc<Progress>,
    ) -> Result<(Digests, Option<u64>)> {
        let retries = Retries::new(options, progress);
        let plan = Arc::new(Plan::new());
        let end = |side, stack: &Stack| {
            let device = stack.device().clone();
            Rc::new(End::new(side, stack.clone(), device, retries.clone()))
        };
        let source = end(Side::Source, self.source);
        let making = blockhaul_io::spawn(plan.clone().make(Making {
            target: self.target.map(|target| end(Side::Target, target)),
            // Digests are of whole blocks.
            grain: if self.unit.is_some() { BLOCK } else { 1 },
            new: self.unit.is_none(),
            extents: options.extents,
            strict: self.strict && options.extents,
            whole: (self.target.is_none(), true),
            selection: self.selection,
            // What is left out counts for a copy only.
            progress: Arc::new(Progress::new()),
            ..Making::of(source, SEGMENT, progress)
        }));
        // A pool for each side, so that whoever has a buffer of one waits for the other only.
        let half = match self.target {
            Some(_) => (pool.limit() / 2).max(Pool::cost(BLOCK as usize)),
            None => pool.limit(),
        };
        if self.target.is_some() {
            // What a copy before has left idle is of other sizes and would come on top of the two halves.
            pool.keep_idle(0);
        }
        let walk = Arc::new(Walk {
            source: self.source.clone(),
            target: self.target.cloned(),
            plan: plan.clone(),
            retries,
            unit: self.unit,
            differs_at: AtomicU64::new(u64::MAX),
            units: Mutex::default(),
            source_pool: pool.share(half),
            target_pool: Pool::new(half),
            window: (options.requests, !options.adaptive),
            since: blockhaul_io::now(),
            zero_block: blake3::hash(&vec![0; BLOCK as usize]).into(),
            progress: progress.clone(),
        });
        let walkers: Vec<_> = (0..options.connections.max(1))
            .map(|index| {
                let walk = walk.clone();
                Remote::to(index).spawn(move || walk.walk(index == 0))
            })
            .collect();
        let mut result = Ok(());
        for walker in walkers {
            let ended = walker.await.map_err(|lost| Error::new(Kind::Io, "read").because(lost));
            result = result.and(ended.and_then(|walked| walked));
        }
        plan.stop();
        result.and(making.await)?;
        if progress.is_cancelled() {
            return Err(Error::new(Kind::ShuttingDown, "stopped before the end"));
        }
        let mut units = std::mem::take(&mut *walk.units.lock().expect("no panic under this lock"));
        units.sort_unstable_by_key(|unit| unit.0);
        let differs_at = walk.differs_at.load(Ordering::Relaxed);
        Ok((units, (differs_at != u64::MAX).then_some(differs_at)))
    }
}

struct Walk {
    source: Stack,
    target: Option<Stack>,
    plan: Arc<Plan>,
    retries: Arc<Retries>,
    unit: Option<u64>,
    differs_at: AtomicU64,
    units: Mutex<Digests>,
    source_pool: Pool,
    target_pool: Pool,
    /// Most blocks that a walker has in flight, and whether it always has.
    window: (usize, bool),
    since: Instant,
    zero_block: Digest,
    progress: Arc<Progress>,
}

/// A block on its way: where it is, how long, and its digest; `None` is zero.
type Block = (u64, u64, Option<Task<Result<Option<Digest>>>>);

/// The two sides as a walker sees them, and how many blocks it has in flight.
#[derive(Clone)]
struct Ends {
    source: Rc<End>,
    target: Option<Rc<End>>,
    window: Rc<RefCell<Window>>,
}

impl Walk {
    async fn walk(self: Arc<Self>, first: bool) -> Result<()> {
        let source = self.end(Side::Source, &self.source, first).await;
        let target = match &self.target {
            Some(target) => Some(self.end(Side::Target, target, first).await),
            None => None,
        };
        let window = Rc::new(RefCell::new(Window::new(self.window.0, self.window.1)));
        let ends = Ends { source, target, window };
        while let Some(segment) = self.plan.next().await {
            // What comes behind a difference is of no interest any more.
            let behind = segment.at > self.differs_at.load(Ordering::Relaxed);
            if behind || self.retries.stopped() {
                self.plan.stop();
                return Ok(());
            }
            if let Err(error) = self.clone().segment(&ends, segment).await {
                self.retries.fail();
                self.plan.stop();
                return Err(error);
            }
        }
        Ok(())
    }

    /// A handle for one walker: of its own where all are promised to show the same.
    async fn end(&self, side: Side, stack: &Stack, first: bool) -> Rc<End> {
        let mut device = stack.device().clone();
        if !first && device.facts().can.contains(Can::MULTI_CONN) {
            // A help, not a need.
            match blockhaul_io::timeout(crate::end::DIAL_MAX, stack.another()).await {
                Ok(Ok(another)) if crate::end::differs(stack, &another).is_none() => {
                    device = another;
                }
                _ => {}
            }
        }
        Rc::new(End::new(side, stack.clone(), device, self.retries.clone()))
    }

    async fn segment(self: Arc<Self>, ends: &Ends, segment: Segment) -> Result<()> {
        let mut out: VecDeque<Block> = VecDeque::new();
        let mut units = Units::new(self.unit, self.zero_block);
        let mut result = Ok(());
        let mut at = segment.at;
        for run in segment.runs {
            let end = at + run.len;
            let (one, other) = match run.what {
                What::Data => (true, ends.target.is_some()),
                What::New => (true, false),
                What::Zero => (false, ends.target.is_some()),
                What::Clean => (false, false),
            };
            while at < end && result.is_ok() && !self.retries.stopped() {
                if at > self.differs_at.load(Ordering::Relaxed) {
                    break;
                }
                if !one && !other {
                    // All of it at once but for units that have something else, too.
                    let len = match self.unit {
                        Some(unit) if !at.is_multiple_of(unit) => (unit - at % unit).min(end - at),
                        Some(unit) if end - at > unit => end - at - (end - at) % unit,
                        _ => end - at,
                    };
                    out.push_back((at, len, None));
                    at += len;
                    continue;
                }
                while out.len() >= ends.window.borrow().limit().max(IN_FLIGHT)
                    && result.is_ok()
                    && let Some(oldest) = out.pop_front()
                {
                    result = self.take(&mut units, oldest).await;
                }
                let len = (BLOCK - at % BLOCK).min(end - at);
                let block = self.clone().block(ends.clone(), at, len, [one, other]);
                let block = blockhaul_io::start(block);
                out.push_back((at, len, Some(block)));
                at += len;
            }
            at = end;
        }
        // After an error what is out is awaited, too.
        for block in out {
            result = result.and(self.take(&mut units, block).await);
        }
        let digests = units.finish();
        self.units.lock().expect("no panic under this lock").extend(digests);
        result
    }

    /// Waits for a block, and adds it to the digests.
    async fn take(&self, units: &mut Units, (at, len, block): Block) -> Result<()> {
        let digest = match block {
            Some(block) => block.await?,
            None => None,
        };
        self.progress.add_verified(len);
        units.add(at, len, digest);
        Ok(())
    }

    /// Compares one block and returns its digest, if it is not zero. `reads`: whether source and target
    /// may have something there.
    async fn block(
        self: Arc<Self>,
        ends: Ends,
        at: u64,
        len: u64,
        reads: [bool; 2],
    ) -> Result<Option<Digest>> {
        let mut attempts = [0; 2];
        let (source, other) = loop {
            // Nothing is held while an end is repaired.
            let (side, (error, generation)) = match self.sides(&ends, at, len, reads).await? {
                (Ok(one), Ok(other)) => break (one, other),
                (Err(failed), _) => (0, failed),
                (_, Err(failed)) => (1, failed),
            };
            let end = if side == 0 { Some(&ends.source) } else { ends.target.as_ref() };
            let end = end.expect("what failed is there");
            end.recover(error, generation, &mut attempts[side]).await?;
        };
        if ends.target.is_some()
            && let Some(first) = first_difference(source.as_ref(), other.as_ref())
        {
            self.differs_at.fetch_min(at + first, Ordering::Relaxed);
        }
        Ok(source
            .filter(|data| self.unit.is_some() && !is_zero(data.bytes()))
            .map(|data| blake3::hash(data.bytes()).into()))
    }

    /// Reads both sides of a block at the same time.
    async fn sides(
        &self,
        ends: &Ends,
        at: u64,
        len: u64,
        reads: [bool; 2],
    ) -> Result<(Found, Found)> {
        // What is beyond the end of the target is as good as zeroes.
        let beside = ends.target.as_ref().map_or(0, |end| end.facts().size.saturating_sub(at));
        let lens = [if reads[0] { len } else { 0 }, if reads[1] { len.min(beside) } else { 0 }];
        // Always in this order: who waits for room of the target has room of the source, and who has
        // room of the target waits for none.
        let rooms =
            [room(&self.source_pool, lens[0]).await?, room(&self.target_pool, lens[1]).await?];
        let started = blockhaul_io::now();
        let [one, other] = rooms;
        let other = ends.target.clone().zip(other);
        let other =
            other.map(|(end, room)| blockhaul_io::start(async move { find(&end, room, at).await }));
        let one = match one {
            Some(room) => find(&ends.source, room, at).await,
            None => Ok(None),
        };
        let other = match other {
            Some(other) => other.await,
            None => Ok(None),
        };
        if lens.contains(&BLOCK) {
            ends.window
                .borrow_mut()
                .learn(blockhaul_io::elapsed(started), blockhaul_io::elapsed(self.since));
        }
        Ok((one, other))
    }
}
