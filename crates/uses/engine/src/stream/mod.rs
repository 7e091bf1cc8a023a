//! Copies from and to pipes: the pipe's side is in order and of unknown size; the device's side has
//! many requests in flight.
//!
//! - `from`: a pipe to a device. `to`: a device to a pipe.

mod from;
mod to;

use std::time::Instant;

use blockhaul_block::{Error, Kind, Result};
use blockhaul_io::Pool;

use crate::handle::Retries;
use crate::options::Summary;
use crate::progress::Progress;

pub use from::copy_from_pipe;
pub use to::copy_to_pipe;

/// A reservation if there is space, or waits for it if no request of the caller could free any.
async fn room_now(pool: &Pool, len: u64, wait: bool) -> Result<Option<blockhaul_io::Reservation>> {
    if let Some(room) = pool.try_reserve(len as usize) {
        return Ok(Some(room));
    }
    if !wait {
        return Ok(None);
    }
    let room = pool.reserve(len as usize).await;
    let error = |error| Error::new(Kind::NoMemory, "no buffer of this size").because(error);
    room.map(Some).map_err(error)
}

fn summary(
    (progress, retries): (&Progress, &Retries),
    size: u64,
    digest: Option<String>,
    started: Instant,
) -> Summary {
    let done = progress.snapshot();
    Summary {
        size,
        data: done.data,
        zeroed: done.zeroed,
        skipped: done.skipped,
        resumed: 0,
        discarded: 0,
        not_discarded: 0,
        routes: progress.routes(),
        lanes: 1,
        requests: done.requests,
        request_size: done.request_size,
        retried: retries.summary(),
        digest,
        elapsed: blockhaul_io::elapsed(started),
        warnings: Vec::new(),
    }
}
