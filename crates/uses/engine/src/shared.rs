//! State shared by all lanes of an engine.

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use blockhaul_block::{Error, Kind};
use blockhaul_io::Pool;

use crate::error::{CopyError, Result};
use crate::flushes::TargetFlushes;
use crate::handle::RetryControl;
use crate::journal::{Journal, SelectedParts};
use crate::kernel_copy::KernelCopy;
use crate::lane_slots::LaneSlots;
use crate::options::DurableCallback;
use crate::progress::CopyProgress;
use crate::resolved::EffectiveOptions;
use crate::same_disk::SameDisk;
use crate::segment_queue::SegmentQueue;
use crate::signals::{LaneSignals, PAUSED};
use crate::streaming_digest::StreamingDigest;
use crate::tuner::Tuner;

/// How often the target is flushed, to discard at the source or to report what that makes safe, if no
/// journal says so.
const FLUSHES_EVERY: Duration = Duration::from_secs(1);

/// State shared by all lanes of an engine.
pub(crate) struct EngineState {
    pub(crate) resolved: EffectiveOptions,
    pub(crate) signals: Arc<LaneSignals>,
    pub(crate) progress: Arc<CopyProgress>,
    pub(crate) retries: Arc<RetryControl>,
    pub(crate) memory: BufferPools,
    pub(crate) learned: LearnedState,
    pub(crate) durability: Durability,
    pub(crate) report: EngineReport,
    /// Nothing is written.
    pub(crate) reads_only: bool,
    /// The digest that is computed while copying.
    pub(crate) streaming: Option<StreamingDigest>,
    /// The target reads as zeroes where no plan has written yet.
    pub(crate) target_is_zero: AtomicBool,
    /// The segment queue of the current plan.
    queue: Mutex<Option<Arc<SegmentQueue>>>,
}

/// Buffer pools.
pub(crate) struct BufferPools {
    pub(crate) pool: Pool,
    /// For requests without a reply yet, if the source takes memory only when data arrives.
    pub(crate) late: Option<Pool>,
    /// For data read back from the target.
    pub(crate) checks: Pool,
}

/// What is learned while copying, for later runs, too.
pub(crate) struct LearnedState {
    pub(crate) slots: Arc<LaneSlots>,
    pub(crate) tuner: Tuner,
    pub(crate) kernel_copy: KernelCopy,
    pub(crate) same_disk: SameDisk,
    /// Several connections were seen to show the same target.
    pub(crate) one_disk: AtomicBool,
    pub(crate) zeroes: ZeroesFound,
}

/// The durability of what was written.
pub(crate) struct Durability {
    pub(crate) flushes: TargetFlushes,
    pub(crate) journal: Option<JournalKeeper>,
    /// Called with what is durable.
    pub(crate) listener: Option<DurableCallback>,
}

/// The final report.
#[derive(Default)]
pub(crate) struct EngineReport {
    first_error: Mutex<Option<CopyError>>,
    warnings: Mutex<Vec<String>>,
    /// Lanes used in the current run.
    pub(crate) lanes_used: AtomicUsize,
    lanes_made: AtomicU32,
}

/// A journal and the interval between its flushes.
pub(crate) struct JournalKeeper {
    pub(crate) file: Journal,
    /// Keep the file after success.
    pub(crate) keep: bool,
    /// What is recorded is discarded at the source.
    pub(crate) discards: bool,
    /// Earlier runs have recorded something, or that everything is copied.
    pub(crate) earlier: bool,
    pub(crate) was_complete: bool,
    pub(crate) interval: Duration,
    pub(crate) parts: Mutex<SelectedParts>,
}

impl EngineState {
    /// Call [`EngineState::begin`] before the first segment.
    pub(crate) fn new(parts: EngineParts) -> EngineState {
        EngineState {
            target_is_zero: AtomicBool::new(parts.resolved.target_is_zero),
            resolved: parts.resolved,
            signals: parts.signals,
            progress: parts.progress,
            retries: parts.retries,
            memory: parts.memory,
            learned: parts.learned,
            durability: Durability {
                flushes: TargetFlushes::default(),
                journal: parts.journal,
                listener: parts.listener,
            },
            report: EngineReport::default(),
            reads_only: parts.reads_only,
            streaming: parts.streaming,
            queue: Mutex::default(),
        }
    }

    /// Lanes take segments from this queue from now on.
    pub(crate) fn begin(&self, queue: &Arc<SegmentQueue>) {
        *self.queue.lock().expect("no panic under this lock") = Some(queue.clone());
        self.report.lanes_used.store(0, Ordering::Relaxed);
    }

    /// The run has ended.
    pub(crate) fn end(&self) {
        self.queue.lock().expect("no panic under this lock").take();
    }

