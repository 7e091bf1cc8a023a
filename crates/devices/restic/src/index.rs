//! Index files: the places of blobs.

use std::collections::{HashMap, HashSet};
use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::cipher::OVERHEAD;
use crate::digest::Digest;
use crate::fault::{RepositoryFault, Result};

/// Longest data blob, before compression: restic's own have at most 8 MiB.
pub(crate) const DATA_MAX: u64 = 128 << 20;
/// Longest tree blob, before compression: a file of 16 TiB in blobs of 1 MiB.
pub(crate) const TREE_MAX: u64 = 1200 << 20;
/// Most packs.
const PACKS_MAX: usize = 1 << 30;

/// The kind of a blob.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum BlobKind {
    /// Part of a file.
    Data,
    /// A directory.
    Tree,
}

/// The place of a blob: a range of a pack.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct BlobPlace {
    /// Number of the pack.
    pack: u32,
    /// Offset in the pack, in bytes.
    at: u32,
    /// Encrypted bytes.
    len: u32,
    /// Bytes of the contents; the upper bit is set if they are compressed.
    plain: u32,
}

/// The bit of a compressed blob in the length of its contents.
const COMPRESSED: u32 = 1 << 31;

impl BlobPlace {
    /// A range of a pack. `plain`: bytes of the contents.
    pub(crate) fn new(pack: u32, at: u32, len: u32, plain: u32, is_compressed: bool) -> BlobPlace {
        let plain = if is_compressed { plain | COMPRESSED } else { plain };
        BlobPlace { pack, at, len, plain }
    }

    /// The number of its pack.
    pub(crate) fn pack(self) -> u32 {
        self.pack
    }

    /// The range in the pack.
    pub(crate) fn range(self) -> Range<u64> {
        u64::from(self.at)..u64::from(self.at) + u64::from(self.len)
    }

    fn without_kind(self) -> BlobPlace {
        BlobPlace { pack: self.pack & !TREE, ..self }
    }

    /// Bytes of the contents.
    pub(crate) fn plain(self) -> u32 {
        self.plain & !COMPRESSED
    }

    /// Whether the contents are compressed.
    pub(crate) fn is_compressed(self) -> bool {
        self.plain & COMPRESSED != 0
    }
}

/// A blob in the index: 40 bytes. The digest is shortened to 24 bytes; contents are compared with all of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct BlobEntry {
    digest: [u64; 3],
    pub(crate) place: BlobPlace,
}

const _: () = assert!(size_of::<BlobEntry>() <= 48);

/// The bit of a tree in the number of a pack.
const TREE: u32 = 1 << 31;

/// A shortened digest, and whether the blob is a tree: what the index is sorted by.
pub(crate) type BlobKey = ([u64; 3], bool);

/// The key of a blob.
pub(crate) fn blob_key(kind: BlobKind, digest: &Digest) -> BlobKey {
    (shortened(digest), kind == BlobKind::Tree)
}

fn shortened(digest: &Digest) -> [u64; 3] {
    let (words, _) = digest.0.as_chunks::<8>();
    [0, 1, 2].map(|word| u64::from_be_bytes(words[word]))
}

impl BlobEntry {
    /// A blob with this key.
    pub(crate) fn new((digest, is_tree): BlobKey, place: BlobPlace) -> BlobEntry {
        let pack = if is_tree { place.pack | TREE } else { place.pack };
        BlobEntry { digest, place: BlobPlace { pack, ..place } }
    }

    /// Entries of a blob are side by side, those of trees behind those of data.
    pub(crate) fn key(&self) -> BlobKey {
        (self.digest, self.place.pack & TREE != 0)
    }
}

/// The places of all blobs of a repository.
#[derive(Debug, Default)]
pub(crate) struct BlobIndex {
    packs: Vec<Digest>,
    /// Sorted by [`BlobEntry::key`].
    entries: Vec<BlobEntry>,
    /// The first entry of each group of digests that begin with the same 16 bits, and the end.
    starts: Vec<u32>,
    copies: BlobCopies,
}

