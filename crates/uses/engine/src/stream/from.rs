//! From a pipe: data is cut into pieces as it arrives, and written while the next pieces are read.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Instant;

use blockhaul_block::{Can, Device, Error, Kind, Op, PendingRequest, Request, RequestFlags};
use blockhaul_catalog::Stack;
use blockhaul_io::{Buf, Data, File, Pool, Task};
use rustix::event::{self, PollFd, PollFlags, Timespec};

use super::room::room_now;
use super::summary::PipeCopyEnd;
use crate::algorithm::Hasher;
use crate::error::{CopyError, Result};
use crate::handle::RetryControl;
use crate::options::{CopySummary, EngineOptions};
use crate::progress::CopyProgress;
use crate::resolved::EffectiveOptions;
use crate::side::Side;
use crate::zeroes;

/// Copies everything that arrives from `fd` to the start of `target`. An error if it is more than
/// the target holds.
///
/// # Errors
/// If the pipe holds more than the target, cannot be read, or a write fails; [`Kind::ShuttingDown`] after a
/// cancel.
pub async fn copy_from_pipe(
    fd: OwnedFd,
    target: &Stack,
    options: &EngineOptions,
    pool: &Pool,
    progress: &Arc<CopyProgress>,
) -> Result<CopySummary> {
    let started = blockhaul_io::now();
    let device = target.device();
    let facts = device.facts();
    crate::resolved::check_target(0, device).await.map_err(CopyError::at_target)?;
    let resolved = Arc::new(EffectiveOptions::new(options, device, device, pool));
    progress.set_connections(1);
    progress.change_requests(0, resolved.requests);
    progress.set_request_size(resolved.request_size);
    let retries = RetryControl::new(options, progress);
    let pipe = File::new(fd);
    let mut window = PipeWindow::new(&resolved);
    let mut digest = options.digest.map(Hasher::new);
    let mut at = 0;
    while !progress.is_cancelled() {
        resolved.pace(resolved.request_size, || progress.is_cancelled()).await;
        let room = window.room(pool, resolved.request_size).await?;
        let room = room.counted(&progress.counters.tally);
        let (buf, ended) = match fill(&pipe, room.into_buf(), progress).await {
            Ok(filled) => filled,
            Err(error) => {
                // The pipe's error is returned; requests in flight are awaited.
                retries.fail();
                let _ = window.drain_all().await;
                return Err(error);
            }
        };
        let len = buf.len() as u64;
        if len > 0 {
            if at + len > facts.size {
                let text =
                    format!("the pipe delivers more than the {} bytes of the target", facts.size);
                window.drain().await?;
                return Err(CopyError::at_target(Error::new(Kind::NoSpace, text).on(&facts.name)));
            }
            if let Some(digest) = &mut digest {
                digest.bytes(&buf);
            }
            let target = PipeTarget {
                device: device.clone(),
                resolved: resolved.clone(),
                retries: retries.clone(),
                progress: progress.clone(),
            };
            window.push(len, blockhaul_io::start(target.store(at, buf.into())));
        }
        at += len;
        if ended {
            break;
        }
    }
    window.drain().await?;
    progress.set_total(at);
    let digest = digest.map(|digest| digest.finish(at));
    let ended = PipeCopyEnd { progress, retries: &retries, size: at, digest, started };
    finish(device, &resolved, ended).await
}

/// Requests in flight to the target, oldest first.
struct PipeWindow {
    out: VecDeque<(u64, Task<Result<()>>)>,
    bytes: u64,
    requests: usize,
    queue_size: u64,
}

impl PipeWindow {
    fn new(resolved: &EffectiveOptions) -> PipeWindow {
        let requests = resolved.requests;
        let queue_size = resolved.queue_size;
        PipeWindow { out: VecDeque::new(), bytes: 0, requests, queue_size }
    }

    /// A reservation for another request, when the window allows it.
    async fn room(&mut self, pool: &Pool, len: u64) -> Result<blockhaul_io::Reservation> {
        while self.out.len() >= self.requests
            || (self.bytes > 0 && self.bytes + len > self.queue_size)
        {
            self.pop().await?;
        }
        loop {
            match room_now(pool, len, self.out.is_empty()).await? {
                Some(room) => return Ok(room),
                None => self.pop().await?,
            }
        }
    }

    fn push(&mut self, len: u64, task: Task<Result<()>>) {
        self.bytes += len;
        self.out.push_back((len, task));
    }

    async fn pop(&mut self) -> Result<()> {
        let Some((len, task)) = self.out.pop_front() else { return Ok(()) };
        self.bytes -= len;
        let result = task.await;
        if result.is_err() {
            // The first error is returned; all other requests in flight are awaited.
            let _ = self.drain_all().await;
        }
        result
    }

    async fn drain(&mut self) -> Result<()> {
        while !self.out.is_empty() {
            self.pop().await?;
        }
        Ok(())
    }

