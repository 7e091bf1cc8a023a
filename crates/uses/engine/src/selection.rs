//! Which part of a source is copied: all of it, ranges, or the extents of a bitmap.

use std::rc::Rc;
use std::sync::Arc;

use blockhaul_block::{Error, Facts, Kind};
use blockhaul_catalog::Stack;

use crate::error::{CopyError, Result};
use crate::extent_feed::ExtentFeed;
use crate::handle::{ReconnectingHandle, RetryControl};
use crate::ledger::SegmentRange;
use crate::options::{BitmapSelection, EngineOptions};
use crate::progress::CopyProgress;
use crate::side::Side;

/// Maximum number of ranges of a bitmap that is read before the copy: 64 MiB of them.
const RANGES_MAX: usize = 1 << 22;

/// Number of runs, chosen or not, that are looked at ahead of the one that is copied next.
const LOOK_AHEAD: usize = 32;

/// The part of a source that is copied.
#[derive(Debug, Clone)]
pub(crate) struct Selection {
    /// Starts and ends; ascending, disjoint and not empty.
    ranges: Vec<(u64, u64)>,
    bitmap: Option<BitmapSelection>,
    /// Whether it is all of the source.
    whole: bool,
    /// Extents that the bitmap reports as unchanged are shrunk to multiples of this.
    minimum: u64,
}

impl Selection {
    /// All of a source of `size` bytes.
    pub(crate) fn all(size: u64) -> Selection {
        let ranges = if size > 0 { vec![(0, size)] } else { Vec::new() };
        Selection { ranges, bitmap: None, whole: true, minimum: 1 }
    }

    /// Nothing of a source; `minimum`: the larger minimum block of both sides.
    pub(crate) fn nothing(minimum: u32) -> Selection {
        let minimum = u64::from(minimum.max(1));
        Selection { ranges: Vec::new(), bitmap: None, whole: false, minimum }
    }

    /// The range that the options select of a source with these facts; `minimum`: the larger
    /// minimum block of both sides.
    pub(crate) fn new(options: &EngineOptions, source: &Facts, minimum: u32) -> Result<Selection> {
        let mut selection = Selection::all(source.size);
        selection.minimum = u64::from(minimum.max(1));
        if let Some(ranges) = &options.ranges {
            selection.whole = false;
            selection.ranges = Vec::with_capacity(ranges.len());
            for &(at, len) in ranges.iter().filter(|range| range.1 > 0) {
                let end = at.checked_add(len).filter(|&end| end <= source.size);
                let Some(end) = end else {
                    let size = source.size;
                    let text = format!(
                        "the range of {len} bytes at offset {at} ends beyond its {size} bytes"
                    );
                    return Err(CopyError::at_source(
                        Error::new(Kind::Invalid, text).on(&source.name),
                    ));
                };
                match selection.ranges.last_mut() {
                    Some(last) if last.1 > at => {
                        let text = format!("the ranges are not in order at offset {at}");
                        return Err(Error::new(Kind::Invalid, text).into());
                    }
                    Some(last) if last.1 == at => last.1 = end,
                    _ => selection.ranges.push((at, end)),
                }
            }
        }
        if let Some(bitmap) = &options.bitmap {
            selection.whole = false;
            if source.context(&bitmap.context).is_none() {
                let known = if source.contexts.is_empty() {
                    "it has none".to_string()
                } else {
                    format!("it has {}", source.contexts.join(", "))
                };
                let text = format!("no metadata context {:?}: {known}", bitmap.context);
                return Err(CopyError::at_source(
                    Error::new(Kind::NotFound, text).on(&source.name),
                ));
            }
            selection.bitmap = Some(bitmap.clone());
        }
        Ok(selection)
    }

    /// Starts and ends of the ranges that may be copied.
    pub(crate) fn ranges(&self) -> &[(u64, u64)] {
        &self.ranges
    }

    /// A digest of the ranges; zeroes where there is one range or none.
    pub(crate) fn digest(&self) -> [u8; 32] {
        if self.ranges.len() < 2 {
            return [0; 32];
        }
        let mut hasher = blake3::Hasher::new();
        for (start, end) in &self.ranges {
            hasher.update(&start.to_be_bytes()).update(&end.to_be_bytes());
        }
        hasher.finalize().into()
    }

