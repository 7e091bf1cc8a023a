//! Refuses sides and journals that do not belong together.

use std::sync::Arc;

use blockhaul_block::{Error, Kind};
use blockhaul_io::is_zero;

use super::choice::read_block;
use super::{Marker, Place, Stage};
use crate::error::{CopyError, Result};
use crate::handle::{Handle, Retries};
use crate::journal::Recorded;
use crate::resolved::Resolved;
use crate::selection::Selection;
use crate::side::Side;
use crate::sides::Sides;

/// What is to be done with the marker when a copy begins or goes on.
pub(crate) enum Beginning {
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
    sides: &Sides,
    marker: &Marker,
    recorded: &Recorded,
    selection: &Selection,
    (resolved, retries): (&Resolved, &Arc<Retries>),
) -> Result<Beginning> {
    let Place { at, content, len, .. } = marker.place;
    let source = sides.handle(Side::Source, retries);
    let target = sides.handle(Side::Target, retries);
    let there = read_block(&target, at, len).await?;
    let number = marker.number(&there);
    let is_last_recorded = recorded.reach(content / resolved.segment).is_some();
    // Another copy of this source may be overwritten.
    let is_copied = recorded.is_earlier
        && number.is_none()
        && has_content(&target, &marker.place, recorded).await?;
    let is_rest_recorded = is_rest_recorded(recorded, selection, resolved.segment, &marker.place);
    match number {
        Some(number) if number > recorded.count => return Err(older(&target, at)),
        Some(_) if is_last_recorded => return Err(other_target(&target, at)),
        None if is_copied && !is_rest_recorded => return Err(older(&target, content)),
        None if !is_copied && recorded.count > 0 => return Err(other_target(&target, at)),
        _ => {}
    }
    if is_last_recorded {
        marker.enter(Stage::Discarded);
        return Ok(Beginning::Found);
    }
    if !marker.place.is_content(&read_block(&source, content, len).await?) {
        // In a storage that is both sides, it may be the marker.
        let is_first = recorded.count == 0 && number.is_some();
        return match is_first {
            true => Ok(Beginning::Place(marker.old_block(there))),
            false if is_copied => Err(older(&target, content)),
            false => Err(other_source(&source, content)),
        };
    }
    // Without a record, nobody has found out yet that there are two storages.
    if is_copied && recorded.count > 0 {
        marker.enter(Stage::Restored);
        return Ok(Beginning::Found);
    }
    let old = marker.old_block(there);
    match number {
        Some(number) if recorded.count > 0 => {
            marker.wrote(number);
            if marker.number(&read_block(&source, at, len).await?).is_some() {
                return Err(CopyError::at_target(one_storage(&target, at, None)));
            }
            marker.enter(Stage::Placed);
            Ok(Beginning::Found)
        }
        _ => Ok(Beginning::Place(old)),
    }
}

/// Refuses a target that lacks the content of a copy that is complete, or still has its marker.
///
/// # Errors
/// The refusal, and errors of the device.
pub(crate) async fn check_complete(target: &Handle, marker: &Marker) -> Result<()> {
    let place = &marker.place;
    let recorded = Recorded { complete: true, ..Recorded::default() };
    let is_marked = marker.number(&read_block(target, place.at, place.len).await?).is_some();
    if is_marked || !has_content(target, place, &recorded).await? {
        return Err(other_target(target, place.content));
    }
    Ok(())
}

/// Whether the target has the content. What is complete may be in use since, and have other content.
async fn has_content(target: &Handle, place: &Place, recorded: &Recorded) -> Result<bool> {
    let there = read_block(target, place.content, place.len).await?;
    Ok(place.is_content(&there) || recorded.complete && !is_zero(&there))
}

/// Whether all is recorded but the segments with the two blocks.
fn is_rest_recorded(
    recorded: &Recorded,
    selection: &Selection,
    segment: u64,
    place: &Place,
) -> bool {
    let (first, behind) = place.range();
    selection.ranges().iter().all(|&(start, end)| {
        let mut at = start;
        while at < end {
            let number = at / segment;
            let last = number.saturating_add(1).saturating_mul(segment);
            at = match recorded.reach(number) {
                Some(reach) => reach.saturating_mul(segment),
                None if number * segment < behind && first < last => last,
                None => return false,
            };
        }
        true
    })
}

fn older(target: &Handle, at: u64) -> CopyError {
    let text = format!(
        "it has what was written (at offset {at}) after the last record of the journal: the journal is an older \
         one, or its end was cut off"
    );
    let remedy = "put the latest journal back; without it, write only what the source still has onto this target, \
                  with --ranges";
    CopyError::at_target(refusal(target, text, remedy))
}

fn other_target(target: &Handle, at: u64) -> CopyError {
    let text = format!(
        "it lacks what the copy of the journal has written there (at offset {at}): it is another target than that \
         of the journal"
    );
    CopyError::at_target(refusal(target, text, "put the target of the journal back"))
}

pub(crate) fn other_source(source: &Handle, at: u64) -> CopyError {
    let text = format!(
        "its content is not that of the journal (at offset {at}): it is another source, or has changed, or the \
         journal is an older one"
    );
    let remedy = "put the source and the latest journal back";
    CopyError { side: Some(Side::Source), error: refusal(source, text, remedy) }
}

/// The error of a source that shows what is written to the target; `lost`: why what was there could not be
/// written again.
pub(crate) fn one_storage(target: &Handle, at: u64, lost: Option<&Error>) -> Error {
    let lost = match lost {
        None => String::new(),
        Some(error) => format!(", and what was there cannot be written again: {error}"),
    };
    let text = format!(
        "source and target are one storage: the source shows what was written to the target at offset {at}{lost}"
    );
    refusal(target, text, "copy to another storage")
}

fn refusal(end: &Handle, text: String, remedy: &'static str) -> Error {
    Error::new(Kind::Invalid, text).on(&end.facts().name).with_remedy(remedy)
}
