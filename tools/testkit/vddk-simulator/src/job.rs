//! Reads and writes that the program has asked for.

use std::cmp::{Ordering, Reverse};
use std::time::{Duration, Instant};

use crate::ffi::lent::ProgramMemory;
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
    pub(crate) memory: ProgramMemory,
}

/// Whom to answer.
pub(crate) struct TransferCallback {
    pub(crate) callback: Callback,
    pub(crate) data: usize,
}

/// A transfer that is under way.
pub(crate) struct TransferJob {
    /// When it ends.
    pub(crate) due: Instant,
    pub(crate) transfer: Transfer,
    pub(crate) answer: TransferCallback,
    pub(crate) started: Instant,
}

impl TransferJob {
    /// The same, later.
    pub(crate) fn later(self, by: Duration) -> TransferJob {
        TransferJob { due: self.due + by, ..self }
    }

    pub(crate) fn handle(&self) -> usize {
        self.transfer.handle
    }
}

impl PartialEq for TransferJob {
    fn eq(&self, other: &TransferJob) -> bool {
        self.due == other.due
    }
}

impl Eq for TransferJob {}

impl PartialOrd for TransferJob {
    fn partial_cmp(&self, other: &TransferJob) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for TransferJob {
    /// The next one is the greatest.
    fn cmp(&self, other: &TransferJob) -> Ordering {
        Reverse(self.due).cmp(&Reverse(other.due))
    }
}
