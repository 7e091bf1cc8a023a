//! Reads: passed on whole where the range is in one place, else assembled.

use std::collections::VecDeque;
use std::sync::Arc;

use blockhaul_block::{Device, Error, Kind, Outcome, Pending, Reply, Request, Result};
use blockhaul_io::{Buf, Data, Pool, Reservation};

use super::entry::{Place, Run};
use super::error::damaged;
use super::parts::Parts;
use super::unpack::unpack;
use super::write::Writer;
use crate::bytes::index;
use crate::storage;

/// Longest piece of a read that is in several places, and how many are read at a time, in bytes.
const PIECE: u64 = 256 << 10;
const PIECES: u64 = 8;
/// Compressed data that is read with one request, in bytes, unless a cluster has more.
const GROUP: u64 = 512 << 10;
/// Groups of compressed clusters that are unpacked at a time, by one handle.
const GROUPS: u64 = 8;

/// Memory for pieces.
pub(super) fn piece_pool() -> Pool {
    Pool::new(Pool::cost(index(PIECE)) * PIECES)
}

/// Memory for compressed data, with clusters of `cluster` bytes. That of a cluster has fewer than
/// 2^(bits - 8) + 1 sectors: about twice a cluster.
pub(super) fn packed_pool(cluster: u64) -> Pool {
    let longest = GROUP.max(cluster.saturating_mul(2).saturating_add(512));
    Pool::new(Pool::cost(index(longest)) * GROUPS)
}

