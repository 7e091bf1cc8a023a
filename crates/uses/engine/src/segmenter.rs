//! Cuts a stream of runs into segments.

use std::collections::VecDeque;

use crate::segment::{RunContent, Segment, SegmentRun};

/// Cuts runs into segments. Zeroes are shrunk to the grain, so that no two writes share a block of
/// the target.
pub(crate) struct Segmenter {
    size: u64,
    segment_size: u64,
    grain: u64,
    /// Do not split zeroes that fill several segments: those to be zeroed, and clean ones.
    whole: (bool, bool),
    /// Where the next run starts.
    at: u64,
    /// Zeroes at the end of the input that do not fill a grain yet.
    tail: u64,
    tail_what: RunContent,
    /// Where the open run starts: everything before it is in segments.
    open_at: u64,
    /// Runs of the same kind are joined before they are cut.
    open: Option<SegmentRun>,
    segment: Segment,
    /// End of the last run that the source did not report.
    untold_to: u64,
    done: VecDeque<Segment>,
}

impl Segmenter {
    pub(crate) fn new(size: u64, segment_size: u64, grain: u64, whole: (bool, bool)) -> Segmenter {
        Segmenter {
            size,
            segment_size,
            grain: grain.max(1),
            whole,
            at: 0,
            tail: 0,
            tail_what: RunContent::Zero,
            open_at: 0,
            open: None,
            segment: Segment { at: 0, extents_known: false, check: false, runs: Vec::new() },
            untold_to: 0,
            done: VecDeque::new(),
        }
    }

    /// Adds the next `len` bytes; `extents_known`: the source reported them.
    pub(crate) fn push(&mut self, len: u64, what: RunContent, extents_known: bool) {
        if what.is_data() {
            self.end_tail();
            self.at += len;
            // Before the run is cut: cutting closes segments, whose contents must then be known.
            if !extents_known {
                self.untold_to = self.at;
            }
            self.join(len, what);
        } else {
            self.push_zeroes(len, what);
        }
        if self.at >= self.size {
            self.finish();
        }
    }

    /// Skips to `at`: what was not pushed is not copied.
    pub(crate) fn leave_to(&mut self, at: u64) {
        if at > self.at {
            self.finish();
            (self.at, self.open_at, self.segment.at) = (at, at, at);
        }
    }

    /// Completes the segments of everything that was pushed.
    pub(crate) fn finish(&mut self) {
        self.end_tail();
        self.flush();
        self.close_segment();
    }

    /// The next complete segment.
    pub(crate) fn take(&mut self) -> Option<Segment> {
        self.done.pop_front()
    }

    fn push_zeroes(&mut self, len: u64, what: RunContent) {
        let start = self.at - self.tail;
        let end = self.at + len;
        let mixed = self.tail > 0 && self.tail_what != what;
        self.at = end;
        let zero_start = start.checked_next_multiple_of(self.grain).unwrap_or(end);
        let zero_end = if end >= self.size { end } else { end - end % self.grain };
        if zero_start >= zero_end {
            self.tail = end - start;
            self.tail_what = if mixed { RunContent::Zero } else { what };
            return;
        }
        self.tail = end - zero_end;
        self.tail_what = what;
        self.join(zero_start - start, RunContent::Data);
        // A grain that is only partly clean is zeroed.
        let mixed = if mixed { self.grain.min(zero_end - zero_start) } else { 0 };
        self.join(mixed, RunContent::Zero);
        self.join(zero_end - zero_start - mixed, what);
    }

    fn end_tail(&mut self) {
        let tail = std::mem::take(&mut self.tail);
        self.join(tail, RunContent::Data);
    }

    fn join(&mut self, len: u64, what: RunContent) {
        if len == 0 {
            return;
        }
        match &mut self.open {
            Some(run) if run.what == what => run.len += len,
            _ => {
                self.flush();
                self.open = Some(SegmentRun { len, what });
            }
        }
        // Whole segments need not wait for the next run of another kind.
        while let Some(run) = self.open {
            let to_end = self.segment_size - self.open_at % self.segment_size;
            if run.len < to_end {
                break;
            }
            let whole = match run.what {
                RunContent::Data | RunContent::New => false,
                RunContent::Zero => self.whole.0,
                RunContent::Clean => self.whole.1,
            };
            let part = if whole && to_end == self.segment_size {
                run.len - run.len % self.segment_size
            } else {
                to_end
            };
            self.emit(part, run.what);
            let len = run.len - part;
            self.open = (len > 0).then_some(SegmentRun { len, what: run.what });
        }
    }

    fn flush(&mut self) {
        if let Some(run) = self.open.take() {
            self.emit(run.len, run.what);
        }
    }

    fn emit(&mut self, len: u64, what: RunContent) {
        self.segment.runs.push(SegmentRun { len, what });
        self.open_at += len;
        if self.open_at.is_multiple_of(self.segment_size) {
            self.close_segment();
        }
    }

