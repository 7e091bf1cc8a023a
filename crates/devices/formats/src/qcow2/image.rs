//! An image's metadata, read once and shared by all handles: where each byte of the disk is.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use blockhaul_block::{Device, Error, Result};
use blockhaul_io::Buf;

use super::bitmap::{self, PersistentBitmap};
use super::cache::{Slice, SliceCache};
use super::entry::{ClusterPlace, EntryLayout, Run, push};
use super::error::{damaged, unsupported};
use super::header::{CompressionType, Header, L1Place, incompatible};
use super::snapshot::{self, InternalSnapshot};
use super::words::words;
use super::write::{ImageWriter, refuse_bitmaps};
use crate::block_cache::BlockCache;
use crate::bytes::index;
use crate::pack::ClusterEncoding;
use crate::storage::{len_of, read, read_into};

/// Longest part of an L2 table that is read at once, in bytes.
const SLICE_MAX: u64 = 64 << 10;
/// The same in images that are written: as much is written for each change.
const CHANGED_SLICE: u64 = 4096;
/// Bytes at the start of a file that are read before the cluster size is known.
const HEAD: u64 = 4096;
/// Most bitmaps that are contexts: others are needed, too.
pub(super) const BITMAPS_MAX: usize = 60;

/// The metadata of an image, or of one of its snapshots.
pub(super) struct ImageMetadata {
    /// Size of the disk in bytes.
    pub(super) size: u64,
    pub(super) layout: EntryLayout,
    pub(super) compression: CompressionType,
    pub(super) bitmaps: Vec<PersistentBitmap>,
    /// Unpacked clusters.
    pub(super) unpacked: BlockCache,
    /// Whether the file has holes where clusters are, once that was looked for.
    pub(super) is_sparse: OnceLock<bool>,
    /// Present if the image is open for writing.
    pub(super) writer: Option<ImageWriter>,
    /// It was made for this program, and nothing was written to it before.
    pub(super) is_new: bool,
    /// It gets another backing file: zeroes are written also where it shows zeroes of none.
    pub(super) is_rebased: bool,
    /// The bitmaps of the images below it are contexts, too.
    pub(super) shows_below: bool,
    /// All writes of whole clusters are compressed.
    pub(super) packs: bool,
    /// The entries that the disk needs.
    pub(super) l1: Vec<AtomicU64>,
    /// Offset of the L1 table in the image file.
    pub(super) l1_at: u64,
    pub(super) cache: SliceCache,
    /// Length of a slice in bytes.
    pub(super) slice: u64,
    /// Length in bytes that the image file has, or gets.
    file_len: AtomicU64,
    /// The same of the external data file, if there is one.
    data_len: Option<AtomicU64>,
}

/// A header, and the length of the file that it was read from.
pub(super) struct FileHeader {
    pub(super) header: Header,
    pub(super) file_len: u64,
}

impl FileHeader {
    /// Reads the header of the image in a device.
    pub(super) async fn read(file: &Arc<dyn Device>) -> Result<FileHeader> {
        let file_len = len_of(&file.facts());
        let head = read(file, 0, HEAD.min(file_len)).await?;
        let cluster = 1 << Header::cluster_bits(&head)?;
        let header = if cluster <= head.len() as u64 {
            Header::parse(&head[..index(cluster)])?
        } else {
            Header::parse(&read(file, 0, cluster.min(file_len)).await?)?
        };
        let name = file.facts().name.clone();
        if header.has(incompatible::CORRUPT) {
            log::warn!(
                "{name}: the image is marked as corrupt, and read as far as that is possible; repair it with \
                 \"qemu-img check -r all\""
            );
        }
        Ok(FileHeader { header, file_len })
    }
}

impl ImageMetadata {
    /// Reads the metadata of the image, or of one of its snapshots.
    pub(super) async fn open(
        file: &Arc<dyn Device>,
        head: &FileHeader,
        options: ImageOptions<'_>,
    ) -> Result<ImageMetadata> {
        let FileHeader { header, file_len } = head;
        let data_len = options.data_len;
        // The last cluster of a file that grows may get the rest of it at any time.
        let file_len = &if options.write {
            file_len.next_multiple_of(header.cluster()).min(file.facts().size)
        } else {
            *file_len
        };
        let layout = EntryLayout::new(header, *file_len, data_len.unwrap_or(*file_len));
        let (l1, size) = match options.snapshot {
            None => (header.l1, header.size),
            Some(name) => {
                let all = snapshot::list(file, *file_len, header).await?;
                let InternalSnapshot { l1, size, .. } = snapshot::find(all, name)?;
                (l1, size.unwrap_or(header.size))
            }
        };
        let l1 = l1_table(file, layout, l1, size).await?;
        let bitmaps = match options.snapshot {
            None if options.keeps_bitmaps => Vec::new(),
            None => bitmap::list(file, *file_len, header, BITMAPS_MAX).await,
            // They describe the disk as it is now.
            Some(_) => Vec::new(),
        };
        let writer = if options.write {
            if !options.keeps_bitmaps {
                refuse_bitmaps(file, header, layout).await?;
            }
            Some(ImageWriter::open(file, header, layout, &l1).await?)
        } else {
            None
        };
        Ok(ImageMetadata {
            bitmaps,
            ..ImageMetadata::new(header, size, layout, l1, writer, options)
        })
    }

