//! The bitmap that XAPI's VDI.list_changed_blocks returns (XCP-ng, XenServer): base64, a bit for each block
//! of 64 KiB, the highest bit of the first byte for the first block, and zeroes up to a whole byte (sm's
//! drivers/VDI.py, blktap's cbt-util.h).

use blockhaul_backends::support::decode_base64;

use super::coverage::{Contents, ListCoverage, ListKind};

/// Bytes of a block.
const BLOCK: u64 = 64 << 10;

/// Ranges of blocks, also those of a byte that are beyond the end of the disk.
pub(super) fn parse(text: &str) -> Result<Contents, String> {
    if text.trim().lines().any(|line| line.trim_end().contains(char::is_whitespace)) {
        return Err("white space in a line".to_string());
    }
    // What programs print that have no list.
    if ["null", "true"].contains(&text.trim()) {
        return Err("it has no ranges".to_string());
    }
    let bytes = decode_base64(text).map_err(|error| error.text())?;
    let mut found: Vec<(u64, u64)> = Vec::new();
    let mut at = 0;
    for byte in bytes {
        for bit in (0..8).rev() {
            let end = at + BLOCK;
            match found.last_mut() {
                _ if byte >> bit & 1 == 0 => {}
                Some(last) if last.1 == at => last.1 = end,
                _ => found.push((at, end)),
            }
            at = end;
        }
    }
    Ok((found, Some(ListCoverage { kind: ListKind::XapiBitmap, ranges: vec![(0, at)] })))
}

/// Whether a bitmap whose bits reach to `end` is as long as that of a disk.
pub(super) fn fits(end: u64, size: u64) -> bool {
    end / (8 * BLOCK) == size.div_ceil(BLOCK).div_ceil(8)
}

/// Ends the ranges at the end of the disk, in its last block.
///
/// # Errors
/// If a bit is set that is of no block.
pub(super) fn clip(ranges: &mut [(u64, u64)], size: u64) -> Result<(), String> {
    let Some(last) = ranges.last_mut() else { return Ok(()) };
    if last.1.div_ceil(BLOCK) > size.div_ceil(BLOCK) {
        return Err(format!(
            "the bitmap says that block {} has changed, and the source of {size} bytes has {} blocks: use \
             the bitmap of this disk",
            last.1 / BLOCK - 1,
            size.div_ceil(BLOCK)
        ));
    }
    last.1 = last.1.min(size);
    Ok(())
}
