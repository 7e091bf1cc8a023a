//! An open disk in chunks: reads and writes.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use blockhaul_block::{Error, Extents, FailedFlush, Kind, Result};
use futures_util::future::{join_all, try_join_all};
use tokio::sync::RwLockWriteGuard;

use crate::chunks::buffer::{BufferRoom, ChunkBuffer, RoomPermit};
use crate::chunks::commit::OpenManifest;
use crate::chunks::folder::ObjectFolder;
use crate::chunks::layout::{ChunkManifest, ChunkVersion, MANIFEST, MANIFEST_MAX, chunk_name};
use crate::chunks::lease::WriterLease;
use crate::chunks::table::{ChunkTable, SharedBuffer};

/// An open disk. Its methods run on the thread of requests.
pub(crate) struct ChunkDisk {
    pub(crate) folder: Arc<dyn ObjectFolder>,
    /// Identifier of the disk.
    pub(crate) id: String,
    /// Bytes of the disk, and of a chunk.
    pub(crate) size: u64,
    pub(crate) chunk: u64,
    /// Chunks that are sent at a time.
    pub(crate) connections: usize,
    /// The number of changes of the contents when a reader has opened the disk; none for a writer.
    pub(crate) read_generation: Option<u64>,
    pub(crate) table: Mutex<ChunkTable>,
    pub(crate) room: Arc<BufferRoom>,
    pub(crate) manifest: tokio::sync::Mutex<OpenManifest>,
    pub(crate) lease: WriterLease,
    /// Held during a flush. The lease is renewed meanwhile, for which the manifest must be free.
    pub(crate) flushes: tokio::sync::Mutex<()>,
    pub(crate) failed_flush: FailedFlush,
    /// Held for reading while a request is under way.
    pub(crate) requests: Arc<tokio::sync::RwLock<()>>,
    /// Notified when the disk is closed: the search for objects of earlier writers ends.
    pub(crate) closing: tokio::sync::Notify,
    /// Held for reading while objects are removed.
    pub(crate) removals: Arc<tokio::sync::RwLock<()>>,
}

/// A part of a request inside one chunk.
#[derive(Debug, Clone, Copy)]
struct ChunkPart {
    chunk: u64,
    begin: usize,
    end: usize,
}

impl ChunkDisk {
    pub(crate) fn table(&self) -> MutexGuard<'_, ChunkTable> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the disk can still be used.
    ///
    /// # Errors
    /// Another writer has it, or it was closed.
    pub(crate) fn check(&self) -> Result<()> {
        self.table().failed.clone().map_or(Ok(()), Err)
    }

    /// Bytes of a chunk: a small number.
    fn chunk_len(&self) -> usize {
        usize::try_from(self.chunk).unwrap_or(usize::MAX)
    }

    fn parts(&self, at: u64, end: u64) -> impl Iterator<Item = ChunkPart> {
        let size = self.chunk;
        let inside = |offset: u64| usize::try_from(offset).unwrap_or(usize::MAX);
        (at / size..end.div_ceil(size)).map(move |chunk| {
            let base = chunk * size;
            let (begin, end) = (at.max(base) - base, end.min(base + size) - base);
            ChunkPart { chunk, begin: inside(begin), end: inside(end) }
        })
    }

    /// The states of a range.
    pub(crate) fn extents(&self, at: u64, end: u64) -> Extents {
        self.table().extents(at, end, self.chunk)
    }

    /// Fills `buf` with the bytes at offset `at`.
    ///
    /// # Errors
    /// A chunk is lost, or cannot be read; another writer has the disk, or may have it.
    pub(crate) async fn read(&self, at: u64, buf: &mut [u8]) -> Result<()> {
        let mut rest = buf;
        let mut reads = Vec::new();
        for part in self.parts(at, at + rest.len() as u64) {
            let (piece, more) = rest.split_at_mut(part.end - part.begin);
            rest = more;
            reads.push(self.read_part(part, piece));
        }
        try_join_all(reads).await?;
        self.prove_lease().await
    }

