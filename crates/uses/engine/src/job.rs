//! What all lanes of a copy share.

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use blockhaul_block::Error;
use blockhaul_io::Pool;

use crate::flushes::Flushes;
use crate::handle::Retries;
use crate::journal::Journal;
use crate::kernel_copy::KernelCopy;
use crate::lane_slots::LaneSlots;
use crate::plan::Plan;
use crate::progress::Progress;
use crate::resolved::Resolved;
use crate::same_disk::SameDisk;
use crate::streaming_digest::StreamingDigest;
use crate::tuner::Tuner;

/// What all lanes of a copy share.
pub(crate) struct Job {
    pub(crate) slots: Arc<LaneSlots>,
    pub(crate) flushes: Flushes,
    pub(crate) tuner: Tuner,
    pub(crate) journal: Option<Keeping>,
    /// The digest that is computed while copying.
    pub(crate) streaming: Option<StreamingDigest>,
    pub(crate) plan: Arc<Plan>,
    pub(crate) resolved: Resolved,
    pub(crate) retries: Arc<Retries>,
    pub(crate) progress: Arc<Progress>,
    pub(crate) pool: Pool,
    /// For requests whose bytes are not here yet, where the source takes memory for them when they come.
    pub(crate) late: Option<Pool>,
    /// For what is read back from the target.
    pub(crate) check_pool: Pool,
    pub(crate) first_error: Mutex<Option<Error>>,
    pub(crate) same_disk: SameDisk,
    pub(crate) kernel_copy: KernelCopy,
    /// Several connections were seen to show the same target.
    pub(crate) one_disk: AtomicBool,
    /// Segments, by number, that are looked at as a whole because zeroes turned up there or before.
    pub(crate) zeroes_in: Mutex<HashSet<u64>>,
    pub(crate) lanes: AtomicUsize,
    pub(crate) lanes_made: AtomicU32,
    pub(crate) warnings: Mutex<Vec<String>>,
}

impl Job {
    pub(crate) fn fail(&self, error: Error) {
        self.first_error.lock().expect("no panic under this lock").get_or_insert(error);
        self.retries.fail();
        self.plan.stop();
        self.slots.wake();
    }

    pub(crate) fn stopped(&self) -> bool {
        self.retries.stopped()
    }

    /// The digest of what was copied, if it was computed on the way.
    pub(crate) fn digest(&self) -> Option<String> {
        // What was written again was read again, and may have been something else.
        let again = self.retries.rewritten.load(Ordering::Relaxed) > 0;
        self.streaming.as_ref().filter(|_| !again)?.finish()
    }

    /// Notes that a sample at `at` had zeroes: this segment and the next are looked at.
    pub(crate) fn found_zeroes(&self, at: u64) {
        let segment = at / self.resolved.segment;
        let mut zeroes_in = self.zeroes_in.lock().expect("no panic under this lock");
        zeroes_in.extend([segment, segment + 1]);
    }

    pub(crate) fn has_zeroes(&self, at: u64) -> bool {
        let zeroes_in = self.zeroes_in.lock().expect("no panic under this lock");
        zeroes_in.contains(&(at / self.resolved.segment))
    }

    /// Tells the user something, once: in the log as it arises, and in the summary for callers
    /// without a log.
    pub(crate) fn warn(&self, text: String) {
        let mut warnings = self.warnings.lock().expect("no panic under this lock");
        if !warnings.contains(&text) {
            log::warn!("{text}");
            warnings.push(text);
        }
    }

    /// The number of a lane that is made.
    pub(crate) fn next_lane(&self) -> u32 {
        self.lanes_made.fetch_add(1, Ordering::Relaxed)
    }
}

/// A journal with the time between its flushes.
pub(crate) struct Keeping {
    pub(crate) file: Journal,
    /// It stays after success.
    pub(crate) keep: bool,
    pub(crate) interval: Duration,
}
