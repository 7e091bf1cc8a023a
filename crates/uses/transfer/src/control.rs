//! Control of a copy from other threads, and what is left when it has stopped.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};

use blockhaul_engine::{CopyProgress, EngineControl};

/// Controls a copy; orders from before it runs apply when it does. May be used from any thread.
#[derive(Clone, Default)]
pub struct CopyControl(Arc<ControlState>);

#[derive(Default)]
struct ControlState {
    progress: Arc<CopyProgress>,
    has_journal: bool,
    verifies: bool,
    /// The target may have been resized, emptied or written.
    is_touched: AtomicBool,
    /// The target is replaced as a whole, at the end of the copy.
    is_replaced: AtomicBool,
    engine: OnceLock<EngineControl>,
    early: Mutex<EarlyOrders>,
}

/// Orders from before the engine was there.
#[derive(Default)]
struct EarlyOrders {
    paused: bool,
    /// Bytes per second; 0: no limit.
    rate: Option<u64>,
}

impl CopyControl {
    pub(crate) fn new(
        progress: Arc<CopyProgress>,
        has_journal: bool,
        verifies: bool,
    ) -> CopyControl {
        CopyControl(Arc::new(ControlState {
            progress,
            has_journal,
            verifies,
            ..ControlState::default()
        }))
    }

    /// Notes the engine.
    pub(crate) fn set_engine(&self, control: EngineControl) {
        let early = self.early();
        if early.paused {
            control.pause();
        }
        if let Some(bytes) = early.rate {
            let (_, requests) = control.rate_limits();
            control.set_rate(bytes, requests);
        }
        // Set once: a copy runs once.
        let _ = self.0.engine.set(control);
    }

    /// Notes that the contents of the target may be lost from here on.
    pub(crate) fn touch(&self) {
        self.0.is_touched.store(true, Ordering::Relaxed);
    }

    /// Notes a target that is replaced as a whole.
    pub(crate) fn set_replaced(&self, replaced: bool) {
        self.0.is_replaced.store(replaced, Ordering::Relaxed);
    }

    /// The counters of the copy, also while it runs; they can cancel it.
    pub fn progress(&self) -> &Arc<CopyProgress> {
        &self.0.progress
    }

    /// Starts no more requests, or continues.
    pub fn pause(&self, paused: bool) {
        let mut early = self.early();
        early.paused = paused;
        match self.0.engine.get() {
            Some(control) if paused => control.pause(),
            Some(control) => control.resume(),
            None => {}
        }
    }

    /// Limits the bytes per second; 0: no limit.
    pub fn limit(&self, bytes: u64) {
        let mut early = self.early();
        early.rate = Some(bytes);
        if let Some(control) = self.0.engine.get() {
            let (_, requests) = control.rate_limits();
            control.set_rate(bytes, requests);
        }
    }

    /// Ends the copy soon, also while it is being opened: nothing more is submitted, and requests in flight
    /// are awaited.
    pub fn cancel(&self) {
        self.0.progress.cancel();
        if let Some(control) = self.0.engine.get() {
            control.cancel();
        }
    }

    /// The state of the target after a copy that was stopped.
    pub fn target_state(&self) -> TargetState {
        let ControlState { progress, has_journal, verifies, .. } = &*self.0;
        let is_replaced = self.0.is_replaced.load(Ordering::Relaxed);
        match (progress.is_complete(), self.is_touched() && !is_replaced) {
            (true, _) if *verifies => TargetState::NotVerified { has_journal: *has_journal },
            (true, _) => TargetState::NoDigest,
            (false, _) if *has_journal => TargetState::Resumable,
            (false, true) => TargetState::Incomplete,
            (false, false) => TargetState::Unchanged,
        }
    }

    /// Whether the target may contain a part of the source.
    pub fn has_left_a_part(&self) -> bool {
        self.is_touched() && !self.0.progress.is_complete()
    }

    fn is_touched(&self) -> bool {
        self.0.is_touched.load(Ordering::Relaxed)
    }

    fn early(&self) -> MutexGuard<'_, EarlyOrders> {
        self.0.early.lock().expect("no panic under this lock")
    }
}

/// The state of the target after a copy that was stopped. Displayed after the word "stopped", with the
/// next step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TargetState {
    /// All data is there, and not verified.
    NotVerified {
        /// The copy can be repeated with its journal.
        has_journal: bool,
    },
    /// All data is there, and its digest is unknown.
    NoDigest,
    /// A part is there, and the journal says which.
    Resumable,
    /// A part may be there.
    Incomplete,
    /// The target is as it was.
    Unchanged,
}

impl fmt::Display for TargetState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            TargetState::NotVerified { has_journal: true } => {
                ": all data is copied, but not verified: run it again to verify it"
            }
            TargetState::NotVerified { has_journal: false } => {
                ": all data is copied, but not verified: copy it again, or compare both sides with \
                 blockhaul compare"
            }
            TargetState::NoDigest => {
                ": all data is copied, but its digest is unknown: run blockhaul checksum"
            }
            TargetState::Resumable => ": run it again to resume",
            TargetState::Incomplete => "; the target is incomplete: copy it again",
            TargetState::Unchanged => "; the target was not changed",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_target_that_is_replaced_as_a_whole_is_never_incomplete() {
        for (replaced, expected) in
            [(false, TargetState::Incomplete), (true, TargetState::Unchanged)]
        {
            let control = CopyControl::default();
            control.touch();
            control.set_replaced(replaced);
            assert_eq!(control.target_state(), expected);
            control.0.progress.cancel();
            assert_eq!(control.target_state(), expected);
        }
    }
}
