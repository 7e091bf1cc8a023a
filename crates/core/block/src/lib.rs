//! A block device is its facts and one method.
//!
//! Everything that stores, computes, transports or changes blocks implements [`Device`]; everything
//! that uses blocks (server, copy engine, `info`, tests) calls it. A layer is a device over a
//! device. This crate does not know NBD: `client` and `server` translate.
//!
//! # The contract of [`Device::submit`]
//! What an implementation must do, and what it may rely on; the conformance suite in `testkit`
//! tests each sentence.
//!
//! 1. It never blocks. It may do work that is known to be short, and waits in the returned
//!    [`PendingRequest`] for the rest.
//! 2. The request has *started* when `submit` returns: a caller that submits 64 requests and then
//!    awaits them in turn has 64 in flight.
//! 3. Each request completes exactly once. Polling the [`PendingRequest`] observes; dropping it detaches;
//!    neither cancels. A submitted write is drained, never abandoned.
//! 4. Requests in flight may complete in any order, and overlapping ones have no defined order:
//!    a caller that needs an order awaits the first before submitting the second. A read sees what
//!    every write wrote that had completed when the read was submitted.
//! 5. A flush makes durable every write that had *completed* when the flush was submitted, on this
//!    handle; on all handles of the same storage when the facts say [`Can::MULTI_CONN`]. A write with
//!    [`RequestFlags::FUA`] is durable when it completes.
//! 6. A read returns exactly the requested bytes, or [`Reply::Hole`] if all are zero, or an error;
//!    never with fewer. An error leaves undefined which part of a write has happened.
//! 7. [`Op::Zero`] makes the range read as zeroes; it may free the storage unless [`RequestFlags::NO_HOLE`].
//!    With [`RequestFlags::FAST`] it fails at once ([`Kind::Unsupported`]) where it would be no faster than
//!    writing. [`Op::Trim`] may do nothing, and leaves undefined what the range reads as.
//! 8. [`Op::Extents`] returns one list per requested context, in ascending order of context, each
//!    starting at the request's offset, not empty, and not reaching beyond the request's end. It may
//!    cover less than requested. With [`RequestFlags::ONE_EXTENT`] each list has one entry.
//!    Data must never be called zero or hole; the reverse is allowed.
//! 9. It is called on a worker. Handles may move between workers; completions may come from anywhere.
//! 10. An implementation may rely on the *fence*: ranges lie inside the device and are not empty
//!     (flush: both zero), aligned to the minimum block, but for the end of the device; payloads have
//!     the length of the request and do not exceed the maximum; commands and flags are among those
//!     that the facts announce.
//! 11. A flush or FUA request that fails is never repeated in order to hide the failure: storage may
//!     report lost data once, and a second flush then succeeds without it. What was written on any
//!     handle since the last successful flush may be lost.
//!     - A *device that stores* continues to fail: from then on every flush and FUA request fails, on every
//!       handle, until the storage is opened again. A flush or FUA request that overlaps the failed one
//!       fails, too: the storage may have reported the loss to the other one only.
//!     - A *layer* passes the failure on. It submits no second flush below on its own account, and does
//!       not answer a later flush or FUA request with success unless the device below does. A layer that
//!       holds writes itself is a device that stores.
//!     - A *caller* does not repeat the request. It writes all of that data again before it flushes
//!       again, or opens the storage again, or gives up. A caller that serves several clients reports the
//!       failure to each of them ([`Flushes`]).
//!
//!     A FUA request whose error says [`Error::is_before_flush`] is not a failed flush: nothing was flushed
//!     yet, and earlier writes are as safe as before.
//!
//! Callers supply the memory that a read fills (as [`blockhaul_io::Reservation`]), so that devices
//! never wait for buffers. A layer that needs scratch memory owns a small pool of its own.

#![cfg_attr(not(test), warn(clippy::disallowed_methods))]
#![cfg_attr(not(test), warn(clippy::missing_errors_doc))]
#![cfg_attr(not(test), warn(clippy::cast_possible_truncation, clippy::cast_sign_loss))]
#![cfg_attr(not(test), warn(clippy::cast_possible_wrap, clippy::cast_lossless))]

mod device;
pub mod emulate;
mod error;
mod ext;
mod extent_reader;
mod extents;
mod facts;
mod fence;
mod flushes;
mod latency;
mod pending;
mod ranges;
mod request;
mod thread_model;

pub use device::{Device, FileRange, LeaseAccess};
pub use error::{Error, Kind, Result};
pub use ext::DeviceExt;
pub use extent_reader::{ExtentPart, ExtentReader};
pub use extents::{Extent, Extents, HOLE, ZERO};
pub use facts::{
    BASE_ALLOCATION, BITMAP_CONTEXT, BlockSizes, Can, Compression, ContextSet, Facts, FileId, Hints,
};
pub use fence::fence;
pub use flushes::{DurableRequest, FailedFlush, Flushes};
pub use latency::{LATENCY_BOUNDS, LatencyCounters, LatencySnapshot};
pub use pending::{Outcome, PendingRequest};
pub use ranges::{gaps, join_ranges};
pub use request::{Op, OpKind, Reply, Request, RequestFlags};
pub use thread_model::ThreadModel;
