//! The bitmap that XAPI's VDI.list_changed_blocks returns (XCP-ng, XenServer): base64, a bit for each block
//! of 64 KiB, the highest bit of the first byte for the first block, and zeroes up to a whole byte (sm's
//! drivers/VDI.py, blktap's cbt-util.h).

use std::io::{BufRead, Read as _};

use base64::DecodeError;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;

use crate::ChangeList;
use crate::error::ChangeListError;
use crate::kind::ListKind;
use crate::range_set::RangeSet;

/// Bytes of a block.
const BLOCK: u64 = 64 << 10;
/// Maximum length of a bitmap in base64: of a disk of 24 TiB.
const LENGTH_MAX: u64 = 64 << 20;

/// Ranges of blocks, also those of a byte that are beyond the end of the disk.
pub(crate) fn parse(from: impl BufRead) -> Result<ChangeList, ChangeListError> {
    let mut text = Vec::new();
    let mut from = from.take(LENGTH_MAX + 1);
    let read = from.read_to_end(&mut text);
    read.map_err(|error| ChangeListError::unreadable(&error))?;
    if text.len() as u64 > LENGTH_MAX {
        return Err(ChangeListError::too_long(format!("a bitmap of more than {LENGTH_MAX} bytes")));
    }
    let bytes = decode(&mut text).map_err(|why| {
        ChangeListError::malformed(format!(
            "neither JSON nor XML of thin_delta, nor a bitmap in base64: {why}"
        ))
    })?;
    let mut ranges = RangeSet::default();
    let mut at = 0;
    for byte in bytes {
        for bit in (0..8).rev() {
            if byte >> bit & 1 != 0 {
                ranges.add(at, at + BLOCK)?;
            }
            at += BLOCK;
        }
    }
    let mut covered = RangeSet::default();
    covered.add(0, at)?;
    let kind = ListKind::XapiBitmap;
    Ok(ChangeList { kind, ranges, covered: Some(covered), block: 1, is_unfinished: false })
}

/// The bytes of a text in lines.
fn decode(text: &mut Vec<u8>) -> Result<Vec<u8>, String> {
    let is_cut = |line: &[u8]| line.trim_ascii_end().iter().any(u8::is_ascii_whitespace);
    if text.trim_ascii().split(|&byte| byte == b'\n').any(is_cut) {
        return Err("white space in a line".to_string());
    }
    // What programs print that have no list.
    if [&b"null"[..], b"true"].contains(&text.trim_ascii()) {
        return Err("it has no ranges".to_string());
    }
    text.retain(|byte| !byte.is_ascii_whitespace());
    STANDARD.decode(&text[..]).map_err(|error| match error {
        DecodeError::InvalidByte(_, byte) if byte != b'=' => {
            format!("base64: {:?} is not a base64 symbol", char::from(byte))
        }
        _ if !text.len().is_multiple_of(4) => {
            "the base64 text is cut off (its length is not a multiple of 4)".to_string()
        }
        _ => "base64: continues after its end (=), or has a wrong end".to_string(),
    })
}

/// Whether a bitmap whose bits reach to `end` is as long as that of a disk.
pub(crate) fn fits(end: u64, size: u64) -> bool {
    end / (8 * BLOCK) == size.div_ceil(BLOCK).div_ceil(8)
}

/// Ends the ranges at the end of the disk, in its last block.
///
/// # Errors
/// If a bit is set that is of no block.
pub(crate) fn clip(ranges: &mut [(u64, u64)], size: u64) -> Result<(), ChangeListError> {
    let Some(last) = ranges.last_mut() else { return Ok(()) };
    if last.1.div_ceil(BLOCK) > size.div_ceil(BLOCK) {
        return Err(ChangeListError::other_disk(format!(
            "the bitmap says that block {} has changed, and the source of {size} bytes has {} blocks: use \
             the bitmap of this disk",
            last.1 / BLOCK - 1,
            size.div_ceil(BLOCK)
        )));
    }
    last.1 = last.1.min(size);
    Ok(())
}
