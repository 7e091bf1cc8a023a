//! The segments that a lane has begun: what is left to start, and which of their requests a caller
//! waits for.

use std::cell::{Cell, RefCell};
use std::rc::{Rc, Weak};
use std::sync::Arc;

use crate::ledger::{SegmentRange, SegmentStart};
use crate::reading::{SegmentScan, SourceScan};
use crate::segment::{RunContent, Segment, SegmentRun};
use crate::segment_queue::SegmentQueue;
use crate::shared::EngineState;
use crate::wants::common;

/// A part of a segment that takes one route.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct SegmentPiece {
    pub(super) at: u64,
    pub(super) end: u64,
    pub(super) what: RunContent,
}

/// What comes next in a segment.
pub(super) enum NextStep {
    Copy(SegmentPiece),
    /// Everything that a caller waits for has been started.
    Arrival(Rc<RangeCompletion>),
    /// Everything has been started.
    End,
}

enum SegmentStep {
    Copy(SegmentPiece),
    Arrival(Rc<RangeCompletion>),
}

/// A segment whose requests are being started.
pub(super) struct OpenSegment {
    pub(super) home: SegmentStart,
    end: u64,
    /// It is read only.
    pub(super) reading: Option<Rc<SegmentScan>>,
    /// The source reported its extents.
    pub(super) extents_known: bool,
    /// Number of requests of the segment so far; ranges copied by the kernel count like requests.
    pub(super) requests: Cell<u64>,
    /// Whether zeroes were found in it, and the change counter that this result belongs to.
    pub(super) zeroes: Cell<(u64, bool)>,
    /// Remaining steps, the next one last.
    steps: RefCell<Vec<SegmentStep>>,
    /// Number of arrivals among the steps.
    urgent: Cell<usize>,
    /// The flight that requests starting now belong to.
    flight: RefCell<Rc<RequestBatch>>,
    /// Earlier flights, as long as they have requests in flight.
    flights: RefCell<Vec<Weak<RequestBatch>>>,
}

impl OpenSegment {
    pub(super) fn new(
        segment: Segment,
        queue: &Arc<SegmentQueue>,
        shared: &Arc<EngineState>,
        reading: Option<Arc<SourceScan>>,
    ) -> OpenSegment {
        let (at, end) = segment.range();
        let mut start = end;
        let step = |run: &SegmentRun| {
            let end = start;
            start -= run.len;
            step_of(start, end, run.what)
        };
        let steps = segment.runs.iter().rev().map(step).collect();
        let written = SegmentCompletion { at, queue: queue.clone(), shared: shared.clone() };
        let flight = RequestBatch { arrivals: RefCell::default(), segment: Rc::new(written) };
        OpenSegment {
            home: SegmentStart::at(at),
            end,
            reading: reading.map(|reading| Rc::new(SegmentScan::new(reading, (at, end)))),
            extents_known: segment.extents_known,
            requests: Cell::new(0),
            // Looked up before the first request.
            zeroes: Cell::new((u64::MAX, false)),
            steps: RefCell::new(steps),
            urgent: Cell::new(0),
            flight: RefCell::new(Rc::new(flight)),
            flights: RefCell::default(),
        }
    }

    /// Start and end.
    pub(super) fn range(&self) -> SegmentRange {
        (self.home.offset(), self.end)
    }

    /// The flight that requests starting now belong to.
    pub(super) fn flight(&self) -> Rc<RequestBatch> {
        self.flight.borrow().clone()
    }

    /// Whether anything that a caller waits for is left to start.
    pub(super) fn is_urgent(&self) -> bool {
        self.urgent.get() > 0
    }

    /// The next step. A piece remains until [`OpenSegment::started_to`].
    pub(super) fn next(&self) -> NextStep {
        let mut steps = self.steps.borrow_mut();
        if let Some(SegmentStep::Copy(piece)) = steps.last() {
            return NextStep::Copy(*piece);
        }
        match steps.pop() {
            Some(SegmentStep::Arrival(arrival)) => {
                self.urgent.set(self.urgent.get() - 1);
                NextStep::Arrival(arrival)
            }
            _ => NextStep::End,
        }
    }

    /// The next piece has been started up to `at`.
    pub(super) fn started_to(&self, at: u64) {
        let mut steps = self.steps.borrow_mut();
        if let Some(SegmentStep::Copy(piece)) = steps.last_mut() {
            piece.at = at;
            if at >= piece.end {
                steps.pop();
            }
        }
    }

    /// The kernel has copied as much as this many requests would.
    pub(super) fn count_moved(&self, requests: u64) {
        self.requests.set(self.requests.get() + requests);
    }

