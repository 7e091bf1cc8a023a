//! How many lanes are at work at a time: a lane works while it holds one of the places, and gives it
//! up between two requests when there are more lanes at work than are found to pay.

use std::future::poll_fn;
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::{Poll, Waker};

use crate::signals::{OVER, Signals};

/// The slots for lanes of a copy: each that is at work holds one of the places.
pub(crate) struct LaneSlots {
    state: Mutex<State>,
    /// Raised while more lanes are at work than there are places.
    signals: Arc<Signals>,
}

struct State {
    places: usize,
    active: usize,
    waiting: Vec<Waker>,
}

impl LaneSlots {
    /// Slots for so many lanes.
    pub(crate) fn new(places: usize, signals: Arc<Signals>) -> LaneSlots {
        let state = State { places: places.max(1), active: 0, waiting: Vec::new() };
        LaneSlots { state: Mutex::new(state), signals }
    }

    /// What lanes look at before each request.
    pub(crate) fn signals(&self) -> &Arc<Signals> {
        &self.signals
    }

    /// Changes the number of places.
    pub(crate) fn set_places(&self, places: usize) {
        self.change(|state| state.places = places.max(1));
    }

    /// Lanes that hold a place.
    pub(crate) fn active(&self) -> usize {
        self.lock().active
    }

    /// Takes a place even where none is free: the first lane never waits, nor one that somebody waits for.
    pub(crate) fn enter_beyond(&self) {
        self.change(|state| state.active += 1);
    }

    /// Waits for a place; false: there is no need any more.
    pub(crate) async fn enter(&self, stopped: impl Fn() -> bool) -> bool {
        let entered = poll_fn(|cx| {
            // Under the lock, so that no change of what it looks at is missed.
            let mut state = self.lock();
            if stopped() {
                return Poll::Ready(false);
            }
            if state.active < state.places {
                state.active += 1;
                return Poll::Ready(true);
            }
            state.waiting.push(cx.waker().clone());
            Poll::Pending
        });
        entered.await
    }

    /// Waits until there are more than `lanes` places, or no need any more.
    pub(crate) async fn wait_for_places(&self, lanes: usize, stopped: impl Fn() -> bool) {
        poll_fn(|cx| {
            let mut state = self.lock();
            if state.places > lanes || stopped() {
                return Poll::Ready(());
            }
            state.waiting.push(cx.waker().clone());
            Poll::Pending
        })
        .await;
    }

    /// Gives a place up if more are taken than there are; says whether it did.
    pub(crate) fn leave_if_over(&self) -> bool {
        if !self.signals.is(OVER) {
            return false;
        }
        let mut left = false;
        self.change(|state| {
            left = state.active > state.places;
            state.active -= usize::from(left);
        });
        left
    }

    /// Gives a place up.
    pub(crate) fn leave(&self) {
        self.change(|state| state.active -= 1);
    }

    /// Has everybody who waits look again whether there is still a need.
    pub(crate) fn wake(&self) {
        self.change(|_| {});
    }

    fn change(&self, change: impl FnOnce(&mut State)) {
        let mut state = self.lock();
        change(&mut state);
        self.signals.set(OVER, state.active > state.places);
        let waiting = std::mem::take(&mut state.waiting);
        drop(state);
        waiting.into_iter().for_each(Waker::wake);
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no panic under this lock")
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;
    use std::task::Context;

    use super::*;

    #[test]
    fn lanes_wait_for_a_place_and_give_it_up_when_there_are_too_many() {
        let slots = LaneSlots::new(2, Arc::default());
        let cx = &mut Context::from_waker(Waker::noop());
        slots.enter_beyond();
        assert_eq!(pin!(slots.enter(|| false)).poll(cx), Poll::Ready(true));
        let mut third = pin!(slots.enter(|| false));
        assert!(third.as_mut().poll(cx).is_pending());
        assert!(!slots.leave_if_over());
        slots.set_places(1);
        assert!(slots.leave_if_over());
        assert!(!slots.leave_if_over(), "the other one stays");
        assert!(third.as_mut().poll(cx).is_pending());
        slots.leave();
        assert_eq!(third.as_mut().poll(cx), Poll::Ready(true));
        assert_eq!(slots.active(), 1);
        assert_eq!(pin!(slots.enter(|| true)).poll(cx), Poll::Ready(false), "nothing left to do");
    }
}
