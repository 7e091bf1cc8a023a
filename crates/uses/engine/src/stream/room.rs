//! Memory for the pieces of a stream.

use blockhaul_block::{Error, Kind, Result};
use blockhaul_io::{Pool, Reservation};

/// A reservation if there is space, or waits for it if no request of the caller could free any.
pub(super) async fn room_now(pool: &Pool, len: u64, wait: bool) -> Result<Option<Reservation>> {
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
