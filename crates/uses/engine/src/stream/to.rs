//! To a pipe: what is data is read ahead, and written when its turn comes.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;

use blockhaul_block::{Error, Kind, Reply, Request, Result};
use blockhaul_catalog::Stack;
use blockhaul_io::{Data, File, Pool, Task};

use super::{room_now, summary};
use crate::algorithm::Hasher;
use crate::end::{End, Retries};
use crate::options::{Options, Summary};
use crate::plan::{Making, Plan};
use crate::progress::Progress;
use crate::segment::Run;
use crate::selection::Selection;
use crate::settled::Settled;
use crate::side::Side;

/// Copies all of `source` to `fd`, in order, zeroes as zeroes.
pub async fn copy_to_pipe(
    source: &Stack,
    fd: OwnedFd,
    options: &Options,
    pool: &Pool,
    progress: &Arc<Progress>,
) -> Result<Summary> {
    let started = blockhaul_io::now();
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
    let end = || Rc::new(End::new(Side::Source, source.clone(), device.clone(), retries.clone()));
    let (teller, reader) = (end(), end());
    let making = blockhaul_io::spawn(plan.clone().make(Making {
        extents: options.extents,
        selection,
        ..Making::of(teller, settled.segment, progress)
    }));
    let pieces = Pieces { plan: plan.clone(), size: settled.request_size, at: 0, runs: Vec::new() };
    let mut digest = options.digest.map(Hasher::new);
    let out = Out { pipe: File::new(fd), digest: digest.as_mut() };
    let written = write_pieces(pieces, &reader, out, &settled, pool, progress).await;
    plan.stop();
    let made = making.await;
    written?;
    made?;
    if progress.is_cancelled() {
        return Err(Error::new(Kind::ShuttingDown, "stopped before the end of the copy"));
    }
    Ok(summary((progress, &retries), size, digest.map(|digest| digest.finish(size)), started))
}

/// A read on its way, which gives `None` for a hole.
struct Reading {
    at: u64,
    /// The handle that was asked.
    generation: u64,
    task: Task<Result<Option<Data>>>,
}

/// Reads ahead, in order, what is data; zeroes that the source told of are not read. Each piece is
/// written when its turn comes.
async fn write_pieces(
    mut pieces: Pieces,
    source: &End,
    mut out: Out<'_>,
    settled: &Settled,
    pool: &Pool,
    progress: &Arc<Progress>,
) -> Result<()> {
    let mut ahead: VecDeque<(u64, Option<Reading>)> = VecDeque::new();
    // What is read again has a buffer of its own, and only at its turn: those that come after it hold
    // the others until then.
    let spare = Pool::new(Pool::cost(settled.request_size as usize));
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
            let room = room.counted(&progress.counters.tally);
            let generation = source.generation();
            let read = source.device().submit(Request::read(at, room));
            let progress = progress.clone();
            let task = blockhaul_io::start(async move {
                let asked = blockhaul_io::now();
                progress.meter.begin();
                let reply = read.await;
                progress.meter.took(Side::Source, blockhaul_io::elapsed(asked));
                progress.meter.end();
                reply.map(content)
            });
            ahead.push_back((len, Some(Reading { at, generation, task })));
            queued += len;
            next = pieces.next().await;
        }
        let Some((len, read)) = ahead.pop_front() else { break };
        let data = match read {
            None => None,
            Some(read) => {
                settled.pace(len, || progress.is_cancelled()).await;
                queued -= len;
                let data = match read.task.await {
                    Ok(data) => data,
                    Err(error) => {
                        let failed = (error, read.generation);
                        read_again(source, failed, (read.at, len), &spare).await?
                    }
                };
                if let Some(data) = &data {
                    source.keep_proof(read.at, data.bytes());
                }
                data
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

/// Reads again what failed in this generation, as often as is allowed.
async fn read_again(
    source: &End,
    (mut error, mut generation): (Error, u64),
    (at, len): (u64, u64),
    spare: &Pool,
) -> Result<Option<Data>> {
    let mut attempts = 0;
    loop {
        source.recover(error, generation, &mut attempts).await?;
        let Some(room) = room_now(spare, len, true).await? else { return Ok(None) };
        generation = source.generation();
        match source.device().submit(Request::read(at, room)).await {
            Ok(reply) => return Ok(content(reply)),
            Err(again) => error = again,
        }
    }
}

/// What was read; `None` for a hole.
fn content(reply: Reply) -> Option<Data> {
    match reply {
        Reply::Data(data) => Some(data),
        _ => None,
    }
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
    written.map_err(|error| Error::system("cannot write to the pipe", error))
}
