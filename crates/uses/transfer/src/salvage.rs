//! Copies from a source with bad sectors: a layer that reads them as zeroes, and reads in smaller pieces afterwards.

use std::collections::VecDeque;
use std::sync::Arc;

use blockhaul_block::{
    Device, DeviceExt as _, Error, Facts, Hints, Kind, OpKind, PendingRequest, Reply, Request,
    Result as DeviceResult,
};
use blockhaul_catalog::{Layer, Stack};
use blockhaul_engine::{CopyError, CopyProgress};
use blockhaul_io::{Buf, Data, Reservation};

use crate::error::{Result, TransferError, TransferErrorKind, TransferStep};
use crate::error_map::{ErrorMap, FailedRange, FailedState};

/// Length in bytes of the pieces of the second pass.
const PIECE: u64 = 64 << 10;
/// Length in bytes of the pieces of a piece that has failed: the physical sector of most disks, which fails as a
/// whole. Single blocks of it are read only afterwards.
const SHORT_PIECE: u64 = 4 << 10;
/// Bytes of the second pass between two flushes of the target.
const FLUSH: u64 = 16 << 20;
/// Maximum number of reads of the second pass in flight, and of its writes.
const REQUESTS: usize = 16;

/// A layer over the source: what fails reads as zeroes, and is in the map.
pub(crate) struct SalvageLayer {
    pub(crate) map: Arc<ErrorMap>,
    /// The copy has a journal: what it records as copied is not read again, so the map is durable before.
    pub(crate) has_journal: bool,
}

impl Layer for SalvageLayer {
    fn wrap(&self, inner: Arc<dyn Device>) -> DeviceResult<Arc<dyn Device>> {
        let below = inner.facts();
        let kept = Hints::CLAIMS_ROOM | Hints::IN_FLIGHT | Hints::EXTENTS;
        let facts = Arc::new(Facts::over(&below).keeping(&below, kept));
        let (map, has_journal) = (self.map.clone(), self.has_journal);
        Ok(Arc::new(SalvageDevice { inner, facts, map, has_journal }))
    }
}

struct SalvageDevice {
    inner: Arc<dyn Device>,
    facts: Arc<Facts>,
    map: Arc<ErrorMap>,
    has_journal: bool,
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
        let (map, has_journal) = (self.map.clone(), self.has_journal);
        PendingRequest::start(async move {
            let outcome = pending.await;
            if is_bad_sector(&outcome) { note(map, at, len, has_journal).await } else { outcome }
        })
    }
}

/// Whether the storage failed on this range, and others may work.
fn is_bad_sector<T>(outcome: &DeviceResult<T>) -> bool {
    matches!(outcome, Err(error) if error.kind() == Kind::Io)
}

