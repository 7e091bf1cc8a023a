//! One request of a lane: read, check for zeroes, write or zero, and retry after a transient
//! failure.

use std::rc::Rc;
use std::time::Duration;

use blockhaul_block::{Can, DeviceExt, Error, Op, PendingRequest, Reply, Request, RequestFlags};
use blockhaul_io::{Data, Reservation};

use super::Lane;
use crate::error::{CopyError, Result};
use crate::flushes::FlushDoubt;
use crate::ledger::{SegmentRange, SegmentStart};
use crate::route_counters;
use crate::same_disk::Proof;
use crate::side::Side;
use crate::zeroes;

/// If zeroing took less than this, the next piece may be four times as long.
const QUICK: Duration = Duration::from_secs(1);

/// A failed request: the handle it used, and the error.
pub(super) struct RequestFailure {
    pub(super) side: Side,
    pub(super) generation: u64,
    pub(super) error: Error,
}

/// Where a request of a segment begins, and how what it reads is handled.
#[derive(Clone, Copy)]
pub(super) struct SegmentChunk {
    pub(super) home: SegmentStart,
    pub(super) at: u64,
    /// Checked for zeroes.
    pub(super) look: bool,
}

/// How the bytes of a request were handled.
#[derive(Debug, Default)]
pub(super) struct ChunkOutcome {
    data: u64,
    zeroed: u64,
    skipped: u64,
    /// Of `data`: checked for zeroes.
    seen: u64,
    /// Zeroes that were written as data.
    zeroes: u64,
}

impl Lane {
    /// Zeroes a run, which may be nearly the whole device, in pieces that grow while the target is
    /// fast: few requests are needed, and stopping the copy does not take long. `known`: the target
    /// is already zero there.
    pub(super) async fn zero_run(
        self: Rc<Self>,
        home: SegmentStart,
        (mut at, end): SegmentRange,
        known: bool,
    ) -> Result<()> {
        let known = (known || self.target_is_zero.get()) && self.trusts_zeroes();
        let mut attempts = 0;
        while at < end {
            if self.shared.stopped() {
                self.safety.ledger.borrow_mut().abandon(home);
                return Ok(());
            }
            let at_once = known && self.shared.streaming.is_none();
            let piece = self.pace.zero_piece.get();
            let part = if at_once { end - at } else { piece.min(end - at) };
            let started = blockhaul_io::now();
            let mut done = ChunkOutcome::default();
            match self.zero(home, (at, at + part), known, &mut done).await {
                Ok(()) => {
                    self.count(at, &done);
                    self.digest_zeroes(at, part).await;
                    at += part;
                    attempts = 0;
                    self.rest_in_flight().await;
                    if blockhaul_io::elapsed(started) < QUICK && part == piece {
                        self.pace.zero_piece.set(piece.saturating_mul(4));
                    }
                }
                Err(failed) => self.recover(failed, &mut attempts).await?,
            }
        }
        Ok(())
    }

    /// Adds zeroes to the digest.
    async fn digest_zeroes(&self, at: u64, len: u64) {
        let Some(streaming) = &self.shared.streaming else { return };
        if !streaming.hashes_zeroes() || len <= self.shared.resolved.request_size {
            return streaming.add(at, streaming.zeroes(at, len));
        }
        let shared = self.shared.clone();
        let hashed = blockhaul_io::offload(move || {
            shared.streaming.as_ref().map(|streaming| streaming.zeroes(at, len))
        });
        // Lost only when the program ends.
        if let Ok(Some(values)) = hashed.await {
            streaming.add(at, values);
        }
    }

    /// Makes a range of the target read as zeroes, unless it is known to do so.
    pub(super) async fn zero(
        &self,
        home: SegmentStart,
        (at, end): SegmentRange,
        known: bool,
        done: &mut ChunkOutcome,
    ) -> Result<(), RequestFailure> {
        let len = end - at;
        if known {
            done.skipped += len;
            return Ok(());
        }
        let flags = if self.shared.resolved.allocated {
            RequestFlags::NO_HOLE
        } else {
            RequestFlags::empty()
        };
        self.change(home, Request::zero(at, len).with(flags)).await?;
        done.zeroed += len;
        done.zeroes += if self.target_zeroes { 0 } else { len };
        Ok(())
    }

    /// Copies what one request reads, and repeats it after transient failures.
    pub(super) async fn chunk(
        self: Rc<Self>,
        chunk: SegmentChunk,
        room: Reservation,
    ) -> Result<()> {
        let len = room.len() as u64;
        let mut room = Some(room);
        let mut attempts = 0;
        loop {
            let mut done = ChunkOutcome::default();
            let room = match room.take() {
                Some(room) => room,
                None => self.room(len, chunk.look).await?,
            };
            match self.try_chunk(chunk, room, &mut done).await {
                Ok(()) => {
                    self.count(chunk.at, &done);
                    return Ok(());
                }
                Err(failed) => self.recover(failed, &mut attempts).await?,
            }
        }
    }

