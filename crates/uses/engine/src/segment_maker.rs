//! Makes segments of the ranges to copy, with their known extents, ahead of the lanes that take
//! them.

use std::future::poll_fn;
use std::rc::Rc;
use std::sync::Arc;
use std::task::Poll;
use std::time::{Duration, Instant};

use blockhaul_block::{HOLE, ZERO};

use crate::error::Result;
use crate::extent_feed::{ExtentFeed, ExtentRun};
use crate::handle::ReconnectingHandle;
use crate::journal::JournalContent;
use crate::ledger::SegmentRange;
use crate::plan::PlanAdditions;
use crate::progress::CopyProgress;
use crate::segment::{RunContent, Segment, SegmentRun};
use crate::segment_queue::SegmentQueue;
use crate::segmenter::Segmenter;
use crate::selection::{self, Selection, SelectionFeed};
use crate::wants::meet;

/// Maximum number of segments cut from one run at a time: limits the memory of queued segments.
const SEGMENTS_AT_ONCE: u64 = 64;
/// Maximum time for which idle lanes wait for extents before they copy without them.
const PATIENCE: Duration = Duration::from_millis(250);
/// Interval at which they look whether the source answers reads meanwhile.
const LOOK: Duration = Duration::from_millis(10);

/// What earlier runs have done.
#[derive(Debug, Default)]
pub(crate) struct EarlierRuns {
    pub(crate) recorded: JournalContent,
    /// Recheck what is recorded instead of skipping it.
    pub(crate) check: bool,
}

/// The settings that segments are made with.
pub(crate) struct SegmentSettings {
    pub(crate) source: Rc<ReconnectingHandle>,
    /// The target, if it can report what already reads as zeroes.
    pub(crate) target: Option<Rc<ReconnectingHandle>>,
    /// All of the target reads as zeroes.
    pub(crate) target_is_zero: bool,
    /// Zeroes on the target must be allocated.
    pub(crate) allocated: bool,
    /// Segment size in bytes.
    pub(crate) segment: u64,
    /// Runs of zeroes are cut at multiples of this.
    pub(crate) grain: u64,
    /// Request extents; failing to get them is an error.
    pub(crate) extents: bool,
    pub(crate) strict: bool,
    /// Distinguish [`RunContent::New`] from other data.
    pub(crate) new: bool,
    /// Do not split what is zero, and what is zero on both sides.
    pub(crate) whole: (bool, bool),
    pub(crate) selection: Selection,
    /// Segments with a part of this range are copied when all others are.
    pub(crate) last: Option<SegmentRange>,
    /// Ranges that are added while segments are made.
    pub(crate) added: Option<Arc<PlanAdditions>>,
    pub(crate) earlier: EarlierRuns,
    pub(crate) progress: Arc<CopyProgress>,
}

impl SegmentSettings {
    /// All of a device, in segments of this size.
    pub(crate) fn of(
        source: Rc<ReconnectingHandle>,
        segment: u64,
        progress: &Arc<CopyProgress>,
    ) -> SegmentSettings {
        let selection = Selection::all(source.facts().size);
        SegmentSettings {
            source,
            target: None,
            target_is_zero: false,
            allocated: false,
            segment,
            grain: 1,
            extents: true,
            strict: false,
            new: false,
            whole: (false, false),
            selection,
            last: None,
            added: None,
            earlier: EarlierRuns::default(),
            progress: progress.clone(),
        }
    }
}

/// Makes the segments of a queue. An error means that the ranges to copy cannot be determined.
pub(crate) async fn make(queue: Arc<SegmentQueue>, making: SegmentSettings) -> Result<()> {
    let made = match SegmentMaker::new(&queue, making) {
        Ok(maker) => maker.make().await,
        Err(error) => Err(error),
    };
    match &made {
        // After a cancel, lanes take what is there and stop by themselves.
        Ok(()) => queue.complete(),
        Err(_) => queue.stop(),
    }
    made
}

struct SegmentMaker<'a> {
    queue: &'a SegmentQueue,
    making: SegmentSettings,
    segmenter: Segmenter,
    feeds: Feeds,
    choice: SelectionFeed,
    blind: OverlapProbe,
}

/// Whether the source answers reads while a query for extents is in progress. If it does not, a copy
/// without extents gains no time, and reads holes.
#[derive(Default)]
enum OverlapProbe {
    /// Nothing has been read without extents.
    #[default]
    Untried,
    /// Since the query of this time, one segment is being read. The source answers reads once as many
    /// requests have ended.
    Tried(Instant, u64),
    /// It does.
    Answered,
}

/// The extents of both sides for a range.
struct Feeds {
    source: ExtentFeed,
    target: Option<ExtentFeed>,
}

