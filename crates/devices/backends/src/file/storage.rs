//! An open file or block device: which descriptor a request uses, and when it may run.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use blockhaul_block::{Error, Facts, Result};
use blockhaul_io::{Data, LockMode, PayloadRoute, Pool, RangeLock, RangeLocks};

use blockhaul_catalog::Claim;

use super::inode::InodeLock;
use super::known_data::KnownData;
use super::limits::{FileSystemSpeed, page};
use super::lock::FileLock;
use super::syncs::Syncs;
use super::ways::ZeroMethods;

/// Longest request that is copied on the worker itself: about 100 us from memory to memory.
pub(super) const INLINE_MAX: usize = 1 << 20;

/// An open file or block device, as found by [`super::open`].
pub(super) struct FileStorage {
    /// For data: with direct I/O if requested.
    pub(super) file: blockhaul_io::File,
    /// The same file through the page cache, for requests that cannot be direct.
    pub(super) buffered: Option<blockhaul_io::File>,
    /// The same file with direct I/O, for requests that benefit from it.
    pub(super) past: Option<DirectFile>,
    /// Alignment in bytes of requests to `file`; 1 unless all are direct.
    pub(super) align: u32,
    /// It is a block device.
    pub(super) is_disk: bool,
    /// It grows as it is written: beyond its end it reads as zeroes.
    pub(super) grows: bool,
    /// If it grows: a length in bytes that it has at least.
    pub(super) length: AtomicU64,
    /// How quickly the file system answers.
    pub(super) nearness: FileSystemSpeed,
    /// Keep other devices of this program, and other programs, from using it in ways that do not fit.
    pub(super) _in_use: (Claim, Option<FileLock>),
}

/// A second descriptor, for direct I/O.
pub(super) struct DirectFile {
    pub(super) file: blockhaul_io::File,
    /// Alignment of offsets, lengths and memory, in bytes.
    pub(super) align: u32,
    /// Cleared when the file system refuses direct I/O after all.
    works: AtomicBool,
}

impl DirectFile {
    pub(super) fn new(file: blockhaul_io::File, align: u32) -> DirectFile {
        DirectFile { file, align, works: AtomicBool::new(true) }
    }

    /// Records that direct I/O was refused, if `error` says so; returns whether it was.
    pub(super) fn refused(&self, error: &std::io::Error) -> bool {
        let refused = [libc::EINVAL, libc::EOPNOTSUPP]
            .iter()
            .any(|&number| error.raw_os_error() == Some(number));
        if refused {
            log::debug!("direct I/O is no longer used: {}", blockhaul_io::plain(error));
            self.works.store(false, Ordering::Relaxed);
        }
        refused
    }
}

/// How a change reaches the file. If one request changes pages in the page cache while another
/// writes the same pages directly, the kernel reports at the next flush that a write was lost
/// (EIO): clients should not do that, and only harm their own disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum WriteRoute {
    Cache,
    Past,
}

impl LockMode for WriteRoute {
    fn excludes(self, other: WriteRoute) -> bool {
        self != other
    }
}

/// Held while pages are changed; none if there is only one route.
type RouteTurn = Option<RangeLock<WriteRoute>>;

/// The pages that a range touches.
fn pages(at: u64, len: u64) -> (u64, u64) {
    let page = u64::from(page());
    // A size is at most 2^63-1.
    (at - at % page, (at + len).next_multiple_of(page))
}

/// State shared by requests that continue after `submit`.
pub(super) struct FileState {
    pub(super) storage: FileStorage,
    pub(super) size: u64,
    /// Ways to zero that have not failed yet.
    pub(super) zero: ZeroMethods,
    /// Cleared when the file system does not report holes.
    pub(super) seeks: AtomicBool,
    /// Data that need not be searched for.
    pub(super) known_data: KnownData,
    /// Cleared when the file system cannot tell whether a read would wait.
    pub(super) tells_cached: AtomicBool,
    /// For payloads whose memory is not aligned for direct I/O; waiting tasks hold none of it.
    pub(super) scratch: Pool,
    /// Pages being changed, if changes use both the page cache and direct I/O.
    pub(super) changing: Option<Arc<RangeLocks<WriteRoute>>>,
    /// The turn to write through the page cache.
    pub(super) inode: Arc<InodeLock>,
    /// Flushes of all handles.
    pub(super) syncs: Arc<Syncs>,
}

impl FileState {
    pub(super) fn new(facts: &Facts, storage: FileStorage) -> FileState {
        let both = storage.past.is_some() || storage.align > 1;
        FileState {
            size: facts.size,
            zero: ZeroMethods::new(storage.is_disk),
            seeks: AtomicBool::new(!storage.is_disk),
            known_data: KnownData::default(),
            tells_cached: AtomicBool::new(true),
            scratch: Pool::new(u64::from(facts.block.maximum)),
            changing: both.then(Arc::default),
            inode: Arc::default(),
            syncs: Arc::default(),
            storage,
        }
    }

    /// The descriptor for a request, and whether it is direct. Unaligned requests use the page
    /// cache, which the kernel keeps coherent.
    pub(super) fn route(&self, at: u64, len: u64) -> (&blockhaul_io::File, bool) {
        let align = u64::from(self.storage.align);
        let aligned = at.is_multiple_of(align) && len.is_multiple_of(align);
        match &self.storage.buffered {
            Some(buffered) if !aligned => (buffered, false),
            _ => (&self.storage.file, align > 1),
        }
    }

    /// Whether everything is in memory, so that no call waits.
    pub(super) fn in_memory(&self) -> bool {
        self.storage.nearness == FileSystemSpeed::Memory
    }

    /// Waits until no task changes these pages by the other route.
    pub(super) async fn turn(&self, route: WriteRoute, at: u64, len: u64) -> RouteTurn {
        let (start, end) = pages(at, len);
        match &self.changing {
            Some(changing) => Some(changing.lock_for(route, start, end).await),
            None => None,
        }
    }

    /// The turn if it is free now.
    pub(super) fn turn_now(&self, route: WriteRoute, at: u64, len: u64) -> Option<RouteTurn> {
        let (start, end) = pages(at, len);
        match &self.changing {
            Some(changing) => changing.try_lock_for(route, start, end).map(Some),
            None => Some(None),
        }
    }

    /// The descriptor for a direct request.
    pub(super) fn past(&self, at: u64, len: u64) -> Option<&DirectFile> {
        let aligned = |past: &&DirectFile| {
            let align = u64::from(past.align);
            at.is_multiple_of(align) && len.is_multiple_of(align)
        };
        let works = |past: &&DirectFile| past.works.load(Ordering::Relaxed);
        self.storage.past.as_ref().filter(aligned).filter(works)
    }

    /// Makes completed writes durable. The kernel reports errors of all descriptors of the file to
    /// one that has been open since before the writes.
    pub(super) async fn sync(&self) -> Result<()> {
        if self.in_memory() {
            return Ok(());
        }
        let sync = || async {
            let synced = self.storage.file.sync().await;
            synced.map_err(|error| Error::system("cannot flush to stable storage", error))
        };
        self.syncs.run(sync).await
    }
}

/// Counts all of a payload.
pub(super) fn count(data: &Data, route: PayloadRoute) {
    if let Some(counters) = data.counters() {
        counters.add(route, data.len());
    }
}
