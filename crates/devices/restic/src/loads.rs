//! Fetches of blobs: neighbours in a pack by one request, decrypted by several threads.

use std::sync::Arc;

use blockhaul_block::{Error, Kind};
use blockhaul_io::BlockingPool;

use crate::cache::{BlobBytes, BlobCache};
use crate::content::{FileBlob, FileContent};
use crate::digest::Digest;
use crate::fault::Result;
use crate::index::{BlobCopies, BlobKind};
use crate::repository::RepositoryReader;

/// Most bytes of a pack in one request, unless one blob has more.
const FETCH_MAX: u64 = 4 << 20;
/// Bytes between two blobs that are fetched together with them.
const GAP_MAX: u64 = 64 << 10;

/// The blobs of a file, and the threads that fetch them.
pub(crate) struct BlobLoads {
    reader: RepositoryReader,
    /// The names of packs by their numbers.
    packs: Vec<Digest>,
    /// Further places of blobs that several packs have.
    copies: BlobCopies,
    pub(crate) content: FileContent,
    pub(crate) cache: BlobCache,
    pool: BlockingPool,
}

/// Neighbouring blobs of a pack.
#[derive(Debug, Clone, PartialEq, Eq)]
struct BlobGroup {
    pack: u32,
    at: u64,
    end: u64,
    blobs: Vec<(u32, FileBlob)>,
}

impl BlobLoads {
    pub(crate) fn new(
        reader: RepositoryReader,
        (packs, copies): (Vec<Digest>, BlobCopies),
        content: FileContent,
        cache: BlobCache,
    ) -> BlobLoads {
        let pool = BlockingPool::parallel("restic", reader.parallel());
        BlobLoads { reader, packs, copies, content, cache, pool }
    }

    /// Fetches these blobs, which the cache expects. Does not block.
    pub(crate) fn start(self: &Arc<BlobLoads>, missing: &[u32]) {
        let found = missing.iter().filter_map(|number| {
            let blob = self.content.blob(*number);
            // The numbers come from the contents.
            if blob.is_none() {
                self.cache.finish(*number, Err(Error::misfit()));
            }
            Some((*number, blob?))
        });
        for group in groups(found.collect()) {
            let fetch = BlobFetch { loads: self.clone(), left: group.blobs.clone() };
            self.pool.run(move || fetch.carry_out(group));
        }
    }
}

/// Blobs that a thread fetches. Those that are left when it is dropped have failed.
struct BlobFetch {
    loads: Arc<BlobLoads>,
    left: Vec<(u32, FileBlob)>,
}

impl BlobFetch {
    fn carry_out(mut self, group: BlobGroup) {
        let loads = self.loads.clone();
        let Some(pack) = loads.packs.get(group.pack as usize) else { return };
        match loads.reader.range(pack, group.at, group.end) {
            Ok(bytes) => self.share(group.at, bytes),
            // One of the blobs may be where the pack ends early.
            Err(_) => {
                while let Some((number, blob)) = self.left.pop() {
                    let read = loads.reader.blob(pack, &blob.digest, blob.place);
                    loads.finish(number, &blob, read);
                }
            }
        }
    }

    /// Decrypts one blob here, and the others on other threads.
    fn share(&mut self, at: u64, bytes: Vec<u8>) {
        let bytes = Arc::new(bytes);
        for one in self.left.split_off(1.min(self.left.len())) {
            let mut other = BlobFetch { loads: self.loads.clone(), left: vec![one] };
            let bytes = bytes.clone();
            self.loads.pool.run(move || other.unseal(at, &bytes));
        }
        self.unseal(at, &bytes);
    }

    /// Decrypts the blobs in the bytes of a pack from offset `at` on.
    fn unseal(&mut self, at: u64, bytes: &[u8]) {
        while let Some((number, blob)) = self.left.pop() {
            let range = blob.place.range();
            let from = usize::try_from(range.start - at).unwrap_or(usize::MAX);
            let to = usize::try_from(range.end - at).unwrap_or(usize::MAX);
            let (Some(sealed), Some(pack)) =
                (bytes.get(from..to), self.loads.packs.get(blob.place.pack() as usize))
            else {
                self.loads.cache.finish(number, Err(Error::misfit()));
                continue;
            };
            let read = self.loads.reader.unseal(pack, &blob.digest, blob.place, sealed);
            self.loads.finish(number, &blob, read);
        }
    }
}

impl BlobLoads {
    /// Hands a blob to the cache. One that a damaged or missing pack has may be in another pack, too.
    fn finish(&self, number: u32, blob: &FileBlob, read: Result<Vec<u8>>) {
        let read = read.or_else(|fault| {
            let places = self.copies.places(BlobKind::Data, &blob.digest);
            self.reader.first_of(&self.packs, &blob.digest, places).ok_or(fault)
        });
        self.cache.finish(number, read.map(BlobBytes::new).map_err(Error::from));
    }
}

impl Drop for BlobFetch {
    fn drop(&mut self) {
        for (number, _) in self.left.drain(..) {
            let text = "a blob could not be fetched (a bug in the program, or no threads are left)";
            self.loads.cache.finish(number, Err(Error::new(Kind::Io, text)));
        }
    }
}

/// Joins blobs to groups that one request fetches.
fn groups(mut blobs: Vec<(u32, FileBlob)>) -> Vec<BlobGroup> {
    blobs.sort_unstable_by_key(|(_, blob)| (blob.place.pack(), blob.place.range().start));
    let mut groups: Vec<BlobGroup> = Vec::new();
    for (number, blob) in blobs {
        let (pack, range) = (blob.place.pack(), blob.place.range());
        let joins = |group: &&mut BlobGroup| {
            group.pack == pack
                && range.start <= group.end + GAP_MAX
                && range.end.max(group.end) - group.at <= FETCH_MAX
        };
        match groups.last_mut().filter(joins) {
            Some(group) => {
                group.end = group.end.max(range.end);
                group.blobs.push((number, blob));
            }
            None => groups.push(BlobGroup {
                pack,
                at: range.start,
                end: range.end,
                blobs: vec![(number, blob)],
            }),
        }
    }
    groups
}
