//! The digest of all that a device holds, as other programs compute it.

use std::collections::VecDeque;
use std::fmt;
use std::rc::Rc;
use std::str::FromStr;
use std::sync::Arc;

use block::{BASE_ALLOCATION, Can, DeviceExt as _, Error, Kind, Result, Stack, ZERO};
use io::{Data, Pool, Task};
use sha2::{Digest as _, Sha256};

use crate::end::{End, Retries, Side};
use crate::options::Options;
use crate::progress::Progress;
use crate::verify::read;
use crate::zeroes::is_zero;

/// Bytes of blksum's blocks. Part of its definition.
pub(crate) const BLOCK: u64 = 64 << 10;
/// Bytes read at a time: a multiple of [`BLOCK`].
const PIECE: u64 = 256 << 10;
/// Pieces read ahead.
const AHEAD: usize = 32;
/// Bytes asked about in one go: less than 4 GiB, so that it fits requests of 32 bits.
const QUERY: u64 = 2 << 30;

/// How a digest is computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Algorithm {
    /// BLAKE3 of the bytes, as b3sum.
    Blake3,
    /// SHA-256 of the bytes, as sha256sum.
    Sha256,
    /// As blksum of the blkhash project, with its default SHA-256: the SHA-256 of the SHA-256s of
    /// blocks of 64 KiB, followed by the length (8 bytes, little-endian). Holes cost nearly nothing.
    Blksum,
}

impl FromStr for Algorithm {
    type Err = Error;

    fn from_str(name: &str) -> Result<Algorithm> {
        match name {
            "blake3" => Ok(Algorithm::Blake3),
            "sha256" => Ok(Algorithm::Sha256),
            "blksum" => Ok(Algorithm::Blksum),
            _ => {
                let text = format!("{name:?} is not one of blake3, sha256, blksum");
                Err(Error::new(Kind::Usage, text))
            }
        }
    }
}

impl fmt::Display for Algorithm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Algorithm::Blake3 => "blake3",
            Algorithm::Sha256 => "sha256",
            Algorithm::Blksum => "blksum",
        })
    }
}

/// Reads `source` and returns its digest in hexadecimal; holes are not read. Call it on a worker.
pub async fn digest(
    source: &Stack,
    algorithm: Algorithm,
    options: &Options,
    pool: &Pool,
    progress: &Arc<Progress>,
) -> Result<String> {
    let retries = Retries::new(options, progress);
    let end = End::new(Side::Source, source.clone(), source.device().clone(), retries);
    let (end, size) = (Rc::new(end), source.device().facts().size);
    let mut holes = Holes::new(end.clone(), options.extents, size);
    let mut state = State::new(algorithm);
    // At most what the pool holds, so that a piece that is awaited has its buffer.
    let ahead = usize::try_from(pool.limit() / Pool::cost(PIECE as usize)).unwrap_or(1);
    let ahead = ahead.clamp(1, AHEAD);
    let mut out: VecDeque<(u64, Task<Result<Option<Data>>>)> = VecDeque::new();
    let mut at = 0;
    let mut result = Ok(());
    loop {
        while at < size && out.len() < ahead && result.is_ok() && !progress.is_cancelled() {
            let len = PIECE.min(size - at);
            let hole = holes.is_hole(at, len).await;
            let (end, pool) = (end.clone(), pool.clone());
            out.push_back((
                len,
                io::start(async move {
                    match hole {
                        true => Ok(None),
                        false => read(&end, &pool, at, len).await,
                    }
                }),
            ));
            at += len;
        }
        // After an error what is out is awaited, too.
        let Some((len, piece)) = out.pop_front() else { break };
        match piece.await {
            Ok(Some(data)) => state.bytes(data.bytes()),
            Ok(None) => state.zeroes(len),
            Err(error) => result = result.and(Err(error)),
        }
        progress.add_verified(len);
    }
    result?;
    if progress.is_cancelled() {
        return Err(Error::new(Kind::ShuttingDown, "stopped before the end of the digest"));
    }
    Ok(state.finish(size))
}

/// Where the source says that it reads as zeroes, asked ahead of the reads.
struct Holes {
    end: Rc<End>,
    size: u64,
    asks: bool,
    /// Ends of runs in order, and whether they are zero.
    known: VecDeque<(u64, bool)>,
    known_to: u64,
}

impl Holes {
    fn new(end: Rc<End>, extents: bool, size: u64) -> Holes {
        let asks = extents && end.facts().can.contains(Can::EXTENTS);
        Holes { end, size, asks, known: VecDeque::new(), known_to: 0 }
    }

    /// Whether all of a range is zero; ranges are asked for in order.
    async fn is_hole(&mut self, at: u64, len: u64) -> bool {
        let end = at + len;
        while self.asks && self.known_to < end {
            self.ask().await;
        }
        while self.known.front().is_some_and(|run| run.0 <= at) {
            self.known.pop_front();
        }
        let mut covered = at;
        for &(run_end, zero) in &self.known {
            if !zero {
                return false;
            }
            covered = run_end;
            if covered >= end {
                break;
            }
        }
        covered >= end
    }

