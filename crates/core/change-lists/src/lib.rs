//! Lists of changed ranges of disks, as the programs print them that know what has changed.
//!
//! [`ChangeList::read`] recognizes the kind of a list by its contents, and reads it as a stream: the memory depends on
//! the number of separate ranges alone, of which there may be [`RANGES_MAX`]. [`ChangeList::fit`] checks that the list
//! is one of a disk of a size, and whether it is complete. Each [kind](ListKind) knows what "complete" means.

#![cfg_attr(not(test), warn(clippy::disallowed_methods))]
#![cfg_attr(not(test), warn(clippy::missing_errors_doc))]

mod error;
mod json;
mod kind;
mod lines;
mod piece_reader;
mod range_set;
mod thin_xml;
mod xapi_bitmap;

use std::io::{BufReader, Read};

use blockhaul_block::gaps;

pub use self::error::{ChangeListError, ChangeListErrorKind};
pub use self::kind::ListKind;
use self::piece_reader::{PieceReader, first_bytes};
pub use self::range_set::RANGES_MAX;
use self::range_set::RangeSet;

/// Maximum length of a list in bytes. It bounds the time that an endless output takes.
const LENGTH_MAX: u64 = 64 << 30;

/// A list of changed ranges.
#[derive(Debug)]
pub struct ChangeList {
    kind: ListKind,
    ranges: RangeSet,
    /// The part of a disk for which the list is complete; `None`: the list does not say it.
    covered: Option<RangeSet>,
    /// Bytes of a block, if ranges are in blocks, of which the last may reach beyond the end of the disk.
    block: u64,
    /// The list says that more follows.
    is_unfinished: bool,
}

/// The ranges of a list that fits a disk.
#[derive(Debug)]
pub struct FittedChanges {
    /// Offsets and lengths: ascending, apart from each other and not empty.
    pub ranges: Vec<(u64, u64)>,
    /// Why the list is not one of the whole disk.
    pub incomplete: Option<IncompleteList>,
}

/// A list of a part of a disk.
#[derive(Debug)]
pub struct IncompleteList {
    /// The reason, and what to do.
    pub error: ChangeListError,
    /// The missing part, for a warning.
    pub missing: String,
}

impl ChangeList {
    /// Reads a list up to its end.
    ///
    /// # Errors
    /// [`ChangeListErrorKind::Unreadable`] if it cannot be read, [`ChangeListErrorKind::Malformed`] if it is not a
    /// whole list of a known kind, [`ChangeListErrorKind::TooLong`].
    pub fn read(from: impl Read) -> Result<ChangeList, ChangeListError> {
        let mut from = from.take(LENGTH_MAX + 1);
        let (first, line) = first_bytes(&mut from)?;
        let start = first.trim_ascii_start().first().copied();
        let all = std::io::Cursor::new(&first[..]).chain(&mut from);
        let list = match start {
            None => return Err(ChangeListError::empty()),
            Some(b'<') => thin_xml::parse(bounded(all, b'>'), line),
            Some(b'{' | b'[') => json::parse(bounded(all, b'"'), line),
            Some(_) if lines::begins_with_line(&first) => lines::parse(bounded(all, b'\n'), line),
            Some(_) => xapi_bitmap::parse(BufReader::new(all)),
        };
        if from.limit() == 0 {
            return Err(ChangeListError::too_long(format!("longer than {LENGTH_MAX} bytes")));
        }
        list
    }

    /// The kind of this list.
    pub fn kind(&self) -> ListKind {
        self.kind
    }

    /// The ranges for a disk of `size` bytes.
    ///
    /// # Errors
    /// [`ChangeListErrorKind::OtherDisk`] if this is not a list of such a disk.
    pub fn fit(self, size: u64) -> Result<FittedChanges, ChangeListError> {
        let ChangeList { kind, ranges, covered, block, is_unfinished } = self;
        let mut ranges = ranges.into_joined()?;
        if let Some((_, end)) = ranges.last_mut()
            && (1..block).contains(&end.saturating_sub(size))
        {
            *end = size;
        }
        let mut incomplete = None;
        if let Some(covered) = covered {
            let covered = covered.into_joined()?;
            let end = covered.last().map_or(0, |range| range.1);
            match kind {
                ListKind::XapiBitmap if xapi_bitmap::fits(end, size) => {
                    xapi_bitmap::clip(&mut ranges, size)?;
                }
                _ if end > size => return Err(kind.beyond(end, size)),
                _ => {}
            }
            let missing = gaps(&covered, size);
            incomplete = missing.first().map(|&(start, end)| {
                let total: u64 = missing.iter().map(|(start, end)| end - start).sum();
                let more = if missing.len() > 1 { "and others are" } else { "are" };
                let bytes = format!("bytes {start} to {} {more} missing", end - 1);
                let error = match start {
                    0 if covered.is_empty() => kind.silent(),
                    at => kind.incomplete(size, &bytes, at),
                };
                let missing = format!(
                    "{bytes} in the list: {total} of the source's {size} bytes are not copied"
                );
                IncompleteList { error, missing }
            });
        }
        let end = ranges.last().map_or(0, |range| range.1);
        if end > size {
            let text = format!(
                "the source has {size} bytes, but the range ends at {end}: use the list of this disk"
            );
            return Err(ChangeListError::other_disk(text));
        }
        if is_unfinished {
            let error = kind.unfinished();
            let missing =
                "pages are missing at the end of the list: what they list is not copied".into();
            incomplete = Some(IncompleteList { error, missing });
        }
        for (start, end) in &mut ranges {
            *end -= *start;
        }
        Ok(FittedChanges { ranges, incomplete })
    }
}

/// A list whose pieces end with a separator, for a parser that keeps one piece in memory.
fn bounded<R: Read>(from: R, separator: u8) -> BufReader<PieceReader<R>> {
    BufReader::new(PieceReader::new(from, separator))
}

#[cfg(test)]
mod tests;
