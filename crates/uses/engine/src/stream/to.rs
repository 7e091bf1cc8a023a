//! To a pipe: data is read ahead, and written in order.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;

use blockhaul_block::{Error, Kind, Reply, Request};
use blockhaul_catalog::Stack;
use blockhaul_io::{Data, File, Pool, Reservation, Task};

use super::room::room_now;
use super::summary::PipeCopyEnd;
use crate::algorithm::Hasher;
use crate::error::{CopyError, Result};
use crate::handle::{ReconnectingHandle, RetryControl};
use crate::options::{CopySummary, EngineOptions};
use crate::progress::CopyProgress;
use crate::resolved::EffectiveOptions;
use crate::segment::SegmentRun;
use crate::segment_maker::{SegmentSettings, make};
use crate::segment_queue::SegmentQueue;
use crate::selection::Selection;
use crate::side::Side;

/// Copies all of `source` to `fd`, in order, zeroes as zeroes.
///
/// # Errors
/// If a read or the pipe fails; [`Kind::ShuttingDown`] after a cancel.
pub async fn copy_to_pipe(
    source: &Stack,
    fd: OwnedFd,
    options: &EngineOptions,
    pool: &Pool,
    progress: &Arc<CopyProgress>,
) -> Result<CopySummary> {
    let started = blockhaul_io::now();
    let device = source.device();
    let facts = device.facts();
    let selection = Selection::new(options, &facts, facts.block.minimum)?;
    if options.bitmap.is_some() {
        let text = "ranges cannot be left out in a pipe: use a device as the target";
        return Err(Error::new(Kind::Invalid, text).into());
    }
    let size = selection.total();
    progress.set_total(size);
    progress.set_disk_size(facts.size);
    let resolved = EffectiveOptions::new(options, device, device, pool);
    progress.set_connections(1);
    progress.change_requests(0, resolved.requests);
    progress.set_request_size(resolved.request_size);
    let queue = Arc::new(SegmentQueue::new());
    let retries = RetryControl::new(options, progress);
    let end = || {
        Rc::new(ReconnectingHandle::new(
            Side::Source,
            source.clone(),
            device.clone(),
            retries.clone(),
        ))
    };
    let teller = end();
    let reader = end();
    let making = blockhaul_io::spawn(make(
        queue.clone(),
        SegmentSettings {
            extents: options.extents,
            selection,
            ..SegmentSettings::of(teller, resolved.segment, progress)
        },
    ));
    let pieces =
        PlanPieces { queue: queue.clone(), size: resolved.request_size, at: 0, runs: Vec::new() };
    let mut digest = options.digest.map(Hasher::new);
    let out = OutputPipe { pipe: File::new(fd), digest: digest.as_mut() };
    let written =
        PipeReadAhead::new(pieces, &reader, &resolved, pool, progress).write_to(out).await;
    queue.stop();
    let made = making.await;
    written?;
    made?;
    if progress.is_cancelled() {
        return Err(Error::new(Kind::ShuttingDown, "stopped before the end of the copy")
            .complete()
            .into());
    }
    let digest = digest.map(|digest| digest.finish(size));
    Ok(PipeCopyEnd { progress, retries: &retries, size, digest, started }.summary())
}

/// A read in flight, which returns `None` for a hole.
struct ReadInFlight {
    /// The generation of the handle that it was submitted to.
    generation: u64,
    task: Task<Result<Option<Data>, Error>>,
}

/// A piece whose turn to be written comes later; nothing is read of a hole.
struct QueuedPiece {
    at: u64,
    len: u64,
    reading: Option<ReadInFlight>,
}

/// Reads ahead, in order, what is data; zeroes reported by the source are not read.
struct PipeReadAhead<'a> {
    pieces: PlanPieces,
    source: &'a ReconnectingHandle,
    resolved: &'a EffectiveOptions,
    pool: &'a Pool,
    /// Retries have a buffer of their own, and only in their turn: later reads hold the other
    /// buffers until then.
    spare: Pool,
    progress: &'a Arc<CopyProgress>,
    /// In order.
    ahead: VecDeque<QueuedPiece>,
    /// Bytes of the reads in flight.
    queued: u64,
    /// The piece behind those ahead.
    next: Option<PlanPiece>,
}

