//! Refuses sides and journals that do not belong together.

use std::sync::Arc;

use blockhaul_block::{Error, Kind};
use blockhaul_io::is_zero;

use super::choice::read_block;
use super::{LEN, Marker, MarkerFields, MarkerPlace, MarkerStage};
use crate::error::{CopyError, Result};
use crate::handle::{ReconnectingHandle, RetryControl};
use crate::journal::JournalContent;
use crate::resolved::EffectiveOptions;
use crate::side::Side;
use crate::sides::DiskPair;

/// The remedy for a journal that does not have what the target has.
const LATEST_JOURNAL: &str = "put the latest journal back, or the target of this one; this target may have the only copy \
                              of what was discarded";

/// What is to be done with the marker when a copy begins or goes on.
pub(crate) enum MarkerPresence {
    /// Write it; the target has this block there, without the marker.
    Place(Vec<u8>),
    /// Nothing.
    Found,
}

/// Refuses sides and journals that do not belong together, by what both sides have in their two blocks.
///
/// # Errors
/// The refusals, and errors of the devices.
pub(crate) async fn check(
    sides: &DiskPair,
    marker: &Marker,
    recorded: &JournalContent,
    (resolved, retries): (&EffectiveOptions, &Arc<RetryControl>),
) -> Result<MarkerPresence> {
    let MarkerPlace { at, content, len, .. } = marker.place;
    let source = sides.handle(Side::Source, retries);
    let target = sides.handle(Side::Target, retries);
    let there = read_block(&target, at, len).await?;
    let marked = marker.fields(&there);
    let is_last_recorded = recorded.reach(content / resolved.segment).is_some();
    let is_begun = recorded.count > 0 || recorded.is_leaving;
    // Another copy of this source may be overwritten.
    let is_copied = recorded.is_earlier
        && marked.is_none()
        && has_content(&target, &marker.place, recorded).await?;
    match marked.map(|fields| fields.position) {
        Some(_) if is_last_recorded => return Err(rolled_back(&target, at)),
        Some(position) if recorded.fits(position) => {}
        Some(position) if position.count < recorded.count => {
            let error = rolled_back(&target, at);
            return Err(if recorded.is_leaving { or_late(error, at, len) } else { error });
        }
        Some(_) => return Err(older(&target, at)),
        None if MarkerFields::of(&there).is_some() => return Err(other_copy(&target, at)),
        None if is_copied && !is_last_recorded && !recorded.is_leaving => {
            return Err(unrecorded(&target, content));
        }
        None if !is_copied && (is_begun || is_last_recorded) => {
            return Err(other_target(&target, at));
        }
        None => {}
    }
    if is_last_recorded {
        marker.enter(MarkerStage::Discarded);
        return Ok(MarkerPresence::Found);
    }
    if !marker.place.is_content(&read_block(&source, content, len).await?) {
        // In a storage that is both sides, it may be the marker.
        return match !is_begun && marked.is_some() {
            true => Ok(MarkerPresence::Place(marker.old_block(there))),
            false if is_copied => Err(unrecorded(&target, content)),
            false => Err(other_source(&source, content)),
        };
    }
    if is_copied {
        marker.enter(MarkerStage::Restored);
        return Ok(MarkerPresence::Found);
    }
    let old = marker.old_block(there);
    match marked {
        Some(fields) if is_begun => {
            marker.wrote(&fields);
            if MarkerFields::of(&read_block(&source, at, len).await?).is_some() {
                return Err(CopyError::at_target(one_storage(&target, at, None)));
            }
            marker.enter(MarkerStage::Placed);
            Ok(MarkerPresence::Found)
        }
        // Without a record, nobody has found out yet that there are two storages.
        _ => Ok(MarkerPresence::Place(old)),
    }
}

/// Refuses a target that lacks the content of a copy that is complete, or still has its marker.
///
/// # Errors
/// The refusal, and errors of the device.
pub(crate) async fn check_complete(target: &ReconnectingHandle, marker: &Marker) -> Result<()> {
    let place = &marker.place;
    let recorded = JournalContent { complete: true, ..JournalContent::default() };
    let is_marked = marker.fields(&read_block(target, place.at, place.len).await?).is_some();
    if is_marked {
        return Err(rolled_back(target, place.at));
    }
    if !has_content(target, place, &recorded).await? {
        return Err(other_target(target, place.content));
    }
    Ok(())
}

