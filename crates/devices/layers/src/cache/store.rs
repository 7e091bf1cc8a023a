//! The cache's file, the state of its blocks, and the locks on it.

use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use blockhaul_block::{Error, Facts, Result};
use blockhaul_io::{Buf, Data, FallocateMode, File};
use rustix::fs::{FallocateFlags, fallocate, fstatfs, ftruncate};

use super::blocks::{CacheBlockState, CacheBlocks};
use super::hold::CacheHold;
use super::options::{Bound, CacheMode, CacheOptions, OnRead, bound_in_blocks};
use crate::flushes::FlushRecord;
use crate::temporary;

/// Longest read that is copied on the worker itself: about 100 us from memory to memory.
const INLINE_READ: usize = 1 << 20;
/// Bytes of zeroes written at a time.
const ZEROES: u64 = Data::ZEROES_MAX as u64;

/// State shared by all handles.
pub(super) struct CacheStore {
    pub(super) mode: CacheMode,
    pub(super) on_read: OnRead,
    /// Block size in bytes.
    pub(super) block: u64,
    pub(super) size: u64,
    pub(super) bound: Option<Bound>,
    /// Locks on bytes.
    pub(super) locks: Arc<blockhaul_io::RangeLocks<CacheHold>>,
    /// Number of handles.
    pub(super) handles: AtomicUsize,
    /// Eviction is running.
    pub(super) making_room: AtomicBool,
    /// Whether the device below has failed a flush.
    pub(super) flushes: Arc<FlushRecord>,
    file: File,
    blocks: Mutex<CacheBlocks>,
    /// How often blocks were made absent.
    vanished: AtomicU64,
    /// A part of the file could not be freed: nothing more is cached.
    broken: AtomicBool,
    /// The file system reports whether a read would wait.
    tells_cached: AtomicBool,
}

/// How a range can be read, if all of it has one state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum RangeState {
    /// All of it is cached; the number of times that blocks had been made absent.
    Kept(u64),
    /// All of it reads as zeroes.
    Zero,
    /// None of it.
    Absent,
    Mixed,
}

impl CacheStore {
    pub(super) fn new(options: &CacheOptions, facts: &Facts) -> Result<CacheStore> {
        let file = temporary::file("cache", options.dir.as_deref().map(Path::new))?;
        let failed = |what: &str, errno: rustix::io::Errno| {
            Error::system(format!("cache: cannot {what} the temporary file"), errno.into())
        };
        let stat = fstatfs(&file).map_err(|errno| failed("look at", errno))?;
        let granularity = u64::try_from(stat.f_bsize).unwrap_or(0);
        let block = options.block.max(u64::from(facts.block.minimum));
        // Some file systems report their read size; they free smaller units.
        let block = if granularity.is_power_of_two() && granularity <= 16 << 20 {
            block.max(granularity)
        } else {
            block
        };
        ftruncate(&file, facts.size).map_err(|errno| failed("free space in", errno))?;
        if facts.size > 0 {
            let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            fallocate(&file, hole, 0, block).map_err(|errno| {
                Error::system(
                    "cache: the file system of the temporary file cannot free parts of it: use another \
                     directory with dir=",
                    errno.into(),
                )
            })?;
        }
        let bound = options.bound.map(|bound| bound_in_blocks(bound, block)).transpose()?;
        Ok(CacheStore {
            mode: options.mode,
            on_read: options.on_read.clone(),
            block,
            size: facts.size,
            locks: Arc::default(),
            handles: AtomicUsize::new(0),
            making_room: AtomicBool::new(false),
            flushes: Arc::default(),
            file,
            blocks: Mutex::new(CacheBlocks::new(bound.is_some())),
            bound,
            vanished: AtomicU64::new(0),
            broken: AtomicBool::new(false),
            tells_cached: AtomicBool::new(true),
        })
    }

    pub(super) fn blocks(&self) -> MutexGuard<'_, CacheBlocks> {
        self.blocks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The blocks that a range of bytes touches.
    pub(super) fn touched(&self, at: u64, end: u64) -> (u64, u64) {
        (at / self.block, end.div_ceil(self.block))
    }

    /// The whole blocks within a range: the first, and the one after the last. The end of the
    /// device counts as the end of a block.
    pub(super) fn whole(&self, at: u64, end: u64) -> (u64, u64) {
        let last = if end == self.size { end.div_ceil(self.block) } else { end / self.block };
        let first = at.div_ceil(self.block);
        (first, last.max(first))
    }