/// The group of a digest.
fn group(digest: [u64; 3]) -> usize {
    usize::try_from(digest[0] >> 48).unwrap_or_default()
}

impl BlobIndex {
    /// The number of a blob, at most 2^32 - 1, with its place.
    pub(crate) fn find(&self, kind: BlobKind, digest: &Digest) -> Option<(usize, BlobPlace)> {
        let key = blob_key(kind, digest);
        let group = group(key.0);
        let (start, end) =
            (*self.starts.get(group)? as usize, *self.starts.get(group + 1)? as usize);
        let found =
            self.entries.get(start..end)?.binary_search_by_key(&key, BlobEntry::key).ok()?;
        Some((start + found, self.place(start + found)))
    }

    /// The place of the blob of this number, which the index has.
    pub(crate) fn place(&self, number: usize) -> BlobPlace {
        self.entries[number].place.without_kind()
    }

    /// The name of a pack.
    pub(crate) fn pack(&self, place: BlobPlace) -> Digest {
        // Places come from this index.
        self.packs[place.pack as usize]
    }

    /// Number of blobs.
    pub(crate) fn len(&self) -> usize {
        self.entries.len()
    }

    /// Adds a pack, and returns its number.
    pub(crate) fn add_pack(&mut self, pack: Digest) -> Option<u32> {
        self.packs.push(pack);
        u32::try_from(self.packs.len() - 1).ok().filter(|number| (*number as usize) < PACKS_MAX)
    }

    /// Adds blobs that the index does not have.
    pub(crate) fn add(&mut self, more: impl ExactSizeIterator<Item = BlobEntry>) {
        self.entries.reserve_exact(more.len());
        self.entries.extend(more);
        self.entries.sort_unstable_by_key(BlobEntry::key);
        self.find_starts();
    }

    fn find_starts(&mut self) {
        self.entries.truncate(u32::MAX as usize);
        let mut starts = vec![0; (1 << 16) + 1];
        for entry in &self.entries {
            starts[group(entry.digest) + 1] += 1;
        }
        for number in 1..starts.len() {
            starts[number] += starts[number - 1];
        }
        self.starts = starts;
    }

    /// Bytes of memory.
    #[cfg(test)]
    pub(crate) fn heap_bytes(&self) -> usize {
        self.entries.capacity() * size_of::<BlobEntry>()
            + self.copies.0.capacity() * size_of::<BlobEntry>()
            + self.packs.capacity() * size_of::<Digest>()
            + self.starts.capacity() * size_of::<u32>()
    }

    /// The names of all packs, by their numbers.
    pub(crate) fn packs(&self) -> &[Digest] {
        &self.packs
    }

    /// Further places of blobs that several packs have.
    pub(crate) fn copies(&self) -> &BlobCopies {
        &self.copies
    }

    /// The names of all packs, by their numbers, and further places of blobs.
    pub(crate) fn into_packs(self) -> (Vec<Digest>, BlobCopies) {
        (self.packs, self.copies)
    }
}

/// Places of blobs besides those of the index: of blobs that several packs have.
#[derive(Debug, Default)]
pub(crate) struct BlobCopies(Vec<BlobEntry>);

impl BlobCopies {
    /// The places of a blob.
    pub(crate) fn places(
        &self,
        kind: BlobKind,
        digest: &Digest,
    ) -> impl Iterator<Item = BlobPlace> {
        let key = blob_key(kind, digest);
        let first = self.0.partition_point(|entry| entry.key() < key);
        let found = self.0[first..].iter().take_while(move |entry| entry.key() == key);
        found.map(|entry| entry.place.without_kind())
    }
}

#[derive(Deserialize)]
struct IndexFile {
    #[serde(default)]
    supersedes: Option<Vec<Digest>>,
    #[serde(default)]
    packs: Option<Vec<IndexPack>>,
}

#[derive(Deserialize)]
struct IndexPack {
    id: Digest,
    #[serde(default)]
    blobs: Option<Vec<IndexBlob>>,
}

