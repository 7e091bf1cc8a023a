//! Entries of L1 and L2 tables: found, made and changed.

use std::sync::atomic::Ordering;

use blockhaul_block::{Error, Result};

use super::allocate::Clusters;
use super::writer::ImageWriter;
use crate::bytes::index;
use crate::qcow2::cache::{FreedClusters, WriteStage};
use crate::qcow2::entry::COPIED;
use crate::qcow2::parts::ImageParts;
use crate::qcow2::words::bytes_of;
use crate::storage;

impl ImageParts {
    /// The L2 table of a place on the disk, made or copied if that is necessary to change it.
    pub(super) async fn own_table(&self, at: u64) -> Result<u64> {
        let writer = self.writer()?;
        let number = at / self.image.layout.l2_covers();
        if let Some(table) = self.owned(number)? {
            return Ok(table);
        }
        let _turn = writer.tables.lock(number, number + 1).await;
        if let Some(table) = self.owned(number)? {
            return Ok(table);
        }
        let old = self.image.layout_now().l2_table(number, self.image.l1_entry(number))?;
        let clusters = self.allocate(1).await?;
        let made = self.make_table(writer, number, old, clusters).await;
        if made.is_err() {
            self.release(clusters).await;
        }
        made
    }

    /// The L2 table of an L1 entry, if it may be changed.
    fn owned(&self, number: u64) -> Result<Option<u64>> {
        let entry = self.image.l1_entry(number);
        let table = self.image.layout_now().l2_table(number, entry)?;
        Ok(table.filter(|_| entry & COPIED != 0))
    }

    /// Writes a new table, with the entries of the old one. Nothing in the file refers to it yet.
    async fn make_table(
        &self,
        writer: &ImageWriter,
        number: u64,
        old: Option<u64>,
        clusters: Clusters,
    ) -> Result<u64> {
        let cluster = self.image.layout.cluster();
        let slice = self.image.slice;
        let table = clusters.first << self.image.layout.cluster_bits;
        let mut words = Vec::with_capacity(index(cluster / 8));
        for offset in (0..cluster).step_by(index(slice)) {
            match old {
                Some(old) => {
                    words.extend_from_slice(&self.image.load(&self.file, old + offset).await?)
                }
                None => words.resize(words.len() + index(slice / 8), 0),
            }
        }
        storage::write(&self.file, table, &bytes_of(&words)).await?;
        for (place, words) in words.chunks(index(slice / 8)).enumerate() {
            self.image.cache.keep(table + place as u64 * slice, words.into());
        }
        let freed =
            old.map(|old| FreedClusters { first: old >> self.image.layout.cluster_bits, count: 1 });
        self.set_l1(number, table | COPIED, freed).await?;
        writer.places().tables.insert(clusters.first);
        Ok(table)
    }

    /// Changes an entry of the L1 table.
    pub(in crate::qcow2) async fn set_l1(
        &self,
        number: u64,
        value: u64,
        freed: Option<FreedClusters>,
    ) -> Result<()> {
        let place = self.image.l1_at + number * 8;
        let slice = place - place % self.image.slice;
        loop {
            self.image.load(&self.file, slice).await?;
            let set = |words: &mut [u64], all: &mut Vec<FreedClusters>| {
                if let Some(word) = words.get_mut(index((place - slice) / 8)) {
                    *word = value;
                }
                all.extend(freed);
            };
            if self.image.cache.change(slice, WriteStage::Late, set).is_some() {
                break;
            }
        }
        let entry = self.image.l1.get(index(number)).ok_or_else(Error::misfit)?;
        entry.store(value, Ordering::Release);
        Ok(())
    }

    /// The L2 entry of a place, in a table.
    pub(super) async fn l2_entry(&self, table: u64, at: u64) -> Result<[u64; 2]> {
        let byte = self.image.byte_of(at);
        let slice = table + byte - byte % self.image.slice;
        let words = self.image.load(&self.file, slice).await?;
        let place = index(byte % self.image.slice / 8);
        let first = words.get(place).copied().ok_or_else(Error::misfit)?;
        let second = if self.image.layout.extended {
            words.get(place + 1).copied().ok_or_else(Error::misfit)?
        } else {
            0
        };
        Ok([first, second])
    }

    /// Changes the L2 entries of clusters that lie together and have one table: `change` gets the
    /// number of each and its words, and returns the entry to which they refer no longer.
    pub(in crate::qcow2) async fn set_l2(
        &self,
        table: u64,
        clusters: std::ops::Range<u64>,
        mut change: impl FnMut(u64, &mut [u64]) -> Option<u64>,
    ) -> Result<()> {
        let layout = self.image.layout;
        let words_each = index(layout.entry_words());
        let slice = self.image.slice;
        let per_slice = slice / 8 / layout.entry_words();
        let mut next = clusters.start;
        while next < clusters.end {
            let byte = self.image.byte_of(next << layout.cluster_bits);
            let offset = table + byte - byte % slice;
            self.image.load(&self.file, offset).await?;
            let place = byte % slice / 8 / layout.entry_words();
            let count = (per_slice - place).min(clusters.end - next);
            let set = |words: &mut [u64], all: &mut Vec<FreedClusters>| {
                let entries = words.chunks_mut(words_each).skip(index(place)).take(index(count));
                for (number, words) in (next..).zip(entries) {
                    let freed = change(number, words).and_then(|entry| layout.refers_to(entry));
                    all.extend(freed.map(|(first, count)| FreedClusters { first, count }));
                }
            };
            if self.image.cache.change(offset, WriteStage::Late, set).is_some() {
                next += count;
            }
        }
        Ok(())
    }

    /// Makes the entries of new clusters, for the clusters of the disk from `number` on, as
    /// [`ImageParts::set_l2`] does. After an error, the new clusters without an entry are free again.
    pub(super) async fn set_new(
        &self,
        table: u64,
        number: u64,
        clusters: Clusters,
        mut change: impl FnMut(u64, &mut [u64]) -> Option<u64>,
    ) -> Result<()> {
        let Clusters { first, count, .. } = clusters;
        let mut made = 0;
        let set = self.set_l2(table, number..number + count, |one, words| {
            made += 1;
            change(one, words)
        });
        let set = set.await;
        if set.is_err() {
            let rest = Clusters { first: first + made, count: count - made, ..clusters };
            self.release_data(rest).await;
        }
        set
    }

    /// The words of an entry, as many as it has.
    pub(super) fn words_of<'a>(&self, entry: &'a [u64; 2]) -> &'a [u64] {
        &entry[..index(self.image.layout.entry_words())]
    }
}
