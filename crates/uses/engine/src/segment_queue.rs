//! The queue of segments between the task that makes them and the lanes that take them.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::{Poll, Waker};

use blockhaul_block::Result;
use blockhaul_io::Ticket;

use crate::lane_slots::LaneSlots;
use crate::ledger::SegmentRange;
use crate::segment::Segment;
use crate::signals::{LaneSignals, WANTED};
use crate::wants::{PendingRanges, meet};

/// Maximum number of queued runs: limits the memory for a disk in a million pieces.
const RUNS_AHEAD: usize = 64 << 10;
/// Maximum number of queued segments.
const SEGMENTS_AHEAD: usize = 4 << 10;

/// The segments of a copy, made by one task and taken by all lanes.
pub(crate) struct SegmentQueue {
    state: Mutex<SegmentQueueState>,
    /// The lanes to notify while a caller waits for a range. `None`: no caller can.
    lanes: Option<Arc<LaneSlots>>,
    /// The number of the newest range request (`want`).
    newest_want: AtomicU64,
}

#[derive(Default)]
struct SegmentQueueState {
    ready: VecDeque<Segment>,
    /// Number of segments at the front that a caller waits for.
    urgent: usize,
    runs: usize,
    /// Segments that no lane takes before [`SegmentQueue::hand_out_last`].
    last: Vec<Segment>,
    /// All segments have been made.
    complete: bool,
    /// No more segments are handed out: an error, or a cancel.
    stopped: bool,
    maker: Option<Waker>,
    takers: Vec<Waker>,
    /// Tasks that wait until no segment is left.
    leavers: Vec<Waker>,
    wants: PendingRanges,
}

impl SegmentQueueState {
    fn exhausted(&self) -> bool {
        self.stopped || (self.complete && self.ready.is_empty())
    }

    /// Takes the tasks to wake after a change.
    fn waiting(&mut self) -> Vec<Waker> {
        let mut waiting = std::mem::take(&mut self.takers);
        if self.exhausted() {
            waiting.append(&mut self.leavers);
        }
        waiting.extend(self.maker.take());
        waiting
    }

    fn take(&mut self) -> Option<Segment> {
        let taken = self.ready.pop_front()?;
        self.runs -= taken.runs.len();
        self.urgent = self.urgent.saturating_sub(1);
        Some(taken)
    }

    /// Moves the wanted segments to the front.
    fn hurry(&mut self, wanted: &[SegmentRange]) {
        let is_wanted =
            |segment: &Segment| wanted.iter().any(|&range| meet(range, segment.range()));
        let queued = self.ready.split_off(self.urgent);
        let (wanted, others): (VecDeque<_>, _) = queued.into_iter().partition(is_wanted);
        self.urgent += wanted.len();
        self.ready.extend(wanted);
        self.ready.extend(others);
    }
}

impl SegmentQueue {
    /// A queue without range requests.
    pub(crate) fn new() -> SegmentQueue {
        SegmentQueue { state: Mutex::default(), lanes: None, newest_want: AtomicU64::new(0) }
    }

    /// A queue with range requests.
    pub(crate) fn with_wants(lanes: Arc<LaneSlots>) -> SegmentQueue {
        SegmentQueue { lanes: Some(lanes), ..SegmentQueue::new() }
    }

