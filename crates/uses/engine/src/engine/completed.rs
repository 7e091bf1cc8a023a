//! Copies that an earlier run of the program has begun or completed: whether a journal is theirs.

use std::sync::Arc;

use blockhaul_block::{Error, Kind};
use blockhaul_catalog::Stack;
use blockhaul_io::Pool;

use super::own_journal::{as_begun, identity_there, own_identity};
use crate::error::Result;
use crate::handle::RetryControl;
use crate::journal::{JournalIdentity, check_identity};
use crate::marker::Marker;
use crate::marker::check::check_complete;
use crate::options::{CopySummary, EngineOptions};
use crate::progress::CopyProgress;
use crate::resolved::EffectiveOptions;
use crate::selection::Selection;
use crate::side::Side;
use crate::sides::DiskPair;

/// The journal of these options, compared with the copy that it is to continue.
struct CheckedJournal {
    sides: DiskPair,
    retries: Arc<RetryControl>,
    selection: Selection,
    /// What the header of the journal says; `None`: there is no journal.
    there: Option<JournalIdentity>,
    /// The identifier of the journal.
    id: [u8; 16],
    /// Bytes of the selection that earlier runs have recorded.
    recorded: u64,
}

/// Checks that the journal of these options, which is [`crate::JournalState::Complete`], is that of this
/// copy. Both sides may be open for reading only: nothing is written. Returns the summary of a copy of
/// which nothing is left to do.
///
/// # Errors
/// It is the journal of another copy or is in use, the source cannot tell what is selected, or the target
/// does not have what the journal has recorded.
pub async fn completed_earlier(
    source: &Stack,
    target: &Stack,
    options: &EngineOptions,
    pool: &Pool,
    progress: &Arc<CopyProgress>,
) -> Result<CopySummary> {
    let CheckedJournal { sides, retries, selection, there, id, .. } =
        check_own(source, target, options, pool, progress).await?;
    if let Some(place) = there.and_then(|there| there.place) {
        check_complete(&sides.handle(Side::Target, &retries), &Marker::new(place, id)).await?;
    }
    let size = selection.total();
    progress.set_total(size);
    progress.set_disk_size(source.device().facts().size);
    for &(start, end) in selection.ranges() {
        progress.add_resumed(start, end - start);
    }
    progress.set_complete();
    Ok(CopySummary { size, resumed: size, journal_stays: true, ..CopySummary::default() })
}

/// Checks that the journal of these options is that of this copy, which could go on. Both sides may be open for
/// reading only: nothing is written. Returns the number of bytes that earlier runs have recorded as copied.
///
/// # Errors
/// It is the journal of another copy or is in use, or the source cannot tell what is selected.
pub async fn check_resumption(
    source: &Stack,
    target: &Stack,
    options: &EngineOptions,
    pool: &Pool,
) -> Result<u64> {
    let progress = Arc::new(CopyProgress::new());
    check_own(source, target, options, pool, &progress).await.map(|checked| checked.recorded)
}

async fn check_own(
    source: &Stack,
    target: &Stack,
    options: &EngineOptions,
    pool: &Pool,
    progress: &Arc<CopyProgress>,
) -> Result<CheckedJournal> {
    let sides = DiskPair { source: source.clone(), target: target.clone() };
    let selection = sides.selection(options)?;
    let there = identity_there(options).await;
    let options = as_begun(options, there.as_ref());
    let Some(journal) = &options.journal else {
        return Err(Error::new(Kind::Invalid, "a copy without a journal").into());
    };
    let retries = RetryControl::new(&options, progress);
    let resolved = EffectiveOptions::new(&options, source.device(), target.device(), pool);
    let selection = selection.into_ranges(&sides.handle(Side::Source, &retries)).await?;
    let identity =
        own_identity(journal, &sides, &options, &selection, (&resolved, &retries)).await?;
    let path = journal.path.clone();
    let checked = blockhaul_io::offload(move || check_identity(&path, &identity)).await;
    let (id, content) = checked.map_err(|lost| Error::new(Kind::Io, "journal").because(lost))??;
    let recorded = content.segments.iter().map(|&(first, end)| {
        let [first, end] = [first, end].map(|number| number.saturating_mul(resolved.segment));
        let inside = |&(from, to): &(u64, u64)| to.min(end).saturating_sub(from.max(first));
        selection.ranges().iter().map(inside).sum::<u64>()
    });
    let recorded = recorded.sum();
    Ok(CheckedJournal { sides, retries, selection, there, id, recorded })
}
