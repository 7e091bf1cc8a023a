//! An open repository: its files, decrypted and checked.

use std::io::Read as _;
use std::sync::{Arc, Mutex, PoisonError};

use blockhaul_block::{Error, Kind};
use serde::Deserialize;

use crate::cipher::CipherKey;
use crate::digest::Digest;
use crate::fault::{RepositoryFault, Result, pack_file};
use crate::index::{BlobCopies, BlobIndex, BlobKind, BlobPlace, IndexBuilder, IndexPart};
use crate::key_file;
use crate::parallel::try_each;
use crate::storage::{CONFIG, RepositoryStorage};

/// The folder of index files.
pub(crate) const INDEX: &str = "index";
/// Longest file that is neither pack nor key, and its contents.
const FILE_MAX: u64 = 64 << 20;
const CONTENTS_MAX: u64 = 512 << 20;
/// The first byte of contents that are compressed.
const COMPRESSED: u8 = 2;
/// How often the index files are read again because restic has replaced some of them.
const RELOADS: usize = 3;
/// Threads that read index files.
const THREADS_MAX: usize = 8;

/// The files of a repository, decrypted.
#[derive(Clone)]
pub(crate) struct RepositoryReader {
    storage: Arc<dyn RepositoryStorage>,
    key: CipherKey,
    version: u32,
}

/// A repository with its index.
pub(crate) struct Repository {
    reader: RepositoryReader,
    index: BlobIndex,
    /// An index that cannot be read: its blobs are unknown.
    damaged_index: Option<String>,
}

#[derive(Deserialize)]
struct ConfigFile {
    version: u32,
}

impl RepositoryReader {
    /// Opens a repository.
    ///
    /// # Errors
    /// There is none, the password is wrong, or the version is unknown.
    pub(crate) fn open(
        storage: Arc<dyn RepositoryStorage>,
        password: &[u8],
    ) -> Result<RepositoryReader> {
        let config = match storage.whole(CONFIG, FILE_MAX) {
            Err(RepositoryFault::MissingFile { .. }) => return Err(RepositoryFault::NoRepository),
            config => config?,
        };
        let key = key_file::open(&*storage, password, &config)?;
        let mut reader = RepositoryReader { storage, key, version: 0 };
        let text = reader.contents(CONFIG, &config)?;
        let wrong = |error: serde_json::Error| RepositoryFault::damaged(CONFIG, error.to_string());
        let found: ConfigFile = serde_json::from_slice(&text).map_err(wrong)?;
        match found.version {
            1 | 2 => {
                reader.version = found.version;
                Ok(reader)
            }
            version => Err(RepositoryFault::UnknownVersion(version)),
        }
    }

    /// The names of the files in a folder, in order. Other files there are none of restic's.
    ///
    /// # Errors
    /// The storage fails.
    pub(crate) fn names(&self, folder: &str) -> Result<Vec<Digest>> {
        Ok(digests(&self.storage.list(folder)?))
    }

    /// The names of all packs whose names begin with one of these bytes, in order; others may be among them.
    ///
    /// # Errors
    /// The storage fails.
    pub(crate) fn packs(&self, begins: &[u8]) -> Result<Vec<Digest>> {
        Ok(digests(&self.storage.packs(begins)?))
    }

    /// The place of the files.
    pub(crate) fn storage(&self) -> &dyn RepositoryStorage {
        &*self.storage
    }

    /// The version of the format, 1 or 2.
    pub(crate) fn version(&self) -> u32 {
        self.version
    }

    /// Encrypts bytes.
    ///
    /// # Errors
    /// No random bytes are left.
    pub(crate) fn seal(&self, text: &[u8]) -> Result<Vec<u8>> {
        Ok(self.key.seal(text).map_err(unsealed)?)
    }

    /// Decrypts bytes. None: they fail authentication.
    pub(crate) fn open_sealed(&self, sealed: &[u8]) -> Option<Vec<u8>> {
        self.key.open(sealed)
    }

