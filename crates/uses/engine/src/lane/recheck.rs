//! The end of a lane: makes its writes durable, and rechecks those that may be lost.
//!
//! A lost connection loses the replies to writes in flight, which its server may still carry out,
//! and perhaps unflushed writes. Once a new connection is made and everything else is written,
//! those segments are read back and compared with the source; where reading back proves too little,
//! they are written again. So are all segments without a flush when a flush failed, on any lane
//! (`flushes`).

use std::rc::Rc;
use std::sync::atomic::Ordering;

use blockhaul_block::{Can, Error, Kind, Reply, Request};
use blockhaul_io::{Data, Reservation, is_zero};

use super::Lane;
use super::chunk::{ChunkOutcome, RequestFailure};
use crate::error::{CopyError, Result};
use crate::flushes::FlushDoubt;
use crate::handle::is_lost;
use crate::journal::Journal;
use crate::ledger::{SegmentRange, SegmentStart, SuspectSegment};
use crate::marker::{JournalPosition, MarkerStage};
use crate::orders::EndAction;
use crate::side::Side;

/// How often a lane writes again what a failed flush may have lost. That helps if the storage
/// remaps bad sectors or the failure was transient; hardly a third time.
const REWRITES_MAX: u32 = 2;

/// The result of a flush.
struct FlushResult {
    /// All earlier writes are durable.
    covers: bool,
    /// The last storage failure before it succeeded.
    failed: Option<Error>,
}

impl Lane {
    /// Updates the ledger if the target's connection is a new one, or if flushes have failed.
    pub(super) fn note_doubts(&self) {
        let generation = self.target.generation();
        let mut ledger = self.safety.ledger.borrow_mut();
        ledger.flushes_failed(self.shared.durability.flushes.failures());
        if generation == ledger.generation() {
            return;
        }
        if self.shared.learned.one_disk.load(Ordering::Relaxed) {
            ledger.forget_safe();
        }
        if self.shared.resolved.discard_source && ledger.relies_on_connection() {
            self.shared.fail(CopyError::at_target(self.lost_for_good()));
        }
        // Flushing the new connection covers writes of the old one only if that is promised.
        let promised = self.target.facts().can.contains(Can::MULTI_CONN);
        ledger.connected(generation, self.durable() && !promised);
    }

    /// Whether zeroes that the target contained or reported are still there and become durable with
    /// a flush. Not after a lost connection, when another server may show older data; nor after a
    /// failed flush, when they may be in memory only.
    pub(super) fn trusts_zeroes(&self) -> bool {
        self.safety.ledger.borrow().failures() == 0 && !self.shared.retries.lost_target()
    }

    /// Whether what is written must be durable.
    fn durable(&self) -> bool {
        (self.shared.resolved.flush || self.shared.keeps_track()) && self.can_flush()
    }

    fn can_flush(&self) -> bool {
        self.target.facts().can.contains(Can::FLUSH)
    }

    /// Starts the timer that flushes finished segments, and records or discards them.
    pub(super) fn arm(self: &Rc<Self>) {
        let Some(interval) = self.shared.flushes_every() else { return };
        if self.safety.ending.get() || self.safety.armed.replace(true) {
            return;
        }
        let lane = self.clone();
        let due = blockhaul_io::now() + interval;
        drop(blockhaul_io::spawn(async move {
            loop {
                let mark = lane.load.changed.mark();
                let left = due.saturating_duration_since(blockhaul_io::now());
                if left.is_zero() || lane.safety.ending.get() {
                    break;
                }
                let _ = blockhaul_io::timeout(left, lane.load.changed.wait_after(mark)).await;
            }
            if !lane.safety.ending.get()
                && let Err(error) = lane.make_safe(&mut 0).await
            {
                lane.shared.fail(error);
            }
            lane.safety.armed.set(false);
            lane.load.changed.notify();
            if lane.safety.ledger.borrow().has_finished() {
                lane.arm();
            }
        }));
    }

