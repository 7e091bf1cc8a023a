//! Comparing two devices: what both call zero is not read.

use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use block::{BASE_ALLOCATION, Can, DeviceExt as _, Error, Kind, Result, Stack, ZERO};
use io::{Pool, Remote};

use crate::end::{End, Retries, Side};
use crate::options::{Options, SEGMENT};
use crate::progress::Progress;
use crate::verify::{first_difference, read};
use crate::zeroes::is_zero;

/// Bytes compared at a time.
const BLOCK: u64 = 256 << 10;
/// Blocks that one walker has in flight.
const IN_FLIGHT: usize = 8;

/// What a comparison found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Comparison {
    /// Offset of the first byte that differs; `None`: all are the same. What one device has beyond
    /// the end of the other counts as the same when it is zero.
    pub differs_at: Option<u64>,
    /// Size of each, in bytes.
    pub sizes: (u64, u64),
}

/// Compares two devices over several connections. An error of a question for extents or of a read
/// tells so by [`Error::request`]. Call it on a worker.
pub async fn compare(
    one: &Stack,
    other: &Stack,
    options: &Options,
    pool: &Pool,
    progress: &Arc<Progress>,
) -> Result<Comparison> {
    let sizes = (one.device().facts().size, other.device().facts().size);
    progress.set_total(sizes.0.max(sizes.1));
    let walk = Arc::new(Walk {
        stacks: [one.clone(), other.clone()],
        sizes,
        next: AtomicU64::new(0),
        differs_at: AtomicU64::new(u64::MAX),
        // Of their own: nobody waits for a buffer of a pool that they hold one of.
        pools: [pool.clone(), Pool::new(pool.limit())],
        retries: Retries::new(options, progress),
        extents: options.extents,
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
        let ended = walker.await.map_err(|lost| Error::new(Kind::Io, "compare").because(lost));
        result = result.and(ended.and_then(|walked| walked));
    }
    let differs_at = walk.differs_at.load(Ordering::Relaxed);
    result?;
    if progress.is_cancelled() {
        return Err(Error::new(Kind::ShuttingDown, "stopped before the end of the comparison"));
    }
    Ok(Comparison { differs_at: (differs_at != u64::MAX).then_some(differs_at), sizes })
}

struct Walk {
    stacks: [Stack; 2],
    sizes: (u64, u64),
    next: AtomicU64,
    differs_at: AtomicU64,
    pools: [Pool; 2],
    retries: Arc<Retries>,
    extents: bool,
    progress: Arc<Progress>,
}

/// A run of bytes, and which sides may have something in it.
type Run = (u64, [bool; 2]);

impl Walk {
    async fn walk(self: Arc<Self>, first: bool) -> Result<()> {
        let mut ends = Vec::new();
        for (side, stack) in [Side::Source, Side::Target].into_iter().zip(&self.stacks) {
            // A further connection is a help, not a need.
            let device = match first {
                true => stack.device().clone(),
                false => match io::timeout(crate::end::DIAL_MAX, stack.another()).await {
                    Ok(Ok(device)) if crate::end::differs(stack, &device).is_none() => device,
                    _ => stack.device().clone(),
                },
            };
            ends.push(Rc::new(End::new(side, stack.clone(), device, self.retries.clone())));
        }
        let size = self.sizes.0.max(self.sizes.1);
        loop {
            let index = self.next.fetch_add(1, Ordering::Relaxed);
            let Some(start) = index.checked_mul(SEGMENT).filter(|&start| start < size) else {
                return Ok(());
            };
            // What comes behind a difference is of no interest any more.
            if start > self.differs_at.load(Ordering::Relaxed) || self.retries.stopped() {
                return Ok(());
            }
            let end = start.saturating_add(SEGMENT).min(size);
            if let Err(error) = self.segment(&ends, start, end).await {
                self.retries.fail();
                return Err(error);
            }
        }
    }

    async fn segment(self: &Arc<Self>, ends: &[Rc<End>], start: u64, end: u64) -> Result<()> {
        let mut out = VecDeque::new();
        let mut result = Ok(());
        let mut at = start;
        for (len, filled) in self.runs(ends, start, end).await? {
            let run_end = at + len;
            if filled == [false, false] {
                self.progress.add_verified(len);
                at = run_end;
                continue;
            }
            while at < run_end && result.is_ok() && !self.retries.stopped() {
                if at > self.differs_at.load(Ordering::Relaxed) {
                    break;
                }
                let part = (BLOCK - at % BLOCK).min(run_end - at);
                if out.len() >= IN_FLIGHT
                    && let Some(oldest) = out.pop_front()
                {
                    let oldest: io::Task<Result<()>> = oldest;
                    result = oldest.await;
                }
                let (walk, ends) = (self.clone(), [ends[0].clone(), ends[1].clone()]);
                out.push_back(io::start(walk.block(ends, at, part, filled)));
                at += part;
            }
            at = run_end;
        }
        for block in out {
            result = result.and(block.await);
        }
        result
    }

    /// Which parts of a segment may hold something, on which side.
    async fn runs(&self, ends: &[Rc<End>], start: u64, end: u64) -> Result<Vec<Run>> {
        let sizes = [self.sizes.0, self.sizes.1];
        let mut lists = Vec::new();
        for (side, size) in ends.iter().zip(sizes) {
            let inside = end.min(size).saturating_sub(start);
            let mut list: Vec<(u64, bool)> = self.filled(side, start, inside).await?;
            if inside < end - start {
                // Nothing, which is as good as zeroes.
                list.push((end - start - inside, false));
            }
            lists.push(VecDeque::from(list));
        }
        let mut runs = Vec::new();
        while let (Some(&(a, one)), Some(&(b, other))) = (lists[0].front(), lists[1].front()) {
            let len = a.min(b);
            runs.push((len, [one, other]));
            for list in &mut lists {
                if let Some(front) = list.front_mut() {
                    front.0 -= len;
                    if front.0 == 0 {
                        list.pop_front();
                    }
                }
            }
        }
        Ok(runs)
    }

    /// Runs of one side: length, and whether it may hold something.
    async fn filled(&self, side: &Rc<End>, start: u64, len: u64) -> Result<Vec<(u64, bool)>> {
        let facts = side.facts();
        let told = self.extents && facts.can.contains(Can::EXTENTS);
        let Some(context) = facts.context(BASE_ALLOCATION).filter(|_| told && len > 0) else {
            return Ok(if len > 0 { vec![(len, true)] } else { Vec::new() });
        };
        let (mut at, end) = (start, start + len);
        let mut runs = Vec::new();
        let mut attempts = 0;
        while at < end {
            let generation = side.generation();
            match side.device().extents(at, end - at, context).await {
                Ok(mut lists) => {
                    let list = lists.pop().unwrap_or_default();
                    for run in list.runs() {
                        runs.push((run.len, run.state & ZERO == 0));
                    }
                    // The fence lets no empty answer pass.
                    at += list.total();
                    attempts = 0;
                }
                Err(error) => side.recover(error, generation, &mut attempts).await?,
            }
        }
        Ok(runs)
    }

    async fn block(
        self: Arc<Self>,
        ends: [Rc<End>; 2],
        at: u64,
        len: u64,
        filled: [bool; 2],
    ) -> Result<()> {
        let one = match filled[0] {
            true => read(&ends[0], &self.pools[0], at, len).await?,
            false => None,
        };
        let other = match filled[1] {
            true => read(&ends[1], &self.pools[1], at, len).await?,
            false => None,
        };
        let same = match (&one, &other) {
            (None, None) => true,
            (Some(one), Some(other)) => one.bytes() == other.bytes(),
            (Some(data), None) | (None, Some(data)) => is_zero(data.bytes()),
        };
        if !same {
            let first = at + first_difference(one.as_ref(), other.as_ref());
            self.differs_at.fetch_min(first, Ordering::Relaxed);
        }
        self.progress.add_verified(len);
        Ok(())
    }
}
