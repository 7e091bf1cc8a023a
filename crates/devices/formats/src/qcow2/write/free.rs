//! Gives clusters back to which the file no longer refers.

use std::sync::Arc;

use blockhaul_block::{Can, DeviceExt as _, Result};

use super::allocate::RefcountPlace;
use super::writer::{ImageWriter, lock};
use crate::bytes::index;
use crate::qcow2::cache::FreedClusters;
use crate::qcow2::parts::ImageParts;
use crate::storage;

impl ImageWriter {
    /// Clusters have one reference less, in the file as well: they are free when the requests of
    /// now have ended.
    pub(super) fn retire(&self, freed: Vec<FreedClusters>) {
        if !freed.is_empty() {
            let old = std::mem::take(&mut *lock(&self.epoch));
            lock(&self.waiting).push_back((old, freed));
        }
    }

    /// What no request can still use.
    fn ripe(&self) -> Vec<FreedClusters> {
        let mut waiting = lock(&self.waiting);
        let mut all = Vec::new();
        // A later epoch may end before an earlier one.
        while let Some((epoch, freed)) = waiting.pop_front() {
            if Arc::strong_count(&epoch) > 1 {
                waiting.push_front((epoch, freed));
                break;
            }
            all.extend(freed);
        }
        all
    }

    /// Whether clusters wait to be free.
    pub(super) fn has_waiting(&self) -> bool {
        !lock(&self.waiting).is_empty()
    }
}

impl ImageParts {
    /// Lowers the refcounts of all clusters that no request can still use. Space below is freed,
    /// too, if possible. A refcount that cannot be read stays: the cluster is then lost until the
    /// image is repaired.
    pub(super) async fn apply_freed(&self, writer: &ImageWriter) {
        let mut last = Vec::new();
        {
            let _turn = writer.allocating.lock().await;
            for FreedClusters { first, count } in writer.ripe() {
                for cluster in first..first + count {
                    match self.lower(writer, cluster).await {
                        Ok(true) => {
                            writer.places().leave(cluster, self.image.layout.cluster_bits);
                            last.push(cluster);
                        }
                        Ok(false) => {}
                        Err(error) => log::warn!("{}: {error}", self.file.facts().name),
                    }
                }
            }
        }
        if last.is_empty() {
            return;
        }
        last.sort_unstable();
        self.trim_below(&last).await;
        let _turn = writer.allocating.lock().await;
        for &cluster in &last {
            if let Some((RefcountPlace { slice, number }, 1)) = self.refcount(writer, cluster).await
            {
                self.count(writer, slice, number..number + 1, 0);
            }
        }
        let mut places = writer.places();
        if let Some(&first) = last.first() {
            places.next = places.next.min(first);
        }
    }

    /// A refcount and its place.
    pub(in crate::qcow2) async fn refcount(
        &self,
        writer: &ImageWriter,
        cluster: u64,
    ) -> Option<(RefcountPlace, u64)> {
        let counter = self.counter(writer, cluster)?;
        let slice = self.image.load(&self.file, counter.slice).await.ok()?;
        let value = writer.width.get(&slice, counter.number)?;
        Some((counter, value))
    }

    /// Lowers a refcount, but not from 1 to 0: true if that is due.
    async fn lower(&self, writer: &ImageWriter, cluster: u64) -> Result<bool> {
        loop {
            let found = self.refcount(writer, cluster).await;
            let Some((RefcountPlace { slice, number }, value)) = found else {
                let text = format!("the refcount of cluster {cluster} cannot be read");
                return Err(crate::qcow2::error::damaged(text));
            };
            match value {
                0 => {
                    let text = format!("cluster {cluster} was in use, and has a refcount of 0");
                    return Err(crate::qcow2::error::damaged(text));
                }
                1 => return Ok(true),
                _ if self.count(writer, slice, number..number + 1, value - 1) => return Ok(false),
                _ => {}
            }
        }
    }

    /// Counts one more reference to each of `count` clusters that are in use.
    ///
    /// # Errors
    /// If a refcount cannot be read, is 0, or has no room for more.
    pub(in crate::qcow2) async fn raise(&self, first: u64, count: u64) -> Result<()> {
        let writer = self.writer()?;
        let _turn = writer.allocating.lock().await;
        let most = writer.width.most();
        for cluster in first..first + count {
            loop {
                let found = self.refcount(writer, cluster).await;
                let Some((RefcountPlace { slice, number }, value @ 1..)) = found else {
                    let text = format!("cluster {cluster} is in use, and has no refcount");
                    return Err(crate::qcow2::error::damaged(text));
                };
                if value >= most {
                    let text = format!("cluster {cluster} has {most} references");
                    let way = "copy the disk to an image with wider refcounts";
                    return Err(crate::qcow2::error::unsupported(text, way));
                }
                if self.count(writer, slice, number..number + 1, value + 1) {
                    break;
                }
            }
        }
        Ok(())
    }

    /// Frees refcount blocks that count nothing, or only themselves. Nothing else may use the image.
    pub(in crate::qcow2) async fn drop_empty_blocks(&self) -> Result<()> {
        self.flush().await?;
        let writer = self.writer()?;
        let (per_block, _) = self.counters(writer);
        let (table, blocks) = {
            let refcounts = writer.refcounts();
            (refcounts.offset, refcounts.entries.clone())
        };
        // The first one counts the header.
        for (number, block) in (0..).zip(blocks).skip(1).filter(|one| one.1 != 0) {
            let own = block >> self.image.layout.cluster_bits;
            let counts_itself = own / per_block == number;
            let mut words = self.table_words(block).await?;
            if counts_itself {
                writer.width.set(&mut words, own % per_block, 0);
            }
            if words.iter().any(|&word| word != 0) {
                continue;
            }
            storage::write(&self.file, table + number * 8, &[0; 8]).await?;
            self.barrier(writer).await?;
            if let Some(entry) = writer.refcounts().entries.get_mut(index(number)) {
                *entry = 0;
            }
            writer.places().tables.remove(&own);
            if !counts_itself {
                self.drop_clusters(own, 1);
            }
        }
        Ok(())
    }

    /// Frees the space of these clusters, ascending. Nothing refers to them, and they are not used
    /// again before this ends.
    async fn trim_below(&self, clusters: &[u64]) {
        if !self.file.facts().can.contains(Can::TRIM) {
            return;
        }
        let bits = self.image.layout.cluster_bits;
        let size = self.file.facts().size;
        for run in clusters.chunk_by(|one, next| one + 1 == *next) {
            let (Some(first), Some(last)) = (run.first(), run.last()) else { continue };
            let at = first << bits;
            let end = ((last + 1) << bits).min(size);
            if at < end
                && let Err(error) = self.file.trim(at, end - at).await
            {
                // The space stays in use, and is used again.
                log::debug!("cannot free space of the image: {error}");
                return;
            }
        }
    }
}
