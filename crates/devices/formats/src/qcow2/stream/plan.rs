//! Where everything is in an image that is written from front to back: known before its first byte.
//!
//! Header, refcount table, refcount blocks, L1 table and L2 tables come first, then the data in the
//! order of the disk.

use blockhaul_block::Result;

use crate::block_plan::BlockPlan;
use crate::bytes::index;
use crate::pack::{ClusterStorage, SECTOR};
use crate::qcow2::error::usage;

/// Width of refcounts, as a power of two of bits: 16 bits, the default of QEMU.
pub(super) const REFCOUNT_ORDER: u32 = 4;
const REFCOUNT_BYTES: u64 = 2;
/// Limits of QEMU, in bytes.
const L1_MAX: u64 = 32 << 20;
const REFCOUNT_TABLE_MAX: u64 = 8 << 20;
/// Bit 63 of entries: the refcount is one.
const COPIED: u64 = 1 << 63;
const COMPRESSED: u64 = 1 << 62;

/// A cluster of the disk that is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct StreamCluster {
    /// Its number.
    pub(super) number: u64,
    /// Offset of its data in the image, and length there, both in bytes.
    pub(super) host: u64,
    pub(super) len: u64,
    pub(super) stored: ClusterStorage,
}

impl StreamCluster {
    /// The offset after its data.
    pub(super) fn end(&self) -> u64 {
        self.host + self.len
    }
}

/// Where a cluster goes if the data has this length so far; none if it is not stored.
fn place(cluster: u64, next: u64, stored: ClusterStorage) -> Option<(u64, u64)> {
    match stored {
        ClusterStorage::Not => None,
        ClusterStorage::Plain => Some((next.next_multiple_of(cluster), cluster)),
        ClusterStorage::Packed(sectors) => Some((next, u64::from(sectors) * SECTOR)),
    }
}

/// Offsets and lengths of all parts of the image, in clusters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct StreamLayout {
    pub(super) refcount_table: u64,
    pub(super) refcount_table_len: u64,
    pub(super) refcount_blocks: u64,
    pub(super) refcount_blocks_len: u64,
    pub(super) l1: u64,
    pub(super) l1_entries: u64,
    pub(super) l2: u64,
    pub(super) data: u64,
    /// Length of the image.
    pub(super) end: u64,
}

impl StreamLayout {
    /// # Errors
    /// If the disk is too large for the cluster size.
    fn of(cluster: u64, size: u64, l2_len: u64, data_len: u64) -> Result<StreamLayout> {
        let l1_entries = size.div_ceil(cluster).div_ceil(cluster / 8).max(1);
        let l1_len = (l1_entries * 8).div_ceil(cluster);
        if l1_entries * 8 > L1_MAX {
            return Err(too_large(size, cluster));
        }
        let others = 1 + l1_len + l2_len + data_len.div_ceil(cluster);
        // Refcounts describe themselves, too: the number of their clusters grows until it fits.
        let mut table = 1;
        let mut blocks = 1;
        loop {
            let all = others + table + blocks;
            let needed = (all * REFCOUNT_BYTES).div_ceil(cluster);
            let needed_table = (needed * 8).div_ceil(cluster);
            if needed <= blocks && needed_table <= table {
                break;
            }
            (table, blocks) = (needed_table.max(table), needed.max(blocks));
        }
        if table * cluster > REFCOUNT_TABLE_MAX {
            return Err(too_large(size, cluster));
        }
        let refcount_blocks = 1 + table;
        let l1 = refcount_blocks + blocks;
        let l2 = l1 + l1_len;
        let data = l1 + l1_len + l2_len;
        Ok(StreamLayout {
            refcount_table: 1,
            refcount_table_len: table,
            refcount_blocks,
            refcount_blocks_len: blocks,
            l1,
            l1_entries,
            l2,
            data,
            end: data + data_len.div_ceil(cluster),
        })
    }
}

fn too_large(size: u64, cluster: u64) -> blockhaul_block::Error {
    usage(format!("a disk of {size} bytes needs clusters of more than {cluster} bytes"))
}

