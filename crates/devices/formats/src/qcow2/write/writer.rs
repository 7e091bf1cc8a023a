//! What is needed to write to an image, and what all handles to it share.

use std::collections::{HashSet, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use blockhaul_block::{Device, FailedFlush, Result};
use blockhaul_io::{FifoLock, Pool, RangeLocks};

use crate::bytes::index;
use crate::pack;
use crate::qcow2::cache::FreedClusters;
use crate::qcow2::entry::EntryLayout;
use crate::qcow2::error::{damaged, unsupported};
use crate::qcow2::header::{Header, RefcountTable, autoclear, incompatible};
use crate::qcow2::refcount::Width;
use crate::qcow2::words::words;
use crate::qcow2::{bitmap, snapshot};
use crate::storage::{len_of, read};

/// Offsets of clusters have 56 bits.
pub(super) const OFFSET_MAX: u64 = 1 << 56;
/// Longest piece that is put together with data from below, in bytes, unless a cluster is longer,
/// and the number of pieces at a time.
pub(super) const COPY: u64 = 256 << 10;
pub(super) const COPIES: u64 = 8;

/// The external data file of an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ExternalData {
    None,
    /// Its clusters have the same offsets as on the disk.
    Mapped,
    /// The same, and all of its bytes are those of the disk.
    Raw,
}

/// Requests hold it while they use clusters that they have found in entries.
pub(in crate::qcow2) type Epoch = Arc<()>;

/// State of an image that is written, shared by all handles.
pub(in crate::qcow2) struct ImageWriter {
    pub(super) width: Width,
    pub(super) external: ExternalData,
    /// Number of clusters that the image file can have.
    pub(super) limit: u64,
    /// Auto-clear features that the file must no longer have before the first change.
    pub(super) autoclear: Option<u64>,
    pub(super) has_begun: AtomicBool,
    pub(super) refcounts: Mutex<Refcounts>,
    /// One task changes refcounts at a time.
    pub(super) allocating: Arc<FifoLock>,
    pub(super) places: Mutex<AllocationState>,
    /// Clusters of the disk whose entries change.
    pub(super) clusters: Arc<RangeLocks>,
    /// Entries of the L1 table whose L2 table is made.
    pub(super) tables: Arc<RangeLocks>,
    pub(super) flushing: Arc<FifoLock>,
    /// Flushes that have begun, and the last one that has ended.
    pub(super) started: AtomicU64,
    pub(super) ended: AtomicU64,
    pub(super) failed: FailedFlush,
    pub(super) epoch: Mutex<Epoch>,
    /// What is free when the requests of an epoch have ended.
    pub(super) waiting: Mutex<VecDeque<(Epoch, Vec<FreedClusters>)>>,
    /// Memory for pieces that are put together.
    pub(super) copies: Pool,
    /// Memory for pieces that are compressed.
    pub(super) packs: Pool,
    /// Handles, and whether changes could not be written after the last one.
    pub(super) users: AtomicUsize,
    pub(super) gave_up: AtomicBool,
}

/// The refcount table.
pub(super) struct Refcounts {
    pub(super) offset: u64,
    pub(super) clusters: u64,
    pub(super) entries: Vec<u64>,
}

/// Where clusters are allocated.
pub(super) struct AllocationState {
    /// No cluster before this one is free.
    pub(super) next: u64,
    /// Clusters from this one on were never used, and read as zeroes.
    pub(super) fresh: u64,
    /// Clusters of tables, which are never free, whatever the refcounts say.
    pub(super) tables: HashSet<u64>,
    /// Where compressed data goes. Changes under the lock `allocating`.
    pub(super) tail: Tail,
}

/// Clusters that compressed data fills from front to back, and offsets in the file. Empty at first. A
/// cluster that has data is counted once for each entry that refers to it; one that has none yet, once.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Tail {
    /// The next byte that is free.
    pub(super) next: u64,
    /// The end of the last cluster.
    pub(super) end: u64,
}

impl AllocationState {
    /// No more compressed data goes to a cluster, which is about to be free.
    pub(super) fn leave(&mut self, cluster: u64, cluster_bits: u32) {
        let Tail { next, end } = self.tail;
        if next < end && next >> cluster_bits == cluster {
            self.tail.next = (cluster + 1) << cluster_bits;
        }
    }
}

