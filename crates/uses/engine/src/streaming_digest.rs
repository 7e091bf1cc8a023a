//! Digests computed while copying: lanes hash blocks in the order in which they copy them, and the
//! digest combines the blocks' values in the order of the disk.
//!
//! BLAKE3 is a tree and blksum a list of block digests, so that all lanes can hash their blocks;
//! SHA-256 needs the data in order. The number of values that wait for an earlier block is limited:
//! a digest that would need more gives up, and is computed by reading again.

use std::collections::BTreeMap;
use std::sync::Mutex;

use blake3::hazmat::{HasherExt as _, Mode, merge_subtrees_non_root, merge_subtrees_root};
use blockhaul_io::{Data, is_zero};
use sha2::{Digest as _, Sha256};

use crate::algorithm::{BLOCK, DigestAlgorithm, hex};

/// Maximum number of waiting block values: 4 MiB, for lanes up to 8 GiB of data apart.
const WAITING_MAX: usize = 128 << 10;

type BlockDigest = [u8; 32];

/// The values of consecutive blocks.
pub(crate) enum BlockDigests {
    Each(Vec<BlockDigest>),
    /// This many zero blocks, where their position does not matter.
    Zero(u64),
}

impl BlockDigests {
    fn blocks(&self) -> u64 {
        match self {
            BlockDigests::Each(values) => values.len() as u64,
            BlockDigests::Zero(blocks) => *blocks,
        }
    }

    /// Number of values held in memory.
    fn weight(&self) -> usize {
        match self {
            BlockDigests::Each(values) => values.len(),
            BlockDigests::Zero(_) => 1,
        }
    }
}

/// The digest of a disk whose blocks arrive in any order, from any thread.
pub(crate) struct StreamingDigest {
    algorithm: DigestAlgorithm,
    size: u64,
    zero: BlockDigest,
    state: Mutex<StreamingDigestState>,
}

struct StreamingDigestState {
    /// Number of the first block that is not hashed yet.
    next: u64,
    waiting: BTreeMap<u64, BlockDigests>,
    weight: usize,
    so_far: DigestAccumulator,
    /// Blocks arrived twice, or too many are waiting.
    lost: bool,
}

enum DigestAccumulator {
    /// Chaining values of subtrees with their block counts, largest first. Equal ones are merged
    /// once something follows, because the last merge differs.
    Tree(Vec<(BlockDigest, u64)>),
    List(Sha256),
}

impl StreamingDigest {
    /// For a disk of `size` bytes. `None`: the algorithm needs blocks in order.
    pub(crate) fn new(algorithm: DigestAlgorithm, size: u64) -> Option<StreamingDigest> {
        let so_far = match algorithm {
            DigestAlgorithm::Blake3 => DigestAccumulator::Tree(Vec::new()),
            DigestAlgorithm::Blksum => DigestAccumulator::List(Sha256::new()),
            DigestAlgorithm::Sha256 => return None,
        };
        let state = StreamingDigestState {
            next: 0,
            waiting: BTreeMap::new(),
            weight: 0,
            so_far,
            lost: false,
        };
        // One block is a tree without a merge.
        (size > BLOCK).then(|| StreamingDigest {
            algorithm,
            size,
            zero: Sha256::digest(vec![0; BLOCK as usize]).into(),
            state: Mutex::new(state),
        })
    }

    /// Whether zeroes cost as much as other bytes.
    pub(crate) fn hashes_zeroes(&self) -> bool {
        self.algorithm == DigestAlgorithm::Blake3
    }

    /// The values of bytes at `at`, which must be the start of a block. They end with a block, or
    /// with the disk.
    pub(crate) fn values(&self, at: u64, bytes: &[u8]) -> BlockDigests {
        // Pieces that are not in blocks include one that begins inside a block, at which `add`
        // gives up.
        if !at.is_multiple_of(BLOCK) {
            return BlockDigests::Zero(0);
        }
        let blocks = bytes.chunks(BLOCK as usize).zip(0..);
        BlockDigests::Each(
            blocks.map(|(block, number)| self.value(at + number * BLOCK, block)).collect(),
        )
    }

