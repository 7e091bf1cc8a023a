//! Finds free clusters of the image file, and counts them as used.

use blockhaul_block::{Error, Kind, Result};

use super::writer::{ImageWriter, OFFSET_MAX, Refcounts};
use crate::bytes::index;
use crate::qcow2::cache::{FreedClusters, WriteStage};
use crate::qcow2::error::damaged;
use crate::qcow2::header::REFCOUNT_TABLE_AT;
use crate::qcow2::parts::ImageParts;
use crate::qcow2::words::bytes_of;
use crate::storage;

/// Longest refcount table in bytes; QEMU reads as much.
const TABLE_MAX: u64 = 8 << 20;

/// Slices that are looked at without a pause.
const STRETCH: u64 = 256;

/// Clusters of the image file that lie together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Clusters {
    /// Number of the first one.
    pub(super) first: u64,
    pub(super) count: u64,
    /// They read as zeroes.
    pub(super) fresh: bool,
}

/// Where the refcount of a cluster is.
pub(in crate::qcow2) struct RefcountPlace {
    /// The offset of its slice in the file.
    pub(super) slice: u64,
    /// Its number in the slice.
    pub(super) number: u64,
}

impl ImageParts {
    /// Refcounts in a block, and in a slice of one.
    pub(super) fn counters(&self, writer: &ImageWriter) -> (u64, u64) {
        let per_word = writer.width.per_word();
        (self.image.layout.cluster() / 8 * per_word, self.image.slice / 8 * per_word)
    }

    /// Where the refcount of a cluster is; none if there is no block for it.
    pub(super) fn counter(&self, writer: &ImageWriter, cluster: u64) -> Option<RefcountPlace> {
        let (per_block, per_slice) = self.counters(writer);
        let block = *writer.refcounts().entries.get(index(cluster / per_block))?;
        let inside = cluster % per_block;
        let slice = block + inside / per_slice * self.image.slice;
        (block != 0).then_some(RefcountPlace { slice, number: inside % per_slice })
    }

    /// Allocates from 1 to `most` clusters that lie together.
    ///
    /// # Errors
    /// [`Kind::NoSpace`] if the file cannot become longer.
    pub(super) async fn allocate(&self, most: u64) -> Result<Clusters> {
        let writer = self.writer()?;
        let _turn = writer.allocating.lock().await;
        self.allocate_in_turn(writer, most).await
    }

    /// The same for a caller that holds the lock `allocating`.
    pub(super) async fn allocate_in_turn(
        &self,
        writer: &ImageWriter,
        most: u64,
    ) -> Result<Clusters> {
        let mut next = writer.places().next;
        let mut looked = 0_u64;
        loop {
            if next >= writer.limit {
                return Err(full());
            }
            let Some(counter) = self.counter(writer, next) else {
                self.add_block(writer, next).await?;
                continue;
            };
            let slice = self.image.load(&self.file, counter.slice).await?;
            let (_, per_slice) = self.counters(writer);
            let is_free = |number: &u64| writer.width.get(&slice, *number) == Some(0);
            let Some(first) = (counter.number..per_slice).find(is_free) else {
                next += per_slice - counter.number;
                looked += 1;
                if looked.is_multiple_of(STRETCH) {
                    // Slices in the cache never wait.
                    blockhaul_io::yield_now().await;
                }
                continue;
            };
            let end = per_slice.min(first.saturating_add(most));
            let count = (first..end).take_while(is_free).count() as u64;
            let cluster = next + (first - counter.number);
            let count = count.min(writer.limit.saturating_sub(cluster));
            if count == 0 {
                return Err(full());
            }
            if self.count(writer, counter.slice, first..first + count, 1) {
                return self.taken(writer, cluster, count);
            }
            // It left the cache meanwhile.
        }
    }

    /// Sets refcounts in a slice; false if it must be read again.
    pub(super) fn count(
        &self,
        writer: &ImageWriter,
        slice: u64,
        numbers: std::ops::Range<u64>,
        value: u64,
    ) -> bool {
        let set = |words: &mut [u64], _: &mut Vec<FreedClusters>| {
            for number in numbers {
                writer.width.set(words, number, value);
            }
        };
        self.image.cache.change(slice, WriteStage::Early, set).is_some()
    }

    /// Clusters that were just counted as used.
    fn taken(&self, writer: &ImageWriter, first: u64, count: u64) -> Result<Clusters> {
        let mut places = writer.places();
        if let Some(table) = (first..first + count).find(|one| places.tables.contains(one)) {
            return Err(damaged(format!("cluster {table} has a table, and a refcount of 0")));
        }
        places.next = first + count;
        let fresh = first >= places.fresh;
        if places.fresh != u64::MAX {
            places.fresh = places.fresh.max(first + count);
        }
        drop(places);
        self.image.extend_file((first + count) << self.image.layout.cluster_bits);
        Ok(Clusters { first, count, fresh })
    }

