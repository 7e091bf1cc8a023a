//! Reads and writes that the program has asked for.

use std::cmp::{Ordering, Reverse};
use std::time::{Duration, Instant};

use crate::ffi::lent::Lent;
use crate::types::Callback;

/// A read or a write.
pub(crate) struct Transfer {
    /// The function, for counters.
    pub(crate) function: &'static str,
    pub(crate) handle: usize,
    pub(crate) write: bool,
    /// First sector, and number of sectors.
    pub(crate) sector: u64,
    pub(crate) count: u64,
    pub(crate) memory: Lent,
}

/// Whom to answer.
pub(crate) struct Answer {
    pub(crate) callback: Callback,
    pub(crate) data: usize,
}

/// A transfer that is under way.
pub(crate) struct Job {
    /// When it ends.
    pub(crate) due: Instant,
    pub(crate) transfer: Transfer,
    pub(crate) answer: Answer,
    pub(crate) started: Instant,
}

impl Job {
    /// The same, later.
    pub(crate) fn later(self, by: Duration) -> Job {
        Job { due: self.due + by, ..self }
    }

    pub(crate) fn handle(&self) -> usize {
        self.transfer.handle
    }
}

impl PartialEq for Job {
    fn eq(&self, other: &Job) -> bool {
        self.due == other.due
    }
}

impl Eq for Job {}

impl PartialOrd for Job {
    fn partial_cmp(&self, other: &Job) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Job {
    /// The next one is the greatest.
    fn cmp(&self, other: &Job) -> Ordering {
        Reverse(self.due).cmp(&Reverse(other.due))
    }
}