impl<'a> PipeReadAhead<'a> {
    fn new(
        pieces: PlanPieces,
        source: &'a ReconnectingHandle,
        resolved: &'a EffectiveOptions,
        pool: &'a Pool,
        progress: &'a Arc<CopyProgress>,
    ) -> PipeReadAhead<'a> {
        PipeReadAhead {
            pieces,
            source,
            resolved,
            pool,
            spare: Pool::new(Pool::cost(resolved.request_size as usize)),
            progress,
            ahead: VecDeque::new(),
            queued: 0,
            next: None,
        }
    }

    /// Writes each piece in its turn.
    async fn write_to(mut self, mut out: OutputPipe<'_>) -> Result<()> {
        self.next = self.pieces.next().await;
        while !self.progress.is_cancelled() {
            self.start_reads().await?;
            let Some(QueuedPiece { at, len, reading }) = self.ahead.pop_front() else { break };
            let data = match reading {
                None => None,
                Some(reading) => self.finish(reading, (at, len)).await?,
            };
            match data {
                Some(data) => out.data(data).await?,
                None => out.zeroes(len).await?,
            }
            self.progress.add_data(at, len);
        }
        Ok(())
    }

    /// Submits reads until the window or the memory is full.
    async fn start_reads(&mut self) -> Result<()> {
        while let Some(PlanPiece { at, len, zero }) = self.next
            && self.ahead.len() < self.resolved.requests
        {
            let mut reading = None;
            if !zero {
                if self.queued > 0 && self.queued + len > self.resolved.queue_size {
                    break;
                }
                let Some(room) = room_now(self.pool, len, self.queued == 0).await? else { break };
                reading = Some(self.read(at, room.counted(&self.progress.counters.tally)));
                self.queued += len;
            }
            self.ahead.push_back(QueuedPiece { at, len, reading });
            self.next = self.pieces.next().await;
        }
        Ok(())
    }

    /// Submits a read.
    fn read(&self, at: u64, room: Reservation) -> ReadInFlight {
        let generation = self.source.generation();
        let read = self.source.device().submit(Request::read(at, room));
        let progress = self.progress.clone();
        let task = blockhaul_io::start(async move {
            let asked = blockhaul_io::now();
            progress.meter.begin();
            let reply = read.await;
            progress.meter.took(Side::Source, blockhaul_io::elapsed(asked));
            progress.meter.end();
            reply.map(content)
        });
        ReadInFlight { generation, task }
    }

    /// Waits for a read, which is repeated if it fails; `None` for a hole.
    async fn finish(
        &mut self,
        reading: ReadInFlight,
        (at, len): (u64, u64),
    ) -> Result<Option<Data>> {
        self.resolved.pace(len, || self.progress.is_cancelled()).await;
        self.queued -= len;
        let data = match reading.task.await {
            Ok(data) => data,
            Err(error) => self.read_again((error, reading.generation), (at, len)).await?,
        };
        if let Some(data) = &data {
            self.source.keep_proof(at, data.bytes());
        }
        Ok(data)
    }

    /// Repeats a read that failed in this generation, as often as is allowed.
    async fn read_again(
        &self,
        (mut error, mut generation): (Error, u64),
        (at, len): (u64, u64),
    ) -> Result<Option<Data>> {
        let source = self.source;
        let mut attempts = 0;
        loop {
            source.recover(error, generation, &mut attempts).await?;
            let Some(room) = room_now(&self.spare, len, true).await? else { return Ok(None) };
            generation = source.generation();
            match source.device().submit(Request::read(at, room)).await {
                Ok(reply) => return Ok(content(reply)),
                Err(again) => error = again,
            }
        }
    }
}

/// The data of a reply; `None` for a hole.
fn content(reply: Reply) -> Option<Data> {
    match reply {
        Reply::Data(data) => Some(data),
        _ => None,
    }
}

/// The output pipe.
struct OutputPipe<'a> {
    pipe: File,
    digest: Option<&'a mut Hasher>,
}

impl OutputPipe<'_> {
    async fn data(&mut self, data: Data) -> Result<()> {
        if let Some(digest) = &mut self.digest {
            digest.bytes(data.bytes());
        }
        write_out(&self.pipe, data).await
    }

    async fn zeroes(&mut self, mut len: u64) -> Result<()> {
        while len > 0 {
            let part = len.min(Data::ZEROES_MAX as u64);
            if let Some(digest) = &mut self.digest {
                digest.zeroes(part);
            }
            write_out(&self.pipe, Data::zeroes(part as usize)).await?;
            len -= part;
        }
        Ok(())
    }
}

/// What one read reads, or one hole.
#[derive(Clone, Copy)]
struct PlanPiece {
    at: u64,
    len: u64,
    /// It is known to be zero.
    zero: bool,
}

/// The plan's runs in order, with data cut to the request size.
struct PlanPieces {
    queue: Arc<SegmentQueue>,
    size: u64,
    at: u64,
    /// The rest of the current segment, last run first.
    runs: Vec<SegmentRun>,
}

impl PlanPieces {
    async fn next(&mut self) -> Option<PlanPiece> {
        while self.runs.is_empty() {
            let segment = self.queue.next().await?;
            self.at = segment.at;
            self.runs = segment.runs;
            self.runs.reverse();
        }
        let run = self.runs.last_mut()?;
        let at = self.at;
        let zero = !run.what.is_data();
        let len = if zero { run.len } else { run.len.min(self.size - at % self.size) };
        run.len -= len;
        if run.len == 0 {
            self.runs.pop();
        }
        self.at += len;
        Some(PlanPiece { at, len, zero })
    }
}

async fn write_out(pipe: &File, data: Data) -> Result<()> {
    let pipe = pipe.clone();
    let written = blockhaul_io::offload(move || {
        let mut bytes = data.bytes();
        while !bytes.is_empty() {
            match rustix::io::write(&pipe, bytes) {
                Ok(written) => bytes = &bytes[written..],
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(std::io::Error::from(error)),
            }
        }
        Ok(())
    });
    let written = written.await.map_err(|lost| Error::new(Kind::Io, "pipe").because(lost))?;
    written.map_err(|error| CopyError::at_target(Error::system("cannot write", error)))
}
