//! The objects of a disk in chunks, byte for byte: names, the manifest, and pages of the index. `docs/remote.md` describes
//! them.

use std::collections::BTreeMap;
use std::time::Duration;

use blockhaul_block::{Error, Kind, Result};

/// Chunks in a page of the index.
pub(crate) const PAGE: u64 = 16 << 10;
/// Most chunks of a disk: their versions are in memory, 8 bytes each.
pub(crate) const CHUNKS_MAX: u64 = 16 << 20;
/// Bytes of a chunk.
pub(crate) const CHUNK_RANGE: std::ops::RangeInclusive<u64> = 64 << 10..=64 << 20;
/// The name of the manifest.
pub(crate) const MANIFEST: &str = "manifest";
/// Largest manifest, in bytes: that of the most pages has less than 64 KiB.
pub(crate) const MANIFEST_MAX: u64 = 1 << 20;

const HEAD: &str = "blockhaul chunks 1\n";
const PAGE_HEAD: &[u8; 8] = b"BHINDEX1";
/// Bytes of a page before its entries.
const PAGE_START: usize = 32;
/// Bits of a version that number the objects of one writer.
const SEQUENCE_BITS: u32 = 40;
/// Most writers, one after another.
pub(crate) const WRITERS_MAX: u64 = (1 << (64 - SEQUENCE_BITS)) - 1;
/// Longest lease.
const LEASE_MAX: u64 = 3_600_000;

/// The version of a chunk or a page: the number of the writer, and that of the object among those of this writer, from 1
/// on. Zero: there is no object, and all bytes are zeroes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub(crate) struct ChunkVersion(pub(crate) u64);

impl ChunkVersion {
    /// A hole.
    pub(crate) const HOLE: ChunkVersion = ChunkVersion(0);

    /// The object of this number of a writer.
    ///
    /// # Errors
    /// The writer has no numbers left.
    pub(crate) fn of(writer: u64, sequence: u64) -> Result<ChunkVersion> {
        if sequence >> SEQUENCE_BITS != 0 {
            let text = "the writer has written too many chunks";
            return Err(Error::new(Kind::Io, text).with_remedy("open the disk again"));
        }
        Ok(ChunkVersion(writer << SEQUENCE_BITS | sequence))
    }

    /// The number of its writer.
    pub(crate) fn writer(self) -> u64 {
        self.0 >> SEQUENCE_BITS
    }

    /// The number among the objects of its writer.
    pub(crate) fn sequence(self) -> u64 {
        self.0 & ((1 << SEQUENCE_BITS) - 1)
    }
}

/// The name of an object with a chunk.
pub(crate) fn chunk_name(chunk: u64, version: ChunkVersion) -> String {
    format!("chunks/{chunk:016x}-{:016x}", version.0)
}

/// The name of an object with a page.
pub(crate) fn page_name(page: u64, version: ChunkVersion) -> String {
    format!("index/{page:016x}-{:016x}", version.0)
}

/// The object with this name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ChunkObject {
    Chunk(u64, ChunkVersion),
    Page(u64, ChunkVersion),
}

impl ChunkObject {
    /// None for the names of other objects.
    pub(crate) fn parse(name: &str) -> Option<ChunkObject> {
        let (kind, rest) = name.split_once('/')?;
        let (number, version) = rest.split_once('-')?;
        let hex = |text: &str| {
            let is_digit = |byte: u8| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
            (text.len() == 16 && text.bytes().all(is_digit))
                .then(|| u64::from_str_radix(text, 16).ok())?
        };
        let (number, version) = (hex(number)?, ChunkVersion(hex(version)?));
        match kind {
            "chunks" => Some(ChunkObject::Chunk(number, version)),
            "index" => Some(ChunkObject::Page(number, version)),
            _ => None,
        }
    }

    /// Its version.
    pub(crate) fn version(self) -> ChunkVersion {
        let (ChunkObject::Chunk(_, version) | ChunkObject::Page(_, version)) = self;
        version
    }
}

/// The manifest of a disk. What it does not reach is not part of the disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ChunkManifest {
    /// 32 hexadecimal digits that no other disk has.
    pub(crate) id: String,
    /// Bytes of the disk.
    pub(crate) size: u64,
    /// Bytes of a chunk.
    pub(crate) chunk: u64,
    /// The number of changes of the contents.
    pub(crate) generation: u64,
    /// The number of the latest writer.
    pub(crate) writer: u64,
    /// The number of renewals of its lease.
    pub(crate) renewal: u64,
    /// The time after which a writer that has not renewed its lease may be replaced.
    pub(crate) lease: Duration,
    /// The writer that has the disk open.
    pub(crate) holder: Option<String>,
    /// Whether all objects are reached from the manifest.
    pub(crate) is_clean: bool,
    /// The pages that are not empty.
    pub(crate) pages: BTreeMap<u64, ChunkVersion>,
}

