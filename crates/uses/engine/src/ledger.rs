//! Tracks how durable each segment is that a lane has written.
//!
//! A segment is *open* while its requests are in flight, *finished* when all have completed on one
//! connection, and *safe* after a flush on that connection. When the connection is lost, its server
//! may have lost what was not safe, and may still carry out requests without a reply: those
//! segments are *suspect* and must be rechecked. When a flush of the target fails, on any
//! connection, everything that is not safe is suspect.
//!
//! This includes segments without a write because the target reads as zeroes there: an earlier run
//! may have written those zeroes without a flush.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// A segment: its start and end.
pub(crate) type SegmentRange = (u64, u64);

/// The start of a segment, which identifies it in the ledger; not the offset of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SegmentStart(u64);

impl SegmentStart {
    /// The home of the segment that starts at this offset.
    pub(crate) fn at(start: u64) -> SegmentStart {
        SegmentStart(start)
    }

    /// The offset at which the segment starts.
    pub(crate) fn offset(self) -> u64 {
        self.0
    }
}

/// A segment to recheck.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SuspectSegment {
    pub(crate) range: SegmentRange,
    /// Reading it back is not enough: it may be readable but not durable.
    pub(crate) again: bool,
}

/// The segments of one lane.
#[derive(Debug, Default)]
pub(crate) struct Ledger {
    open: BTreeMap<u64, LedgerEntry>,
    finished: Vec<SegmentRange>,
    /// Starts of the segments that were written with content.
    content: BTreeSet<u64>,
    /// Filled only if a new connection may show another disk.
    safe: Vec<SegmentRange>,
    keep_safe: bool,
    /// Whether finished or suspect segments are ever queried.
    used: bool,
    suspect: VecDeque<SuspectSegment>,
    /// Generation of the target's handle that wrote everything open or finished.
    generation: u64,
    /// Number of failed flushes before everything open or finished was begun.
    failures: u64,
    /// Number of runs begun; after the first, ranges may be listed more than once.
    runs: u32,
}

#[derive(Debug)]
struct LedgerEntry {
    end: u64,
    /// Requests in flight.
    left: usize,
    /// All requests have been started.
    complete: bool,
    content: bool,
    tainted: Option<bool>,
}

impl Ledger {
    /// A ledger. `used`: finished or suspect segments will be queried. `keep_safe`: after a lost
    /// connection, flushed segments are suspect as well.
    pub(crate) fn new(used: bool, keep_safe: bool) -> Ledger {
        Ledger { used, keep_safe, ..Ledger::default() }
    }

    /// Another run begins, in segments of `segment` bytes. It may write parts of what an earlier
    /// run zeroed in one piece, which must then not be zeroed again as a whole.
    pub(crate) fn begin_run(&mut self, segment: u64) {
        self.runs += 1;
        if self.runs == 1 {
            return;
        }
        self.finished = self.finished.iter().flat_map(|&range| in_cells(range, segment)).collect();
        self.safe = self.safe.iter().flat_map(|&range| in_cells(range, segment)).collect();
        let cut = |suspect: &SuspectSegment| {
            let again = suspect.again;
            in_cells(suspect.range, segment).map(move |range| SuspectSegment { range, again })
        };
        self.suspect = self.suspect.iter().flat_map(cut).collect();
    }

    /// Joins suspect ranges that overlap, as those of several runs may, so that each is checked
    /// once.
    pub(crate) fn join_suspects(&mut self) {
        if self.runs < 2 {
            return;
        }
        let mut suspects: Vec<_> = std::mem::take(&mut self.suspect).into();
        suspects.sort_unstable_by_key(|suspect| suspect.range);
        for suspect in suspects {
            match self.suspect.back_mut() {
                Some(last) if suspect.range.0 < last.range.1 => {
                    last.range.1 = last.range.1.max(suspect.range.1);
                    last.again |= suspect.again;
                }
                _ => self.suspect.push_back(suspect),
            }
        }
    }

    /// Starts a segment.
    pub(crate) fn begin(&mut self, range: SegmentRange) {
        let (at, end) = range;
        if !self.used {
            return;
        }
        let complete = false;
        let content = false;
        let tainted = None;
        self.open.insert(at, LedgerEntry { end, left: 0, complete, content, tainted });
    }

    /// A request of the segment at `home` starts.
    pub(crate) fn request(&mut self, home: SegmentStart) {
        if let Some(open) = self.open.get_mut(&home.0) {
            open.left += 1;
        }
    }

    /// Notes that data other than zeroes is about to be written to the segment at `home`.
    pub(crate) fn wrote_content(&mut self, home: SegmentStart) {
        if let Some(open) = self.open.get_mut(&home.0) {
            open.content = true;
        }
    }

    /// Whether the finished segment at `home` was written with content; forgets it.
    pub(crate) fn take_content(&mut self, home: SegmentStart) -> bool {
        self.content.remove(&home.0)
    }

