//! What is known about a device in one context: runs, in segments of a bounded number of runs, so
//! that a change rewrites little and the least used can be forgotten.

use std::collections::BTreeMap;
use std::sync::Arc;

use block::{Extent, Extents};

/// Most runs of a segment when it is made: 64 KiB, which a change rewrites in microseconds.
const RUNS: usize = 4096;
/// Bytes that a run takes, and a segment beside its runs (its place in the tree, its counters).
const RUN_COST: u64 = size_of::<Run>() as u64;
const SEGMENT_COST: u64 = 128;

/// A run of bytes in one state, up to `end`.
#[derive(Debug, Clone, Copy)]
struct Run {
    end: u64,
    state: u64,
}

/// Neighbouring runs.
#[derive(Debug)]
pub(super) struct Segment {
    runs: Vec<Run>,
}

impl Segment {
    fn end(&self) -> u64 {
        self.runs.last().map_or(0, |run| run.end)
    }

    fn cost(&self) -> u64 {
        SEGMENT_COST + RUN_COST * self.runs.capacity() as u64
    }

    /// Appends what it says about `at..end` to `out`.
    pub(super) fn copy(&self, at: u64, end: u64, out: &mut Extents) {
        let first = self.runs.partition_point(|run| run.end <= at);
        let mut at = at;
        for run in &self.runs[first..] {
            if at >= end {
                return;
            }
            out.push(run.end.min(end) - at, run.state);
            at = run.end;
        }
    }
}

struct Entry {
    segment: Arc<Segment>,
    used: u64,
}

/// Runs of one context.
#[derive(Default)]
pub(super) struct Map {
    /// By first offset; they do not overlap.
    segments: BTreeMap<u64, Entry>,
    cost: u64,
}

impl Map {
    /// Bytes of memory.
    pub(super) fn cost(&self) -> u64 {
        self.cost
    }

    /// The segments that say something about `at` and what follows it up to `end` without a gap, at
    /// most `most`; marked as used at `now`.
    pub(super) fn find(&mut self, at: u64, end: u64, most: usize, now: u64) -> Vec<Arc<Segment>> {
        let mut found = Vec::new();
        let Some((&start, _)) = self.segments.range(..=at).next_back() else { return found };
        let mut next = at;
        for (&start, entry) in self.segments.range_mut(start..) {
            if next >= end || start > next || entry.segment.end() <= next || found.len() == most {
                break;
            }
            entry.used = now;
            next = entry.segment.end();
            found.push(entry.segment.clone());
        }
        found
    }

    /// Whether something is known about `at`.
    pub(super) fn knows(&self, at: u64) -> bool {
        let before = self.segments.range(..=at).next_back();
        before.is_some_and(|(_, entry)| entry.segment.end() > at)
    }

    /// The first offset from `at` on, where nothing is known, at which something is.
    pub(super) fn next_known(&self, at: u64) -> Option<u64> {
        self.segments.range(at..).next().map(|(&start, _)| start)
    }

    /// Learns what `extents` says from `at` on.
    pub(super) fn learn(&mut self, at: u64, extents: &Extents, now: u64) {
        self.forget(at, at.saturating_add(extents.total()));
        let mut start = at;
        let mut next = at;
        let mut runs = Vec::new();
        // Answers of few runs each grow together.
        if let Some((&before, entry)) = self.segments.range(..at).next_back()
            && entry.segment.end() == at
            && entry.segment.runs.len() + extents.len() <= RUNS
            && let Some(entry) = self.take(before)
        {
            start = before;
            runs = entry.segment.runs.clone();
        }
        for &Extent { len, state } in extents.runs() {
            if runs.len() >= RUNS {
                self.put(start, std::mem::take(&mut runs), now);
                start = next;
            }
            next += len;
            push(&mut runs, next, state);
        }
        self.put(start, runs, now);
    }

    /// What is known about a range is true no more.
    pub(super) fn forget(&mut self, start: u64, end: u64) {
        for (first, entry) in self.take_all(start, end) {
            let (mut left, mut right) = (Vec::new(), Vec::new());
            let mut at = first;
            for run in &entry.segment.runs {
                if at < start {
                    push(&mut left, run.end.min(start), run.state);
                }
                if run.end > end {
                    push(&mut right, run.end, run.state);
                }
                at = run.end;
            }
            self.put(first, left, entry.used);
            self.put(end, right, entry.used);
        }
    }

    /// The parts of a range about which something is known are in this state now.
    pub(super) fn set(&mut self, start: u64, end: u64, state: u64) {
        if self.is(start, end, state) {
            return;
        }
        for (first, entry) in self.take_all(start, end) {
            let mut runs = Vec::with_capacity(entry.segment.runs.len() + 2);
            let mut at = first;
            for run in &entry.segment.runs {
                if at < start {
                    push(&mut runs, run.end.min(start), run.state);
                }
                let inside = run.end.min(end);
                if inside > at.max(start) {
                    push(&mut runs, inside, state);
                }
                if run.end > end {
                    push(&mut runs, run.end, run.state);
                }
                at = run.end;
            }
            if runs.len() > 2 * RUNS {
                let right = runs.split_off(RUNS);
                let middle = runs.last().map_or(first, |run| run.end);
                self.put(middle, right, entry.used);
            }
            self.put(first, runs, entry.used);
        }
    }

