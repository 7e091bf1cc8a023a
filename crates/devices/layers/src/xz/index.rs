//! The indexes of an xz file ("The .xz File Format", version 1.2.1), read from its end.

use std::sync::Arc;

use blockhaul_block::{Device, DeviceExt, Error, Kind, Result};
use crc32fast::hash as crc32;

/// Length in bytes of a stream's header, and of its footer.
const ENDS: u64 = 12;
/// Maximum index of one stream: millions of blocks, a tenth of a gigabyte in memory.
const INDEX_MAX: u64 = 32 << 20;
/// Maximum number of streams: each costs two reads.
const STREAMS_MAX: usize = 64 << 10;
/// Maximum padding between streams in bytes.
const PADDING_MAX: u64 = 1 << 20;

/// A part of the file that can be decoded independently.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct XzBlock {
    /// Its offset in the file, and its length there without padding.
    pub(super) at: u64,
    pub(super) packed: u64,
    /// Offset and length of its contents.
    pub(super) start: u64,
    pub(super) len: u64,
    /// The second byte of its stream's flags: the checksum type.
    pub(super) check: u8,
}

impl XzBlock {
    /// The index and footer of a stream with only this block.
    pub(super) fn end_of_stream(self) -> Vec<u8> {
        let mut index = vec![0, 1];
        put_number(&mut index, self.packed);
        put_number(&mut index, self.len);
        index.resize(index.len().next_multiple_of(4), 0);
        index.extend(crc32(&index).to_le_bytes());
        let mut size = (index.len() as u32 / 4 - 1).to_le_bytes().to_vec();
        size.extend([0, self.check]);
        index.extend(crc32(&size).to_le_bytes());
        index.extend(size);
        index.extend(b"YZ");
        index
    }
}

/// All blocks of a file, in order.
#[derive(Debug, Default)]
pub(super) struct XzIndex {
    pub(super) blocks: Vec<XzBlock>,
    pub(super) size: u64,
    /// Contents of the longest block, in bytes.
    pub(super) longest: u64,
}

impl XzIndex {
    pub(super) async fn read(file: &Arc<dyn Device>) -> Result<XzIndex> {
        let facts = file.facts();
        let wrong = |why: &str| Error::new(Kind::Invalid, format!("xz: {}: {why}", facts.name));
        if facts.size == 0 {
            return Err(wrong("not an xz file: it is empty"));
        }
        let mut streams = Vec::new();
        let mut end = facts.size;
        while end > 0 {
            end = without_padding(file, end).await?;
            if end < 2 * ENDS || !end.is_multiple_of(4) || streams.len() == STREAMS_MAX {
                return Err(wrong("not an xz file"));
            }
            let footer = file.read(end - ENDS, ENDS as usize).await?;
            let footer = footer.bytes();
            if &footer[10..] != b"YZ" || crc32(&footer[4..10]) != le32(footer, 0) {
                return Err(wrong("not an xz file, or its end is missing"));
            }
            let len = (u64::from(le32(footer, 4)) + 1) * 4;
            let Some(at) = end.checked_sub(ENDS + len).filter(|_| len <= INDEX_MAX) else {
                return Err(wrong("the index is too long"));
            };
            let index = file.read(at, len as usize).await?;
            let check = footer[9];
            let Some(blocks) = parse(index.bytes(), check).filter(|_| footer[8] == 0 && check < 16)
            else {
                return Err(wrong("the index is damaged"));
            };
            // Packed lengths are padded to a multiple of four.
            let packed = blocks.iter().try_fold(0_u64, |total, block| {
                total.checked_add(block.packed.checked_next_multiple_of(4)?)
            });
            let Some(start) = packed.and_then(|packed| at.checked_sub(packed.checked_add(ENDS)?))
            else {
                return Err(wrong("the index describes more than the file contains"));
            };
            let header = file.read(start, ENDS as usize).await?;
            if header.bytes()[..8] != [0xfd, b'7', b'z', b'X', b'Z', 0, footer[8], footer[9]] {
                return Err(wrong("header and footer of a stream differ"));
            }
            streams.push((start + ENDS, blocks));
            end = start;
        }
        let mut all = XzIndex::default();
        for (at, blocks) in streams.into_iter().rev() {
            let mut at = at;
            for block in blocks {
                if block.len > 0 {
                    all.blocks.push(XzBlock { at, start: all.size, ..block });
                    all.longest = all.longest.max(block.len);
                }
                at += block.packed.next_multiple_of(4);
                let size = all.size.checked_add(block.len).filter(|&size| size <= i64::MAX as u64);
                all.size = size.ok_or_else(|| wrong("the content is too large"))?;
            }
        }
        all.blocks.shrink_to_fit();
        Ok(all)
    }

