//! The bytes of a description, and the device that holds them.

use blockhaul_block::{Error, Kind, Result};
use blockhaul_io::is_zero;

use blockhaul_backends::support::MemoryDevice;

/// Maximum bytes that a description may have, without zeroes; a piece adds [`PIECE_COST`] bytes. A
/// second's work at most.
pub const WORK_MAX: u64 = 256 << 20;
/// Cost of placing one piece, measured in bytes that could be copied instead.
const PIECE_COST: u64 = 32;
/// Bytes that are written at a time.
const CHUNK: usize = 64 << 10;
/// Maximum size of a device.
const SIZE_MAX: u64 = i64::MAX as u64;

/// Bytes at an offset, `count` times in a row.
#[derive(Debug)]
struct Piece {
    at: u64,
    bytes: Vec<u8>,
    count: u64,
}

/// Bytes at offsets: later ones overwrite earlier ones.
#[derive(Debug, Default)]
pub struct DataImage {
    pieces: Vec<Piece>,
    at: u64,
    len: u64,
}

pub fn too_large() -> Error {
    Error::new(Kind::Usage, "data: reaches beyond 2^63 - 1 bytes")
}

impl DataImage {
    /// The offset of the next bytes.
    pub fn at(&self) -> u64 {
        self.at
    }

    /// The length in bytes.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Continues at this offset; `None`: one that cannot be represented.
    ///
    /// # Errors
    /// [`Kind::Usage`] if the offset exceeds the maximum size of a device.
    pub fn seek(&mut self, to: Option<u64>) -> Result<()> {
        self.at = to.filter(|&to| to <= SIZE_MAX).ok_or_else(too_large)?;
        self.len = self.len.max(self.at);
        Ok(())
    }

    /// Adds bytes, `count` times.
    ///
    /// # Errors
    /// [`Kind::Usage`] if they exceed the maximum size of a device.
    pub fn push(&mut self, mut bytes: Vec<u8>, count: u64) -> Result<()> {
        let at = self.at;
        let len = (bytes.len() as u64).checked_mul(count);
        self.seek(len.and_then(|len| at.checked_add(len)))?;
        match self.pieces.last_mut() {
            _ if self.at == at => {}
            // Consecutive literal bytes become one piece.
            Some(last) if count == 1 && last.count == 1 && last.end() == at => {
                last.bytes.append(&mut bytes);
            }
            _ => self.pieces.push(Piece { at, bytes, count }),
        }
        Ok(())
    }

    /// A device of `size` bytes with these contents.
    ///
    /// # Errors
    /// [`Kind::Usage`] for more than [`WORK_MAX`] bytes; and if there is not enough memory.
    pub fn device(&self, name: String, size: u64) -> Result<MemoryDevice> {
        let work = self.pieces.iter().map(|piece| piece.cost(size));
        if work.fold(0, u64::saturating_add) > WORK_MAX {
            let text = format!(
                "data: expands to more than {} MiB: use a file, or pattern: or sample:",
                WORK_MAX >> 20
            );
            return Err(Error::new(Kind::Usage, text));
        }
        let device = MemoryDevice::new(name, size).with_facts(|facts| facts.zeroed = false);
        self.pieces.iter().try_for_each(|piece| piece.write(&device, size))?;
        Ok(device)
    }
}

impl Piece {
    /// The end, which [`DataImage::push`] has checked.
    fn end(&self) -> u64 {
        self.at + self.bytes.len() as u64 * self.count
    }

    fn cost(&self, size: u64) -> u64 {
        let len = self.end().min(size).saturating_sub(self.at);
        if is_zero(&self.bytes) { PIECE_COST } else { len.saturating_add(PIECE_COST) }
    }

    /// Writes the piece as far as the device reaches. Chunks of zeroes take no memory.
    fn write(&self, device: &MemoryDevice, size: u64) -> Result<()> {
        let end = self.end().min(size);
        if is_zero(&self.bytes) {
            return device.zero_now(self.at.min(end), end.saturating_sub(self.at));
        }
        // A few repetitions make a chunk.
        let most = (CHUNK / self.bytes.len()).max(1) as u64;
        let cycle = self.bytes.repeat(most.min(self.count) as usize);
        let mut at = self.at;
        while at < end {
            let from = ((at - self.at) % cycle.len() as u64) as usize;
            let most = (CHUNK as u64 - at % CHUNK as u64).min(end - at) as usize;
            let part = &cycle[from..cycle.len().min(from + most)];
            if is_zero(part) {
                device.zero_now(at, part.len() as u64)?;
            } else {
                device.write_now(at, part)?;
            }
            at += part.len() as u64;
        }
        Ok(())
    }
}
