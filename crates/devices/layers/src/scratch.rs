//! A layer's own memory, for data that it must read: pieces of a bounded length from a small pool.
//!
//! A task that holds a piece waits only for the device below, so waiting for a piece always ends.

use std::collections::VecDeque;
use std::sync::Arc;

use blockhaul_block::{Device, Error, Kind, Reply, Request, Result};
use blockhaul_io::{Data, Pool, Reservation, is_zero};

/// Least number of pieces that the memory holds.
const PIECES: u64 = 8;
/// Least size of the memory in bytes, which small pieces share.
const LEAST: u64 = 2 << 20;
/// Range of the number of pieces that one read holds.
const AHEAD: std::ops::RangeInclusive<u64> = 4..=32;

/// A layer's own memory.
#[derive(Clone)]
pub struct ScratchMemory {
    pool: Pool,
    piece: u64,
}

impl ScratchMemory {
    /// Longest piece in bytes: longer reads cost hardly less per byte.
    pub const PIECE: u64 = 256 << 10;

    /// Memory for pieces of at most `piece` bytes.
    pub fn new(piece: u64) -> ScratchMemory {
        // A piece is a request's length: it fits.
        let piece = piece.clamp(1, 1 << 30);
        let size = LEAST.max(Pool::cost(piece as usize) * PIECES);
        ScratchMemory { pool: Pool::new(size), piece }
    }

    /// Memory for use with a device.
    pub fn for_device(device: &Arc<dyn Device>) -> ScratchMemory {
        let facts = device.facts();
        // A filter below may enforce its advertised sizes, although clients may ignore them.
        let most =
            facts.advertised.map_or(u32::MAX, |sizes| sizes.maximum).min(facts.block.maximum);
        ScratchMemory::new(Self::PIECE.min(u64::from(most)))
    }

    /// The longest piece.
    pub fn piece(&self) -> u64 {
        self.piece
    }

    /// Waits for a reservation for a piece.
    ///
    /// # Errors
    /// [`Kind::NoMemory`] if the piece is longer than the pool.
    pub async fn room(&self, len: u64) -> Result<Reservation> {
        let len = usize::try_from(len).unwrap_or(usize::MAX);
        let room = self.pool.reserve(len).await;
        room.map_err(|error| Error::new(Kind::NoMemory, "no scratch memory").because(error))
    }

    /// Reads a piece; `None` if the device reports it as zero.
    ///
    /// # Errors
    /// Those of [`ScratchMemory::room`] and of the device.
    pub async fn read(&self, device: &Arc<dyn Device>, at: u64, len: u64) -> Result<Option<Data>> {
        match device.submit(Request::read(at, self.room(len).await?)).await? {
            Reply::Data(data) => Ok(Some(data)),
            Reply::Hole => Ok(None),
            _ => Err(Error::misfit()),
        }
    }

    /// Reads into existing memory; false if all of it is zero.
    ///
    /// # Errors
    /// Those of [`ScratchMemory::read`].
    pub async fn fill(&self, device: &Arc<dyn Device>, at: u64, out: &mut [u8]) -> Result<bool> {
        let mut found_data = false;
        let mut next = at;
        for part in out.chunks_mut(self.piece as usize) {
            match self.read(device, next, part.len() as u64).await? {
                Some(found) => {
                    part.copy_from_slice(found.bytes());
                    found_data = true;
                }
                None => part.fill(0),
            }
            next += part.len() as u64;
        }
        Ok(found_data)
    }

    /// Reads into existing memory, several pieces at a time: a device that works on another thread
    /// need not wait for the next piece. False if all of it is zero.
    ///
    /// # Errors
    /// Those of [`ScratchMemory::read`].
    pub async fn fill_ahead(
        &self,
        device: &Arc<dyn Device>,
        at: u64,
        out: &mut [u8],
    ) -> Result<bool> {
        let ahead = (Self::PIECE / self.piece).clamp(*AHEAD.start(), *AHEAD.end()) as usize;
        let mut found_data = false;
        let mut started = VecDeque::with_capacity(ahead);
        let mut parts = out.chunks_mut(self.piece as usize);
        let mut next = at;
        let mut part = parts.next();
        loop {
            while let Some(into) = part.take_if(|_| started.len() < ahead) {
                let len = into.len() as u64;
                // Only who holds no piece waits for one.
                let room = if started.is_empty() {
                    Some(self.room(len).await?)
                } else {
                    self.pool.try_reserve(into.len())
                };
                let Some(room) = room else {
                    part = Some(into);
                    break;
                };
                started.push_back((into, device.submit(Request::read(next, room))));
                next += len;
                part = parts.next();
            }
            if started.is_empty() {
                return Ok(found_data);
            }
            // The first half is awaited at its last piece, so that this task wakes once for all of them.
            for (into, pending) in started.drain(..started.len().div_ceil(2)).rev() {
                match pending.await? {
                    Reply::Data(data) => {
                        into.copy_from_slice(data.bytes());
                        found_data = true;
                    }
                    Reply::Hole => into.fill(0),
                    _ => return Err(Error::misfit()),
                }
            }
        }
    }

    /// Whether the device contains these bytes; without bytes, whether it is zero.
    ///
    /// # Errors
    /// Those of [`ScratchMemory::read`].
    pub async fn holds(
        &self,
        device: &Arc<dyn Device>,
        at: u64,
        len: u64,
        bytes: Option<&[u8]>,
    ) -> Result<bool> {
        let mut done = 0;
        while done < len {
            if done > 0 {
                // The device may complete at once, and the range may be very long.
                blockhaul_io::yield_now().await;
            }
            let now = self.piece.min(len - done);
            let found = self.read(device, at + done, now).await?;
            let same = match (&found, bytes) {
                (Some(found), Some(bytes)) => {
                    found.bytes() == &bytes[done as usize..(done + now) as usize]
                }
                (Some(found), None) => is_zero(found.bytes()),
                (None, Some(bytes)) => is_zero(&bytes[done as usize..(done + now) as usize]),
                (None, None) => true,
            };
            if !same {
                return Ok(false);
            }
            done += now;
        }
        Ok(true)
    }
}
