//! Where everything is in an image that is written from front to back: known before its first byte.
//!
//! Header, refcount table, refcount blocks, L1 table and L2 tables come first, then the data in the
//! order of the disk.

use std::collections::BTreeMap;

use blockhaul_block::Result;

use crate::qcow2::bytes::index;
use crate::qcow2::error::usage;

/// Width of refcounts, as a power of two of bits: 16 bits, the default of QEMU.
pub(super) const REFCOUNT_ORDER: u32 = 4;
const REFCOUNT_BYTES: u64 = 2;
/// Compressed clusters begin at sectors, so that their lengths fit in 16 bits.
pub(super) const SECTOR: u64 = 512;
/// Limits of QEMU, in bytes.
const L1_MAX: u64 = 32 << 20;
const REFCOUNT_TABLE_MAX: u64 = 8 << 20;
/// Bit 63 of entries: the refcount is one.
const COPIED: u64 = 1 << 63;
const COMPRESSED: u64 = 1 << 62;

/// How a cluster of the disk is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stored {
    /// Not at all: it reads as zeroes.
    Not,
    Plain,
    /// Compressed, in this number of sectors.
    Packed(u16),
}

/// Clusters of the disk that have an L2 table in common, and how they are stored.
type Group = Vec<Stored>;

/// The clusters of a disk that are stored. Memory depends on the data, not on the size of the disk:
/// 4 bytes for each cluster of the L2 tables that are needed.
pub(super) struct Plan {
    cluster_bits: u32,
    /// Size of the disk in bytes.
    size: u64,
    /// By the number of the L2 table. None is empty.
    groups: BTreeMap<u64, Group>,
}

/// A cluster of the disk that is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Placed {
    /// Its number.
    pub(super) number: u64,
    /// Offset of its data in the image, and length there, both in bytes.
    pub(super) host: u64,
    pub(super) len: u64,
    pub(super) stored: Stored,
}

impl Plan {
    pub(super) fn new(cluster_bits: u32, size: u64) -> Plan {
        Plan { cluster_bits, size, groups: BTreeMap::new() }
    }

    /// Cluster size in bytes.
    pub(super) fn cluster(&self) -> u64 {
        1 << self.cluster_bits
    }

    /// Size of the disk in bytes.
    pub(super) fn size(&self) -> u64 {
        self.size
    }

    /// Number of entries of an L2 table.
    fn entries(&self) -> u64 {
        self.cluster() / 8
    }

    /// Sets how a cluster is stored.
    pub(super) fn set(&mut self, number: u64, stored: Stored) {
        let entries = self.entries();
        let group = self.groups.entry(number / entries);
        let group = group.or_insert_with(|| vec![Stored::Not; index(entries)]);
        if let Some(place) = group.get_mut(index(number % entries)) {
            *place = stored;
        }
    }

    /// Removes L2 tables that nothing needs any more.
    pub(super) fn tidy(&mut self) {
        self.groups.retain(|_, group| group.iter().any(|stored| *stored != Stored::Not));
    }

    /// The numbers of the clusters that are stored, from a number on, in order.
    pub(super) fn numbers(&self, from: u64) -> impl Iterator<Item = (u64, Stored)> + '_ {
        let entries = self.entries();
        self.groups.range(from / entries..).flat_map(move |(group, all)| {
            let first = group * entries;
            let numbered = (first..).zip(all.iter().copied());
            numbered.filter(move |(number, stored)| *stored != Stored::Not && *number >= from)
        })
    }

    /// The same with their places in an image whose data begins at `start`.
    pub(super) fn placed(&self, start: u64) -> impl Iterator<Item = Placed> + '_ {
        let cluster = self.cluster();
        let mut next = start;
        self.numbers(0).map(move |(number, stored)| {
            let (host, len) = match stored {
                Stored::Packed(sectors) => (next, u64::from(sectors) * SECTOR),
                _ => (next.next_multiple_of(cluster), cluster),
            };
            next = host + len;
            Placed { number, host, len, stored }
        })
    }
}

/// Offsets and lengths of all parts of the image, in clusters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Parts {
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

impl Parts {
    /// # Errors
    /// If the disk is too large for the cluster size.
    pub(super) fn of(plan: &Plan) -> Result<Parts> {
        let cluster = plan.cluster();
        let l1_entries = plan.size.div_ceil(cluster).div_ceil(plan.entries()).max(1);
        let l1_len = (l1_entries * 8).div_ceil(cluster);
        if l1_entries * 8 > L1_MAX {
            return Err(too_large(plan));
        }
        let l2_len = plan.groups.len() as u64;
        let data_end = plan.placed(0).last().map_or(0, |last| last.host + last.len);
        let others = 1 + l1_len + l2_len + data_end.div_ceil(cluster);
        // Refcounts describe themselves, too: the number of their clusters grows until it fits.
        let (mut table, mut blocks) = (1, 1);
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
            return Err(too_large(plan));
        }
        let refcount_blocks = 1 + table;
        let l1 = refcount_blocks + blocks;
        let (l2, data) = (l1 + l1_len, l1 + l1_len + l2_len);
        let end = data + data_end.div_ceil(cluster);
        Ok(Parts {
            refcount_table: 1,
            refcount_table_len: table,
            refcount_blocks,
            refcount_blocks_len: blocks,
            l1,
            l1_entries,
            l2,
            data,
            end,
        })
    }
}

