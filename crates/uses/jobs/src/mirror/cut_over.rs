//! The end of a mirror: clients wait for the last round, and move to the target.

use std::pin::{Pin, pin};
use std::sync::Arc;
use std::time::{Duration, Instant};

use blockhaul_block::{Device, Error, Facts, Kind, Result};
use blockhaul_catalog::{AdjustableLayer, Barrier, PROVIDED, Stack};
use blockhaul_engine::{CopyError, Engine, EngineControl};
use serde_json::json;

use super::rounds::before;
use super::{Mirror, MirrorCompletion};
use crate::error::JobError;
use crate::export::OpenExport;

/// The device that clients move to.
pub(super) struct Destination {
    pub(super) stack: Stack,
    /// Its layers that users see.
    layers: Vec<Arc<AdjustableLayer>>,
}

/// The result of an attempt to move the clients.
#[derive(Clone, Copy, PartialEq, Eq)]
enum CutOverResult {
    Done,
    /// The attempt is to be repeated.
    Postponed,
    /// The attempt is to be repeated, and the last round has begun and not ended.
    Unfinished,
}

impl Mirror {
    /// The target for clients: its errors must not make them wait, neither now nor when they have
    /// moved there, and it has the size of the export.
    pub(super) async fn destination(&self, target: &Stack) -> Result<Destination> {
        let mut stack = target.clone();
        if self.errors_wait {
            stack = stack.without_layer(target.layer_count() - 1).await?;
        }
        let mut layers = Vec::new();
        if stack.device().facts().size > self.size {
            let layer = self.table.first_bytes(self.size)?;
            if let Some(layer) = layer.layer() {
                stack = stack.with_layer(layer.clone()).await?;
            }
            layers.push(Arc::new(layer));
        }
        Ok(Destination { stack, layers })
    }

    /// The end: clients wait for the last round and a flush. False: it is to be tried again.
    ///
    /// A round that clients cannot wait for continues after they are released, like any other round:
    /// what they write meanwhile is copied again.
    pub(super) async fn cut_over(
        &self,
        engine: &mut Engine,
        control: &EngineControl,
        clients: &Destination,
        completion: MirrorCompletion,
    ) -> Result<bool, CopyError> {
        if self.predicted() > completion.within {
            return Ok(false);
        }
        let mut round = pin!(self.last_round(engine, clients.stack.device()));
        let moved = self.move_clients(round.as_mut(), control, clients, completion).await?;
        if moved == CutOverResult::Unfinished {
            round.await?;
        }
        Ok(moved == CutOverResult::Done)
    }

    /// Holds the clients while the last round ends, and moves them.
    async fn move_clients(
        &self,
        mut round: Pin<&mut impl Future<Output = Result<(), CopyError>>>,
        control: &EngineControl,
        clients: &Destination,
        completion: MirrorCompletion,
    ) -> Result<CutOverResult, CopyError> {
        let _change = self.table.change().await;
        let refused = |failure: JobError| Error::new(Kind::Refused, failure.to_string());
        let Some(export) = self.export.upgrade() else { return Err(no_export().into()) };
        let (shared, stack) = self.table.changeable(&export).map_err(refused)?;
        let next = if completion.switch { clients.stack.clone() } else { stack };
        self.stop_marking(&export);
        let new = match self.table.client_device(&export, &next).await {
            Ok(new) => new,
            Err(failure) => {
                self.resume_marking(&export);
                return Err(refused(failure).into());
            }
        };
        let started = blockhaul_io::now();
        let mut is_unfinished = false;
        let mut side = None;
        let last = async || {
            if completion.switch && !export.served {
                // Its first clients may have come since the mirror began.
                self.check_fits(clients.stack.device())?;
            }
            let left = completion.within.saturating_sub(blockhaul_io::elapsed(started));
            self.begin_last_round(control, left)?;
            let until = blockhaul_io::now() + left;
            let Some(copied) = before(round.as_mut(), self.released(until)).await else {
                is_unfinished = true;
                let text = "the last round did not end while clients could wait for it";
                return Err(Error::new(Kind::TimedOut, text));
            };
            copied.map_err(|failed| {
                side = failed.side;
                failed.error
            })?;
            if completion.switch { self.note_move().await } else { Ok(()) }
        };
        let swapped = shared.switch().swap(new, Barrier::Within(completion.within), last).await;
        control.ignore_rate(false);
        let mut state = self.lock();
        state.cutting_over = false;
        let Err(error) = swapped else {
            state.downtime = Some(blockhaul_io::elapsed(started));
            if completion.switch {
                let shown = format!(", with --layer 'offset?range={}'", self.size);
                let keeps_size = if clients.layers.is_empty() { "" } else { &shown };
                log::info!(export = export.name; "clients of {:?} are on {} now: update the command line of the server: it must name {}{keeps_size}", export.name, self.target, self.target);
                let mut layers = export.layers.lock().expect("no panic under this lock");
                // Gates stay.
                layers.retain(|one| one.layer().is_none());
                layers.extend(clients.layers.iter().cloned());
                let mut stack = export.stack.lock().expect("no panic under this lock");
                let mut storage = export.storage.lock().expect("no panic under this lock");
                let before = std::mem::replace(&mut *storage, self.target.clone());
                let former = stack.replace(next).map(|stack| (stack, before));
                state.former = former.filter(|_| self.is_to_node);
                if !self.is_to_node {
                    // The bitmaps of the old image stay in use: they lack what is written from now on.
                    *export.bitmap_store.lock().expect("no panic under this lock") = None;
                    export.claims.hand_over(&self.target_owner, &export.owner);
                }
            }
            return Ok(CutOverResult::Done);
        };
        // The layers that mark are still there.
        self.resume_marking(&export);
        if error.kind() != Kind::TimedOut {
            return Err(CopyError { side, error });
        }
        log::info!(export = export.name; "the mirror is not completed yet: {error}");
        state.postponed = Some(error.to_string());
        Ok(if is_unfinished { CutOverResult::Unfinished } else { CutOverResult::Postponed })
    }

