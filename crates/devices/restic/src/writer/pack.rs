//! Packs: blobs one behind the other, and a header that lists them.

use crate::cipher::OVERHEAD;
use crate::digest::Digest;
use crate::fault::{RepositoryFault, Result, pack_file};
use crate::index::{BlobKind, checked_length};
use crate::repository::RepositoryReader;

/// Bytes of blobs from which on a pack is complete: restic's default.
pub(crate) const PACK_SIZE: usize = 16 << 20;

/// Bytes at the end of a pack that are read first: most headers are shorter.
const TAIL: u64 = 16 << 10;
/// Longest header: restic's limit.
const HEADER_MAX: u64 = 16 << 20;
/// Bytes of the length of the header.
const LENGTH: u64 = 4;

/// A blob in a pack.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PackBlob {
    pub(crate) kind: BlobKind,
    pub(crate) digest: Digest,
    pub(crate) at: u32,
    /// Encrypted bytes.
    pub(crate) len: u32,
    /// Bytes of the contents.
    pub(crate) plain: u32,
    pub(crate) is_compressed: bool,
}

/// A pack that is being filled.
#[derive(Default)]
pub(crate) struct OpenPack {
    bytes: Vec<u8>,
    blobs: Vec<PackBlob>,
}

/// A blob, encrypted.
pub(crate) struct SealedBlob {
    pub(crate) kind: BlobKind,
    pub(crate) digest: Digest,
    pub(crate) bytes: Vec<u8>,
    /// Bytes of the contents.
    pub(crate) plain: u32,
    pub(crate) is_compressed: bool,
}

/// A pack that is complete.
pub(crate) struct FullPack {
    pub(crate) name: Digest,
    pub(crate) bytes: Vec<u8>,
    pub(crate) blobs: Vec<PackBlob>,
}

impl OpenPack {
    /// Adds a blob. True: the pack is complete, because it has this many bytes.
    pub(crate) fn add(&mut self, blob: SealedBlob, enough: usize) -> bool {
        let SealedBlob { kind, digest, bytes, plain, is_compressed } = blob;
        // A blob is shorter than a pack may be: trees have at most 1200 MiB, and are alone in theirs.
        let [at, len] =
            [self.bytes.len(), bytes.len()].map(|len| u32::try_from(len).unwrap_or(u32::MAX));
        self.blobs.push(PackBlob { kind, digest, at, len, plain, is_compressed });
        if self.bytes.is_empty() && bytes.len() >= enough {
            self.bytes = bytes;
        } else {
            self.bytes.reserve_exact((enough + bytes.len()).saturating_sub(self.bytes.len()));
            self.bytes.extend_from_slice(&bytes);
        }
        self.bytes.len() >= enough
    }

    /// Whether it has no blobs.
    pub(crate) fn is_empty(&self) -> bool {
        self.blobs.is_empty()
    }

    /// Appends the header.
    ///
    /// # Errors
    /// The header cannot be encrypted.
    pub(crate) fn finish(self, reader: &RepositoryReader) -> Result<FullPack> {
        let OpenPack { mut bytes, blobs } = self;
        let mut header = Vec::with_capacity(blobs.len() * 41 + OVERHEAD);
        for blob in &blobs {
            let kind =
                u8::from(blob.kind == BlobKind::Tree) + if blob.is_compressed { 2 } else { 0 };
            header.push(kind);
            header.extend_from_slice(&blob.len.to_le_bytes());
            if blob.is_compressed {
                header.extend_from_slice(&blob.plain.to_le_bytes());
            }
            header.extend_from_slice(&blob.digest.0);
        }
        let header = reader.seal(&header)?;
        bytes.extend_from_slice(&header);
        let len = u32::try_from(header.len()).unwrap_or(u32::MAX);
        bytes.extend_from_slice(&len.to_le_bytes());
        Ok(FullPack { name: Digest::of(&bytes), bytes, blobs })
    }
}

