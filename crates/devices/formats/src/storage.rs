//! Reads tables and compressed data from the device that holds an image.

use std::sync::Arc;

use blockhaul_block::{Can, Device, DeviceExt as _, Error, Facts, Kind, Reply, Request, Result};
use blockhaul_io::{Buf, Data, Pool, Reservation};

use crate::bytes::index;

/// Longest table that is read with one request.
const PIECE: u64 = 1 << 20;

/// Reads a range of a device that has all of it, into memory outside any pool. `len` is bounded by
/// the caller.
pub(crate) async fn read(device: &Arc<dyn Device>, at: u64, len: u64) -> Result<Buf> {
    let mut buf = Buf::unpooled(index(len));
    read_into(device, at, &mut buf, None).await?;
    Ok(buf)
}

/// Length of a device in bytes, as far as it was known when it was opened.
pub(crate) fn len_of(facts: &Facts) -> u64 {
    facts.grows_from.unwrap_or(facts.size)
}

/// Writes `bytes` to a device, in as many requests as it needs.
pub(crate) async fn write(device: &Arc<dyn Device>, at: u64, bytes: &[u8]) -> Result<()> {
    let mut next = at;
    for part in bytes.chunks(index(piece(device))) {
        device.write(next, Data::copy_of(part)).await?;
        next += part.len() as u64;
    }
    Ok(())
}

/// Makes completed writes to a device durable.
pub(crate) async fn flush(device: &Arc<dyn Device>) -> Result<()> {
    if device.facts().can.contains(Can::FLUSH) { device.flush().await } else { Ok(()) }
}

/// Fills `out` from a device, in as many requests as it needs; false if all of it is zero. Memory
/// comes from a pool, or is outside any.
pub(crate) async fn read_into(
    device: &Arc<dyn Device>,
    at: u64,
    out: &mut [u8],
    pool: Option<&Pool>,
) -> Result<bool> {
    let mut found_data = false;
    let mut next = at;
    for part in out.chunks_mut(index(piece(device))) {
        let room = match pool {
            Some(pool) => room(pool, part.len()).await?,
            None => Reservation::unpooled(part.len()),
        };
        found_data |= place(device.submit(Request::read(next, room)).await?, part)?;
        next += part.len() as u64;
    }
    Ok(found_data)
}

/// Copies the reply of a read to its place; false if it is zero.
pub(crate) fn place(reply: Reply, out: &mut [u8]) -> Result<bool> {
    match reply {
        Reply::Data(data) => {
            copy(&data, out)?;
            Ok(true)
        }
        Reply::Hole => {
            out.fill(0);
            Ok(false)
        }
        _ => Err(Error::misfit()),
    }
}

fn copy(data: &Data, out: &mut [u8]) -> Result<()> {
    data.load().map_err(|error| Error::system("cannot read the image", error))?;
    if data.len() != out.len() {
        return Err(Error::misfit());
    }
    out.copy_from_slice(data.bytes());
    Ok(())
}

/// Compressed bytes of an image, in memory of a pool.
pub(crate) async fn packed(
    device: &Arc<dyn Device>,
    pool: &Pool,
    at: u64,
    len: u64,
) -> Result<Data> {
    let room = room(pool, index(len)).await?;
    if len <= piece(device) {
        return match device.submit(Request::read(at, room)).await? {
            Reply::Data(data) => {
                data.load().map_err(|error| Error::system("cannot read the image", error))?;
                Ok(data)
            }
            Reply::Hole => Ok(Buf::unpooled(index(len)).into()),
            _ => Err(Error::misfit()),
        };
    }
    let mut buf = room.into_buf();
    read_into(device, at, &mut buf, None).await?;
    Ok(buf.into())
}

/// Longest request for tables.
pub(crate) fn piece(device: &Arc<dyn Device>) -> u64 {
    PIECE.min(device.facts().block.maximum.into()).max(1)
}

/// Waits for memory of a pool.
pub(crate) async fn room(pool: &Pool, len: usize) -> Result<Reservation> {
    let room = pool.reserve(len).await;
    room.map_err(|error| Error::new(Kind::NoMemory, "no scratch memory").because(error))
}
