//! Devices over devices: everything that changes, limits, records or refuses requests.
//!
//! One file per layer. To add one, write its file and add a line to [`all`], or to [`gates()`] for
//! one that handles clients instead of requests: parsing, help, manual and completion are derived
//! from its declaration. A layer is a value: two stacks may use one kind with different options,
//! and all handles that one value wraps share its state.
#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

mod background;
mod blocksize;
mod cache;
mod checkwrite;
mod cow;
mod declared;
mod delay;
mod error;
mod evil;
mod extentlist;
mod extents_cache;
mod flushes;
mod fua;
mod gates;
mod gz;
mod log;
#[cfg(feature = "luks")]
mod luks;
pub mod manual;
mod masked;
mod multi_conn;
mod nocache;
mod noextents;
mod nozero;
mod offset;
mod out;
mod packed;
mod partition;
mod pause;
mod per_disk;
mod protect;
mod ranges;
mod rate;
mod readahead;
mod readonly;
mod repeat;
mod retry;
mod retry_request;
mod runs;
mod scan;
mod scratch;
mod stats;
mod swab;
mod tar;
mod temporary;
mod truncate;
mod xz;

pub use background::data_was_lost;
pub use blocksize::BLOCKSIZE;
pub use cache::CACHE;
pub use checkwrite::CHECKWRITE;
pub use cow::COW;
pub use delay::DELAY;
pub use error::ERROR;
pub use evil::EVIL;
pub use extentlist::EXTENTLIST;
pub use extents_cache::EXTENTS_CACHE;
pub use fua::FUA;
pub use gates::{EXITLAST, EXITWHEN, EXPORTNAME, IP, LIMIT, TLS_FALLBACK};
pub use gz::GZ;
pub use log::LOG;
#[cfg(feature = "luks")]
pub use luks::LUKS;
pub use multi_conn::MULTI_CONN;
pub use nocache::NOCACHE;
pub use noextents::NOEXTENTS;
pub use nozero::NOZERO;
pub use offset::OFFSET;
pub use partition::PARTITION;
pub use pause::PAUSE;
pub use protect::PROTECT;
pub use rate::{Bucket, RATE, RateLayer};
pub use readahead::READAHEAD;
pub use readonly::READONLY;
pub use retry::RETRY;
pub use retry_request::RETRY_REQUEST;
pub use scan::SCAN;
pub use stats::{Counts, STATS, StatsLayer};
pub use swab::SWAB;
pub use tar::TAR;
pub use truncate::TRUNCATE;
pub use xz::XZ;

/// Every layer of this crate, for a [`blockhaul_catalog::Registry`], by name.
pub fn all() -> Vec<&'static blockhaul_catalog::LayerKind> {
    vec![
        &BLOCKSIZE,
        &CACHE,
        &CHECKWRITE,
        &COW,
        &DELAY,
        &ERROR,
        &EVIL,
        &EXTENTLIST,
        &EXTENTS_CACHE,
        &FUA,
        &GZ,
        &LOG,
        #[cfg(feature = "luks")]
        &LUKS,
        &MULTI_CONN,
        &NOCACHE,
        &NOEXTENTS,
        &NOZERO,
        &OFFSET,
        &PARTITION,
        &PAUSE,
        &PROTECT,
        &RATE,
        &READAHEAD,
        &READONLY,
        &RETRY,
        &RETRY_REQUEST,
        &SCAN,
        &STATS,
        &SWAB,
        &TAR,
        &TRUNCATE,
        &XZ,
    ]
}

/// Every gate of this crate, for a [`blockhaul_catalog::Registry`], by name.
pub fn gates() -> Vec<&'static blockhaul_catalog::GateKind> {
    vec![&EXITLAST, &EXITWHEN, &EXPORTNAME, &IP, &LIMIT, &TLS_FALLBACK]
}