impl Feeds {
    /// Their extents from `from` to `to`.
    fn of(making: &SegmentSettings, (from, to): SegmentRange) -> Feeds {
        let feed = |handle: &Rc<ReconnectingHandle>| {
            let to = to.min(handle.facts().size);
            let feed = ExtentFeed::allocation(handle.clone(), making.extents, from.min(to), to);
            if making.strict { feed.or_fail() } else { feed }
        };
        let mut source = feed(&making.source);
        if !making.selection.is_whole() && making.added.is_none() {
            source = source.in_part();
        }
        let target = match &making.target {
            // Not useful if everything is data.
            Some(target) if !making.target_is_zero && (source.asks() || making.strict) => {
                Some(feed(target))
            }
            _ => None,
        };
        Feeds { source, target }
    }
}

impl SegmentMaker<'_> {
    fn new(queue: &SegmentQueue, making: SegmentSettings) -> Result<SegmentMaker<'_>> {
        let feeds = Feeds::of(&making, making.selection.bounds());
        let choice = making.selection.choice(&making.source)?;
        let segmenter = segmenter(&making);
        let blind = OverlapProbe::default();
        Ok(SegmentMaker { queue, making, segmenter, feeds, choice, blind })
    }

    async fn make(mut self) -> Result<()> {
        let mut ranges = self.making.selection.ranges().to_vec();
        loop {
            for next in 0..ranges.len() {
                if !self.make_range(&ranges[next..]).await? {
                    return Ok(());
                }
            }
            let Some(added) = self.making.added.clone() else { return Ok(()) };
            let stopped = || self.queue.is_stopped() || self.making.progress.is_cancelled();
            let Some(more) = added.next(stopped).await else { return Ok(()) };
            // The next range may start anywhere.
            self.segmenter = segmenter(&self.making);
            if let (Some(first), Some(last)) = (more.first(), more.last()) {
                self.feeds = Feeds::of(&self.making, (first.0, last.1));
            }
            ranges = more;
        }
    }

    /// Makes the segments of the first of these ranges; false when the queue was stopped.
    async fn make_range(&mut self, ranges: &[SegmentRange]) -> Result<bool> {
        let Some(&(start, end)) = ranges.first() else { return Ok(true) };
        let segment = self.making.segment;
        self.segmenter.leave_to(start);
        let mut at = start;
        while at < end && !self.making.progress.is_cancelled() {
            if let Some(signals) = self.queue.signals() {
                let stopped = || self.queue.is_stopped() || self.making.progress.is_cancelled();
                signals.resumed(stopped).await;
            }
            let recorded = &self.making.earlier.recorded;
            let mut len = end - at;
            if let Some(reach) = recorded.reach(at / segment) {
                // Skipped bytes need no extents.
                len = len.min(reach.saturating_mul(segment) - at);
                if !self.recorded(at, len).await {
                    return Ok(false);
                }
            } else {
                if let Some(next) = recorded.next(at / segment) {
                    len = len.min(next.saturating_mul(segment) - at);
                }
                let (known, what, extents_known) = self.look(at, len, ranges).await?;
                len = known;
                match what {
                    Some(what) => self.segmenter.push(len, what, extents_known),
                    None => {
                        self.making.progress.leave_out(len);
                        self.segmenter.leave_to(at + len);
                    }
                }
            }
            at += len;
            if !self.hand_out().await {
                return Ok(false);
            }
        }
        self.segmenter.finish();
        let added = self.hand_out().await;
        self.queue.made_to(end);
        Ok(added)
    }

    /// Queues the complete segments; false if the queue was stopped.
    async fn hand_out(&mut self) -> bool {
        while let Some(segment) = self.segmenter.take() {
            if self.making.last.is_some_and(|last| meet(last, segment.range())) {
                self.queue.add_last(segment);
            } else if !self.queue.add(segment).await {
                return false;
            }
        }
        true
    }

    /// Handles what an earlier run has copied; false if the queue was stopped.
    async fn recorded(&mut self, at: u64, len: u64) -> bool {
        self.making.progress.add_resumed(at, len);
        self.segmenter.leave_to(at + len);
        if !self.making.earlier.check {
            return true;
        }
        let segment = self.making.segment;
        let end = at + len;
        let mut at = at;
        while at < end {
            let len = (segment - at % segment).min(end - at);
            let runs = vec![SegmentRun { len, what: RunContent::Data }];
            if !self.queue.add(Segment { at, extents_known: false, check: true, runs }).await {
                return false;
            }
            at += len;
        }
        true
    }

    /// What is known from `at` on: the number of bytes, what they are (`None`: not to be copied),
    /// and whether the source reported it. `ranges`: this one and those that follow.
    async fn look(
        &mut self,
        at: u64,
        most: u64,
        ranges: &[SegmentRange],
    ) -> Result<(u64, Option<RunContent>, bool)> {
        let (most, chosen) = self.choice.look(at, most).await?;
        if !chosen {
            return Ok((most, None, false));
        }
        self.feeds.source.skip_to(at);
        selection::allow(&mut self.feeds.source, &self.choice, ranges);
        let cell = self.making.segment - at % self.making.segment;
        let known = self.look_at_source(cell).await?;
        let len = known.len.min(most);
        // Not all at once, so that queued segments need little memory.
        let some = cell + SEGMENTS_AT_ONCE * self.making.segment;
        let extents_known = known.state.is_some();
        if known.state.unwrap_or(0) & ZERO == 0 {
            let len = len.min(some);
            if !self.making.new {
                return Ok((len, Some(RunContent::Data), extents_known));
            }
            let (len, new) = self.is_clean(at, len, cell).await?;
            return Ok((
                len,
                Some(if new { RunContent::New } else { RunContent::Data }),
                extents_known,
            ));
        }
        let (len, clean) = self.is_clean(at, len, cell).await?;
        let (what, whole) = if clean {
            (RunContent::Clean, self.making.whole.1)
        } else {
            (RunContent::Zero, self.making.whole.0)
        };
        Ok((if whole { len } else { len.min(some) }, Some(what), extents_known))
    }

    /// The next extent of the source; an unknown one of `cell` bytes if lanes have waited too long.
    async fn look_at_source(&mut self, cell: u64) -> Result<ExtentRun> {
        let feed = &mut self.feeds.source;
        let Some(since) = feed.waits_since() else { return feed.front().await };
        let meter = &self.making.progress.meter;
        let begun = match self.blind {
            OverlapProbe::Tried(query, number) if query == since => Some(number),
            _ => None,
        };
        let stopped = || self.queue.is_stopped() || self.making.progress.is_cancelled();
        let answered = async {
            let Some(number) = begun else { return };
            loop {
                // First the lane that takes the segment begins to read it.
                blockhaul_io::sleep(LOOK).await;
                if meter.has_ended(number) || stopped() {
                    return;
                }
            }
        };
        let known = patiently(self.queue, feed, cell, answered).await?;
        if known.state.is_none() && !matches!(self.blind, OverlapProbe::Answered) {
            self.blind = match begun {
                Some(_) => OverlapProbe::Answered,
                None => OverlapProbe::Tried(since, meter.next_to_end()),
            };
        }
        Ok(known)
    }

    /// Whether the target reads as zeroes from `at` on, and for how many bytes that is known.
    async fn is_clean(&mut self, at: u64, len: u64, cell: u64) -> Result<(u64, bool)> {
        if self.making.target_is_zero {
            return Ok((len, true));
        }
        let Some(target) = &mut self.feeds.target else { return Ok((len, false)) };
        let size = self.making.target.as_ref().map_or(0, |target| target.facts().size);
        if at >= size {
            // Nothing there, which counts as zeroes.
            return Ok((len, true));
        }
        target.skip_to(at);
        let known = patiently(self.queue, target, cell, async {}).await?;
        let state = known.state.unwrap_or(0);
        let clean = state & ZERO != 0 && !(self.making.allocated && state & HOLE != 0);
        Ok((len.min(known.len), clean))
    }
}

