//! Copies that an earlier run of the program has completed, and whose source it has discarded.

use std::sync::Arc;

use blockhaul_block::{Error, Kind};
use blockhaul_catalog::Stack;
use blockhaul_io::Pool;

use super::own_journal::{as_begun, identity_there, own_identity};
use crate::error::Result;
use crate::handle::RetryControl;
use crate::journal::check_identity;
use crate::marker::Marker;
use crate::marker::check::check_complete;
use crate::options::{CopySummary, EngineOptions};
use crate::progress::CopyProgress;
use crate::resolved::EffectiveOptions;
use crate::side::Side;
use crate::sides::DiskPair;

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
    let id = checked.map_err(|lost| Error::new(Kind::Io, "journal").because(lost))??;
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
