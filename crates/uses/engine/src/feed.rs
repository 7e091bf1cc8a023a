//! What a device says of its bytes in one metadata context, in order: asked for in bulk, ahead of
//! whoever uses it, several questions under way.
//!
//! The first question is small enough for every server. While answers are short lists the next
//! question is many times as long, so that a disk of any size that is all hole costs a few
//! questions; where lists are long, questions get shorter, so that an answer needs little memory.
//! Once a server was found to answer no more than so many bytes at a time, several such questions
//! are under way at once.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::pin::Pin;
use std::rc::Rc;
use std::task::Poll;
use std::time::{Duration, Instant};

use blockhaul_block::{
    BASE_ALLOCATION, Can, Contexts, DeviceExt as _, Error, Extents, Kind, Result,
};
use blockhaul_io::Task;

use crate::end::End;

/// Bytes of the first question: the most that a request with a length of 32 bits can say, aligned to
/// every block size.
const FIRST: u64 = 0xffff_0000;
/// Bytes of the shortest question.
const LEAST: u64 = 1 << 20;
/// Extents of an answer that questions aim at, so that those under way need little memory.
const WANTED: u64 = 16 << 10;
/// How many times longer a question is, at most, than the one before when that had a short answer.
const GROWTH: u64 = 64;
/// Questions under way at a time.
const UNDER_WAY: usize = 4;
/// A shorter answer than this to a longer question is the server's choice; one from this on is the
/// end of what it can say in 32 bits.
const LIMIT_32: u64 = 0xff00_0000;
/// Bytes of the next question after one that failed: a bad place does not spoil a long range.
const AFTER_FAILURE: u64 = 128 << 20;
/// Time between questions that are asked because answers take long.
const HURRY: Duration = Duration::from_millis(250);
/// Failures after which nothing more is asked.
const FAILURES_MAX: u32 = 8;

/// A run of bytes and what is known of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Known {
    pub(crate) len: u64,
    /// The state in the context; `None`: nothing is known.
    pub(crate) state: Option<u64>,
}

/// The extents of a range, from its start to its end.
pub(crate) struct Feed {
    end: Rc<End>,
    /// `None`: nothing is asked.
    context: Option<Contexts>,
    /// A question that fails is an error, not a range of which nothing is known.
    strict: bool,
    /// Where the next run starts.
    at: u64,
    /// Where the range ends.
    to: u64,
    /// Runs from `at` on.
    runs: VecDeque<Known>,
    /// Questions in order, and where the last one ends.
    out: VecDeque<Question>,
    /// Questions about what was left behind, whose answers still say how this server answers.
    late: Vec<Question>,
    asked: u64,
    /// Length of the next question, and the longest that the server answers.
    len: u64,
    most: u64,
    /// Longer questions would not do: several are under way instead.
    settled: bool,
    /// An answer has come.
    met: bool,
    failures: u32,
}

struct Question {
    at: u64,
    len: u64,
    since: Instant,
    answer: Task<Result<Extents>>,
}

impl Feed {
    /// What `end` says of the bytes from `at` to `to` about holes, where it can and `asks` is set;
    /// where it fails, nothing is known.
    pub(crate) fn allocation(end: Rc<End>, asks: bool, at: u64, to: u64) -> Feed {
        let facts = end.facts();
        // What emulation calls data is not known to be data.
        let told = facts.can.contains(Can::EXTENTS) && !facts.emulated.contains(Can::EXTENTS);
        let context = facts.context(BASE_ALLOCATION).filter(|_| asks && told);
        Feed::new(end, context, at, to)
    }

    /// What `end` says in another context. A failure is an error.
    pub(crate) fn strict(end: Rc<End>, context: Contexts, at: u64, to: u64) -> Feed {
        Feed { strict: true, ..Feed::new(end, Some(context), at, to) }
    }

    /// A failure is an error.
    pub(crate) fn or_fail(self) -> Feed {
        Feed { strict: true, ..self }
    }

