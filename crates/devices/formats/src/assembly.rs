//! Reads of a disk in an image: passed on whole where the range is in one place, else put together in one
//! buffer.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use blockhaul_block::{
    Device, Error, FileRange, LeaseAccess, Outcome, PendingRequest, Reply, Request, Result,
};
use blockhaul_io::{Buf, Data, Pool, Reservation};

use crate::block_cache::BlockCache;
use crate::bytes::index;
use crate::storage;

/// Longest piece of a read that is in several places, and how many are read at a time, in bytes.
const PIECE: u64 = 256 << 10;
const PIECES: u64 = 8;
/// Compressed data that is read with one request, in bytes, unless a block has more.
const GROUP: u64 = 512 << 10;
/// Groups of compressed blocks that are unpacked at a time, by one handle.
const GROUPS: u64 = 8;

/// Memory for pieces.
pub(crate) fn piece_pool() -> Pool {
    Pool::new(Pool::cost(index(PIECE)) * PIECES)
}

/// Memory for compressed data, of which a block has at most `longest` bytes.
pub(crate) fn packed_pool(longest: u64) -> Pool {
    Pool::new(Pool::cost(index(GROUP.max(longest))) * GROUPS)
}

/// A run of bytes of the disk in one place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct DiskRun<P> {
    /// Offset on the disk.
    pub(crate) at: u64,
    /// Length in bytes, at least 1. A run never joins two compressed blocks.
    pub(crate) len: u64,
    pub(crate) place: P,
}

impl<P> DiskRun<P> {
    /// The offset after it; runs are within a disk of at most 2^63 - 1 bytes.
    pub(crate) fn end(&self) -> u64 {
        self.at + self.len
    }
}

/// The compressed data of a block: the number of its file, and its place there.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PackedBlock {
    pub(crate) file: usize,
    pub(crate) at: u64,
    /// Length in bytes, at most.
    pub(crate) len: u64,
}

/// Bytes of a device that are all or the first part of a run; the rest is zero.
pub(crate) struct PlainBytes<'a> {
    pub(crate) device: &'a Arc<dyn Device>,
    pub(crate) at: u64,
    pub(crate) len: u64,
}

impl<'a> PlainBytes<'a> {
    /// The bytes of a run of `len` bytes from `at` on in a device that ends at `end`; `None` if there are none.
    pub(crate) fn within(
        device: &'a Arc<dyn Device>,
        (at, end): (u64, u64),
        len: u64,
    ) -> Option<PlainBytes<'a>> {
        let len = len.min(end.checked_sub(at)?);
        (len > 0).then_some(PlainBytes { device, at, len })
    }
}

/// An image from which runs are read.
pub(crate) trait RunReader {
    /// Where a run is.
    type Place: Copy;

    /// The compressed block at this place, if there is one.
    fn packed(place: Self::Place) -> Option<PackedBlock>;

    /// The key of the compressed block of a run in the cache.
    fn cache_key(&self, run: DiskRun<Self::Place>) -> u64;

    /// The blocks that were unpacked lately.
    fn cache(&self) -> &BlockCache;

    /// Length in bytes of a block, but for the last one.
    fn unit(&self) -> u64;

    /// Length in bytes of the block that contains `at`.
    fn block_len(&self, at: u64) -> u64;

    /// Where a run of plain bytes is; `None` if it has none.
    fn plain(&self, run: DiskRun<Self::Place>) -> Option<PlainBytes<'_>>;

    /// Memory for pieces.
    fn pieces(&self) -> &Pool;

    /// Unpacks whole blocks, whose data lies together in one file, into their places in a buffer that begins
    /// with byte `at` of the disk.
    async fn unpack(&self, runs: &[DiskRun<Self::Place>], at: u64, buf: Buf) -> Result<Buf>;

    /// Answers a read of exactly this run without a copy, or gives the room back.
    fn pass_on(
        &self,
        run: DiskRun<Self::Place>,
        room: Reservation,
    ) -> Result<PendingRequest, Reservation> {
        if Self::packed(run.place).is_some() {
            let Some(block) = self.cache().find(self.cache_key(run)) else { return Err(room) };
            let data = block.slice(index(run.at % self.unit()), room.len());
            return Ok(PendingRequest::ready(Ok(Reply::Data(data))));
        }
        match self.plain(run) {
            None => Ok(PendingRequest::ready(Ok(Reply::Hole))),
            Some(plain) if plain.len == run.len => {
                Ok(plain.device.submit(Request::read(plain.at, room)))
            }
            Some(_) => Err(room),
        }
    }

    /// The range of a file with the first bytes of a run.
    fn file_range(&self, run: DiskRun<Self::Place>, access: LeaseAccess) -> Option<FileRange> {
        let PlainBytes { device, at, len } = self.plain(run)?;
        device.file_at(at, len, access)
    }

