//! Sleeping and deadlines.

use std::fmt;
use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use crate::context::{try_with_worker, with_worker};
use crate::timers::TimerKey;

/// Waits for `duration`.
pub async fn sleep(duration: Duration) {
    // Too far to be represented: wait for a century.
    let far = Duration::from_secs(100 * 365 * 86_400);
    sleep_until(crate::now() + duration.min(far)).await;
}

/// Waits until `deadline`.
pub fn sleep_until(deadline: Instant) -> impl Future<Output = ()> {
    Sleep { deadline, place: None }
}

struct Sleep {
    deadline: Instant,
    place: Option<TimerKey>,
}

impl Future for Sleep {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        if crate::now() >= self.deadline {
            return Poll::Ready(());
        }
        with_worker(|worker| {
            let mut timers = worker.timers.borrow_mut();
            let deadline = self.deadline;
            let place = *self.place.get_or_insert_with(|| timers.place(deadline));
            timers.set(place, cx.waker().clone());
        });
        Poll::Pending
    }
}

impl Drop for Sleep {
    fn drop(&mut self) {
        if let Some(place) = self.place {
            try_with_worker(|worker| worker.timers.borrow_mut().remove(place));
        }
    }
}

/// The time of a [`timeout`] has passed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TimeoutError;

impl fmt::Display for TimeoutError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("timed out")
    }
}

impl std::error::Error for TimeoutError {}

/// Waits for `future` at most `duration`, then drops it: not for a future that owns a write.
///
/// # Errors
/// [`TimeoutError`] if the future has not ended by then.
pub async fn timeout<F: Future>(duration: Duration, future: F) -> Result<F::Output, TimeoutError> {
    let mut future = pin!(future);
    let mut sleep = pin!(sleep(duration));
    poll_fn(|cx| {
        if let Poll::Ready(output) = future.as_mut().poll(cx) {
            return Poll::Ready(Ok(output));
        }
        sleep.as_mut().poll(cx).map(|()| Err(TimeoutError))
    })
    .await
}
