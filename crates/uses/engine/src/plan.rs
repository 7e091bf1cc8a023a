//! What an engine copies in one run. Ranges can be added while it runs, and be wanted first.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use blockhaul_block::{Error, Facts, Kind, Result};
use blockhaul_io::Notify;

use crate::lane_slots::LaneSlots;
use crate::ledger::SegmentRange;
use crate::progress::{CopyProgress, STOP_STEP};
use crate::segment_queue::SegmentQueue;
use crate::selection::Selection;
use crate::wants::meet;

/// What an engine copies in one run. Clones share one plan; usable from any thread.
#[derive(Clone)]
pub struct EnginePlan(Arc<PlanInner>);

struct PlanInner {
    queue: Arc<SegmentQueue>,
    selection: Selection,
    /// Ranges that are added; `None`: none can be added.
    added: Option<Arc<PlanAdditions>>,
    /// An engine has run it.
    used: AtomicBool,
    source: Arc<Facts>,
    /// Added ranges start and end at multiples of this.
    minimum: u64,
}

impl EnginePlan {
    /// A plan for a selection; no range can be added.
    pub(crate) fn of(
        selection: Selection,
        source: Arc<Facts>,
        lanes: Arc<LaneSlots>,
    ) -> EnginePlan {
        EnginePlan::new(selection, None, source, lanes)
    }

    /// An empty plan.
    pub(crate) fn empty(minimum: u32, source: Arc<Facts>, lanes: Arc<LaneSlots>) -> EnginePlan {
        let selection = Selection::nothing(minimum);
        EnginePlan::new(selection, Some(Arc::default()), source, lanes)
    }

    fn new(
        selection: Selection,
        added: Option<Arc<PlanAdditions>>,
        source: Arc<Facts>,
        lanes: Arc<LaneSlots>,
    ) -> EnginePlan {
        let queue = Arc::new(SegmentQueue::with_wants(lanes));
        queue.plan(selection.ranges());
        let minimum = selection.minimum();
        EnginePlan(Arc::new(PlanInner {
            queue,
            selection,
            added,
            used: AtomicBool::new(false),
            source,
            minimum,
        }))
    }

    /// Adds `len` bytes of the source at offset `at`, in bytes, also while the plan runs. A plan
    /// contains each byte once: bytes that change after they were copied belong in the next plan.
    ///
    /// # Errors
    /// [`Kind::Invalid`] if the range exceeds the source, is not in whole blocks of both sides
    /// (except at the end of the source), or overlaps the plan, or if the plan cannot grow any
    /// more.
    pub fn add(&self, at: u64, len: u64) -> Result<()> {
        if len == 0 {
            return Ok(());
        }
        let size = self.0.source.size;
        let minimum = self.0.minimum;
        let wrong = |why: String| {
            let text = format!("{len} bytes at offset {at} cannot be added to the plan: {why}");
            Err(Error::new(Kind::Invalid, text).on(&self.0.source.name))
        };
        let Some(added) = &self.0.added else { return wrong("it is complete".to_string()) };
        let Some(end) = at.checked_add(len).filter(|&end| end <= size) else {
            return wrong(format!("the source has {size} bytes"));
        };
        if !at.is_multiple_of(minimum) || (!end.is_multiple_of(minimum) && end != size) {
            return wrong(format!("blocks have {minimum} bytes"));
        }
        let mut state = added.lock();
        if state.closed {
            return wrong("it is complete".to_string());
        }
        let before = state.all.range(..end).next_back();
        if before.is_some_and(|(&at_before, &end_before)| meet((at_before, end_before), (at, end)))
        {
            return wrong("it has a part of them already".to_string());
        }
        state.all.insert(at, end);
        state.fresh.push((at, end));
        match &state.progress {
            Some(progress) => progress.add_total(len),
            None => state.total += len,
        }
        // Under the lock: the ranges must be known before segments of them are made.
        self.0.queue.plan(&[(at, end)]);
        drop(state);
        added.changed.notify();
        Ok(())
    }

    /// Closes the plan for additions: a run ends when all of the plan is copied.
    pub fn close(&self) {
        if let Some(added) = &self.0.added {
            added.lock().closed = true;
            added.changed.notify();
        }
    }

    /// Copies `len` bytes at offset `at` before everything else, and waits until they are written:
    /// readable on the target, but durable only after the next flush. Does not wait for bytes that
    /// are not in the plan or already copied. Requests in flight go first, and nothing is copied
    /// while the engine is paused.
    ///
    /// # Errors
    /// [`Kind::ShuttingDown`] if the run fails or is cancelled before that.
    pub async fn want(&self, at: u64, len: u64) -> Result<()> {
        let arrived = self.0.queue.want((at, at.saturating_add(len)));
        match arrived.await {
            Ok(arrived) => arrived,
            Err(_) => Err(Error::new(Kind::ShuttingDown, "the plan is gone")),
        }
    }

    pub(crate) fn queue(&self) -> &Arc<SegmentQueue> {
        &self.0.queue
    }

    pub(crate) fn selection(&self) -> &Selection {
        &self.0.selection
    }

    /// The source of ranges beside the selection.
    pub(crate) fn added(&self) -> Option<&Arc<PlanAdditions>> {
        self.0.added.as_ref()
    }

    /// The plan starts to run: its bytes so far. Later additions are reported to `progress`.
    pub(crate) fn begin(&self, progress: &Arc<CopyProgress>) -> Result<u64> {
        if self.0.used.swap(true, Ordering::SeqCst) {
            return Err(Error::new(Kind::Invalid, "a plan can run only once"));
        }
        let Some(added) = &self.0.added else { return Ok(self.0.selection.total()) };
        let mut state = added.lock();
        state.progress = Some(progress.clone());
        Ok(state.total)
    }
}

impl fmt::Debug for EnginePlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Plan").field("selection", &self.0.selection).finish_non_exhaustive()
    }
}

/// Ranges that are added to a plan.
#[derive(Default)]
pub(crate) struct PlanAdditions {
    state: Mutex<AdditionState>,
    changed: Notify,
}

#[derive(Default)]
struct AdditionState {
    /// All added ranges: end by start.
    all: BTreeMap<u64, u64>,
    /// Ranges of which no segments have been made yet.
    fresh: Vec<SegmentRange>,
    closed: bool,
    /// Bytes added before the plan started to run.
    total: u64,
    /// Notified of later additions.
    progress: Option<Arc<CopyProgress>>,
}

impl PlanAdditions {
    fn lock(&self) -> MutexGuard<'_, AdditionState> {
        self.state.lock().expect("no panic under this lock")
    }

    /// Waits for added ranges, and returns them in order; `None`: no more follow, or `stopped`.
    pub(crate) async fn next(&self, stopped: impl Fn() -> bool) -> Option<Vec<SegmentRange>> {
        loop {
            let changed = self.changed.listen();
            if stopped() {
                return None;
            }
            {
                let mut state = self.lock();
                if !state.fresh.is_empty() {
                    let mut fresh = std::mem::take(&mut state.fresh);
                    fresh.sort_unstable();
                    return Some(fresh);
                }
                if state.closed {
                    return None;
                }
            }
            // Also notices a stop that does not wake.
            let _ = blockhaul_io::timeout(STOP_STEP, changed).await;
        }
    }
}