/// Clusters of the disk that have an L2 table in common.
struct Group {
    /// The number of their entry in the L1 table.
    number: u64,
    /// Where their data begins, relative to that of all groups, in bytes.
    start: u64,
    clusters: Vec<ClusterStorage>,
}

/// The tables of an image, made as they are needed. Entries that do not exist are 0.
pub(super) struct StreamTables {
    cluster_bits: u32,
    /// Size of the disk in bytes.
    pub(super) size: u64,
    /// In order.
    groups: Vec<Group>,
    pub(super) parts: StreamLayout,
}

impl StreamTables {
    /// Finds the place of everything. Memory depends on the data, not on the size of the disk: 4 bytes for each
    /// cluster of the L2 tables that are needed.
    ///
    /// # Errors
    /// If the disk is too large for the cluster size.
    pub(super) fn new(plan: BlockPlan, size: u64) -> Result<StreamTables> {
        let cluster = plan.unit;
        let mut next = 0;
        let mut groups = Vec::with_capacity(plan.tables.len());
        for (number, clusters) in plan.tables {
            if clusters.iter().all(|stored| *stored == ClusterStorage::Not) {
                continue;
            }
            let start = next;
            for stored in &clusters {
                next = place(cluster, next, *stored).map_or(next, |(host, len)| host + len);
            }
            groups.push(Group { number, start, clusters });
        }
        let parts = StreamLayout::of(cluster, size, groups.len() as u64, next)?;
        Ok(StreamTables { cluster_bits: cluster.trailing_zeros(), size, groups, parts })
    }

    /// Cluster size in bytes.
    pub(super) fn cluster(&self) -> u64 {
        1 << self.cluster_bits
    }

    /// Length of the image in bytes.
    pub(super) fn len(&self) -> u64 {
        self.offset(self.parts.end)
    }

    /// The offset of a cluster of the image.
    pub(super) fn offset(&self, cluster: u64) -> u64 {
        cluster << self.cluster_bits
    }

    /// The clusters that are stored, with their places in the image, in order: from the group on
    /// whose data contains the byte at `host` of the image.
    pub(super) fn placed(&self, host: u64) -> impl Iterator<Item = StreamCluster> + '_ {
        let start = self.offset(self.parts.data);
        let behind = self.groups.partition_point(|group| group.start + start <= host);
        let groups = self.groups.get(behind.saturating_sub(1)..).unwrap_or_default();
        groups.iter().flat_map(move |group| self.placed_in(group))
    }

    fn placed_in<'a>(&'a self, group: &'a Group) -> impl Iterator<Item = StreamCluster> + 'a {
        let cluster = self.cluster();
        let start = self.offset(self.parts.data);
        let mut next = group.start;
        let numbers = group.number * (cluster / 8)..;
        let clusters = group.clusters.iter().copied();
        numbers.zip(clusters).filter_map(move |(number, stored)| {
            let (host, len) = place(cluster, next, stored)?;
            next = host + len;
            Some(StreamCluster { number, host: start + host, len, stored })
        })
    }

    /// An entry of the refcount table.
    fn refcount_block(&self, number: u64) -> u64 {
        if number < self.parts.refcount_blocks_len {
            self.offset(self.parts.refcount_blocks + number)
        } else {
            0
        }
    }

    /// The refcounts of the clusters of the image from one on: the number of entries that need each.
    fn refcounts(&self, from: u64) -> impl Iterator<Item = u16> + '_ {
        let mut placed = self.placed(self.offset(from)).peekable();
        (from..).map(move |number| {
            if number < self.parts.data {
                return 1;
            }
            let start = self.offset(number);
            let end = self.offset(number + 1);
            let mut count = 0_u16;
            while let Some(next) = placed.peek().filter(|next| next.host < end) {
                count = count.saturating_add(u16::from(next.end() > start));
                // It may reach into the next cluster.
                if next.end() > end {
                    break;
                }
                placed.next();
            }
            count
        })
    }

    /// An entry of the L1 table.
    fn l1(&self, number: u64) -> u64 {
        match self.groups.binary_search_by_key(&number, |group| group.number) {
            Ok(rank) => self.offset(self.parts.l2 + rank as u64) | COPIED,
            Err(_) => 0,
        }
    }

    /// The entries of an L2 table, by its place among them.
    fn l2(&self, rank: u64) -> Vec<u64> {
        let Some(group) = self.groups.get(index(rank)) else { return Vec::new() };
        let mut entries = vec![0; group.clusters.len()];
        for placed in self.placed_in(group) {
            let place = placed.number - group.number * (self.cluster() / 8);
            if let Some(entry) = entries.get_mut(index(place)) {
                *entry = self.entry(placed);
            }
        }
        entries
    }

    /// A cluster of the image that belongs to a table, after the header.
    pub(super) fn table(&self, cluster: u64) -> Vec<u8> {
        let StreamLayout { refcount_table, refcount_blocks, l1, l2, .. } = self.parts;
        let longs = self.cluster() / 8;
        let entries = |first: u64| first * longs..(first + 1) * longs;
        if cluster >= l2 {
            return big_endian(self.l2(cluster - l2).into_iter());
        }
        if cluster >= l1 {
            return big_endian(entries(cluster - l1).map(|number| self.l1(number)));
        }
        if cluster >= refcount_blocks {
            let shorts = self.cluster() / REFCOUNT_BYTES;
            let refcounts = self.refcounts((cluster - refcount_blocks) * shorts);
            return refcounts.take(index(shorts)).flat_map(u16::to_be_bytes).collect();
        }
        let first = cluster.saturating_sub(refcount_table);
        big_endian(entries(first).map(|number| self.refcount_block(number)))
    }

    /// The L2 entry of a cluster.
    fn entry(&self, placed: StreamCluster) -> u64 {
        match placed.stored {
            ClusterStorage::Not => 0,
            ClusterStorage::Plain => placed.host | COPIED,
            ClusterStorage::Packed(sectors) => {
                let more = u64::from(sectors.saturating_sub(1));
                COMPRESSED | more << (62 - (self.cluster_bits - 8)) | placed.host
            }
        }
    }
}

