//! Slices of L2 tables, shared by all handles to an image, in a bounded amount of memory.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use blockhaul_io::RangeLocks;

/// Part of an L2 table: its 64-bit words.
pub(super) type Slice = Arc<[u64]>;

/// The slices that were used lately, by their offset in the image file.
pub(super) struct SliceCache {
    /// Maximum number of slices in a generation.
    most: usize,
    generations: Mutex<Generations>,
    /// One task reads a slice at a time; others wait for it.
    pub(super) loading: Arc<RangeLocks>,
}

/// When the young generation is full, it becomes the old one, whose slices are dropped: a cheap
/// approximation of "least recently used".
#[derive(Default)]
struct Generations {
    young: HashMap<u64, Slice>,
    old: HashMap<u64, Slice>,
}

impl SliceCache {
    /// A cache of at most `memory` bytes, for slices of `slice` bytes; at least two slices.
    pub(super) fn new(memory: u64, slice: u64) -> SliceCache {
        let most = usize::try_from(memory / slice.max(1) / 2).unwrap_or(usize::MAX).max(1);
        SliceCache { most, generations: Mutex::default(), loading: Arc::default() }
    }

    pub(super) fn find(&self, offset: u64) -> Option<Slice> {
        let mut all = self.lock();
        if let Some(found) = all.young.get(&offset) {
            return Some(found.clone());
        }
        let found = all.old.remove(&offset)?;
        self.keep_in(&mut all, offset, found.clone());
        Some(found)
    }

    pub(super) fn keep(&self, offset: u64, slice: Slice) {
        self.keep_in(&mut self.lock(), offset, slice);
    }

    fn keep_in(&self, all: &mut Generations, offset: u64, slice: Slice) {
        if all.young.len() >= self.most {
            all.old = std::mem::take(&mut all.young);
        }
        all.young.insert(offset, slice);
    }

    fn lock(&self) -> MutexGuard<'_, Generations> {
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
}