    /// After the last segment: rechecks until nothing is suspect, and flushes if `ending` asks for
    /// it or nothing less is reliable.
    pub(super) async fn conclude(self: &Rc<Self>, ending: EndAction) -> Result<()> {
        let must_last = match ending {
            EndAction::Round => false,
            EndAction::Flush => self.can_flush(),
            EndAction::Copy => self.durable(),
        };
        let mut attempts = 0;
        let mut rounds = 0;
        let mut rewrites = 0;
        loop {
            if self.shared.stopped() {
                // Record what is finished; the copy has failed in any case.
                let durability = &self.shared.durability;
                if (durability.journal.is_some() || durability.listener.is_some())
                    && self.safety.ledger.borrow().has_finished()
                {
                    let _ = self.make_safe(&mut attempts).await;
                }
                return Ok(());
            }
            self.note_doubts();
            let suspects = self.safety.ledger.borrow().suspects() > 0;
            let doubtful = suspects || self.safety.ledger.borrow().failures() > 0;
            let flush =
                self.safety.unflushed.get() && (must_last || (doubtful && self.can_flush()));
            let durability = &self.shared.durability;
            let reports = durability.listener.is_some() && ending != EndAction::Round;
            let records = durability.journal.is_some() || reports;
            if flush || (records && self.safety.ledger.borrow().has_finished()) {
                let flushed = self.make_safe(&mut attempts).await?;
                // No request was in flight.
                self.safety.unflushed.set(!flushed.covers);
                rewrites += u32::from(flushed.failed.is_some());
                if let Some(error) = flushed.failed.filter(|_| rewrites > REWRITES_MAX) {
                    return Err(CopyError::at_target(error));
                }
            }
            self.safety.ledger.borrow_mut().join_suspects();
            let suspects = self.safety.ledger.borrow().suspects();
            if suspects == 0 {
                // A lane that ends without a flush does not repeat writes that a later failure
                // concerns.
                let unproven = ending == EndAction::Copy
                    && self.safety.unflushed.get()
                    && !self.shared.durability.flushes.leave()
                    && self.can_flush();
                if unproven {
                    continue;
                }
                return Ok(());
            }
            rounds += 1;
            if rounds > self.shared.retries.limit().saturating_add(1) {
                if let Some(error) = self.shared.durability.flushes.error() {
                    return Err(CopyError::at_target(self.not_durable(error)));
                }
                let text = "the connection to the target was lost repeatedly, and it is unknown which \
                            writes have succeeded";
                let error = Error::new(Kind::Disconnected, text).on(&self.target.facts().name);
                return Err(CopyError::at_target(error));
            }
            for _ in 0..suspects {
                let next = self.safety.ledger.borrow_mut().next_suspect();
                let Some(suspect) = next else { break };
                self.recheck(suspect).await;
            }
            self.drained().await;
        }
    }

    /// Flushes the target, records what is durable, and discards it at the source, as the options
    /// say. After a failed flush, the unflushed segments
    /// of all lanes are suspect; the flush that follows only finds out whether writing again makes
    /// sense. If not, the error ends the copy.
    async fn make_safe(&self, attempts: &mut u32) -> Result<FlushResult> {
        let mut failed = None;
        loop {
            self.note_doubts();
            let generation = self.target.generation();
            let batch = self.safety.ledger.borrow_mut().take_finished();
            let flushed = if self.can_flush() { self.flush().await } else { Ok(()) };
            match flushed {
                Ok(()) => {
                    if let Some(marker) = self.shared.retries.marker().filter(|_| !batch.is_empty())
                    {
                        self.check_side(marker, Side::Source).await?;
                    }
                    let safe = self.safety.ledger.borrow_mut().flushed(&batch, generation);
                    // Without the source it could not be checked.
                    if safe && let Some(listener) = &self.shared.durability.listener {
                        (listener.0)(&batch);
                    }
                    if safe || !self.shared.resolved.discard_source {
                        self.record_and_discard(batch, generation).await?;
                    }
                    return Ok(FlushResult { covers: true, failed });
                }
                Err(FlushDoubt::Overlapped) => {
                    self.safety.ledger.borrow_mut().doubt(batch, true);
                    return Ok(FlushResult { covers: false, failed });
                }
                Err(FlushDoubt::Failed { error, last }) => {
                    self.safety.ledger.borrow_mut().doubt(batch, true);
                    let error = self.not_durable(error);
                    if last {
                        return Err(CopyError::at_target(error));
                    }
                    if !is_lost(&error) {
                        failed = Some(error.clone());
                    }
                    self.recover(self.target_failed(generation, error), attempts).await?;
                }
            }
        }
    }

