//! Devices over devices: everything that changes, limits, records or refuses requests.
//!
//! One file per layer. To add one, write its file and add a line to [`all`]: parsing, help, manual and
//! completion are derived from its declaration. [`support`] has what layers of other crates need. A layer is a value: two stacks may use one kind with different options,
//! and all handles that one value wraps share its state.
#![cfg_attr(not(test), warn(clippy::disallowed_methods))]
#![cfg_attr(not(test), warn(clippy::missing_errors_doc))]

mod allocation_depth;
mod archive;
mod blocksize;
mod cache;
mod contexts;
mod cow;
mod declared;
mod detect_zeroes;
mod extents_cache;
mod flushes;
mod gz;
mod log;
mod lost_data;
#[cfg(feature = "luks")]
mod luks;
pub mod manual;
mod masked;
mod offset;
mod out;
mod packed;
mod partition;
mod partition_table;
mod pause;
mod per_disk;
mod rate;
mod readonly;
mod repeat;
mod retry;
mod retry_request;
mod runs;
mod scratch;
mod shared_throttle;
mod stats;
pub mod support;
mod tar;
mod temporary;
mod throttle;
mod xz;

pub use allocation_depth::ALLOCATION_DEPTH;
pub use archive::{
    ArchiveMember, ArchiveReader, MemberHeader, MemberKind, MemberOverrides, first_tar_member,
};
pub use blocksize::BLOCKSIZE;
pub use cache::CACHE;
pub use contexts::CONTEXTS;
pub use cow::COW;
pub use detect_zeroes::DETECT_ZEROES;
pub use extents_cache::EXTENTS_CACHE;
pub use gz::{GZ, Inflater};
pub use log::LOG;
pub use lost_data::data_was_lost;
#[cfg(feature = "luks")]
pub use luks::LUKS;
pub use offset::OFFSET;
pub use partition::PARTITION;
pub use partition_table::{PartitionEntry, PartitionKind, PartitionTable, TableFormat};
pub use pause::PAUSE;
pub use rate::{Bucket, RATE, RateLayer};
pub use readonly::READONLY;
pub use retry::RETRY;
pub use retry_request::RETRY_REQUEST;
pub use shared_throttle::{SharedThrottle, ThrottledConnection};
pub use stats::{OperationCounts, STATS, StatsLayer};
pub use tar::TAR;
pub use throttle::THROTTLE;
pub use xz::XZ;

/// Every layer of this crate, for a [`blockhaul_catalog::Registry`], by name.
pub fn all() -> Vec<&'static blockhaul_catalog::LayerKind> {
    vec![
        &ALLOCATION_DEPTH,
        &BLOCKSIZE,
        &CACHE,
        &CONTEXTS,
        &COW,
        &DETECT_ZEROES,
        &EXTENTS_CACHE,
        &GZ,
        &LOG,
        #[cfg(feature = "luks")]
        &LUKS,
        &OFFSET,
        &PARTITION,
        &PAUSE,
        &RATE,
        &READONLY,
        &RETRY,
        &RETRY_REQUEST,
        &STATS,
        &TAR,
        &THROTTLE,
        &XZ,
    ]
}
