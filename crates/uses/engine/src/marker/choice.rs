//! Chooses the two blocks of a marker.

use std::sync::Arc;

use blockhaul_block::{DeviceExt as _, Error, Kind, ZERO};
use blockhaul_io::is_zero;

use super::check::{other_copy, other_copy_at_source};
use super::{LEN, MarkerFields, MarkerPlace};
use crate::error::Result;
use crate::extent_feed::ExtentFeed;
use crate::handle::{ReconnectingHandle, RetryControl};
use crate::ledger::SegmentRange;
use crate::resolved::{EffectiveOptions, whole_blocks};
use crate::selection::{self, Selection};
use crate::side::Side;
use crate::sides::DiskPair;

/// Least bytes of a block.
const BLOCK: u64 = 4096;
/// Most bytes of a read that looks for content; the first one is a block.
const READ_MAX: u64 = 1 << 20;

/// Chooses the place of the marker of a copy that begins. `None`: the source has no content that can be
/// discarded.
///
/// # Errors
/// Those of the devices; one side has the marker of another copy there; [`Kind::ShuttingDown`] after a cancel.
pub(crate) async fn choose(
    sides: &DiskPair,
    selection: &Selection,
    extents: bool,
    (resolved, retries): (&EffectiveOptions, &Arc<RetryControl>),
) -> Result<Option<MarkerPlace>> {
    let source = sides.handle(Side::Source, retries);
    let target = sides.handle(Side::Target, retries);
    let minimum = source.facts().block.minimum.max(target.facts().block.minimum);
    let search =
        ContentSearch { source: &source, resolved, retries, block: BLOCK.max(u64::from(minimum)) };
    let (from, to) = selection.bounds();
    let mut choice = selection.choice(&source)?;
    let mut feed = ExtentFeed::allocation(source.clone(), extents, from, to);
    if !selection.is_whole() {
        feed = feed.in_part();
    }
    let ranges = selection.ranges();
    for next in 0..ranges.len() {
        let (mut at, end) = ranges[next];
        // Where what is selected without a gap begins.
        let mut start = at;
        while at < end {
            let (mut len, chosen) = choice.look(at, end - at).await?;
            if chosen {
                feed.skip_to(at);
                selection::allow(&mut feed, &choice, &ranges[next..]);
                let known = feed.front().await?;
                let extent = (at, at + known.len.clamp(1, len));
                // Neighbours share the blocks at their ends.
                let within = (start, at + len);
                len = extent.1 - at;
                if known.state.unwrap_or(0) & ZERO == 0
                    && let Some((content, digest)) = search.content(extent, within).await?
                {
                    let at = search.last_block(content, extent, known.state.is_some());
                    let there = read_block(&target, at, search.block).await?;
                    if MarkerFields::of(&there).is_some() {
                        return Err(other_copy(&target, at));
                    }
                    let before = there.first_chunk().copied().unwrap_or([0; LEN]);
                    return Ok(Some(MarkerPlace {
                        at,
                        content,
                        len: search.block,
                        digest,
                        before,
                    }));
                }
            } else {
                start = at + len;
            }
            at += len;
        }
    }
    Ok(None)
}

/// A search for content.
struct ContentSearch<'a> {
    source: &'a ReconnectingHandle,
    resolved: &'a EffectiveOptions,
    retries: &'a Arc<RetryControl>,
    block: u64,
}

impl ContentSearch<'_> {
    /// The first block with content that is whole in `within`, of those of an extent, and its digest.
    async fn content(
        &self,
        extent: SegmentRange,
        within: SegmentRange,
    ) -> Result<Option<(u64, [u8; 32])>> {
        let block = self.block;
        let Some(within) = whole_blocks(within, &self.source.facts()) else {
            return Ok(None);
        };
        let mut at = (extent.0 - extent.0 % block).max(within.0.next_multiple_of(block));
        let end = extent.1.next_multiple_of(block).min(within.1 - within.1 % block);
        let most = u64::from(self.source.facts().block.maximum).clamp(block, READ_MAX.max(block));
        let mut len = block;
        while at < end {
            len = len.min(end - at);
            self.resolved.pace(len, || self.retries.stopped()).await;
            if self.retries.stopped() {
                return Err(Error::new(Kind::ShuttingDown, "stopped before the end")
                    .complete()
                    .into());
            }
            let there = read_block(self.source, at, len).await?;
            let mut blocks = there.chunks_exact(block as usize);
            if let Some(found) = blocks.position(|block| !is_zero(block)) {
                let start = found * block as usize;
                let found = &there[start..start + block as usize];
                let content = at + start as u64;
                if MarkerFields::of(found).is_some() {
                    return Err(other_copy_at_source(self.source, content));
                }
                return Ok(Some((content, blake3::hash(found).into())));
            }
            at += len;
            len = (len * 4).min(most - most % block);
        }
        Ok(None)
    }

    /// The last block of what is left of a segment behind the content: of an extent that the source reports,
    /// because only what is allocated is sure to be seen through two servers of one image.
    fn last_block(&self, content: u64, extent: SegmentRange, is_known: bool) -> u64 {
        let segment = self.resolved.segment;
        let end = extent.1.min((content / segment + 1).saturating_mul(segment));
        let last = (end - end % self.block).saturating_sub(self.block);
        if is_known { last.max(content) } else { content }
    }
}

/// Reads some blocks.
pub(crate) async fn read_block(end: &ReconnectingHandle, at: u64, len: u64) -> Result<Vec<u8>> {
    let mut attempts = 0;
    loop {
        let generation = end.generation();
        match end.device().read(at, len as usize).await {
            Ok(data) => return Ok(data.bytes().to_vec()),
            Err(error) => end.recover(error, generation, &mut attempts).await?,
        }
    }
}