    /// The number of the block that contains a byte of the contents.
    pub(super) fn find(&self, at: u64) -> usize {
        self.blocks.partition_point(|block| block.start + block.len <= at)
    }
}

/// The end of the last stream: zeroes may follow it.
async fn without_padding(file: &Arc<dyn Device>, end: u64) -> Result<u64> {
    let mut end = end;
    let least = end.saturating_sub(PADDING_MAX);
    while end > least.max(4) {
        let len = (end - least).min(4096);
        let found = file.read(end - len, len as usize).await?;
        let kept = found.bytes().iter().rposition(|&byte| byte != 0);
        match kept {
            Some(last) => return Ok((end - len + last as u64 + 1).next_multiple_of(4).min(end)),
            None => end -= len,
        }
    }
    Ok(end)
}

/// The blocks of an index, without their offsets.
fn parse(bytes: &[u8], check: u8) -> Option<Vec<XzBlock>> {
    let (content, sum) = bytes.split_at_checked(bytes.len().checked_sub(4)?)?;
    if crc32(content) != le32(sum, 0) {
        return None;
    }
    let (&first, mut rest) = content.split_first()?;
    let count = number(&mut rest)?;
    // Each takes at least two bytes.
    if first != 0 || count > content.len() as u64 / 2 {
        return None;
    }
    let mut blocks = Vec::with_capacity(usize::try_from(count).ok()?);
    for _ in 0..count {
        let packed = number(&mut rest)?;
        let len = number(&mut rest)?;
        if packed == 0 || packed > i64::MAX as u64 {
            return None;
        }
        blocks.push(XzBlock { at: 0, packed, start: 0, len, check });
    }
    (rest.len() < 4 && rest.iter().all(|&byte| byte == 0)).then_some(blocks)
}

/// A number of seven bits per byte, the lowest first.
fn number(bytes: &mut &[u8]) -> Option<u64> {
    let mut value = 0_u64;
    for shift in (0..63).step_by(7) {
        let (&byte, rest) = bytes.split_first()?;
        *bytes = rest;
        value |= u64::from(byte & 0x7f) << shift;
        if byte & 0x80 == 0 {
            return (byte != 0 || shift == 0).then_some(value);
        }
    }
    None
}

fn put_number(out: &mut Vec<u8>, value: u64) {
    let mut left = value;
    while left >= 0x80 {
        out.push(left as u8 | 0x80);
        left >>= 7;
    }
    out.push(left as u8);
}

fn le32(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_and_sums_are_those_of_the_format() {
        assert_eq!(crc32(b"123456789"), 0xcbf4_3926);
        let parse = |bytes: &[u8]| number(&mut &bytes[..]);
        assert_eq!(parse(&[5]), Some(5));
        assert_eq!(parse(&[0x80, 1]), Some(128));
        assert_eq!(
            parse(&[0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x7f]),
            Some(i64::MAX as u64)
        );
        for wrong in [&[][..], &[0x80], &[0x80, 0], &[0xff; 10]] {
            assert_eq!(parse(wrong), None, "{wrong:?}");
        }
        for value in [0, 127, 128, 300, i64::MAX as u64] {
            let mut out = Vec::new();
            put_number(&mut out, value);
            assert_eq!(parse(&out), Some(value));
        }
    }

    #[test]
    fn an_index_that_is_damaged_is_none() {
        let mut index = vec![0, 1, 40, 100];
        let sum = crc32(&index);
        index.extend(sum.to_le_bytes());
        let blocks = parse(&index, 4).unwrap();
        assert_eq!((blocks[0].packed, blocks[0].len, blocks[0].check), (40, 100, 4));
        for at in 0..index.len() {
            let mut bad = index.clone();
            bad[at] ^= 4;
            assert_eq!(parse(&bad, 4), None, "byte {at}");
        }
        assert_eq!(parse(&[], 4), None);
    }
}
