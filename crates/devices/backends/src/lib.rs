//! Devices that store or compute bytes: file, dir, memory, null, zero, pattern, sample, data, ones,
//! random, full, split, partitioning, sparse-random, info, tmpdisk, ondemand, floppy,
//! iso, linuxdisk.
//!
//! One file per kind of storage. To add one, write its file and add a line to [`all`]: parsing,
//! help and completion are derived from its declaration.
#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

mod data;
mod file;
mod fill;
mod fixed;
mod floppy;
mod full;
mod info;
mod iso;
mod linuxdisk;
mod made;
mod memory;
mod null;
mod ondemand;
mod ones;
mod operand;
mod partitioning;
mod pattern;
mod random;
mod sample;
mod sparse_random;
mod split;
mod table;
mod tmpdisk;
mod zero;

use std::sync::Arc;

pub use data::Data;
pub use file::{
    Dir, File, Shared, disable_locks, identity, identity_of, named as named_file, shared,
};
pub use floppy::Floppy;
pub use full::Full;
pub use info::Info;
pub use iso::Iso;
pub use linuxdisk::Linuxdisk;
pub use memory::{Memory, memory};
pub use null::Null;
pub use ondemand::Ondemand;
pub use ones::Ones;
pub use partitioning::Partitioning;
pub use pattern::Pattern;
pub use random::Random;
pub use sample::Sample;
pub use sparse_random::SparseRandom;
pub use split::Split;
pub use tmpdisk::Tmpdisk;
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
        Arc::new(Data),
        Arc::new(Ones),
        Arc::new(Random),
        Arc::new(Full),
        Arc::new(Split),
        Arc::new(Partitioning),
        Arc::new(SparseRandom),
        Arc::new(Info),
        Arc::new(Tmpdisk),
        Arc::new(Ondemand),
        Arc::new(Floppy),
        Arc::new(Iso),
        Arc::new(Linuxdisk),
    ]
}

/// The scheme of bare paths.
pub const PATH_SCHEME: &str = "file";
