//! Copying from and to pipes: what is on the pipe's side is in order and of unknown size; the device's
//! side has many requests in flight.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

use block::{Can, Device, Error, Flags, Kind, Op, Reply, Request, Result, Stack};
use io::{Buf, Data, File, Pool, Task};

use crate::algorithm::Hasher;
use crate::end::{End, Retries};
use crate::options::{Options, Summary};
use crate::plan::{Making, Plan};
use crate::progress::Progress;
use crate::segment::Run;
use crate::selection::Selection;
use crate::settled::Settled;
use crate::side::Side;
use crate::zeroes;

/// Copies everything that comes from `fd` to the start of `target`. An error if there is more than
/// the target holds.
pub async fn copy_from_pipe(
    fd: OwnedFd,
    target: &Stack,
    options: &Options,
    pool: &Pool,
    progress: &Arc<Progress>,
) -> Result<Summary> {
    let started = Instant::now();
    let device = target.device();
    let facts = device.facts();
    crate::settled::check_target(0, &facts)?;
    let settled = Settled::new(options, device, device, pool);
    progress.set_connections(1);
    progress.change_requests(0, settled.requests);
    progress.set_request_size(settled.request_size);
    let pipe = File::new(fd);
    let mut window = Window::new(&settled);
    let mut digest = options.digest.map(Hasher::new);
    let mut at = 0;
    while !progress.is_cancelled() {
        settled.pace(settled.request_size, || progress.is_cancelled()).await;
        let room = window.room(pool, settled.request_size).await?;
        let room = room.tallied(&progress.counters.tally);
        let (buf, ended) = match fill(&pipe, room.into_buf()).await {
            Ok(filled) => filled,
            Err(error) => {
                // The pipe's error counts; what is on its way is awaited.
                let _ = window.drain_all().await;
                return Err(error);
            }
        };
        let len = buf.len() as u64;
        if len > 0 {
            if at + len > facts.size {
                let text =
                    format!("more comes from the pipe than the {} bytes of the target", facts.size);
                window.drain().await?;
                return Err(Error::new(Kind::NoSpace, text).on(&facts.name));
            }
            if let Some(digest) = &mut digest {
                digest.bytes(&buf);
            }
            let work = store(device.clone(), at, buf.into(), settled.clone(), progress.clone());
            window.push(len, io::start(work));
        }
        at += len;
        if ended {
            break;
        }
    }
    window.drain().await?;
    progress.set_total(at);
    let digest = digest.map(|digest| digest.finish(at));
    finish(device, &settled, progress, at, digest, started).await
}

/// Copies all of `source` to `fd`, in order, zeroes as zeroes.
pub async fn copy_to_pipe(
    source: &Stack,
    fd: OwnedFd,
    options: &Options,
    pool: &Pool,
    progress: &Arc<Progress>,
) -> Result<Summary> {
    let started = Instant::now();
    let device = source.device();
    let facts = device.facts();
    let selection = Selection::new(options, &facts, facts.block.minimum)?;
    if options.bitmap.is_some() {
        let text = "a pipe has no gaps: what a bitmap leaves out cannot be told through it";
        return Err(Error::new(Kind::Invalid, text));
    }
    let size = selection.total();
    progress.set_total(size);
    let settled = Settled::new(options, device, device, pool);
    progress.set_connections(1);
    progress.change_requests(0, settled.requests);
    progress.set_request_size(settled.request_size);
    let plan = Arc::new(Plan::new());
    let retries = Retries::new(options, progress);
    let teller = Rc::new(End::new(Side::Source, source.clone(), device.clone(), retries));
    let making = io::spawn(plan.clone().make(Making {
        extents: options.extents,
        selection,
        ..Making::of(teller, settled.segment, progress)
    }));
    let pieces = Pieces { plan: plan.clone(), size: settled.request_size, at: 0, runs: Vec::new() };
    let mut digest = options.digest.map(Hasher::new);
    let out = Out { pipe: File::new(fd), digest: digest.as_mut() };
    let written = write_pieces(pieces, device, out, &settled, pool, progress).await;
    plan.stop();
    let made = making.await;
    written?;
    made?;
    if progress.is_cancelled() {
        return Err(Error::new(Kind::ShuttingDown, "stopped before the end of the copy"));
    }
    Ok(summary(progress, size, digest.map(|digest| digest.finish(size)), started))
}

