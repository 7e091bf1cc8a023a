//! Tracks which ranges of a plan callers wait for, and which parts of the plan are not written yet.

use std::collections::BTreeMap;

use blockhaul_block::{Error, Kind, Result};
use blockhaul_io::{Completer, Ticket, ticket};

use crate::ledger::SegmentRange;

/// What is not written yet, and which callers wait for a part of it.
#[derive(Default)]
pub(crate) struct PendingRanges {
    /// Ranges of the plan of which no segments have been made: end by start.
    unmade: BTreeMap<u64, u64>,
    /// Segments that are made and not written: end by start.
    unwritten: BTreeMap<u64, u64>,
    waiting: Vec<RangeWaiter>,
    /// The number of the newest waiting caller, from 1.
    newest: u64,
}

struct RangeWaiter {
    number: u64,
    /// The parts of the range that are not written yet.
    missing: Vec<SegmentRange>,
    arrived: Completer<Result<()>>,
}

impl PendingRanges {
    /// Adds ranges of which segments will be made.
    pub(crate) fn plan(&mut self, ranges: &[SegmentRange]) {
        self.unmade.extend(ranges.iter().copied());
    }

    /// A segment has been made; everything of the plan before it has been, too.
    pub(crate) fn made(&mut self, (at, end): SegmentRange) {
        self.unwritten.insert(at, end);
        self.pass(end);
    }

    /// No more segments are made before `end` of the range that `end` is in or ends.
    pub(crate) fn pass(&mut self, end: u64) {
        let Some((&at, &range_end)) = self.unmade.range(..end).next_back() else { return };
        if range_end < end {
            // A later range, not made yet: ours was made completely.
            return;
        }
        self.unmade.remove(&at);
        if range_end > end {
            self.unmade.insert(end, range_end);
        }
        self.look_again();
    }

    /// The segment at `at` is written.
    pub(crate) fn written(&mut self, at: u64) {
        if let Some(end) = self.unwritten.remove(&at) {
            self.arrived((at, end));
        }
    }

    /// A range is written.
    pub(crate) fn arrived(&mut self, range: SegmentRange) {
        if self.waiting.is_empty() {
            return;
        }
        for want in &mut self.waiting {
            want.missing = without(&want.missing, range);
        }
        self.answer();
    }

    /// Waits for a range. Parts that are not in the plan, or already copied, are not waited for.
    pub(crate) fn want(&mut self, range: SegmentRange) -> Ticket<Result<()>> {
        let (arrived, ticket) = ticket();
        self.newest += 1;
        let missing = self.missing(&[range]);
        self.waiting.push(RangeWaiter { number: self.newest, missing, arrived });
        self.answer();
        ticket
    }