    /// Writes a file whose name is its digest, durably.
    ///
    /// # Errors
    /// The storage fails.
    pub(crate) fn put(&self, folder: &str, text: &[u8]) -> Result<Digest> {
        let packed;
        let text = if self.version == 1 {
            text
        } else {
            let mut contents = vec![COMPRESSED];
            let level = zstd::DEFAULT_COMPRESSION_LEVEL;
            zstd::stream::copy_encode(text, &mut contents, level).map_err(uncompressed)?;
            packed = contents;
            &packed
        };
        let sealed = self.seal(text)?;
        let name = Digest::of(&sealed);
        self.storage.put(&format!("{folder}/{name}"), &sealed)?;
        Ok(name)
    }

    /// The contents of a file whose name is its digest.
    ///
    /// # Errors
    /// The file is damaged, or the storage fails.
    pub(crate) fn file(&self, folder: &str, name: &Digest) -> Result<Vec<u8>> {
        let file = format!("{folder}/{name}");
        let bytes = self.storage.whole(&file, FILE_MAX)?;
        if Digest::of(&bytes) != *name {
            return Err(RepositoryFault::damaged(&file, "its bytes do not match its name"));
        }
        self.contents(&file, &bytes)
    }

    fn contents(&self, file: &str, sealed: &[u8]) -> Result<Vec<u8>> {
        let damaged = |why: &str| RepositoryFault::damaged(file, why);
        let text = self.key.open(sealed).ok_or_else(|| damaged("it fails authentication"))?;
        match text.split_first() {
            Some((&COMPRESSED, packed)) => {
                unpacked(packed, CONTENTS_MAX).map_err(|why| damaged(&why))
            }
            Some((b'[' | b'{', _)) => Ok(text),
            _ => Err(damaged("it has an unknown encoding")),
        }
    }

    /// The contents of a blob.
    ///
    /// # Errors
    /// The pack is missing, or the blob is damaged.
    pub(crate) fn blob(&self, pack: &Digest, blob: &Digest, place: BlobPlace) -> Result<Vec<u8>> {
        let range = place.range();
        let sealed = self.range(pack, range.start, range.end)?;
        self.unseal(pack, blob, place, &sealed)
    }

    /// The contents of a blob at the first of these places that has it undamaged.
    pub(crate) fn first_of(
        &self,
        packs: &[Digest],
        blob: &Digest,
        mut places: impl Iterator<Item = BlobPlace>,
    ) -> Option<Vec<u8>> {
        places.find_map(|place| self.blob(packs.get(place.pack() as usize)?, blob, place).ok())
    }

    /// The bytes of a part of a pack.
    ///
    /// # Errors
    /// The pack is missing or shorter.
    pub(crate) fn range(&self, pack: &Digest, at: u64, end: u64) -> Result<Vec<u8>> {
        let file = pack_file(&pack.to_string());
        let len = usize::try_from(end.saturating_sub(at)).unwrap_or(usize::MAX);
        self.storage.range(&file, at, len)
    }

    /// Decrypts, decompresses and checks a blob.
    ///
    /// # Errors
    /// [`RepositoryFault::DamagedBlob`]
    pub(crate) fn unseal(
        &self,
        pack: &Digest,
        blob: &Digest,
        place: BlobPlace,
        sealed: &[u8],
    ) -> Result<Vec<u8>> {
        let damaged = |why: &str| RepositoryFault::blob(pack, blob, why);
        let text = self.key.open(sealed).ok_or_else(|| damaged("it fails authentication"))?;
        let text = if place.is_compressed() {
            let most = place.plain() as usize;
            zstd::bulk::decompress(&text, most).map_err(|error| damaged(&error.to_string()))?
        } else {
            text
        };
        if text.len() != place.plain() as usize || Digest::of(&text) != *blob {
            return Err(damaged("its contents do not match its digest"));
        }
        Ok(text)
    }

    /// Requests that are worth having under way.
    pub(crate) fn parallel(&self) -> usize {
        self.storage.parallel().max(1)
    }
}

impl Repository {
    /// The repository with all of its index files. Take the list of snapshots before: their blobs are then in the index.
    ///
    /// # Errors
    /// The storage fails. A damaged index is left out.
    pub(crate) fn load(reader: RepositoryReader) -> Result<Repository> {
        let mut parts = IndexParts::read(&reader)?;
        for _ in 0..RELOADS {
            if !parts.is_missing {
                break;
            }
            parts = IndexParts::read(&reader)?;
        }
        let index = parts.builder.finish();
        Ok(Repository { reader, index, damaged_index: parts.damaged })
    }