/// Whether the target has the content. What is complete may be in use since, and have other content.
async fn has_content(
    target: &ReconnectingHandle,
    place: &MarkerPlace,
    recorded: &JournalContent,
) -> Result<bool> {
    let there = read_block(target, place.content, place.len).await?;
    Ok(place.is_content(&there) || recorded.complete && !is_zero(&there))
}

fn older(target: &ReconnectingHandle, at: u64) -> CopyError {
    let text = format!(
        "its marker (at offset {at}) says that more was recorded than the journal has: the journal is an older one, or \
         its end was cut off, or this is the target of another journal"
    );
    CopyError::at_target(refusal(target, text, LATEST_JOURNAL))
}

fn unrecorded(target: &ReconnectingHandle, at: u64) -> CopyError {
    let text = format!(
        "it has what is copied last (at offset {at}), and the journal does not record that all else is copied: the \
         journal is an older one, or could not be written to its end, or this is another target. If the last run \
         ended with status 0, the target is complete"
    );
    CopyError::at_target(refusal(target, text, LATEST_JOURNAL))
}

fn rolled_back(target: &ReconnectingHandle, at: u64) -> CopyError {
    let text = format!(
        "its marker (at offset {at}) says that less was recorded than the journal has: the target is in an earlier \
         state, or is a clone of one, or this is the journal of another target"
    );
    let remedy = "put the latest state of the target back, which may have the only copy of what was discarded";
    CopyError::at_target(refusal(target, text, remedy))
}

/// The same error, where the marker may be one that the server of a lost connection has written late.
fn or_late(error: CopyError, at: u64, len: u64) -> CopyError {
    let remedy = format!(
        "put the latest state of the target back; or, if this is the latest state and the connection to the target was \
         lost during the copy, a late write has left the marker there: overwrite it with blockhaul copy --range \
         {at}:{len} and the same two sides, then run this command again"
    );
    CopyError { error: error.error.with_remedy(remedy), ..error }
}

/// The error of a target with the marker of another copy.
pub(crate) fn other_copy(target: &ReconnectingHandle, at: u64) -> CopyError {
    let text = format!(
        "it has the marker of another copy that discards its source and has not ended (at offset {at})"
    );
    let remedy = "go on with that copy and its journal; without them, the target may have the only copy of what was \
                  discarded";
    CopyError::at_target(refusal(target, text, remedy))
}

/// The error of a source with the marker of another copy.
pub(crate) fn other_copy_at_source(source: &ReconnectingHandle, at: u64) -> CopyError {
    let text = format!(
        "source and target are one storage, or the source is the target of another copy: it shows the marker of \
         another copy that discards its source and has not ended, which has overwritten {LEN} bytes at offset {at}"
    );
    let remedy = "go on with that copy and its journal; do not copy to this target";
    CopyError { side: Some(Side::Source), error: refusal(source, text, remedy) }
}

fn other_target(target: &ReconnectingHandle, at: u64) -> CopyError {
    let text = format!(
        "it lacks what the copy of the journal has written there (at offset {at}): it is another target than that \
         of the journal"
    );
    CopyError::at_target(refusal(target, text, "put the target of the journal back"))
}

pub(crate) fn other_source(source: &ReconnectingHandle, at: u64) -> CopyError {
    let text = format!(
        "its content is not that of the journal (at offset {at}): it is another source, or has changed, or the \
         journal is an older one"
    );
    let remedy = "put the source and the latest journal back";
    CopyError { side: Some(Side::Source), error: refusal(source, text, remedy) }
}

/// The error of a source that shows what is written to the target; `lost`: why what was there could not be
/// written again, and whether a journal has it.
pub(crate) fn one_storage(
    target: &ReconnectingHandle,
    at: u64,
    lost: Option<(&Error, bool)>,
) -> Error {
    let text = format!(
        "source and target are one storage: the source shows what was written to the target at offset {at}"
    );
    let Some((error, has_journal)) = lost else {
        return refusal(target, text, "copy to another storage");
    };
    let text =
        format!("{text}, and the {LEN} bytes that were there cannot be written again: {error}");
    let remedy = if has_journal {
        "the journal has them: only the same command with this journal and this target writes them again"
    } else {
        "put these bytes back from a backup before the disk is used"
    };
    refusal(target, text, remedy)
}

fn refusal(end: &ReconnectingHandle, text: String, remedy: &'static str) -> Error {
    Error::new(Kind::Invalid, text).on(&end.facts().name).with_remedy(remedy)
}
