//! Allocates clusters that lie together, for tables of several clusters.

use std::ops::Range;

use blockhaul_block::Result;

use super::allocate::full;
use super::writer::ImageWriter;
use crate::bytes::index;
use crate::qcow2::parts::ImageParts;
use crate::qcow2::words::bytes_of;
use crate::storage;

/// Clusters whose refcounts are set without a pause.
const STRETCH: u64 = 16 << 10;

/// Where clusters go.
struct TableRun {
    /// Number of the first cluster.
    first: u64,
    /// Numbers of the refcount blocks that are missing. Their clusters follow the others.
    blocks: Range<u64>,
    /// Number of the cluster after the last one.
    end: u64,
}

impl ImageParts {
    /// Allocates `count` clusters that lie together, at least one; returns the number of the first.
    /// More than one are at the end of a file. Nothing else may use the image.
    ///
    /// # Errors
    /// [`Kind::NoSpace`](blockhaul_block::Kind::NoSpace) if the file cannot become longer.
    pub(in crate::qcow2) async fn allocate_together(&self, count: u64) -> Result<u64> {
        if count <= 1 {
            return Ok(self.allocate(1).await?.first);
        }
        let writer = self.writer()?;
        let run = self.find_run(writer, count).await?;
        for cluster in run.first..run.end {
            self.count_one(writer, cluster).await?;
            if cluster % STRETCH == 0 {
                blockhaul_io::yield_now().await;
            }
        }
        self.image.extend_file(run.end << self.image.layout.cluster_bits);
        {
            let mut places = writer.places();
            if places.fresh != u64::MAX {
                places.fresh = places.fresh.max(run.end);
            }
        }
        if !run.blocks.is_empty() {
            self.add_blocks(writer, &run, count).await?;
        }
        Ok(run.first)
    }

    /// Clusters of tables are tables no longer.
    pub(in crate::qcow2) fn forget_tables(&self, first: u64, count: u64) {
        let Some(writer) = &self.image.writer else { return };
        writer.places().tables.retain(|cluster| !(first..first + count).contains(cluster));
    }

    /// Frees clusters to which nothing in the file refers any longer.
    pub(in crate::qcow2) fn drop_clusters(&self, first: u64, count: u64) {
        self.image.cache.free(crate::qcow2::cache::FreedClusters { first, count });
    }

    /// Looks for free clusters: behind the end of a file, or anywhere in a device of a fixed length.
    async fn find_run(&self, writer: &ImageWriter, count: u64) -> Result<TableRun> {
        let (per_block, _) = self.counters(writer);
        let grows = self.file.facts().grows_from.is_some();
        let start = |parts: &ImageParts| {
            if grows {
                parts.image.layout_now().file_len().div_ceil(parts.image.layout.cluster())
            } else {
                1
            }
        };
        let mut first = start(self);
        loop {
            let blocks = match self.missing(writer, first, count) {
                Ok(blocks) => blocks,
                Err(there) => {
                    first = there * per_block;
                    continue;
                }
            };
            let end = first.saturating_add(count).saturating_add(blocks.end - blocks.start);
            if end > writer.limit {
                return Err(full());
            }
            let last_block = (end - 1) / per_block;
            if last_block >= writer.refcounts().entries.len() as u64 {
                let _turn = writer.allocating.lock().await;
                self.grow_table(writer, last_block).await?;
                first = start(self);
                continue;
            }
            match self.last_used(writer, first..end).await? {
                Some(used) => first = used + 1,
                None => return Ok(TableRun { first, blocks, end }),
            }
        }
    }

    /// The refcount blocks that are missing for `count` clusters and for themselves; the number of
    /// one that is there, after one that is not.
    fn missing(
        &self,
        writer: &ImageWriter,
        first: u64,
        count: u64,
    ) -> std::result::Result<Range<u64>, u64> {
        let (per_block, _) = self.counters(writer);
        let table = writer.refcounts();
        let is_there = |number: &u64| table.entries.get(index(*number)).is_some_and(|&at| at != 0);
        let mut start = first / per_block;
        while is_there(&start) {
            start += 1;
        }
        let mut end = start;
        while end.saturating_mul(per_block) < first.saturating_add(count + (end - start)) {
            if is_there(&end) {
                return Err(end);
            }
            end += 1;
        }
        Ok(start..end)
    }

    /// The last cluster of a range that has a refcount.
    async fn last_used(&self, writer: &ImageWriter, range: Range<u64>) -> Result<Option<u64>> {
        let mut last = None;
        for cluster in range {
            let Some(counter) = self.counter(writer, cluster) else { continue };
            let slice = self.image.load(&self.file, counter.slice).await?;
            if writer.width.get(&slice, counter.number) != Some(0) {
                last = Some(cluster);
            }
            if cluster % STRETCH == 0 {
                blockhaul_io::yield_now().await;
            }
        }
        Ok(last)
    }

    /// Counts a cluster as used, if there is a block for it.
    async fn count_one(&self, writer: &ImageWriter, cluster: u64) -> Result<()> {
        let Some(counter) = self.counter(writer, cluster) else { return Ok(()) };
        let numbers = counter.number..counter.number + 1;
        loop {
            self.image.load(&self.file, counter.slice).await?;
            if self.count(writer, counter.slice, numbers.clone(), 1) {
                return Ok(());
            }
            // It left the cache meanwhile.
        }
    }

    /// Makes refcount blocks behind `count` new clusters, which count these and themselves.
    async fn add_blocks(&self, writer: &ImageWriter, run: &TableRun, count: u64) -> Result<()> {
        // What the present blocks count comes before what refers to it.
        self.flush().await?;
        let (per_block, _) = self.counters(writer);
        let bits = self.image.layout.cluster_bits;
        let place = |number: u64| run.first + count + (number - run.blocks.start);
        for number in run.blocks.clone() {
            let mut words = vec![0; index(self.image.layout.cluster() / 8)];
            let covers = number * per_block..(number + 1) * per_block;
            for cluster in run.first.max(covers.start)..run.end.min(covers.end) {
                writer.width.set(&mut words, cluster - covers.start, 1);
            }
            storage::write(&self.file, place(number) << bits, &bytes_of(&words)).await?;
        }
        self.barrier(writer).await?;
        for number in run.blocks.clone() {
            let entry = writer.refcounts().offset + number * 8;
            let offset = place(number) << bits;
            storage::write(&self.file, entry, &offset.to_be_bytes()).await?;
            if let Some(entry) = writer.refcounts().entries.get_mut(index(number)) {
                *entry = offset;
            }
            writer.places().tables.insert(place(number));
        }
        self.barrier(writer).await
    }
}