    /// Gives clusters back to which nothing refers, after a failure. What cannot be counted as free
    /// stays in use.
    pub(super) async fn release(&self, clusters: Clusters) {
        let Ok(writer) = self.writer() else { return };
        let _turn = writer.allocating.lock().await;
        self.release_in_turn(writer, clusters).await;
    }

    /// The same for clusters of [`ImageParts::clusters_for`]. Those of an external data file have no refcounts.
    pub(super) async fn release_data(&self, clusters: Clusters) {
        if !self.is_external {
            self.release(clusters).await;
        }
    }

    /// The same as [`ImageParts::release`] for a caller that holds the lock `allocating`.
    pub(super) async fn release_in_turn(&self, writer: &ImageWriter, clusters: Clusters) {
        for cluster in clusters.first..clusters.first + clusters.count {
            let Some(counter) = self.counter(writer, cluster) else { continue };
            if self.image.load(&self.file, counter.slice).await.is_ok() {
                self.count(writer, counter.slice, counter.number..counter.number + 1, 0);
            }
        }
        let mut places = writer.places();
        places.next = places.next.min(clusters.first);
    }

    /// Makes the refcount block of a cluster: nothing that it describes is in use, so that it can be
    /// the first of its own clusters.
    async fn add_block(&self, writer: &ImageWriter, cluster: u64) -> Result<()> {
        let (per_block, _) = self.counters(writer);
        let number = cluster / per_block;
        if number >= writer.refcounts().entries.len() as u64 {
            return self.grow_table(writer, number).await;
        }
        let first = number * per_block;
        if first >= writer.limit {
            return Err(full());
        }
        let offset = first << self.image.layout.cluster_bits;
        let mut words = vec![0; index(self.image.layout.cluster() / 8)];
        writer.width.set(&mut words, 0, 1);
        storage::write(&self.file, offset, &bytes_of(&words)).await?;
        self.image.extend_file(offset + self.image.layout.cluster());
        self.barrier(writer).await?;
        let entry = writer.refcounts().offset + number * 8;
        storage::write(&self.file, entry, &offset.to_be_bytes()).await?;
        self.taken(writer, first, 1)?;
        writer.places().tables.insert(first);
        writer.places().next = cluster;
        if let Some(entry) = writer.refcounts().entries.get_mut(index(number)) {
            *entry = offset;
        }
        Ok(())
    }

    /// Makes a longer refcount table, which has an entry for block `needed`, behind all clusters
    /// that have refcounts.
    pub(super) async fn grow_table(&self, writer: &ImageWriter, needed: u64) -> Result<()> {
        let layout = self.image.layout;
        let (per_block, _) = self.counters(writer);
        let (old_offset, old_clusters, mut entries) = {
            let table = writer.refcounts();
            (table.offset, table.clusters, table.entries.clone())
        };
        let first = entries.len() as u64 * per_block;
        let wanted = (needed + 1).max(entries.len() as u64 * 3 / 2);
        let mut len = (wanted * 8).div_ceil(layout.cluster());
        // The new blocks count themselves and the table.
        let mut blocks = 1;
        while blocks * per_block < blocks + len
            || (len * layout.cluster() / 8) < entries.len() as u64 + blocks
        {
            len = len.max(((entries.len() as u64 + blocks) * 8).div_ceil(layout.cluster()));
            blocks += 1;
        }
        let end = first + blocks + len;
        let is_too_long = len * layout.cluster() > TABLE_MAX;
        if is_too_long || end > writer.limit || end << layout.cluster_bits > OFFSET_MAX {
            return Err(full());
        }
        let offset = |cluster: u64| cluster << layout.cluster_bits;
        for block in 0..blocks {
            let mut words = vec![0; index(layout.cluster() / 8)];
            let used = (blocks + len).saturating_sub(block * per_block).min(per_block);
            for number in 0..used {
                writer.width.set(&mut words, number, 1);
            }
            storage::write(&self.file, offset(first + block), &bytes_of(&words)).await?;
            entries.push(offset(first + block));
        }
        entries.resize(index(len * layout.cluster() / 8), 0);
        let table = offset(first + blocks);
        storage::write(&self.file, table, &bytes_of(&entries)).await?;
        self.image.extend_file(offset(end));
        self.barrier(writer).await?;
        let mut place = table.to_be_bytes().to_vec();
        place.extend(u32::try_from(len).unwrap_or(0).to_be_bytes());
        storage::write(&self.file, REFCOUNT_TABLE_AT, &place).await?;
        self.barrier(writer).await?;
        {
            let mut places = writer.places();
            places.tables.extend(first..end);
            if places.fresh != u64::MAX {
                places.fresh = places.fresh.max(end);
            }
        }
        *writer.refcounts() = Refcounts { offset: table, clusters: len, entries };
        let old = old_offset >> layout.cluster_bits;
        let mut places = writer.places();
        places.tables.retain(|cluster| !(old..old + old_clusters).contains(cluster));
        drop(places);
        self.image.cache.free(FreedClusters { first: old, count: old_clusters });
        Ok(())
    }
}

pub(super) fn full() -> Error {
    let text = "the device that holds the image is full: make it larger";
    Error::new(Kind::NoSpace, text).complete()
}
