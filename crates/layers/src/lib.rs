//! Devices over devices: offset, readonly, delay, rate, error, log, stats.
//!
//! One file per layer. To add one, write its file and add a line to [`all`]: parsing, help and
//! completion follow from what it declares. A layer is a value: two stacks may use one kind with
//! different options, and all handles that one value wraps share what it keeps.

mod offset;
mod readonly;

pub use offset::Offset;
pub use readonly::Readonly;

/// Every layer of this crate, for a [`block::Registry`].
pub fn all() -> Vec<&'static dyn block::LayerKind> {
    vec![&Offset, &Readonly]
}
