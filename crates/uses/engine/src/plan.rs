//! What to copy: segments with what is known of them, made ahead of the lanes that take them.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::rc::Rc;
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::{Poll, Waker};
use std::time::Duration;

use blockhaul_block::{HOLE, Result, ZERO};

use crate::extent_feed::{ExtentFeed, Known};
use crate::handle::Handle;
use crate::journal::Recorded;
use crate::progress::Progress;
use crate::segment::{Run, Segment, What};
use crate::segmenter::Segmenter;
use crate::selection::{Choice, Selection};

/// Runs that may be waiting for lanes: bounds the memory of a disk in a million pieces.
const RUNS_AHEAD: usize = 64 << 10;
/// Segments that may be waiting for lanes.
const SEGMENTS_AHEAD: usize = 4 << 10;
/// Segments that are cut from one run at a time, for the same reason.
const SEGMENTS_AT_ONCE: u64 = 64;
/// Time for which lanes that have nothing to do wait for extents before they copy without.
const PATIENCE: Duration = Duration::from_millis(250);

/// What earlier runs have done.
#[derive(Debug, Default)]
pub(crate) struct Earlier {
    pub(crate) recorded: Recorded,
    /// Look again at what is recorded instead of leaving it out.
    pub(crate) check: bool,
}

/// The segments of a copy, made by one task and taken by all lanes.
pub(crate) struct Plan {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    ready: VecDeque<Segment>,
    runs: usize,
    /// All segments have been made.
    complete: bool,
    /// Nothing more is to be handed out: an error, or a cancel.
    stopped: bool,
    maker: Option<Waker>,
    takers: Vec<Waker>,
    /// Those who wait until nothing is left.
    leavers: Vec<Waker>,
}

impl State {
    fn exhausted(&self) -> bool {
        self.stopped || (self.complete && self.ready.is_empty())
    }

    /// Those to be woken after a change.
    fn waiting(&mut self) -> Vec<Waker> {
        let mut waiting = std::mem::take(&mut self.takers);
        if self.exhausted() {
            waiting.append(&mut self.leavers);
        }
        waiting.extend(self.maker.take());
        waiting
    }
}

impl Plan {
    pub(crate) fn new() -> Plan {
        Plan { state: Mutex::default() }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no panic under this lock")
    }

    /// The next segment; `None` when there are no more.
    pub(crate) async fn next(&self) -> Option<Segment> {
        poll_fn(|cx| {
            let mut state = self.lock();
            if state.stopped {
                return Poll::Ready(None);
            }
            let taken = state.ready.pop_front();
            if taken.is_none() && !state.complete {
                // The maker may know no more, and go on without.
                let maker = state.maker.take();
                state.takers.push(cx.waker().clone());
                drop(state);
                maker.into_iter().for_each(Waker::wake);
                return Poll::Pending;
            }
            let mut woken: Vec<_> = state.maker.take().into_iter().collect();
            if let Some(segment) = &taken {
                state.runs -= segment.runs.len();
                if state.exhausted() {
                    // The last one is gone: whoever waits for the end may know.
                    woken = state.waiting();
                }
            }
            drop(state);
            woken.into_iter().for_each(Waker::wake);
            Poll::Ready(taken)
        })
        .await
    }

    /// Waits until no segment is left to be taken.
    pub(crate) async fn exhausted(&self) {
        poll_fn(|cx| {
            let mut state = self.lock();
            if state.exhausted() {
                return Poll::Ready(());
            }
            state.leavers.push(cx.waker().clone());
            Poll::Pending
        })
        .await;
    }

    /// Waits until somebody waits for a segment.
    async fn wanted(&self) {
        poll_fn(|cx| {
            let mut state = self.lock();
            if state.stopped || (state.ready.is_empty() && !state.takers.is_empty()) {
                return Poll::Ready(());
            }
            state.maker = Some(cx.waker().clone());
            Poll::Pending
        })
        .await;
    }

    /// Hands out nothing more.
    pub(crate) fn stop(&self) {
        self.change(|state| {
            state.stopped = true;
            state.ready.clear();
            state.runs = 0;
        });
    }

