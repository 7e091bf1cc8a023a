//! Digest algorithms, computed over bytes that arrive in order.

use std::fmt;
use std::str::FromStr;

use blockhaul_block::{Error, Kind, Result};
use blockhaul_io::{Data, is_zero};
use sha2::{Digest as _, Sha256};

/// Size of blksum's blocks in bytes; part of its definition.
pub(crate) const BLOCK: u64 = 64 << 10;

/// How a digest is computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DigestAlgorithm {
    /// BLAKE3 of the bytes, like `b3sum`.
    Blake3,
    /// SHA-256 of the bytes, like `sha256sum`.
    Sha256,
    /// Like `blksum` of the blkhash project with its default SHA-256: the SHA-256 of the SHA-256s
    /// of 64 KiB blocks, followed by the length (8 bytes, little-endian). Holes cost nearly
    /// nothing.
    Blksum,
}

impl FromStr for DigestAlgorithm {
    type Err = Error;

    fn from_str(name: &str) -> Result<DigestAlgorithm> {
        match name {
            "blake3" => Ok(DigestAlgorithm::Blake3),
            "sha256" => Ok(DigestAlgorithm::Sha256),
            "blksum" => Ok(DigestAlgorithm::Blksum),
            _ => {
                let text = format!("{name:?} is not one of blake3, sha256, blksum");
                Err(Error::new(Kind::Usage, text))
            }
        }
    }
}

impl fmt::Display for DigestAlgorithm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            DigestAlgorithm::Blake3 => "blake3",
            DigestAlgorithm::Sha256 => "sha256",
            DigestAlgorithm::Blksum => "blksum",
        })
    }
}

/// A digest being computed over bytes that arrive in order.
pub(crate) enum Hasher {
    Blake3(Box<blake3::Hasher>),
    Sha256(Sha256),
    Blksum(Blksum),
}

/// A blksum being computed.
pub(crate) struct Blksum {
    outer: Sha256,
    /// The current block, and how many bytes of it have been hashed.
    block: Sha256,
    filled: usize,
    /// The digest of a zero block.
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

impl Hasher {
    pub(crate) fn new(algorithm: DigestAlgorithm) -> Hasher {
        match algorithm {
            DigestAlgorithm::Blake3 => Hasher::Blake3(Box::default()),
            DigestAlgorithm::Sha256 => Hasher::Sha256(Sha256::new()),
            DigestAlgorithm::Blksum => {
                let zero = Sha256::digest(vec![0; BLOCK as usize]).into();
                let outer = Sha256::new();
                let block = Sha256::new();
                Hasher::Blksum(Blksum { outer, block, filled: 0, zero })
            }
        }
    }

    /// Hashes the next bytes.
    pub(crate) fn bytes(&mut self, bytes: &[u8]) {
        match self {
            Hasher::Blake3(hasher) => drop(hasher.update(bytes)),
            Hasher::Sha256(hasher) => hasher.update(bytes),
            Hasher::Blksum(blksum) => blksum.bytes(bytes),
        }
    }

    /// Hashes `len` zero bytes.
    pub(crate) fn zeroes(&mut self, mut len: u64) {
        if let Hasher::Blksum(blksum) = self
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

    /// The digest, in hexadecimal, of the `size` bytes hashed.
    pub(crate) fn finish(self, size: u64) -> String {
        match self {
            Hasher::Blake3(hasher) => hasher.finalize().to_hex().to_string(),
            Hasher::Sha256(hasher) => hex(&hasher.finalize()),
            Hasher::Blksum(mut blksum) => {
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
pub(crate) fn of_bytes(algorithm: DigestAlgorithm, bytes: &[u8]) -> String {
    let mut state = Hasher::new(algorithm);
    state.bytes(bytes);
    state.finish(bytes.len() as u64)
}

pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(algorithm: DigestAlgorithm, bytes: &[u8]) -> String {
        of_bytes(algorithm, bytes)
    }

    #[test]
    fn answers_that_are_known() {
        // Published with libnbd 1.23 and blkhash.
        let empty = of(DigestAlgorithm::Blksum, b"");
        let hello = of(DigestAlgorithm::Blksum, b"hello");
        assert!(empty.starts_with("af5570f5") && empty.ends_with("e83dfc"), "{empty}");
        assert!(hello.starts_with("337355fe") && hello.ends_with("2545e6"), "{hello}");
        let abc = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        assert_eq!(of(DigestAlgorithm::Sha256, b"abc"), abc);
        assert_eq!(of(DigestAlgorithm::Blake3, b"abc"), blake3::hash(b"abc").to_hex().as_str());
    }

    #[test]
    fn zeroes_count_as_such_however_they_are_told() {
        for len in [0, 1, 4096, BLOCK, BLOCK + 1, 4 * BLOCK, 5 * BLOCK + 77] {
            for algorithm in
                [DigestAlgorithm::Blake3, DigestAlgorithm::Sha256, DigestAlgorithm::Blksum]
            {
                let mut state = Hasher::new(algorithm);
                state.zeroes(len);
                assert_eq!(state.finish(len), of(algorithm, &vec![0; len as usize]));
                // In pieces that do not match the blocks.
                let mut bytes = vec![0; len as usize + 2 * BLOCK as usize];
                bytes[7] = 1;
                let mut state = Hasher::new(algorithm);
                state.bytes(&bytes[..100]);
                state.zeroes(len);
                bytes[100 + len as usize..].chunks(5000).for_each(|part| state.bytes(part));
                assert_eq!(state.finish(bytes.len() as u64), of(algorithm, &bytes));
            }
        }
    }
}