fn too_large(plan: &Plan) -> blockhaul_block::Error {
    let (size, cluster) = (plan.size, plan.cluster());
    usage(format!("a disk of {size} bytes needs clusters of more than {cluster} bytes"))
}

/// Makes the tables of an image.
pub(super) struct Tables<'a> {
    pub(super) plan: &'a Plan,
    pub(super) parts: Parts,
}

impl Tables<'_> {
    /// The offset of a cluster of the image.
    fn offset(&self, cluster: u64) -> u64 {
        cluster << self.plan.cluster_bits
    }

    /// The clusters with their places in the image.
    pub(super) fn placed(&self) -> impl Iterator<Item = Placed> + '_ {
        self.plan.placed(self.offset(self.parts.data))
    }

    /// Entries of the refcount table.
    pub(super) fn refcount_table(&self) -> impl Iterator<Item = u64> + '_ {
        let first = self.parts.refcount_blocks;
        (first..first + self.parts.refcount_blocks_len).map(|block| self.offset(block))
    }

    /// The refcount of each cluster of the image, in order: the number of entries that need it.
    pub(super) fn refcounts(&self) -> impl Iterator<Item = u16> + '_ {
        let mut placed = self.placed().peekable();
        let cluster = self.plan.cluster();
        (0..self.parts.end).map(move |number| {
            if number < self.parts.data {
                return 1;
            }
            let (start, end) = (self.offset(number), self.offset(number + 1));
            let mut count = 0_u16;
            while let Some(next) = placed.peek().filter(|next| next.host < end) {
                count = count.saturating_add(u16::from(next.host + next.len > start));
                // It may reach into the next cluster.
                if next.host + next.len > end {
                    break;
                }
                placed.next();
            }
            debug_assert!(u64::from(count) <= cluster / SECTOR + 1);
            count
        })
    }

    /// Entries of the L1 table.
    pub(super) fn l1(&self) -> impl Iterator<Item = u64> + '_ {
        let mut next = self.parts.l2;
        (0..self.parts.l1_entries).map(move |number| {
            if !self.plan.groups.contains_key(&number) {
                return 0;
            }
            next += 1;
            self.offset(next - 1) | COPIED
        })
    }

    /// Entries of all L2 tables.
    pub(super) fn l2(&self) -> impl Iterator<Item = u64> + '_ {
        let mut placed = self.placed();
        let bits = self.plan.cluster_bits;
        self.plan.groups.values().flatten().map(move |stored| match stored {
            Stored::Not => 0,
            _ => placed.next().map_or(0, |placed| entry(bits, placed)),
        })
    }
}

/// The L2 entry of a cluster.
fn entry(cluster_bits: u32, placed: Placed) -> u64 {
    match placed.stored {
        Stored::Not => 0,
        Stored::Plain => placed.host | COPIED,
        Stored::Packed(sectors) => {
            let more = u64::from(sectors.saturating_sub(1));
            COMPRESSED | more << (62 - (cluster_bits - 8)) | placed.host
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refcounts_count_the_entries_that_need_a_cluster() {
        let mut plan = Plan::new(16, 1 << 30);
        // 100 sectors, 100 sectors across the end of a cluster, a plain cluster, and one sector.
        for (number, stored) in [
            (0, Stored::Packed(100)),
            (3, Stored::Packed(100)),
            (4, Stored::Plain),
            (9000, Stored::Packed(1)),
        ] {
            plan.set(number, stored);
        }
        plan.set(5, Stored::Not);
        plan.tidy();
        let parts = Parts::of(&plan).unwrap();
        assert_eq!((parts.l1, parts.l2, parts.data, parts.end), (3, 4, 6, 10));
        let tables = Tables { plan: &plan, parts };
        let counts: Vec<_> = tables.refcounts().skip(6).collect();
        assert_eq!(counts, [2, 1, 1, 1]);
        let l1: Vec<_> = tables.l1().collect();
        assert_eq!(l1, [4 << 16 | COPIED, 5 << 16 | COPIED]);
        let l2: Vec<_> = tables.l2().collect();
        assert_eq!(l2.len(), 2 * 8192);
        assert_eq!(l2[4], 8 << 16 | COPIED);
        assert_eq!(l2[3], COMPRESSED | 99 << 54 | (6 << 16) + 100 * 512);
        assert_eq!(l2[8192 + 808], COMPRESSED | 9 << 16);
    }

    #[test]
    fn a_disk_too_large_for_its_clusters_is_refused() {
        let refused = |bits, size| Parts::of(&Plan::new(bits, size)).is_err();
        assert!(refused(9, 1 << 40) && !refused(16, 1 << 40));
        assert!(refused(16, i64::MAX as u64));
    }
}
