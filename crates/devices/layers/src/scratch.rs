//! Memory of a layer's own, for bytes that it must see: pieces of a bounded length from a small pool.
//!
//! Whoever holds a piece waits only for the device below, so waiting for one always ends.

use std::sync::Arc;

use blockhaul_block::{Device, Error, Kind, Reply, Request, Result};
use blockhaul_io::{Data, Pool, Reservation};

use crate::declared::misfit;

/// Pieces that may be held at a time.
const PIECES: u64 = 8;

/// A layer's own memory.
#[derive(Clone)]
pub(crate) struct Scratch {
    pool: Pool,
    piece: u64,
}

impl Scratch {
    /// Longest piece, in bytes: reads of this length cost little more per byte than longer ones.
    pub(crate) const PIECE: u64 = 256 << 10;

    /// Memory for pieces of at most `piece` bytes.
    pub(crate) fn new(piece: u64) -> Scratch {
        // A piece is a request's length: it fits.
        let piece = piece.clamp(1, 1 << 30);
        Scratch { pool: Pool::new(Pool::cost(piece as usize) * PIECES), piece }
    }

    /// Memory that suits a device.
    pub(crate) fn for_device(device: &Arc<dyn Device>) -> Scratch {
        let facts = device.facts();
        // What a filter below says may be what it holds to, although clients are free to ignore it.
        let most = facts.told.map_or(u32::MAX, |told| told.maximum).min(facts.block.maximum);
        Scratch::new(Self::PIECE.min(u64::from(most)))
    }

    /// The longest piece.
    pub(crate) fn piece(&self) -> u64 {
        self.piece
    }

    /// Waits for room for a piece.
    pub(crate) async fn room(&self, len: u64) -> Result<Reservation> {
        let len = usize::try_from(len).unwrap_or(usize::MAX);
        let room = self.pool.reserve(len).await;
        room.map_err(|error| Error::new(Kind::NoMemory, "no scratch memory").because(error))
    }

    /// Reads a piece; `None` if it is all zeroes because the device says so.
    pub(crate) async fn read(
        &self,
        device: &Arc<dyn Device>,
        at: u64,
        len: u64,
    ) -> Result<Option<Data>> {
        match device.submit(Request::read(at, self.room(len).await?)).await? {
            Reply::Data(data) => Ok(Some(data)),
            Reply::Hole => Ok(None),
            _ => Err(misfit()),
        }
    }

    /// Reads into memory that is there already; false if all of it is zeroes.
    pub(crate) async fn fill(
        &self,
        device: &Arc<dyn Device>,
        at: u64,
        out: &mut [u8],
    ) -> Result<bool> {
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

    /// Whether the device holds these bytes; without bytes, whether it holds zeroes.
    pub(crate) async fn holds(
        &self,
        device: &Arc<dyn Device>,
        at: u64,
        len: u64,
        bytes: Option<&[u8]>,
    ) -> Result<bool> {
        let mut done = 0;
        while done < len {
            if done > 0 {
                // The device may answer at once, and the range may be very long.
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

/// Whether all bytes are zero.
pub(crate) fn is_zero(bytes: &[u8]) -> bool {
    // Equal to itself shifted by one, and the first is zero: the comparison is the platform's fastest.
    bytes.split_first().is_none_or(|(first, rest)| *first == 0 && rest == &bytes[..rest.len()])
}