    /// The place of a blob, and its number.
    ///
    /// # Errors
    /// [`RepositoryFault::UnknownBlob`]
    pub(crate) fn find(&self, kind: BlobKind, blob: &Digest) -> Result<(usize, BlobPlace)> {
        self.index.find(kind, blob).ok_or_else(|| RepositoryFault::UnknownBlob {
            blob: blob.to_string(),
            damaged_index: self.damaged_index.clone(),
        })
    }

    pub(crate) fn index(&self) -> &BlobIndex {
        &self.index
    }

    /// The contents of a blob, and the pack that has it.
    ///
    /// # Errors
    /// No index has the blob, or the blob is missing or damaged in each of its packs.
    pub(crate) fn blob(&self, kind: BlobKind, blob: &Digest) -> Result<(Digest, Vec<u8>)> {
        let (_, place) = self.find(kind, blob)?;
        let pack = self.index.pack(place);
        let read = self.reader.blob(&pack, blob, place).or_else(|fault| {
            let places = self.index.copies().places(kind, blob);
            self.reader.first_of(self.index.packs(), blob, places).ok_or(fault)
        });
        Ok((pack, read?))
    }

    /// The index.
    pub(crate) fn into_index(self) -> BlobIndex {
        self.index
    }

    /// The reader, the names of packs by their numbers, and further places of blobs. The index is freed.
    pub(crate) fn into_parts(self) -> (RepositoryReader, (Vec<Digest>, BlobCopies)) {
        (self.reader, self.index.into_packs())
    }
}

impl RepositoryReader {
    fn index_part(&self, name: &Digest) -> Result<IndexPart> {
        crate::index::parse(&format!("{INDEX}/{name}"), &self.file(INDEX, name)?)
    }
}

/// The index files that were read so far.
#[derive(Default)]
struct IndexParts {
    builder: IndexBuilder,
    /// A file was removed after it was listed.
    is_missing: bool,
    damaged: Option<String>,
}

impl IndexParts {
    /// Reads all index files, several at a time.
    fn read(reader: &RepositoryReader) -> Result<IndexParts> {
        let names = reader.names(INDEX)?;
        let parts = Mutex::new(IndexParts::default());
        let threads = reader.parallel().min(THREADS_MAX);
        try_each(threads, &names, |name| {
            let part = reader.index_part(name);
            let mut parts = parts.lock().unwrap_or_else(PoisonError::into_inner);
            parts.add(*name, part)
        })?;
        Ok(parts.into_inner().unwrap_or_else(PoisonError::into_inner))
    }

    fn add(&mut self, name: Digest, part: Result<IndexPart>) -> Result<()> {
        match part {
            Ok(part) => self.builder.add(name, part),
            Err(RepositoryFault::Other(error)) => return Err(error.into()),
            // Replaced by another one at this moment.
            Err(RepositoryFault::MissingFile { file }) => {
                self.is_missing = true;
                self.damaged = Some(file);
            }
            Err(fault) => {
                log::warn!("restic: {fault}: blobs that only this index has are not found");
                self.damaged = Some(format!("{INDEX}/{name}"));
            }
        }
        Ok(())
    }
}

/// The names of files that are digests, in order.
fn digests(names: &[String]) -> Vec<Digest> {
    let mut digests: Vec<_> = names.iter().filter_map(|name| Digest::parse(name)).collect();
    digests.sort_unstable();
    digests
}

/// Encryption has failed.
pub(crate) fn unsealed(error: openssl::error::ErrorStack) -> Error {
    Error::new(Kind::Io, "cannot encrypt").because(error)
}

/// Compression has failed.
pub(crate) fn uncompressed(error: std::io::Error) -> Error {
    Error::system("cannot compress", error)
}

/// Decompresses at most `most` bytes.
fn unpacked(packed: &[u8], most: u64) -> Result<Vec<u8>, String> {
    let unpack = || {
        let mut text = Vec::new();
        let decoder = zstd::stream::read::Decoder::with_buffer(packed)?;
        decoder.take(most + 1).read_to_end(&mut text)?;
        Ok(text)
    };
    let text: Vec<u8> = unpack().map_err(|error: std::io::Error| error.to_string())?;
    if text.len() as u64 > most {
        return Err("its contents are too long".into());
    }
    Ok(text)
}