    async fn try_chunk(
        &self,
        chunk: SegmentChunk,
        room: Reservation,
        done: &mut ChunkOutcome,
    ) -> Result<(), RequestFailure> {
        let SegmentChunk { home, at, look } = chunk;
        let len = room.len() as u64;
        let data = match self.read(at, room).await? {
            Some(data) => data,
            None if self.shared.resolved.writes_holes => self.zeroes(len).await?,
            None => {
                let known = self.target_is_zero.get() && self.trusts_zeroes();
                self.zero(home, (at, at + len), known, done).await?;
                self.digest_zeroes(at, len).await;
                return Ok(());
            }
        };
        if self.shared.stopped() {
            self.safety.ledger.borrow_mut().abandon(home);
            return Ok(());
        }
        self.know_source(at, &data, look).await;
        let values = self
            .shared
            .streaming
            .as_ref()
            .map(|streaming| (streaming, streaming.values(at, data.bytes())));
        self.put(chunk, data, done).await?;
        if let Some((streaming, values)) = values {
            streaming.add(at, values);
        }
        Ok(())
    }

    /// Zeroes to write as data.
    async fn zeroes(&self, len: u64) -> Result<Data, RequestFailure> {
        let generation = self.target.generation();
        let room = self.room(len, true).await;
        let mut buf = room.map_err(|error| self.target_failed(generation, error.error))?.into_buf();
        buf.fill(0);
        Ok(buf.into())
    }

    /// Stores a block of the source, to recognize the source after a reconnect.
    async fn know_source(&self, at: u64, data: &Data, look: bool) {
        let retries = &self.shared.retries;
        if !self.source.reconnects() || !retries.wants_proof() {
            return;
        }
        if look {
            retries.keep_proof(at, data.bytes());
        } else if self.shared.resolved.sparse == 0 && self.first {
            // Otherwise the data is not inspected, and what is moved by the kernel stays there.
            let len = data.len().min(Proof::LEN);
            if let Ok(sample) = self.source.device().read(at, len).await {
                retries.keep_proof(at, sample.bytes());
            }
        }
    }

    /// Writes what was read.
    async fn put(
        &self,
        chunk: SegmentChunk,
        data: Data,
        done: &mut ChunkOutcome,
    ) -> Result<(), RequestFailure> {
        let SegmentChunk { home, at, look } = chunk;
        let len = data.len() as u64;
        if !look {
            // A lane may wait for a proof; otherwise do not hold a second reference.
            let sample = self.is_proof_due().then(|| data.clone());
            if sample.is_some()
                && let Err(error) = data.load()
            {
                let side = Side::Source;
                let generation = self.source.generation();
                let error = Error::system("cannot read what was read before", error);
                return Err(RequestFailure { side, generation, error });
            }
            self.change(home, Request::write(at, data)).await?;
            done.data += len;
            return match sample {
                Some(data) => self.offer_proof(at, &data).await,
                None => Ok(()),
            };
        }
        let runs = zeroes::runs(data.bytes(), at, self.shared.resolved.sparse);
        if let [(_, _, false)] = runs[..] {
            done.zeroes += self.zeroes_within(data.bytes());
            self.change(home, Request::write(at, data.clone())).await?;
            (done.data, done.seen) = (len, len);
            return self.offer_proof(at, &data).await;
        }
        if self.shared.resolved.sampled {
            self.shared.learned.zeroes.note(at / self.shared.resolved.segment);
        }
        self.write_runs(chunk, &data, runs, done).await?;
        self.offer_proof(at, &data).await
    }

    /// Writes data and zeroes. The parts are submitted together; all are awaited, also after an
    /// error.
    async fn write_runs(
        &self,
        SegmentChunk { home, at, .. }: SegmentChunk,
        data: &Data,
        runs: Vec<(usize, usize, bool)>,
        done: &mut ChunkOutcome,
    ) -> Result<(), RequestFailure> {
        let generation = self.target.generation();
        let mut parts = Vec::with_capacity(runs.len());
        for (start, part, zero) in runs {
            let here = at + start as u64;
            let len = part as u64;
            if zero && self.target_is_zero.get() && self.trusts_zeroes() {
                done.skipped += len;
                continue;
            }
            let request = if zero {
                Request::zero(here, len)
            } else {
                let data = data.slice(start, part);
                done.zeroes += self.zeroes_within(data.bytes());
                let op = Op::Write(data);
                Request { op, at: here, len, flags: RequestFlags::empty() }
            };
            parts.push((len, zero, self.submit_change(home, request)));
        }
        let asked = blockhaul_io::now();
        let mut result = Ok(());
        for (len, zero, pending) in parts {
            let reply = pending.await;
            self.shared.progress.meter.took(Side::Target, blockhaul_io::elapsed(asked));
            match reply {
                Ok(_) if zero => {
                    done.zeroed += len;
                    done.zeroes += if self.target_zeroes { 0 } else { len };
                }
                Ok(_) => {
                    done.data += len;
                    done.seen += len;
                }
                Err(error) => {
                    let failed = RequestFailure { side: Side::Target, generation, error };
                    result = result.and(Err(failed));
                }
            }
        }
        result
    }

