//! The memory of one request: a chain of descriptors.

use vm_memory::{Bytes as _, GuestAddress};

use crate::memory::Memory;
use crate::ring::RingLayout;

/// Maximum number of descriptors in a chain: data in as many parts as the configuration allows, the
/// header, the status, and a reference to a table.
pub(crate) const DESCRIPTORS_MAX: usize = crate::blk::SEGMENTS_MAX as usize + 3;

/// Size of a descriptor in bytes.
const DESCRIPTOR: u64 = 16;
/// Another descriptor follows (VIRTQ_DESC_F_NEXT).
const NEXT: u16 = 1;
/// For the device to write (VIRTQ_DESC_F_WRITE).
const WRITE: u16 = 2;
/// A table of descriptors (VIRTQ_DESC_F_INDIRECT).
const INDIRECT: u16 = 4;

/// A range of the guest's memory; where it is has not been checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Segment {
    pub(crate) at: GuestAddress,
    pub(crate) len: u32,
}

/// The memory of a request.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Chain {
    /// For the device to read.
    pub(crate) readable: Vec<Segment>,
    /// For the device to write.
    pub(crate) writable: Vec<Segment>,
}

/// A chain that no driver makes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct MalformedChain;

struct Descriptor {
    segment: Segment,
    flags: u16,
    next: u16,
}

impl Descriptor {
    /// Reads a descriptor, once: the guest may change it at any time.
    fn read(
        memory: &Memory,
        table: GuestAddress,
        index: u16,
    ) -> Result<Descriptor, MalformedChain> {
        let at = table.0.checked_add(DESCRIPTOR * u64::from(index)).ok_or(MalformedChain)?;
        let words: [u64; 2] = memory.read_obj(GuestAddress(at)).map_err(|_| MalformedChain)?;
        let [at, rest] = words.map(u64::from_le);
        let [len, flags, next] = [rest & 0xffff_ffff, rest >> 32 & 0xffff, rest >> 48];
        let short = |value: u64| u16::try_from(value).map_err(|_| MalformedChain);
        Ok(Descriptor {
            segment: Segment {
                at: GuestAddress(at),
                len: u32::try_from(len).map_err(|_| MalformedChain)?,
            },
            flags: short(flags)?,
            next: short(next)?,
        })
    }
}

impl Chain {
    /// Follows the chain from `head` on.
    pub(crate) fn read(
        memory: &Memory,
        ring: &RingLayout,
        head: u16,
    ) -> Result<Chain, MalformedChain> {
        let mut chain = Chain::default();
        let mut table = ring.descriptors;
        let mut size = u64::from(ring.size);
        let mut index = head;
        let mut is_indirect = false;
        for _ in 0..DESCRIPTORS_MAX {
            if u64::from(index) >= size {
                return Err(MalformedChain);
            }
            let Descriptor { segment, flags, next } = Descriptor::read(memory, table, index)?;
            if flags & INDIRECT != 0 {
                let len = u64::from(segment.len);
                if is_indirect || flags & NEXT != 0 || len % DESCRIPTOR != 0 {
                    return Err(MalformedChain);
                }
                (table, size, index, is_indirect) = (segment.at, len / DESCRIPTOR, 0, true);
                continue;
            }
            chain.add(segment, flags & WRITE != 0)?;
            if flags & NEXT == 0 {
                return Ok(chain);
            }
            index = next;
        }
        // Too long, or a circle.
        Err(MalformedChain)
    }

    fn add(&mut self, segment: Segment, is_writable: bool) -> Result<(), MalformedChain> {
        if is_writable {
            self.writable.push(segment);
        } else if self.writable.is_empty() {
            self.readable.push(segment);
        } else {
            return Err(MalformedChain);
        }
        Ok(())
    }
}

/// Number of bytes in all segments.
pub(crate) fn total(segments: &[Segment]) -> u64 {
    segments.iter().map(|segment| u64::from(segment.len)).sum()
}

/// The segments without their first `len` bytes.
pub(crate) fn after(segments: &mut Vec<Segment>, mut len: usize) {
    segments.retain_mut(|segment| {
        let skipped = u32::try_from(len).unwrap_or(u32::MAX).min(segment.len);
        len -= skipped as usize;
        segment.len -= skipped;
        // A segment beyond the end of all addresses is found when it is used.
        segment.at = GuestAddress(segment.at.0.saturating_add(u64::from(skipped)));
        segment.len > 0
    });
}

/// Takes the last byte away.
pub(crate) fn last_byte(segments: &mut Vec<Segment>) -> Option<GuestAddress> {
    segments.retain(|segment| segment.len > 0);
    let last = segments.last_mut()?;
    last.len -= 1;
    let at = last.at.0.checked_add(u64::from(last.len))?;
    segments.retain(|segment| segment.len > 0);
    Some(GuestAddress(at))
}

/// Copies from the segments to `bytes`, which is not longer than they are.
pub(crate) fn gather(
    memory: &Memory,
    segments: &[Segment],
    mut bytes: &mut [u8],
) -> Result<(), MalformedChain> {
    for segment in segments {
        let len = bytes.len().min(segment.len as usize);
        let (part, rest) = bytes.split_at_mut(len);
        memory.read_slice(part, segment.at).map_err(|_| MalformedChain)?;
        bytes = rest;
    }
    if bytes.is_empty() { Ok(()) } else { Err(MalformedChain) }
}

/// Copies `bytes` to the segments, which are not shorter.
pub(crate) fn scatter(
    memory: &Memory,
    segments: &[Segment],
    mut bytes: &[u8],
) -> Result<(), MalformedChain> {
    for segment in segments {
        let len = bytes.len().min(segment.len as usize);
        let (part, rest) = bytes.split_at(len);
        memory.write_slice(part, segment.at).map_err(|_| MalformedChain)?;
        bytes = rest;
    }
    if bytes.is_empty() { Ok(()) } else { Err(MalformedChain) }
}