    /// Gives up on the segment at `home`: it is never finished.
    pub(crate) fn abandon(&mut self, home: SegmentStart) {
        self.open.remove(&home.0);
    }

    /// A request of the segment at `home` has completed; true if that finishes the segment.
    pub(crate) fn completed(&mut self, home: SegmentStart) -> bool {
        if let Some(open) = self.open.get_mut(&home.0) {
            open.left -= 1;
        }
        self.settle(home)
    }

    /// No more requests follow for the segment at `home`; true if that finishes it.
    pub(crate) fn complete(&mut self, home: SegmentStart) -> bool {
        if let Some(open) = self.open.get_mut(&home.0) {
            open.complete = true;
        }
        self.settle(home)
    }

    fn settle(&mut self, home: SegmentStart) -> bool {
        let done = self.open.get(&home.0).is_some_and(|open| open.complete && open.left == 0);
        if !done {
            return false;
        }
        if let Some(open) = self.open.remove(&home.0) {
            let range = (home.0, open.end);
            if open.content {
                self.content.insert(home.0);
            }
            match open.tainted {
                None => self.finished.push(range),
                Some(again) => self.suspect.push_back(SuspectSegment { range, again }),
            }
        }
        true
    }

    /// The target's handle is now `generation`: everything read or written over an older one that
    /// is not safe is suspect. `again`: reading it back is not enough.
    pub(crate) fn connected(&mut self, generation: u64, again: bool) {
        if generation == self.generation {
            return;
        }
        self.generation = generation;
        self.doubt_unsafe(again);
        let safe = std::mem::take(&mut self.safe);
        self.doubt(safe, again);
    }

    /// The number of failed flushes of the target is now `failures`: if it has grown, everything
    /// that is not safe is suspect, and reading it back is not enough. A system that could not
    /// write data back may drop it and still answer reads from memory.
    pub(crate) fn flushes_failed(&mut self, failures: u64) {
        if failures == self.failures {
            return;
        }
        self.failures = failures;
        self.doubt_unsafe(true);
        for suspect in &mut self.suspect {
            suspect.again = true;
        }
    }

    /// Makes everything suspect that is open or finished.
    fn doubt_unsafe(&mut self, again: bool) {
        for open in self.open.values_mut() {
            open.tainted = Some(open.tainted.unwrap_or(false) || again);
        }
        let finished = std::mem::take(&mut self.finished);
        self.doubt(finished, again);
    }

    /// Makes segments suspect.
    pub(crate) fn doubt(&mut self, ranges: Vec<SegmentRange>, again: bool) {
        self.suspect.extend(ranges.into_iter().map(|range| SuspectSegment { range, again }));
    }

    /// Takes the segments that a flush submitted now makes safe.
    pub(crate) fn take_finished(&mut self) -> Vec<SegmentRange> {
        std::mem::take(&mut self.finished)
    }

    /// Number of failed flushes last reported to the ledger.
    pub(crate) fn failures(&self) -> u64 {
        self.failures
    }

    /// Generation of the target's handle that writes now.
    pub(crate) fn generation(&self) -> u64 {
        self.generation
    }

    /// All connections show one disk: what is safe remains safe.
    pub(crate) fn forget_safe(&mut self) {
        self.keep_safe = false;
        self.safe.clear();
    }

    // nbd: flush.waits-for-replies
    /// A flush over the handle `generation` has made these safe, which is returned; unless that is
    /// not the current handle, and the current one may show another disk.
    pub(crate) fn flushed(&mut self, ranges: &[SegmentRange], generation: u64) -> bool {
        match (self.keep_safe, generation == self.generation) {
            (false, _) => {}
            (true, true) => self.safe.extend(ranges),
            (true, false) => self.doubt(ranges.to_vec(), true),
        }
        !self.keep_safe || generation == self.generation
    }

    /// Whether a new connection makes suspect what is safe.
    pub(crate) fn relies_on_connection(&self) -> bool {
        !self.safe.is_empty()
    }

    /// Whether a flush would make a segment safe.
    pub(crate) fn has_finished(&self) -> bool {
        !self.finished.is_empty()
    }

    /// Number of suspect segments.
    pub(crate) fn suspects(&self) -> usize {
        self.suspect.len()
    }

    /// The segment that has been suspect for the longest time. One at a time, because the state of
    /// the others may change while it is checked.
    pub(crate) fn next_suspect(&mut self) -> Option<SuspectSegment> {
        self.suspect.pop_front()
    }
}

