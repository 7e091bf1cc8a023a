//! How long an image of a disk would be.

use std::sync::Arc;

use blockhaul_block::{BASE_ALLOCATION, ContextSet, Device, DeviceExt as _, Error, Result, ZERO};

use super::error::usage;

/// Width of refcounts in bits, and of entries of L2 tables in bytes.
const REFCOUNT_BITS: u64 = 16;
const ENTRY: u64 = 8;

/// Lengths of an image in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ImageLengths {
    /// With the data that the disk has now.
    pub required: u64,
    /// With data in all clusters.
    pub full: u64,
}

/// Measures a new image of a disk, without compression: its data, and tables for all clusters, as
/// QEMU makes them.
///
/// # Errors
/// If the cluster size in bytes is not a power of two from 512 to 2 MiB, if the disk is too large,
/// or if its extents cannot be read.
pub async fn measure(source: &Arc<dyn Device>, cluster: u64) -> Result<ImageLengths> {
    if !cluster.is_power_of_two() || !(512..=2 << 20).contains(&cluster) {
        return Err(usage(format!("clusters of {cluster} bytes: use a power of two, 512 to 2M")));
    }
    let facts = source.facts();
    let too_large = || usage(format!("a disk of {} bytes is too large", facts.size));
    let size = facts.size.checked_next_multiple_of(cluster).ok_or_else(too_large)?;
    let full = full(size, cluster).ok_or_else(too_large)?;
    let used = used_clusters(source, cluster).await? * cluster;
    Ok(ImageLengths { required: full - size + used, full })
}

/// The number of clusters with a byte that is not known to be zero.
async fn used_clusters(source: &Arc<dyn Device>, cluster: u64) -> Result<u64> {
    let facts = source.facts();
    let context = facts.context(BASE_ALLOCATION).unwrap_or_else(ContextSet::first);
    // The first cluster that was not counted.
    let mut at = 0;
    let mut used = 0;
    let mut next = 0;
    while at < facts.size {
        let lists = source.extents(at, facts.size - at, context).await?;
        let list = lists.first().ok_or_else(Error::misfit)?;
        for (start, run) in list.ranges(at).filter(|(_, run)| run.state & ZERO == 0) {
            let first = (start / cluster).max(next);
            let end = (start + run.len).div_ceil(cluster);
            used += end.saturating_sub(first);
            next = end.max(next);
        }
        at += list.total();
        // A device that computes its extents never waits.
        blockhaul_io::yield_now().await;
    }
    Ok(used)
}

/// The length of an image whose clusters are all allocated; none if it has no 64 bits.
fn full(size: u64, cluster: u64) -> Option<u64> {
    // Tables fill whole clusters: the header, the L2 tables, the L1 table.
    let l2 = (size / cluster).checked_next_multiple_of(cluster / ENTRY)? * ENTRY;
    let l1 = (l2 / cluster).next_multiple_of(cluster / 8) * 8;
    let others = size.checked_add(cluster + l1 + l2)? / cluster;
    // Refcounts describe themselves, too.
    let per_block = cluster * 8 / REFCOUNT_BITS;
    let mut table = 0;
    let mut blocks = 0;
    loop {
        let needed = (others + table + blocks).div_ceil(per_block);
        let needed_table = needed.div_ceil(cluster / 8);
        if (needed, needed_table) == (blocks, table) {
            return (others + table + blocks).checked_mul(cluster);
        }
        (blocks, table) = (needed, needed_table);
    }
}