    fn new(end: Rc<End>, context: Option<Contexts>, at: u64, to: u64) -> Feed {
        Feed {
            end,
            context,
            strict: false,
            at,
            to,
            runs: VecDeque::new(),
            out: VecDeque::new(),
            late: Vec::new(),
            asked: at,
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

    /// Whether anything is asked at all.
    pub(crate) fn asks(&self) -> bool {
        self.context.is_some()
    }

    /// Since when the answer that [`Feed::front`] waits for is awaited.
    pub(crate) fn waits_since(&mut self) -> Option<Instant> {
        if !self.runs.is_empty() {
            return None;
        }
        self.ask();
        self.out.front().map(|question| question.since)
    }

    /// The next run, which has at least one byte unless the range is at its end. May be dropped while
    /// it waits, and called again.
    pub(crate) async fn front(&mut self) -> Result<Known> {
        loop {
            if let Some(run) = self.runs.front() {
                return Ok(*run);
            }
            if self.at >= self.to {
                return Ok(Known { len: 0, state: None });
            }
            self.ask();
            let Some(question) = self.out.front_mut() else {
                return Ok(Known { len: self.to - self.at, state: None });
            };
            let mut told = None;
            let late = &mut self.late;
            let answer = poll_fn(|cx| {
                late.retain_mut(|question| match Pin::new(&mut question.answer).poll(cx) {
                    Poll::Pending => true,
                    Poll::Ready(answer) => {
                        told = answer.ok().map(|list| (question.len, list)).or(told.take());
                        false
                    }
                });
                Pin::new(&mut question.answer).poll(cx)
            });
            let answer = answer.await;
            if let Some((asked, list)) = told {
                self.learn(asked, &list);
            }
            if let Some(question) = self.out.pop_front() {
                self.answered(&question, answer)?;
            }
        }
    }

    /// Leaves behind what is before `at`, known or not.
    pub(crate) fn skip_to(&mut self, at: u64) {
        let mut left = at.saturating_sub(self.at);
        self.at = self.at.max(at);
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

    /// What is not known yet is gone on without: asks about what is farther ahead, so that an answer
    /// that takes long is not about what is done when it comes.
    pub(crate) fn hurry(&mut self) {
        let Some(context) = self.context else { return };
        let waits = self.out.len() + self.late.len();
        let recent = self.out.back().is_some_and(|last| blockhaul_io::elapsed(last.since) < HURRY);
        if waits < UNDER_WAY && !recent && self.asked < self.to {
            self.len = self.len.saturating_mul(GROWTH).min(self.most);
            let len = self.len.min(self.to - self.asked);
            let question = self.question(context, self.asked, len);
            self.out.push_back(question);
            self.asked += len;
        }
    }

    /// Has as many questions under way as it may.
    fn ask(&mut self) {
        let Some(context) = self.context else { return };
        let gap_to = self.out.front().map_or(self.asked, |question| question.at);
        let gap = gap_to.min(self.to).saturating_sub(self.at);
        if gap > 0 {
            // An answer was shorter than its question.
            let question = self.question(context, self.at, gap.min(self.len));
            self.out.push_front(question);
        }
        let most = match (self.met, self.settled) {
            (false, _) => 1,
            (true, false) => 2,
            (true, true) => UNDER_WAY,
        };
        self.asked = self.asked.max(self.at);
        while self.out.len() < most && self.asked < self.to {
            let len = self.len.min(self.to - self.asked);
            let question = self.question(context, self.asked, len);
            self.out.push_back(question);
            self.asked += len;
        }
        if let Some(last) = self.out.back() {
            self.asked = self.asked.max(last.at + last.len);
        }
    }

    fn question(&self, context: Contexts, at: u64, len: u64) -> Question {
        let answer = blockhaul_io::start(ask(self.end.clone(), at, len, context));
        Question { at, len, since: blockhaul_io::now(), answer }
    }

    /// Takes in the answer to the oldest question.
    fn answered(&mut self, question: &Question, answer: Result<Extents>) -> Result<()> {
        let mut list = match answer {
            Ok(list) => list,
            Err(error) => return self.failed(question, error),
        };
        self.failures = 0;
        self.learn(question.len, &list);
        // What was left behind while it was under way.
        list.skip(self.at.saturating_sub(question.at));
        list.truncate(self.to - self.at);
        let runs = list.runs().iter();
        self.runs.extend(runs.map(|run| Known { len: run.len, state: Some(run.state) }));
        Ok(())
    }

    /// Sets the length of the next question.
    fn learn(&mut self, asked: u64, list: &Extents) {
        let (told, count) = (list.total().min(asked), list.len() as u64);
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

    fn failed(&mut self, question: &Question, error: Error) -> Result<()> {
        if self.strict {
            return Err(error);
        }
        // Extents are a help, not a need.
        self.failures += 1;
        let lost = error.kind() == Kind::Disconnected || self.failures >= FAILURES_MAX;
        match (self.failures, lost) {
            (_, true) => log::warn!("{error}; going on without asking where data is"),
            (1, false) => log::warn!("{error}; what it was about is treated as data"),
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
            self.runs.push_back(Known { len: end - self.at, state: None });
        }
        Ok(())
    }
}

/// Asks, again where that may help.
async fn ask(end: Rc<End>, at: u64, len: u64, context: Contexts) -> Result<Extents> {
    let mut attempts = 0;
    loop {
        let generation = end.generation();
        match end.device().extents(at, len, context).await {
            // The fence lets no empty answer pass.
            Ok(mut lists) => return Ok(lists.pop().unwrap_or_else(|| Extents::one(len, 0))),
            Err(error) => end.recover(error, generation, &mut attempts).await?,
        }
    }
}