    /// Flushes the target.
    pub(super) async fn flush(&self) -> Result<(), FlushDoubt> {
        let failures = self.safety.ledger.borrow().failures();
        let flush = self.target.device().submit(Request::flush());
        self.shared.durability.flushes.run(failures, flush, is_lost).await
    }

    /// The error of a flush, with its meaning and a remedy.
    pub(super) fn not_durable(&self, error: Error) -> Error {
        if is_lost(&error) {
            return error;
        }
        let error = error.on(&self.target.facts().name);
        if self.target.facts().flush_publishes {
            // The flush writes nothing but the target as a whole, and the target knows why it cannot.
            return error.or_remedy("copy again");
        }
        error.with_remedy(
            "what was written since the last successful flush may be missing, even where it can still be \
             read: check the target's storage, then copy again",
        )
    }

    /// Records what is durable, where a marker says so before and after ([`crate::marker`]), and discards it at the
    /// source. It was flushed over the connection of this generation.
    async fn record_and_discard(&self, batch: Vec<SegmentRange>, generation: u64) -> Result<()> {
        let journal = self.shared.durability.journal.as_ref().map(|journal| &journal.file);
        let next = journal.map_or(0, Journal::next_batch);
        let Some(marker) = self.shared.retries.marker().filter(|_| !batch.is_empty()) else {
            let recorded = self.record(batch, next).await;
            self.discard(recorded).await;
            return Ok(());
        };
        let turn = marker.turn().await;
        let position = || journal.map(Journal::position).unwrap_or_default();
        let intent = JournalPosition { next, ..position() };
        if self.raise_marker(marker, intent).await? != generation {
            self.safety.ledger.borrow_mut().doubt(batch, true);
            return Ok(());
        }
        if marker.stage() > MarkerStage::Placed && marker.may_follow() {
            self.shared.progress.add_kept(self.keep_last(marker, &batch));
            return Ok(());
        }
        let recorded = self.record(batch, next).await;
        if journal.is_some() && !recorded.is_empty() {
            self.raise_marker(marker, position()).await?;
        }
        drop(turn);
        self.discard(recorded).await;
        Ok(())
    }

    /// Records what is durable, as a batch with this number. Returns the ranges that a copy that goes on later
    /// does not read: all of them without a journal, else those of recorded segments.
    async fn record(&self, batch: Vec<SegmentRange>, number: u32) -> Vec<SegmentRange> {
        let Some(journal) = &self.shared.durability.journal else { return batch };
        let mut ranges = Vec::new();
        let segments = {
            let mut ledger = self.safety.ledger.borrow_mut();
            let mut parts = journal.parts.lock().expect("no panic under this lock");
            let mut segments = Vec::new();
            for range in batch {
                let content = ledger.take_content(SegmentStart::at(range.0));
                let durable = parts.durable(range, &mut ranges).into_iter();
                segments.extend(durable.map(|(first, behind)| (first, behind, content)));
            }
            segments
        };
        match journal.file.append((self.number, number), segments).await {
            Ok(()) => ranges,
            Err(why) => {
                self.lacks_journal(&why);
                Vec::new()
            }
        }
    }

    /// Warns that the journal cannot be written any more.
    pub(super) fn lacks_journal(&self, why: &str) {
        self.shared.warn(format!(
            "cannot write the journal ({why}): continuing without it; a killed copy repeats everything \
             since then"
        ));
    }

