//! The contents of a file: where its bytes are.

use std::ops::Range;

use blockhaul_block::{Extents, HOLE, ZERO};
use blockhaul_io::Data;
use openssl::sha::Sha256;

use crate::digest::Digest;
use crate::fault::{RepositoryFault, Result};
use crate::index::{BlobKind, BlobPlace};
use crate::repository::Repository;
use crate::tree::TreeNode;

/// Zeroes that are hashed at a time, in bytes.
const ZEROES: u32 = 64 << 10;
/// The number of a blob of zeroes.
const HOLE_NUMBER: u32 = u32::MAX;
/// Number of runs that is enough for one reply.
const RUNS_MAX: usize = 64 << 10;

/// A blob of the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct FileBlob {
    pub(crate) digest: Digest,
    pub(crate) place: BlobPlace,
}

/// The contents of a file, in blobs.
pub(crate) struct FileContent {
    /// The end of each part of the file, in bytes.
    ends: Vec<u64>,
    /// The blob of each part.
    numbers: Vec<u32>,
    /// Each blob once.
    blobs: Vec<FileBlob>,
}

/// A part of the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct FilePart {
    pub(crate) at: u64,
    pub(crate) end: u64,
    /// The number of its blob. None: zeroes.
    pub(crate) blob: Option<u32>,
}

impl FileContent {
    /// The contents of this file.
    ///
    /// # Errors
    /// No index has one of its blobs, or their lengths are not those of the file.
    pub(crate) fn new(repository: &Repository, node: &TreeNode) -> Result<FileContent> {
        let (mut ends, mut numbers) = (Vec::new(), Vec::new());
        ends.reserve_exact(node.content.len());
        numbers.reserve_exact(node.content.len());
        let mut end = 0_u64;
        for digest in &node.content {
            let (number, place) = repository.find(BlobKind::Data, digest)?;
            // An index has fewer than 2^32 blobs.
            numbers.push(u32::try_from(number).unwrap_or(u32::MAX));
            end = end.saturating_add(place.plain().into());
            ends.push(end);
        }
        if end != node.size || i64::try_from(end).is_err() {
            let why = format!("its blobs have {end} bytes, and the file {}", node.size);
            return Err(RepositoryFault::damaged(&node.shown(), why));
        }
        let blobs = renumber(&mut numbers, |part, number| FileBlob {
            digest: node.content[part],
            place: repository.index().place(number as usize),
        });
        let is_zero = zero_blobs(&blobs);
        for number in &mut numbers {
            if is_zero[*number as usize] {
                *number = HOLE_NUMBER;
            }
        }
        Ok(FileContent { ends, numbers, blobs })
    }

    /// Bytes of the file.
    pub(crate) fn size(&self) -> u64 {
        self.ends.last().copied().unwrap_or(0)
    }

    /// Whether each blob has `chunk` bytes, except that the last one may be shorter.
    pub(crate) fn is_cut_each(&self, chunk: u64) -> bool {
        let is_cut = |(number, end): (usize, &u64)| {
            *end == ((number as u64 + 1).saturating_mul(chunk)).min(self.size())
        };
        self.ends.iter().enumerate().all(is_cut)
    }

    /// Bytes of the first of several blobs.
    pub(crate) fn first_of_several(&self) -> Option<u64> {
        self.ends.first().copied().filter(|_| self.ends.len() > 1)
    }

    /// A blob of the file.
    pub(crate) fn blob(&self, number: u32) -> Option<FileBlob> {
        self.blobs.get(number as usize).copied()
    }

    /// The parts of the file that a range touches.
    pub(crate) fn parts(&self, range: Range<u64>) -> impl Iterator<Item = FilePart> + '_ {
        let first = self.ends.partition_point(|end| *end <= range.start);
        (first..self.ends.len())
            .map(|part| self.part(part))
            .take_while(move |part| part.at < range.end)
    }

    fn part(&self, part: usize) -> FilePart {
        let at = part.checked_sub(1).map_or(0, |before| self.ends[before]);
        let blob = Some(self.numbers[part]).filter(|number| *number != HOLE_NUMBER);
        FilePart { at, end: self.ends[part], blob }
    }

    /// The state of a range; the list may end earlier.
    pub(crate) fn extents(&self, range: Range<u64>) -> Extents {
        let mut extents = Extents::new();
        for part in self.parts(range.clone()) {
            let state = if part.blob.is_none() { HOLE | ZERO } else { 0 };
            extents.push(part.end.min(range.end) - part.at.max(range.start), state);
            if extents.len() >= RUNS_MAX {
                break;
            }
        }
        extents
    }
}

/// Replaces numbers in the index by those of blobs in a list without repetitions, which is returned. `blob` makes the
/// blob of a part with this number in the index.
fn renumber(numbers: &mut [u32], blob: impl Fn(usize, u32) -> FileBlob) -> Vec<FileBlob> {
    let mut parts: Vec<u32> = (0..u32::try_from(numbers.len()).unwrap_or(u32::MAX)).collect();
    parts.sort_unstable_by_key(|part| numbers[*part as usize]);
    let mut blobs = Vec::new();
    let mut last = None;
    for part in parts {
        let number = numbers[part as usize];
        if last != Some(number) {
            blobs.push(blob(part as usize, number));
            last = Some(number);
        }
        numbers[part as usize] = u32::try_from(blobs.len() - 1).unwrap_or(HOLE_NUMBER);
    }
    blobs.shrink_to_fit();
    blobs
}

/// Whether each blob is one of zeroes: its digest is that of as many zeroes. They are hashed once, up to the longest
/// blob.
fn zero_blobs(blobs: &[FileBlob]) -> Vec<bool> {
    let mut order: Vec<u32> = (0..u32::try_from(blobs.len()).unwrap_or(u32::MAX)).collect();
    let len = |number: u32| blobs[number as usize].place.plain();
    order.sort_unstable_by_key(|number| len(*number));
    let mut is_zero = vec![false; blobs.len()];
    let block = Data::zeroes(ZEROES as usize);
    let (mut hash, mut hashed) = (Sha256::new(), 0);
    let mut zeroes = (0, Digest([0; 32]));
    for number in order {
        while hashed < len(number) {
            let more = (len(number) - hashed).min(ZEROES);
            hash.update(&block.bytes()[..more as usize]);
            hashed += more;
        }
        if zeroes.0 != hashed {
            zeroes = (hashed, Digest(hash.clone().finish()));
        }
        is_zero[number as usize] = blobs[number as usize].digest == zeroes.1;
    }
    is_zero
}
