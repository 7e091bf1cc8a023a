//! Extents, from tables alone.

use std::sync::Arc;

use blockhaul_block::{Contexts, Device, Extents, Flags, HOLE, Outcome, Result, ZERO};

use super::map::{Place, Run};
use super::parts::Parts;
use crate::extents::{PlaceBelow, StateReader, add_below, base_of, lists};

/// One list for each context.
pub(super) async fn list(
    parts: &Parts,
    range: (u64, u64),
    contexts: Contexts,
    flags: Flags,
) -> Outcome {
    lists(contexts, flags, async |_, most| parts.states((), range, most).await).await
}

impl StateReader for Parts {
    /// Holes and zeroes.
    type List = ();

    async fn next_runs(&self, range: (u64, u64), most: usize, steps: &mut u64) -> Result<Vec<Run>> {
        self.image.runs(&self.files, range, most, steps).await
    }

    async fn add(&self, (): (), run: Run, most: usize, all: &mut Extents) -> Result<()> {
        let state = match (run.place, &self.backing) {
            (Place::Data { file, at }, _) if self.image.map.is_flat(file) => {
                let device = self.files.get(file).ok_or_else(blockhaul_block::Error::misfit)?;
                let size = self.image.lens.get(file).copied().unwrap_or(0);
                return add_below(place(device, at, size, ZERO), run.len, most, all, |state| state)
                    .await;
            }
            (Place::Below, Some(backing)) => {
                let place = place(backing, run.at, backing.facts().size, HOLE | ZERO);
                return add_below(place, run.len, most, all, |state| state).await;
            }
            (Place::Data { .. } | Place::Packed { .. }, _) => 0,
            (Place::Zero { stored: true }, _) => ZERO,
            (Place::Zero { stored: false } | Place::Below, _) => HOLE | ZERO,
        };
        all.push(run.len, state);
        Ok(())
    }
}

fn place(device: &Arc<dyn Device>, at: u64, size: u64, beyond: u64) -> PlaceBelow<'_> {
    PlaceBelow { device, contexts: base_of(&device.facts()), at, size, beyond }
}
