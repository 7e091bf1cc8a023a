//! A part of an object that is being filled.

/// The parts of a buffer that were written: begin and end of each, ascending, with gaps between them.
#[derive(Debug, Default)]
pub(crate) struct WrittenRanges(Vec<(usize, usize)>);

impl WrittenRanges {
    /// Adds a range.
    pub(crate) fn add(&mut self, begin: usize, end: usize) {
        let first = self.0.partition_point(|range| range.1 < begin);
        let last = self.0.partition_point(|range| range.0 <= end);
        let joined = self.0[first..last].iter();
        let whole =
            joined.fold((begin, end), |all, range| (all.0.min(range.0), all.1.max(range.1)));
        self.0.splice(first..last, [whole]);
    }

    /// Whether all of a range was written.
    pub(crate) fn contains(&self, begin: usize, end: usize) -> bool {
        self.0.iter().any(|range| range.0 <= begin && end <= range.1)
    }

    /// The ranges.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (usize, usize)> {
        self.0.iter().copied()
    }
}

/// Bytes of a part, and which of them were written.
#[derive(Debug, Default)]
pub(crate) struct PartBuffer {
    /// Empty while only zeroes were written.
    bytes: Vec<u8>,
    written: WrittenRanges,
}

impl PartBuffer {
    /// Writes `bytes`, or `len` zeroes, at an offset inside the part, which has `whole` bytes.
    pub(crate) fn put(&mut self, at: usize, len: usize, bytes: Option<&[u8]>, whole: usize) {
        match bytes {
            Some(bytes) => {
                self.bytes.resize(whole, 0);
                self.bytes[at..at + len].copy_from_slice(bytes);
            }
            None if self.bytes.is_empty() => {}
            None => self.bytes[at..at + len].fill(0),
        }
        self.written.add(at, at + len);
    }

    /// Whether all of a part of `whole` bytes was written.
    pub(crate) fn is_complete(&self, whole: usize) -> bool {
        self.written.contains(0, whole)
    }

    /// Whether it needs memory.
    pub(crate) fn has_bytes(&self) -> bool {
        !self.bytes.is_empty()
    }

    /// The bytes; none if all are zeroes.
    pub(crate) fn into_bytes(self) -> Option<Vec<u8>> {
        Some(self.bytes).filter(|bytes| !bytes.is_empty())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that fails")]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_joined_in_any_order() {
        let mut buffer = PartBuffer::default();
        for at in [2, 6, 0, 8, 4] {
            assert!(!buffer.is_complete(10));
            buffer.put(at, 2, Some(&[at as u8; 2]), 10);
        }
        assert!(buffer.is_complete(10));
        buffer.put(3, 2, None, 10);
        assert_eq!(buffer.into_bytes().unwrap(), [0, 0, 2, 0, 0, 4, 6, 6, 8, 8]);
        let mut zeroes = PartBuffer::default();
        zeroes.put(5, 5, None, 10);
        zeroes.put(0, 7, None, 10);
        assert!(zeroes.is_complete(10) && !zeroes.has_bytes() && zeroes.into_bytes().is_none());
    }
}