    /// The values of `len` zeroes at `at`, the start of a block.
    pub(crate) fn zeroes(&self, at: u64, len: u64) -> BlockDigests {
        if !at.is_multiple_of(BLOCK) {
            return BlockDigests::Zero(0);
        }
        if !self.hashes_zeroes() && len.is_multiple_of(BLOCK) {
            return BlockDigests::Zero(len / BLOCK);
        }
        let block = Data::zeroes(BLOCK as usize);
        let starts = (0..len.div_ceil(BLOCK)).map(|number| number * BLOCK);
        let value = |start: u64| {
            let part = BLOCK.min(len - start) as usize;
            self.value(at + start, &block.bytes()[..part])
        };
        BlockDigests::Each(starts.map(value).collect())
    }

    fn value(&self, at: u64, block: &[u8]) -> BlockDigest {
        match self.algorithm {
            DigestAlgorithm::Blake3 => {
                let mut hasher = blake3::Hasher::new();
                hasher.set_input_offset(at).update(block).finalize_non_root()
            }
            _ if block.len() as u64 == BLOCK && is_zero(block) => self.zero,
            _ => Sha256::digest(block).into(),
        }
    }

    /// Adds the values of blocks from `at` on.
    pub(crate) fn add(&self, at: u64, values: BlockDigests) {
        let state = &mut *self.state.lock().expect("no panic under this lock");
        let block = at / BLOCK;
        if !at.is_multiple_of(BLOCK) || block < state.next || state.waiting.contains_key(&block) {
            state.lost = true;
        }
        if state.lost {
            state.waiting.clear();
            return;
        }
        state.weight += values.weight();
        state.waiting.insert(block, values);
        while let Some(values) = state.waiting.remove(&state.next) {
            state.next += values.blocks();
            state.weight -= values.weight();
            state.so_far.push(&values, &self.zero);
        }
        state.lost = state.weight > WAITING_MAX;
    }

    /// The digest in hexadecimal, if each block arrived exactly once.
    pub(crate) fn finish(&self) -> Option<String> {
        let state = &mut *self.state.lock().expect("no panic under this lock");
        if state.lost || state.next != self.size.div_ceil(BLOCK) {
            return None;
        }
        match &mut state.so_far {
            DigestAccumulator::Tree(stack) => {
                let (mut value, _) = stack.pop()?;
                while stack.len() > 1 {
                    let (left, _) = stack.pop()?;
                    value = merge_subtrees_non_root(&left, &value, Mode::Hash);
                }
                let (left, _) = stack.pop()?;
                Some(merge_subtrees_root(&left, &value, Mode::Hash).to_hex().to_string())
            }
            DigestAccumulator::List(list) => {
                let mut list = list.clone();
                list.update(self.size.to_le_bytes());
                Some(hex(&list.finalize()))
            }
        }
    }
}

