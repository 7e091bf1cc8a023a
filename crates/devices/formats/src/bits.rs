//! Bitmaps of sectors.

/// Which bit of a byte is the first one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum BitOrder {
    /// The most significant one.
    High,
    /// The least significant one.
    Low,
}

/// The bit at a position in `bytes`, and the number of bits from there on that are equal, at least
/// 1. Bits that are not in `bytes` are not set.
pub(crate) fn run(bytes: &[u8], first: usize, order: BitOrder) -> (bool, usize) {
    let bit = |place: usize| {
        let shift = match order {
            BitOrder::High => 7 - place % 8,
            BitOrder::Low => place % 8,
        };
        bytes.get(place / 8).map(|byte| byte >> shift & 1 == 1)
    };
    let is_set = bit(first) == Some(true);
    let same = if is_set { 0xff } else { 0 };
    let mut next = first + 1;
    loop {
        // Whole bytes at a time.
        if next.is_multiple_of(8) && bytes.get(next / 8) == Some(&same) {
            next += 8;
        } else if bit(next) == Some(is_set) {
            next += 1;
        } else {
            return (is_set, next - first);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_have_equal_bits() {
        let bytes = [0b1110_0001, 0xff, 0xff, 0b1000_0000];
        let high = |first| run(&bytes, first, BitOrder::High);
        assert_eq!(
            (high(0), high(2), high(3), high(7)),
            ((true, 3), (true, 1), (false, 4), (true, 18))
        );
        assert_eq!(high(25), (false, 7));
        let low = |first| run(&bytes, first, BitOrder::Low);
        assert_eq!(
            (low(0), low(1), low(5), low(24)),
            ((true, 1), (false, 4), (true, 19), (false, 7))
        );
        assert_eq!(run(&[], 0, BitOrder::Low), (false, 1));
    }
}
