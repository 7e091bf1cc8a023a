//! Checks of a copy that goes on and discards its source: what the journal has recorded is on the target
//! only, and cannot be compared with the source any more.

use std::rc::Rc;
use std::sync::Arc;

use blockhaul_block::{Can, Error, Kind, Reply, Request, ZERO};
use blockhaul_io::{Reservation, is_zero};

use crate::error::{CopyError, Result};
use crate::extent_feed::ExtentFeed;
use crate::handle::{Handle, Retries};
use crate::journal::Recorded;
use crate::ledger::Range;
use crate::resolved::Resolved;
use crate::selection::Selection;
use crate::side::Side;
use crate::sides::Sides;

/// Bytes of a read.
const CHUNK: u64 = 1 << 20;

/// Refuses a target that has nothing of what the journal has recorded: it is another one. Refuses a journal that
/// lacks records, as an older copy of it does: where nothing is recorded, the source reads as zeroes, and the
/// target, which was empty when the copy began, has contents. Copying these zeroes would overwrite the only copy.
///
/// # Errors
/// The refusals, and errors of the devices.
pub(crate) async fn check_target(
    sides: &Sides,
    recorded: &Recorded,
    selection: &Selection,
    (resolved, retries): (&Resolved, &Arc<Retries>),
) -> Result<()> {
    let target = sides.handle(Side::Target, retries);
    let name = target.facts().name.clone();
    let refused = |text: String| CopyError::at_target(Error::new(Kind::Invalid, text).on(&name));
    let mut found = recorded.content.is_empty();
    for &(first, end) in &recorded.content {
        let bytes = |segments: u64| segments.saturating_mul(resolved.segment);
        let segments = (bytes(first), bytes(end));
        for range in selection.ranges().iter().filter_map(|range| common(*range, segments)) {
            found = found || first_reported(&target, range).await?.is_some();
        }
    }
    if !found {
        let text = "it has nothing of what the journal has recorded, which was discarded at the source: it is \
                    another target than that of the journal";
        let remedy = "put the target of the journal back";
        let error = Error::new(Kind::Invalid, text).on(&name).with_remedy(remedy);
        return Err(CopyError::at_target(error));
    }
    let may_look = recorded.target_was_zero && !recorded.complete;
    if !may_look || !target.facts().can.contains(Can::EXTENTS) {
        return Ok(());
    }
    for range in selection.ranges() {
        let mut at = range.0;
        while at < range.1 {
            let segment = at / resolved.segment;
            if let Some(end) = recorded.reach(segment) {
                at = end.saturating_mul(resolved.segment);
                continue;
            }
            let next = recorded
                .next(segment)
                .map_or(u64::MAX, |next| next.saturating_mul(resolved.segment));
            let end = next.min(range.1);
            if let Some(place) = overwritten(sides, &target, (at, end), retries).await? {
                return Err(refused(format!(
                    "there is content at offset {place}, of which the journal has no record, and the source \
                     reads as zeroes there: the journal is an older one, or its end was cut off: put the \
                     latest journal back; without it, write only what the source still has onto this target, \
                     with --ranges"
                )));
            }
            at = end;
        }
    }
    Ok(())
}

/// The common part of two ranges, if there is one.
fn common(one: Range, other: Range) -> Option<Range> {
    let both = (one.0.max(other.0), one.1.min(other.1));
    (both.0 < both.1).then_some(both)
}

/// The first byte of the target that is not zero where the source reports zeroes.
async fn overwritten(
    sides: &Sides,
    target: &Rc<Handle>,
    (from, to): Range,
    retries: &Arc<Retries>,
) -> Result<Option<u64>> {
    let source = sides.handle(Side::Source, retries);
    let mut feed = ExtentFeed::allocation(source, true, from, to);
    let mut at = from;
    while at < to {
        let known = feed.front().await?;
        let end = at + known.len.clamp(1, to - at);
        if known.state.unwrap_or(0) & ZERO != 0
            && let Some(place) = first_reported(target, (at, end)).await?
        {
            return Ok(Some(place));
        }
        at = end;
        feed.skip_to(at);
    }
    Ok(None)
}

/// The first byte of a range that is not zero. What extents report as zero is not read.
async fn first_reported(end: &Rc<Handle>, (from, to): Range) -> Result<Option<u64>> {
    let mut feed = ExtentFeed::allocation(end.clone(), true, from, to);
    let mut at = from;
    while at < to {
        let known = feed.front().await?;
        let stop = at + known.len.clamp(1, to - at);
        if known.state.unwrap_or(0) & ZERO == 0
            && let Some(found) = first_content(end, (at, stop)).await?
        {
            return Ok(Some(found));
        }
        at = stop;
        feed.skip_to(at);
    }
    Ok(None)
}

/// The first byte of a range that is not zero.
pub(crate) async fn first_content(end: &Handle, (from, to): Range) -> Result<Option<u64>> {
    let most = u64::from(end.facts().block.maximum).clamp(1, CHUNK);
    let mut at = from;
    while at < to {
        let len = most.min(to - at);
        if let Some(found) = content(end, at, len).await? {
            return Ok(Some(at + found));
        }
        at += len;
    }
    Ok(None)
}

/// The place of the first byte in a short range that is not zero.
async fn content(end: &Handle, at: u64, len: u64) -> Result<Option<u64>> {
    let mut attempts = 0;
    loop {
        let generation = end.generation();
        let request = Request::read(at, Reservation::unpooled(len as usize));
        match end.device().submit(request).await {
            Ok(Reply::Data(data)) if is_zero(data.bytes()) => return Ok(None),
            Ok(Reply::Data(data)) => {
                let found = data.bytes().iter().position(|&byte| byte != 0);
                return Ok(found.map(|found| found as u64));
            }
            Ok(_) => return Ok(None),
            Err(error) => end.recover(error, generation, &mut attempts).await?,
        }
    }
}