    fn change(&self, change: impl FnOnce(&mut State)) {
        let mut state = self.lock();
        change(&mut state);
        let waiting = state.waiting();
        drop(state);
        waiting.into_iter().for_each(Waker::wake);
    }

    /// Adds a segment when there is room; false when the plan was stopped.
    async fn add(&self, segment: Segment) -> bool {
        let room = poll_fn(|cx| {
            let mut state = self.lock();
            if state.stopped {
                return Poll::Ready(false);
            }
            let full = state.runs >= RUNS_AHEAD || state.ready.len() >= SEGMENTS_AHEAD;
            if full && !state.ready.is_empty() {
                state.maker = Some(cx.waker().clone());
                return Poll::Pending;
            }
            Poll::Ready(true)
        })
        .await;
        if room {
            self.change(|state| {
                state.runs += segment.runs.len();
                state.ready.push_back(segment);
            });
        }
        room
    }

    /// Makes the segments. An error means that what is to be copied cannot be found out.
    pub(crate) async fn make(self: Arc<Plan>, making: Making) -> Result<()> {
        let made = match Maker::new(&self, making) {
            Ok(maker) => maker.make().await,
            Err(error) => Err(error),
        };
        match &made {
            // Cancelled before the end: lanes get what is there and stop by themselves.
            Ok(()) => self.change(|state| state.complete = true),
            Err(_) => self.stop(),
        }
        made
    }
}

/// What a plan is made of.
pub(crate) struct Making {
    pub(crate) source: Rc<Handle>,
    /// Asked what reads as zeroes already, if it may tell.
    pub(crate) target: Option<Rc<Handle>>,
    /// All of it does.
    pub(crate) target_is_zero: bool,
    /// Zeroes on the target must have storage.
    pub(crate) allocated: bool,
    /// Bytes of a segment.
    pub(crate) segment: u64,
    /// Runs of zeroes are cut at multiples of this.
    pub(crate) grain: u64,
    /// Ask for extents; when they cannot be had, that is an error.
    pub(crate) extents: bool,
    pub(crate) strict: bool,
    /// Tell [`What::New`] from other data.
    pub(crate) new: bool,
    /// Hand out whole what is zero, and what is zero on both sides.
    pub(crate) whole: (bool, bool),
    pub(crate) selection: Selection,
    pub(crate) earlier: Earlier,
    pub(crate) progress: Arc<Progress>,
}

impl Making {
    /// All of a device, in segments of this size.
    pub(crate) fn of(source: Rc<Handle>, segment: u64, progress: &Arc<Progress>) -> Making {
        let selection = Selection::all(source.facts().size);
        Making {
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
            earlier: Earlier::default(),
            progress: progress.clone(),
        }
    }
}

struct Maker<'a> {
    plan: &'a Plan,
    making: Making,
    segmenter: Segmenter,
    source: ExtentFeed,
    target: Option<ExtentFeed>,
    choice: Choice,
}