    /// Whether a caller waits.
    pub(crate) fn any(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// The number of the newest waiting caller.
    pub(crate) fn newest(&self) -> u64 {
        self.newest
    }

    /// Whether a caller waits for segments that are not made yet.
    pub(crate) fn want_more(&self) -> bool {
        let meets = |want: &RangeWaiter| {
            want.missing.iter().any(|&range| in_common(&self.unmade, range).next().is_some())
        };
        self.waiting.iter().any(meets)
    }

    /// Parts of `range` wanted by callers newer than number `since`.
    pub(crate) fn within(&self, range: SegmentRange, since: u64) -> Vec<SegmentRange> {
        let new = self.waiting.iter().filter(|want| want.number > since);
        new.flat_map(|want| &want.missing).filter_map(|&part| common(part, range)).collect()
    }

    /// Nothing more is copied: fails all waiting callers.
    pub(crate) fn stop(&mut self) {
        for want in std::mem::take(&mut self.waiting) {
            let text = "the copy ended before this range was copied";
            want.arrived.complete(Err(Error::new(Kind::ShuttingDown, text)));
        }
    }

    /// Updates what is missing after bytes were skipped.
    fn look_again(&mut self) {
        for index in 0..self.waiting.len() {
            let missing = self.missing(&self.waiting[index].missing);
            self.waiting[index].missing = missing;
        }
        self.answer();
    }

    /// The parts of these ranges that are not written yet.
    fn missing(&self, ranges: &[SegmentRange]) -> Vec<SegmentRange> {
        let mut missing = Vec::new();
        for &range in ranges {
            missing.extend(in_common(&self.unmade, range));
            missing.extend(in_common(&self.unwritten, range));
        }
        missing.sort_unstable();
        missing
    }

    /// Resolves the tickets of callers whose range is written.
    fn answer(&mut self) {
        let (waiting, here) = std::mem::take(&mut self.waiting)
            .into_iter()
            .filter(|want| !want.arrived.is_abandoned())
            .partition(|want: &RangeWaiter| !want.missing.is_empty());
        self.waiting = waiting;
        let here: Vec<RangeWaiter> = here;
        here.into_iter().for_each(|want| want.arrived.complete(Ok(())));
    }
}

/// Whether two ranges overlap.
pub(crate) fn meet(one: SegmentRange, other: SegmentRange) -> bool {
    common(one, other).is_some()
}

/// The overlaps of `range` with disjoint ranges, the last one first.
fn in_common(
    ranges: &BTreeMap<u64, u64>,
    range: SegmentRange,
) -> impl Iterator<Item = SegmentRange> {
    let from_last = ranges.range(..range.1).rev();
    from_last
        .take_while(move |&(_, &end)| end > range.0)
        .filter_map(move |(&at, &end)| common((at, end), range))
}

/// The overlap of two ranges.
pub(crate) fn common(one: SegmentRange, other: SegmentRange) -> Option<SegmentRange> {
    let start = one.0.max(other.0);
    let end = one.1.min(other.1);
    (start < end).then_some((start, end))
}

/// These ranges without `taken`.
fn without(ranges: &[SegmentRange], taken: SegmentRange) -> Vec<SegmentRange> {
    let mut left = Vec::new();
    for &(start, end) in ranges {
        left.extend((start < taken.0).then_some((start, end.min(taken.0))));
        left.extend((end > taken.1).then_some((start.max(taken.1), end)));
    }
    left
}

#[cfg(test)]
mod tests {
    use std::pin::pin;
    use std::task::{Context, Poll, Waker};

    use super::*;

    fn is_here(ticket: &mut Ticket<Result<()>>) -> bool {
        let cx = &mut Context::from_waker(Waker::noop());
        matches!(pin!(ticket).poll(cx), Poll::Ready(Ok(Ok(()))))
    }

    #[test]
    fn a_range_is_there_when_all_of_it_is_that_the_plan_has() {
        let mut wants = PendingRanges::default();
        wants.plan(&[(0, 100), (200, 300)]);
        assert!(is_here(&mut wants.want((100, 200))), "the plan does not have it");
        let mut want = wants.want((50, 250));
        assert!(wants.want_more());
        wants.made((0, 60));
        // 60 to 80 is skipped.
        wants.made((80, 100));
        wants.written(0);
        wants.arrived((80, 95));
        assert!(!is_here(&mut want));
        assert_eq!(wants.within((0, 300), 0), [(95, 100), (200, 250)]);
        assert_eq!(wants.within((0, 300), wants.newest()), []);
        wants.written(80);
        wants.pass(220);
        assert!(!is_here(&mut want));
        wants.made((220, 260));
        assert!(!wants.want_more());
        wants.written(220);
        assert!(is_here(&mut want));
        assert!(!wants.any());
        // A later addition may lie before an earlier one.
        wants.plan(&[(100, 200), (400, 500)]);
        wants.made((400, 500));
        wants.pass(500);
        let mut want = wants.want((150, 160));
        assert!(!is_here(&mut want));
    }

    #[test]
    fn who_waits_in_vain_is_told() {
        let mut wants = PendingRanges::default();
        wants.plan(&[(0, 10)]);
        let mut want = wants.want((0, 1));
        drop(wants.want((5, 6)));
        wants.stop();
        let cx = &mut Context::from_waker(Waker::noop());
        assert!(matches!(pin!(&mut want).poll(cx), Poll::Ready(Ok(Err(_)))));
    }
}
