//! Extents, from tables alone: no data is read.

use blockhaul_block::{
    Can, ContextSet, Error, Extents, HOLE, Kind, Outcome, RequestFlags, Result, ZERO,
};

use super::entry::{ClusterPlace, Run};
use super::parts::{FIRST_BITMAP, ImageParts};
use crate::extents::{PlaceBelow, StateReader, add_below, base_of, below, lists};

/// A file is sparse if more than this part of it are holes: there are some in others, too, where
/// clusters were freed.
const SPARSE: u64 = 8;

/// What a list says about a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ExtentContext {
    /// Holes and zeroes.
    Allocation,
    /// Which image of the chain has the bytes: 1 for this one, 0 for none.
    Depth,
}

impl ExtentContext {
    /// The state of what no image has.
    fn nothing(self) -> u64 {
        match self {
            ExtentContext::Allocation => HOLE | ZERO,
            ExtentContext::Depth => 0,
        }
    }
}

/// One list for each context.
pub(super) async fn list(
    parts: &ImageParts,
    range: (u64, u64),
    contexts: ContextSet,
    flags: RequestFlags,
) -> Outcome {
    let list = async |number, most| match number {
        0 => parts.states(ExtentContext::Allocation, range, most).await,
        1 => parts.states(ExtentContext::Depth, range, most).await,
        number => of_bitmap(parts, number, range, most).await,
    };
    lists(contexts, flags, list).await
}

async fn of_bitmap(
    parts: &ImageParts,
    number: usize,
    (at, end): (u64, u64),
    most: usize,
) -> Result<Extents> {
    let none = || Error::new(Kind::Invalid, "the device has no such context");
    let place = number.checked_sub(FIRST_BITMAP).ok_or_else(none)?;
    let own = &parts.image.bitmaps;
    if let Some(bitmap) = own.get(place) {
        return bitmap.extents(&parts.file, at, end, most).await;
    }
    let backing = parts.backing.as_ref().ok_or_else(none)?;
    let context = backing.bitmaps.get(place - own.len()).ok_or_else(none)?;
    if at < backing.size {
        return below(&backing.device, at, end.min(backing.size), *context).await;
    }
    let mut all = Extents::new();
    all.push(end - at, 0);
    Ok(all)
}

impl StateReader for ImageParts {
    type List = ExtentContext;

    async fn next_runs(
        &self,
        (at, end): (u64, u64),
        most: usize,
        steps: &mut u64,
    ) -> Result<Vec<Run>> {
        self.image.some_runs(&self.file, at, end, most, steps).await
    }

    async fn add(
        &self,
        list: ExtentContext,
        run: Run,
        most: usize,
        all: &mut Extents,
    ) -> Result<()> {
        let state = match (list, run.place) {
            (_, ClusterPlace::Unallocated) => return add_backing(self, list, run, most, all).await,
            (ExtentContext::Allocation, ClusterPlace::Data(at)) if may_have_holes(self).await => {
                let contexts = base_of(&self.data.facts());
                let size = self.data_len();
                let place = PlaceBelow { device: &self.data, contexts, at, size, beyond: ZERO };
                return add_below(place, run.len, most, all, |state| state).await;
            }
            (ExtentContext::Depth, _) => 1,
            (ExtentContext::Allocation, ClusterPlace::Data(_) | ClusterPlace::Packed { .. }) => 0,
            (ExtentContext::Allocation, ClusterPlace::Zero { stored: true }) => ZERO,
            (ExtentContext::Allocation, ClusterPlace::Zero { stored: false }) => HOLE | ZERO,
        };
        all.push(run.len, state);
        Ok(())
    }
}

/// Appends the states of what this image does not have.
async fn add_backing(
    parts: &ImageParts,
    what: ExtentContext,
    run: Run,
    most: usize,
    all: &mut Extents,
) -> Result<()> {
    let beyond = what.nothing();
    let backing = parts.backing.as_ref().filter(|backing| run.at < backing.size);
    let Some(backing) = backing else {
        all.push(run.len, beyond);
        return Ok(());
    };
    let (contexts, state): (_, fn(u64) -> u64) = match (what, backing.depth) {
        (ExtentContext::Allocation, _) => (backing.base, |state| state),
        (ExtentContext::Depth, Some(depth)) => {
            (depth, |level| if level > 0 { level.saturating_add(1) } else { 0 })
        }
        (ExtentContext::Depth, None) => {
            // A raw file has all of its bytes.
            let inside = run.len.min(backing.size - run.at);
            all.push(inside, 2);
            all.push(run.len - inside, beyond);
            return Ok(());
        }
    };
    let (device, size) = (&backing.device, backing.size);
    let place = PlaceBelow { device, contexts, at: run.at, size, beyond };
    add_below(place, run.len, most, all, state).await
}

/// Whether clusters with data may be holes of their file: in external data files, and in images
/// whose clusters were all allocated when they were created, but never written
/// (`preallocation=metadata`). Other files are not asked for each run.
async fn may_have_holes(parts: &ImageParts) -> bool {
    if parts.is_external {
        return true;
    }
    if parts.image.writer.is_some() {
        return false;
    }
    if let Some(known) = parts.image.is_sparse.get() {
        return *known;
    }
    let facts = parts.data.facts();
    let is_known = facts.can.contains(Can::EXTENTS) && !facts.emulated.contains(Can::EXTENTS);
    let found = if is_known && facts.size > 0 {
        below(&parts.data, 0, facts.size, base_of(&facts)).await.ok()
    } else {
        None
    };
    let zero = |list: &Extents| {
        let runs = list.runs().iter().filter(|run| run.state & ZERO != 0);
        runs.map(|run| run.len).sum::<u64>()
    };
    let is_sparse = found.is_some_and(|list| zero(&list) > list.total() / SPARSE);
    *parts.image.is_sparse.get_or_init(|| is_sparse)
}
