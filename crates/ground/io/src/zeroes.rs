//! Whether bytes are zero.

/// Bytes checked together: compiles to a few vector instructions per step.
const STEP: usize = 128;

/// Whether all bytes are zero. The first step finds nearly all data that is not zero.
#[inline]
pub fn is_zero(bytes: &[u8]) -> bool {
    let mut steps = bytes.chunks_exact(STEP);
    steps.by_ref().all(|step| step.iter().fold(0, |sum, byte| sum | byte) == 0)
        && steps.remainder().iter().all(|&byte| byte == 0)
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
}
