//! Limits how many lanes are active at a time: a lane is active while it holds a place, and gives
//! it up between two requests when more lanes are active than pay.

use std::future::poll_fn;
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::{Poll, Waker};

use crate::signals::{LaneSignals, OVER};

/// The places of a copy's active lanes.
pub(crate) struct LaneSlots {
    state: Mutex<LaneSlotState>,
    /// Raised while more lanes are active than there are places.
    signals: Arc<LaneSignals>,
}

struct LaneSlotState {
    places: usize,
    active: usize,
    waiting: Vec<Waker>,
}

impl LaneSlots {
    /// Slots with `places` places.
    pub(crate) fn new(places: usize, signals: Arc<LaneSignals>) -> LaneSlots {
        let state = LaneSlotState { places: places.max(1), active: 0, waiting: Vec::new() };
        LaneSlots { state: Mutex::new(state), signals }
    }

    /// The signals that lanes check before each request.
    pub(crate) fn signals(&self) -> &Arc<LaneSignals> {
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

    /// Takes a place even if none is free: for the first lane, and for one with a wanted range.
    pub(crate) fn enter_beyond(&self) {
        self.change(|state| state.active += 1);
    }

    /// Waits for a place; false: none is needed any more.
    pub(crate) async fn enter(&self, stopped: impl Fn() -> bool) -> bool {
        let entered = poll_fn(|cx| {
            // Under the lock, so that no change of the condition is missed.
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

    /// Waits until there are more than `lanes` places, or none is needed any more.
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

    /// Gives up a place if more are taken than there are; returns whether it did.
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

    /// Gives up a place.
    pub(crate) fn leave(&self) {
        self.change(|state| state.active -= 1);
    }

    /// Wakes all waiting lanes to check whether they are still needed.
    pub(crate) fn wake(&self) {
        self.change(|_| {});
    }

    fn change(&self, change: impl FnOnce(&mut LaneSlotState)) {
        let mut state = self.lock();
        change(&mut state);
        self.signals.set(OVER, state.active > state.places);
        let waiting = std::mem::take(&mut state.waiting);
        drop(state);
        waiting.into_iter().for_each(Waker::wake);
    }

    fn lock(&self) -> MutexGuard<'_, LaneSlotState> {
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