    /// The bytes of blocks.
    pub(super) fn bytes(&self, first: u64, last: u64) -> (u64, u64) {
        (first * self.block, last.saturating_mul(self.block).min(self.size))
    }

    /// The state of the block of a byte, and the end of its run of blocks, at most `end`.
    pub(super) fn run(&self, at: u64, end: u64) -> (CacheBlockState, u64) {
        let (first, last) = self.touched(at, end);
        let (state, to) = self.blocks().run(first, last);
        (state, to.saturating_mul(self.block).min(end))
    }

    /// How a range is to be read. Marks cached data as used now.
    pub(super) fn view(&self, at: u64, end: u64) -> RangeState {
        let (first, last) = self.touched(at, end);
        let mut blocks = self.blocks();
        let (state, to) =
            if first + 1 == last { (blocks.get(first), last) } else { blocks.run(first, last) };
        match state {
            CacheBlockState::Zero if to == last => RangeState::Zero,
            CacheBlockState::Absent if to == last => RangeState::Absent,
            CacheBlockState::Clean | CacheBlockState::Dirty
                if to == last || blocks.all_kept(to, last) =>
            {
                blocks.use_now(first, last);
                RangeState::Kept(self.vanished())
            }
            _ => RangeState::Mixed,
        }
    }

    /// How often blocks were made absent; an unchanged number means that none was.
    pub(super) fn vanished(&self) -> u64 {
        self.vanished.load(Ordering::Acquire)
    }

    /// Whether there is no space for `more` further blocks.
    pub(super) fn is_full_for(&self, blocks: &CacheBlocks, more: u64) -> bool {
        let full = |bound: &Bound| blocks.kept().saturating_add(more) > bound.most;
        self.broken.load(Ordering::Relaxed) || self.bound.as_ref().is_some_and(full)
    }

    /// Whether the device below lacks any data.
    pub(super) fn is_behind(&self) -> bool {
        self.blocks().is_behind()
    }

    /// Makes the blocks, held alone, absent, and frees their space.
    pub(super) async fn drop_blocks(&self, first: u64, last: u64) {
        {
            let mut blocks = self.blocks();
            blocks.set(first, last, CacheBlockState::Absent);
            self.vanished.fetch_add(1, Ordering::AcqRel);
        }
        let (at, end) = self.bytes(first, last);
        if let Err(error) = self.make_hole(at, end - at).await {
            log::warn!("cache: no more data is cached: {error}");
            self.broken.store(true, Ordering::Relaxed);
        }
    }

    /// Makes the range of the file a hole.
    pub(super) async fn make_hole(&self, at: u64, len: u64) -> Result<()> {
        if self.file.allocate(FallocateMode::PunchHole, at, len).await.is_ok() {
            return Ok(());
        }
        let mut done = 0;
        while done < len {
            let now = ZEROES.min(len - done);
            self.write(at + done, Data::zeroes(now as usize)).await?;
            done += now;
        }
        Ok(())
    }

    /// Writes to the file.
    pub(super) async fn write(&self, at: u64, data: Data) -> Result<()> {
        let written = self.file.write_buffered_at(data, at).await;
        written.map_err(|error| Error::system("cannot write to the cache", error))
    }

    /// Reads from the file what is available without waiting; returns the length.
    pub(super) fn read_now(&self, at: u64, buf: &mut [u8]) -> usize {
        if buf.len() > INLINE_READ || !self.tells_cached.load(Ordering::Relaxed) {
            return 0;
        }
        match self.file.try_read_at(buf, at) {
            Ok(read) => read,
            Err(error) => {
                if error.kind() == std::io::ErrorKind::Unsupported {
                    self.tells_cached.store(false, Ordering::Relaxed);
                }
                0
            }
        }
    }

    /// Reads from the file.
    pub(super) async fn read(&self, at: u64, buf: Buf) -> Result<Buf> {
        let mut buf = buf;
        if self.read_now(at, &mut buf) == buf.len() {
            return Ok(buf);
        }
        match self.file.read_exact_at(buf, at).await {
            (Ok(()), buf) => Ok(buf),
            (Err(error), _) => Err(Error::system("cannot read the cache", error)),
        }
    }
}