fn big_endian(entries: impl Iterator<Item = u64>) -> Vec<u8> {
    entries.flat_map(u64::to_be_bytes).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refcounts_count_the_entries_that_need_a_cluster() {
        let mut plan = BlockPlan::new(1 << 16, 1 << 13);
        // 100 sectors, 100 sectors across the end of a cluster, a plain cluster, and one sector.
        for (number, stored) in [
            (0, ClusterStorage::Packed(100)),
            (3, ClusterStorage::Packed(100)),
            (4, ClusterStorage::Plain),
            (9000, ClusterStorage::Packed(1)),
        ] {
            plan.set(number, stored);
        }
        plan.set(5, ClusterStorage::Not);
        plan.set(20_000, ClusterStorage::Not);
        let tables = StreamTables::new(plan, 1 << 30).unwrap();
        let parts = tables.parts;
        assert_eq!((parts.l1, parts.l2, parts.data, parts.end), (3, 4, 6, 10));
        let counts: Vec<_> = tables.refcounts(0).take(11).collect();
        assert_eq!(counts, [1, 1, 1, 1, 1, 1, 2, 1, 1, 1, 0]);
        for from in 0..10 {
            assert_eq!(tables.refcounts(from).next(), Some(counts[from as usize]), "{from}");
        }
        let l1: Vec<_> = (0..3).map(|number| tables.l1(number)).collect();
        assert_eq!(l1, [4 << 16 | COPIED, 5 << 16 | COPIED, 0]);
        let l2 = tables.l2(0);
        assert_eq!((l2.len(), l2[4]), (8192, 8 << 16 | COPIED));
        assert_eq!(l2[3], COMPRESSED | 99 << 54 | ((6 << 16) + 100 * 512));
        assert_eq!(tables.l2(1)[808], COMPRESSED | 9 << 16);
        assert!(tables.l2(2).is_empty());
    }

    #[test]
    fn a_disk_too_large_for_its_clusters_is_refused() {
        let refused =
            |cluster, size| StreamTables::new(BlockPlan::new(cluster, cluster / 8), size).is_err();
        assert!(refused(512, 1 << 40) && !refused(1 << 16, 1 << 40));
        assert!(refused(1 << 16, i64::MAX as u64));
    }
}