impl ChunkManifest {
    /// Number of chunks.
    pub(crate) fn chunks(&self) -> u64 {
        self.size.div_ceil(self.chunk)
    }

    /// Checks the sizes of a disk.
    ///
    /// # Errors
    /// [`Kind::Usage`]
    pub(crate) fn check_sizes(size: u64, chunk: u64) -> Result<()> {
        if !CHUNK_RANGE.contains(&chunk) || !chunk.is_power_of_two() {
            let text = format!("chunks of {chunk} bytes are not possible");
            let remedy = "choose a power of two from 64K to 64M: size=4M";
            return Err(Error::new(Kind::Usage, text).with_remedy(remedy));
        }
        if i64::try_from(size).is_err() || size.div_ceil(chunk) > CHUNKS_MAX {
            let text = format!("{size} bytes are more than {CHUNKS_MAX} chunks of {chunk} bytes");
            return Err(Error::new(Kind::Usage, text).with_remedy("choose larger chunks: size=64M"));
        }
        Ok(())
    }

    /// The same for the next writer, which is open.
    ///
    /// # Errors
    /// There were too many writers.
    pub(crate) fn next_writer(&self, holder: String, lease: Duration) -> Result<ChunkManifest> {
        if self.writer >= WRITERS_MAX {
            let text = "the disk was opened for writing too many times";
            return Err(Error::new(Kind::Io, text).with_remedy("copy it to another place"));
        }
        Ok(ChunkManifest {
            writer: self.writer + 1,
            holder: Some(holder),
            lease,
            is_clean: false,
            ..self.clone()
        })
    }

    /// The bytes of the object.
    pub(crate) fn to_bytes(&self) -> Vec<u8> {
        let ChunkManifest { id, size, chunk, generation, writer, renewal, .. } = self;
        let lease = self.lease.as_millis();
        let holder = self.holder.as_deref().unwrap_or("-");
        let clean = if self.is_clean { "yes" } else { "no" };
        let mut text = format!(
            "{HEAD}id {id}\nsize {size}\nchunk {chunk}\ngeneration {generation}\nwriter {writer}\n\
             renewal {renewal}\nlease {lease}\nholder {holder}\nclean {clean}\n"
        );
        for (page, version) in &self.pages {
            text += &format!("page {page} {:016x}\n", version.0);
        }
        (text + "end\n").into_bytes()
    }

    /// Parses and checks a manifest.
    ///
    /// # Errors
    /// [`Kind::Invalid`]: the bytes are no manifest, or are damaged.
    pub(crate) fn parse(bytes: &[u8]) -> Result<ChunkManifest> {
        let parsed = std::str::from_utf8(bytes).ok().and_then(parse).filter(|manifest| {
            ChunkManifest::check_sizes(manifest.size, manifest.chunk).is_ok()
                && manifest.writer <= WRITERS_MAX
                && manifest.pages.keys().all(|page| page * PAGE < manifest.chunks())
        });
        parsed.ok_or_else(|| {
            let text = format!("{MANIFEST} is no manifest of a disk in chunks, or is damaged");
            Error::new(Kind::Invalid, text).with_remedy("check the name of the disk")
        })
    }
}

fn parse(text: &str) -> Option<ChunkManifest> {
    let mut lines = text.strip_prefix(HEAD)?.strip_suffix("end\n")?.lines();
    let mut field = |name: &str| lines.next()?.strip_prefix(name)?.strip_prefix(' ');
    let id = field("id")?.to_owned();
    let is_id = id.len() == 32 && id.bytes().all(|byte| byte.is_ascii_hexdigit());
    let size = field("size")?.parse().ok()?;
    let chunk = field("chunk")?.parse().ok()?;
    // Numbers that can grow for ever.
    let counter = |text: &str| text.parse::<u64>().ok().filter(|number| *number < 1 << 63);
    let generation = counter(field("generation")?)?;
    let writer = field("writer")?.parse().ok()?;
    let renewal = counter(field("renewal")?)?;
    let lease = field("lease")?.parse().ok().filter(|lease| *lease <= LEASE_MAX)?;
    let holder = Some(field("holder")?).filter(|holder| *holder != "-").map(str::to_owned);
    let is_clean = match field("clean")? {
        "yes" => true,
        "no" => false,
        _ => return None,
    };
    let mut pages = BTreeMap::new();
    for line in lines {
        let (page, version) = line.strip_prefix("page ")?.split_once(' ')?;
        let version = ChunkVersion(u64::from_str_radix(version, 16).ok()?);
        pages.insert(page.parse().ok().filter(|page| *page < CHUNKS_MAX / PAGE)?, version);
    }
    let lease = Duration::from_millis(lease);
    is_id.then_some(ChunkManifest {
        id,
        size,
        chunk,
        generation,
        writer,
        renewal,
        lease,
        holder,
        is_clean,
        pages,
    })
}

