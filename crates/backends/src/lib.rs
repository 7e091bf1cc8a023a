//! Devices that store or compute bytes: file, memory, null, zero, pattern, sample, data.
//!
//! One file per kind of storage. To add one, write its file and add a line to [`all`]: parsing, help
//! and completion follow from what it declares.

mod data;
mod file;
mod fill;
mod memory;
mod null;
mod operand;
mod pattern;
mod sample;
mod zero;

pub use data::Data;
pub use file::{File, identity};
pub use memory::{Memory, memory};
pub use null::Null;
pub use pattern::Pattern;
pub use sample::Sample;
pub use zero::Zero;

/// Every kind of storage of this crate, for a [`block::Registry`].
pub fn all() -> Vec<&'static dyn block::Backend> {
    vec![&File, &Memory, &Null, &Zero, &Pattern, &Sample, &Data]
}

/// The scheme that takes bare paths.
pub const PATH_SCHEME: &str = "file";
