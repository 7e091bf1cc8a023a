//! The extents of a device in one metadata context, in order: requested in bulk, ahead of their
//! use, with several requests in flight.
//!
//! The first request is small enough for every server. While replies are short lists, the next
//! request is many times as long, so that a disk of any size that is one hole costs a few requests;
//! if lists are long, requests get shorter, so that a reply needs little memory. Once a server is
//! found to limit the bytes it describes per reply, several requests of that length are in flight
//! at once.
//!
//! A feed for a part of the device sends no request about anything else: an export that shows a
//! point in time only where a bitmap is dirty (QEMU's `snapshot-access` over `copy-before-write`)
//! fails requests about the rest.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::pin::Pin;
use std::rc::Rc;
use std::task::Poll;
use std::time::{Duration, Instant};

use blockhaul_block::{BASE_ALLOCATION, Can, ContextSet, DeviceExt as _, Extents, Kind};
use blockhaul_io::Task;

use crate::error::{CopyError, Result};
use crate::handle::ReconnectingHandle;
use crate::ledger::SegmentRange;

/// Length of the first request: the most that a 32-bit length can express, aligned to every block
/// size.
const FIRST: u64 = 0xffff_0000;
/// Shortest request in bytes.
const LEAST: u64 = 1 << 20;
/// Target number of extents per reply, so that the replies in flight need little memory.
const WANTED: u64 = 16 << 10;
/// Maximum growth from one request to the next after a short reply.
const GROWTH: u64 = 64;
/// Maximum number of requests in flight.
const UNDER_WAY: usize = 4;
/// A reply below this to a longer request is the server's own limit; from this on, it is the limit
/// of 32-bit lengths.
const LIMIT_32: u64 = 0xff00_0000;
/// Length of the next request after a failed one: a bad place does not spoil a long range.
const AFTER_FAILURE: u64 = 128 << 20;
/// Minimum interval between requests that are sent because replies take long.
const HURRY: Duration = Duration::from_millis(250);
/// Number of failures after which no more requests are sent.
const FAILURES_MAX: u32 = 8;

/// A run of bytes and its state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ExtentRun {
    pub(crate) len: u64,
    /// The state in the context; `None`: unknown.
    pub(crate) state: Option<u64>,
}

/// The extents of a range, from its start to its end.
pub(crate) struct ExtentFeed {
    end: Rc<ReconnectingHandle>,
    /// `None`: no requests are sent.
    context: Option<ContextSet>,
    /// A request that fails is an error; otherwise its range has an unknown state.
    strict: bool,
    /// Where the next run starts.
    at: u64,
    /// Where the range ends.
    to: u64,
    /// Runs from `at` on.
    runs: VecDeque<ExtentRun>,
    /// Requests in flight, in order, and where the last one ends.
    out: VecDeque<ExtentQuery>,
    /// Requests about skipped ranges; their replies still show how this server replies.
    late: Vec<ExtentQuery>,
    asked: u64,
    /// The ranges that requests may be about, as far as they are known, in order and not adjacent;
    /// `None`: everything.
    within: Option<VecDeque<SegmentRange>>,
    /// The last range of those, in one piece: also if it is gone, or too short so far.
    last_within: SegmentRange,
    /// Length of the next request, and the longest that the server answers.
    len: u64,
    most: u64,
    /// Longer requests do not help: several are in flight instead.
    settled: bool,
    /// A reply has arrived.
    met: bool,
    failures: u32,
}

struct ExtentQuery {
    at: u64,
    len: u64,
    since: Instant,
    answer: Task<Result<Extents>>,
}

impl ExtentFeed {
    /// What `end` reports about holes from `at` to `to`, if it can and `asks` is set; where a
    /// request fails, the state is unknown.
    pub(crate) fn allocation(
        end: Rc<ReconnectingHandle>,
        asks: bool,
        at: u64,
        to: u64,
    ) -> ExtentFeed {
        let facts = end.facts();
        // Data reported by the emulation is not known to be data.
        let answers = facts.can.contains(Can::EXTENTS) && !facts.emulated.contains(Can::EXTENTS);
        let context = facts.context(BASE_ALLOCATION).filter(|_| asks && answers);
        ExtentFeed::new(end, context, at, to)
    }

    /// What `end` reports in another context. A failure is an error.
    pub(crate) fn strict(
        end: Rc<ReconnectingHandle>,
        context: ContextSet,
        at: u64,
        to: u64,
    ) -> ExtentFeed {
        ExtentFeed { strict: true, ..ExtentFeed::new(end, Some(context), at, to) }
    }

    /// Makes a failure an error.
    pub(crate) fn or_fail(self) -> ExtentFeed {
        ExtentFeed { strict: true, ..self }
    }

    /// Sends requests only about the ranges that [`ExtentFeed::allow`] names.
    pub(crate) fn in_part(self) -> ExtentFeed {
        ExtentFeed { within: Some(VecDeque::new()), ..self }
    }

