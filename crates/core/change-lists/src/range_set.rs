//! Ranges that are added one by one, and joined as they become many.

use blockhaul_block::join_ranges;

use crate::error::ChangeListError;

/// Maximum number of separate ranges in a list: 256 MiB of memory, and at most twice as much while it is read.
pub const RANGES_MAX: usize = 16 << 20;
/// Ranges up to which nothing is joined.
const JOIN_FIRST: usize = 1 << 20;

/// Start and end of ranges.
#[derive(Debug, Default)]
pub(crate) struct RangeSet {
    ranges: Vec<(u64, u64)>,
    /// The number of ranges at which they are joined next.
    join_at: usize,
}

impl RangeSet {
    /// Adds the range from `start` to `end`.
    ///
    /// # Errors
    /// If there are too many that do not touch.
    pub(crate) fn add(&mut self, start: u64, end: u64) -> Result<(), ChangeListError> {
        match self.ranges.last_mut() {
            _ if start >= end => return Ok(()),
            Some(last) if (last.0..=last.1).contains(&start) => {
                last.1 = last.1.max(end);
                return Ok(());
            }
            _ => self.ranges.push((start, end)),
        }
        if self.ranges.len() > self.join_at.max(JOIN_FIRST) {
            self.ranges = joined(std::mem::take(&mut self.ranges))?;
            self.join_at = (2 * self.ranges.len()).max(JOIN_FIRST);
        }
        Ok(())
    }

    /// Adds the range of `len` bytes at `at`.
    ///
    /// # Errors
    /// If it ends beyond 2^63 - 1, or as [`RangeSet::add`].
    pub(crate) fn add_length(&mut self, at: u64, len: u64) -> Result<(), ChangeListError> {
        match at.checked_add(len).filter(|&end| i64::try_from(end).is_ok()) {
            None => {
                let text = format!("{len} bytes at offset {at} end beyond 2^63 - 1");
                Err(ChangeListError::malformed(text))
            }
            Some(end) => self.add(at, end),
        }
    }

    /// The ranges in order, those that touch as one.
    ///
    /// # Errors
    /// If there are too many.
    pub(crate) fn into_joined(self) -> Result<Vec<(u64, u64)>, ChangeListError> {
        joined(self.ranges)
    }

    /// The end of the range that was added first, if there is one.
    pub(crate) fn first_end(&self) -> Option<u64> {
        self.ranges.first().map(|range| range.1)
    }

    /// Turns ranges of blocks into ranges of bytes.
    ///
    /// # Errors
    /// If one ends beyond 2^63 - 1.
    pub(crate) fn scale(&mut self, block: u64) -> Result<(), ChangeListError> {
        for range in &mut self.ranges {
            let end = range.1.checked_mul(block).filter(|&end| i64::try_from(end).is_ok());
            let Some(end) = end else {
                let text = format!("block {} of {block} bytes ends beyond 2^63 - 1", range.1 - 1);
                return Err(ChangeListError::malformed(text));
            };
            *range = (range.0 * block, end);
        }
        Ok(())
    }
}

fn joined(ranges: Vec<(u64, u64)>) -> Result<Vec<(u64, u64)>, ChangeListError> {
    let ranges = join_ranges(ranges);
    if ranges.len() > RANGES_MAX {
        return Err(ChangeListError::too_long(format!(
            "more than {RANGES_MAX} separate ranges: copy the whole disk, or have the program list larger blocks"
        )));
    }
    Ok(ranges)
}
