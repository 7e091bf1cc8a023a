//! The extents of a range in order, asked for ahead where a reply is limited to 4 GiB.

use std::collections::VecDeque;
use std::sync::Arc;

use crate::{ContextSet, Device, Error, Extents, Kind, PendingRequest, Reply, Request, Result};

/// Queries in flight once the device has a limit of this kind.
const UNDER_WAY: usize = 4;
/// A reply of at least this to a longer query shows the limit of 32-bit lengths.
const LIMIT_32: u64 = 0xff00_0000;

/// Reads the extents of a range, in several contexts.
pub struct ExtentReader {
    device: Arc<dyn Device>,
    contexts: ContextSet,
    /// Where the next part begins, and where the range ends.
    at: u64,
    end: u64,
    /// Length of a query; none: up to the end of the range.
    step: Option<u64>,
    /// Queries in flight in order: offset, length.
    out: VecDeque<(u64, u64, PendingRequest)>,
}

/// The extents of a part of a range.
#[derive(Debug, Clone)]
pub struct ExtentPart {
    /// Offset of the part on the device, in bytes.
    pub at: u64,
    /// Length of the part in bytes, at least 1.
    pub len: u64,
    /// A list for each context in ascending order, none shorter than the part.
    pub lists: Vec<Extents>,
}

impl ExtentReader {
    /// Reads from the first offset to the second one, in these contexts of the device. No query is sent yet.
    pub fn new(
        device: Arc<dyn Device>,
        contexts: ContextSet,
        (at, end): (u64, u64),
    ) -> ExtentReader {
        ExtentReader { device, contexts, at, end, step: None, out: VecDeque::new() }
    }

    /// The next part; `None` at the end of the range.
    ///
    /// # Errors
    /// If a query fails, or its reply has no extents.
    pub async fn next(&mut self) -> Result<Option<ExtentPart>> {
        if self.at >= self.end {
            return Ok(None);
        }
        self.ask();
        let Some((at, len, pending)) = self.out.pop_front() else { return Ok(None) };
        let lists = match pending.await? {
            Reply::Extents(lists) if lists.len() == self.contexts.count() => lists,
            _ => return Err(Error::misfit()),
        };
        let covered = lists.iter().map(Extents::total).min().unwrap_or(0).min(len);
        if covered == 0 {
            let text = format!("the device reported no extents at offset {at}");
            return Err(Error::new(Kind::Io, text));
        }
        if covered < len && (LIMIT_32..=u64::from(u32::MAX)).contains(&covered) {
            self.step = Some(covered);
        }
        self.at = at.saturating_add(covered);
        Ok(Some(ExtentPart { at, len: covered, lists }))
    }

    /// Sends queries: for a gap that a short reply has left, and ahead.
    fn ask(&mut self) {
        let gap_to = self.out.front().map_or(self.end, |question| question.0);
        if self.at < gap_to {
            let len = (gap_to - self.at).min(self.step.unwrap_or(u64::MAX));
            let question = self.question(self.at, len);
            self.out.push_front(question);
        }
        let Some(step) = self.step else { return };
        while self.out.len() < UNDER_WAY {
            let from = self.out.back().map_or(self.at, |question| question.0 + question.1);
            if from >= self.end {
                return;
            }
            let question = self.question(from, step.min(self.end - from));
            self.out.push_back(question);
        }
    }

    fn question(&self, at: u64, len: u64) -> (u64, u64, PendingRequest) {
        (at, len, self.device.submit(Request::extents(at, len, self.contexts)))
    }
}

impl ExtentPart {
    /// Calls `take` with each run in which the states of all lists stay the same: offset on the device and
    /// length in bytes, and the states in the order of the lists.
    ///
    /// # Errors
    /// The first error of `take`, which is not called again.
    pub fn for_each_run<E>(
        &self,
        mut take: impl FnMut(u64, u64, &[u64]) -> std::result::Result<(), E>,
    ) -> std::result::Result<(), E> {
        let &ExtentPart { at: start, len, ref lists } = self;
        if let [list] = &lists[..] {
            for (at, run) in list.ranges(0).take_while(|(at, _)| *at < len) {
                take(start + at, run.len.min(len - at), &[run.state])?;
            }
            return Ok(());
        }
        let mut rest: Vec<_> = lists.iter().map(|list| list.ranges(0).peekable()).collect();
        let mut states = vec![0; lists.len()];
        let mut at = 0;
        while at < len {
            let mut until = len;
            for (state, runs) in states.iter_mut().zip(&mut rest) {
                while runs.next_if(|(start, run)| start + run.len <= at).is_some() {}
                let Some((start, run)) = runs.peek() else { return Ok(()) };
                (*state, until) = (run.state, until.min(start + run.len));
            }
            take(start + at, until - at, &states)?;
            at = until;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_are_cut_where_any_list_changes() {
        let list = |runs: &[(u64, u64)]| {
            let mut list = Extents::new();
            runs.iter().for_each(|run| list.push(run.0, run.1));
            list
        };
        let cut = |lists: &[Extents], len| {
            let mut found = Vec::new();
            let part = ExtentPart { at: 100, len, lists: lists.to_vec() };
            let taken = part.for_each_run(|at, len, states| {
                found.push((at - 100, len, states.to_vec()));
                Ok::<(), ()>(())
            });
            assert_eq!(taken, Ok(()));
            found
        };
        let one = list(&[(10, 0), (5, 3), (9, 0)]);
        let two = list(&[(4, 1), (11, 0), (3, 1)]);
        assert_eq!(cut(std::slice::from_ref(&one), 12), [(0, 10, vec![0]), (10, 2, vec![3])]);
        let expected =
            [(0, 4, vec![0, 1]), (4, 6, vec![0, 0]), (10, 5, vec![3, 0]), (15, 3, vec![0, 1])];
        assert_eq!(cut(&[one, two], 18), expected);
    }
}