/// A read on its way; `None` is a hole.
type Reading = Task<Result<Option<Data>>>;

/// Reads ahead, in order, what is data; zeroes that the source told of are not read. Each piece is
/// written when its turn comes.
async fn write_pieces(
    mut pieces: Pieces,
    device: &Arc<dyn Device>,
    mut out: Out<'_>,
    settled: &Settled,
    pool: &Pool,
    progress: &Arc<Progress>,
) -> Result<()> {
    let mut ahead: VecDeque<(u64, Option<Reading>)> = VecDeque::new();
    let mut queued = 0;
    let mut next = pieces.next().await;
    while !progress.is_cancelled() {
        while let Some((at, len, zero)) = next
            && ahead.len() < settled.requests
        {
            if zero {
                ahead.push_back((len, None));
                next = pieces.next().await;
                continue;
            }
            if queued > 0 && queued + len > settled.queue_size {
                break;
            }
            let Some(room) = room_now(pool, len, queued == 0).await? else { break };
            let room = room.tallied(&progress.counters.tally);
            let read = device.submit(Request::read(at, room));
            let progress = progress.clone();
            let task = io::start(async move {
                let asked = Instant::now();
                progress.meter.begin();
                let reply = read.await;
                progress.meter.took(Side::Source, asked.elapsed());
                progress.meter.end();
                Ok(match reply? {
                    Reply::Data(data) => Some(data),
                    _ => None,
                })
            });
            ahead.push_back((len, Some(task)));
            queued += len;
            next = pieces.next().await;
        }
        let Some((len, read)) = ahead.pop_front() else { break };
        let data = match read {
            None => None,
            Some(read) => {
                settled.pace(len, || progress.is_cancelled()).await;
                queued -= len;
                read.await?
            }
        };
        match data {
            Some(data) => out.data(data).await?,
            None => out.zeroes(len).await?,
        }
        progress.add_data(len);
    }
    Ok(())
}

/// Where what was read goes.
struct Out<'a> {
    pipe: File,
    digest: Option<&'a mut Hasher>,
}

impl Out<'_> {
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

/// The plan's runs in order, data cut to the size of requests.
struct Pieces {
    plan: Arc<Plan>,
    size: u64,
    at: u64,
    /// What is left of the present segment, last run first.
    runs: Vec<Run>,
}

impl Pieces {
    /// Offset, length, and whether it is known to be zero.
    async fn next(&mut self) -> Option<(u64, u64, bool)> {
        while self.runs.is_empty() {
            let segment = self.plan.next().await?;
            self.at = segment.at;
            self.runs = segment.runs;
            self.runs.reverse();
        }
        let run = self.runs.last_mut()?;
        let at = self.at;
        let zero = !run.what.is_data();
        let len = match zero {
            true => run.len,
            false => run.len.min(self.size - at % self.size),
        };
        run.len -= len;
        if run.len == 0 {
            self.runs.pop();
        }
        self.at += len;
        Some((at, len, zero))
    }
}

/// Requests on their way to the target, oldest first.
struct Window {
    out: VecDeque<(u64, Task<Result<()>>)>,
    bytes: u64,
    requests: usize,
    queue_size: u64,
}

impl Window {
    fn new(settled: &Settled) -> Window {
        let (requests, queue_size) = (settled.requests, settled.queue_size);
        Window { out: VecDeque::new(), bytes: 0, requests, queue_size }
    }

