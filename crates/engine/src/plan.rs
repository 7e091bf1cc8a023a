//! What to copy: segments with what is known of them, made ahead of the lanes that take them.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::{Poll, Waker};

use block::{BASE_ALLOCATION, Can, Contexts, DeviceExt, Extents, Kind, ZERO};

use crate::end::End;
use crate::journal::Recorded;
use crate::progress::Progress;

/// Runs that may be waiting for lanes: bounds the memory of a disk in a million pieces.
const RUNS_AHEAD: usize = 64 << 10;
/// Segments that may be waiting for lanes: 8 TiB of hole.
const SEGMENTS_AHEAD: usize = 64 << 10;
/// Bytes asked about in one go: less than 4 GiB, so that it fits requests of 32 bits.
const QUERY: u64 = 2 << 30;

/// A piece of the work, written by one lane.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Segment {
    pub(crate) at: u64,
    /// The source has told which of it is data.
    pub(crate) told: bool,
    /// An earlier run has written it, but it is not sure to have lasted.
    pub(crate) check: bool,
    /// Runs that follow each other from `at` on.
    pub(crate) runs: Vec<Run>,
}

impl Segment {
    /// Length in bytes.
    pub(crate) fn len(&self) -> u64 {
        self.runs.iter().map(|run| run.len).sum()
    }
}

/// What earlier runs have done.
#[derive(Debug, Default)]
pub(crate) struct Earlier {
    pub(crate) recorded: Recorded,
    /// Look again at what is recorded instead of leaving it out.
    pub(crate) check: bool,
}

impl Earlier {
    /// Whether all of a range is recorded.
    fn covers(&self, at: u64, len: u64, segment: u64) -> bool {
        let (first, end) = (at / segment, at.saturating_add(len).div_ceil(segment));
        !self.recorded.segments.is_empty() && (first..end).all(|s| self.recorded.contains(s))
    }
}

/// Bytes of a segment that go one way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Run {
    pub(crate) len: u64,
    /// Known to read as zeroes.
    pub(crate) zero: bool,
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
}

impl State {
    fn exhausted(&self) -> bool {
        self.stopped || (self.complete && self.ready.is_empty())
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
            if let Some(segment) = state.ready.pop_front() {
                state.runs -= segment.runs.len();
                let maker = state.maker.take();
                // The last one is gone: whoever waits for the end may know.
                let takers = match state.exhausted() {
                    true => std::mem::take(&mut state.takers),
                    false => Vec::new(),
                };
                drop(state);
                maker.into_iter().chain(takers).for_each(Waker::wake);
                return Poll::Ready(Some(segment));
            }
            if state.complete {
                return Poll::Ready(None);
            }
            state.takers.push(cx.waker().clone());
            Poll::Pending
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
            state.takers.push(cx.waker().clone());
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
        let maker = state.maker.take();
        let takers = std::mem::take(&mut state.takers);
        drop(state);
        maker.into_iter().chain(takers).for_each(Waker::wake);
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

    /// Makes the segments of `source`, of `segment` bytes each, runs cut at multiples of `grain`.
    pub(crate) async fn make(
        self: Arc<Plan>,
        source: End,
        segment: u64,
        grain: u64,
        extents: bool,
        earlier: Earlier,
        progress: Arc<Progress>,
    ) {
        let facts = source.facts();
        let size = facts.size;
        let context = match extents && facts.can.contains(Can::EXTENTS) {
            true => facts.context(BASE_ALLOCATION),
            false => None,
        };
        // What emulation calls data is not known to be data.
        let told = context.is_some() && !facts.emulated.contains(Can::EXTENTS);
        let mut cutter = Cutter::new(size, segment, grain);
        let mut at = 0;
        let mut asks = context;
        while at < size && !progress.is_cancelled() {
            let len = (size - at).min(QUERY);
            let known = match asks {
                // What is left out need not be known.
                _ if earlier.covers(at, len, segment) => Extents::one(len, 0),
                Some(context) => match query(&source, at, len, context).await {
                    Ok(known) => known,
                    Err(error) => {
                        // Extents are a help, not a need: what is not known is data.
                        log::warn!("{error}; copying all of this range as data");
                        if error.kind() == Kind::Disconnected {
                            asks = None;
                        }
                        Extents::one(len, 0)
                    }
                },
                // Segment by segment, so that lanes start at once.
                None => Extents::one(len.min(segment), 0),
            };
            at += known.total();
            for run in known.runs() {
                cutter.push(run.len, run.state & ZERO != 0);
                while let Some(mut piece) = cutter.take() {
                    piece.told = told;
                    if earlier.recorded.contains(piece.at / segment) {
                        progress.add_resumed(piece.len());
                        if !earlier.check {
                            continue;
                        }
                        piece.check = true;
                    }
                    if !self.add(piece).await {
                        return;
                    }
                }
            }
        }
        self.change(|state| {
            // Cancelled before the end: lanes get what is there and stop by themselves.
            state.complete = true;
        });
    }
}

async fn query(source: &End, at: u64, len: u64, context: Contexts) -> block::Result<Extents> {
    let mut attempts = 0;
    loop {
        let generation = source.generation();
        match source.device().extents(at, len, context).await {
            Ok(mut lists) => {
                let list = lists.pop().filter(|list| !list.is_empty());
                return Ok(list.unwrap_or_else(|| Extents::one(len, 0)));
            }
            Err(error) => source.recover(error, generation, &mut attempts).await?,
        }
    }
}

/// Cuts a stream of runs into segments, with zeroes cut inwards to the grain, so that no two writes
/// share a block of the target.
struct Cutter {
    size: u64,
    segment_size: u64,
    grain: u64,
    /// Where the next run that comes in starts.
    at: u64,
    /// Where the open run starts: everything before it is in segments.
    open_at: u64,
    /// Runs of the same kind are joined before they are cut.
    open: Option<Run>,
    segment: Segment,
    done: VecDeque<Segment>,
}

impl Cutter {
    fn new(size: u64, segment_size: u64, grain: u64) -> Cutter {
        Cutter {
            size,
            segment_size,
            grain: grain.max(1),
            at: 0,
            open_at: 0,
            open: None,
            segment: Segment { at: 0, told: false, check: false, runs: Vec::new() },
            done: VecDeque::new(),
        }
    }

