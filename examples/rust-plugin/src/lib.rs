//! Plugins in Rust, as explained in `docs/plugins-rust.md`. Each is a
//! [`blockhaul_catalog::Backend`] that opens [`blockhaul_block::Device`]s.
//!
//! - `slow_memory`: a disk in memory whose requests take a while and are completed by two threads.

use std::sync::Arc;

mod slow_memory;

pub use slow_memory::SlowMemory;

/// Every kind of storage of this crate, for a [`blockhaul_catalog::Registry`].
pub fn all() -> Vec<Arc<dyn blockhaul_catalog::Backend>> {
    vec![Arc::new(SlowMemory)]
}
