//! The chunks of a disk that is backed up.
//!
//! Each chunk is a blob. Whole chunks are saved as they are written; a chunk of which a part is written stays in memory until
//! it was written in full, memory is short, or the disk is flushed. So a disk may be written in any order, any number of
//! times.

use std::collections::{BTreeMap, HashSet};
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use blockhaul_block::{Error, Extents, HOLE, Kind, ZERO};

use crate::content::FileContent;
use crate::digest::Digest;
use crate::fault::{RepositoryFault, Result};
use crate::index::BlobKind;
use crate::writer::parent::ParentFile;
use crate::writer::session::BackupSession;

/// Bytes of a chunk, and those of disks above 2 TiB.
const CHUNK: u64 = 1 << 20;
const CHUNK_OF_LARGE: u64 = 4 << 20;
const LARGE: u64 = 2 << 40;
/// Chunks that an earlier backup may have.
const CHUNK_RANGE: Range<u64> = 64 << 10..(16 << 20) + 1;
/// Largest disk: the list of its chunks is one blob.
const SIZE_MAX: u64 = 64 << 40;
/// Bytes of chunks of which a part was written.
const DIRTY_MAX: u64 = 64 << 20;
/// Marks a chunk whose bytes are those of the earlier backup, which has other chunks.
const UNKNOWN: Digest = Digest([0; 32]);
/// Runs that are enough for one reply.
const RUNS_MAX: usize = 64 << 10;

/// A disk that is backed up.
pub(crate) struct DiskImage {
    session: Arc<BackupSession>,
    size: u64,
    chunk: u64,
    /// The digests of a chunk of zeroes, and of the last one.
    zeroes: [Digest; 2],
    /// An earlier backup with other chunks.
    parent: Option<FileContent>,
    state: Mutex<DiskState>,
    /// A chunk is no longer busy.
    idle: Condvar,
}

struct DiskState {
    digests: Vec<Digest>,
    /// Chunks of which a part was written.
    dirty: BTreeMap<usize, DirtyChunk>,
    /// Chunks that a thread reads or saves: others wait.
    busy: HashSet<usize>,
}

struct DirtyChunk {
    bytes: Vec<u8>,
    /// Bytes that were written, counted each time.
    written: usize,
}

/// Bytes of the chunks of a disk with this earlier backup.
///
/// # Errors
/// [`Kind::Unsupported`]: the disk is too large.
pub(crate) fn chunk_of(size: u64, parent: Option<&ParentFile>) -> blockhaul_block::Result<u64> {
    if size > SIZE_MAX {
        let text = format!("restic: a file of {size} bytes has more than {SIZE_MAX}");
        let remedy = "back up parts of the disk: --range, with a path for each";
        return Err(Error::new(Kind::Unsupported, text).with_remedy(remedy));
    }
    let usual = if size > LARGE { CHUNK_OF_LARGE } else { CHUNK };
    let earlier = parent.and_then(|parent| {
        let chunk = parent.content.first_of_several()?;
        let is_usable = chunk.is_power_of_two()
            && CHUNK_RANGE.contains(&chunk)
            && size.div_ceil(chunk) <= SIZE_MAX / CHUNK_OF_LARGE;
        (is_usable && parent.content.is_cut_each(chunk)).then_some(chunk)
    });
    Ok(earlier.unwrap_or(usual))
}

impl DiskImage {
    /// A disk of `size` bytes that reads as zeroes; or with the bytes of an earlier backup, if there is one to keep.
    pub(crate) fn new(
        session: Arc<BackupSession>,
        (size, chunk): (u64, u64),
        kept: Option<ParentFile>,
    ) -> DiskImage {
        let zeroes = vec![0; length(chunk.min(size))];
        let last = size.checked_rem(chunk).filter(|rest| *rest > 0).unwrap_or(chunk.min(size));
        let zeroes = [chunk.min(size), last].map(|len| Digest::of(&zeroes[..length(len)]));
        let mut image = DiskImage {
            session,
            size,
            chunk,
            zeroes,
            parent: None,
            state: Mutex::new(DiskState {
                digests: Vec::new(),
                dirty: BTreeMap::new(),
                busy: HashSet::new(),
            }),
            idle: Condvar::new(),
        };
        let count = length(size.div_ceil(chunk));
        let digests = match kept {
            Some(kept) if kept.content.size() == size && kept.content.is_cut_each(chunk) => {
                kept.digests
            }
            kept => {
                image.parent = kept.map(|kept| kept.content);
                (0..count).map(|number| image.initial(number)).collect()
            }
        };
        image.lock().digests = digests;
        image
    }

    /// Bytes of the disk.
    pub(crate) fn size(&self) -> u64 {
        self.size
    }

