//! Blobs in memory, and those that are being fetched.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use blockhaul_block::Result;
use blockhaul_io::{Completer, Ticket, ticket};

/// The contents of a blob.
pub(crate) type BlobBytes = Arc<Vec<u8>>;

/// Blobs by their numbers, in bounded memory: those that were used last.
pub(crate) struct BlobCache {
    limit: u64,
    state: Mutex<BlobCacheState>,
}

#[derive(Default)]
struct BlobCacheState {
    slots: HashMap<u32, BlobSlot>,
    /// The numbers of blobs in memory, by the time of their last use.
    uses: BTreeMap<u64, u32>,
    clock: u64,
    bytes: u64,
}

enum BlobSlot {
    Loaded { bytes: BlobBytes, used: u64 },
    Loading(Vec<Completer<Result<BlobBytes>>>),
}

/// A blob that was requested.
pub(crate) enum CachedBlob {
    Loaded(BlobBytes),
    Loading(Ticket<Result<BlobBytes>>),
}

impl BlobCache {
    /// A cache of this many bytes.
    pub(crate) fn new(limit: u64) -> BlobCache {
        BlobCache { limit, state: Mutex::default() }
    }

    /// Bytes that it may hold.
    pub(crate) fn limit(&self) -> u64 {
        self.limit
    }

    /// Requests blobs. Those that are neither in memory nor under way are added to `missing`: the caller fetches them,
    /// and calls [`BlobCache::finish`] for each.
    pub(crate) fn request(
        &self,
        numbers: impl Iterator<Item = u32>,
        missing: &mut Vec<u32>,
    ) -> Vec<CachedBlob> {
        let mut state = self.lock();
        numbers.map(|number| state.request(number, missing)).collect()
    }

    /// Requests blobs that will be read soon.
    pub(crate) fn expect(&self, numbers: impl Iterator<Item = u32>, missing: &mut Vec<u32>) {
        let mut state = self.lock();
        for number in numbers {
            if let std::collections::hash_map::Entry::Vacant(slot) = state.slots.entry(number) {
                slot.insert(BlobSlot::Loading(Vec::new()));
                missing.push(number);
            }
        }
    }

    /// Ends the fetch of a blob.
    pub(crate) fn finish(&self, number: u32, result: Result<BlobBytes>) {
        let waiting = {
            let mut state = self.lock();
            let slot = state.slots.remove(&number);
            if let Ok(bytes) = &result {
                state.insert(number, bytes.clone(), self.limit);
            }
            slot
        };
        if let Some(BlobSlot::Loading(waiting)) = waiting {
            waiting.into_iter().for_each(|waiter| waiter.complete(result.clone()));
        }
    }

    fn lock(&self) -> MutexGuard<'_, BlobCacheState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl BlobCacheState {
    fn request(&mut self, number: u32, missing: &mut Vec<u32>) -> CachedBlob {
        self.clock += 1;
        match self.slots.get_mut(&number) {
            Some(BlobSlot::Loaded { bytes, used }) => {
                self.uses.remove(used);
                *used = self.clock;
                self.uses.insert(self.clock, number);
                CachedBlob::Loaded(bytes.clone())
            }
            Some(BlobSlot::Loading(waiting)) => {
                let (completer, ticket) = ticket();
                waiting.push(completer);
                CachedBlob::Loading(ticket)
            }
            None => {
                let (completer, ticket) = ticket();
                self.slots.insert(number, BlobSlot::Loading(vec![completer]));
                missing.push(number);
                CachedBlob::Loading(ticket)
            }
        }
    }

    /// Keeps a blob, and removes those that were not used for longest.
    fn insert(&mut self, number: u32, bytes: BlobBytes, limit: u64) {
        self.clock += 1;
        let used = self.clock;
        self.bytes += bytes.len() as u64;
        self.slots.insert(number, BlobSlot::Loaded { bytes, used });
        self.uses.insert(used, number);
        while self.bytes > limit {
            let Some((_, oldest)) = self.uses.pop_first() else { return };
            if let Some(BlobSlot::Loaded { bytes, .. }) = self.slots.remove(&oldest) {
                self.bytes -= bytes.len() as u64;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn loaded(cache: &BlobCache, number: u32) -> bool {
        let mut missing = Vec::new();
        let found = cache.request([number].into_iter(), &mut missing);
        matches!(found[..], [CachedBlob::Loaded(_)])
    }

    #[test]
    fn blobs_that_were_used_last_stay() {
        let cache = BlobCache::new(250);
        let mut missing = Vec::new();
        cache.expect(0..3, &mut missing);
        cache.expect(0..3, &mut missing);
        assert_eq!(missing, [0, 1, 2]);
        cache.finish(0, Ok(Arc::new(vec![0; 100])));
        cache.finish(1, Ok(Arc::new(vec![0; 100])));
        assert!(loaded(&cache, 0));
        cache.finish(2, Ok(Arc::new(vec![0; 100])));
        assert_eq!([0, 1, 2].map(|number| loaded(&cache, number)), [true, false, true]);
        assert_eq!(cache.lock().bytes, 200);
        // One that exceeds the limit is not kept.
        cache.finish(1, Ok(Arc::new(vec![0; 300])));
        let state = cache.lock();
        assert_eq!((state.bytes, state.slots.len()), (0, 0));
    }

    #[test]
    fn who_waits_gets_the_outcome_and_a_failure_is_not_kept() {
        let cache = BlobCache::new(100);
        let mut missing = Vec::new();
        let tickets = cache.request([7, 7].into_iter(), &mut missing);
        assert_eq!(missing, [7]);
        let failed = blockhaul_block::Error::new(blockhaul_block::Kind::Io, "damaged");
        cache.finish(7, Err(failed));
        let runtime = blockhaul_io::Runtime::start(&blockhaul_io::RuntimeConfig::default());
        let failures = runtime.unwrap().block_on(move || async move {
            let mut failures = 0;
            for blob in tickets {
                let CachedBlob::Loading(ticket) = blob else { continue };
                failures += usize::from(ticket.await.unwrap().is_err());
            }
            failures
        });
        assert_eq!(failures, 2);
        cache.request([7].into_iter(), &mut missing);
        assert_eq!(missing, [7, 7]);
    }
}
