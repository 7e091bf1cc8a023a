//! Sleeping and deadlines; each worker keeps its own ordered set of timers.

use std::collections::BTreeMap;
use std::fmt;
use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use crate::worker::with_worker;

#[derive(Default)]
pub(crate) struct Timers {
    set: BTreeMap<(Instant, u64), Waker>,
    next: u64,
}

impl Timers {
    /// Takes out everything due at `now`.
    pub(crate) fn due(&mut self, now: Instant) -> Vec<Waker> {
        let mut due = Vec::new();
        while let Some(entry) = self.set.first_entry() {
            if entry.key().0 > now {
                break;
            }
            due.push(entry.remove());
        }
        due
    }

    /// The earliest deadline.
    pub(crate) fn earliest(&self) -> Option<Instant> {
        self.set.keys().next().map(|key| key.0)
    }
}

/// Waits for `duration`.
pub async fn sleep(duration: Duration) {
    // Too far to be represented: wait for a century, which is for ever here.
    let far = Duration::from_secs(100 * 365 * 86_400);
    sleep_until(Instant::now() + duration.min(far)).await;
}

/// Waits until `deadline`.
pub fn sleep_until(deadline: Instant) -> impl Future<Output = ()> {
    Sleep { deadline, key: None }
}

struct Sleep {
    deadline: Instant,
    key: Option<(Instant, u64)>,
}

impl Future for Sleep {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        if Instant::now() >= self.deadline {
            return Poll::Ready(());
        }
        with_worker(|worker| {
            let mut timers = worker.timers.borrow_mut();
            let deadline = self.deadline;
            let key = *self.key.get_or_insert_with(|| {
                timers.next += 1;
                (deadline, timers.next)
            });
            timers.set.insert(key, cx.waker().clone());
        });
        Poll::Pending
    }
}

impl Drop for Sleep {
    fn drop(&mut self) {
        if let Some(key) = self.key {
            crate::worker::try_with_worker(|worker| worker.timers.borrow_mut().set.remove(&key));
        }
    }
}

/// The time given to [`timeout`] has passed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Elapsed;

impl fmt::Display for Elapsed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("timed out")
    }
}

impl std::error::Error for Elapsed {}

/// Waits for `future` at most `duration`, then drops it: not for a future that owns a write.
pub async fn timeout<F: Future>(duration: Duration, future: F) -> Result<F::Output, Elapsed> {
    let mut future = pin!(future);
    let mut sleep = pin!(sleep(duration));
    poll_fn(|cx| {
        if let Poll::Ready(output) = future.as_mut().poll(cx) {
            return Poll::Ready(Ok(output));
        }
        sleep.as_mut().poll(cx).map(|()| Err(Elapsed))
    })
    .await
}
