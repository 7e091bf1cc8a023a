//! To a pipe: data is read ahead, and written in order.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;

use blockhaul_block::{Error, Kind, Reply, Request, Result};
use blockhaul_catalog::Stack;
use blockhaul_io::{Data, File, Pool, Task};

use super::room::room_now;
use super::summary::summary;
use crate::algorithm::Hasher;
use crate::handle::{Handle, Retries};
use crate::options::{Options, Summary};
use crate::progress::Progress;
use crate::resolved::Resolved;
use crate::segment::Run;
use crate::segment_maker::{Making, make};
use crate::segment_queue::SegmentQueue;
use crate::selection::Selection;
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
        let text = "ranges cannot be left out in a pipe: use a device as the target";
        return Err(Error::new(Kind::Invalid, text));
    }
    let size = selection.total();
    progress.set_total(size);
    progress.set_disk_size(facts.size);
    let resolved = Resolved::new(options, device, device, pool);
    progress.set_connections(1);
    progress.change_requests(0, resolved.requests);
    progress.set_request_size(resolved.request_size);
    let queue = Arc::new(SegmentQueue::new());
    let retries = Retries::new(options, progress);
    let end =
        || Rc::new(Handle::new(Side::Source, source.clone(), device.clone(), retries.clone()));
    let teller = end();
    let reader = end();
    let making = blockhaul_io::spawn(make(
        queue.clone(),
        Making {
            extents: options.extents,
            selection,
            ..Making::of(teller, resolved.segment, progress)
        },
    ));
    let pieces =
        Pieces { queue: queue.clone(), size: resolved.request_size, at: 0, runs: Vec::new() };
    let mut digest = options.digest.map(Hasher::new);
    let out = Out { pipe: File::new(fd), digest: digest.as_mut() };
    let written = write_pieces(pieces, &reader, out, &resolved, pool, progress).await;
    queue.stop();
    let made = making.await;
    written?;
    made?;
    if progress.is_cancelled() {
        return Err(Error::new(Kind::ShuttingDown, "stopped before the end of the copy"));
    }
    Ok(summary((progress, &retries), size, digest.map(|digest| digest.finish(size)), started))
}

/// A read in flight, which returns `None` for a hole.
struct Reading {
    /// The generation of the handle that it was submitted to.
    generation: u64,
    task: Task<Result<Option<Data>>>,
}

/// Reads ahead, in order, what is data; zeroes reported by the source are not read. Each piece is
/// written in its turn.
async fn write_pieces(
    mut pieces: Pieces,
    source: &Handle,
    mut out: Out<'_>,
    resolved: &Resolved,
    pool: &Pool,
    progress: &Arc<Progress>,
) -> Result<()> {
    let mut ahead: VecDeque<(u64, u64, Option<Reading>)> = VecDeque::new();
    // Retries have a buffer of their own, and only in their turn: later reads hold the other
    // buffers until then.
    let spare = Pool::new(Pool::cost(resolved.request_size as usize));
    let mut queued = 0;
    let mut next = pieces.next().await;
    while !progress.is_cancelled() {
        while let Some((at, len, zero)) = next
            && ahead.len() < resolved.requests
        {
            if zero {
                ahead.push_back((at, len, None));
                next = pieces.next().await;
                continue;
            }
            if queued > 0 && queued + len > resolved.queue_size {
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
            ahead.push_back((at, len, Some(Reading { generation, task })));
            queued += len;
            next = pieces.next().await;
        }
        let Some((at, len, read)) = ahead.pop_front() else { break };
        let data = match read {
            None => None,
            Some(read) => {
                resolved.pace(len, || progress.is_cancelled()).await;
                queued -= len;
                let data = match read.task.await {
                    Ok(data) => data,
                    Err(error) => {
                        let failed = (error, read.generation);
                        read_again(source, failed, (at, len), &spare).await?
                    }
                };
                if let Some(data) = &data {
                    source.keep_proof(at, data.bytes());
                }
                data
            }
        };
        match data {
            Some(data) => out.data(data).await?,
            None => out.zeroes(len).await?,
        }
        progress.add_data(at, len);
    }
    Ok(())
}

/// Repeats a read that failed in this generation, as often as is allowed.
async fn read_again(
    source: &Handle,
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

/// The data of a reply; `None` for a hole.
fn content(reply: Reply) -> Option<Data> {
    match reply {
        Reply::Data(data) => Some(data),
        _ => None,
    }
}

/// The output pipe.
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

/// The plan's runs in order, with data cut to the request size.
struct Pieces {
    queue: Arc<SegmentQueue>,
    size: u64,
    at: u64,
    /// The rest of the current segment, last run first.
    runs: Vec<Run>,
}

impl Pieces {
    /// Offset, length, and whether it is known to be zero.
    async fn next(&mut self) -> Option<(u64, u64, bool)> {
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
    written.map_err(|error| Error::system("cannot write", error))
}
