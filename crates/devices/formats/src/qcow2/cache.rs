//! Slices of tables, shared by all handles to an image, in a bounded amount of memory. Changed ones
//! stay until they are written.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use blockhaul_io::RangeLocks;

/// Part of a table: its 64-bit words.
pub(super) type Slice = Arc<[u64]>;

/// When a changed slice must be written ([`super::write`]).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum WriteStage {
    /// Refcounts: before entries that refer to their clusters.
    Early,
    /// Entries of L1 and L2 tables.
    Late,
}

/// Clusters of the image file that one reference less leads to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct FreedClusters {
    /// Number of the first cluster.
    pub(super) first: u64,
    pub(super) count: u64,
}

/// Slices that are to be written, and what is free once they are.
#[derive(Default)]
pub(super) struct SliceBatch {
    pub(super) early: Vec<(u64, Slice)>,
    pub(super) late: Vec<(u64, Slice)>,
    pub(super) freed: Vec<FreedClusters>,
}

impl SliceBatch {
    pub(super) fn is_empty(&self) -> bool {
        self.early.is_empty() && self.late.is_empty() && self.freed.is_empty()
    }

    fn slices(self) -> impl Iterator<Item = (WriteStage, u64, Slice)> {
        let early = self.early.into_iter().map(|(at, slice)| (WriteStage::Early, at, slice));
        early.chain(self.late.into_iter().map(|(at, slice)| (WriteStage::Late, at, slice)))
    }
}

/// The slices that were used lately, by their offset in the image file.
pub(super) struct SliceCache {
    /// Maximum number of slices in a generation.
    most: usize,
    generations: Mutex<SliceGenerations>,
    /// One task reads a slice at a time; others wait for it.
    pub(super) loading: Arc<RangeLocks>,
}

/// When the young generation is full, it becomes the old one, whose slices are dropped: a cheap
/// approximation of "least recently used".
#[derive(Default)]
struct SliceGenerations {
    young: HashMap<u64, Slice>,
    old: HashMap<u64, Slice>,
    /// What differs from the file, newer than all others.
    changed: HashMap<u64, (WriteStage, Slice)>,
    /// What is being written.
    writing: HashMap<u64, Slice>,
    /// What the changes have freed.
    freed: Vec<FreedClusters>,
}

impl SliceGenerations {
    /// A slice that is not in the old generation.
    fn recent(&self, offset: u64) -> Option<&Slice> {
        let changed = self.changed.get(&offset).map(|(_, slice)| slice);
        changed.or_else(|| self.writing.get(&offset)).or_else(|| self.young.get(&offset))
    }
}

impl SliceCache {
    /// A cache of at most `memory` bytes, for slices of `slice` bytes; at least two slices.
    pub(super) fn new(memory: u64, slice: u64) -> SliceCache {
        let most = usize::try_from(memory / slice.max(1) / 2).unwrap_or(usize::MAX).max(1);
        SliceCache { most, generations: Mutex::default(), loading: Arc::default() }
    }

    pub(super) fn find(&self, offset: u64) -> Option<Slice> {
        let mut all = self.lock();
        if let Some(found) = all.recent(offset) {
            return Some(found.clone());
        }
        let found = all.old.remove(&offset)?;
        self.keep_in(&mut all, offset, found.clone());
        Some(found)
    }

    /// Keeps a slice as it is in the file.
    pub(super) fn keep(&self, offset: u64, slice: Slice) {
        self.keep_in(&mut self.lock(), offset, slice);
    }

    fn keep_in(&self, all: &mut SliceGenerations, offset: u64, slice: Slice) {
        if all.young.len() >= self.most {
            all.old = std::mem::take(&mut all.young);
        }
        all.young.insert(offset, slice);
    }

    /// Changes a slice, and notes what the change has freed; `None` if it must be read first.
    pub(super) fn change<T>(
        &self,
        offset: u64,
        stage: WriteStage,
        change: impl FnOnce(&mut [u64], &mut Vec<FreedClusters>) -> T,
    ) -> Option<T> {
        self.find(offset)?;
        let all = &mut *self.lock();
        if !all.changed.contains_key(&offset) {
            let slice = match all.writing.get(&offset) {
                Some(slice) => slice.clone(),
                None => all.young.remove(&offset)?,
            };
            all.changed.insert(offset, (stage, slice));
        }
        let (_, slice) = all.changed.get_mut(&offset)?;
        Some(change(Arc::make_mut(slice), &mut all.freed))
    }

