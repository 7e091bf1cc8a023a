//! The flushes of a target, for all lanes.
//!
//! The kernel reports a writeback error once per open file description, and so does a server that
//! shares one between its connections: the flush that fails reports that data is lost, and a later
//! one succeeds without that data. So a failed flush concerns all lanes: whatever any of them wrote
//! since the last good flush is suspect. And a flush that succeeds while another one fails proves
//! nothing: the other one may have consumed the error.

use std::collections::BTreeSet;
use std::future::poll_fn;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard};
use std::task::{Poll, Waker};

use blockhaul_block::{Error, Outcome};

/// Consecutive failed flushes after which the copy ends: storage that fails until it is reopened is
/// not retried longer.
const FAILED_MAX: u32 = 4;

/// The state of the flushes of one target.
#[derive(Default)]
pub(crate) struct TargetFlushes {
    state: Mutex<TargetFlushState>,
    /// Number of failed flushes; outside the state, because every write reads it. Changed under its
    /// lock.
    failures: AtomicU64,
}

#[derive(Default)]
struct TargetFlushState {
    /// Number of the next flush.
    next: u64,
    running: BTreeSet<u64>,
    /// Failures since the last successful flush, without those of lost connections.
    in_a_row: u32,
    /// The last failure of the storage.
    error: Option<Error>,
    /// A lane has ended without a flush: its writes would not be repeated.
    left: bool,
    waiting: Vec<Waker>,
}

/// Why a flush proves nothing.
pub(crate) enum FlushDoubt {
    /// It succeeded while another one failed.
    Overlapped,
    /// It failed. `last`: neither repeating it nor writing again helps.
    Failed { error: Error, last: bool },
}

impl TargetFlushes {
    /// Number of failed flushes so far.
    pub(crate) fn failures(&self) -> u64 {
        self.failures.load(Ordering::SeqCst)
    }

    /// The last flush error that was not a lost connection.
    pub(crate) fn error(&self) -> Option<Error> {
        self.lock().error.clone()
    }

    /// Runs a flush. Ok: it succeeded, and no flush has failed since the count was `failures`, nor
    /// any that it overlapped: what was written before it is durable. `lost_connection` recognizes
    /// errors that do not come from the storage.
    pub(crate) async fn run(
        &self,
        failures: u64,
        flush: impl Future<Output = Outcome>,
        lost_connection: impl FnOnce(&Error) -> bool,
    ) -> Result<(), FlushDoubt> {
        // Also if the future is dropped.
        let running = FlushCall { flushes: self, number: self.begin() };
        let outcome = flush.await;
        let last = {
            let mut state = self.lock();
            match &outcome {
                Ok(_) => {
                    state.in_a_row = 0;
                    false
                }
                Err(error) => {
                    // Also if the connection was lost: the server may have consumed an error before.
                    self.failures.fetch_add(1, Ordering::SeqCst);
                    let failed = !lost_connection(error);
                    if failed {
                        state.in_a_row += 1;
                        state.error = Some(error.clone());
                    }
                    failed && (state.left || state.in_a_row >= FAILED_MAX)
                }
            }
        };
        drop(running);
        if let Err(error) = outcome {
            return Err(FlushDoubt::Failed { error, last });
        }
        self.overlapping().await;
        if self.failures() == failures { Ok(()) } else { Err(FlushDoubt::Overlapped) }
    }

    /// A lane ends with writes that no flush covers. False if a flush has failed, so that they may
    /// be lost.
    pub(crate) fn leave(&self) -> bool {
        let mut state = self.lock();
        let well = self.failures() == 0;
        state.left |= well;
        well
    }

    fn begin(&self) -> u64 {
        let mut state = self.lock();
        let number = state.next;
        state.next += 1;
        state.running.insert(number);
        number
    }

    /// Waits until the flushes that are running now have ended.
    async fn overlapping(&self) {
        let end = self.lock().next;
        poll_fn(|cx| {
            let mut state = self.lock();
            match state.running.first() {
                Some(&first) if first < end => {
                    state.waiting.push(cx.waker().clone());
                    Poll::Pending
                }
                _ => Poll::Ready(()),
            }
        })
        .await;
    }

    fn lock(&self) -> MutexGuard<'_, TargetFlushState> {
        self.state.lock().expect("no panic under this lock")
    }
}

struct FlushCall<'a> {
    flushes: &'a TargetFlushes,
    number: u64,
}

impl Drop for FlushCall<'_> {
    fn drop(&mut self) {
        let mut state = self.flushes.lock();
        state.running.remove(&self.number);
        let waiting = std::mem::take(&mut state.waiting);
        drop(state);
        waiting.into_iter().for_each(Waker::wake);
    }
}
