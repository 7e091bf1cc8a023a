//! What a buffer owes to its pool.

use std::sync::Arc;

use super::block::Block;
use super::pool::Pool;
use super::reservation::InUse;
use super::route_counters::RouteCounters;

/// What a buffer owes to its pool, and who counts what becomes of it.
pub(crate) struct Charge {
    pub(super) pool: Option<Pool>,
    pub(super) cost: u64,
    pub(super) counters: Option<Arc<RouteCounters>>,
    /// Gives `cost` back in place of this charge, if it is kept for a repetition.
    pub(super) kept: Option<InUse>,
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
