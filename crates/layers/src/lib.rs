//! Devices over devices: offset, readonly, delay, rate, error, log, stats, extents-cache.
//!
//! One file per layer. To add one, write its file and add a line to [`all`]: parsing, help and
//! completion follow from what it declares. A layer is a value: two stacks may use one kind with
//! different options, and all handles that one value wraps share what it keeps.

mod declared;
mod delay;
mod error;
mod extents_cache;
mod log;
mod offset;
mod out;
mod rate;
mod readonly;
mod stats;

pub use declared::Declared;
pub use delay::Delay;
pub use error::Failing;
pub use extents_cache::EXTENTS_CACHE;
pub use log::Log;
pub use offset::Offset;
pub use rate::{Bucket, Rate, RateLayer};
pub use readonly::Readonly;
pub use stats::{Counts, Stats, StatsLayer};

/// Every layer of this crate, for a [`block::Registry`].
pub fn all() -> Vec<&'static dyn block::LayerKind> {
    vec![&Offset, &Readonly, &Delay, &Rate, &Failing, &Log, &Stats, &EXTENTS_CACHE]
}
