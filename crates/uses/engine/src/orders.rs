//! Orders of an engine to its lanes: one at a time, to all of them; the engine waits until all have
//! completed it.

use std::sync::{Arc, Mutex, MutexGuard};

use blockhaul_io::Notify;

use crate::reading::SourceScan;
use crate::segment_queue::SegmentQueue;

/// What happens after the last segment of a copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum EndAction {
    /// All writes have completed; other plans may follow.
    Round,
    /// They are durable as well; other plans may follow.
    Flush,
    /// They are durable if the options ask for that; nothing else is written.
    Copy,
}

/// An order to all lanes.
#[derive(Clone)]
pub(crate) enum LaneCommand {
    /// Copy the ranges of the plan.
    Copy(Arc<SegmentQueue>, EndAction),
    /// Read the ranges of the plan.
    Read(Arc<SegmentQueue>, Arc<SourceScan>),
    /// Finish what was copied before, in this way.
    End(EndAction),
    /// Drop all connections. No other order follows.
    Close,
}

/// Passes orders to the lanes.
#[derive(Default)]
pub(crate) struct LaneCommands {
    state: Mutex<LaneCommandState>,
    changed: Notify,
}

#[derive(Default)]
struct LaneCommandState {
    /// Number of orders given so far.
    number: u64,
    order: Option<LaneCommand>,
    /// The members, and how many of them have not completed the last order.
    members: usize,
    busy: usize,
    /// No more orders follow.
    closed: bool,
    /// A member was dropped before it completed its order.
    lost: bool,
}

impl LaneCommands {
    fn lock(&self) -> MutexGuard<'_, LaneCommandState> {
        self.state.lock().expect("no panic under this lock")
    }

    /// Adds a member that takes the orders that follow.
    pub(crate) fn join(self: &Arc<Self>) -> CommandReceiver {
        let mut state = self.lock();
        state.members += 1;
        CommandReceiver { orders: self.clone(), seen: state.number, busy: false }
    }

    /// Gives an order and waits until all members have completed it. False: a member was dropped
    /// first.
    pub(crate) async fn give(&self, order: LaneCommand) -> bool {
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
                    // A completed order keeps nothing alive.
                    state.order = None;
                    return !state.lost;
                }
            }
            let _ = changed.await;
        }
    }

    /// No more orders follow.
    pub(crate) fn close(&self) {
        self.lock().closed = true;
        self.changed.notify();
    }
}

/// A receiver of orders. Dropping it counts as completing its order.
pub(crate) struct CommandReceiver {
    orders: Arc<LaneCommands>,
    seen: u64,
    busy: bool,
}

impl CommandReceiver {
    /// The next order; `None` if no more follow.
    pub(crate) async fn next(&mut self) -> Option<LaneCommand> {
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

    /// The order is complete.
    pub(crate) fn done(&mut self) {
        if std::mem::take(&mut self.busy) {
            self.orders.lock().busy -= 1;
            self.orders.changed.notify();
        }
    }
}

impl Drop for CommandReceiver {
    fn drop(&mut self) {
        {
            let mut state = self.orders.lock();
            state.members -= 1;
            // Also an order that was given and not taken.
            if self.busy || (state.number > self.seen && state.busy > 0) {
                state.busy -= 1;
                state.lost = true;
            }
        }
        self.orders.changed.notify();
    }
}