    async fn read_part(&self, part: ChunkPart, buf: &mut [u8]) -> Result<()> {
        let ChunkPart { chunk, begin, end } = part;
        loop {
            self.check()?;
            let (buffer, version) = {
                let mut table = self.table();
                (table.buffer(chunk), table.version(chunk))
            };
            let Some(buffer) = buffer else {
                if self.read_object(chunk, version, begin, buf).await? {
                    return Ok(());
                }
                continue;
            };
            let held = buffer.read().await;
            if held.has(begin, end) {
                held.copy(begin, buf);
                return Ok(());
            }
            if held.is_empty() {
                let version = self.table().version(chunk);
                if self.read_object(chunk, version, begin, buf).await? {
                    return Ok(());
                }
                continue;
            }
            drop(held);
            let mut held = buffer.write().await;
            self.fill(chunk, &mut held).await?;
        }
    }

    /// Reads a part of an object. False: the chunk has another version by now.
    async fn read_object(
        &self,
        chunk: u64,
        version: ChunkVersion,
        begin: usize,
        buf: &mut [u8],
    ) -> Result<bool> {
        if version == ChunkVersion::HOLE {
            buf.fill(0);
            return Ok(true);
        }
        let name = chunk_name(chunk, version);
        if self.folder.read(&name, self.chunk, begin as u64, buf).await? {
            return Ok(true);
        }
        if self.table().version(chunk) != version {
            return Ok(false);
        }
        Err(self.lost(&name).await)
    }

    /// The error of an object that is not there, but should be.
    async fn lost(&self, name: &str) -> Error {
        if self.read_generation.is_none()
            && let Err(error) = self.renew().await
            && error.kind() == Kind::InUse
        {
            // The writer that has the disk now has removed it.
            return error;
        }
        if let Some(opened) = self.read_generation
            && let Ok(Some(found)) = self.folder.get(MANIFEST, MANIFEST_MAX).await
            && let Ok(now) = ChunkManifest::parse(&found.bytes)
            && now.generation != opened
        {
            let text = "a writer has changed the disk since it was opened";
            return Error::new(Kind::Io, text).with_remedy("open it again");
        }
        let text = format!("the object {name} is lost: the index names it, and it is not there");
        Error::new(Kind::Io, text).with_remedy("restore it, or write that part of the disk again")
    }

    /// Reads what a buffer lacks of its chunk.
    async fn fill(&self, chunk: u64, held: &mut ChunkBuffer) -> Result<()> {
        let len = self.chunk_len();
        if held.is_empty() || held.has(0, len) {
            return Ok(());
        }
        // The buffer is locked: no other version appears.
        let version = self.table().version(chunk);
        let mut base = vec![0; len];
        if !self.read_object(chunk, version, 0, &mut base).await? {
            return Err(Error::new(Kind::Io, "a chunk has changed under its lock (a bug)"));
        }
        held.fill(base);
        Ok(())
    }

    /// Writes bytes at offset `at`.
    ///
    /// # Errors
    /// Another chunk cannot be written, which would make room.
    pub(crate) async fn write(self: &Arc<ChunkDisk>, at: u64, bytes: &[u8]) -> Result<()> {
        let mut rest = bytes;
        let mut writes = Vec::new();
        for part in self.parts(at, at + bytes.len() as u64) {
            let (piece, more) = rest.split_at(part.end - part.begin);
            rest = more;
            writes.push(self.write_part(part, Some(piece)));
        }
        // Each of them is carried out to its end: one that is dropped may leave its buffer where nobody evicts it.
        join_all(writes).await.into_iter().collect()
    }

    /// Makes `len` bytes read as zeroes. Whole chunks become holes, unless `keeps`.
    ///
    /// # Errors
    /// Those of [`write`](ChunkDisk::write).
    pub(crate) async fn zero(self: &Arc<ChunkDisk>, at: u64, len: u64, keeps: bool) -> Result<()> {
        for part in self.parts(at, at + len) {
            let ChunkPart { chunk, begin, end } = part;
            let is_end = chunk * self.chunk + end as u64 == self.size;
            let is_whole = begin == 0 && (end == self.chunk_len() || is_end);
            let is_hole = || {
                let table = self.table();
                table.version(chunk) == ChunkVersion::HOLE && !table.is_dirty(chunk)
            };
            if is_whole && !keeps {
                self.discard(chunk).await?;
            } else if keeps || !is_hole() {
                self.write_part(part, None).await?;
            }
        }
        Ok(())
    }

