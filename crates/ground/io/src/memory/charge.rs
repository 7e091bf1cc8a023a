//! What reservations and buffers owe to their pool.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

use super::block::AlignedBlock;
use super::pool::Pool;
use super::route_counters::RouteCounters;

/// What a buffer owes to its pool, and who counts what becomes of it.
pub(crate) struct BufferCharge {
    pub(super) pool: Option<Pool>,
    pub(super) cost: u64,
    pub(super) counters: Option<Arc<RouteCounters>>,
    /// Gives `cost` back in place of this charge, if it is kept for a repetition.
    pub(super) kept: Option<InUse>,
}

impl BufferCharge {
    pub(crate) fn none() -> BufferCharge {
        BufferCharge { pool: None, cost: 0, counters: None, kept: None }
    }

    pub(crate) fn counters(&self) -> Option<&RouteCounters> {
        self.counters.as_deref()
    }

    pub(crate) fn give_back(&mut self, block: AlignedBlock) {
        if let Some(pool) = self.pool.take() {
            if block.is_shared() {
                drop(block);
            } else {
                pool.keep(block);
            }
            match self.kept.take() {
                Some(kept) => drop(kept),
                None => pool.release_all(self.cost),
            }
        }
    }
}

/// What is charged to a pool for a request and its repetitions; given back when nobody keeps or uses
/// it.
pub(super) struct KeptCharge {
    pool: Pool,
    cost: u64,
    /// A reservation or a buffer has it.
    in_use: AtomicBool,
}

impl KeptCharge {
    /// A new one, used by one reservation, for what that has charged already.
    pub(super) fn in_use(pool: Pool, cost: u64) -> InUse {
        InUse(Arc::new(KeptCharge { pool, cost, in_use: AtomicBool::new(true) }))
    }

    /// For the next reservation; none while another one, or its buffer, uses it.
    pub(super) fn take(self: &Arc<KeptCharge>) -> Option<InUse> {
        let in_use = self.in_use.swap(true, SeqCst);
        (!in_use).then(|| InUse(self.clone()))
    }
}

impl Drop for KeptCharge {
    fn drop(&mut self) {
        self.pool.release_all(self.cost);
    }
}

/// The one reservation or buffer that has a charge.
pub(super) struct InUse(Arc<KeptCharge>);

impl InUse {
    pub(super) fn charge(&self) -> Arc<KeptCharge> {
        self.0.clone()
    }
}

impl Drop for InUse {
    fn drop(&mut self) {
        self.0.in_use.store(false, SeqCst);
    }
}