    /// Refuses a device that clients could not move to. A disk of the monitor protocol may have none.
    pub(super) fn check_fits(&self, target: &Arc<dyn Device>) -> Result<()> {
        let Some(export) = self.export.upgrade() else { return Err(no_export()) };
        let Some(device) = export.device() else { return Ok(()) };
        let from = device.facts();
        let to = target.facts();
        let handles = export.shared.as_ref().map_or(0, |shared| shared.switch().handles());
        let has_clients = export.served || handles > 0;
        let what = too_small(&from, &to).or_else(|| missing(&from, &to).filter(|_| has_clients));
        what.map_or(Ok(()), |what| {
            let text = format!("clients of the export could not move to it: {what}");
            Err(Error::new(Kind::Unsupported, text).on(&to.name))
        })
    }

    /// The next device for clients marks nothing for this mirror.
    fn stop_marking(&self, export: &OpenExport) {
        *export.mirrored() = None;
        if let Some((_, map)) = &self.record {
            export.maps().retain(|other| !other.is_same(map));
        }
    }

    /// The device that clients keep marks again what they write for this mirror.
    fn resume_marking(&self, export: &OpenExport) {
        *export.mirrored() = Some(self.changes.clone());
        export.maps().extend(self.record.iter().map(|(_, map)| map.clone()));
    }

    /// Clients are about to move: a later server must not copy the old device onto the new one again.
    async fn note_move(&self) -> Result<()> {
        let Some((record, _)) = self.record.clone() else { return Ok(()) };
        record.note(json!({ "moved": true }));
        let noted = blockhaul_io::offload(move || record.commit()).await;
        let noted = noted.map_err(|lost| Error::new(Kind::Io, lost.to_string()))?;
        noted.map_err(|failure| Error::new(Kind::Io, failure.to_string()))
    }

    /// Refuses a last round that would not end in this time. Once it begins, nobody waits for the rate: it
    /// copies no more than the rate would admit in this time.
    fn begin_last_round(&self, control: &EngineControl, left: Duration) -> Result<()> {
        self.lock().cutting_over = true;
        let too_late = |why: &'static str| Err(Error::new(Kind::TimedOut, why));
        if control.is_paused() {
            return too_late("it is paused");
        }
        let (limit, _) = control.rate_limits();
        let limited =
            self.changed_bytes().checked_div(limit).map_or(Duration::ZERO, Duration::from_secs);
        if self.predicted().max(limited) > left {
            return too_late("clients would wait too long for what has changed");
        }
        control.ignore_rate(true);
        Ok(())
    }

    /// Returns at this time, or once clients need not wait any more: the job has met an error, or is
    /// cancelled.
    async fn released(&self, until: Instant) {
        loop {
            let changed = self.changes.listen();
            let left = until.saturating_duration_since(blockhaul_io::now());
            if !self.is_cutting_over() || self.progress.is_cancelled() || left.is_zero() {
                return;
            }
            let _ = blockhaul_io::timeout(left, changed).await;
        }
    }

    /// A request of the job has failed and will be repeated: clients do not wait for that.
    pub(crate) fn release_clients(&self) {
        let mut state = self.lock();
        state.cutting_over = false;
        state.failures += 1;
        drop(state);
        self.changes.wake();
    }
}

/// The export of a mirror is not there any more.
fn no_export() -> Error {
    Error::new(Kind::Refused, "the export was removed").complete()
}

/// Why a device cannot take the place of another one, whoever uses it.
fn too_small(from: &Facts, to: &Facts) -> Option<String> {
    if to.size < from.size {
        return Some(format!("it has {} bytes, the export has {}", to.size, from.size));
    }
    (to.block.minimum > from.block.minimum).then(|| {
        format!(
            "its blocks have {} bytes, those of the export {}",
            to.block.minimum, from.block.minimum
        )
    })
}

/// The abilities that clients of one device would miss at another one.
fn missing(from: &Facts, to: &Facts) -> Option<String> {
    let lacks = from.can.difference(to.can | PROVIDED);
    let names: Vec<_> = lacks.iter_names().map(|(name, _)| name.to_lowercase()).collect();
    (!names.is_empty())
        .then(|| format!("it does not support {}", names.join(", ").replace('_', "-")))
}