    /// Notes what is free once the changes so far are in the file.
    pub(super) fn free(&self, freed: FreedClusters) {
        self.lock().freed.push(freed);
    }

    /// Whether there is something to write, and whether so much that writers must wait for that.
    pub(super) fn behind(&self) -> (bool, bool) {
        let all = self.lock();
        let some = !all.changed.is_empty() || !all.writing.is_empty() || !all.freed.is_empty();
        (some, all.changed.len() >= self.most.max(8))
    }

    /// Takes all changes, to be written; those of [`WriteStage::Early`] alone if `early`.
    pub(super) fn take(&self, early: bool) -> SliceBatch {
        let all = &mut *self.lock();
        let mut batch = SliceBatch::default();
        let wanted = all.changed.extract_if(|_, (stage, _)| !early || *stage == WriteStage::Early);
        for (offset, (stage, slice)) in wanted {
            all.writing.insert(offset, slice.clone());
            match stage {
                WriteStage::Early => batch.early.push((offset, slice)),
                WriteStage::Late => batch.late.push((offset, slice)),
            }
        }
        if !early {
            batch.freed = std::mem::take(&mut all.freed);
        }
        batch.early.sort_unstable_by_key(|(offset, _)| *offset);
        batch.late.sort_unstable_by_key(|(offset, _)| *offset);
        batch
    }

    /// What was taken is in the file.
    pub(super) fn written(&self, batch: SliceBatch) {
        let all = &mut *self.lock();
        for (_, offset, slice) in batch.slices() {
            all.writing.remove(&offset);
            if !all.changed.contains_key(&offset) {
                self.keep_in(all, offset, slice);
            }
        }
    }

    /// What was taken may not be in the file: it is to be written again.
    pub(super) fn put_back(&self, batch: SliceBatch) {
        let all = &mut *self.lock();
        all.freed.extend_from_slice(&batch.freed);
        for (stage, offset, slice) in batch.slices() {
            all.writing.remove(&offset);
            all.changed.entry(offset).or_insert((stage, slice));
        }
    }

    fn lock(&self) -> MutexGuard<'_, SliceGenerations> {
        self.generations.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn used_slices_stay_and_memory_is_bounded() {
        let cache = SliceCache::new(8 * 512, 512);
        for number in 0..100_u64 {
            cache.keep(number, Arc::from([number]));
            assert_eq!(cache.find(0).as_deref(), Some(&[0][..]), "used after each of the others");
            let all = cache.lock();
            assert!(all.young.len() + all.old.len() <= 8);
        }
        assert_eq!(cache.find(50), None);
        assert!(cache.find(99).is_some());
    }

    #[test]
    fn changes_stay_until_they_are_written() {
        let cache = SliceCache::new(2 * 512, 512);
        let change = |offset, value| {
            cache.change(offset, WriteStage::Late, |words, _| words[0] = value).is_some()
        };
        assert!(!change(0, 1), "not read yet");
        cache.keep(0, Arc::from([0]));
        assert!(change(0, 1));
        (1..50).for_each(|offset| cache.keep(offset, Arc::from([offset])));
        assert_eq!(cache.find(0).as_deref(), Some(&[1][..]));
        let batch = cache.take(false);
        assert_eq!(batch.late.len(), 1);
        // Changed again while it is written.
        assert!(change(0, 2));
        assert_eq!(batch.late[0].1[0], 1, "what is written does not change");
        cache.written(batch);
        assert_eq!(cache.find(0).as_deref(), Some(&[2][..]));
        let batch = cache.take(false);
        cache.put_back(batch);
        assert!(cache.behind().0);
        let batch = cache.take(false);
        assert_eq!(batch.late[0].1[0], 2);
        cache.written(batch);
        assert!(!cache.behind().0);
        assert_eq!(cache.find(0).as_deref(), Some(&[2][..]));
    }
}
