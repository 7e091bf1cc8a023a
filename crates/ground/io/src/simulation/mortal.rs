//! Tasks that end with their machine.

use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};

use super::life::WorkerTasks;
use super::world;

/// A future that is dropped when its worker's life is over.
pub(crate) struct WorkerFuture<F> {
    future: Option<Pin<Box<F>>>,
    life: Option<Rc<WorkerTasks>>,
    place: Option<u64>,
}

/// The future as a task of the current worker.
pub(crate) fn mortal<F: Future>(future: F) -> WorkerFuture<F> {
    let life = world::with(|world| Some(world.members[world.current?].life.clone())).flatten();
    WorkerFuture { future: Some(Box::pin(future)), life, place: None }
}

impl<F: Future> Future for WorkerFuture<F> {
    type Output = F::Output;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<F::Output> {
        if let Some(life) = self.life.clone() {
            if life.is_over() {
                drop(self.future.take());
                return Poll::Pending;
            }
            if self.place.is_none() {
                self.place = Some(life.add(cx.waker().clone()));
            }
        }
        match &mut self.future {
            Some(future) => future.as_mut().poll(cx),
            None => Poll::Pending,
        }
    }
}

impl<F> Drop for WorkerFuture<F> {
    fn drop(&mut self) {
        if let (Some(life), Some(place)) = (&self.life, self.place) {
            life.remove(place);
        }
    }
}
