//! Finds places for compressed data, and counts the clusters that it is in.

use blockhaul_block::Result;

use super::allocate::{Clusters, RefcountPlace};
use super::writer::{ImageWriter, Tail};
use crate::qcow2::cache::FreedClusters;
use crate::qcow2::parts::ImageParts;

impl ImageParts {
    /// Places for compressed data of these lengths, each shorter than a cluster: offsets in the file. There
    /// are fewer if the rest is not to be compressed. Each place is a reference to its clusters.
    ///
    /// # Errors
    /// Those of [`ImageParts::allocate`]: no place is taken then.
    pub(super) async fn place(&self, lens: &[u64]) -> Result<Vec<u64>> {
        let writer = self.writer()?;
        let _turn = writer.allocating.lock().await;
        self.align_tail(writer);
        let mut places = Vec::with_capacity(lens.len());
        let mut left: u64 = lens.iter().sum();
        for &len in lens {
            match self.place_one(writer, len, left).await {
                Ok(Some(place)) => places.push(place),
                Ok(None) => break,
                Err(error) => {
                    self.give_back(places.into_iter().zip(lens.iter().copied()));
                    return Err(error);
                }
            }
            left -= len;
        }
        Ok(places)
    }

    /// Gives places back to which no entry refers.
    pub(super) fn give_back(&self, places: impl Iterator<Item = (u64, u64)>) {
        let bits = self.image.layout.cluster_bits;
        for (at, len) in places {
            let first = at >> bits;
            let count = ((at + len - 1) >> bits) - first + 1;
            self.image.cache.free(FreedClusters { first, count });
        }
    }

    /// No two writes rewrite the same block of the device.
    fn align_tail(&self, writer: &ImageWriter) {
        let unit = u64::from(self.file.facts().rewrite_unit.max(1));
        let tail = &mut writer.places().tail;
        tail.next = tail.next.next_multiple_of(unit).min(tail.end);
    }

    /// A place for `len` bytes of `left` that are to come; none if they are not to be compressed.
    async fn place_one(&self, writer: &ImageWriter, len: u64, left: u64) -> Result<Option<u64>> {
        let layout = self.image.layout;
        let (bits, cluster) = (layout.cluster_bits, layout.cluster());
        // A cluster would hold the data of one entry only.
        if writer.width.most() < 2 {
            return Ok(None);
        }
        loop {
            let Tail { next, end } = writer.places().tail;
            if next + len <= end {
                // The first data in a cluster is counted already.
                if next.is_multiple_of(cluster) || self.raise_shared(writer, next >> bits).await? {
                    writer.places().tail.next = next + len;
                    self.image.unpacked.forget(next, next + len);
                    return Ok(Some(next));
                }
                writer.places().tail.next = (next | (cluster - 1)) + 1;
                continue;
            }
            let missing = left.saturating_sub(end - next);
            let new = self.allocate_in_turn(writer, missing.div_ceil(cluster).max(1)).await?;
            let Clusters { first, count, .. } = new;
            let (start, stop) = (first << bits, (first + count) << bits);
            if layout.packed_entry(stop - 1, 1).is_none() {
                self.release_in_turn(writer, new).await;
                return Ok(None);
            }
            let tail = &mut writer.places().tail;
            let follows = start == end;
            *tail = Tail { next: if follows { next } else { start }, end: stop };
        }
    }

    /// Counts one more reference to a cluster with compressed data; false if it can have no more.
    async fn raise_shared(&self, writer: &ImageWriter, cluster: u64) -> Result<bool> {
        loop {
            let found = self.refcount(writer, cluster).await;
            let Some((RefcountPlace { slice, number }, value @ 1..)) = found else {
                let text = format!("cluster {cluster} is in use, and has no refcount");
                return Err(crate::qcow2::error::damaged(text));
            };
            if value >= writer.width.most() {
                return Ok(false);
            }
            if self.count(writer, slice, number..number + 1, value + 1) {
                return Ok(true);
            }
        }
    }
}