    fn lock(&self) -> MutexGuard<'_, SegmentQueueState> {
        self.state.lock().expect("no panic under this lock")
    }

    /// The signals for the lanes that take segments of this queue.
    pub(crate) fn signals(&self) -> Option<&Arc<LaneSignals>> {
        self.lanes.as_ref().map(|lanes| lanes.signals())
    }

    /// The next segment; `None` if no more follow.
    pub(crate) async fn next(&self) -> Option<Segment> {
        poll_fn(|cx| {
            let mut state = self.lock();
            if state.stopped {
                return Poll::Ready(None);
            }
            let taken = state.take();
            if taken.is_none() && !state.complete {
                // The maker may wait for extents, and continue without them.
                let maker = state.maker.take();
                state.takers.push(cx.waker().clone());
                drop(state);
                maker.into_iter().for_each(Waker::wake);
                return Poll::Pending;
            }
            let mut woken: Vec<_> = state.maker.take().into_iter().collect();
            if taken.is_some() && state.exhausted() {
                // The last segment is taken: wake those that wait for the end.
                woken = state.waiting();
            }
            drop(state);
            woken.into_iter().for_each(Waker::wake);
            Poll::Ready(taken)
        })
        .await
    }

    /// Takes a segment that a caller waits for and no lane has taken.
    pub(crate) fn take_urgent(&self) -> Option<Segment> {
        let mut state = self.lock();
        let taken = if state.urgent > 0 { state.take() } else { None };
        let woken = if taken.is_some() { state.waiting() } else { Vec::new() };
        drop(state);
        woken.into_iter().for_each(Waker::wake);
        taken
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

    /// Waits until a lane waits for a segment, or a caller for a range without one.
    pub(crate) async fn starving(&self) {
        poll_fn(|cx| {
            let mut state = self.lock();
            let starving = state.ready.is_empty() && !state.takers.is_empty();
            if state.stopped || starving || state.wants.want_more() {
                return Poll::Ready(());
            }
            state.maker = Some(cx.waker().clone());
            Poll::Pending
        })
        .await;
    }

    /// Hands out no more segments.
    pub(crate) fn stop(&self) {
        self.change(|state| {
            state.stopped = true;
            state.ready.clear();
            (state.runs, state.urgent) = (0, 0);
            state.wants.stop();
        });
        self.signal(false);
    }

    /// Whether the queue was stopped.
    pub(crate) fn is_stopped(&self) -> bool {
        self.lock().stopped
    }

    /// All segments have been made.
    pub(crate) fn complete(&self) {
        self.change(|state| state.complete = true);
    }

    fn change<T>(&self, change: impl FnOnce(&mut SegmentQueueState) -> T) -> T {
        let mut state = self.lock();
        let changed = change(&mut state);
        let waiting = state.waiting();
        drop(state);
        waiting.into_iter().for_each(Waker::wake);
        changed
    }

    /// Adds a segment when there is space; false if the queue was stopped.
    pub(crate) async fn add(&self, segment: Segment) -> bool {
        let room = poll_fn(|cx| {
            let mut state = self.lock();
            if state.stopped {
                return Poll::Ready(false);
            }
            let full = state.runs >= RUNS_AHEAD || state.ready.len() >= SEGMENTS_AHEAD;
            // Segments up to a wanted range are made at once, even if the queue is full.
            if full && !state.ready.is_empty() && !state.wants.want_more() {
                state.maker = Some(cx.waker().clone());
                return Poll::Pending;
            }
            Poll::Ready(true)
        })
        .await;
        if room {
            let range = segment.range();
            self.change(|state| {
                state.runs += segment.runs.len();
                state.ready.push_back(segment);
                if self.lanes.is_some() {
                    state.wants.made(range);
                    let wanted = state.wants.within(range, 0);
                    if !wanted.is_empty() {
                        state.hurry(&wanted);
                    }
                }
            });
            self.signal(false);
        }
        room
    }

    /// Adds a segment that is copied when all others are.
    pub(crate) fn add_last(&self, segment: Segment) {
        let mut state = self.lock();
        state.wants.made(segment.range());
        state.last.push(segment);
    }

    /// Hands out the segments of [`SegmentQueue::add_last`].
    pub(crate) fn hand_out_last(&self) {
        self.change(|state| {
            let last = std::mem::take(&mut state.last);
            state.runs += last.iter().map(|segment| segment.runs.len()).sum::<usize>();
            state.ready.extend(last);
        });
    }

    /// Segments of these ranges will be made.
    pub(crate) fn plan(&self, ranges: &[SegmentRange]) {
        if self.lanes.is_some() {
            self.lock().wants.plan(ranges);
        }
    }

    /// No more segments follow of the range that ends at `end`.
    pub(crate) fn made_to(&self, end: u64) {
        if self.lanes.is_some() {
            self.lock().wants.pass(end);
            self.signal(false);
        }
    }

    /// The segment that starts at `at` is written.
    pub(crate) fn written(&self, at: u64) {
        self.lock().wants.written(at);
        self.signal(false);
    }

    /// Part of a segment is written.
    pub(crate) fn arrived(&self, range: SegmentRange) {
        self.lock().wants.arrived(range);
        self.signal(false);
    }

    /// Copies a range before all others. The ticket resolves when it is written.
    pub(crate) fn want(&self, range: SegmentRange) -> Ticket<Result<()>> {
        let ticket = self.change(|state| {
            let ticket = state.wants.want(range);
            if state.stopped {
                state.wants.stop();
            } else if state.wants.any() {
                state.hurry(&[range]);
            }
            self.newest_want.store(state.wants.newest(), Ordering::SeqCst);
            ticket
        });
        self.signal(true);
        if let Some(lanes) = &self.lanes {
            // A lane that waits for a place may have begun the wanted range.
            lanes.wake();
        }
        ticket
    }

    /// The number of the newest range request (`want`).
    pub(crate) fn newest_want(&self) -> u64 {
        self.newest_want.load(Ordering::SeqCst)
    }

    /// Parts of `range` that are wanted by requests newer than number `since`.
    pub(crate) fn wanted_within(&self, range: SegmentRange, since: u64) -> Vec<SegmentRange> {
        self.lock().wants.within(range, since)
    }

    /// Raises the signal while a caller waits. `more`: there may be a new one.
    fn signal(&self, more: bool) {
        let Some(signals) = self.signals() else { return };
        if more || signals.is(WANTED) {
            let state = self.lock();
            signals.set(WANTED, state.wants.any());
        }
    }
}