    /// Room for another request, when the window allows it.
    async fn room(&mut self, pool: &Pool, len: u64) -> Result<io::Room> {
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
            // The first error counts; what else is out is awaited all the same.
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

/// Room if there is some, or waits for it when nothing of ours could free any.
async fn room_now(pool: &Pool, len: u64, wait: bool) -> Result<Option<io::Room>> {
    if let Some(room) = pool.try_reserve(len as usize) {
        return Ok(Some(room));
    }
    if !wait {
        return Ok(None);
    }
    let room = pool.reserve(len as usize).await;
    let error = |error| Error::new(Kind::NoMemory, "no buffer of this size").because(error);
    room.map(Some).map_err(error)
}

/// Writes a piece to the target, zeroes as zeroes.
async fn store(
    device: Arc<dyn Device>,
    at: u64,
    data: Data,
    settled: Settled,
    progress: Arc<Progress>,
) -> Result<()> {
    let runs = match settled.sparse {
        0 => vec![(0, data.len(), false)],
        grain => zeroes::runs(data.bytes(), at, grain),
    };
    let mut parts = Vec::new();
    for (start, len, zero) in runs {
        let here = at + start as u64;
        let bytes = len as u64;
        match zero {
            true if settled.target_is_zero => progress.add_skipped(bytes),
            true => parts.push((bytes, true, device.submit(Request::zero(here, bytes)))),
            false => {
                let op = Op::Write(data.slice(start, len));
                let request = Request { op, at: here, len: bytes, flags: Flags::empty() };
                parts.push((bytes, false, device.submit(request)));
            }
        }
    }
    let asked = Instant::now();
    progress.meter.begin();
    let mut result = Ok(());
    for (bytes, zero, pending) in parts {
        let reply = pending.await;
        progress.meter.took(Side::Target, asked.elapsed());
        match reply {
            Ok(_) if zero => progress.add_zeroed(bytes),
            Ok(_) => {
                progress.add_data(bytes);
                let seen = if settled.sparse == 0 { 0 } else { bytes };
                crate::route::add(&progress.counters.seen, seen);
            }
            Err(error) => result = result.and(Err(error)),
        }
    }
    progress.meter.end();
    result
}

/// Reads until the buffer is full or the pipe ends; says which. Blocks a thread of its own.
async fn fill(pipe: &File, mut buf: Buf) -> Result<(Buf, bool)> {
    let pipe = pipe.clone();
    let filled = io::offload(move || {
        let mut filled = 0;
        while filled < buf.len() {
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
        Ok((buf, false))
    });
    let filled = filled.await.map_err(|lost| Error::new(Kind::Io, "pipe").because(lost))?;
    filled.map_err(|error| Error::system("cannot read from the pipe", error))
}

async fn write_out(pipe: &File, data: Data) -> Result<()> {
    let pipe = pipe.clone();
    let written = io::offload(move || {
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
    written.map_err(|error| Error::system("cannot write to the pipe", error))
}

async fn finish(
    device: &Arc<dyn Device>,
    settled: &Settled,
    progress: &Progress,
    size: u64,
    digest: Option<String>,
    started: Instant,
) -> Result<Summary> {
    if progress.is_cancelled() {
        return Err(Error::new(Kind::ShuttingDown, "stopped before the end of the copy"));
    }
    if settled.flush && device.facts().can.contains(Can::FLUSH) {
        device.submit(Request::flush()).await?;
    }
    Ok(summary(progress, size, digest, started))
}

fn summary(progress: &Progress, size: u64, digest: Option<String>, started: Instant) -> Summary {
    let done = progress.snapshot();
    Summary {
        size,
        data: done.data,
        zeroed: done.zeroed,
        skipped: done.skipped,
        resumed: 0,
        routes: progress.routes(),
        lanes: 1,
        requests: done.requests,
        request_size: done.request_size,
        retried: crate::options::Retried::default(),
        digest,
        elapsed: started.elapsed(),
        warnings: Vec::new(),
    }
}
