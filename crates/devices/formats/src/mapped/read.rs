//! Reads: passed on whole where the range is in one place, else assembled.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use blockhaul_block::{Device, Error, Kind, Outcome, Pending, Reply, Request, Result};
use blockhaul_io::{Buf, Data, Pool, Reservation};

use super::errors::damaged;
use super::map::{Place, Run, Unpack};
use super::parts::Parts;
use crate::bytes::index;
use crate::storage;

/// Longest piece of a read that is in several places, and how many are read at a time, in bytes.
const PIECE: u64 = 256 << 10;
const PIECES: u64 = 8;
/// Compressed data that is read with one request, in bytes, unless a block has more.
const GROUP: u64 = 512 << 10;
/// Groups of compressed blocks that are unpacked at a time, by one handle.
const GROUPS: u64 = 8;
/// Compressed bytes that a block can have besides its own length: a header, and what deflate adds
/// to bytes that do not compress.
pub(crate) const PACKED_EXTRA: u64 = 1024;

/// Memory for pieces.
pub(super) fn piece_pool() -> Pool {
    Pool::new(Pool::cost(index(PIECE)) * PIECES)
}

/// Memory for compressed data, with blocks of `unit` bytes.
pub(super) fn packed_pool(unit: u64) -> Pool {
    let longest = GROUP.max(unit.saturating_mul(2).saturating_add(PACKED_EXTRA));
    Pool::new(Pool::cost(index(longest)) * GROUPS)
}

/// Starts a read of a range within the disk.
pub(super) fn submit(parts: &Arc<Parts>, at: u64, room: Reservation) -> Pending {
    let Some(end) = at.checked_add(room.len() as u64) else {
        return Error::new(Kind::Invalid, "beyond the end").into();
    };
    let room = match parts.image.runs_now(at, end, 1) {
        Some(Err(error)) => return error.into(),
        Some(Ok(runs)) => match runs[..] {
            [run] => match parts.pass_on(run, room) {
                Ok(pending) => return pending,
                Err(room) => room,
            },
            _ => room,
        },
        None => room,
    };
    let parts = parts.clone();
    Pending::start(async move { parts.read(at, end, room).await })
}

/// Bytes of a device that are all or the first part of a run; the rest is zero.
struct Below<'a> {
    device: &'a Arc<dyn Device>,
    at: u64,
    len: u64,
}

