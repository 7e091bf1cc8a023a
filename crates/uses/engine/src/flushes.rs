//! The flushes of a target, of all lanes together.
//!
//! The kernel reports a writeback error once for each open file description, and so does a server that
//! shares one between its connections: the flush that fails says that data is lost, a later one succeeds
//! without it. So a failed flush concerns all lanes: whatever any of them wrote that was not covered by a
//! flush before is suspect. And a flush that succeeds while another one fails proves nothing: the other
//! one may have consumed the error.

use std::collections::BTreeSet;
use std::future::poll_fn;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard};
use std::task::{Poll, Waker};

use blockhaul_block::{Error, Outcome};

/// Failed flushes without a successful one between them after which the copy ends: storage that stays
/// failed until it is opened again is not asked for longer.
const FAILED_MAX: u32 = 4;

/// What is known of the flushes of one target.
#[derive(Default)]
pub(crate) struct Flushes {
    state: Mutex<State>,
    /// Flushes that have failed; beside the state, because every write asks. Changed under its lock.
    failures: AtomicU64,
}

#[derive(Default)]
struct State {
    /// Number of the next flush.
    next: u64,
    running: BTreeSet<u64>,
    /// Failures since the last flush that succeeded, but for those of lost connections.
    in_a_row: u32,
    /// The last failure of the storage.
    error: Option<Error>,
    /// A lane has ended without a flush: nobody would write again what it wrote.
    left: bool,
    waiting: Vec<Waker>,
}

/// Why a flush has proven nothing.
pub(crate) enum Unproven {
    /// It succeeded while another one failed.
    Overlapped,
    /// It failed. `last`: neither repeating it nor writing again helps.
    Failed { error: Error, last: bool },
}

impl Flushes {
    /// Flushes that have failed so far.
    pub(crate) fn failures(&self) -> u64 {
        self.failures.load(Ordering::SeqCst)
    }

    /// The last error of a flush that was none of a lost connection.
    pub(crate) fn error(&self) -> Option<Error> {
        self.lock().error.clone()
    }

    /// Carries out a flush. Ok: it succeeded, and none failed since `failures` was the number of those
    /// that had failed, nor any that it overlapped: what had been written before is durable.
    /// `lost_connection` tells an error that says nothing about the storage.
    pub(crate) async fn run(
        &self,
        failures: u64,
        flush: impl Future<Output = Outcome>,
        lost_connection: impl FnOnce(&Error) -> bool,
    ) -> Result<(), Unproven> {
        // Also where the future is dropped.
        let running = Running { flushes: self, number: self.begin() };
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
            return Err(Unproven::Failed { error, last });
        }
        self.overlapping().await;
        match self.failures() == failures {
            true => Ok(()),
            false => Err(Unproven::Overlapped),
        }
    }

    /// A lane ends whose writes no flush covers. False if a flush has failed, so that they may be lost.
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

    /// Waits until the flushes have ended that are running now.
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

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no panic under this lock")
    }
}

struct Running<'a> {
    flushes: &'a Flushes,
    number: u64,
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        let mut state = self.flushes.lock();
        state.running.remove(&self.number);
        let waiting = std::mem::take(&mut state.waiting);
        drop(state);
        waiting.into_iter().for_each(Waker::wake);
    }
}