    /// The same selection as ranges alone: with a bitmap, those that it selects now.
    ///
    /// # Errors
    /// The bitmap cannot be read, or has more than [`RANGES_MAX`] ranges.
    pub(crate) async fn into_ranges(self, source: &Rc<ReconnectingHandle>) -> Result<Selection> {
        if self.bitmap.is_none() {
            return Ok(self);
        }
        let mut choice = self.choice(source)?;
        let mut found: Vec<(u64, u64)> = Vec::new();
        for &(start, end) in &self.ranges {
            let mut at = start;
            while at < end {
                let (len, chosen) = choice.look(at, end - at).await?;
                match found.last_mut() {
                    Some(last) if chosen && last.1 == at => last.1 = at + len,
                    _ if chosen => found.push((at, at + len)),
                    _ => {}
                }
                if found.len() > RANGES_MAX {
                    let text = format!(
                        "the bitmap selects more than {RANGES_MAX} ranges: copy all of the disk, or without a \
                         journal"
                    );
                    let error = Error::new(Kind::Invalid, text).on(&source.facts().name);
                    return Err(CopyError::at_source(error));
                }
                at += len;
            }
        }
        Ok(Selection { ranges: found, bitmap: None, ..self })
    }

    /// Where the first range starts and the last one ends.
    pub(crate) fn bounds(&self) -> (u64, u64) {
        let start = self.ranges.first().map_or(0, |range| range.0);
        (start, self.ranges.last().map_or(start, |range| range.1))
    }

    /// Bytes in the ranges.
    pub(crate) fn total(&self) -> u64 {
        self.ranges.iter().map(|range| range.1 - range.0).sum()
    }

    /// The larger minimum block of both sides, in bytes.
    pub(crate) fn minimum(&self) -> u64 {
        self.minimum
    }

    /// Whether it is all of the source.
    pub(crate) fn is_whole(&self) -> bool {
        self.whole
    }

    /// Requests the bitmap while a copy runs.
    pub(crate) fn choice(&self, source: &Rc<ReconnectingHandle>) -> Result<SelectionFeed> {
        let feed = self.bitmap.as_ref().and_then(|bitmap| {
            let context = source.facts().context(&bitmap.context)?;
            let (from, to) = self.bounds();
            Some((ExtentFeed::strict(source.clone(), context, from, to), bitmap.mask))
        });
        if self.bitmap.is_some() && feed.is_none() {
            let text = "the bitmap no longer exists";
            let error = Error::new(Kind::NotFound, text).on(&source.facts().name);
            return Err(CopyError::at_source(error));
        }
        Ok(SelectionFeed { feed, minimum: self.minimum })
    }
}

/// The ranges of a source that a bitmap selects now: offsets and lengths in bytes, ascending, apart from
/// each other. Call it on a worker.
///
/// # Errors
/// The source has no such bitmap, it cannot be read, or it has more than 4 Mi ranges.
pub async fn bitmap_ranges(
    source: &Stack,
    bitmap: &BitmapSelection,
    options: &EngineOptions,
    progress: &Arc<CopyProgress>,
) -> Result<Vec<(u64, u64)>> {
    let facts = source.device().facts();
    let all = EngineOptions { bitmap: Some(bitmap.clone()), ranges: None, ..options.clone() };
    let selection = Selection::new(&all, &facts, facts.block.minimum)?;
    let retries = RetryControl::new(options, progress);
    let handle =
        ReconnectingHandle::new(Side::Source, source.clone(), source.device().clone(), retries);
    let found = selection.into_ranges(&Rc::new(handle)).await?;
    Ok(found.ranges.into_iter().map(|(start, end)| (start, end - start)).collect())
}

/// Tells `extents` what is copied from the front of these ranges on, as far as that is known by
/// now: only that may be asked about.
pub(crate) fn allow(extents: &mut ExtentFeed, choice: &SelectionFeed, ranges: &[SegmentRange]) {
    match (&choice.feed, ranges) {
        (None, ranges) => ranges.iter().take(LOOK_AHEAD).for_each(|&range| extents.allow(range)),
        (Some((feed, mask)), &[(_, to), ..]) => {
            let known = feed.known().take(LOOK_AHEAD);
            let chosen = known.filter(|(_, state)| state.unwrap_or(u64::MAX) & mask != 0);
            chosen.for_each(|((start, end), _)| extents.allow((start, end.min(to))));
        }
        (Some(_), []) => {}
    }
}

/// The part of the ranges that is copied, in order.
pub(crate) struct SelectionFeed {
    feed: Option<(ExtentFeed, u64)>,
    minimum: u64,
}

impl SelectionFeed {
    /// The length, at most `most`, from `at` on that is either all copied or all skipped, and
    /// which.
    pub(crate) async fn look(&mut self, at: u64, most: u64) -> Result<(u64, bool)> {
        let Some((feed, mask)) = &mut self.feed else { return Ok((most, true)) };
        feed.skip_to(at);
        let known = feed.front().await?;
        let len = known.len.min(most);
        if known.state.unwrap_or(u64::MAX) & *mask != 0 {
            return Ok((len, true));
        }
        // Partly changed blocks are copied whole: no two lanes write to one block.
        let start = at.next_multiple_of(self.minimum);
        let end = at + len;
        let inner_end = end - end % self.minimum;
        Ok(if start >= inner_end {
            (len, true)
        } else if at < start {
            (start - at, true)
        } else {
            (inner_end - at, false)
        })
    }
}
