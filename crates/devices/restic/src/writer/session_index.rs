//! The blobs of a repository while blobs are added.

use std::collections::HashMap;

use crate::digest::Digest;
use crate::index::{BlobEntry, BlobIndex, BlobKey, BlobKind, BlobPlace, blob_key};
use crate::writer::pack::PackBlob;

/// Blobs that are added to the sorted index together: fewer than this, or a part of it.
const FRESH_MIN: usize = 1 << 14;
const FRESH_PART: usize = 16;

/// The index of a repository, and blobs that are not in it yet.
pub(crate) struct SessionIndex {
    index: BlobIndex,
    /// New blobs. None: the pack is not written yet.
    fresh: HashMap<BlobKey, Option<BlobPlace>>,
}

/// A blob that was looked for.
pub(crate) enum FoundBlob {
    /// Its pack, and the place in it.
    Written(Digest, BlobPlace),
    /// Its pack is not written yet.
    Pending,
}

impl SessionIndex {
    pub(crate) fn new(index: BlobIndex) -> SessionIndex {
        SessionIndex { index, fresh: HashMap::new() }
    }

    /// Looks for a blob.
    pub(crate) fn find(&self, kind: BlobKind, digest: &Digest) -> Option<FoundBlob> {
        match self.fresh.get(&blob_key(kind, digest)) {
            Some(Some(place)) => Some(FoundBlob::Written(self.index.pack(*place), *place)),
            Some(None) => Some(FoundBlob::Pending),
            None => {
                let (_, place) = self.index.find(kind, digest)?;
                Some(FoundBlob::Written(self.index.pack(place), place))
            }
        }
    }

    /// Notes that the caller writes this blob. False: the index has it, or another one writes it.
    pub(crate) fn claim(&mut self, kind: BlobKind, digest: &Digest) -> bool {
        if self.find(kind, digest).is_some() {
            return false;
        }
        self.fresh.insert(blob_key(kind, digest), None);
        true
    }

    /// Adds the blobs of a pack that was written.
    pub(crate) fn add(&mut self, pack: Digest, blobs: &[PackBlob]) {
        self.add_some(pack, blobs.iter());
    }

    /// Adds the blobs of a pack that no index names, unless the repository has them elsewhere.
    pub(crate) fn add_absent(&mut self, pack: Digest, blobs: &[PackBlob]) {
        let absent: Vec<_> =
            blobs.iter().filter(|blob| self.find(blob.kind, &blob.digest).is_none()).collect();
        self.add_some(pack, absent.into_iter());
    }

    fn add_some<'a>(&mut self, pack: Digest, blobs: impl Iterator<Item = &'a PackBlob>) {
        // More packs than a repository can have: the snapshot is refused, because blobs are missing.
        let Some(number) = self.index.add_pack(pack) else { return };
        for blob in blobs {
            let PackBlob { kind, digest, at, len, plain, is_compressed } = *blob;
            let place = BlobPlace::new(number, at, len, plain, is_compressed);
            self.fresh.insert(blob_key(kind, &digest), Some(place));
        }
        if self.fresh.len() < FRESH_MIN.max(self.index.len() / FRESH_PART) {
            return;
        }
        let mut written = Vec::new();
        self.fresh.retain(|key, place| {
            written.extend(place.map(|place| BlobEntry::new(*key, place)));
            place.is_none()
        });
        self.index.add(written.into_iter());
    }

    /// The sorted index.
    pub(crate) fn index(&self) -> &BlobIndex {
        &self.index
    }
}
