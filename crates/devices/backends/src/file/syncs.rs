//! Flushes of an open file: one at a time, shared by waiting requests, and none after a failed one.
//!
//! The kernel reports lost data once per open file. If two calls of fdatasync(2) overlap, neither
//! can be trusted: one may have taken the report about data that the other one should make durable.
//! So there is one call at a time. Requests that arrive meanwhile share the next call.

use std::sync::{Arc, Mutex, MutexGuard};

use blockhaul_block::{Error, FailedFlush, Kind, Result};
use blockhaul_io::Completer;

/// The flushes of all handles to an open file.
#[derive(Default)]
pub(super) struct Syncs {
    failed: FailedFlush,
    state: Mutex<SyncState>,
}

#[derive(Default)]
struct SyncState {
    running: bool,
    /// Requests that have arrived since the running call began.
    waiting: Vec<Completer<SyncTurn>>,
}

/// What a waiting request receives.
enum SyncTurn {
    /// It makes the next call, for others as well.
    Lead(Lead),
    /// The outcome of the call that another request made for it.
    Over(Result<()>),
}

/// Permission to make the only call. Dropping it passes the permission on.
struct Lead {
    syncs: Arc<Syncs>,
    /// The other requests that the call is for.
    others: Vec<Completer<SyncTurn>>,
}

impl Syncs {
    /// Whether a flush may still succeed; like [`FailedFlush::check`].
    pub(super) fn check(&self) -> Result<()> {
        self.failed.check()
    }

    /// Makes earlier writes durable: by `sync`, or by a call of another request that begins after
    /// this request has arrived.
    pub(super) async fn run<F: Future<Output = Result<()>>>(
        self: &Arc<Syncs>,
        sync: impl FnOnce() -> F,
    ) -> Result<()> {
        let ticket = {
            let mut state = self.state();
            self.check()?;
            let waits = std::mem::replace(&mut state.running, true);
            waits.then(|| {
                let (completer, ticket) = blockhaul_io::ticket();
                state.waiting.push(completer);
                ticket
            })
        };
        let turn = match ticket {
            None => SyncTurn::Lead(Lead { syncs: self.clone(), others: Vec::new() }),
            Some(ticket) => ticket.await.map_err(|lost| {
                Error::new(Kind::Io, "the flush of another request got lost").because(lost)
            })?,
        };
        match turn {
            SyncTurn::Lead(lead) => lead.end(sync().await),
            SyncTurn::Over(outcome) => outcome,
        }
    }

    fn state(&self) -> MutexGuard<'_, SyncState> {
        self.state.lock().expect("no panic under this lock")
    }
}

impl Lead {
    /// Passes the outcome to the others, and a failure also to requests that overlapped the call.
    fn end(mut self, outcome: Result<()>) -> Result<()> {
        let mut told = std::mem::take(&mut self.others);
        if let Err(error) = &outcome {
            let mut state = self.syncs.state();
            self.syncs.failed.note(error);
            told.append(&mut state.waiting);
        }
        for other in told {
            other.complete(SyncTurn::Over(outcome.clone()));
        }
        outcome
    }
}

impl Drop for Lead {
    fn drop(&mut self) {
        let mut others = std::mem::take(&mut self.others);
        let mut state = self.syncs.state();
        others.append(&mut state.waiting);
        if others.is_empty() {
            state.running = false;
            return;
        }
        drop(state);
        let first = others.remove(0);
        first.complete(SyncTurn::Lead(Lead { syncs: self.syncs.clone(), others }));
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    fn on_a_worker<F: Future<Output = ()> + 'static>(test: impl FnOnce() -> F + Send + 'static) {
        blockhaul_io::Runtime::start(&blockhaul_io::RuntimeConfig {
            workers: 1,
            ..Default::default()
        })
        .unwrap()
        .block_on(test);
    }

    /// Calls that the test ends.
    #[derive(Default)]
    struct Calls {
        begun: AtomicUsize,
        open: Mutex<Vec<Completer<Result<()>>>>,
    }

    impl Calls {
        fn request(self: &Arc<Calls>, syncs: &Arc<Syncs>) -> blockhaul_io::Task<Result<()>> {
            let calls = self.clone();
            let syncs = syncs.clone();
            blockhaul_io::start(async move {
                syncs
                    .run(|| async {
                        let (completer, ticket) = blockhaul_io::ticket();
                        calls.begun.fetch_add(1, Ordering::Relaxed);
                        calls.open.lock().unwrap().push(completer);
                        ticket.await.unwrap()
                    })
                    .await
            })
        }

        /// Ends the only open call.
        fn end(&self, outcome: Result<()>) {
            let mut open = self.open.lock().unwrap();
            assert_eq!(open.len(), 1, "one call at a time");
            open.pop().unwrap().complete(outcome);
        }

        fn begun(&self) -> usize {
            self.begun.load(Ordering::Relaxed)
        }
    }

    #[test]
    fn requests_that_arrive_during_a_call_share_the_next_one() {
        on_a_worker(|| async {
            let syncs = Arc::<Syncs>::default();
            let calls = Arc::<Calls>::default();
            let first = calls.request(&syncs);
            let rest: Vec<_> = (0..5).map(|_| calls.request(&syncs)).collect();
            assert_eq!(calls.begun(), 1);
            calls.end(Ok(()));
            first.await.unwrap();
            while calls.begun() < 2 {
                blockhaul_io::yield_now().await;
            }
            let late = calls.request(&syncs);
            assert!(rest.iter().all(|request| !request.is_finished()), "their call runs");
            calls.end(Ok(()));
            for request in rest {
                request.await.unwrap();
            }
            while calls.begun() < 3 {
                blockhaul_io::yield_now().await;
            }
            assert!(!late.is_finished(), "its call began after it arrived");
            calls.end(Ok(()));
            late.await.unwrap();
            assert_eq!(calls.begun(), 3);
            assert!(!syncs.state().running);
        });
    }

    #[test]
    fn a_failure_fails_what_overlaps_it_and_all_later_requests() {
        on_a_worker(|| async {
            let syncs = Arc::<Syncs>::default();
            let calls = Arc::<Calls>::default();
            let first = calls.request(&syncs);
            let during: Vec<_> = (0..3).map(|_| calls.request(&syncs)).collect();
            calls.end(Err(Error::new(Kind::NoSpace, "no room")));
            assert_eq!(first.await.unwrap_err().kind(), Kind::NoSpace);
            for request in during {
                request.await.unwrap_err();
            }
            for _ in 0..2 {
                let text = calls.request(&syncs).await.unwrap_err().to_string();
                assert!(
                    text.contains("no room") && text.contains("open the storage again"),
                    "{text}"
                );
            }
            assert_eq!(calls.begun(), 1, "no later request reaches the kernel");
        });
    }

    #[test]
    fn a_request_that_is_dropped_does_not_hold_up_others() {
        on_a_worker(|| async {
            let syncs = Arc::<Syncs>::default();
            let calls = Arc::<Calls>::default();
            let first = calls.request(&syncs);
            {
                let mut waits = Box::pin(syncs.run(|| async { Ok(()) }));
                assert!(
                    blockhaul_io::timeout(std::time::Duration::ZERO, &mut waits).await.is_err()
                );
            }
            let last = calls.request(&syncs);
            calls.end(Ok(()));
            first.await.unwrap();
            while calls.begun() < 2 {
                blockhaul_io::yield_now().await;
            }
            calls.end(Ok(()));
            last.await.unwrap();
        });
    }
}
