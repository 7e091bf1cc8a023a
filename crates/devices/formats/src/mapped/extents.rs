//! Extents, from tables alone.

use std::sync::Arc;

use blockhaul_block::{ContextSet, Device, Extents, HOLE, Outcome, RequestFlags, Result, ZERO};

use super::map::{DiskPlace, Run};
use super::parts::MappedParts;
use crate::extents::{PlaceBelow, StateReader, add_below, base_of, lists};

/// One list for each context.
pub(super) async fn list(
    parts: &MappedParts,
    range: (u64, u64),
    contexts: ContextSet,
    flags: RequestFlags,
) -> Outcome {
    lists(contexts, flags, async |_, most| parts.states((), range, most).await).await
}

impl StateReader for MappedParts {
    /// Holes and zeroes.
    type List = ();

    async fn next_runs(&self, range: (u64, u64), most: usize, steps: &mut u64) -> Result<Vec<Run>> {
        self.image.runs(&self.files, range, most, steps).await
    }

    async fn add(&self, (): (), run: Run, most: usize, all: &mut Extents) -> Result<()> {
        let state = match (run.place, &self.backing) {
            (DiskPlace::Data { file, at }, _) if self.image.map.is_flat(file) => {
                let device = self.files.get(file).ok_or_else(blockhaul_block::Error::misfit)?;
                let size = self.image.lens.get(file).copied().unwrap_or(0);
                return add_below(place(device, at, size, ZERO), run.len, most, all, |state| state)
                    .await;
            }
            (DiskPlace::Below, Some(backing)) => {
                let place = place(backing, run.at, backing.facts().size, HOLE | ZERO);
                return add_below(place, run.len, most, all, |state| state).await;
            }
            (DiskPlace::Data { .. } | DiskPlace::Packed { .. }, _) => 0,
            (DiskPlace::Zero { stored: true }, _) => ZERO,
            (DiskPlace::Zero { stored: false } | DiskPlace::Below, _) => HOLE | ZERO,
        };
        all.push(run.len, state);
        Ok(())
    }
}

fn place(device: &Arc<dyn Device>, at: u64, size: u64, beyond: u64) -> PlaceBelow<'_> {
    PlaceBelow { device, contexts: base_of(&device.facts()), at, size, beyond }
}