    /// An image with these tables.
    pub(super) fn new(
        header: &Header,
        size: u64,
        layout: EntryLayout,
        l1: Vec<u64>,
        writer: Option<ImageWriter>,
        options: ImageOptions<'_>,
    ) -> ImageMetadata {
        let most = if writer.is_some() { CHANGED_SLICE } else { SLICE_MAX };
        let slice = most.min(layout.cluster());
        ImageMetadata {
            size,
            layout,
            compression: header.compression,
            bitmaps: Vec::new(),
            unpacked: BlockCache::new(layout.cluster()),
            is_sparse: OnceLock::new(),
            writer,
            is_new: false,
            is_rebased: false,
            shows_below: false,
            packs: false,
            l1_at: header.l1.offset,
            l1: l1.into_iter().map(AtomicU64::new).collect(),
            cache: SliceCache::new(options.memory, slice),
            slice,
            file_len: AtomicU64::new(layout.file_len()),
            data_len: options.data_len.map(AtomicU64::new),
        }
    }

    /// How clusters are compressed: at the levels that QEMU uses.
    pub(super) fn packing(&self) -> ClusterEncoding {
        match self.compression {
            CompressionType::Deflate => ClusterEncoding::Deflate(6),
            CompressionType::Zstd => ClusterEncoding::Zstd(3),
        }
    }

    /// Compresses all writes of whole clusters from now on. Nothing else uses the image yet.
    ///
    /// # Errors
    /// If its data is in an external file.
    pub(super) fn pack(&mut self) -> Result<()> {
        if self.layout.data_file {
            let what = "clusters in an external data file cannot be compressed";
            return Err(unsupported(what, "leave out compress"));
        }
        self.packs = true;
        Ok(())
    }

    /// The layout with the current lengths of the files.
    pub(super) fn layout_now(&self) -> EntryLayout {
        if self.writer.is_none() {
            return self.layout;
        }
        let file_len = self.file_len.load(Ordering::Relaxed);
        let data_len = self.data_len.as_ref().map(|len| len.load(Ordering::Relaxed));
        self.layout.with_lengths(file_len, data_len.unwrap_or(file_len))
    }

    /// The image file is at least this long, or about to be.
    pub(super) fn extend_file(&self, end: u64) {
        self.file_len.fetch_max(end, Ordering::Relaxed);
    }

    /// The same of the file with the guest's data.
    pub(super) fn extend_data(&self, end: u64) {
        let len = self.data_len.as_ref().unwrap_or(&self.file_len);
        len.fetch_max(end, Ordering::Relaxed);
    }

    /// The runs of a range that is within the disk, at least one of them; ends early when there are
    /// `most`. `None` if an L2 table must be read first.
    pub(super) fn runs_now(&self, at: u64, end: u64, most: usize) -> Option<Result<Vec<Run>>> {
        let mut walk = EntryWalk { next: at, end, most, entries: u64::MAX, runs: Vec::new() };
        match self.walk(&mut walk) {
            Ok(None) => Some(Ok(walk.runs)),
            Ok(Some(_)) => None,
            Err(error) => Some(Err(error)),
        }
    }

    /// All runs of a range; reads L2 tables through `file`.
    pub(super) async fn runs(&self, file: &Arc<dyn Device>, at: u64, end: u64) -> Result<Vec<Run>> {
        let mut entries = u64::MAX;
        self.some_runs(file, at, end, usize::MAX, &mut entries).await
    }

    /// The runs of a range, at least one; ends early when there are `most`, or when `entries` of
    /// tables were looked at, which is counted down.
    pub(super) async fn some_runs(
        &self,
        file: &Arc<dyn Device>,
        at: u64,
        end: u64,
        most: usize,
        entries: &mut u64,
    ) -> Result<Vec<Run>> {
        let mut walk = EntryWalk { next: at, end, most, entries: *entries, runs: Vec::new() };
        while let Some(offset) = self.walk(&mut walk)? {
            let slice = self.load(file, offset).await?;
            // The cache may have dropped it already, if it is small.
            self.walk_slice(&mut walk, &slice)?;
        }
        *entries = walk.entries;
        Ok(walk.runs)
    }

