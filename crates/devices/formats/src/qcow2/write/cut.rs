//! Entries beyond a new end of the disk.

use blockhaul_block::Result;

use crate::bytes::index;
use crate::qcow2::backing_change::ChangeProgress;
use crate::qcow2::cache::FreedClusters;
use crate::qcow2::parts::ImageParts;

impl ImageParts {
    /// Clears the entries of all clusters from `first` on, and frees what they refer to. Nothing
    /// else may use the image, whose `size` covers all of its L1 table. `progress` gets the bytes of these clusters.
    ///
    /// # Errors
    /// If an entry cannot be true, or the device fails.
    pub(in crate::qcow2) async fn cut(
        &self,
        first: u64,
        progress: ChangeProgress<'_>,
    ) -> Result<()> {
        let layout = self.image.layout;
        let per_table = layout.l2_entries();
        let tables = first / per_table..self.image.l1.len() as u64;
        let bytes = |tables: u64| tables.saturating_mul(layout.l2_covers());
        for number in tables.clone() {
            progress(bytes(number - tables.start), bytes(tables.end - tables.start));
            let entry = self.image.l1_entry(number);
            let Some(table) = self.image.layout_now().l2_table(number, entry)? else { continue };
            self.make_room().await?;
            let start = number * per_table;
            if start < first {
                self.cut_table(table, first..start + per_table).await?;
            } else {
                self.drop_table(number, table).await?;
            }
            blockhaul_io::yield_now().await;
        }
        Ok(())
    }

    /// Clears some entries of an L2 table.
    async fn cut_table(&self, table: u64, clusters: std::ops::Range<u64>) -> Result<()> {
        let layout = self.image.layout;
        let words = self.table_words(table).await?;
        let skipped = clusters.start % layout.l2_entries() * layout.entry_words();
        if words.iter().skip(index(skipped)).all(|&word| word == 0) {
            return Ok(());
        }
        let table = self.own_table(clusters.start << layout.cluster_bits).await?;
        self.set_l2(table, clusters, |_, words| {
            let old = words.first().copied();
            words.fill(0);
            old
        })
        .await
    }

    /// Clears an entry of the L1 table.
    async fn drop_table(&self, number: u64, table: u64) -> Result<()> {
        let layout = self.image.layout;
        let words = self.table_words(table).await?;
        let first = table >> layout.cluster_bits;
        let entries = words.iter().step_by(index(layout.entry_words()));
        let freed = entries.filter_map(|&entry| layout.refers_to(entry));
        // A flush between the two leaves lost clusters at most.
        self.set_l1(number, 0, Some(FreedClusters { first, count: 1 })).await?;
        freed.for_each(|(first, count)| self.drop_clusters(first, count));
        self.writer()?.places().tables.remove(&first);
        Ok(())
    }

    /// All words of an L2 table.
    pub(in crate::qcow2) async fn table_words(&self, table: u64) -> Result<Vec<u64>> {
        let cluster = self.image.layout.cluster();
        let slice = self.image.slice;
        let mut words = Vec::with_capacity(index(cluster / 8));
        for offset in (0..cluster).step_by(index(slice)) {
            words.extend_from_slice(&self.image.load(&self.file, table + offset).await?);
        }
        Ok(words)
    }
}
