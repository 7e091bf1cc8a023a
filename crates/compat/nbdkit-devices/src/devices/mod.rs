//! Devices that nbdkit has as plugins.

mod data;
mod fixed;
mod full;
mod info;
mod ones;
mod partitioning;
mod sparse_random;
mod table;

use std::sync::Arc;

use blockhaul_catalog::Backend;

/// Every device of this crate, for a [`blockhaul_catalog::Registry`].
pub fn all() -> Vec<Arc<dyn Backend>> {
    vec![
        Arc::new(data::DataBackend),
        Arc::new(ones::OnesBackend),
        Arc::new(full::FullBackend),
        Arc::new(partitioning::PartitioningBackend),
        Arc::new(sparse_random::SparseRandom),
        Arc::new(info::InfoBackend),
    ]
}