    /// The data of the segment, in order.
    pub(super) fn data(&self) -> Vec<SegmentRange> {
        let steps = self.steps.borrow();
        let data = |step: &SegmentStep| match step {
            SegmentStep::Copy(piece) if piece.what.is_data() => Some((piece.at, piece.end)),
            _ => None,
        };
        steps.iter().rev().filter_map(data).collect()
    }

    /// Removes ranges that are done, given in order. For a segment without started requests.
    pub(super) fn leave_out(&self, done: &[SegmentRange]) {
        if done.is_empty() {
            return;
        }
        let mut done = done.iter().peekable();
        let mut left = Vec::new();
        let mut steps = self.steps.borrow_mut();
        while let Some(step) = steps.pop() {
            let SegmentStep::Copy(SegmentPiece { mut at, end, what }) = step else {
                left.push(step);
                continue;
            };
            while let Some(&&(from, to)) = done.peek()
                && from < end
            {
                if at < from {
                    left.push(step_of(at, from, what));
                }
                at = to.min(end);
                if to > end {
                    break;
                }
                done.next();
            }
            if at < end {
                left.push(step_of(at, end, what));
            }
        }
        left.reverse();
        *steps = left;
    }

    /// Moves a range before everything that no caller waits for, and marks it as wanted. It is
    /// widened to multiples of the target's block size, so that no two writes share a block.
    pub(super) fn hurry(
        &self,
        wanted: SegmentRange,
        queue: &Arc<SegmentQueue>,
        shared: &Arc<EngineState>,
    ) {
        let grain = shared.resolved.grain;
        let start = (wanted.0 - wanted.0 % grain).max(self.home.offset());
        let end = wanted.1.checked_next_multiple_of(grain).unwrap_or(self.end).min(self.end);
        let mut steps = self.steps.borrow_mut();
        // Other wanted ranges go first, and stay: they may be part of this one.
        let is_arrival = |step: &SegmentStep| matches!(step, SegmentStep::Arrival(_));
        let last = steps.iter().position(is_arrival).unwrap_or(steps.len());
        let first = steps.split_off(last);
        let mut urgent = Vec::new();
        let mut others = Vec::new();
        for step in steps.drain(..) {
            let SegmentStep::Copy(SegmentPiece { at, end: piece_end, what }) = step else {
                continue;
            };
            let Some((from, to)) = common((at, piece_end), (start, end)) else {
                others.push(step);
                continue;
            };
            if to < piece_end {
                others.push(step_of(to, piece_end, what));
            }
            urgent.push(step_of(from, to, what));
            if at < from {
                others.push(step_of(at, from, what));
            }
        }
        let queue = queue.clone();
        let shared = shared.clone();
        let arrival = RangeCompletion { range: (start, end), queue, shared };
        steps.append(&mut others);
        steps.push(SegmentStep::Arrival(Rc::new(arrival)));
        steps.append(&mut urgent);
        steps.extend(first);
        self.urgent.set(self.urgent.get() + 1);
    }

    /// All requests of this arrival have been started: it arrives when those in flight have
    /// completed.
    pub(super) fn end_flight(&self, arrival: &Rc<RangeCompletion>) {
        let segment = self.flight.borrow().segment.clone();
        let next = Rc::new(RequestBatch { arrivals: RefCell::default(), segment });
        let ended = self.flight.replace(next);
        let mut flights = self.flights.borrow_mut();
        flights.push(Rc::downgrade(&ended));
        flights.retain(|flight| match flight.upgrade() {
            Some(flight) => {
                flight.arrivals.borrow_mut().push(arrival.clone());
                true
            }
            None => false,
        });
    }
}

fn step_of(at: u64, end: u64, what: RunContent) -> SegmentStep {
    SegmentStep::Copy(SegmentPiece { at, end, what })
}

/// Requests of a segment that are in flight together; each holds it until it has completed.
pub(super) struct RequestBatch {
    /// The arrivals that these requests complete.
    arrivals: RefCell<Vec<Rc<RangeCompletion>>>,
    segment: Rc<SegmentCompletion>,
}

/// A segment that is written when the last request drops this.
struct SegmentCompletion {
    at: u64,
    queue: Arc<SegmentQueue>,
    shared: Arc<EngineState>,
}

impl Drop for SegmentCompletion {
    fn drop(&mut self) {
        // Otherwise requests may have ended without doing anything.
        if !self.shared.stopped() {
            self.queue.written(self.at);
        }
    }
}

/// A range that is written when the last reference drops this.
pub(super) struct RangeCompletion {
    range: SegmentRange,
    queue: Arc<SegmentQueue>,
    shared: Arc<EngineState>,
}

impl Drop for RangeCompletion {
    fn drop(&mut self) {
        if !self.shared.stopped() {
            self.queue.arrived(self.range);
        }
    }
}
