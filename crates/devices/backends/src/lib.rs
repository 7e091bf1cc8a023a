//! Devices that store or compute bytes: file, dir, memory, null, zero, pattern, sample, random,
//! split.
//!
//! One file per kind of storage. To add one, write its file and add a line to [`all`]: parsing,
//! help and completion are derived from its declaration.
#![cfg_attr(not(test), warn(clippy::disallowed_methods))]
#![cfg_attr(not(test), warn(clippy::missing_errors_doc))]

mod file;
mod memory;
mod null;
mod pattern;
mod random;
mod sample;
mod split;
pub mod support;
mod zero;

use std::sync::Arc;

pub use file::{
    DirBackend, FileBackend, StorageRelation, disable_locks, identity, identity_of,
    named as named_file, shared,
};
pub use memory::{MemoryBackend, memory};
pub use null::NullBackend;
pub use pattern::PatternBackend;
pub use random::RandomBackend;
pub use sample::SampleBackend;
pub use split::SplitBackend;
pub use zero::ZeroBackend;

/// Every kind of storage of this crate, for a [`blockhaul_catalog::Registry`].
pub fn all() -> Vec<Arc<dyn blockhaul_catalog::Backend>> {
    vec![
        Arc::new(FileBackend),
        Arc::new(DirBackend),
        Arc::new(MemoryBackend),
        Arc::new(NullBackend),
        Arc::new(ZeroBackend),
        Arc::new(PatternBackend),
        Arc::new(SampleBackend),
        Arc::new(RandomBackend),
        Arc::new(SplitBackend),
    ]
}

/// The scheme of bare paths.
pub const PATH_SCHEME: &str = "file";
