//! Clusters that are allocated before there is data for them.

use blockhaul_block::Result;
use blockhaul_io::Data;

use super::allocate::Clusters;
use crate::bytes::index;
use crate::qcow2::entry::{ALL_UNITS, COPIED, EntryLayout};
use crate::qcow2::parts::ImageParts;
use crate::storage;

/// Clusters that are allocated at a time.
const STRETCH: u64 = 4096;

impl ImageParts {
    /// Allocates clusters for a range of the disk that reads as zeroes, where it has none: zeroes are
    /// written to them if `writes`, or if the space was used before. An external data file is left as it is.
    /// Nothing else may use the image.
    pub(in crate::qcow2) async fn reserve(&self, at: u64, end: u64, writes: bool) -> Result<()> {
        let layout = self.image.layout;
        let mut next = at >> layout.cluster_bits;
        let last = end.div_ceil(layout.cluster());
        while next < last {
            self.make_room().await?;
            let table_end = (next / layout.l2_entries() + 1) * layout.l2_entries();
            let table = self.own_table(next << layout.cluster_bits).await?;
            let (skipped, most) = self.without_space(table, next, last.min(table_end)).await?;
            next += skipped;
            if most == 0 {
                continue;
            }
            let clusters = if layout.data_file {
                // In the same place as on the disk.
                Clusters { first: next, count: most, fresh: true }
            } else {
                self.allocate(most).await?
            };
            if !layout.data_file && (writes || !clusters.fresh) {
                self.write_zero_clusters(clusters).await?;
            }
            let start = next;
            let first = clusters.first;
            self.set_l2(table, start..start + clusters.count, |number, words| {
                let host = (first + (number - start)) << layout.cluster_bits;
                if let Some(entry) = words.first_mut() {
                    *entry = host | COPIED;
                }
                if let Some(units) = words.get_mut(1) {
                    *units = ALL_UNITS;
                }
                None
            })
            .await?;
            next += clusters.count;
            blockhaul_io::yield_now().await;
        }
        Ok(())
    }

    /// The clusters of a range of the disk, with one L2 table, that come before the first one without space in the
    /// file, and how many of these follow.
    async fn without_space(&self, table: u64, first: u64, end: u64) -> Result<(u64, u64)> {
        let layout = self.image.layout;
        let words = self.table_words(table).await?;
        let start = first % layout.l2_entries();
        let entries = words.iter().step_by(index(layout.entry_words())).skip(index(start));
        let mut skipped = 0;
        let mut free = 0;
        for (number, &entry) in (first..end).zip(entries) {
            let at = number << layout.cluster_bits;
            let has_space = EntryLayout::is_compressed(entry) || layout.space(entry, at)?.is_some();
            match (has_space, free) {
                (true, 0) => skipped += 1,
                (false, 0..STRETCH) => free += 1,
                _ => break,
            }
        }
        Ok((skipped, free))
    }

    async fn write_zero_clusters(&self, clusters: Clusters) -> Result<()> {
        let bits = self.image.layout.cluster_bits;
        let end = (clusters.first + clusters.count) << bits;
        let mut at = clusters.first << bits;
        while at < end {
            let len = (end - at).min(Data::ZEROES_MAX as u64);
            storage::write(&self.file, at, Data::zeroes(index(len)).bytes()).await?;
            at += len;
        }
        Ok(())
    }
}