impl Maker<'_> {
    fn new(plan: &Plan, making: Making) -> Result<Maker<'_>> {
        let size = making.source.facts().size;
        let (from, to) = making.selection.bounds();
        let feed = |end: &Rc<Handle>| {
            let to = to.min(end.facts().size);
            let feed = ExtentFeed::allocation(end.clone(), making.extents, from.min(to), to);
            if making.strict { feed.or_fail() } else { feed }
        };
        let source = feed(&making.source);
        let target = match &making.target {
            // Where everything is data, it is of no use.
            Some(target) if !making.target_is_zero && (source.asks() || making.strict) => {
                Some(feed(target))
            }
            _ => None,
        };
        let choice = making.selection.choice(&making.source)?;
        let segmenter = Segmenter::new(size, making.segment, making.grain, making.whole);
        Ok(Maker { plan, making, segmenter, source, target, choice })
    }

    async fn make(mut self) -> Result<()> {
        let segment = self.making.segment;
        for (start, end) in self.making.selection.ranges().to_vec() {
            self.segmenter.leave_to(start);
            let mut at = start;
            while at < end && !self.making.progress.is_cancelled() {
                let recorded = &self.making.earlier.recorded;
                let mut len = end - at;
                if let Some(reach) = recorded.reach(at / segment) {
                    // What is left out need not be known.
                    len = len.min(reach.saturating_mul(segment) - at);
                    if !self.recorded(at, len).await {
                        return Ok(());
                    }
                } else {
                    if let Some(next) = recorded.next(at / segment) {
                        len = len.min(next.saturating_mul(segment) - at);
                    }
                    let (known, what, extents_known) = self.look(at, len).await?;
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
                while let Some(piece) = self.segmenter.take() {
                    if !self.plan.add(piece).await {
                        return Ok(());
                    }
                }
            }
        }
        self.segmenter.finish();
        while let Some(piece) = self.segmenter.take() {
            if !self.plan.add(piece).await {
                return Ok(());
            }
        }
        Ok(())
    }

    /// What an earlier run has copied; false when the plan was stopped.
    async fn recorded(&mut self, at: u64, len: u64) -> bool {
        self.making.progress.add_resumed(len);
        self.segmenter.leave_to(at + len);
        if !self.making.earlier.check {
            return true;
        }
        let (segment, end) = (self.making.segment, at + len);
        let mut at = at;
        while at < end {
            let len = (segment - at % segment).min(end - at);
            let runs = vec![Run { len, what: What::Data }];
            if !self.plan.add(Segment { at, extents_known: false, check: true, runs }).await {
                return false;
            }
            at += len;
        }
        true
    }

    /// What is known from `at` on: of how many bytes, what they are (`None`: not to be copied), and
    /// whether the source has told.
    async fn look(&mut self, at: u64, most: u64) -> Result<(u64, Option<What>, bool)> {
        let (most, chosen) = self.choice.look(at, most).await?;
        if !chosen {
            return Ok((most, None, false));
        }
        self.source.skip_to(at);
        let cell = self.making.segment - at % self.making.segment;
        let known = patiently(self.plan, &mut self.source, cell).await?;
        let len = known.len.min(most);
        // Not all at once, so that segments that wait need little memory.
        let some = cell + SEGMENTS_AT_ONCE * self.making.segment;
        let extents_known = known.state.is_some();
        if known.state.unwrap_or(0) & ZERO == 0 {
            let len = len.min(some);
            if !self.making.new {
                return Ok((len, Some(What::Data), extents_known));
            }
            let (len, new) = self.is_clean(at, len, cell).await?;
            return Ok((len, Some(if new { What::New } else { What::Data }), extents_known));
        }
        let (len, clean) = self.is_clean(at, len, cell).await?;
        let (what, whole) = match clean {
            true => (What::Clean, self.making.whole.1),
            false => (What::Zero, self.making.whole.0),
        };
        Ok((if whole { len } else { len.min(some) }, Some(what), extents_known))
    }

    /// Whether the target reads as zeroes from `at` on, and for how many bytes that is known.
    async fn is_clean(&mut self, at: u64, len: u64, cell: u64) -> Result<(u64, bool)> {
        if self.making.target_is_zero {
            return Ok((len, true));
        }
        let Some(target) = &mut self.target else { return Ok((len, false)) };
        let size = self.making.target.as_ref().map_or(0, |target| target.facts().size);
        if at >= size {
            // Nothing, which is as good as zeroes.
            return Ok((len, true));
        }
        target.skip_to(at);
        let known = patiently(self.plan, target, cell).await?;
        let state = known.state.unwrap_or(0);
        let clean = state & ZERO != 0 && !(self.making.allocated && state & HOLE != 0);
        Ok((len.min(known.len), clean))
    }
}

/// What is known next; nothing, of a segment, when lanes have waited for it for too long.
async fn patiently(plan: &Plan, feed: &mut ExtentFeed, cell: u64) -> Result<Known> {
    let Some(since) = feed.waits_since() else { return feed.front().await };
    if feed.is_strict() {
        return feed.front().await;
    }
    let tired = async {
        blockhaul_io::sleep_until(since + PATIENCE).await;
        plan.wanted().await;
    };
    match first_of(feed.front(), tired).await {
        Some(known) => known,
        None => {
            feed.hurry();
            Ok(Known { len: cell, state: None })
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