#[derive(Deserialize)]
struct IndexBlob {
    id: Digest,
    #[serde(rename = "type")]
    kind: BlobKind,
    offset: u64,
    length: u64,
    #[serde(default)]
    uncompressed_length: u64,
}

/// Index files that are read one after the other.
#[derive(Default)]
pub(crate) struct IndexBuilder {
    index: BlobIndex,
    numbers: HashMap<Digest, u32>,
    /// Packs that an index names which no other replaces.
    files: Vec<(Digest, Range<usize>)>,
    superseded: HashSet<Digest>,
}

/// The blobs of one index file, checked.
pub(crate) struct IndexPart {
    supersedes: Vec<Digest>,
    packs: Vec<(Digest, Vec<BlobEntry>)>,
}

/// Reads the JSON of an index file.
///
/// # Errors
/// [`RepositoryFault::DamagedFile`], which names `file`.
pub(crate) fn parse(file: &str, text: &[u8]) -> Result<IndexPart> {
    let wrong = |error: serde_json::Error| RepositoryFault::damaged(file, error.to_string());
    let found: IndexFile = serde_json::from_slice(text).map_err(wrong)?;
    let mut packs = Vec::new();
    for pack in found.packs.unwrap_or_default() {
        let blobs = pack.blobs.unwrap_or_default();
        let entries: Option<Vec<_>> = blobs.iter().map(IndexBlob::entry).collect();
        let entries = entries.ok_or_else(|| {
            let why = format!("it names an impossible place in pack {}", pack.id);
            RepositoryFault::damaged(file, why)
        })?;
        packs.push((pack.id, entries));
    }
    Ok(IndexPart { supersedes: found.supersedes.unwrap_or_default(), packs })
}

impl IndexBlob {
    /// The entry, without the number of the pack. None: lengths or offsets are impossible.
    fn entry(&self) -> Option<BlobEntry> {
        let at = u32::try_from(self.offset).ok()?;
        let len = u32::try_from(self.length).ok()?;
        at.checked_add(len)?;
        let is_compressed = self.uncompressed_length > 0;
        let plain = checked_length(self.kind, len, self.uncompressed_length)?;
        let place = BlobPlace::new(0, at, len, plain, is_compressed);
        Some(BlobEntry::new(blob_key(self.kind, &self.id), place))
    }
}

/// Bytes of the contents of a blob with `len` encrypted bytes. `packed`: those before compression; zero: it is not
/// compressed. None: a blob cannot have these lengths.
pub(crate) fn checked_length(kind: BlobKind, len: u32, packed: u64) -> Option<u32> {
    let contents = u64::from(len).checked_sub(OVERHEAD as u64)?;
    let plain = if packed > 0 { packed } else { contents };
    let most = match kind {
        BlobKind::Data => DATA_MAX,
        BlobKind::Tree => TREE_MAX,
    };
    if plain == 0 || plain > most || contents > most + (most >> 6) + 1024 {
        return None;
    }
    u32::try_from(plain).ok()
}

impl IndexBuilder {
    /// Adds the blobs of an index file with this name.
    pub(crate) fn add(&mut self, name: Digest, part: IndexPart) {
        let from = self.index.entries.len();
        self.superseded.extend(part.supersedes);
        for (pack, mut entries) in part.packs {
            let packs = &mut self.index.packs;
            let number = *self.numbers.entry(pack).or_insert_with(|| {
                packs.push(pack);
                u32::try_from(packs.len() - 1).unwrap_or(u32::MAX)
            });
            // More packs than a repository can have: their blobs are unknown.
            if number as usize >= PACKS_MAX {
                continue;
            }
            entries.iter_mut().for_each(|entry| entry.place.pack |= number);
            self.index.entries.append(&mut entries);
        }
        self.files.push((name, from..self.index.entries.len()));
    }