    /// Reads from the source; `None`: all zero.
    pub(super) async fn read(
        &self,
        at: u64,
        room: Reservation,
    ) -> Result<Option<Data>, RequestFailure> {
        let generation = self.source.generation();
        let asked = blockhaul_io::now();
        let reply = self.source.device().submit(Request::read(at, room)).await;
        self.shared.progress.meter.took(Side::Source, blockhaul_io::elapsed(asked));
        match reply {
            Ok(Reply::Data(data)) => Ok(Some(data)),
            Ok(_) => Ok(None),
            Err(error) => Err(RequestFailure { side: Side::Source, generation, error }),
        }
    }

    /// Submits a request that changes the target.
    pub(super) async fn change(
        &self,
        home: SegmentStart,
        request: Request,
    ) -> Result<(), RequestFailure> {
        let generation = self.target.generation();
        let asked = blockhaul_io::now();
        let reply = self.submit_change(home, request).await;
        self.shared.progress.meter.took(Side::Target, blockhaul_io::elapsed(asked));
        match reply {
            Ok(_) => Ok(()),
            Err(error) => Err(RequestFailure { side: Side::Target, generation, error }),
        }
    }

    fn submit_change(&self, home: SegmentStart, request: Request) -> PendingRequest {
        self.note_doubts();
        if let Op::Write(_) = request.op {
            self.safety.ledger.borrow_mut().wrote_content(home);
        }
        self.target.device().submit(request)
    }

    /// A failed request to the target that is not a lost connection or a failed flush.
    pub(super) fn target_failed(&self, generation: u64, error: Error) -> RequestFailure {
        RequestFailure { side: Side::Target, generation, error }
    }

    /// Waits until a failed request can be retried; an error if it cannot.
    pub(super) async fn recover(&self, failed: RequestFailure, attempts: &mut u32) -> Result<()> {
        let RequestFailure { side, generation, error } = failed;
        let end = if side == Side::Source { &self.source } else { &self.target };
        // Boxed, to keep it out of the future of each request, which seldom needs it.
        let recovered = Box::pin(end.recover(error, generation, attempts)).await;
        self.note_doubts();
        self.rest_in_flight().await;
        recovered
    }

    /// Counts what was done from `at` on.
    pub(super) fn count(&self, at: u64, done: &ChunkOutcome) {
        let progress = &self.shared.progress;
        progress.add_data(at, done.data);
        progress.add_zeroed(at + done.data, done.zeroed);
        progress.add_skipped(at + done.data + done.zeroed, done.skipped);
        route_counters::add(&self.shared.progress.counters.seen, done.seen);
        route_counters::add(&self.shared.progress.counters.zeroes_written, done.zeroes);
    }

    /// Bytes in blocks of zeroes that are too short to be zeroed.
    fn zeroes_within(&self, bytes: &[u8]) -> u64 {
        if self.shared.resolved.sparse > zeroes::BLOCK as u32 { zeroes::count(bytes) } else { 0 }
    }

    fn is_proof_due(&self) -> bool {
        self.first && self.shared.learned.same_disk.wanted() && self.proof_due.get()
    }

    /// Publishes the first written block with content, to verify further lanes with.
    async fn offer_proof(&self, at: u64, data: &Data) -> Result<(), RequestFailure> {
        if !self.is_proof_due() {
            return Ok(());
        }
        let Some(proof) = Proof::of(at, data.bytes()) else { return Ok(()) };
        self.proof_due.set(false);
        if self.target.facts().can.contains(Can::FLUSH) {
            let generation = self.target.generation();
            if let Err(FlushDoubt::Failed { error, last }) = self.flush().await {
                self.proof_due.set(true);
                let error = self.not_durable(error);
                if last {
                    self.shared.fail(CopyError::at_target(error.clone()));
                }
                return Err(self.target_failed(generation, error));
            }
        }
        self.shared.learned.same_disk.settle(Some(proof));
        Ok(())
    }
}