impl DigestAccumulator {
    fn push(&mut self, values: &BlockDigests, zero: &BlockDigest) {
        match (self, values) {
            (DigestAccumulator::List(list), BlockDigests::Each(values)) => {
                values.iter().for_each(|value| list.update(value));
            }
            (DigestAccumulator::List(list), BlockDigests::Zero(blocks)) => {
                // Many at a time: a hole of a TiB is half a GiB of values.
                let many = zero.repeat(64);
                let mut left = *blocks;
                while left > 0 {
                    let part = left.min(64);
                    list.update(&many[..part as usize * zero.len()]);
                    left -= part;
                }
            }
            (DigestAccumulator::Tree(stack), BlockDigests::Each(values)) => {
                for value in values {
                    while let [.., (left, size), (right, other)] = stack[..]
                        && size == other
                    {
                        stack.truncate(stack.len() - 2);
                        stack.push((merge_subtrees_non_root(&left, &right, Mode::Hash), 2 * size));
                    }
                    stack.push((*value, 1));
                }
            }
            (DigestAccumulator::Tree(_), BlockDigests::Zero(_)) => {
                unreachable!("where the place matters zeroes are hashed");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use blockhaul_testkit::rng::{Rng, seed};

    use super::*;

    /// What a lane does with a piece of a disk.
    fn values(streaming: &StreamingDigest, at: u64, bytes: &[u8]) -> BlockDigests {
        if is_zero(bytes) {
            streaming.zeroes(at, bytes.len() as u64)
        } else {
            streaming.values(at, bytes)
        }
    }

    #[test]
    fn blocks_in_any_order_give_the_digest_of_the_bytes() {
        let seed = seed();
        let mut rng = Rng::new(seed);
        for round in 0..60 {
            let size = rng.between(BLOCK + 1, 40 * BLOCK) / *rng.pick(&[1, BLOCK]);
            let size = if size <= BLOCK { size.max(2) * BLOCK } else { size };
            let mut bytes = vec![0; size as usize];
            for block in bytes.chunks_mut(BLOCK as usize) {
                if rng.chance(60) {
                    rng.fill(block);
                }
            }
            let step = (BLOCK << rng.below(4)) as usize;
            let mut pieces: Vec<_> = bytes.chunks(step).enumerate().collect();
            for index in (1..pieces.len()).rev() {
                pieces.swap(index, rng.below(index as u64 + 1) as usize);
            }
            for algorithm in [DigestAlgorithm::Blake3, DigestAlgorithm::Blksum] {
                let streaming = StreamingDigest::new(algorithm, size).unwrap();
                for &(index, piece) in &pieces {
                    assert_eq!(streaming.finish(), None, "not all are there");
                    let at = (index * step) as u64;
                    streaming.add(at, values(&streaming, at, piece));
                }
                let whole = crate::algorithm::of_bytes(algorithm, &bytes);
                assert_eq!(
                    streaming.finish(),
                    Some(whole),
                    "{algorithm}, seed {seed}, round {round}"
                );
            }
        }
    }

    #[test]
    fn what_comes_twice_or_is_too_far_ahead_is_no_digest() {
        for algorithm in [DigestAlgorithm::Blake3, DigestAlgorithm::Blksum] {
            let streaming = StreamingDigest::new(algorithm, 2 * BLOCK).unwrap();
            for (at, bytes) in [(0, [1; 1000]), (1000, [0; 1000])] {
                streaming.add(at, streaming.values(at, &bytes));
            }
            streaming.add(2000, streaming.zeroes(2000, 2 * BLOCK - 2000));
            assert_eq!(streaming.finish(), None, "pieces that are no blocks");
        }
        let streaming = StreamingDigest::new(DigestAlgorithm::Blksum, 2 * BLOCK).unwrap();
        streaming.add(0, streaming.zeroes(0, BLOCK));
        streaming.add(0, streaming.zeroes(0, BLOCK));
        streaming.add(BLOCK, streaming.zeroes(BLOCK, BLOCK));
        assert_eq!(streaming.finish(), None);
        let blocks = WAITING_MAX as u64 + 3;
        let streaming = StreamingDigest::new(DigestAlgorithm::Blksum, blocks * BLOCK).unwrap();
        for block in 1..blocks {
            streaming.add(block * BLOCK, BlockDigests::Each(vec![[0; 32]]));
        }
        streaming.add(0, BlockDigests::Each(vec![[0; 32]]));
        assert_eq!(streaming.finish(), None);
        assert!(streaming.state.lock().unwrap().waiting.is_empty());
        assert!(StreamingDigest::new(DigestAlgorithm::Sha256, 1 << 30).is_none());
        assert!(StreamingDigest::new(DigestAlgorithm::Blake3, BLOCK).is_none());
    }
}