/// Starts a read of a range within the disk.
pub(super) fn submit(parts: &Arc<Parts>, at: u64, room: Reservation) -> Pending {
    let Some(end) = at.checked_add(room.len() as u64) else {
        return Error::new(Kind::Invalid, "beyond the end").into();
    };
    // Before the tables are looked at.
    let epoch = parts.image.writer.as_ref().map(Writer::epoch);
    let room = match parts.image.runs_now(at, end, 1) {
        Some(Err(error)) => return error.into(),
        Some(Ok(runs)) => match runs[..] {
            [run] => match parts.pass_on(run, room) {
                Ok(pending) => {
                    return match epoch {
                        None => pending,
                        Some(epoch) => pending.guarded(|| epoch),
                    };
                }
                Err(room) => room,
            },
            _ => room,
        },
        None => room,
    };
    let parts = parts.clone();
    Pending::start(async move {
        let _epoch = epoch;
        parts.read(at, end, room).await
    })
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
            (Place::Data(host), _) => (&self.data, host, self.data_len()),
            (Place::Unallocated, Some(backing)) => (&backing.device, run.at, backing.size),
            _ => return None,
        };
        let len = run.len.min(end.checked_sub(at)?);
        (len > 0).then_some(Below { device, at, len })
    }

    /// Answers a read of exactly this run without a copy, or gives the room back.
    fn pass_on(&self, run: Run, room: Reservation) -> Result<Pending, Reservation> {
        if let Place::Packed { host, .. } = run.place {
            let Some(cluster) = self.image.kept.find(host) else { return Err(room) };
            let start = index(run.at & (self.image.layout.cluster() - 1));
            return Ok(Pending::ready(Ok(Reply::Data(cluster.slice(start, room.len())))));
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
        let runs = self.image.runs(&self.file, at, end).await?;
        let room = match runs[..] {
            [run] => match self.pass_on(run, room) {
                Ok(pending) => return pending.await,
                Err(room) => room,
            },
            _ => room,
        };
        let assembly =
            Assembly { parts: self, at, buf: room.into_buf(), flying: VecDeque::new(), zero: true };
        assembly.run(&runs).await
    }

    /// Fills the places of runs in a buffer that begins with byte `at` of the disk.
    pub(super) async fn assemble(&self, at: u64, buf: Buf, runs: &[Run]) -> Result<Buf> {
        let flying = VecDeque::new();
        let mut assembly = Assembly { parts: self, at, buf, flying, zero: true };
        assembly.fill(runs).await?;
        Ok(assembly.buf)
    }

    /// Whether the run is all of a compressed cluster.
    fn is_whole(&self, run: &Run) -> bool {
        matches!(run.place, Place::Packed { .. }) && run.len == self.image.layout.cluster()
    }

    /// The number of runs from the first one on that are whole compressed clusters, whose data lies
    /// together in the file; at least 1.
    fn group(&self, runs: &[Run]) -> usize {
        let mut bounds: Option<(u64, u64)> = None;
        let fits = |run: &&Run| {
            let Place::Packed { host, len } = run.place else { return false };
            let (start, end) = bounds.unwrap_or((host, host));
            // QEMU writes them one after the other; the last sector of one may begin the next.
            let joins = host >= start && host <= end;
            let end = end.max(host + u64::from(len));
            bounds = Some((start, end));
            joins && end - start <= GROUP && self.is_whole(run)
        };
        runs.iter().take_while(fits).count().max(1)
    }

    /// Unpacks whole clusters into their places in a buffer that begins with byte `at` of the disk.
    async fn unpack_group(&self, runs: &[Run], at: u64, buf: Buf) -> Result<Buf> {
        let places = runs.iter().filter_map(|run| match run.place {
            Place::Packed { host, len } => Some((run.at, host, u64::from(len))),
            _ => None,
        });
        let start = places.clone().map(|(_, host, _)| host).min().unwrap_or(0);
        let end = places.clone().map(|(_, host, len)| host + len).max().unwrap_or(start);
        let jobs: Vec<_> = places
            .map(|(guest, host, len)| Job {
                at: guest,
                out: index(guest - at),
                packed: index(host - start)..index(host + len - start),
            })
            .collect();
        let bytes = self.packed_bytes(start, end - start).await?;
        let kind = self.image.compression;
        let cluster = index(self.image.layout.cluster());
        let work = move || {
            let mut buf = buf;
            for Job { at, out, packed } in jobs {
                let (Some(packed), Some(out)) =
                    (bytes.bytes().get(packed), buf.get_mut(out..out + cluster))
                else {
                    return Err(Error::misfit());
                };
                unpack(kind, packed, out).map_err(|why| cannot_unpack(at, &why))?;
            }
            Ok(buf)
        };
        blockhaul_io::offload(work).await.map_err(lost)?
    }

    /// The unpacked cluster of a run.
    async fn cluster(&self, run: Run) -> Result<Data> {
        let Place::Packed { host, len } = run.place else { return Err(Error::misfit()) };
        let kept = &self.image.kept;
        if let Some(data) = kept.find(host) {
            return Ok(data);
        }
        let _turn = kept.unpacking.lock(host, host + 1).await;
        if let Some(data) = kept.find(host) {
            return Ok(data);
        }
        let cluster = self.image.layout.cluster();
        let start = run.at & !(cluster - 1);
        let whole = Run { at: start, len: cluster, place: Place::Packed { host, len } };
        let buf = Buf::unpooled(index(cluster));
        let data = Data::from(self.unpack_group(&[whole], start, buf).await?);
        kept.keep(host, data.clone());
        Ok(data)
    }

    /// Compressed bytes of the image file.
    async fn packed_bytes(&self, at: u64, len: u64) -> Result<Data> {
        let room = storage::room(&self.packed, index(len)).await?;
        if len <= storage::piece(&self.file) {
            return match self.file.submit(Request::read(at, room)).await? {
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
        storage::read_into(&self.file, at, &mut buf, None).await?;
        Ok(buf.into())
    }
}

/// A cluster to unpack.
struct Job {
    /// Its offset on the disk.
    at: u64,
    /// Its place in the buffer.
    out: usize,
    packed: std::ops::Range<usize>,
}

fn cannot_unpack(at: u64, why: &str) -> Error {
    damaged(format!("cannot unpack the compressed cluster at offset {at} of the disk: {why}"))
}

fn lost(lost: blockhaul_io::Lost) -> Error {
    Error::new(Kind::Io, "qcow2: cannot unpack").because(lost)
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
        self.fill(runs).await?;
        Ok(if self.zero { Reply::Hole } else { Reply::Data(self.buf.into()) })
    }

    async fn fill(&mut self, runs: &[Run]) -> Result<()> {
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
        Ok(())
    }

    fn place(&self, at: u64) -> usize {
        index(at - self.at)
    }

    /// Unpacks the first runs; returns how many.
    async fn packed(&mut self, runs: &[Run]) -> Result<usize> {
        let Some(&first) = runs.first() else { return Ok(0) };
        self.zero = false;
        if !self.parts.is_whole(&first) {
            let cluster = self.parts.cluster(first).await?;
            let start = index(first.at & (self.parts.image.layout.cluster() - 1));
            let place = self.place(first.at);
            let len = index(first.len);
            self.buf[place..place + len].copy_from_slice(&cluster.bytes()[start..start + len]);
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
