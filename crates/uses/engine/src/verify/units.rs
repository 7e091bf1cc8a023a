//! The digests of units, computed from those of their blocks.

use super::BLOCK;
use crate::manifest::Digest;

/// The digests of the units of one segment; does nothing if none are requested.
pub(super) struct Units {
    /// Unit size in bytes.
    unit: Option<u64>,
    /// Digest of a zero block.
    zero_block: Digest,
    /// The open unit, and whether it has any data.
    open: Option<(u64, blake3::Hasher, bool)>,
    ended: Vec<(u64, Digest)>,
}

impl Units {
    pub(super) fn new(unit: Option<u64>, zero_block: Digest) -> Units {
        Units { unit, zero_block, open: None, ended: Vec::new() }
    }

    /// Adds what follows: a block with its digest, or zeroes of any length.
    pub(super) fn add(&mut self, at: u64, len: u64, digest: Option<Digest>) {
        let Some(unit) = self.unit else { return };
        let mut start = at;
        while start < at + len {
            // Skip several units of zeroes at once.
            let whole = (at + len - start) / unit * unit;
            if digest.is_none() && start.is_multiple_of(unit) && whole > 0 {
                self.end();
                start += whole;
                continue;
            }
            let home = start - start % unit;
            if self.open.as_ref().is_none_or(|open| open.0 != home) {
                self.end();
            }
            let end = (at + len).min(home + unit);
            let open = self.open.get_or_insert_with(|| (home, blake3::Hasher::new(), false));
            open.2 |= digest.is_some();
            while start < end {
                let part = (BLOCK - start % BLOCK).min(end - start);
                match (&digest, part) {
                    (Some(digest), _) => open.1.update(digest),
                    (None, BLOCK) => open.1.update(&self.zero_block),
                    (None, part) => open.1.update(blake3::hash(&vec![0; part as usize]).as_bytes()),
                };
                start += part;
            }
        }
    }

    /// Offsets and digests of the units that are not all zero.
    pub(super) fn finish(mut self) -> Vec<(u64, Digest)> {
        self.end();
        self.ended
    }

    /// Ends the open unit.
    fn end(&mut self) {
        if let Some((at, hasher, true)) = self.open.take() {
            self.ended.push((at, hasher.finalize().into()));
        }
    }
}