/// Adds a range to the map. With a journal, the file has the range before the target gets zeroes for it: an
/// interrupted copy does not forget it. Without one, the next run reads everything again, and the file saves it time.
async fn note(map: Arc<ErrorMap>, at: u64, len: u64, has_journal: bool) -> DeviceResult<Reply> {
    let path = map.path().display().to_string();
    let failed = |error| Error::system(format!("cannot write the error map {path}"), error);
    let number = map.add(at, len).map_err(failed)?;
    if has_journal || map.is_save_due() {
        let saved = blockhaul_io::offload(move || map.save_added(number)).await;
        saved.map_err(|lost| failed(std::io::Error::other(lost.to_string())))?.map_err(failed)?;
    }
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
        let mut steps = vec![(FailedState::Long, FailedState::Pieces, PIECE.max(block))];
        if block < SHORT_PIECE {
            // What fails again can still be divided: it stays a piece.
            steps.push((FailedState::Pieces, FailedState::Pieces, SHORT_PIECE));
        }
        steps.push((FailedState::Pieces, FailedState::Blocks, block));
        for (from, to, piece) in steps {
            let result = self.step(from, to, piece).await;
            // What was read before a failure is kept.
            let ended = self.make_durable().await;
            result.and(ended)?;
        }
        Ok(())
    }

    /// Reads all ranges of one state in pieces. Pieces that fail again get the other state.
    async fn step(&self, from: FailedState, to: FailedState, piece: u64) -> Result<()> {
        let mut pieces =
            self.map.backwards(from).into_iter().flat_map(|range| backwards(range, piece));
        let mut requests = Requests::default();
        let limit = self.reads_in_flight(piece);
        let mut unflushed = 0;
        loop {
            while requests.reads.len() < limit
                && let Some((at, len)) = pieces.next()
            {
                requests.reads.push_back(self.begin_read(at, len)?);
            }
            let Some(read) = requests.reads.pop_front() else { break };
            unflushed += read.len;
            self.end_read(read, to, &mut requests.writes).await?;
            if unflushed >= FLUSH {
                self.end_writes(&mut requests.writes, 0).await?;
                self.make_durable().await?;
                unflushed = 0;
            }
        }
        self.end_writes(&mut requests.writes, 0).await
    }

    /// Number of reads of this length that the source takes at a time.
    fn reads_in_flight(&self, piece: u64) -> usize {
        let Some(bytes) = self.source.device().facts().in_flight else { return REQUESTS };
        usize::try_from(bytes / piece).map_or(REQUESTS, |count| count.clamp(1, REQUESTS))
    }

    fn begin_read(&self, at: u64, len: u64) -> Result<PieceRequest> {
        if self.progress.is_cancelled() {
            let text = "stopped while bad sectors were read again";
            return Err(TransferError::new(TransferErrorKind::Other, TransferStep::Copy, text));
        }
        // At most a piece, which is at most the source's minimum of 64 KiB.
        let bytes = usize::try_from(len).unwrap_or(usize::MAX);
        let pending = self.source.device().submit(Request::read(at, Reservation::unpooled(bytes)));
        Ok(PieceRequest { at, len, pending })
    }

    /// Waits for a read, and begins to write its data. A piece that failed is in the map with this state.
    async fn end_read(
        &self,
        read: PieceRequest,
        failed_state: FailedState,
        writes: &mut VecDeque<PieceRequest>,
    ) -> Result<()> {
        let PieceRequest { at, len, pending } = read;
        let outcome = pending.await;
        if is_bad_sector(&outcome) {
            self.map.set(at, len, Some(failed_state));
            return Ok(());
        }
        let data = outcome.and_then(|reply| payload(reply, len));
        let data = data.map_err(|error| failed(CopyError::at_source(error)))?;
        let pending = self.target.device().submit(Request::write(at, data));
        writes.push_back(PieceRequest { at, len, pending });
        self.end_writes(writes, REQUESTS).await
    }

    /// Waits for the oldest writes until at most `left` are in flight.
    async fn end_writes(&self, writes: &mut VecDeque<PieceRequest>, left: usize) -> Result<()> {
        while writes.len() > left
            && let Some(PieceRequest { at, len, pending }) = writes.pop_front()
        {
            pending.await.map_err(|error| failed(CopyError::at_target(error)))?;
            self.map.set(at, len, None);
        }
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

/// The requests of the second pass in flight, the oldest first.
#[derive(Default)]
struct Requests {
    reads: VecDeque<PieceRequest>,
    writes: VecDeque<PieceRequest>,
}

/// A read or a write of one piece in flight.
struct PieceRequest {
    at: u64,
    len: u64,
    pending: PendingRequest,
}

/// Offsets and lengths of the pieces of a range, the last one first. They begin at multiples of `piece`.
fn backwards(range: FailedRange, piece: u64) -> impl Iterator<Item = (u64, u64)> {
    let mut end = range.at + range.len;
    std::iter::from_fn(move || {
        let last = end.checked_sub(1).filter(|last| *last >= range.at)?;
        let at = (last / piece * piece).max(range.at);
        let len = end - at;
        end = at;
        Some((at, len))
    })
}

/// The data that a read has returned; zeroes for a hole.
fn payload(reply: Reply, len: u64) -> DeviceResult<Data> {
    match reply {
        Reply::Data(data) => Ok(data),
        Reply::Hole => Ok(Data::from(Buf::unpooled(usize::try_from(len).unwrap_or(usize::MAX)))),
        _ => Err(Error::misfit()),
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