    /// For a feed for a part: requests may be about this range, which starts behind all earlier
    /// ones, or continues the last of them. Not about a short one: reading that costs no more than
    /// asking, and shows zeroes, too. A range that comes in short pieces counts as a whole.
    pub(crate) fn allow(&mut self, (start, end): SegmentRange) {
        let Some(within) = &mut self.within else { return };
        let start = start.max(self.last_within.1);
        if start >= end {
            return;
        }
        let begins = if self.last_within.1 == start { self.last_within.0 } else { start };
        self.last_within = (begins, end);
        match within.back_mut() {
            Some(last) if last.1 == start => last.1 = end,
            _ if end - begins >= LEAST => within.push_back((begins, end)),
            _ => {}
        }
    }

    /// The next range at or behind `at` that requests may be about, up to the end.
    fn reach(&self, at: u64) -> Option<SegmentRange> {
        let found = match &self.within {
            None => (at, self.to),
            Some(within) => {
                let &(start, end) = within.iter().find(|range| range.1 > at)?;
                (start.max(at), end.min(self.to))
            }
        };
        (found.0 < found.1).then_some(found)
    }

    /// Bytes from `at` on that no request may be about.
    fn barred(&self) -> u64 {
        if self.within.is_none() {
            return 0;
        }
        self.reach(self.at).map_or(self.to, |range| range.0).saturating_sub(self.at)
    }

    fn new(
        end: Rc<ReconnectingHandle>,
        context: Option<ContextSet>,
        at: u64,
        to: u64,
    ) -> ExtentFeed {
        ExtentFeed {
            end,
            context,
            strict: false,
            at,
            to,
            runs: VecDeque::new(),
            out: VecDeque::new(),
            late: Vec::new(),
            asked: at,
            within: None,
            last_within: (0, 0),
            len: FIRST,
            most: u64::MAX,
            settled: false,
            met: false,
            failures: 0,
        }
    }

    /// Whether a failure is an error.
    pub(crate) fn is_strict(&self) -> bool {
        self.strict
    }

    /// Whether any requests are sent.
    pub(crate) fn asks(&self) -> bool {
        self.context.is_some()
    }

    /// Since when [`ExtentFeed::front`] has waited for its reply.
    pub(crate) fn waits_since(&mut self) -> Option<Instant> {
        if !self.runs.is_empty() || self.barred() > 0 {
            return None;
        }
        self.ask();
        self.out.front().map(|question| question.since)
    }

    /// The next run, of at least one byte unless the range has ended. The future may be dropped
    /// while it waits, and called again.
    pub(crate) async fn front(&mut self) -> Result<ExtentRun> {
        loop {
            if let Some(run) = self.runs.front() {
                return Ok(*run);
            }
            if self.at >= self.to {
                return Ok(ExtentRun { len: 0, state: None });
            }
            let barred = self.barred();
            if barred > 0 {
                return Ok(ExtentRun { len: barred, state: None });
            }
            self.ask();
            let Some(question) = self.out.front_mut() else {
                return Ok(ExtentRun { len: self.to - self.at, state: None });
            };
            let mut came_late = None;
            let late = &mut self.late;
            let answer = poll_fn(|cx| {
                late.retain_mut(|question| match Pin::new(&mut question.answer).poll(cx) {
                    Poll::Pending => true,
                    Poll::Ready(answer) => {
                        came_late =
                            answer.ok().map(|list| (question.len, list)).or(came_late.take());
                        false
                    }
                });
                Pin::new(&mut question.answer).poll(cx)
            });
            let answer = answer.await;
            if let Some((asked, list)) = came_late {
                self.learn(asked, &list);
            }
            if let Some(question) = self.out.pop_front() {
                self.answered(&question, answer)?;
            }
        }
    }

    /// The runs from the next one on that are known by now: start, end and state.
    pub(crate) fn known(&self) -> impl Iterator<Item = (SegmentRange, Option<u64>)> {
        let mut at = self.at;
        self.runs.iter().map(move |run| {
            let start = at;
            at += run.len;
            ((start, at), run.state)
        })
    }

    /// Skips everything before `at`, known or not.
    pub(crate) fn skip_to(&mut self, at: u64) {
        let mut left = at.saturating_sub(self.at);
        self.at = self.at.max(at);
        if let Some(within) = &mut self.within {
            while within.front().is_some_and(|range| range.1 <= self.at) {
                within.pop_front();
            }
        }
        while let Some(run) = self.runs.front_mut() {
            if run.len > left {
                run.len -= left;
                return;
            }
            left -= run.len;
            self.runs.pop_front();
        }
        while self.out.front().is_some_and(|question| question.at + question.len <= self.at) {
            self.late.extend(self.out.pop_front());
        }
    }