    /// Reads these runs, which begin with byte `at` of the disk.
    async fn read_runs(
        &self,
        at: u64,
        runs: &[DiskRun<Self::Place>],
        room: Reservation,
    ) -> Outcome {
        let room = match runs[..] {
            [run] => match self.pass_on(run, room) {
                Ok(pending) => return pending.await,
                Err(room) => room,
            },
            _ => room,
        };
        let assembly = self.assemble(at, room.into_buf(), runs).await?;
        Ok(if assembly.zero { Reply::Hole } else { Reply::Data(assembly.buf.into()) })
    }

    /// Fills the places of runs in a buffer that begins with byte `at` of the disk.
    async fn assemble(
        &self,
        at: u64,
        buf: Buf,
        runs: &[DiskRun<Self::Place>],
    ) -> Result<Assembly<'_, Self>> {
        let flying = VecDeque::new();
        let mut assembly = Assembly { reader: self, at, buf, flying, zero: true };
        assembly.fill(runs).await?;
        Ok(assembly)
    }

    /// Whether the run is all of a compressed block.
    fn is_whole(&self, run: &DiskRun<Self::Place>) -> bool {
        Self::packed(run.place).is_some()
            && run.at.is_multiple_of(self.unit())
            && run.len == self.block_len(run.at)
    }

    /// The number of runs from the first one on that are whole compressed blocks, one after the other in the
    /// file; at least 1.
    fn group(&self, runs: &[DiskRun<Self::Place>]) -> usize {
        let mut bounds: Option<(usize, Range<u64>)> = None;
        let fits = |run: &&DiskRun<Self::Place>| {
            let Some(PackedBlock { file, at, len }) = Self::packed(run.place) else { return false };
            let (first, Range { start, end }) = bounds.clone().unwrap_or((file, at..at));
            // The last sector of one may begin the next.
            let joins = file == first && at >= start && at <= end;
            let end = end.max(at.saturating_add(len));
            bounds = Some((first, start..end));
            joins && end - start <= GROUP && self.is_whole(run)
        };
        runs.iter().take_while(fits).count().max(1)
    }

    /// The unpacked block of a run.
    async fn block(&self, run: DiskRun<Self::Place>) -> Result<Data> {
        let (cache, key) = (self.cache(), self.cache_key(run));
        if let Some(data) = cache.find(key) {
            return Ok(data);
        }
        let _turn = cache.unpacking.lock(key, key + 1).await;
        if let Some(data) = cache.find(key) {
            return Ok(data);
        }
        let at = run.at - run.at % self.unit();
        let whole = DiskRun { at, len: self.block_len(at), place: run.place };
        let buf = Buf::unpooled(index(whole.len));
        let data = Data::from(self.unpack(&[whole], at, buf).await?);
        cache.keep(key, data.clone());
        Ok(data)
    }
}

/// A read that is put together.
pub(crate) struct Assembly<'a, R: ?Sized> {
    reader: &'a R,
    /// The first byte's offset on the disk.
    at: u64,
    pub(crate) buf: Buf,
    /// Reads in flight: place in the buffer, length, and the request.
    flying: VecDeque<(usize, usize, PendingRequest)>,
    zero: bool,
}

impl<R: RunReader + ?Sized> Assembly<'_, R> {
    async fn fill(&mut self, runs: &[DiskRun<R::Place>]) -> Result<()> {
        let mut rest = runs;
        while let Some((&run, _)) = rest.split_first() {
            let used = if R::packed(run.place).is_some() {
                self.packed(run, rest).await?
            } else {
                self.plain(run).await?;
                1
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
    async fn packed(
        &mut self,
        first: DiskRun<R::Place>,
        runs: &[DiskRun<R::Place>],
    ) -> Result<usize> {
        self.zero = false;
        if !self.reader.is_whole(&first) {
            let block = self.reader.block(first).await?;
            let start = index(first.at % self.reader.unit());
            let place = self.place(first.at);
            let len = index(first.len);
            let part = block.bytes().get(start..start + len).ok_or_else(Error::misfit)?;
            self.buf[place..place + len].copy_from_slice(part);
            return Ok(1);
        }
        let count = self.reader.group(runs);
        let buf = std::mem::replace(&mut self.buf, Buf::unpooled(0));
        self.buf = self.reader.unpack(&runs[..count], self.at, buf).await?;
        Ok(count)
    }

    /// Starts the reads of a run.
    async fn plain(&mut self, run: DiskRun<R::Place>) -> Result<()> {
        let reader = self.reader;
        let start = self.place(run.at);
        let end = self.place(run.end());
        let Some(PlainBytes { device, at, len }) = reader.plain(run) else {
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
        let pool = self.reader.pieces();
        loop {
            if let Some(room) = pool.try_reserve(len) {
                return Ok(room);
            }
            if !self.land().await? {
                return storage::room(pool, len).await;
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
