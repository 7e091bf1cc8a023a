//! Plugins in Rust, as `docs/plugins-rust.md` explains them. Each is a [`block::Backend`] that opens
//! [`block::Device`]s.
//!
//! - `slow_memory`: a disk in memory whose requests take a while and are answered by two threads.

mod slow_memory;

pub use slow_memory::SlowMemory;

/// Every kind of storage of this crate, for a [`block::Registry`].
pub fn all() -> Vec<&'static dyn block::Backend> {
    vec![&SlowMemory]
}