    fn lock(&self) -> MutexGuard<'_, DiskState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn range(&self, number: usize) -> Range<u64> {
        let at = number as u64 * self.chunk;
        at..(at + self.chunk).min(self.size)
    }

    fn zero_digest(&self, number: usize) -> Digest {
        self.zeroes[usize::from(self.range(number).end == self.size)]
    }

    fn initial(&self, number: usize) -> Digest {
        let range = self.range(number);
        let has_bytes = self.parent.as_ref().is_some_and(|parent| {
            range.start < parent.size() && parent.parts(range).any(|part| part.blob.is_some())
        });
        if has_bytes { UNKNOWN } else { self.zero_digest(number) }
    }

    /// The chunks that a range touches, with the range inside of each.
    fn touched(&self, at: u64, len: u64) -> impl Iterator<Item = (usize, Range<usize>)> {
        let end = at + len;
        (at / self.chunk..end.div_ceil(self.chunk)).map(move |number| {
            let base = number * self.chunk;
            let inside = at.max(base) - base..end.min(base + self.chunk) - base;
            (length(number), length(inside.start)..length(inside.end))
        })
    }

    /// Waits until no other thread has this chunk.
    fn wait_for(&self, number: usize) -> MutexGuard<'_, DiskState> {
        let state = self.lock();
        let is_busy = |state: &mut DiskState| state.busy.contains(&number);
        self.idle.wait_while(state, is_busy).unwrap_or_else(PoisonError::into_inner)
    }

    /// Writes bytes, or zeroes. Blocks.
    ///
    /// # Errors
    /// The repository fails.
    pub(crate) fn write(&self, at: u64, len: u64, bytes: Option<&[u8]>) -> Result<()> {
        let mut next = 0;
        for (number, inside) in self.touched(at, len) {
            let part = bytes.map(|bytes| &bytes[next..next + inside.len()]);
            next += inside.len();
            let range = self.range(number);
            if inside.len() as u64 == range.end - range.start {
                self.write_chunk(number, part)?;
            } else {
                self.write_part(number, inside, part)?;
            }
        }
        Ok(())
    }

    fn write_chunk(&self, number: usize, bytes: Option<&[u8]>) -> Result<()> {
        let mut state = self.wait_for(number);
        state.dirty.remove(&number);
        match bytes {
            None => {
                state.digests[number] = self.zero_digest(number);
                Ok(())
            }
            Some(bytes) => self.save(state, number, bytes).map(drop),
        }
    }

    fn write_part(&self, number: usize, inside: Range<usize>, bytes: Option<&[u8]>) -> Result<()> {
        let mut state = self.wait_for(number);
        if !state.dirty.contains_key(&number) {
            let digest = state.digests[number];
            if bytes.is_none() && digest == self.zero_digest(number) {
                return Ok(());
            }
            state.busy.insert(number);
            drop(state);
            let read = self.chunk_bytes(number, digest);
            state = self.lock();
            self.release(&mut state, number);
            state.dirty.insert(number, DirtyChunk { bytes: read?, written: 0 });
        }
        let Some(chunk) = state.dirty.get_mut(&number) else { return Err(Error::misfit().into()) };
        chunk.written += inside.len();
        match bytes {
            Some(bytes) => chunk.bytes[inside].copy_from_slice(bytes),
            None => chunk.bytes[inside].fill(0),
        }
        if chunk.written >= chunk.bytes.len() {
            return self.save_dirty(state, number).map(drop);
        }
        if state.dirty.len() as u64 * self.chunk > DIRTY_MAX {
            // Another one is more likely to be complete than written on.
            let other = state.dirty.keys().find(|other| **other != number).copied();
            drop(self.save_dirty(state, other.unwrap_or(number))?);
        }
        Ok(())
    }

    /// Saves a chunk of which a part was written.
    fn save_dirty<'a>(
        &'a self,
        mut state: MutexGuard<'a, DiskState>,
        number: usize,
    ) -> Result<MutexGuard<'a, DiskState>> {
        match state.dirty.remove(&number) {
            Some(chunk) => self.save(state, number, &chunk.bytes),
            None => Ok(state),
        }
    }

    /// Saves the bytes of a chunk that no thread has.
    fn save<'a>(
        &'a self,
        mut state: MutexGuard<'a, DiskState>,
        number: usize,
        bytes: &[u8],
    ) -> Result<MutexGuard<'a, DiskState>> {
        state.busy.insert(number);
        drop(state);
        let saved = if blockhaul_io::is_zero(bytes) {
            Ok(self.zero_digest(number))
        } else {
            let digest = Digest::of(bytes);
            self.session.save(BlobKind::Data, digest, bytes).map(|()| digest)
        };
        let mut state = self.lock();
        self.release(&mut state, number);
        state.digests[number] = saved?;
        Ok(state)
    }

    fn release(&self, state: &mut DiskState, number: usize) {
        state.busy.remove(&number);
        self.idle.notify_all();
    }

    /// The bytes of a chunk with this digest.
    fn chunk_bytes(&self, number: usize, digest: Digest) -> Result<Vec<u8>> {
        let range = self.range(number);
        if digest == self.zero_digest(number) {
            return Ok(vec![0; length(range.end - range.start)]);
        }
        if digest != UNKNOWN {
            return Ok(self.session.read(&digest)?.to_vec());
        }
        let mut bytes = vec![0; length(range.end - range.start)];
        let Some(parent) = &self.parent else { return Ok(bytes) };
        for part in parent.parts(range.clone()) {
            let Some(blob) = part.blob.and_then(|number| parent.blob(number)) else { continue };
            let (from, to) = (part.at.max(range.start), part.end.min(range.end));
            let whole = self.session.read(&blob.digest)?;
            let source = whole.get(length(from - part.at)..length(to - part.at));
            let target = bytes.get_mut(length(from - range.start)..length(to - range.start));
            let (Some(source), Some(target)) = (source, target) else {
                return Err(Error::misfit().into());
            };
            target.copy_from_slice(source);
        }
        Ok(bytes)
    }

    /// Fills `buf` with the bytes at offset `at`. Blocks.
    ///
    /// # Errors
    /// A blob is missing or damaged, or the repository fails.
    pub(crate) fn read(&self, at: u64, buf: &mut [u8]) -> Result<()> {
        let mut next = 0;
        for (number, inside) in self.touched(at, buf.len() as u64) {
            let room = &mut buf[next..next + inside.len()];
            next += inside.len();
            let state = self.wait_for(number);
            if let Some(chunk) = state.dirty.get(&number) {
                room.copy_from_slice(&chunk.bytes[inside]);
                continue;
            }
            let digest = state.digests[number];
            drop(state);
            if digest == self.zero_digest(number) {
                room.fill(0);
                continue;
            }
            let bytes = match digest {
                UNKNOWN => self.chunk_bytes(number, digest)?.into(),
                _ => self.session.read(&digest)?,
            };
            room.copy_from_slice(bytes.get(inside).ok_or_else(Error::misfit)?);
        }
        Ok(())
    }

    /// The state of a range; the list may end earlier.
    pub(crate) fn extents(&self, at: u64, len: u64) -> Extents {
        let mut extents = Extents::new();
        let state = self.lock();
        for (number, inside) in self.touched(at, len) {
            let is_zero = !state.dirty.contains_key(&number)
                && !state.busy.contains(&number)
                && state.digests[number] == self.zero_digest(number);
            extents.push(inside.len() as u64, if is_zero { HOLE | ZERO } else { 0 });
            if extents.len() >= RUNS_MAX {
                break;
            }
        }
        extents
    }

    /// Saves all chunks, and hands the list of their digests to `publish`. Blocks.
    ///
    /// # Errors
    /// The repository fails.
    pub(crate) fn complete<T>(&self, publish: impl FnOnce(&[Digest]) -> Result<T>) -> Result<T> {
        self.save_unknown()?;
        let mut state = self.lock();
        while let Some(number) = state.dirty.keys().next().copied() {
            drop(state);
            state = self.save_dirty(self.wait_for(number), number)?;
        }
        let is_busy = |state: &mut DiskState| !state.busy.is_empty();
        let state = self.idle.wait_while(state, is_busy).unwrap_or_else(PoisonError::into_inner);
        self.save_zeroes(&state.digests)?;
        publish(&state.digests)
    }

    /// Saves the chunks whose bytes are still those of an earlier backup with other chunks, on several threads.
    fn save_unknown(&self) -> Result<()> {
        if self.parent.is_none() {
            return Ok(());
        }
        let count = self.lock().digests.len();
        let next = AtomicUsize::new(0);
        let failed = Mutex::new(None);
        let work = || {
            loop {
                let number = next.fetch_add(1, Ordering::Relaxed);
                if number >= count {
                    return Ok::<_, RepositoryFault>(());
                }
                let mut state = self.wait_for(number);
                if state.digests[number] != UNKNOWN || state.dirty.contains_key(&number) {
                    continue;
                }
                state.busy.insert(number);
                drop(state);
                let bytes = self.chunk_bytes(number, UNKNOWN);
                let mut state = self.lock();
                self.release(&mut state, number);
                drop(self.save(state, number, &bytes?)?);
            }
        };
        std::thread::scope(|scope| {
            for _ in 0..threads() {
                scope.spawn(|| {
                    if let Err(fault) = work() {
                        next.store(count, Ordering::Relaxed);
                        failed.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(fault);
                    }
                });
            }
        });
        failed.into_inner().unwrap_or_else(PoisonError::into_inner).map_or(Ok(()), Err)
    }

    /// Saves the blobs of zeroes that the list names.
    fn save_zeroes(&self, digests: &[Digest]) -> Result<()> {
        let Some((last, others)) = digests.split_last() else { return Ok(()) };
        let [whole, rest] = self.zeroes;
        for (digest, len, is_used) in [
            (whole, self.chunk, others.contains(&whole)),
            (rest, self.range(others.len()).end - self.range(others.len()).start, *last == rest),
        ] {
            if is_used {
                self.session.save(BlobKind::Data, digest, &vec![0; length(len)])?;
            }
        }
        Ok(())
    }
}

/// Threads that save chunks.
pub(crate) fn threads() -> usize {
    std::thread::available_parallelism().map_or(2, usize::from).clamp(2, 16)
}

/// A number of chunks of a disk, or of bytes inside of a chunk: both are small.
fn length(number: u64) -> usize {
    usize::try_from(number).unwrap_or(usize::MAX)
}