impl ImageWriter {
    /// Reads what is needed to write to an image. Changes nothing.
    ///
    /// # Errors
    /// If the image has a feature that would not stay right, or its tables are damaged.
    pub(in crate::qcow2) async fn open(
        file: &Arc<dyn Device>,
        header: &Header,
        layout: EntryLayout,
        l1: &[u64],
    ) -> Result<ImageWriter> {
        refuse_marks(header)?;
        let table = header.refcounts;
        let len = u64::from(table.clusters) << header.cluster_bits;
        if table.offset.checked_add(len).is_none_or(|end| end > layout.file_len()) || len == 0 {
            let offset = table.offset;
            return Err(damaged(format!("a refcount table of {len} bytes at offset {offset}")));
        }
        let entries: Vec<u64> = words(&read(file, table.offset, len).await?).collect();
        for (number, &block) in entries.iter().enumerate() {
            let inside = block.checked_add(layout.cluster()).is_some_and(|end| end <= OFFSET_MAX);
            if !block.is_multiple_of(layout.cluster()) || !inside {
                return Err(damaged(format!("refcount block {number} at offset {block}")));
            }
        }
        let mut tables = HashSet::from([0]);
        let mut add = |offset: u64, len: u64| {
            let first = offset >> header.cluster_bits;
            tables.extend(first..first + len.div_ceil(layout.cluster()));
        };
        add(table.offset, len);
        add(header.l1.offset, u64::from(header.l1.entries) * 8);
        entries.iter().filter(|&&block| block != 0).for_each(|&block| add(block, 1));
        for (number, &entry) in l1.iter().enumerate() {
            if let Some(table) = layout.l2_table(number as u64, entry)? {
                add(table, 1);
            }
        }
        if let Some(directory) = header.bitmaps {
            add(directory.offset, directory.len.min(OFFSET_MAX));
        }
        for one in snapshot::list(file, layout.file_len(), header).await? {
            add(one.l1.offset, u64::from(one.l1.entries) * 8);
        }
        Ok(ImageWriter::new(file, header, layout, entries, tables))
    }

    /// The state for an image with this refcount table. `tables` has the clusters of its tables.
    pub(in crate::qcow2) fn new(
        file: &Arc<dyn Device>,
        header: &Header,
        layout: EntryLayout,
        entries: Vec<u64>,
        tables: HashSet<u64>,
    ) -> ImageWriter {
        let facts = file.facts();
        let RefcountTable { offset, clusters, order } = header.refcounts;
        let known = header.autoclear & autoclear::KNOWN;
        // Without an extension there are no bitmaps to be consistent.
        let fresh = match facts.grows_from {
            Some(_) => len_of(&facts).max(layout.file_len()).div_ceil(layout.cluster()),
            None => u64::MAX,
        };
        let external = match (header.has(incompatible::DATA_FILE), header.has_raw_data_file()) {
            (false, _) => ExternalData::None,
            (true, false) => ExternalData::Mapped,
            (true, true) => ExternalData::Raw,
        };
        ImageWriter {
            width: Width::of_order(order),
            external,
            limit: facts.size.min(OFFSET_MAX) >> header.cluster_bits,
            autoclear: (known != header.autoclear).then_some(known),
            has_begun: AtomicBool::new(known == header.autoclear),
            refcounts: Mutex::new(Refcounts { offset, clusters: clusters.into(), entries }),
            allocating: Arc::default(),
            places: Mutex::new(AllocationState { next: 1, fresh, tables, tail: Tail::default() }),
            clusters: Arc::default(),
            tables: Arc::default(),
            flushing: Arc::default(),
            started: AtomicU64::new(0),
            ended: AtomicU64::new(0),
            failed: FailedFlush::default(),
            epoch: Mutex::default(),
            waiting: Mutex::default(),
            copies: Pool::new(Pool::cost(index(COPY.max(layout.cluster()))) * COPIES),
            packs: pack::pool(layout.cluster()),
            users: AtomicUsize::new(0),
            gave_up: AtomicBool::new(false),
        }
    }

    /// Keeps clusters that a request finds in entries from being used for something else. To be
    /// taken before the entries are read.
    pub(in crate::qcow2) fn epoch(&self) -> Epoch {
        lock(&self.epoch).clone()
    }

    pub(super) fn places(&self) -> MutexGuard<'_, AllocationState> {
        lock(&self.places)
    }

    pub(super) fn refcounts(&self) -> MutexGuard<'_, Refcounts> {
        lock(&self.refcounts)
    }
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Refuses images whose tables may be wrong.
fn refuse_marks(header: &Header) -> Result<()> {
    if header.has(incompatible::CORRUPT) {
        let way = "repair it with \"qemu-img check -r all\", or open it read-only";
        return Err(unsupported("the image is marked as corrupt and is not written", way));
    }
    if header.has(incompatible::DIRTY) {
        let way = "repair them with \"blockhaul check --repair all\" or \"qemu-img check -r all\"";
        return Err(unsupported("the image is marked as dirty: its refcounts may be wrong", way));
    }
    Ok(())
}

/// Refuses images with bitmaps that writes to the disk would make wrong.
///
/// # Errors
/// [`blockhaul_block::Kind::Unsupported`], or if the directory of bitmaps cannot be read.
pub(in crate::qcow2) async fn refuse_bitmaps(
    file: &Arc<dyn Device>,
    header: &Header,
    layout: EntryLayout,
) -> Result<()> {
    let bitmaps = bitmap::kept_right(file, layout.file_len(), header).await?;
    if let Some(name) = bitmaps.first() {
        let what =
            format!("the image has an enabled bitmap, {name:?}, which writes would make wrong");
        let way = "disable it with \"blockhaul bitmap disable\", remove it with \"blockhaul bitmap remove\", \
                   or write through [ qemu-nbd … ]";
        return Err(unsupported(what, way));
    }
    Ok(())
}
