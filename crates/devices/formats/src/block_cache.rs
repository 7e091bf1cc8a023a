//! Unpacked clusters, for requests for parts of one.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use blockhaul_io::{Data, RangeLocks};

/// Memory for unpacked clusters of an image, in bytes.
const MEMORY: u64 = 8 << 20;
/// Most clusters: a search reads all of their numbers.
const MOST: u64 = 64;

/// The clusters that were used lately, by the offset of their compressed data.
pub(crate) struct BlockCache {
    most: usize,
    /// The last used is last.
    clusters: Mutex<Vec<(u64, Data)>>,
    /// One task unpacks a cluster at a time; others wait for it.
    pub(crate) unpacking: Arc<RangeLocks>,
}

impl BlockCache {
    /// For clusters of `cluster` bytes.
    pub(crate) fn new(cluster: u64) -> BlockCache {
        let most = (MEMORY / cluster.max(1)).clamp(2, MOST);
        let most = usize::try_from(most).unwrap_or(2);
        BlockCache { most, clusters: Mutex::default(), unpacking: Arc::default() }
    }

    pub(crate) fn find(&self, host: u64) -> Option<Data> {
        let mut clusters = self.lock();
        let place = clusters.iter().position(|(other, _)| *other == host)?;
        clusters[place..].rotate_left(1);
        clusters.last().map(|(_, data)| data.clone())
    }

    pub(crate) fn keep(&self, host: u64, data: Data) {
        let mut clusters = self.lock();
        clusters.retain(|(other, _)| *other != host);
        if clusters.len() >= self.most {
            clusters.remove(0);
        }
        clusters.push((host, data));
    }

    /// Forgets what compressed data that is overwritten unpacks to.
    pub(crate) fn forget(&self, at: u64, end: u64) {
        self.lock().retain(|(host, _)| !(at..end).contains(host));
    }

    fn lock(&self) -> MutexGuard<'_, Vec<(u64, Data)>> {
        self.clusters.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
