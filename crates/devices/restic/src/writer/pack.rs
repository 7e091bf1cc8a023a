//! Packs: blobs one behind the other, and a header that lists them.

use crate::cipher::OVERHEAD;
use crate::digest::Digest;
use crate::fault::Result;
use crate::index::BlobKind;
use crate::repository::RepositoryReader;

/// Bytes of blobs from which on a pack is complete: restic's default.
pub(crate) const PACK_SIZE: usize = 16 << 20;

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
    /// Adds a blob. True: the pack is complete.
    pub(crate) fn add(&mut self, blob: SealedBlob) -> bool {
        let SealedBlob { kind, digest, bytes, plain, is_compressed } = blob;
        // A blob is shorter than a pack may be: trees have at most 1200 MiB, and are alone in theirs.
        let [at, len] =
            [self.bytes.len(), bytes.len()].map(|len| u32::try_from(len).unwrap_or(u32::MAX));
        self.blobs.push(PackBlob { kind, digest, at, len, plain, is_compressed });
        if self.bytes.is_empty() && bytes.len() >= PACK_SIZE {
            self.bytes = bytes;
        } else {
            self.bytes.reserve_exact((PACK_SIZE + bytes.len()).saturating_sub(self.bytes.len()));
            self.bytes.extend_from_slice(&bytes);
        }
        self.bytes.len() >= PACK_SIZE
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