    /// Makes the whole chunks of a range holes.
    ///
    /// # Errors
    /// Another writer has the disk.
    pub(crate) async fn trim(self: &Arc<ChunkDisk>, at: u64, len: u64) -> Result<()> {
        let first = at.next_multiple_of(self.chunk);
        let end = at + len;
        let last = if end == self.size { end } else { end - end % self.chunk };
        if first < last { self.zero(first, last - first, false).await } else { self.check() }
    }

    async fn discard(self: &Arc<ChunkDisk>, chunk: u64) -> Result<()> {
        self.check()?;
        let buffer = self.table().buffer_or_new(chunk);
        let mut held = buffer.write().await;
        held.clear();
        let stray = {
            let mut table = self.table();
            table.set_candidate(chunk, false);
            table.set_version(chunk, ChunkVersion::HOLE)
        };
        drop(held);
        self.table().tidy(chunk, buffer);
        self.remove(stray.into_iter().collect());
        Ok(())
    }

    async fn write_part(
        self: &Arc<ChunkDisk>,
        part: ChunkPart,
        bytes: Option<&[u8]>,
    ) -> Result<()> {
        let buffer = self.table().buffer_or_new(part.chunk);
        let mut held = buffer.write().await;
        let written = self.write_buffer(part, bytes, &mut held).await;
        drop(held);
        self.table().tidy(part.chunk, buffer);
        written
    }

    async fn write_buffer(
        self: &Arc<ChunkDisk>,
        part: ChunkPart,
        bytes: Option<&[u8]>,
        held: &mut ChunkBuffer,
    ) -> Result<()> {
        let ChunkPart { chunk, begin, end } = part;
        if held.is_empty() {
            held.begin(self.chunk_len(), self.make_room().await?);
        }
        self.check()?;
        held.put(begin, end, bytes);
        if chunk * self.chunk + end as u64 == self.size {
            // What the object has beyond the end of the disk is nobody's.
            held.put(end, self.chunk_len(), None);
        }
        let mut table = self.table();
        table.set_dirty(chunk);
        table.set_candidate(chunk, true);
        drop(table);
        self.room.changed.notify_waiters();
        Ok(())
    }

    /// Room for a chunk in memory. Another one leaves for it, if need be.
    async fn make_room(self: &Arc<ChunkDisk>) -> Result<RoomPermit> {
        loop {
            let changed = self.room.changed.notified();
            tokio::pin!(changed);
            // Before the look: nothing is missed.
            changed.as_mut().enable();
            if let Some(room) = self.room.take() {
                return Ok(room);
            }
            let victim = self.table().victim();
            match victim {
                Some((chunk, buffer)) => self.evict(chunk, buffer).await?,
                None => changed.await,
            }
        }
    }

    async fn evict(self: &Arc<ChunkDisk>, chunk: u64, buffer: SharedBuffer) -> Result<()> {
        let sent = self.write_back(chunk, &buffer).await;
        let mut held = buffer.write().await;
        if !self.table().is_dirty(chunk) {
            held.clear();
        }
        let remains = !held.is_empty();
        drop(held);
        {
            let mut table = self.table();
            table.set_candidate(chunk, remains);
            table.tidy(chunk, buffer);
        }
        self.room.changed.notify_waiters();
        sent
    }

    /// Writes the object of a chunk, if its bytes in memory are newer.
    ///
    /// # Errors
    /// The object cannot be written, or the rest of the chunk cannot be read.
    pub(crate) async fn write_back(
        self: &Arc<ChunkDisk>,
        chunk: u64,
        buffer: &SharedBuffer,
    ) -> Result<()> {
        let mut held = buffer.write().await;
        if !self.table().is_dirty(chunk) {
            return Ok(());
        }
        self.fill(chunk, &mut held).await?;
        self.check()?;
        // Reads go on meanwhile.
        let held = RwLockWriteGuard::downgrade(held);
        let version = self.table().next_version()?;
        let sent = self.folder.put(&chunk_name(chunk, version), held.bytes()).await;
        let stray = {
            let mut table = self.table();
            table.is_littered |= sent.is_err();
            sent?;
            table.set_version(chunk, version)
        };
        self.remove(stray.into_iter().collect());
        Ok(())
    }
}