    fn close_segment(&mut self) {
        if !self.segment.runs.is_empty() {
            let next =
                Segment { at: self.open_at, extents_known: false, check: false, runs: Vec::new() };
            let mut closed = std::mem::replace(&mut self.segment, next);
            closed.extents_known = closed.at >= self.untold_to;
            self.done.push_back(closed);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::segment::SEGMENT;

    fn cut(runs: &[(u64, RunContent)], grain: u64, whole: (bool, bool)) -> Vec<Segment> {
        let size = runs.iter().map(|run| run.0).sum();
        let mut segmenter = Segmenter::new(size, SEGMENT, grain, whole);
        let mut segments = Vec::new();
        for (len, what) in runs {
            segmenter.push(*len, *what, true);
            segments.extend(std::iter::from_fn(|| segmenter.take()));
        }
        segments
    }

    #[test]
    fn whole_segments_are_cut_from_long_runs() {
        let segments = cut(&[(3 * SEGMENT + 5, RunContent::Zero)], 4096, (false, true));
        assert_eq!(segments.len(), 4);
        assert_eq!(segments[2].at, 2 * SEGMENT);
        assert_eq!(segments[3].runs, [SegmentRun { len: 5, what: RunContent::Zero }]);
    }

    #[test]
    fn zeroes_that_may_stay_whole_are_one_segment_however_many_they_are() {
        let huge = i64::MAX as u64;
        let segments =
            cut(&[(100, RunContent::Data), (huge - 100, RunContent::Clean)], 4096, (true, true));
        // The one with the data, all others, and what is left of the last.
        assert_eq!(segments.len(), 3);
        assert_eq!(segments[1].at, SEGMENT);
        assert_eq!(segments[1].len(), huge - huge % SEGMENT - SEGMENT);
        assert_eq!(segments.iter().map(Segment::len).sum::<u64>(), huge);
    }

    #[test]
    fn what_is_left_out_ends_a_segment() {
        let mut segmenter = Segmenter::new(10 * SEGMENT, SEGMENT, 1, (true, true));
        segmenter.leave_to(100);
        segmenter.push(50, RunContent::Data, false);
        segmenter.leave_to(200);
        segmenter.push(SEGMENT, RunContent::Data, true);
        segmenter.finish();
        let segments: Vec<_> = std::iter::from_fn(|| segmenter.take()).collect();
        let found: Vec<_> = segments.iter().map(|s| (s.at, s.len(), s.extents_known)).collect();
        assert_eq!(found, [(100, 50, false), (200, SEGMENT - 200, true), (SEGMENT, 200, true)]);
    }

    #[test]
    fn what_nobody_told_of_is_known_as_such_in_every_segment_it_fills() {
        let mut segmenter = Segmenter::new(4 * SEGMENT, SEGMENT, 1, (true, true));
        segmenter.push(SEGMENT, RunContent::Data, true);
        segmenter.push(2 * SEGMENT, RunContent::Data, false);
        segmenter.push(SEGMENT, RunContent::Data, true);
        let told: Vec<_> =
            std::iter::from_fn(|| segmenter.take()).map(|s| s.extents_known).collect();
        assert_eq!(told, [true, false, false, true]);
    }

    proptest! {
        #[test]
        fn segments_cover_everything_and_zero_only_what_is_zero(
            runs in prop::collection::vec((1_u64..60_000_000, 0..3_u8), 1..30),
            small in prop::collection::vec((1_u64..9000, 0..3_u8), 0..30),
            grain in prop::sample::select(vec![1_u64, 512, 4096, 65536]),
            whole in any::<(bool, bool)>(),
        ) {
            let kinds = [RunContent::Data, RunContent::Zero, RunContent::Clean];
            let runs: Vec<_> =
                runs.iter().chain(&small).map(|run| (run.0, kinds[usize::from(run.1)])).collect();
            let size: u64 = runs.iter().map(|run| run.0).sum();
            let segments = cut(&runs, grain, whole);
            let mut known = Vec::new();
            let mut at = 0;
            for (len, what) in &runs {
                known.push((at, at + len, *what));
                at += len;
            }
            let mut at = 0;
            for segment in &segments {
                prop_assert_eq!(segment.at, at);
                prop_assert_eq!(at % SEGMENT, 0);
                for run in &segment.runs {
                    prop_assert!(run.len > 0);
                    let end = at + run.len;
                    if run.what != RunContent::Data {
                        prop_assert_eq!(at % grain, 0);
                        prop_assert!(end % grain == 0 || end == size);
                        // Every known run that it touches is zero, or even clean.
                        let mut touched = known.iter().filter(|k| k.0 < end && k.1 > at);
                        let clean = run.what == RunContent::Clean;
                        prop_assert!(touched.all(|k| k.2 != RunContent::Data
                            && (!clean || k.2 == RunContent::Clean)));
                    }
                    at = end;
                }
                let long = at - segment.at > SEGMENT;
                prop_assert!(!long || segment.runs.len() == 1);
                prop_assert!(!long || segment.runs[0].what != RunContent::Data);
            }
            prop_assert_eq!(at, size);
        }
    }
}