impl Parts {
    /// Where a run of plain bytes is; `None` if it has none.
    fn below(&self, run: Run) -> Option<Below<'_>> {
        let (device, at, end) = match (run.place, &self.backing) {
            (Place::Data { file, at }, _) => {
                (self.files.get(file)?, at, *self.image.lens.get(file)?)
            }
            (Place::Below, Some(backing)) => (backing, run.at, backing.facts().size),
            _ => return None,
        };
        let len = run.len.min(end.checked_sub(at)?);
        (len > 0).then_some(Below { device, at, len })
    }

    /// Answers a read of exactly this run without a copy, or gives the room back.
    fn pass_on(&self, run: Run, room: Reservation) -> Result<Pending, Reservation> {
        if matches!(run.place, Place::Packed { .. }) {
            let start = run.at / self.image.unit * self.image.unit;
            let Some(block) = self.image.kept.find(start) else { return Err(room) };
            let place = index(run.at - start);
            return Ok(Pending::ready(Ok(Reply::Data(block.slice(place, room.len())))));
        }
        match self.below(run) {
            None => Ok(Pending::ready(Ok(Reply::Hole))),
            Some(below) if below.len == run.len => {
                Ok(below.device.submit(Request::read(below.at, room)))
            }
            Some(_) => Err(room),
        }
    }

    async fn read(&self, at: u64, end: u64, room: Reservation) -> Outcome {
        let mut steps = u64::MAX;
        let runs = self.image.runs(&self.files, (at, end), usize::MAX, &mut steps).await?;
        let room = match runs[..] {
            [run] => match self.pass_on(run, room) {
                Ok(pending) => return pending.await,
                Err(room) => room,
            },
            _ => room,
        };
        let buf = room.into_buf();
        Assembly { parts: self, at, buf, flying: VecDeque::new(), zero: true }.run(&runs).await
    }

    /// The length in bytes of the block that contains `at`: the last one of the disk may be shorter.
    fn block_len(&self, at: u64) -> u64 {
        let start = at / self.image.unit * self.image.unit;
        self.image.unit.min(self.image.size.saturating_sub(start))
    }

    /// Whether the run is all of a compressed block.
    fn is_whole(&self, run: &Run) -> bool {
        matches!(run.place, Place::Packed { .. })
            && run.at.is_multiple_of(self.image.unit)
            && run.len == self.block_len(run.at)
    }

    /// The number of runs from the first one on that are whole compressed blocks, one after the
    /// other in the file; at least 1.
    fn group(&self, runs: &[Run]) -> usize {
        let mut bounds: Option<(usize, u64, u64)> = None;
        let fits = |run: &&Run| {
            let Place::Packed { file, at, most } = run.place else { return false };
            let (first, start, end) = bounds.unwrap_or((file, at, at));
            let new_end = end.max(at.saturating_add(most.into()));
            bounds = Some((first, start, new_end));
            file == first
                && at >= start
                && at <= end
                && new_end - start <= GROUP
                && self.is_whole(run)
        };
        runs.iter().take_while(fits).count().max(1)
    }

    /// Unpacks whole blocks into their places in a buffer that begins with byte `at` of the disk.
    async fn unpack_group(&self, runs: &[Run], at: u64, buf: Buf) -> Result<Buf> {
        let places = runs.iter().filter_map(|run| match run.place {
            Place::Packed { file, at, most } => Some((run, file, at, u64::from(most))),
            _ => None,
        });
        let Some((_, file, _, _)) = places.clone().next() else { return Err(Error::misfit()) };
        let len = self.image.lens.get(file).copied().unwrap_or(0);
        let start = places.clone().map(|(_, _, at, _)| at).min().unwrap_or(0);
        let ends = places.clone().map(|(_, _, at, most)| at.saturating_add(most));
        let end = ends.max().unwrap_or(start).min(len);
        let jobs: Vec<_> = places
            .map(|(run, _, host, most)| Job {
                at: run.at,
                out: index(run.at - at)..index(run.end() - at),
                packed: index(host - start)..index(host.saturating_add(most).min(end) - start),
                host,
            })
            .collect();
        let device = self.files.get(file).ok_or_else(Error::misfit)?;
        let bytes = self.packed_bytes(device, start, end.saturating_sub(start)).await?;
        let unpack = self.image.unpack.clone().ok_or_else(Error::misfit)?;
        let format = self.image.format;
        let longest = index(self.image.unit.saturating_mul(2));
        let work = move || carry_out(format, &*unpack, &bytes, jobs, buf, longest);
        let (mut buf, long) =
            blockhaul_io::offload(work).await.map_err(|lost| self.lost(lost))??;
        for job in long {
            buf = self.unpack_long(device, len, job, buf).await?;
        }
        Ok(buf)
    }

    /// Unpacks a block with more bytes than its place suggests.
    async fn unpack_long(
        &self,
        device: &Arc<dyn Device>,
        file_len: u64,
        (job, needed): (Job, usize),
        buf: Buf,
    ) -> Result<Buf> {
        let format = self.image.format;
        let needed = needed as u64;
        if job.host.checked_add(needed).is_none_or(|end| end > file_len) {
            return Err(bad_block(format, job.at, "its compressed bytes exceed the file"));
        }
        let bytes = self.packed_bytes(device, job.host, needed).await?;
        let unpack = self.image.unpack.clone().ok_or_else(Error::misfit)?;
        let job = Job { packed: 0..bytes.len(), ..job };
        let work = move || carry_out(format, &*unpack, &bytes, vec![job], buf, index(needed));
        let (buf, long) = blockhaul_io::offload(work).await.map_err(|lost| self.lost(lost))??;
        if long.is_empty() { Ok(buf) } else { Err(Error::misfit()) }
    }

    fn lost(&self, lost: blockhaul_io::Lost) -> Error {
        Error::new(Kind::Io, format!("{}: cannot unpack", self.image.format)).because(lost)
    }

    /// The unpacked block of a run.
    async fn block(&self, run: Run) -> Result<Data> {
        let start = run.at / self.image.unit * self.image.unit;
        let kept = &self.image.kept;
        if let Some(data) = kept.find(start) {
            return Ok(data);
        }
        let _turn = kept.unpacking.lock(start, start + 1).await;
        if let Some(data) = kept.find(start) {
            return Ok(data);
        }
        let len = self.block_len(run.at);
        let whole = Run { at: start, len, place: run.place };
        let data = Data::from(self.unpack_group(&[whole], start, Buf::unpooled(index(len))).await?);
        kept.keep(start, data.clone());
        Ok(data)
    }

    /// Compressed bytes of a file.
    async fn packed_bytes(&self, device: &Arc<dyn Device>, at: u64, len: u64) -> Result<Data> {
        let room = storage::room(&self.packed, index(len)).await?;
        if len <= storage::piece(device) {
            return match device.submit(Request::read(at, room)).await? {
                Reply::Data(data) => {
                    let failed = |error| Error::system("cannot read the image", error);
                    data.load().map_err(failed)?;
                    Ok(data)
                }
                Reply::Hole => Ok(Buf::unpooled(index(len)).into()),
                _ => Err(Error::misfit()),
            };
        }
        let mut buf = room.into_buf();
        storage::read_into(device, at, &mut buf, None).await?;
        Ok(buf.into())
    }
}

