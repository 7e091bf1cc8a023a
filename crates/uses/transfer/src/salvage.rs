//! Copies from a source with bad sectors: a layer that reads them as zeroes, and reads in smaller pieces afterwards.

use std::sync::Arc;

use blockhaul_block::{
    Device, DeviceExt as _, Error, Facts, Hints, Kind, OpKind, PendingRequest, Reply, Request,
    Result as DeviceResult,
};
use blockhaul_catalog::{Layer, Stack};
use blockhaul_engine::{CopyError, CopyProgress};

use crate::error::{Result, TransferError, TransferErrorKind, TransferStep};
use crate::error_map::{ErrorMap, FailedRange, FailedState};

/// Length in bytes of the pieces of the second pass.
const PIECE: u64 = 64 << 10;
/// Bytes of the second pass between two flushes of the target.
const FLUSH: u64 = 16 << 20;

/// A layer over the source: what fails reads as zeroes, and is in the map.
pub(crate) struct SalvageLayer(pub(crate) Arc<ErrorMap>);

impl Layer for SalvageLayer {
    fn wrap(&self, inner: Arc<dyn Device>) -> DeviceResult<Arc<dyn Device>> {
        let below = inner.facts();
        let kept = Hints::CLAIMS_ROOM | Hints::IN_FLIGHT | Hints::EXTENTS;
        let facts = Arc::new(Facts::over(&below).keeping(&below, kept));
        Ok(Arc::new(SalvageDevice { inner, facts, map: self.0.clone() }))
    }
}

struct SalvageDevice {
    inner: Arc<dyn Device>,
    facts: Arc<Facts>,
    map: Arc<ErrorMap>,
}

impl Device for SalvageDevice {
    fn facts(&self) -> Arc<Facts> {
        self.facts.clone()
    }

    fn submit(&self, request: Request) -> PendingRequest {
        if request.kind() != OpKind::Read {
            return self.inner.submit(request);
        }
        let (at, len) = (request.at, request.len);
        if self.map.covers(at, len) {
            return PendingRequest::ready(Ok(Reply::Hole));
        }
        let pending = match self.inner.submit(request).now() {
            Ok(outcome) if !is_bad_sector(&outcome) => return PendingRequest::ready(outcome),
            Ok(outcome) => PendingRequest::ready(outcome),
            Err(pending) => pending,
        };
        let map = self.map.clone();
        PendingRequest::start(async move {
            let outcome = pending.await;
            if is_bad_sector(&outcome) { note(map, at, len).await } else { outcome }
        })
    }
}

/// Whether the storage failed on this range, and others may work.
fn is_bad_sector<T>(outcome: &DeviceResult<T>) -> bool {
    matches!(outcome, Err(error) if error.kind() == Kind::Io)
}

/// Adds a range to the file before the target gets zeroes for it: an interrupted copy does not forget it.
async fn note(map: Arc<ErrorMap>, at: u64, len: u64) -> DeviceResult<Reply> {
    let path = map.path().display().to_string();
    let noted = move || map.add(at, len).and_then(|()| map.save());
    let noted = blockhaul_io::offload(noted).await;
    let failed = |error| Error::system(format!("cannot write the error map {path}"), error);
    noted.map_err(|lost| failed(std::io::Error::other(lost.to_string())))?.map_err(failed)?;
    Ok(Reply::Hole)
}

/// The second pass: reads what has failed, from the end of the disk to its beginning, in smaller pieces, and
/// then block by block. The target keeps what fails again.
pub(crate) struct SecondPass<'a> {
    /// Without the layer that reads bad sectors as zeroes.
    pub(crate) source: &'a Stack,
    pub(crate) target: &'a Stack,
    pub(crate) map: &'a Arc<ErrorMap>,
    pub(crate) progress: &'a CopyProgress,
}

impl SecondPass<'_> {
    /// Runs the pass.
    ///
    /// # Errors
    /// If a connection is lost, the target or the map cannot be written, or the copy is cancelled.
    pub(crate) async fn run(&self) -> Result<()> {
        self.map.reopen_blocks();
        let block = u64::from(self.source.device().facts().block.minimum.max(512));
        let block = block.max(self.target.device().facts().block.minimum.into());
        let piece = PIECE.max(block);
        let steps = [
            (FailedState::Long, FailedState::Pieces, piece),
            (FailedState::Pieces, FailedState::Blocks, block),
        ];
        for (from, to, piece) in steps {
            let result = self.step(from, to, piece).await;
            // What was read before a failure is kept.
            let ended = self.make_durable().await;
            result.and(ended)?;
        }
        Ok(())
    }

    async fn step(&self, from: FailedState, to: FailedState, piece: u64) -> Result<()> {
        let mut unflushed = 0;
        for range in self.map.backwards(from) {
            let mut end = range.at + range.len;
            while end > range.at {
                let at = ((end - 1) / piece * piece).max(range.at);
                self.read(FailedRange { at, len: end - at, state: to }).await?;
                unflushed += end - at;
                end = at;
                if unflushed >= FLUSH {
                    self.make_durable().await?;
                    unflushed = 0;
                }
            }
        }
        Ok(())
    }

    /// Copies one piece, or leaves it in the map with its state.
    async fn read(&self, piece: FailedRange) -> Result<()> {
        let FailedRange { at, len, state } = piece;
        if self.progress.is_cancelled() {
            let text = "stopped while bad sectors were read again";
            return Err(TransferError::new(TransferErrorKind::Other, TransferStep::Copy, text));
        }
        // At most a piece, which is at most the source's minimum of 64 KiB.
        let bytes = usize::try_from(len).unwrap_or(usize::MAX);
        let outcome = self.source.device().read(at, bytes).await;
        if is_bad_sector(&outcome) {
            self.map.set(at, len, Some(state));
            return Ok(());
        }
        let data = outcome.map_err(|error| failed(CopyError::at_source(error)))?;
        let written = self.target.device().write(at, data).await;
        written.map_err(|error| failed(CopyError::at_target(error)))?;
        self.map.set(at, len, None);
        Ok(())
    }

    /// Flushes the target, and then writes the map.
    async fn make_durable(&self) -> Result<()> {
        let target = self.target.device();
        if target.facts().can.contains(blockhaul_block::Can::FLUSH) {
            target.flush().await.map_err(|error| failed(CopyError::at_target(error)))?;
        }
        save(self.map.clone()).await
    }
}

/// Writes the map, away from the workers.
pub(crate) async fn save(map: Arc<ErrorMap>) -> Result<()> {
    let saved = blockhaul_io::offload(move || map.saved()).await;
    saved.unwrap_or_else(|lost| {
        let kind = TransferErrorKind::Other;
        Err(TransferError::new(kind, TransferStep::Copy, lost.to_string()))
    })
}

fn failed(error: CopyError) -> TransferError {
    TransferError::engine(TransferStep::Copy, error)
}
