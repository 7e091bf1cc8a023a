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
    Dir, File, Shared, disable_locks, identity, identity_of, named as named_file, shared,
};
pub use memory::{Memory, memory};
pub use null::Null;
pub use pattern::Pattern;
pub use random::Random;
pub use sample::Sample;
pub use split::Split;
pub use zero::Zero;

/// Every kind of storage of this crate, for a [`blockhaul_catalog::Registry`].
pub fn all() -> Vec<Arc<dyn blockhaul_catalog::Backend>> {
    vec![
        Arc::new(File),
        Arc::new(Dir),
        Arc::new(Memory),
        Arc::new(Null),
        Arc::new(Zero),
        Arc::new(Pattern),
        Arc::new(Sample),
        Arc::new(Random),
        Arc::new(Split),
    ]
}

/// The scheme of bare paths.
pub const PATH_SCHEME: &str = "file";