    /// Ends the copy with this error, unless it already has one.
    pub(crate) fn fail(&self, error: impl Into<CopyError>) {
        let mut first_error = self.report.first_error.lock().expect("no panic under this lock");
        first_error.get_or_insert_with(|| error.into());
        drop(first_error);
        self.retries.fail();
        self.wake();
    }

    /// After the copy was stopped: wakes everything that waits.
    pub(crate) fn wake(&self) {
        let queue = self.queue.lock().expect("no panic under this lock").clone();
        if let Some(queue) = queue {
            queue.stop();
        }
        self.learned.slots.wake();
        self.signals.wake();
    }

    /// How often finished segments are flushed while the copy runs, if at all.
    pub(crate) fn flushes_every(&self) -> Option<Duration> {
        let is_used = self.resolved.discard_source || self.durability.listener.is_some();
        let otherwise = is_used.then_some(FLUSHES_EVERY);
        self.durability.journal.as_ref().map(|journal| journal.interval).or(otherwise)
    }

    /// Whether something is done with segments that are safe.
    pub(crate) fn keeps_track(&self) -> bool {
        self.flushes_every().is_some()
    }

    pub(crate) fn stopped(&self) -> bool {
        self.retries.stopped()
    }

    /// Counts a task that may start requests until `end_work`, once the engine is not paused.
    pub(crate) async fn begin_work(&self) {
        loop {
            self.signals.begin_work();
            if !self.signals.is(PAUSED) || self.stopped() {
                return;
            }
            self.signals.end_work();
            self.signals.resumed(|| self.stopped()).await;
        }
    }

    /// Waits while the engine is paused, in a task that is counted by `begin_work`.
    pub(crate) async fn rest(&self) {
        if self.signals.is(PAUSED) {
            self.signals.end_work();
            self.begin_work().await;
        }
    }

    /// Why the work is not complete, if it is not.
    pub(crate) fn outcome(&self) -> Result<()> {
        let first_error = self.report.first_error.lock().expect("no panic under this lock");
        if let Some(error) = &*first_error {
            return Err(error.clone());
        }
        if self.progress.is_cancelled() {
            return Err(Error::new(Kind::ShuttingDown, "stopped before the end").complete().into());
        }
        Ok(())
    }

    /// The digest of the copied data, if it was computed while copying.
    pub(crate) fn digest(&self) -> Option<String> {
        // What was rewritten was read again, and may have changed.
        let again = self.retries.rewritten.load(Ordering::Relaxed) > 0;
        self.streaming.as_ref().filter(|_| !again)?.finish()
    }

    /// Warns the user: in the log at once, and in the summary for callers without a log.
    pub(crate) fn warn(&self, text: String) {
        let mut warnings = self.report.warnings.lock().expect("no panic under this lock");
        if !warnings.contains(&text) {
            log::warn!("{text}");
            warnings.push(text);
        }
    }

    /// The warnings so far.
    pub(crate) fn warnings(&self) -> Vec<String> {
        self.report.warnings.lock().expect("no panic under this lock").clone()
    }

    /// The number of a new lane.
    pub(crate) fn next_lane(&self) -> u32 {
        self.report.lanes_made.fetch_add(1, Ordering::Relaxed)
    }
}

/// What [`EngineState`] is made of.
pub(crate) struct EngineParts {
    pub(crate) resolved: EffectiveOptions,
    pub(crate) signals: Arc<LaneSignals>,
    pub(crate) progress: Arc<CopyProgress>,
    pub(crate) retries: Arc<RetryControl>,
    pub(crate) memory: BufferPools,
    pub(crate) learned: LearnedState,
    pub(crate) journal: Option<JournalKeeper>,
    pub(crate) listener: Option<DurableCallback>,
    pub(crate) streaming: Option<StreamingDigest>,
    pub(crate) reads_only: bool,
}

/// Segments, by number, that are checked completely because zeroes were found there or just before.
#[derive(Default)]
pub(crate) struct ZeroesFound {
    segments: Mutex<HashSet<u64>>,
    /// Counts changes: a caller that checks for each request takes the lock only after a change.
    changes: AtomicU64,
}

impl ZeroesFound {
    /// Notes that a sample in this segment had zeroes: it and the next one are checked.
    pub(crate) fn note(&self, segment: u64) {
        let mut segments = self.segments.lock().expect("no panic under this lock");
        let new = segments.insert(segment) | segments.insert(segment + 1);
        if new {
            self.changes.fetch_add(1, Ordering::Release);
        }
    }

    /// Number of changes so far.
    pub(crate) fn changes(&self) -> u64 {
        self.changes.load(Ordering::Acquire)
    }

    /// Whether this segment is checked.
    pub(crate) fn contain(&self, segment: u64) -> bool {
        self.segments.lock().expect("no panic under this lock").contains(&segment)
    }
}