    /// Rechecks a segment.
    pub(crate) async fn recheck(self: &Rc<Self>, suspect: SuspectSegment) {
        let (start, end) = suspect.range;
        let home = SegmentStart::at(start);
        let failures = self.safety.ledger.borrow().failures();
        self.begin(suspect.range);
        // Failures since the segment was taken from the ledger concern it, too.
        let again = suspect.again || self.safety.ledger.borrow().failures() != failures;
        let sooner = again || self.target_zeroes;
        if end - start > self.shared.resolved.segment && sooner {
            // Only zeroes have such lengths: zeroing again is faster than checking, unless the
            // zeroes would have to be sent.
            self.turn(0).await;
            self.shared.retries.rewritten.fetch_add(end - start, Ordering::Relaxed);
            self.start(home, 0, move |lane| lane.zero_again(suspect.range));
            return self.complete(home);
        }
        let size = self.shared.resolved.request_size;
        let mut at = start;
        while at < end {
            if self.shared.signals.any() {
                self.attend(None).await;
            }
            let len = (size - at % size).min(end - at);
            self.turn(len).await;
            if self.shared.stopped() {
                return;
            }
            match self.room(len, true).await {
                Ok(room) => {
                    self.start(home, len, move |lane| lane.recheck_chunk(home, at, room, again));
                }
                Err(error) => {
                    self.shared.fail(error);
                    return;
                }
            }
            at += len;
        }
        self.complete(home);
    }

    async fn zero_again(self: Rc<Self>, range: SegmentRange) -> Result<()> {
        let home = SegmentStart::at(range.0);
        let mut attempts = 0;
        loop {
            match self.zero(home, range, false, &mut ChunkOutcome::default()).await {
                Ok(()) => return Ok(()),
                Err(failed) => self.recover(failed, &mut attempts).await?,
            }
        }
    }

    async fn recheck_chunk(
        self: Rc<Self>,
        home: SegmentStart,
        at: u64,
        room: Reservation,
        again: bool,
    ) -> Result<()> {
        let len = room.len() as u64;
        let mut room = Some(room);
        let mut attempts = 0;
        loop {
            let room = match room.take() {
                Some(room) => room,
                None => self.room(len, true).await?,
            };
            match self.try_recheck(home, at, room, again).await {
                Ok(()) => return Ok(()),
                Err(failed) => self.recover(failed, &mut attempts).await?,
            }
        }
    }

    async fn try_recheck(
        &self,
        home: SegmentStart,
        at: u64,
        room: Reservation,
        again: bool,
    ) -> Result<(), RequestFailure> {
        let len = room.len() as u64;
        let data = self.read(at, room).await?;
        let counts = &self.shared.retries;
        if !again {
            counts.checked.fetch_add(len, Ordering::Relaxed);
            if self.holds(at, len, data.as_ref()).await? {
                return Ok(());
            }
        }
        counts.rewritten.fetch_add(len, Ordering::Relaxed);
        let zero = data.as_ref().is_none_or(|data| is_zero(data.bytes()));
        match data {
            Some(data) if !zero => self.change(home, Request::write(at, data)).await,
            // Also if the target was zero before: it may have changed.
            _ => self.zero(home, (at, at + len), false, &mut ChunkOutcome::default()).await,
        }
    }

    /// Whether the target contains this data.
    async fn holds(&self, at: u64, len: u64, data: Option<&Data>) -> Result<bool, RequestFailure> {
        let generation = self.target.generation();
        let room = self.shared.memory.checks.reserve(len as usize).await.map_err(|error| {
            let error = Error::new(Kind::TooLarge, "no buffer to read back").because(error);
            self.target_failed(generation, error)
        })?;
        match (self.target.device().submit(Request::read(at, room)).await, data) {
            (Ok(Reply::Data(held)), Some(data)) => Ok(held.bytes() == data.bytes()),
            (Ok(Reply::Data(held)), None) => Ok(is_zero(held.bytes())),
            (Ok(_), Some(data)) => Ok(is_zero(data.bytes())),
            (Ok(_), None) => Ok(true),
            (Err(error), _) => Err(self.target_failed(generation, error)),
        }
    }
}
