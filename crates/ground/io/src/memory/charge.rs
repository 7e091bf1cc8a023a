//! The pool charge of a buffer.

use std::sync::Arc;

use super::block::Block;
use super::pool::Pool;
use super::reservation::KeptCharge;
use super::route_counters::RouteCounters;

/// The pool charge of a buffer, and the counters of its payload.
pub(crate) struct Charge {
    pub(super) pool: Option<Pool>,
    pub(super) cost: u64,
    pub(super) counters: Option<Arc<RouteCounters>>,
    /// Releases `cost` in place of this charge, if it is kept for a retry.
    pub(super) kept: Option<Arc<KeptCharge>>,
}

impl Charge {
    pub(crate) fn none() -> Charge {
        Charge { pool: None, cost: 0, counters: None, kept: None }
    }

    pub(crate) fn counters(&self) -> Option<&RouteCounters> {
        self.counters.as_deref()
    }

    pub(crate) fn give_back(&mut self, block: Block) {
        if let Some(pool) = self.pool.take() {
            pool.keep(block);
            match self.kept.take() {
                Some(kept) => drop(kept),
                None => pool.release_all(self.cost),
            }
        }
    }
}
