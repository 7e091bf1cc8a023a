//! Finding zeroes in data.

/// Bytes looked at together: compiles to a few vector instructions per step.
const STEP: usize = 128;

/// Whether all bytes are zero. Data that is not zero is nearly always found so in the first step.
pub fn is_zero(bytes: &[u8]) -> bool {
    let mut steps = bytes.chunks_exact(STEP);
    steps.by_ref().all(|step| step.iter().fold(0, |sum, byte| sum | byte) == 0)
        && steps.remainder().iter().all(|&byte| byte == 0)
}

/// Blocks in which zeroes that are written as data are counted.
pub(crate) const BLOCK: usize = 4096;

/// Bytes in whole blocks that are zero.
pub(crate) fn count(bytes: &[u8]) -> u64 {
    let zero = bytes.chunks_exact(BLOCK).filter(|block| is_zero(block)).count();
    (zero * BLOCK) as u64
}

/// Splits bytes that start at offset `at` into runs of zero and other blocks: (start in the slice,
/// length, zero). Blocks are of `grain` bytes and aligned to it in the device; partial blocks at the
/// ends count as blocks of their own. Neighbours differ.
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
    fn one_byte_anywhere_is_found() {
        let mut bytes = vec![0; 1000];
        assert!(is_zero(&bytes) && is_zero(&[]));
        for at in 0..bytes.len() {
            bytes[at] = 1;
            assert!(!is_zero(&bytes), "at {at}");
            bytes[at] = 0;
        }
    }

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
