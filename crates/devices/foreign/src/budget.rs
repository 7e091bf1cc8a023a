//! The limit of bytes lent to a library. Requests beyond it wait, first come first served.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

use blockhaul_io::Completer;

/// A limit that can be changed at any time; 0 is none.
#[derive(Default)]
pub struct Budget(Mutex<BudgetState>);

#[derive(Default)]
struct BudgetState {
    limit: u64,
    used: u64,
    waiting: VecDeque<(u64, Completer<Charge>)>,
}

/// Lent bytes; returned on drop.
pub struct Charge {
    budget: Arc<Budget>,
    bytes: u64,
}

impl Budget {
    /// A limit of `limit` bytes.
    pub fn new(limit: u64) -> Arc<Budget> {
        Arc::new(Budget(Mutex::new(BudgetState { limit, ..BudgetState::default() })))
    }

    /// The limit; 0 is none.
    pub fn limit(&self) -> u64 {
        self.lock().limit
    }

    /// Number of lent bytes.
    pub fn used(&self) -> u64 {
        self.lock().used
    }

    /// Changes the limit; lent bytes stay lent.
    pub fn set_limit(self: &Arc<Budget>, limit: u64) {
        self.lock().limit = limit;
        self.admit();
    }

    /// Lends now, if the limit allows it and no request waits.
    pub fn try_take(self: &Arc<Budget>, bytes: u64) -> Option<Charge> {
        let mut state = self.lock();
        if !state.waiting.is_empty() || !state.has_room(bytes) {
            return None;
        }
        state.used += bytes;
        Some(Charge { budget: self.clone(), bytes })
    }

    /// Waits until the limit allows it. `None`: never, the program ends.
    pub async fn take(self: &Arc<Budget>, bytes: u64) -> Option<Charge> {
        let (completer, ticket) = blockhaul_io::ticket();
        self.lock().waiting.push_back((bytes, completer));
        self.admit();
        ticket.await.ok()
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, BudgetState> {
        self.0.lock().expect("no panic under this lock")
    }

    fn admit(self: &Arc<Budget>) {
        let mut admitted = Vec::new();
        {
            let mut state = self.lock();
            while let Some((bytes, completer)) = state.waiting.front() {
                let bytes = *bytes;
                if !completer.is_abandoned() {
                    if !state.has_room(bytes) {
                        break;
                    }
                    state.used += bytes;
                    let charge = Charge { budget: self.clone(), bytes };
                    let completer = state.waiting.pop_front().map(|(_, completer)| completer);
                    admitted.push((completer, charge));
                } else {
                    state.waiting.pop_front();
                }
            }
        }
        for (completer, charge) in admitted {
            if let Some(completer) = completer {
                completer.complete(charge);
            }
        }
    }
}

impl BudgetState {
    /// A single request is always allowed: otherwise it could never be served.
    fn has_room(&self, bytes: u64) -> bool {
        self.limit == 0 || self.used == 0 || self.used.saturating_add(bytes) <= self.limit
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        let waiting = {
            let mut state = self.budget.lock();
            state.used -= self.bytes;
            !state.waiting.is_empty()
        };
        if waiting {
            self.budget.admit();
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::pin::pin;
    use std::task::{Context, Poll, Waker};

    use super::*;

    #[test]
    fn the_bound_holds_can_change_and_lets_one_through() {
        let budget = Budget::new(100);
        let large = budget.try_take(1000).unwrap();
        assert!(budget.try_take(1).is_none());
        drop(large);
        let first = budget.try_take(60).unwrap();
        let mut cx = Context::from_waker(Waker::noop());
        let mut second = pin!(budget.take(60));
        assert!(second.as_mut().poll(&mut cx).is_pending());
        // Later requests do not overtake.
        assert!(budget.try_take(1).is_none());
        budget.set_limit(120);
        let Poll::Ready(Some(second)) = second.as_mut().poll(&mut cx) else { panic!() };
        assert_eq!((budget.used(), budget.limit()), (120, 120));
        drop((first, second));
        assert_eq!(budget.used(), 0);
    }
}