    /// Continues without the replies that are outstanding: requests extents farther ahead, so that
    /// a late reply does not cover bytes that are already copied.
    pub(crate) fn hurry(&mut self) {
        let Some(context) = self.context else { return };
        let waits = self.out.len() + self.late.len();
        let recent = self.out.back().is_some_and(|last| blockhaul_io::elapsed(last.since) < HURRY);
        if waits < UNDER_WAY && !recent && self.asked < self.to {
            self.len = self.len.saturating_mul(GROWTH).min(self.most);
            let _ = self.ask_next(context);
        }
    }

    /// Sends the next request; `None` if there is nothing to ask about, else whether it is shorter
    /// than it could be.
    fn ask_next(&mut self, context: ContextSet) -> Option<bool> {
        let (start, end) = self.reach(self.asked)?;
        let len = self.len.min(end - start);
        let question = self.question(context, start, len);
        self.out.push_back(question);
        self.asked = start + len;
        Some(len < self.len)
    }

    /// Keeps the allowed number of requests in flight.
    fn ask(&mut self) {
        let Some(context) = self.context else { return };
        let gap_to = self.out.front().map_or(self.asked, |question| question.at);
        if let Some((start, end)) = self.reach(self.at)
            && start < gap_to
        {
            // A reply was shorter than its request.
            let len = (end.min(gap_to) - start).min(self.len);
            let question = self.question(context, start, len);
            self.out.push_front(question);
        }
        let most = match (self.met, self.settled) {
            (false, _) => 1,
            (true, false) => 2,
            (true, true) => UNDER_WAY,
        };
        self.asked = self.asked.max(self.at);
        let mut cut = false;
        // Requests that end with their range cannot be longer.
        while self.out.len() < if cut && self.met { UNDER_WAY } else { most } {
            match self.ask_next(context) {
                Some(shorter) => cut = shorter,
                None => break,
            }
        }
        if let Some(last) = self.out.back() {
            self.asked = self.asked.max(last.at + last.len);
        }
    }

    fn question(&self, context: ContextSet, at: u64, len: u64) -> ExtentQuery {
        let answer = blockhaul_io::start(ask(self.end.clone(), at, len, context));
        ExtentQuery { at, len, since: blockhaul_io::now(), answer }
    }

    /// Processes the reply to the oldest request.
    fn answered(&mut self, question: &ExtentQuery, answer: Result<Extents>) -> Result<()> {
        let mut list = match answer {
            Ok(list) => list,
            Err(error) => return self.failed(question, error),
        };
        self.failures = 0;
        self.learn(question.len, &list);
        // Drop what was skipped while the request was in flight.
        list.skip(self.at.saturating_sub(question.at));
        list.truncate(self.to - self.at);
        let runs = list.runs().iter();
        self.runs.extend(runs.map(|run| ExtentRun { len: run.len, state: Some(run.state) }));
        Ok(())
    }

    /// Sets the length of the next request.
    fn learn(&mut self, asked: u64, list: &Extents) {
        let told = list.total().min(asked);
        let count = list.len() as u64;
        self.met = true;
        if count > WANTED {
            self.len = (told / count).max(1).saturating_mul(WANTED).max(LEAST);
            self.settled = true;
        } else if told < asked {
            if (LIMIT_32..=u64::from(u32::MAX)).contains(&told) {
                self.most = told;
            }
            self.len = told.max(self.len / GROWTH).max(LEAST).min(self.most);
            self.settled = true;
        } else if asked >= self.len {
            let growth = (WANTED / count.max(1)).clamp(1, GROWTH);
            self.len = self.len.saturating_mul(growth).min(self.most);
            self.settled = self.len == self.most;
        }
    }

    fn failed(&mut self, question: &ExtentQuery, error: CopyError) -> Result<()> {
        if self.strict {
            return Err(error);
        }
        // Extents are an optimization, not required.
        self.failures += 1;
        let lost = error.kind() == Kind::Disconnected || self.failures >= FAILURES_MAX;
        match (self.failures, lost) {
            (_, true) => log::warn!("{error}; continuing without extents"),
            (1, false) => log::warn!("{error}; the range is treated as data"),
            _ => log::info!("{error}"),
        }
        if lost {
            self.context = None;
            self.out.clear();
        }
        self.len = self.len.min(AFTER_FAILURE);
        self.met = true;
        let end = (question.at + question.len.min(self.len)).min(self.to);
        if end > self.at {
            self.runs.push_back(ExtentRun { len: end - self.at, state: None });
        }
        Ok(())
    }
}

/// Requests extents, and retries if that may help.
async fn ask(
    end: Rc<ReconnectingHandle>,
    at: u64,
    len: u64,
    context: ContextSet,
) -> Result<Extents> {
    let mut attempts = 0;
    loop {
        let generation = end.generation();
        match end.device().extents(at, len, context).await {
            // The fence rejects empty replies.
            Ok(mut lists) => return Ok(lists.pop().unwrap_or_else(|| Extents::one(len, 0))),
            Err(error) => end.recover(error, generation, &mut attempts).await?,
        }
    }
}
