//! What lanes check before each request, in one word: whether the engine is paused, whether a
//! caller waits for a range, whether more lanes are active than pay.

use std::sync::atomic::{AtomicU8, AtomicUsize, Ordering};

use blockhaul_io::Notify;

/// No new request starts.
pub(crate) const PAUSED: u8 = 1;
/// A caller waits for a range.
pub(crate) const WANTED: u8 = 2;
/// More lanes are active than there are places.
pub(crate) const OVER: u8 = 4;

/// The signals of an engine, and how many of its lanes may start requests.
#[derive(Default)]
pub(crate) struct LaneSignals {
    raised: AtomicU8,
    /// Lanes that may start requests.
    busy: AtomicUsize,
    changed: Notify,
}

impl LaneSignals {
    /// Whether any signal is raised.
    pub(crate) fn any(&self) -> bool {
        self.raised.load(Ordering::Relaxed) != 0
    }

    /// Whether this signal is raised.
    pub(crate) fn is(&self, signal: u8) -> bool {
        self.raised.load(Ordering::SeqCst) & signal != 0
    }

    /// Raises or clears a signal.
    pub(crate) fn set(&self, signal: u8, raised: bool) {
        if raised {
            self.raised.fetch_or(signal, Ordering::SeqCst);
        } else {
            self.raised.fetch_and(!signal, Ordering::SeqCst);
        }
        if signal == PAUSED {
            self.changed.notify();
        }
    }

    /// Wakes the lanes that wait for the end of a pause.
    pub(crate) fn wake(&self) {
        self.changed.notify();
    }

    /// A lane may start requests from now on.
    pub(crate) fn begin_work(&self) {
        self.busy.fetch_add(1, Ordering::SeqCst);
    }

    /// A lane starts no requests until it calls `begin_work` again.
    pub(crate) fn end_work(&self) {
        if self.busy.fetch_sub(1, Ordering::SeqCst) == 1 {
            self.changed.notify();
        }
    }

    /// Waits until there is no pause, or `stopped`.
    pub(crate) async fn resumed(&self, stopped: impl Fn() -> bool) {
        while self.is(PAUSED) {
            let changed = self.changed.listen();
            if !self.is(PAUSED) || stopped() {
                return;
            }
            // Also notices a stop that does not wake.
            let _ = blockhaul_io::timeout(crate::progress::STOP_STEP, changed).await;
        }
    }

    /// Waits until no lane may start requests.
    pub(crate) async fn quiet(&self) {
        loop {
            let changed = self.changed.listen();
            if self.busy.load(Ordering::SeqCst) == 0 {
                return;
            }
            // Never lost: this side keeps the sender.
            let _ = changed.await;
        }
    }
}
