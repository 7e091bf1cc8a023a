//! Where each byte of a point is: in its own file, or in that of a point below it.

use blockhaul_block::{Error, Kind, Result};

/// Maximum number of pieces: 192 MiB of them.
const PIECES_MAX: usize = 8 << 20;

/// A run of bytes in one file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct OverlayPiece {
    /// Where it ends; it starts where the one before it ends.
    pub(crate) end: u64,
    /// The file that has it: 0 is the full backup.
    pub(crate) level: usize,
}

/// The pieces of a disk, in order and without gaps.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Overlay {
    pieces: Vec<OverlayPiece>,
}

impl Overlay {
    /// A disk of `size` bytes that is all in the full backup.
    pub(crate) fn full(size: u64) -> Overlay {
        let pieces = if size > 0 { vec![OverlayPiece { end: size, level: 0 }] } else { Vec::new() };
        Overlay { pieces }
    }

    /// The same with these ranges (offsets and lengths within the disk, ascending and disjoint) in the
    /// file `level`.
    pub(crate) fn with(&self, ranges: &[(u64, u64)], level: usize) -> Result<Overlay> {
        let mut made = Overlay { pieces: Vec::new() };
        let mut below = self.pieces.iter().copied().peekable();
        // Takes pieces of the old overlay up to an offset.
        let mut keep = |made: &mut Overlay, until: u64| {
            while let Some(piece) = below.peek() {
                made.push(piece.end.min(until), piece.level);
                if piece.end > until {
                    break;
                }
                below.next();
            }
        };
        for &(at, len) in ranges {
            keep(&mut made, at);
            made.push(at + len, level);
            if made.pieces.len() > PIECES_MAX {
                let text = format!(
                    "the point is scattered over more than {PIECES_MAX} pieces: use blockhaul chain merge"
                );
                return Err(Error::new(Kind::Unsupported, text));
            }
        }
        keep(&mut made, u64::MAX);
        Ok(made)
    }

    /// Adds a piece that ends at `end`, if that is beyond the last one.
    fn push(&mut self, end: u64, level: usize) {
        match self.pieces.last_mut() {
            Some(last) if last.end >= end => {}
            Some(last) if last.level == level => last.end = end,
            None if end == 0 => {}
            _ => self.pieces.push(OverlayPiece { end, level }),
        }
    }

    /// The pieces of a range: level, start and end.
    pub(crate) fn within(&self, at: u64, end: u64) -> impl Iterator<Item = (usize, u64, u64)> {
        let first = self.pieces.partition_point(|piece| piece.end <= at);
        let mut start = at;
        self.pieces[first..].iter().map_while(move |piece| {
            let from = start;
            start = piece.end;
            (from < end).then(|| (piece.level, from, piece.end.min(end)))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use blockhaul_testkit::rng::{self, Rng};

    #[test]
    fn every_byte_is_in_the_newest_file_that_has_it() {
        let seed = rng::seed();
        eprintln!("BLOCKHAUL_SEED={seed:#x}");
        let mut rng = Rng::new(seed);
        for _ in 0..300 {
            let size = rng.below(200);
            let mut model = vec![0; size as usize];
            let mut overlay = Overlay::full(size);
            for level in 1..rng.below(6) as usize {
                let mut ranges = Vec::new();
                let mut at = rng.below(20);
                while at < size {
                    let len = (1 + rng.below(30)).min(size - at);
                    ranges.push((at, len));
                    model[at as usize..(at + len) as usize].fill(level);
                    at += len + rng.below(20);
                }
                overlay = overlay.with(&ranges, level).unwrap();
            }
            let at = rng.below(size + 1);
            let end = rng.below(size + 1);
            let (at, end) = (at.min(end), at.max(end));
            let mut next = at;
            for (level, from, to) in overlay.within(at, end) {
                assert!(from == next && from < to, "{overlay:?}");
                assert!(model[from as usize..to as usize].iter().all(|&found| found == level));
                next = to;
            }
            assert_eq!(next, end, "{overlay:?}");
        }
    }
}
