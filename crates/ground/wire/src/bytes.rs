//! Reads and writes big-endian integers, and the fixed arrays for headers.

use std::ops::Deref;

/// A header ready to be sent, in an array so that vectored sends need no allocation.
#[derive(Clone, Copy)]
pub struct HeaderBytes {
    bytes: [u8; HeaderBytes::CAPACITY],
    len: u8,
}

impl HeaderBytes {
    /// Maximum header: a chunk of 32 bytes and the 12 fixed bytes of a hole.
    pub const CAPACITY: usize = 48;

    pub(crate) const fn new() -> HeaderBytes {
        HeaderBytes { bytes: [0; HeaderBytes::CAPACITY], len: 0 }
    }

    /// Appends bytes. The parts of a header are known at the call, so they always fit.
    #[expect(clippy::cast_possible_truncation, reason = "the array is shorter than 256 bytes")]
    pub(crate) fn push(mut self, part: &[u8]) -> HeaderBytes {
        let start = usize::from(self.len);
        let end = start + part.len();
        self.bytes[start..end].copy_from_slice(part);
        self.len = end as u8;
        self
    }

    pub(crate) fn u16(self, value: u16) -> HeaderBytes {
        self.push(&value.to_be_bytes())
    }

    pub(crate) fn u32(self, value: u32) -> HeaderBytes {
        self.push(&value.to_be_bytes())
    }

    pub(crate) fn u64(self, value: u64) -> HeaderBytes {
        self.push(&value.to_be_bytes())
    }
}

impl Deref for HeaderBytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes[..usize::from(self.len)]
    }
}

impl AsRef<[u8]> for HeaderBytes {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl std::fmt::Debug for HeaderBytes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(self.iter()).finish()
    }
}

impl PartialEq for HeaderBytes {
    fn eq(&self, other: &HeaderBytes) -> bool {
        **self == **other
    }
}

impl Eq for HeaderBytes {}

/// Takes integers from the front of a slice; `None` if it is too short.
pub(crate) struct ByteReader<'a> {
    bytes: &'a [u8],
}

impl<'a> ByteReader<'a> {
    pub(crate) const fn new(bytes: &'a [u8]) -> ByteReader<'a> {
        ByteReader { bytes }
    }

    pub(crate) const fn rest(&self) -> &'a [u8] {
        self.bytes
    }

    pub(crate) fn take(&mut self, len: usize) -> Option<&'a [u8]> {
        let (head, tail) = self.bytes.split_at_checked(len)?;
        self.bytes = tail;
        Some(head)
    }

    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (head, tail) = self.bytes.split_first_chunk::<N>()?;
        self.bytes = tail;
        Some(*head)
    }

    pub(crate) fn u16(&mut self) -> Option<u16> {
        self.array().map(u16::from_be_bytes)
    }

    pub(crate) fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_be_bytes)
    }

    pub(crate) fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_be_bytes)
    }

    /// A length of 32 bits and that many bytes.
    pub(crate) fn counted(&mut self) -> Option<&'a [u8]> {
        let len = self.u32()?;
        self.take(usize::try_from(len).ok()?)
    }
}
