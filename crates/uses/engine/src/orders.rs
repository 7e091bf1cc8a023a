//! What an engine has its lanes do: one order at a time, for all of them, and the end of it awaited.

use std::sync::{Arc, Mutex, MutexGuard};

use blockhaul_io::Notify;

use crate::segment_queue::SegmentQueue;

/// What happens after the last segment of a plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ending {
    /// What was written is on the target; other plans may follow.
    Round,
    /// It is durable as well; other plans may follow.
    Flush,
    /// It is durable if the options ask for that; nothing follows.
    Copy,
}

/// An order to all lanes.
#[derive(Clone)]
pub(crate) enum Order {
    /// Copy what the plan says.
    Run(Arc<SegmentQueue>, Ending),
    /// End like this what was copied before.
    End(Ending),
}

impl Order {
    /// Whether no other order follows.
    pub(crate) fn is_last(&self) -> bool {
        matches!(self, Order::Run(_, Ending::Copy) | Order::End(Ending::Copy))
    }
}

/// Where lanes find their orders.
#[derive(Default)]
pub(crate) struct Orders {
    state: Mutex<State>,
    changed: Notify,
}

#[derive(Default)]
struct State {
    /// Orders that were given so far.
    number: u64,
    order: Option<Order>,
    /// Those who take orders, and those of them who have not carried out the last one.
    members: usize,
    busy: usize,
    /// No other orders come.
    closed: bool,
    /// One went away before its order was carried out.
    lost: bool,
}

impl Orders {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no panic under this lock")
    }

    /// Somebody more who takes the orders that follow.
    pub(crate) fn join(self: &Arc<Self>) -> Member {
        let mut state = self.lock();
        state.members += 1;
        Member { orders: self.clone(), seen: state.number, busy: false }
    }

    /// Gives an order and waits until all have carried it out. False: one went away before.
    pub(crate) async fn give(&self, order: Order) -> bool {
        {
            let mut state = self.lock();
            state.number += 1;
            state.order = Some(order);
            state.busy = state.members;
        }
        self.changed.notify();
        loop {
            let changed = self.changed.listen();
            {
                let mut state = self.lock();
                if state.busy == 0 {
                    // Nothing is kept alive by an order that is over.
                    state.order = None;
                    return !state.lost;
                }
            }
            let _ = changed.await;
        }
    }

    /// No other orders come.
    pub(crate) fn close(&self) {
        self.lock().closed = true;
        self.changed.notify();
    }
}

/// One who takes orders. Going away counts as having carried out.
pub(crate) struct Member {
    orders: Arc<Orders>,
    seen: u64,
    busy: bool,
}

impl Member {
    /// The next order; `None` when no others come.
    pub(crate) async fn next(&mut self) -> Option<Order> {
        loop {
            let changed = self.orders.changed.listen();
            {
                let state = self.orders.lock();
                if state.number > self.seen {
                    self.seen = state.number;
                    self.busy = true;
                    return state.order.clone();
                }
                if state.closed {
                    return None;
                }
            }
            let _ = changed.await;
        }
    }

    /// The order was carried out.
    pub(crate) fn done(&mut self) {
        if std::mem::take(&mut self.busy) {
            self.orders.lock().busy -= 1;
            self.orders.changed.notify();
        }
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        {
            let mut state = self.orders.lock();
            state.members -= 1;
            // Also one that was given and not taken.
            if self.busy || (state.number > self.seen && state.busy > 0) {
                state.busy -= 1;
                state.lost = true;
            }
        }
        self.orders.changed.notify();
    }
}