/// A block to unpack.
struct Job {
    /// Its offset on the disk.
    at: u64,
    /// Its place in the buffer.
    out: Range<usize>,
    /// Its place in the compressed bytes.
    packed: Range<usize>,
    /// Its offset in the file.
    host: u64,
}

/// Blocks that need more compressed bytes than were read, and how many.
type Long = Vec<(Job, usize)>;

/// Unpacks blocks, on any thread. A block has at most `longest` compressed bytes.
fn carry_out(
    format: &str,
    unpack: &dyn Unpack,
    bytes: &Data,
    jobs: Vec<Job>,
    mut buf: Buf,
    longest: usize,
) -> Result<(Buf, Long)> {
    let mut long = Vec::new();
    for job in jobs {
        let bad = |why: String| bad_block(format, job.at, &why);
        let packed = bytes.bytes().get(job.packed.clone()).ok_or_else(Error::misfit)?;
        let Some((header, packed)) = packed.split_at_checked(unpack.header()) else {
            return Err(bad("the file ends before it".into()));
        };
        let len = unpack.len(header, job.at).map_err(bad)?;
        let Some(packed) = packed.get(..len) else {
            let needed = len.saturating_add(unpack.header());
            if needed > longest {
                return Err(bad(format!("it has {len} compressed bytes")));
            }
            long.push((job, needed));
            continue;
        };
        let out = buf.get_mut(job.out.clone()).ok_or_else(Error::misfit)?;
        unpack.unpack(packed, out).map_err(bad)?;
    }
    Ok((buf, long))
}

fn bad_block(format: &str, at: u64, why: &str) -> Error {
    damaged(format, format!("cannot unpack the compressed data of offset {at} of the disk: {why}"))
}

/// A read that is put together.
struct Assembly<'a> {
    parts: &'a Parts,
    /// The first byte's offset on the disk.
    at: u64,
    buf: Buf,
    /// Reads in flight: place in the buffer, length, and the request.
    flying: VecDeque<(usize, usize, Pending)>,
    zero: bool,
}

impl Assembly<'_> {
    async fn run(mut self, runs: &[Run]) -> Outcome {
        let mut rest = runs;
        while let Some((&run, _)) = rest.split_first() {
            let used = match run.place {
                Place::Packed { .. } => self.packed(rest).await?,
                _ => {
                    self.plain(run).await?;
                    1
                }
            };
            rest = &rest[used..];
        }
        while self.land().await? {}
        Ok(if self.zero { Reply::Hole } else { Reply::Data(self.buf.into()) })
    }

    fn place(&self, at: u64) -> usize {
        index(at - self.at)
    }

    /// Unpacks the first runs; returns how many.
    async fn packed(&mut self, runs: &[Run]) -> Result<usize> {
        let Some(&first) = runs.first() else { return Ok(0) };
        self.zero = false;
        if !self.parts.is_whole(&first) {
            let block = self.parts.block(first).await?;
            let start = index(first.at % self.parts.image.unit);
            let place = self.place(first.at);
            let len = index(first.len);
            let part = block.bytes().get(start..start + len).ok_or_else(Error::misfit)?;
            self.buf[place..place + len].copy_from_slice(part);
            return Ok(1);
        }
        let count = self.parts.group(runs);
        let buf = std::mem::replace(&mut self.buf, Buf::unpooled(0));
        self.buf = self.parts.unpack_group(&runs[..count], self.at, buf).await?;
        Ok(count)
    }

    /// Starts the reads of a run.
    async fn plain(&mut self, run: Run) -> Result<()> {
        let parts = self.parts;
        let start = self.place(run.at);
        let end = self.place(run.end());
        let Some(Below { device, at, len }) = parts.below(run) else {
            self.buf[start..end].fill(0);
            return Ok(());
        };
        let mut done = 0;
        while done < len {
            let now = PIECE.min(len - done).min(device.facts().block.maximum.into()).max(1);
            let room = self.room(index(now)).await?;
            let pending = device.submit(Request::read(at + done, room));
            self.flying.push_back((start + index(done), index(now), pending));
            done += now;
        }
        self.buf[start + index(len)..end].fill(0);
        Ok(())
    }

    /// Memory for a piece. Never waits for others while own requests hold some.
    async fn room(&mut self, len: usize) -> Result<Reservation> {
        loop {
            if let Some(room) = self.parts.pieces.try_reserve(len) {
                return Ok(room);
            }
            if !self.land().await? {
                return storage::room(&self.parts.pieces, len).await;
            }
        }
    }

    /// Waits for the oldest request; false if there is none.
    async fn land(&mut self) -> Result<bool> {
        let Some((place, len, pending)) = self.flying.pop_front() else { return Ok(false) };
        let found = storage::place(pending.await?, &mut self.buf[place..place + len])?;
        self.zero &= !found;
        Ok(true)
    }
}
