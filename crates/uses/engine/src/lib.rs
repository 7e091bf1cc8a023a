//! The engine: copies the contents of one device to another, compares and digests devices.
//!
//! A *plan* says what to copy, from extents fetched ahead. *Lanes* carry it out: a lane is one
//! source handle and one target handle, and each segment of 128 MiB is written by one lane, so that
//! writes of different lanes never overlap or share a block, and the target is never read back
//! while copying (the reasoning of libnbd's "copy: Always allow multiple connections"). A *window*
//! limits what a lane has in flight, and the buffer pool limits all lanes together. A *route* is
//! chosen for each range: skip, zero, or read and write with or without a check for zeroes.
//!
//! The same lanes read without writing: they compare both sides, or digest the source.
//!
//! On an error or a cancel, nothing more is submitted, everything in flight is awaited, and the
//! first error is returned. The target is then undefined only where it was not copied yet.

#![cfg_attr(not(test), warn(clippy::disallowed_methods))]
#![cfg_attr(not(test), warn(clippy::missing_errors_doc))]

mod algorithm;
mod blocks;
mod compare;
mod copy;
mod digest;
mod disk_map;
mod engine;
mod error;
mod extent_feed;
mod extra_lanes;
mod flushes;
mod handle;
mod journal;
mod kernel_copy;
mod lane;
mod lane_slots;
mod ledger;
mod manifest;
mod marker;
mod meter;
mod options;
mod orders;
mod plan;
mod progress;
mod rate;
mod reading;
mod resolved;
mod route_counters;
mod same_disk;
mod sample;
mod segment;
mod segment_maker;
mod segment_queue;
mod segmenter;
mod selection;
mod shared;
mod side;
mod sides;
mod signals;
mod stream;
mod streaming_digest;
mod tuner;
mod verify;
mod wants;
mod window;
mod zeroes;

pub use algorithm::DigestAlgorithm;
pub use compare::{ComparisonResult, compare};
pub use copy::copy;
pub use digest::digest;
pub use disk_map::{CELLS_MAX, MapCell, MapSnapshot};
pub use engine::{Engine, EngineControl, check_resumption, completed_earlier};
pub use error::CopyError;
#[cfg(fuzzing)]
pub use journal::fuzz;
pub use journal::{
    JournalOptions, JournalState, check_journal, discard_journal, discarding_journal,
};
pub use manifest::Manifest;
pub use meter::MeterSnapshot;
pub use options::{
    BitmapSelection, CopySummary, DurableCallback, EngineOptions, KernelCopyMode, MAX_REQUEST,
    MIN_REQUEST, MultiConn, RETRY_DELAY_MAX, RetryCounts,
};
pub use plan::EnginePlan;
pub use progress::{CopyProgress, ProgressSnapshot};
pub use rate::{RateLimit, RateSchedule};
pub use resolved::{check_discard, check_release, check_source};
pub use route_counters::RouteBytes;
pub use sample::is_coarse;
pub use segment::SEGMENT;
pub use selection::bitmap_ranges;
pub use side::Side;
pub use stream::{copy_from_pipe, copy_to_pipe};
pub use verify::{VerificationResult, manifest, verify};
