//! The blocks of a disk that an image stores, planned before the image is made: clusters of qcow2, grains of VMDK.

use std::collections::BTreeMap;
use std::sync::Arc;

use blockhaul_block::{BASE_ALLOCATION, ContextSet, Device, DeviceExt as _, Error, Result, ZERO};

use crate::bytes::index;
use crate::pack::{ClusterEncoding, ClusterReadAhead, ClusterStorage, CompressedClusters, pool};

/// Blocks whose lengths are found before the plan is changed.
const MEASURED: usize = 64 << 10;

/// How each block of a disk is stored.
pub(crate) struct BlockPlan {
    /// Length of a block in bytes.
    pub(crate) unit: u64,
    /// Blocks of a table.
    pub(crate) entries: u64,
    /// Tables with blocks, by number.
    pub(crate) tables: BTreeMap<u64, Vec<ClusterStorage>>,
}

impl BlockPlan {
    /// A plan for a disk without data, whose tables have `entries` blocks of `unit` bytes.
    pub(crate) fn new(unit: u64, entries: u64) -> BlockPlan {
        BlockPlan { unit, entries, tables: BTreeMap::new() }
    }

    /// Sets how a block is stored.
    pub(crate) fn set(&mut self, number: u64, stored: ClusterStorage) {
        let table = self.tables.entry(number / self.entries);
        let table = table.or_insert_with(|| vec![ClusterStorage::Not; index(self.entries)]);
        if let Some(place) = table.get_mut(index(number % self.entries)) {
            *place = stored;
        }
    }

    /// The numbers of the blocks that are stored, from a number on, in order.
    pub(crate) fn numbers(&self, from: u64) -> impl Iterator<Item = u64> + '_ {
        self.tables.range(from / self.entries..).flat_map(move |(table, all)| {
            let numbered = (table * self.entries..).zip(all);
            let stored = numbered.filter(|(_, stored)| **stored != ClusterStorage::Not);
            stored.map(|(number, _)| number).filter(move |number| *number >= from)
        })
    }

    /// Plans to store every block that has a byte that is not known to be zero.
    ///
    /// # Errors
    /// Those of the source.
    pub(crate) async fn find_data(&mut self, source: &Arc<dyn Device>) -> Result<()> {
        let facts = source.facts();
        let context = facts.context(BASE_ALLOCATION).unwrap_or_else(ContextSet::first);
        let mut at = 0;
        while at < facts.size {
            let lists = source.extents(at, facts.size - at, context).await?;
            let list = lists.first().ok_or_else(Error::misfit)?;
            for (start, run) in list.ranges(at).filter(|(_, run)| run.state & ZERO == 0) {
                let numbers = start / self.unit..(start + run.len).div_ceil(self.unit);
                numbers.for_each(|number| self.set(number, ClusterStorage::Plain));
            }
            at += list.total();
            // A device that computes its extents never waits.
            blockhaul_io::yield_now().await;
        }
        Ok(())
    }

    /// Compresses the blocks for their lengths; returns those that `memory` bytes can hold.
    ///
    /// # Errors
    /// Those of the source.
    pub(crate) async fn measure(
        &mut self,
        source: &Arc<dyn Device>,
        packing: ClusterEncoding,
        memory: u64,
    ) -> Result<CompressedClusters> {
        let mut made = CompressedClusters::new(memory);
        let mut from = 0;
        let pool = pool(self.unit);
        loop {
            // The plan changes behind these.
            let numbers: Vec<_> = self.numbers(from).take(MEASURED).collect();
            let Some(last) = numbers.last() else { return Ok(made) };
            from = last + 1;
            let mut ahead =
                ClusterReadAhead::new(source, &pool, self.unit, packing, numbers.into_iter());
            while let Some(piece) = ahead.next().await {
                for packed in piece? {
                    self.set(packed.number, packed.stored);
                    made.keep(&packed);
                }
            }
        }
    }
}