    /// The index of all files. A blob that several have is where an index says that no other replaces.
    pub(crate) fn finish(mut self) -> BlobIndex {
        let mut current: Vec<bool> = vec![false; self.index.packs.len()];
        for (name, range) in &self.files {
            if self.superseded.contains(name) {
                continue;
            }
            for entry in &self.index.entries[range.clone()] {
                current[(entry.place.pack & !TREE) as usize] = true;
            }
        }
        let is_old = |entry: &BlobEntry| !current[(entry.place.pack & !TREE) as usize];
        let entries = &mut self.index.entries;
        entries.sort_unstable_by_key(|entry| {
            (entry.key(), is_old(entry), entry.place.pack, entry.place.at)
        });
        let copies = &mut self.index.copies.0;
        entries.dedup_by(|copy, first| {
            let is_copy = copy.key() == first.key();
            if is_copy && copies.last().map_or(first.place, |last| last.place) != copy.place {
                copies.push(*copy);
            }
            is_copy
        });
        entries.shrink_to_fit();
        self.index.packs.shrink_to_fit();
        self.index.find_starts();
        self.index
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn digest(number: u8) -> Digest {
        Digest([number; 32])
    }

    fn index(files: &[(u8, String)]) -> BlobIndex {
        let mut builder = IndexBuilder::default();
        for (name, text) in files {
            builder.add(digest(*name), parse("index/x", text.as_bytes()).unwrap());
        }
        builder.finish()
    }

    fn file(supersedes: &[u8], pack: u8, blob: u8, at: u64) -> String {
        let old: Vec<_> =
            supersedes.iter().map(|name| format!("{:?}", digest(*name).to_string())).collect();
        format!(
            "{{\"supersedes\":[{}],\"packs\":[{{\"id\":\"{}\",\"blobs\":[{{\"id\":\"{}\",\"type\":\"data\",\
             \"offset\":{at},\"length\":132}}]}}]}}",
            old.join(","),
            digest(pack),
            digest(blob)
        )
    }

    #[test]
    fn an_index_that_is_replaced_counts_only_for_blobs_that_no_other_has() {
        let files =
            [(1, file(&[], 10, 20, 0)), (2, file(&[1], 11, 20, 5)), (3, file(&[], 10, 21, 200))];
        for order in [[0, 1, 2], [2, 1, 0], [1, 0, 2]] {
            let found = index(&order.map(|number| files[number].clone())[..2]);
            let place = found.find(BlobKind::Data, &digest(20));
            if order[..2] != [2, 1] {
                assert_eq!(place.unwrap().1.range(), 5..137, "{order:?}");
            }
        }
        let old = index(&[(1, file(&[], 10, 20, 0)), (2, file(&[1], 11, 21, 5))]);
        let (_, place) = old.find(BlobKind::Data, &digest(20)).unwrap();
        assert_eq!(
            (old.pack(place), place.plain(), place.is_compressed()),
            (digest(10), 100, false)
        );
        assert!(old.find(BlobKind::Tree, &digest(20)).is_none());
        assert!(old.find(BlobKind::Data, &digest(22)).is_none());
    }

    #[test]
    fn impossible_places_are_refused() {
        let text = |kind: &str, at: u64, len: u64, plain: u64| {
            format!(
                "{{\"packs\":[{{\"id\":\"{0}\",\"blobs\":[{{\"id\":\"{0}\",\"type\":\"{kind}\",\"offset\":{at},\
                 \"length\":{len},\"uncompressed_length\":{plain}}}]}}]}}",
                digest(1)
            )
        };
        let good = text("data", 0, 33, 1);
        assert!(parse("index/x", good.as_bytes()).is_ok());
        for bad in [
            text("data", 0, 32, 0),
            text("data", 0, 31, 1),
            text("data", u64::from(u32::MAX), 40, 0),
            text("data", 1 << 32, 40, 0),
            text("data", 0, 1 << 32, 1),
            text("data", 0, 40, DATA_MAX + 1),
            text("data", 0, DATA_MAX * 2, 1),
            text("tree", 0, 40, TREE_MAX + 1),
            text("file", 0, 40, 1),
            "{".into(),
        ] {
            let fault = parse("index/x", bad.as_bytes()).err();
            assert!(matches!(fault, Some(RepositoryFault::DamagedFile { .. })), "{bad}");
        }
        assert!(parse("index/x", b"{\"packs\":null}").is_ok());
    }
}
