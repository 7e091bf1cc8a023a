//! A map of a disk that fills while it is copied: the disk in at most [`CELLS_MAX`] parts of equal
//! length, and how many bytes of each are done.

use std::sync::atomic::{AtomicU64, Ordering};

/// Maximum number of cells: more cannot be told apart on a screen, and each takes 32 bytes.
pub const CELLS_MAX: u64 = 512;

/// Shortest cell, in bytes.
const CELL_MIN: u64 = 4096;

/// What was done with bytes of the source.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ByteOutcome {
    Data,
    Zero,
    Resumed,
    Verified,
}

/// A map of the disk at one moment.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct MapSnapshot {
    /// Size of the disk in bytes; more than 0.
    pub size: u64,
    /// Length of each cell in bytes; the last one may be shorter. More than 0.
    pub cell_bytes: u64,
    /// The cells, by offset.
    pub cells: Vec<MapCell>,
}

/// Bytes of a cell that are done. Where one request has data and zeroes, its bytes count as if the
/// data came first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct MapCell {
    /// Written as data.
    pub data: u64,
    /// Zeroed on the target, or zero there already.
    pub zero: u64,
    /// Copied by an earlier run.
    pub resumed: u64,
    /// Read again, and compared.
    pub verified: u64,
}

impl MapSnapshot {
    /// Length in bytes of the cell with this index; 0 if there is none.
    pub fn len_of(&self, index: usize) -> u64 {
        let start = (index as u64).saturating_mul(self.cell_bytes);
        self.size.saturating_sub(start).min(self.cell_bytes)
    }
}

/// The counters behind [`MapSnapshot`].
#[derive(Debug)]
pub(crate) struct DiskMap {
    size: u64,
    cell_bytes: u64,
    /// By cell, then by [`ByteOutcome`].
    cells: Box<[[AtomicU64; 4]]>,
}

impl DiskMap {
    /// The map of a disk of `size` bytes; none for an empty one.
    pub(crate) fn new(size: u64) -> Option<DiskMap> {
        if size == 0 {
            return None;
        }
        let cell_bytes = size.div_ceil(size.div_ceil(CELL_MIN).min(CELLS_MAX));
        let count = usize::try_from(size.div_ceil(cell_bytes)).ok()?;
        let cells = std::iter::repeat_with(Default::default).take(count).collect();
        Some(DiskMap { size, cell_bytes, cells })
    }

    /// Counts `len` bytes at offset `at`; what is beyond the end of the disk is not counted.
    pub(crate) fn add(&self, fate: ByteOutcome, at: u64, len: u64) {
        let end = at.saturating_add(len).min(self.size);
        let mut at = at;
        while at < end {
            let index = at / self.cell_bytes;
            let stop = (index + 1).saturating_mul(self.cell_bytes).min(end);
            if let Some(cell) = usize::try_from(index).ok().and_then(|index| self.cells.get(index))
            {
                cell[fate as usize].fetch_add(stop - at, Ordering::Relaxed);
            }
            at = stop;
        }
    }

    pub(crate) fn read(&self) -> MapSnapshot {
        let read = |cell: &[AtomicU64; 4]| {
            let [data, zero, resumed, verified] =
                cell.each_ref().map(|count| count.load(Ordering::Relaxed));
            MapCell { data, zero, resumed, verified }
        };
        MapSnapshot {
            size: self.size,
            cell_bytes: self.cell_bytes,
            cells: self.cells.iter().map(read).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sums(map: &MapSnapshot) -> [u64; 4] {
        map.cells.iter().fold([0; 4], |sum, cell| {
            let cell = [cell.data, cell.zero, cell.resumed, cell.verified];
            std::array::from_fn(|index| sum[index] + cell[index])
        })
    }

    #[test]
    fn cells_cover_the_disk_without_a_gap() {
        assert!(DiskMap::new(0).is_none(), "an empty disk has no map");
        for size in [1, 4095, 4096, 4097, 512 * 4096, 512 * 4096 + 1, 3 << 30, u64::MAX] {
            let map = DiskMap::new(size).unwrap();
            let seen = map.read();
            assert!((1..=CELLS_MAX).contains(&(seen.cells.len() as u64)), "{size}");
            let lengths = (0..seen.cells.len()).map(|index| u128::from(seen.len_of(index)));
            assert_eq!(lengths.sum::<u128>(), u128::from(size));
            assert!(seen.len_of(seen.cells.len() - 1) > 0 && seen.len_of(seen.cells.len()) == 0);
            map.add(ByteOutcome::Data, 0, size);
            let seen = map.read();
            let full = |(index, cell): (usize, &MapCell)| cell.data == seen.len_of(index);
            assert!(seen.cells.iter().enumerate().all(full), "{size}");
        }
    }

    #[test]
    fn bytes_count_in_the_cells_they_are_in() {
        let map = DiskMap::new(3 * 4096 + 10).unwrap();
        let length = map.read().cell_bytes;
        map.add(ByteOutcome::Zero, length - 96, 200);
        map.add(ByteOutcome::Verified, 0, u64::MAX);
        map.add(ByteOutcome::Resumed, u64::MAX, 5);
        map.add(ByteOutcome::Resumed, 3 * 4096 + 10, 5);
        let seen = map.read();
        let zeroes: Vec<_> = seen.cells.iter().map(|cell| cell.zero).collect();
        assert_eq!(zeroes, [96, 104, 0, 0]);
        assert_eq!(sums(&seen), [0, 200, 0, 3 * 4096 + 10]);
    }
}