/// A segmenter with these settings.
fn segmenter(making: &SegmentSettings) -> Segmenter {
    let size = making.source.facts().size;
    Segmenter::new(size, making.segment, making.grain, making.whole)
}

/// The next extent; an unknown one of `cell` bytes if lanes have waited too long, and `allowed` has
/// ended.
async fn patiently(
    queue: &SegmentQueue,
    feed: &mut ExtentFeed,
    cell: u64,
    allowed: impl Future<Output = ()>,
) -> Result<ExtentRun> {
    let Some(since) = feed.waits_since() else { return feed.front().await };
    if feed.is_strict() {
        return feed.front().await;
    }
    let tired = async {
        blockhaul_io::sleep_until(since + PATIENCE).await;
        allowed.await;
        queue.starving().await;
    };
    match first_of(feed.front(), tired).await {
        Some(known) => known,
        None => {
            feed.hurry();
            Ok(ExtentRun { len: cell, state: None })
        }
    }
}

/// The first future's output, or `None` when the second ends before it.
pub(crate) async fn first_of<T>(
    first: impl Future<Output = T>,
    second: impl Future<Output = ()>,
) -> Option<T> {
    let mut first = std::pin::pin!(first);
    let mut second = std::pin::pin!(second);
    poll_fn(|cx| {
        if let Poll::Ready(output) = first.as_mut().poll(cx) {
            return Poll::Ready(Some(output));
        }
        second.as_mut().poll(cx).map(|()| None)
    })
    .await
}
