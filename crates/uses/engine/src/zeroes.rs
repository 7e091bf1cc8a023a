//! Detects zeroes in data.

use blockhaul_io::is_zero;

/// Blocks in which zeroes that are written as data are counted.
pub(crate) const BLOCK: usize = 4096;

/// Bytes in whole blocks that are zero.
pub(crate) fn count(bytes: &[u8]) -> u64 {
    let zero = bytes.chunks_exact(BLOCK).filter(|block| is_zero(block)).count();
    (zero * BLOCK) as u64
}

/// Splits bytes that start at offset `at` into runs of zero and other blocks: (start in the slice,
/// length, zero). Blocks are `grain` bytes long and aligned to it in the device; partial blocks at
/// the ends count as blocks. Adjacent runs differ.
pub(crate) fn runs(bytes: &[u8], at: u64, grain: u32) -> Vec<(usize, usize, bool)> {
    let grain = u64::from(grain.max(1));
    let mut runs: Vec<(usize, usize, bool)> = Vec::new();
    let mut start = 0;
    while start < bytes.len() {
        let to_boundary = grain - (at + start as u64) % grain;
        let len = to_boundary.min((bytes.len() - start) as u64) as usize;
        let zero = is_zero(&bytes[start..start + len]);
        match runs.last_mut() {
            Some(last) if last.2 == zero => last.1 += len,
            _ => runs.push((start, len, zero)),
        }
        start += len;
    }
    runs
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_follow_the_grid_of_the_device() {
        let mut bytes = vec![0; 4096 * 4];
        bytes[5000] = 1;
        assert_eq!(
            runs(&bytes, 0, 4096),
            [(0, 4096, true), (4096, 4096, false), (8192, 8192, true)]
        );
        // The same bytes at an odd offset: the grid cuts elsewhere.
        assert_eq!(
            runs(&bytes, 1000, 4096),
            [(0, 3096, true), (3096, 4096, false), (7192, 9192, true)]
        );
        assert_eq!(runs(&[], 0, 4096), []);
    }
}