/// The bytes of a page of the disk with this identifier.
pub(crate) fn page_bytes(id: &str, page: u64, entries: &[ChunkVersion]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(PAGE_START + 8 * entries.len());
    bytes.extend_from_slice(PAGE_HEAD);
    bytes.extend_from_slice(&id_bytes(id));
    bytes.extend_from_slice(&page.to_be_bytes());
    entries.iter().for_each(|entry| bytes.extend_from_slice(&entry.0.to_be_bytes()));
    bytes
}

/// The entries of a page; none if the bytes are not that page of that disk.
pub(crate) fn page_entries(
    id: &str,
    page: u64,
    count: usize,
    bytes: &[u8],
) -> Option<Vec<ChunkVersion>> {
    let (head, entries) = bytes.split_at_checked(PAGE_START)?;
    let is_right = head == page_bytes(id, page, &[]) && entries.len() == 8 * count;
    let (entries, _) = entries.as_chunks::<8>();
    is_right.then(|| entries.iter().map(|entry| ChunkVersion(u64::from_be_bytes(*entry))).collect())
}

/// The 16 bytes of an identifier.
fn id_bytes(id: &str) -> [u8; 16] {
    u128::from_str_radix(id, 16).unwrap_or_default().to_be_bytes()
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that fails")]
mod tests {
    use super::*;

    fn manifest() -> ChunkManifest {
        ChunkManifest {
            id: "00112233445566778899aabbccddeeff".to_owned(),
            size: (64 << 30) + 1,
            chunk: 4 << 20,
            generation: 7,
            writer: 3,
            renewal: 9,
            lease: Duration::from_secs(30),
            holder: Some("host process 1 00000000075bcd15".to_owned()),
            is_clean: false,
            pages: BTreeMap::from([(1, ChunkVersion::of(3, 5).unwrap())]),
        }
    }

    /// The bytes that docs/remote.md shows.
    #[test]
    fn the_layout_is_that_of_the_page() {
        let page = include_str!("../../../../../docs/remote.md");
        let shown = String::from_utf8(manifest().to_bytes()).unwrap();
        assert!(page.contains(&shown), "{shown}");
        for name in [
            chunk_name(42, ChunkVersion::of(3, 5).unwrap()),
            page_name(1, ChunkVersion::of(3, 5).unwrap()),
        ] {
            assert!(page.contains(&name), "{name}");
        }
        let bytes = page_bytes(&manifest().id, 1, &[ChunkVersion::of(3, 5).unwrap()]);
        let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
        let rows = [&bytes[..8], &bytes[8..24], &bytes[24..32], &bytes[32..]].map(hex);
        assert!(rows.iter().all(|row| page.contains(row)), "{rows:?}");
    }

    #[test]
    fn manifests_are_read_again_and_damage_is_noticed() {
        let bytes = manifest().to_bytes();
        assert_eq!(ChunkManifest::parse(&bytes).unwrap(), manifest());
        let closed = ChunkManifest { holder: None, is_clean: true, ..manifest() };
        assert_eq!(ChunkManifest::parse(&closed.to_bytes()).unwrap(), closed);
        (0..bytes.len()).for_each(|len| assert!(ChunkManifest::parse(&bytes[..len]).is_err()));
        for (good, bad) in [
            ("chunk 4194304", "chunk 4194305"),
            ("chunk 4194304", "chunk 0"),
            ("size 68", "size 9999999999999968"),
            ("page 1 ", "page 2 "),
            ("page 1 ", "page 99999999999999 "),
            ("id 0", "id x"),
            ("lease 3", "lease 99999999999993"),
            ("chunks 1", "chunks 2"),
        ] {
            let text = String::from_utf8(bytes.clone()).unwrap().replace(good, bad);
            assert!(ChunkManifest::parse(text.as_bytes()).is_err(), "{bad}");
        }
    }

    #[test]
    fn pages_and_names_are_read_again() {
        let id = manifest().id;
        let entries = [ChunkVersion::HOLE, ChunkVersion::of(3, 5).unwrap()];
        let bytes = page_bytes(&id, 1, &entries);
        assert_eq!(page_entries(&id, 1, 2, &bytes).unwrap(), entries);
        assert!(page_entries(&id, 2, 2, &bytes).is_none());
        assert!(page_entries(&id, 1, 3, &bytes).is_none());
        assert!(page_entries(&id, 1, 2, &bytes[..20]).is_none());
        assert!(page_entries(&"1".repeat(32), 1, 2, &bytes).is_none());
        let version = entries[1];
        assert_eq!((version.writer(), version.sequence()), (3, 5));
        assert_eq!(
            ChunkObject::parse(&chunk_name(42, version)),
            Some(ChunkObject::Chunk(42, version))
        );
        assert_eq!(ChunkObject::parse(&page_name(1, version)), Some(ChunkObject::Page(1, version)));
        for odd in ["manifest", "chunks/1-2", "chunks/+00000000000002a-0000030000000005", "x/y"] {
            assert_eq!(ChunkObject::parse(odd), None, "{odd}");
        }
    }
}
