//! Entries of refcount blocks, of 1 to 64 bits ("Host cluster management").

/// The width of refcounts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Width {
    /// Bits of an entry: a power of two, 1 to 64.
    bits: u32,
}

impl Width {
    /// Refcounts of `2^order` bits, with an order of at most 6.
    pub(super) fn of_order(order: u32) -> Width {
        Width { bits: 1 << order.min(6) }
    }

    /// Entries in a 64-bit word of a block.
    pub(super) fn per_word(self) -> u64 {
        u64::from(64 / self.bits)
    }

    /// Largest refcount.
    pub(super) fn most(self) -> u64 {
        u64::MAX >> (64 - self.bits)
    }

    /// Place of an entry in its word, which has the bytes in big-endian order. Entries shorter than
    /// a byte begin at its least significant bit.
    fn shift(self, number: u64) -> u32 {
        let number = u32::try_from(number % self.per_word()).unwrap_or(0);
        if self.bits >= 8 {
            return 64 - self.bits * (number + 1);
        }
        let in_byte = 8 / self.bits;
        56 - 8 * (number / in_byte) + self.bits * (number % in_byte)
    }

    /// Entry `number` of a block, or of a slice that begins with a multiple of [`Width::per_word`];
    /// `None` beyond its end.
    pub(super) fn get(self, words: &[u64], number: u64) -> Option<u64> {
        let word = words.get(usize::try_from(number / self.per_word()).ok()?)?;
        Some(word >> self.shift(number) & self.most())
    }

    /// Changes an entry; false beyond the end, or if the value does not fit.
    pub(super) fn set(self, words: &mut [u64], number: u64, value: u64) -> bool {
        let place = usize::try_from(number / self.per_word()).ok();
        let Some(word) = place.and_then(|place| words.get_mut(place)) else { return false };
        let shift = self.shift(number);
        *word = *word & !(self.most() << shift) | (value & self.most()) << shift;
        value <= self.most()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_of_each_width_are_where_the_format_has_them() {
        for (order, bytes, number, wanted) in [
            (0, [0b10, 0, 0, 0, 0, 0, 0, 0], 1, 1),
            (0, [0, 1, 0, 0, 0, 0, 0, 0], 8, 1),
            (1, [0b1100, 0, 0, 0, 0, 0, 0, 0], 1, 3),
            (2, [0, 0x90, 0, 0, 0, 0, 0, 0], 3, 9),
            (3, [0, 0, 7, 0, 0, 0, 0, 0], 2, 7),
            (4, [0, 0, 1, 2, 0, 0, 0, 0], 1, 0x102),
            (5, [0, 0, 0, 0, 0, 0, 1, 2], 1, 0x102),
            (6, [0, 0, 0, 0, 0, 0, 1, 2], 0, 0x102),
        ] {
            let width = Width::of_order(order);
            assert_eq!(width.get(&[u64::from_be_bytes(bytes)], number), Some(wanted), "{order}");
            let mut words = [0];
            assert!(width.set(&mut words, number, wanted));
            assert_eq!(words, [u64::from_be_bytes(bytes)], "{order}");
        }
    }

    #[test]
    fn entries_do_not_touch_one_another() {
        for order in 0..=6 {
            let width = Width::of_order(order);
            let count = width.per_word() * 2;
            for number in 0..count {
                let mut words = [u64::MAX; 2];
                assert!(width.set(&mut words, number, 0));
                let zeroes = (0..count).filter(|&other| width.get(&words, other) == Some(0));
                assert_eq!(zeroes.collect::<Vec<_>>(), [number], "{order}");
            }
            assert_eq!(width.get(&[0; 2], count), None);
            assert!(!width.set(&mut [0; 2], count, 0));
            let mut words = [0];
            let fits =
                width.most().checked_add(1).is_none_or(|more| !width.set(&mut words, 0, more));
            assert!(fits, "{order}");
        }
    }
}