    /// Forgets the segment that was not used for the longest time; false when there is none.
    pub(super) fn forget_oldest(&mut self) -> bool {
        let oldest = self.segments.iter().min_by_key(|(_, entry)| entry.used);
        let Some((&start, _)) = oldest else { return false };
        self.take(start).is_some()
    }

    /// When the least used segment was used.
    pub(super) fn oldest(&self) -> Option<u64> {
        self.segments.values().map(|entry| entry.used).min()
    }

    /// Whether all of a range is known to be in this state.
    fn is(&self, start: u64, end: u64, state: u64) -> bool {
        let Some((_, entry)) = self.segments.range(..=start).next_back() else { return false };
        let runs = &entry.segment.runs;
        let run = runs.get(runs.partition_point(|run| run.end <= start));
        run.is_some_and(|run| run.state == state && run.end >= end)
    }

    /// Takes out the segments that touch a range.
    fn take_all(&mut self, start: u64, end: u64) -> Vec<(u64, Entry)> {
        let before = self.segments.range(..=start).next_back();
        let first = before.map_or(start, |(&first, _)| first);
        let touching = self.segments.range(first..end).filter(|(_, e)| e.segment.end() > start);
        let starts: Vec<u64> = touching.map(|(&first, _)| first).collect();
        starts.into_iter().filter_map(|first| Some((first, self.take(first)?))).collect()
    }

    fn take(&mut self, start: u64) -> Option<Entry> {
        let entry = self.segments.remove(&start)?;
        self.cost -= entry.segment.cost();
        Some(entry)
    }

    fn put(&mut self, start: u64, mut runs: Vec<Run>, used: u64) {
        if runs.is_empty() {
            return;
        }
        runs.shrink_to_fit();
        let segment = Arc::new(Segment { runs });
        self.cost += segment.cost();
        self.segments.insert(start, Entry { segment, used });
    }
}

/// Appends a run, joining it to the last one of the same state.
fn push(runs: &mut Vec<Run>, end: u64, state: u64) {
    match runs.last_mut() {
        Some(last) if last.state == state => last.end = end,
        _ => runs.push(Run { end, state }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIZE: usize = 30_000;

    /// What the map knows, byte by byte.
    fn bytes(map: &mut Map) -> Vec<Option<u64>> {
        let mut all = vec![None; SIZE];
        let mut at = 0;
        while at < SIZE as u64 {
            let found = map.find(at, SIZE as u64, usize::MAX, 0);
            let mut out = Extents::new();
            for segment in found {
                let from = at + out.total();
                segment.copy(from, SIZE as u64, &mut out);
            }
            assert_eq!(map.knows(at), !out.is_empty());
            for (here, run) in out.ranges(at) {
                all[here as usize..(here + run.len) as usize].fill(Some(run.state));
            }
            at = match out.total() {
                0 => map.next_known(at).unwrap_or(SIZE as u64),
                total => at + total,
            };
        }
        all
    }

    #[test]
    fn a_map_agrees_with_a_state_per_byte() {
        let mut rng = testkit::rng::Rng::new(testkit::rng::seed());
        for _ in 0..20 {
            let mut map = Map::default();
            let mut model = vec![None; SIZE];
            for step in 0..60 {
                let at = rng.below(SIZE as u64);
                let len = 1 + rng.below(SIZE as u64 - at).min(9000);
                let range = at as usize..(at + len) as usize;
                match step % 4 {
                    0 | 1 => {
                        let mut extents = Extents::new();
                        while extents.total() < len {
                            // Enough runs for several segments.
                            let run = 1 + rng.below(2).min(len - extents.total() - 1);
                            extents.push(run, rng.below(4));
                        }
                        for (here, run) in extents.ranges(at) {
                            model[here as usize..(here + run.len) as usize].fill(Some(run.state));
                        }
                        map.learn(at, &extents, step);
                    }
                    2 => {
                        map.set(at, at + len, 7);
                        model[range].iter_mut().flatten().for_each(|state| *state = 7);
                    }
                    _ => {
                        map.forget(at, at + len);
                        model[range].fill(None);
                    }
                }
            }
            assert!(bytes(&mut map) == model);
            let cost: u64 = map.segments.values().map(|entry| entry.segment.cost()).sum();
            assert_eq!(map.cost(), cost);
            while map.forget_oldest() {}
            assert_eq!((map.cost(), map.oldest()), (0, None));
        }
    }
}