/// Splits a range into parts that lie in one segment each.
fn in_cells((start, end): SegmentRange, segment: u64) -> impl Iterator<Item = SegmentRange> {
    let first = start - start % segment;
    let cells = (first..end).step_by(usize::try_from(segment).unwrap_or(usize::MAX));
    cells.map(move |at| (at.max(start), (at + segment).min(end)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(ledger: &mut Ledger, range: SegmentRange) {
        ledger.begin(range);
        ledger.request(SegmentStart::at(range.0));
        ledger.wrote_content(SegmentStart::at(range.0));
        ledger.complete(SegmentStart::at(range.0));
        assert!(ledger.completed(SegmentStart::at(range.0)));
    }

    fn suspects(ledger: &mut Ledger) -> Vec<SuspectSegment> {
        std::iter::from_fn(|| ledger.next_suspect()).collect()
    }

    #[test]
    fn ranges_of_several_runs_are_looked_at_once_and_never_zeroed_as_a_whole() {
        let mut ledger = Ledger::new(true, false);
        ledger.begin_run(100);
        written(&mut ledger, (100, 300));
        ledger.begin_run(100);
        written(&mut ledger, (100, 150));
        written(&mut ledger, (220, 230));
        written(&mut ledger, (400, 700));
        ledger.connected(1, false);
        ledger.join_suspects();
        let ranges: Vec<_> = suspects(&mut ledger).iter().map(|suspect| suspect.range).collect();
        assert_eq!(ranges, [(100, 200), (200, 300), (400, 700)]);
    }

    #[test]
    fn a_segment_is_finished_when_its_last_request_is() {
        let mut ledger = Ledger::new(true, false);
        ledger.begin((0, 10));
        ledger.request(SegmentStart::at(0));
        ledger.request(SegmentStart::at(0));
        assert!(!ledger.completed(SegmentStart::at(0)) && !ledger.complete(SegmentStart::at(0)));
        assert!(!ledger.has_finished());
        assert!(ledger.completed(SegmentStart::at(0)));
        assert_eq!(ledger.take_finished(), [(0, 10)]);
        assert!(!ledger.has_finished());
    }

    #[test]
    fn a_lost_connection_makes_suspect_what_was_not_safe() {
        let mut ledger = Ledger::new(true, false);
        written(&mut ledger, (0, 10));
        let batch = ledger.take_finished();
        ledger.flushed(&batch, 0);
        written(&mut ledger, (10, 20));
        ledger.begin((20, 30));
        ledger.request(SegmentStart::at(20));
        ledger.wrote_content(SegmentStart::at(20));
        ledger.connected(1, false);
        // Written in part over each connection.
        ledger.complete(SegmentStart::at(20));
        ledger.completed(SegmentStart::at(20));
        written(&mut ledger, (30, 40));
        let ranges: Vec<_> = suspects(&mut ledger).iter().map(|s| s.range).collect();
        assert_eq!(ranges, [(10, 20), (20, 30)]);
        assert_eq!(ledger.take_finished(), [(30, 40)]);
        assert!(
            ledger.take_content(SegmentStart::at(30)) && !ledger.take_content(SegmentStart::at(30))
        );
        // The same generation again changes nothing.
        written(&mut ledger, (40, 50));
        ledger.connected(1, false);
        assert_eq!(ledger.suspects(), 0);
    }

    #[test]
    fn where_disks_may_be_private_even_what_is_safe_is_suspect() {
        let mut ledger = Ledger::new(true, true);
        written(&mut ledger, (0, 10));
        let batch = ledger.take_finished();
        ledger.flushed(&batch, 0);
        ledger.connected(1, true);
        assert_eq!(suspects(&mut ledger), [SuspectSegment { range: (0, 10), again: true }]);
    }

    #[test]
    fn segments_without_a_write_are_suspect_like_others() {
        for failed_flush in [false, true] {
            let mut ledger = Ledger::new(true, false);
            ledger.begin((0, 10));
            ledger.complete(SegmentStart::at(0));
            ledger.begin((10, 20));
            ledger.request(SegmentStart::at(10));
            if failed_flush {
                ledger.flushes_failed(1);
            } else {
                ledger.connected(1, false);
            }
            ledger.complete(SegmentStart::at(10));
            ledger.completed(SegmentStart::at(10));
            assert!(!ledger.has_finished());
            let suspect = |range| SuspectSegment { range, again: failed_flush };
            assert_eq!(suspects(&mut ledger), [suspect((0, 10)), suspect((10, 20))]);
        }
    }

    #[test]
    fn a_failed_flush_makes_suspect_what_is_not_safe_and_nothing_that_begins_later() {
        let mut ledger = Ledger::new(true, false);
        written(&mut ledger, (0, 10));
        let batch = ledger.take_finished();
        ledger.flushed(&batch, 0);
        ledger.doubt(vec![(10, 20)], false);
        written(&mut ledger, (20, 30));
        ledger.begin((30, 40));
        ledger.request(SegmentStart::at(30));
        ledger.flushes_failed(1);
        written(&mut ledger, (40, 50));
        ledger.flushes_failed(1);
        ledger.complete(SegmentStart::at(30));
        ledger.completed(SegmentStart::at(30));
        let again = |range| SuspectSegment { range, again: true };
        assert_eq!(suspects(&mut ledger), [(10, 20), (20, 30), (30, 40)].map(again));
        assert_eq!(ledger.take_finished(), [(40, 50)]);
    }
}
