//! The journal of an engine: what identifies its copy, what earlier runs have recorded, and its end.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};

use blockhaul_block::{Error, Kind};

use crate::error::Result;
use crate::handle::RetryControl;
use crate::journal::{Journal, JournalContent, JournalIdentity, JournalOptions, SelectedParts};
use crate::ledger::{SegmentRange, SuspectSegment};
use crate::marker::{Marker, MarkerPlace, MarkerStage};
use crate::options::EngineOptions;
use crate::orders::EndAction;
use crate::resolved::EffectiveOptions;
use crate::segment_maker::EarlierRuns;
use crate::selection::Selection;
use crate::shared::{EngineState, JournalKeeper};
use crate::side::Side;
use crate::sides::DiskPair;

/// What the journal of the options says of its copy, if it exists and is to be continued.
pub(super) async fn identity_there(options: &EngineOptions) -> Option<JournalIdentity> {
    let journal = options.journal.clone()?;
    blockhaul_io::offload(move || Journal::identity_there(&journal)).await.ok()?
}

/// The options, with the segment size of the journal that this copy continues. Without an explicit
/// size the number of connections and requests, which may differ now, would determine it.
pub(super) fn as_begun(options: &EngineOptions, there: Option<&JournalIdentity>) -> EngineOptions {
    let mut options = options.clone();
    if let Some(there) = there.filter(|_| options.spread) {
        options.segment = there.segment;
        options.spread = false;
    }
    options
}

/// What identifies a copy in its journal.
fn identity(
    options: &JournalOptions,
    resolved: &EffectiveOptions,
    selection: &Selection,
    sides: &DiskPair,
    sample: [u8; 32],
) -> JournalIdentity {
    JournalIdentity {
        segment: resolved.segment,
        range: selection.bounds(),
        source_size: sides.source.device().facts().size,
        target_size: sides.target.device().facts().size,
        sample,
        source: options.source.clone(),
        target: options.target.clone(),
        ranges: selection.digest(),
        discards: false,
        zeroes_checked: false,
        is_marked: false,
        place: None,
    }
}

/// Opens the journal that the options ask for; it is about what is selected.
pub(super) async fn own_journal(
    sides: &DiskPair,
    options: &EngineOptions,
    selection: &Selection,
    (resolved, retries): (&EffectiveOptions, &Arc<RetryControl>),
    place: Option<MarkerPlace>,
) -> Result<Option<(JournalKeeper, JournalContent)>> {
    let Some(journal) = &options.journal else { return Ok(None) };
    let own = own_identity(journal, sides, options, selection, (resolved, retries)).await?;
    let identity = JournalIdentity { place, ..own };
    let parts = SelectedParts::new(selection.ranges(), resolved.segment);
    open_journal(journal, identity, parts).await.map(Some)
}

/// What identifies the copy of what is selected.
pub(super) async fn own_identity(
    journal: &JournalOptions,
    sides: &DiskPair,
    options: &EngineOptions,
    selection: &Selection,
    (resolved, retries): (&EffectiveOptions, &Arc<RetryControl>),
) -> Result<JournalIdentity> {
    // An export may be unreadable where its bitmap is clean.
    let partial = options.bitmap.is_some() || options.ranges.is_some();
    let only = partial.then(|| selection.ranges());
    let sample = if options.discard_source {
        // Earlier runs have changed it.
        [0; 32]
    } else {
        crate::sample::digest(sides.handle(Side::Source, retries), only).await?
    };
    let identity = identity(journal, resolved, selection, sides, sample);
    Ok(JournalIdentity {
        discards: options.discard_source,
        zeroes_checked: options.target_is_zero && !options.trust_zero,
        is_marked: options.discard_source,
        ..identity
    })
}

async fn open_journal(
    options: &JournalOptions,
    identity: JournalIdentity,
    parts: SelectedParts,
) -> Result<(JournalKeeper, JournalContent)> {
    let wanted = options.clone();
    let discards = identity.discards;
    let opened = blockhaul_io::offload(move || Journal::open(&wanted, &identity)).await;
    let (file, recorded) =
        opened.map_err(|lost| Error::new(Kind::Io, "journal").because(lost))??;
    let path = options.path.display();
    match recorded.segments.iter().map(|(first, end)| end - first).sum::<u64>() {
        0 => log::debug!("journal {path}: nothing is recorded; all is copied"),
        count => log::debug!("journal {path}: earlier runs have recorded {count} segments"),
    }
    let keep = options.keep;
    let interval = options.interval;
    let parts = Mutex::new(parts);
    let earlier = !recorded.segments.is_empty();
    let was_complete = recorded.complete;
    Ok((JournalKeeper { file, keep, discards, earlier, was_complete, interval, parts }, recorded))
}

/// Compares the data that earlier runs recorded last. If it differs, none of their records is used.
pub(super) async fn look_at_edge(
    shared: &Arc<EngineState>,
    sides: &DiskPair,
    recorded: JournalContent,
    ranges: &[SegmentRange],
) -> EarlierRuns {
    if recorded.segments.is_empty() {
        return EarlierRuns::default();
    }
    if shared.resolved.discard_source {
        // The source does not hold it any more.
        return EarlierRuns { recorded, check: false };
    }
    let segment = shared.resolved.segment;
    let lane = sides.first_lane(shared, false);
    shared.signals.begin_work();
    for number in &recorded.edge {
        let at = number * segment;
        let end = (number + 1) * segment;
        // Only what is copied: the target keeps the rest.
        let first = ranges.partition_point(|range| range.1 <= at);
        for range in ranges[first..].iter().take_while(|range| range.0 < end) {
            let range = (range.0.max(at), range.1.min(end));
            lane.recheck(SuspectSegment { range, again: false }).await;
        }
    }
    lane.finish(EndAction::Copy).await;
    shared.signals.end_work();
    let check = shared.retries.rewritten.load(Ordering::Relaxed) > 0;
    if check {
        let text = "the target does not contain what the journal recorded last: comparing everything that \
                    it recorded";
        shared.warn(text.to_string());
    }
    EarlierRuns { recorded, check }
}

/// After success, the journal is not needed any more, unless something was discarded at the source:
/// then it stays, and says so. True: it stays.
pub(super) async fn close_journal(shared: &EngineState, journal: &JournalKeeper) -> bool {
    // Of a discard that failed, a part may have been carried out.
    let (discarded, failed) = shared.progress.discarded();
    if journal.discards && (journal.earlier || discarded > 0 || failed > 0) {
        let is_last_kept =
            |marker: &Arc<Marker>| marker.may_follow() && marker.stage() < MarkerStage::Discarded;
        if shared.retries.marker().is_some_and(is_last_kept) {
            return true;
        }
        let recorded = if journal.was_complete { Ok(()) } else { journal.file.complete().await };
        if let Err(why) = recorded {
            shared.warn(format!("cannot record in the journal that the copy is complete: {why}"));
        }
        return true;
    }
    if !journal.keep
        && let Err(error) = journal.file.remove()
    {
        shared.warn(format!("cannot remove the journal: {error}"));
    }
    false
}
