//! Changes the tables of an image that nothing else uses.
//!
//! The order of writes is that of [`super::write`]. The header changes when everything that it names
//! is durable; what it named before is freed after that is durable, too.

use std::sync::Arc;

use blockhaul_block::{Device, Result};
use blockhaul_io::WorkerHandle;

use super::entry::EntryLayout;
use super::error::damaged;
use super::header::{Header, L1Place, incompatible};
use super::image::{FileHeader, ImageMetadata, ImageOptions, l1_table};
use super::parts::{BackingImage, ImageParts};
use super::read;
use super::words::bytes_of;
use super::write::ImageWriter;
use crate::assembly::{packed_pool, piece_pool};
use crate::bytes::index;
use crate::storage;

/// Offset of the number of entries of the L1 table in the header; its place follows.
const L1_AT: u64 = 36;
/// Memory in bytes for tables.
const MEMORY: u64 = 32 << 20;
/// Length in bytes that stands for that of an external data file.
const DATA_LEN: u64 = 1 << 62;

/// An image that is changed.
pub(super) struct Edit {
    pub(super) header: Header,
    parts: ImageParts,
}

impl Edit {
    /// Opens the image in a device that was opened for writing, with all entries of its L1 table.
    ///
    /// # Errors
    /// If the image is marked as dirty or corrupt, or its tables are damaged.
    pub(super) async fn open(
        file: &Arc<dyn Device>,
        head: &FileHeader,
        backing: Option<BackingImage>,
    ) -> Result<Edit> {
        let FileHeader { header, file_len } = head;
        let file_len = file_len.next_multiple_of(header.cluster()).min(file.facts().size);
        let data_len = header.has(incompatible::DATA_FILE).then_some(DATA_LEN);
        let layout = EntryLayout::new(header, file_len, data_len.unwrap_or(file_len));
        let size = u64::from(header.l1.entries).saturating_mul(layout.l2_covers());
        let size = size.min(i64::MAX.unsigned_abs());
        if header.size > size {
            return Err(damaged(format!("an L1 table for {size} bytes of {}", header.size)));
        }
        let l1 = l1_table(file, layout, header.l1, size).await?;
        let writer = ImageWriter::open(file, header, layout, &l1).await?;
        writer.enter();
        let options = ImageOptions {
            snapshot: None,
            data_len,
            memory: MEMORY,
            write: true,
            keeps_bitmaps: false,
        };
        let image = ImageMetadata::new(header, size, layout, l1, Some(writer), options);
        let parts = ImageParts {
            worker: WorkerHandle::to(blockhaul_io::worker()),
            pieces: piece_pool(),
            packed: packed_pool(read::longest_packed(layout.cluster())),
            image: Arc::new(image),
            file: file.clone(),
            data: file.clone(),
            is_external: false,
            backing,
        };
        Ok(Edit { header: header.clone(), parts })
    }

    /// Runs a change, and makes it durable. After a failure nothing more is written.
    pub(super) async fn run<T>(
        self,
        change: impl AsyncFnOnce(&ImageParts, &Header) -> Result<T>,
    ) -> Result<T> {
        self.parts.carry_out(async || change(&self.parts, &self.header).await).await
    }
}

impl ImageParts {
    /// Runs a change of tables, and makes it durable. After a failure nothing more is written.
    pub(super) async fn carry_out<T>(&self, change: impl AsyncFnOnce() -> Result<T>) -> Result<T> {
        let done = async {
            self.begin().await?;
            let done = change().await?;
            self.settle().await?;
            Ok(done)
        };
        let done = done.await;
        if done.is_err() {
            self.writer()?.give_up();
        }
        done
    }

    /// Makes all changes durable, and lowers the refcounts of what was freed.
    pub(super) async fn settle(&self) -> Result<()> {
        self.flush().await?;
        storage::flush(&self.file).await
    }

    /// Writes fields of the header when everything that they name is durable; they are durable when
    /// this returns.
    pub(super) async fn put_header(&self, at: u64, bytes: &[u8]) -> Result<()> {
        self.flush().await?;
        storage::write(&self.file, at, bytes).await?;
        storage::flush(&self.file).await
    }

    /// Writes a table to new clusters, which it need not fill; its offset. Nothing refers to it yet.
    pub(super) async fn new_table(&self, bytes: &[u8]) -> Result<u64> {
        let cluster = self.image.layout.cluster();
        let len = (bytes.len() as u64).next_multiple_of(cluster);
        let first = self.allocate_together(len / cluster).await?;
        let offset = first << self.image.layout.cluster_bits;
        let mut bytes = bytes.to_vec();
        bytes.resize(index(len), 0);
        storage::write(&self.file, offset, &bytes).await?;
        Ok(offset)
    }

    /// Frees a table to which nothing in the file refers any longer, of `len` bytes.
    pub(super) fn drop_table_at(&self, offset: u64, len: u64) {
        let cluster = self.image.layout.cluster();
        let (first, count) = (offset / cluster, len.div_ceil(cluster));
        if count > 0 {
            // It may be used for something else as soon as its refcount is 0.
            self.forget_tables(first, count);
            self.drop_clusters(first, count);
        }
    }

    /// Replaces the L1 table by one of `entries` entries, no fewer than now; returns the length of the
    /// image file in bytes.
    pub(super) async fn grow_l1(&self, header: &Header, entries: u32) -> Result<u64> {
        let L1Place { offset, entries: old } = header.l1;
        let mut words: Vec<u64> =
            (0..u64::from(old)).map(|number| self.image.l1_entry(number)).collect();
        words.resize(index(entries.into()), 0);
        let table = self.new_table(&bytes_of(&words)).await?;
        let mut place = entries.to_be_bytes().to_vec();
        place.extend(table.to_be_bytes());
        self.put_header(L1_AT, &place).await?;
        self.drop_table_at(offset, u64::from(old) * 8);
        Ok(self.image.layout_now().file_len())
    }
}