    fn push(&mut self, len: u64, zero: bool) {
        let (start, end) = (self.at, self.at + len);
        self.at = end;
        let zero_start = start.checked_next_multiple_of(self.grain).unwrap_or(end);
        let zero_end = if end >= self.size { end } else { end - end % self.grain };
        if zero && zero_start < zero_end {
            self.join(zero_start - start, false);
            self.join(zero_end - zero_start, true);
            self.join(end - zero_end, false);
        } else {
            self.join(len, false);
        }
        if end >= self.size {
            self.flush();
            self.close_segment();
        }
    }

    fn join(&mut self, len: u64, zero: bool) {
        if len == 0 {
            return;
        }
        match &mut self.open {
            Some(run) if run.zero == zero => run.len += len,
            _ => {
                self.flush();
                self.open = Some(Run { len, zero });
            }
        }
        // What fills whole segments need not wait for the next run of another kind.
        while let Some(run) = self.open {
            let to_end = self.segment_size - self.open_at % self.segment_size;
            if run.len < to_end {
                break;
            }
            self.emit(to_end, run.zero);
            let len = run.len - to_end;
            self.open = (len > 0).then_some(Run { len, zero: run.zero });
        }
    }

    fn flush(&mut self) {
        if let Some(run) = self.open.take() {
            self.emit(run.len, run.zero);
        }
    }

    fn emit(&mut self, len: u64, zero: bool) {
        self.segment.runs.push(Run { len, zero });
        self.open_at += len;
        if self.open_at.is_multiple_of(self.segment_size) {
            self.close_segment();
        }
    }

    fn close_segment(&mut self) {
        if !self.segment.runs.is_empty() {
            let next = Segment { at: self.open_at, told: false, check: false, runs: Vec::new() };
            self.done.push_back(std::mem::replace(&mut self.segment, next));
        }
    }

    fn take(&mut self) -> Option<Segment> {
        self.done.pop_front()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::options::SEGMENT;

    fn cut(runs: &[(u64, bool)], grain: u64) -> Vec<Segment> {
        let size = runs.iter().map(|run| run.0).sum();
        let mut cutter = Cutter::new(size, SEGMENT, grain);
        let mut segments = Vec::new();
        for (len, zero) in runs {
            cutter.push(*len, *zero);
            segments.extend(std::iter::from_fn(|| cutter.take()));
        }
        segments
    }

    #[test]
    fn whole_segments_are_cut_from_long_runs() {
        let segments = cut(&[(3 * SEGMENT + 5, true)], 4096);
        assert_eq!(segments.len(), 4);
        assert_eq!(segments[2].at, 2 * SEGMENT);
        assert_eq!(segments[3].runs, [Run { len: 5, zero: true }]);
    }

    proptest! {
        #[test]
        fn segments_cover_everything_and_zero_only_what_is_zero(
            runs in prop::collection::vec((1_u64..60_000_000, any::<bool>()), 1..30),
            grain in prop::sample::select(vec![1_u64, 512, 4096, 65536]),
        ) {
            let size: u64 = runs.iter().map(|run| run.0).sum();
            let segments = cut(&runs, grain);
            let mut known = Vec::new();
            let mut at = 0;
            for (len, zero) in &runs {
                known.push((at, at + len, *zero));
                at += len;
            }
            let mut at = 0;
            for segment in &segments {
                prop_assert_eq!(segment.at, at);
                prop_assert_eq!(at % SEGMENT, 0);
                for run in &segment.runs {
                    prop_assert!(run.len > 0);
                    let end = at + run.len;
                    if run.zero {
                        prop_assert_eq!(at % grain, 0);
                        prop_assert!(end % grain == 0 || end == size);
                        // Every known run that it touches is zero.
                        let touched = known.iter().filter(|k| k.0 < end && k.1 > at);
                        prop_assert!(touched.into_iter().all(|k| k.2));
                    }
                    at = end;
                }
                prop_assert!(at - segment.at <= SEGMENT);
            }
            prop_assert_eq!(at, size);
        }
    }
}