/// The blobs of a pack by its header, which alone is read.
///
/// # Errors
/// The pack is missing or damaged, or the storage fails.
pub(crate) fn read_header(reader: &RepositoryReader, pack: &Digest) -> Result<Vec<PackBlob>> {
    let file = pack_file(&pack.to_string());
    let damaged = |why: &str| RepositoryFault::damaged(&file, why);
    let size = reader.storage().size(&file)?;
    let mut tail = reader.range(pack, size - size.min(TAIL), size)?;
    let bytes = tail.last_chunk().copied().ok_or_else(|| damaged("it has no header"))?;
    let length = u64::from(u32::from_le_bytes(bytes));
    let whole = length + LENGTH;
    if length > HEADER_MAX || whole > size {
        return Err(damaged("the length of its header is impossible"));
    }
    if whole > tail.len() as u64 {
        tail = reader.range(pack, size - whole, size)?;
    }
    let begin = usize::try_from(tail.len() as u64 - whole).unwrap_or(0);
    let sealed = &tail[begin..tail.len() - bytes.len()];
    let header =
        reader.open_sealed(sealed).ok_or_else(|| damaged("its header fails authentication"))?;
    let blobs =
        parse_header(&header).ok_or_else(|| damaged("its header names impossible blobs"))?;
    let end = blobs.last().map_or(0, |blob| u64::from(blob.at) + u64::from(blob.len));
    if end + whole != size {
        return Err(damaged("its header does not name all of its bytes"));
    }
    Ok(blobs)
}

/// The blobs of a header, which lie side by side.
fn parse_header(mut header: &[u8]) -> Option<Vec<PackBlob>> {
    let (mut blobs, mut at) = (Vec::new(), 0_u32);
    while let Some((type_of, rest)) = header.split_first() {
        let kind = match type_of {
            0 | 2 => BlobKind::Data,
            1 | 3 => BlobKind::Tree,
            _ => return None,
        };
        let (len, mut rest) = rest.split_first_chunk()?;
        let len = u32::from_le_bytes(*len);
        let is_compressed = *type_of >= 2;
        let mut packed = 0;
        if is_compressed {
            let (plain, more) = rest.split_first_chunk()?;
            (packed, rest) = (u64::from(u32::from_le_bytes(*plain)), more);
            if packed == 0 {
                return None;
            }
        }
        let (digest, rest) = rest.split_first_chunk()?;
        let plain = checked_length(kind, len, packed)?;
        blobs.push(PackBlob { kind, digest: Digest(*digest), at, len, plain, is_compressed });
        at = at.checked_add(len)?;
        header = rest;
    }
    Some(blobs)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_are_checked() {
        let entry = |kind: u8, numbers: &[u32]| {
            let numbers = numbers.iter().flat_map(|number| number.to_le_bytes());
            [kind].into_iter().chain(numbers).chain([7; 32]).collect::<Vec<u8>>()
        };
        let blobs = parse_header(&[entry(0, &[33]), entry(3, &[40, 100])].concat()).unwrap();
        let facts =
            |blob: &PackBlob| (blob.kind, blob.at, blob.len, blob.plain, blob.is_compressed);
        assert_eq!(facts(&blobs[0]), (BlobKind::Data, 0, 33, 1, false));
        assert_eq!(facts(&blobs[1]), (BlobKind::Tree, 33, 40, 100, true));
        for bad in [
            entry(4, &[33]),
            entry(0, &[32]),
            entry(2, &[40, 0]),
            entry(2, &[40, u32::MAX]),
            entry(0, &[33])[..36].to_vec(),
            vec![0; 20],
            [entry(0, &[u32::MAX - 8]), entry(0, &[33])].concat(),
        ] {
            assert!(parse_header(&bad).is_none(), "{bad:?}");
        }
        assert!(parse_header(&[]).unwrap().is_empty());
    }
}