    async fn ask(&mut self) {
        let facts = self.end.facts();
        let Some(context) = facts.context(BASE_ALLOCATION) else {
            self.asks = false;
            return;
        };
        let len = QUERY.min(self.size - self.known_to);
        let mut attempts = 0;
        loop {
            let generation = self.end.generation();
            let error = match self.end.device().extents(self.known_to, len, context).await {
                Ok(mut lists) => {
                    for run in lists.pop().unwrap_or_default().runs() {
                        self.known_to += run.len;
                        self.known.push_back((self.known_to, run.state & ZERO != 0));
                    }
                    return;
                }
                Err(error) => error,
            };
            if let Err(error) = self.end.recover(error, generation, &mut attempts).await {
                // Extents are a help, not a need.
                log::warn!("{error}; reading everything from here on");
                self.asks = false;
                return;
            }
        }
    }
}

/// A digest under way, of bytes that come in order.
pub(crate) enum State {
    Blake3(Box<blake3::Hasher>),
    Sha256(Sha256),
    Blksum(Blksum),
}

/// A blksum under way.
pub(crate) struct Blksum {
    outer: Sha256,
    /// The block that has begun, and how much of it has come.
    block: Sha256,
    filled: usize,
    /// The digest of a block of zeroes.
    zero: [u8; 32],
}

impl Blksum {
    fn bytes(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let len = bytes.len().min(BLOCK as usize - self.filled);
            let (part, rest) = bytes.split_at(len);
            bytes = rest;
            if len as u64 == BLOCK && is_zero(part) {
                self.outer.update(self.zero);
                continue;
            }
            self.block.update(part);
            self.filled += len;
            if self.filled as u64 == BLOCK {
                self.end_block();
            }
        }
    }

    fn end_block(&mut self) {
        self.outer.update(self.block.finalize_reset());
        self.filled = 0;
    }
}

impl State {
    pub(crate) fn new(algorithm: Algorithm) -> State {
        match algorithm {
            Algorithm::Blake3 => State::Blake3(Box::new(blake3::Hasher::new())),
            Algorithm::Sha256 => State::Sha256(Sha256::new()),
            Algorithm::Blksum => {
                let zero = Sha256::digest(vec![0; BLOCK as usize]).into();
                let (outer, block) = (Sha256::new(), Sha256::new());
                State::Blksum(Blksum { outer, block, filled: 0, zero })
            }
        }
    }

    /// The next bytes.
    pub(crate) fn bytes(&mut self, bytes: &[u8]) {
        match self {
            State::Blake3(hasher) => drop(hasher.update(bytes)),
            State::Sha256(hasher) => hasher.update(bytes),
            State::Blksum(blksum) => blksum.bytes(bytes),
        }
    }

    /// The next bytes are so many zeroes.
    pub(crate) fn zeroes(&mut self, mut len: u64) {
        if let State::Blksum(blksum) = self
            && blksum.filled == 0
        {
            while len >= BLOCK {
                blksum.outer.update(blksum.zero);
                len -= BLOCK;
            }
        }
        while len > 0 {
            let part = len.min(Data::ZEROES_MAX as u64);
            self.bytes(Data::zeroes(part as usize).bytes());
            len -= part;
        }
    }

    /// The digest in hexadecimal of what came, `size` bytes.
    pub(crate) fn finish(self, size: u64) -> String {
        match self {
            State::Blake3(hasher) => hasher.finalize().to_hex().to_string(),
            State::Sha256(hasher) => hex(&hasher.finalize()),
            State::Blksum(mut blksum) => {
                if blksum.filled > 0 {
                    blksum.end_block();
                }
                blksum.outer.update(size.to_le_bytes());
                hex(&blksum.outer.finalize())
            }
        }
    }
}

/// The digest of these bytes.
#[cfg(test)]
pub(crate) fn of_bytes(algorithm: Algorithm, bytes: &[u8]) -> String {
    let mut state = State::new(algorithm);
    state.bytes(bytes);
    state.finish(bytes.len() as u64)
}

pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(algorithm: Algorithm, bytes: &[u8]) -> String {
        of_bytes(algorithm, bytes)
    }

    #[test]
    fn answers_that_are_known() {
        // Published with libnbd 1.23 and blkhash.
        let (empty, hello) = (of(Algorithm::Blksum, b""), of(Algorithm::Blksum, b"hello"));
        assert!(empty.starts_with("af5570f5") && empty.ends_with("e83dfc"), "{empty}");
        assert!(hello.starts_with("337355fe") && hello.ends_with("2545e6"), "{hello}");
        let abc = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        assert_eq!(of(Algorithm::Sha256, b"abc"), abc);
        assert_eq!(of(Algorithm::Blake3, b"abc"), blake3::hash(b"abc").to_hex().as_str());
    }

    #[test]
    fn zeroes_count_as_such_however_they_are_told() {
        for len in [0, 1, 4096, BLOCK, BLOCK + 1, PIECE, 5 * BLOCK + 77] {
            for algorithm in [Algorithm::Blake3, Algorithm::Sha256, Algorithm::Blksum] {
                let mut state = State::new(algorithm);
                state.zeroes(len);
                assert_eq!(state.finish(len), of(algorithm, &vec![0; len as usize]));
                // In pieces that are no blocks.
                let mut bytes = vec![0; len as usize + 2 * BLOCK as usize];
                bytes[7] = 1;
                let mut state = State::new(algorithm);
                state.bytes(&bytes[..100]);
                state.zeroes(len);
                bytes[100 + len as usize..].chunks(5000).for_each(|part| state.bytes(part));
                assert_eq!(state.finish(bytes.len() as u64), of(algorithm, &bytes));
            }
        }
    }
}
