//! The time of a writer in which nobody else can have taken its disk.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

/// The lease of a writer.
pub(crate) struct WriterLease {
    length: Duration,
    /// The latest moment at which the disk was surely this writer's.
    proven: Mutex<Duration>,
}

impl WriterLease {
    /// A lease of this length of a writer that had the disk at the moment `proven`.
    pub(crate) fn new(length: Duration, proven: Duration) -> WriterLease {
        WriterLease { length, proven: Mutex::new(proven) }
    }

    /// Whether no other writer can have the disk yet: each waits for the whole lease first.
    pub(crate) fn holds(&self) -> bool {
        let proven = *self.proven.lock().unwrap_or_else(PoisonError::into_inner);
        now().saturating_sub(proven) < self.length
    }

    /// Notes that the writer had the disk at this moment.
    pub(crate) fn prove(&self, moment: Duration) {
        let mut proven = self.proven.lock().unwrap_or_else(PoisonError::into_inner);
        *proven = moment.max(*proven);
    }
}

/// The time since the machine was started. It passes while the machine is suspended, as it does for other writers.
pub(crate) fn now() -> Duration {
    Duration::try_from(clock_gettime(ClockId::Boottime)).unwrap_or_default()
}
