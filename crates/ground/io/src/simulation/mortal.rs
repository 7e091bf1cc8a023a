//! Tasks that end with their machine.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

use super::world;

/// The tasks of one worker. Tasks that hold each other's wakers are found only here.
#[derive(Default)]
pub(super) struct Life {
    over: Cell<bool>,
    wakers: RefCell<BTreeMap<u64, Waker>>,
    next: Cell<u64>,
}

impl Life {
    /// Ends it: every task that is polled from now on drops its future. Returns those to poll.
    pub(super) fn end(&self) -> Vec<Waker> {
        self.over.set(true);
        std::mem::take(&mut *self.wakers.borrow_mut()).into_values().collect()
    }
}

/// A future that is dropped when its worker's life is over.
pub(crate) struct Mortal<F> {
    future: Option<Pin<Box<F>>>,
    life: Option<Rc<Life>>,
    place: Option<u64>,
}

/// The future as a task of the current worker.
pub(crate) fn mortal<F: Future>(future: F) -> Mortal<F> {
    let life = world::with(|world| Some(world.members[world.current?].life.clone())).flatten();
    Mortal { future: Some(Box::pin(future)), life, place: None }
}

impl<F: Future> Future for Mortal<F> {
    type Output = F::Output;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<F::Output> {
        if let Some(life) = self.life.clone() {
            if life.over.get() {
                drop(self.future.take());
                return Poll::Pending;
            }
            if self.place.is_none() {
                let place = life.next.get();
                life.next.set(place + 1);
                life.wakers.borrow_mut().insert(place, cx.waker().clone());
                self.place = Some(place);
            }
        }
        match &mut self.future {
            Some(future) => future.as_mut().poll(cx),
            None => Poll::Pending,
        }
    }
}

impl<F> Drop for Mortal<F> {
    fn drop(&mut self) {
        if let (Some(life), Some(place)) = (&self.life, self.place) {
            let waker = life.wakers.borrow_mut().remove(&place);
            drop(waker);
        }
    }
}
