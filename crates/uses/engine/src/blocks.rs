//! Blocks of a device: read and compared.

use std::sync::Arc;

use blockhaul_block::{Device, Error, Kind, Reply, Request, Result};
use blockhaul_io::{Data, Pool, Reservation, is_zero};

use crate::handle::ReconnectingHandle;

/// A side's data of a block, `None` if all zero; or the read error and the generation of the handle
/// that failed.
pub(crate) type BlockReadResult = Result<Option<Data>, (Error, u64)>;

/// Where two blocks first differ; `None` is all zero. Bytes beyond the end of the shorter one count
/// as equal if they are zero.
pub(crate) fn first_difference(one: Option<&Data>, other: Option<&Data>) -> Option<u64> {
    let filled = |bytes: &[u8]| bytes.iter().position(|&byte| byte != 0);
    let found = match (one, other) {
        (None, None) => None,
        (Some(data), None) | (None, Some(data)) if is_zero(data.bytes()) => None,
        (Some(data), None) | (None, Some(data)) => filled(data.bytes()),
        (Some(one), Some(other)) => {
            let one = one.bytes();
            let other = other.bytes();
            let both = one.len().min(other.len());
            let rest = if one.len() > both { &one[both..] } else { &other[both..] };
            if one[..both] == other[..both] {
                filled(rest).map(|at| at + both)
            } else {
                one.iter().zip(other).position(|(a, b)| a != b)
            }
        }
    };
    found.map(|at| at as u64)
}

/// A reservation for a block; none for length 0.
pub(crate) async fn room(pool: &Pool, len: u64) -> Result<Option<Reservation>> {
    let no_room =
        |error: blockhaul_io::TooLarge| Error::new(Kind::NoMemory, "no buffer").because(error);
    match len {
        0 => Ok(None),
        len => pool.reserve(len as usize).await.map(Some).map_err(no_room),
    }
}

/// Reads a block once.
pub(crate) async fn find(end: &ReconnectingHandle, room: Reservation, at: u64) -> BlockReadResult {
    let generation = end.generation();
    try_read(&end.device(), room, at).await.map_err(|error| (error, generation))
}

/// Reads a block, in pieces if the device's maximum is smaller; `None`: all zero.
async fn try_read(device: &Arc<dyn Device>, room: Reservation, at: u64) -> Result<Option<Data>> {
    let len = room.len() as u64;
    let facts = device.facts();
    let minimum = facts.block.minimum.max(1);
    let most = u64::from((facts.block.maximum - facts.block.maximum % minimum).max(minimum));
    if len <= most {
        return match device.submit(Request::read(at, room)).await? {
            Reply::Data(data) => Ok(Some(data)),
            _ => Ok(None),
        };
    }
    let mut whole = room.into_buf();
    whole.fill(0);
    let mut start = 0;
    while start < len {
        let part = most.min(len - start);
        // Small, and in sequence: outside the pool, of which this block already holds a buffer.
        let room = blockhaul_io::Reservation::unpooled(part as usize);
        if let Reply::Data(data) = device.submit(Request::read(at + start, room)).await? {
            whole[start as usize..(start + part) as usize].copy_from_slice(data.bytes());
        }
        start += part;
    }
    Ok(Some(Data::from(whole)))
}