    /// Goes on until the walk has ended, or the slice at the returned offset is needed.
    fn walk(&self, walk: &mut EntryWalk) -> Result<Option<u64>> {
        while walk.goes_on() {
            let number = walk.next / self.layout.l2_covers();
            let Some(table) = self.layout_now().l2_table(number, self.l1_entry(number))? else {
                let end = (number + 1).saturating_mul(self.layout.l2_covers()).min(walk.end);
                let at = walk.next;
                let len = end - walk.next;
                push(&mut walk.runs, Run { at, len, place: ClusterPlace::Unallocated });
                walk.goes_to(end);
                continue;
            };
            let offset = table + self.byte_of(walk.next) / self.slice * self.slice;
            match self.cache.find(offset) {
                Some(slice) => self.walk_slice(walk, &slice)?,
                None => return Ok(Some(offset)),
            }
        }
        Ok(None)
    }

    /// An entry of the L1 table; 0 beyond its end.
    pub(super) fn l1_entry(&self, number: u64) -> u64 {
        self.l1.get(index(number)).map_or(0, |entry| entry.load(Ordering::Acquire))
    }

    /// The offset of an entry in its L2 table, in bytes.
    pub(super) fn byte_of(&self, at: u64) -> u64 {
        at % self.layout.l2_covers() / self.layout.cluster() * self.layout.entry_words() * 8
    }

    /// Appends the runs that a slice describes.
    fn walk_slice(&self, walk: &mut EntryWalk, slice: &[u64]) -> Result<()> {
        let layout = self.layout_now();
        let words = index(layout.entry_words());
        let mut place = index(self.byte_of(walk.next) % self.slice / 8);
        while walk.goes_on() {
            let Some(entry) = slice.get(place..place + words) else { return Ok(()) };
            let cluster_end = (walk.next | (layout.cluster() - 1)) + 1;
            let end = cluster_end.min(walk.end);
            layout.runs(entry, walk.next, end, &mut walk.runs)?;
            walk.goes_to(end);
            place += words;
        }
        Ok(())
    }

    /// A slice, from the cache or the file.
    pub(super) async fn load(&self, file: &Arc<dyn Device>, offset: u64) -> Result<Slice> {
        if let Some(slice) = self.cache.find(offset) {
            return Ok(slice);
        }
        let _turn = self.cache.loading.lock(offset, offset + 1).await;
        if let Some(slice) = self.cache.find(offset) {
            return Ok(slice);
        }
        // The last table of a device may end with it.
        let mut bytes = Buf::unpooled(index(self.slice));
        let there = self.slice.min(file.facts().size.saturating_sub(offset));
        bytes.fill(0);
        read_into(file, offset, &mut bytes[..index(there)], None).await?;
        let slice: Slice = words(&bytes).collect();
        self.cache.keep(offset, slice.clone());
        Ok(slice)
    }
}

/// A search for runs.
struct EntryWalk {
    next: u64,
    end: u64,
    /// Number of runs that is enough.
    most: usize,
    /// Number of entries that may still be looked at.
    entries: u64,
    runs: Vec<Run>,
}

impl EntryWalk {
    fn goes_on(&self) -> bool {
        // The last run may still grow.
        self.next < self.end && self.runs.len() <= self.most && self.entries > 0
    }

    fn goes_to(&mut self, next: u64) {
        self.next = next;
        self.entries -= 1;
    }
}

/// How an image is opened.
#[derive(Clone, Copy)]
pub(super) struct ImageOptions<'a> {
    /// The snapshot to show.
    pub(super) snapshot: Option<&'a str>,
    /// The length in bytes of the external data file, if there is one.
    pub(super) data_len: Option<u64>,
    /// Memory for tables, in bytes.
    pub(super) memory: u64,
    pub(super) write: bool,
    /// Whether the user of an image that is written keeps its bitmaps right, and shows them.
    pub(super) keeps_bitmaps: bool,
}

/// Reads the entries of an L1 table that a disk of `size` bytes needs.
pub(super) async fn l1_table(
    file: &Arc<dyn Device>,
    layout: EntryLayout,
    place: L1Place,
    size: u64,
) -> Result<Vec<u64>> {
    let needed = size.div_ceil(layout.l2_covers());
    let L1Place { offset, entries } = place;
    if needed > entries.into() {
        return Err(damaged(format!(
            "a disk of {size} bytes needs an L1 table of {needed} entries; it has {entries}"
        )));
    }
    // At most 2^32 entries.
    let len = needed * 8;
    if offset.checked_add(len).is_none_or(|end| end > layout.file_len()) {
        return Err(damaged(format!(
            "the L1 table, {len} bytes at offset {offset}, exceeds the {} bytes of the file",
            layout.file_len()
        )));
    }
    let bytes = read(file, offset, len).await?;
    let table: Vec<_> = words(&bytes).collect();
    if table.len() as u64 != needed {
        return Err(Error::misfit());
    }
    Ok(table)
}
