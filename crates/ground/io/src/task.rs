//! Local tasks: futures that run on the worker that started them, over the `async-task` crate.

use std::future::poll_fn;
use std::pin::Pin;
use std::task::{Context, Poll};

use async_task::Runnable;

use crate::context::with_worker;
use crate::panic;
use crate::sync::LostCompletion;

/// A running task. Awaiting it yields the output; dropping it detaches it, and the task continues.
/// Awaiting a task that has panicked panics, too; [`Task::poll_or_lost`] does not.
pub struct Task<T>(Option<async_task::FallibleTask<T>>);

impl<T> Task<T> {
    /// Whether the task has ended; awaiting it is then immediate.
    pub fn is_finished(&self) -> bool {
        self.0.as_ref().is_none_or(async_task::FallibleTask::is_finished)
    }

    /// Drops the future now or as soon as it yields. For loops that wait (accept, timers): never
    /// for a task that has a write in flight.
    pub fn cancel(mut self) {
        drop(self.0.take());
    }

    /// The output when it is ready; [`LostCompletion`] if the task has panicked.
    pub fn poll_or_lost(&mut self, cx: &mut Context<'_>) -> Poll<Result<T, LostCompletion>> {
        let task = self.0.as_mut().expect("only `cancel` and `drop` take the task out");
        Pin::new(task).poll(cx).map(|output| output.ok_or(LostCompletion))
    }
}

impl<T> Future for Task<T> {
    type Output = T;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<T> {
        let polled = self.poll_or_lost(cx);
        polled.map(|output| output.expect("a task that is awaited does not panic"))
    }
}

impl<T> Drop for Task<T> {
    fn drop(&mut self) {
        if let Some(task) = self.0.take() {
            task.detach();
        }
    }
}

/// Queues a task on the current worker. Panics outside a worker.
pub fn spawn<F>(future: F) -> Task<F::Output>
where
    F: Future + 'static,
    F::Output: 'static,
{
    let (runnable, task) = prepare(future);
    runnable.schedule();
    Task(Some(task.fallible()))
}

/// Starts a task on the current worker and runs it up to its first wait before returning. Panics
/// outside a worker.
pub fn start<F>(future: F) -> Task<F::Output>
where
    F: Future + 'static,
    F::Output: 'static,
{
    let (runnable, task) = prepare(future);
    // A panic is the task's, not its starter's.
    panic::contained(|| {
        // Whether it was queued again does not matter here.
        let _ = runnable.run();
    });
    Task(Some(task.fallible()))
}

/// A task of the current worker that was neither queued nor run yet.
#[inline]
fn prepare<F>(future: F) -> (Runnable, async_task::Task<F::Output>)
where
    F: Future + 'static,
    F::Output: 'static,
{
    #[cfg(feature = "simulation")]
    let future = crate::simulation::mortal(future);
    // The future, which may be large, is not moved through the closure.
    let scheduler = with_worker(|worker| worker.scheduler());
    async_task::spawn_local(future, scheduler)
}

/// Lets every task that is ready now run first.
pub async fn yield_now() {
    let mut yielded = false;
    poll_fn(|cx| {
        if std::mem::replace(&mut yielded, true) {
            return Poll::Ready(());
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
}