    async fn drain_all(&mut self) -> Result<()> {
        let mut result = Ok(());
        while let Some((_, task)) = self.out.pop_front() {
            result = result.and(task.await);
        }
        self.bytes = 0;
        result
    }
}

/// The target of the data from a pipe.
struct PipeTarget {
    device: Arc<dyn Device>,
    resolved: Arc<EffectiveOptions>,
    retries: Arc<RetryControl>,
    progress: Arc<CopyProgress>,
}

impl PipeTarget {
    /// Writes a piece, zeroes as zeroes.
    async fn store(self, at: u64, data: Data) -> Result<()> {
        let runs = match self.resolved.sparse {
            0 => vec![(0, data.len(), false)],
            grain => zeroes::runs(data.bytes(), at, grain),
        };
        let request = |start: usize, len: usize, zero: bool| {
            let here = at + start as u64;
            let bytes = len as u64;
            if zero {
                Request::zero(here, bytes)
            } else {
                let op = Op::Write(data.slice(start, len));
                Request { op, at: here, len: bytes, flags: RequestFlags::empty() }
            }
        };
        let mut parts = Vec::new();
        for (start, len, zero) in runs {
            if zero && self.resolved.target_is_zero {
                self.progress.add_skipped(at + start as u64, len as u64);
            } else {
                let pending = self.device.submit(request(start, len, zero));
                parts.push((start, len, zero, pending));
            }
        }
        let asked = blockhaul_io::now();
        self.progress.meter.begin();
        let mut result = Ok(());
        for (start, len, zero, pending) in parts {
            let again = || request(start, len, zero);
            let done = self.finish(pending, again, asked).await;
            match done {
                Ok(()) if zero => self.progress.add_zeroed(at + start as u64, len as u64),
                Ok(()) => {
                    self.progress.add_data(at + start as u64, len as u64);
                    let seen = if self.resolved.sparse == 0 { 0 } else { len as u64 };
                    crate::route_counters::add(&self.progress.counters.seen, seen);
                }
                Err(error) => {
                    // Nothing else is retried any more.
                    self.retries.fail();
                    result = result.and(Err(error));
                }
            }
        }
        self.progress.meter.end();
        result
    }

    /// Waits for a request, and repeats it, with the same bytes, while that may help.
    async fn finish(
        &self,
        mut pending: PendingRequest,
        again: impl Fn() -> Request,
        asked: Instant,
    ) -> Result<()> {
        let mut attempts = 0;
        loop {
            let reply = pending.await;
            self.progress.meter.took(Side::Target, blockhaul_io::elapsed(asked));
            let Err(error) = reply else { return Ok(()) };
            self.retries.recover_standing(error, &mut attempts).await?;
            pending = self.device.submit(again());
        }
    }
}

/// Interval of checks for a cancel while no data arrives.
const LOOK: Timespec = Timespec { tv_sec: 0, tv_nsec: 50_000_000 };

/// Reads until the buffer is full, the pipe ends or the copy is cancelled; returns whether the pipe
/// has ended. Blocks a thread of its own.
async fn fill(pipe: &File, mut buf: Buf, progress: &Arc<CopyProgress>) -> Result<(Buf, bool)> {
    let pipe = pipe.clone();
    let progress = progress.clone();
    let filled = blockhaul_io::offload(move || {
        let mut filled = 0;
        while filled < buf.len() {
            // What cannot be polled is read all the same.
            if event::poll(&mut [PollFd::new(&pipe, PollFlags::IN)], Some(&LOOK)) == Ok(0) {
                if progress.is_cancelled() {
                    break;
                } else {
                    continue;
                }
            }
            match rustix::io::read(&pipe, &mut buf[filled..]) {
                Ok(0) => {
                    buf.truncate(filled);
                    return Ok((buf, true));
                }
                Ok(bytes) => filled += bytes,
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(std::io::Error::from(error)),
            }
        }
        buf.truncate(filled);
        Ok((buf, false))
    });
    let filled = filled.await.map_err(|lost| Error::new(Kind::Io, "pipe").because(lost))?;
    filled.map_err(|error| CopyError::at_source(Error::system("cannot read from the pipe", error)))
}

/// Makes the copy durable, if the options ask for it.
async fn finish(
    device: &Arc<dyn Device>,
    resolved: &EffectiveOptions,
    ended: PipeCopyEnd<'_>,
) -> Result<CopySummary> {
    if ended.progress.is_cancelled() {
        return Err(Error::new(Kind::ShuttingDown, "stopped before the end of the copy")
            .complete()
            .into());
    }
    if resolved.flush && device.facts().can.contains(Can::FLUSH) {
        device.submit(Request::flush()).await.map_err(CopyError::at_target)?;
    }
    Ok(ended.summary())
}
