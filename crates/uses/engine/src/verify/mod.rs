//! Reads one or two devices completely: verification, manifests, comparison.
//!
//! Ranges that a device reports as zero are neither read nor hashed: the digests leave out zeroes,
//! so that the cost depends on the data, not on the size.

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
use blockhaul_io::{Pool, Remote, Task, is_zero};
use rustix::fs::{Advice, fadvise};

pub(crate) use self::blocks::read;
use self::blocks::{Found, find, first_difference, room};
use self::units::Units;
use crate::handle::{Handle, Retries};
use crate::manifest::{Digest, Manifest, unit_of};
use crate::options::{Options, SEGMENT};
use crate::progress::Progress;
use crate::segment::{Segment, What};
use crate::segment_maker::{Making, make};
use crate::segment_queue::SegmentQueue;
use crate::selection::Selection;
use crate::side::Side;
use crate::window::Window;

/// Size of a digest block in bytes. Part of the digest's definition: do not change.
const BLOCK: u64 = 256 << 10;
/// Minimum number of blocks a walker has in flight: a disk needs a few at a time even if they
/// merely wait for each other.
const IN_FLIGHT: usize = 8;

/// The result of a successful verification.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Verified {
    /// Bytes compared, known zeroes included.
    pub bytes: u64,
    /// Digest of the content, in hexadecimal, like that of a [`Manifest`]; none if only a part was
    /// copied.
    pub digest: Option<String>,
}

/// Reads `source` and the start of `target` again, as far as the options select them for a copy,
/// and compares them. An error of kind `Io` names the offset of the first difference. Call it on a
/// worker after the writes have completed. After a copy that flushes, the page cache of a target
/// that lends its file is dropped first, so that reads return what is on storage.
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
            "source and target differ, first at offset {at}: the source changed during the copy, or one of \
             them returns wrong data; copy again"
        );
        return Err(Error::new(Kind::Io, text).on(&target.device().facts().name));
    }
    let digest = unit.map(|unit| {
        let (size, range) = (facts.size, (0, facts.size));
        Manifest { size, unit, range, units }.digest()
    });
    Ok(Verified { bytes: progress.snapshot().verified - before, digest })
}

/// Drops the page cache of these ranges of a target, as far as it lends its file. Most file systems
/// mark pages that could not be written back as clean, and reads would return them from memory.
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

/// Reads `source`, or the one range that the options select, and returns the digests of its units.
/// `like`: use the unit length and the range of this manifest. Call it on a worker.
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
        // A device that now has another size is digested to its end.
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

/// What to read, and why.
pub(crate) struct Reading<'a> {
    pub(crate) source: &'a Stack,
    /// The device to compare with.
    pub(crate) target: Option<&'a Stack>,
    /// Unit size in bytes of the requested digests.
    pub(crate) unit: Option<u64>,
    /// A failure to get extents is an error.
    pub(crate) strict: bool,
    pub(crate) selection: Selection,
}

type Digests = Vec<(u64, Digest)>;

impl Reading<'_> {
    /// Reads: the digests of the source's units that are not all zero, in order, and the offset of
    /// the first difference.
    pub(crate) async fn walk(
        self,
        options: &Options,
        pool: &Pool,
        progress: &Arc<Progress>,
    ) -> Result<(Digests, Option<u64>)> {
        let retries = Retries::new(options, progress);
        let queue = Arc::new(SegmentQueue::new());
        let end = |side, stack: &Stack| {
            let device = stack.device().clone();
            Rc::new(Handle::new(side, stack.clone(), device, retries.clone()))
        };
        let source = end(Side::Source, self.source);
        let making = blockhaul_io::spawn(make(
            queue.clone(),
            Making {
                target: self.target.map(|target| end(Side::Target, target)),
                // Digests are of whole blocks.
                grain: if self.unit.is_some() { BLOCK } else { 1 },
                new: self.unit.is_none(),
                extents: options.extents,
                strict: self.strict && options.extents,
                whole: (self.target.is_none(), true),
                selection: self.selection,
                // Skipped bytes count for a copy only.
                progress: Arc::new(Progress::new()),
                ..Making::of(source, SEGMENT, progress)
            },
        ));
        // A pool for each side, so that a task that holds a buffer of one waits only for the other.
        let half = match self.target {
            Some(_) => (pool.limit() / 2).max(Pool::cost(BLOCK as usize)),
            None => pool.limit(),
        };
        if self.target.is_some() {
            // Idle buffers of an earlier copy have other sizes and would add to the two halves.
            pool.keep_idle(0);
        }
        let walk = Arc::new(Walk {
            source: self.source.clone(),
            target: self.target.cloned(),
            queue: queue.clone(),
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
        queue.stop();
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
    queue: Arc<SegmentQueue>,
    retries: Arc<Retries>,
    unit: Option<u64>,
    differs_at: AtomicU64,
    units: Mutex<Digests>,
    source_pool: Pool,
    target_pool: Pool,
    /// Maximum number of blocks a walker has in flight, and whether it is fixed.
    window: (usize, bool),
    since: Instant,
    zero_block: Digest,
    progress: Arc<Progress>,
}

/// A block in flight: offset, length, and its digest; `None` is zero.
type Block = (u64, u64, Option<Task<Result<Option<Digest>>>>);

/// The two sides as a walker sees them, and how many blocks it has in flight.
#[derive(Clone)]
struct Ends {
    source: Rc<Handle>,
    target: Option<Rc<Handle>>,
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
        while let Some(segment) = self.queue.next().await {
            // Segments after a difference need not be read.
            let behind = segment.at > self.differs_at.load(Ordering::Relaxed);
            if behind || self.retries.stopped() {
                self.queue.stop();
                return Ok(());
            }
            if let Err(error) = self.clone().segment(&ends, segment).await {
                self.retries.fail();
                self.queue.stop();
                return Err(error);
            }
        }
        Ok(())
    }

    /// A handle for one walker: a separate one if all are promised to show the same disk.
    async fn end(&self, side: Side, stack: &Stack, first: bool) -> Rc<Handle> {
        let mut device = stack.device().clone();
        if !first && device.facts().can.contains(Can::MULTI_CONN) {
            // Optional: without it, use the first connection.
            match blockhaul_io::timeout(crate::handle::DIAL_MAX, stack.another()).await {
                Ok(Ok(another)) if crate::handle::differs(stack, &another).is_none() => {
                    device = another;
                }
                _ => {}
            }
        }
        Rc::new(Handle::new(side, stack.clone(), device, self.retries.clone()))
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
                    // All at once, except units that also have data.
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
        // After an error, too, wait for the blocks in flight.
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
        self.progress.add_verified(at, len);
        units.add(at, len, digest);
        Ok(())
    }

    /// Compares one block and returns its digest, if it is not zero. `reads`: whether source and
    /// target may have data there.
    async fn block(
        self: Arc<Self>,
        ends: Ends,
        at: u64,
        len: u64,
        reads: [bool; 2],
    ) -> Result<Option<Digest>> {
        let mut attempts = [0; 2];
        let (source, other) = loop {
            // No buffer is held while a side recovers.
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
        // Beyond its end, the target counts as zero.
        let beside = ends.target.as_ref().map_or(0, |end| end.facts().size.saturating_sub(at));
        let lens = [if reads[0] { len } else { 0 }, if reads[1] { len.min(beside) } else { 0 }];
        // Always in this order: a task that waits for a target buffer holds a source buffer, and
        // one that holds a target buffer waits for none.
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
