//! The allocated blocks of a disk in a file, for the next run (`save=FILE`).
//!
//! The file holds a magic text, the identity of the disk, the known parts and a CRC-32. A file of
//! another disk, or of another state of it, is not used, and is replaced.

use std::io::{self, Write as _};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use crate::allocation::{Allocation, UNITS, UnitBits};
use crate::options::VddkOptions;

const MAGIC: &[u8; 16] = b"BLOCKHAUL-VDDK1\n";
/// Bytes of the words of a part.
const WORDS: usize = UNITS / 8;
/// Maximum length of an identity in bytes.
const IDENTITY_MAX: usize = 64 << 10;

/// Where a map is kept, and of which disk.
#[derive(Debug, Clone)]
pub(crate) struct MapFile {
    path: PathBuf,
    identity: Vec<u8>,
}

impl MapFile {
    /// The place for a disk of `size` bytes; none without `save=`.
    pub(crate) fn of(options: &VddkOptions, size: u64) -> Option<MapFile> {
        let path = options.save.clone()?;
        let access = &options.access;
        // A local file is known by itself.
        let local = std::fs::metadata(&options.file).ok().filter(|_| access.server.is_none());
        let local = local.map(|data| (data.dev(), data.ino(), data.mtime(), data.mtime_nsec()));
        let identity = format!(
            "{size}\n{}\n{}\n{:?}\n{:?}\n{local:?}",
            options.file,
            options.flags,
            access.identity(),
            options.change_id
        );
        Some(MapFile { path, identity: identity.into_bytes() })
    }

    /// The parts in the file; none if there is no file of this disk.
    pub(crate) fn load(&self, parts: u64) -> Vec<(u64, UnitBits)> {
        match self.read(parts) {
            Ok(Some(known)) => known,
            Ok(None) => Vec::new(),
            Err(error) => {
                log::warn!("vddk: {} is not used: {error}", self.path.display());
                Vec::new()
            }
        }
    }

    fn read(&self, parts: u64) -> io::Result<Option<Vec<(u64, UnitBits)>>> {
        let length = match std::fs::metadata(&self.path) {
            Ok(data) => data.len(),
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error),
        };
        let most = parts.saturating_mul(WORDS as u64 + 16).saturating_add(IDENTITY_MAX as u64 + 64);
        if length > most {
            return Err(io::Error::other("it is too long for this disk"));
        }
        let bytes = std::fs::read(&self.path)?;
        let damaged = || io::Error::other("it is damaged");
        let (body, sum) = bytes.split_last_chunk::<4>().ok_or_else(damaged)?;
        if crc32fast::hash(body) != u32::from_le_bytes(*sum) {
            return Err(damaged());
        }
        let mut rest = body.strip_prefix(MAGIC).ok_or_else(damaged)?;
        let length = take(&mut rest).ok_or_else(damaged)?;
        let length = usize::try_from(length).ok().filter(|length| *length <= rest.len());
        let (identity, rest) = rest.split_at(length.ok_or_else(damaged)?);
        if identity != self.identity {
            log::debug!("vddk: {} is of another disk or state", self.path.display());
            return Ok(None);
        }
        decode(rest, parts).map(Some).ok_or_else(damaged)
    }

    /// Writes the known parts, and then replaces the file.
    pub(crate) fn store(&self, known: &[(u64, UnitBits)]) {
        if let Err(error) = self.write(known) {
            log::warn!("vddk: cannot write {}: {error}", self.path.display());
        }
    }

    fn write(&self, known: &[(u64, UnitBits)]) -> io::Result<()> {
        let mut bytes = MAGIC.to_vec();
        bytes.extend((self.identity.len() as u64).to_le_bytes());
        bytes.extend(&self.identity);
        for (part, bits) in known {
            bytes.extend(part.to_le_bytes());
            match bits {
                UnitBits::Uniform(set) => bytes.extend(u64::from(*set).to_le_bytes()),
                UnitBits::Mixed(words) => {
                    bytes.extend(2_u64.to_le_bytes());
                    words.iter().for_each(|word| bytes.extend(word.to_le_bytes()));
                }
            }
        }
        bytes.extend(crc32fast::hash(&bytes).to_le_bytes());
        let new = new_name(&self.path);
        let mut file = std::fs::File::create(&new)?;
        file.write_all(&bytes)?;
        file.sync_data()?;
        std::fs::rename(&new, &self.path)
    }
}

fn new_name(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_os_string();
    name.push(format!(".{}.new", std::process::id()));
    name.into()
}

fn take(rest: &mut &[u8]) -> Option<u64> {
    let (number, after) = rest.split_first_chunk::<8>()?;
    *rest = after;
    Some(u64::from_le_bytes(*number))
}

/// The parts of a file; none if it is damaged.
fn decode(mut rest: &[u8], parts: u64) -> Option<Vec<(u64, UnitBits)>> {
    let mut known = Vec::new();
    while !rest.is_empty() {
        let part = take(&mut rest).filter(|part| *part < parts)?;
        let bits = match take(&mut rest)? {
            0 => UnitBits::Uniform(false),
            1 => UnitBits::Uniform(true),
            2 => {
                let (words, after) = rest.split_at_checked(WORDS)?;
                rest = after;
                let words = words.as_chunks::<8>().0.iter().map(|word| u64::from_le_bytes(*word));
                UnitBits::Mixed(words.collect())
            }
            _ => return None,
        };
        known.push((part, bits));
    }
    Some(known)
}

/// Adds parts to a map.
pub(crate) fn add(map: &mut Allocation, known: Vec<(u64, UnitBits)>) {
    for (part, bits) in known {
        map.learn(part, bits);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_stored_is_loaded_for_the_same_disk_only() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("map");
        let place = MapFile { path: path.clone(), identity: b"one".to_vec() };
        assert_eq!(place.load(9), []);
        let mut mixed = UnitBits::Uniform(false);
        mixed.set(5..900);
        let known = [(0, UnitBits::Uniform(true)), (1, mixed), (2, UnitBits::Uniform(false))];
        place.store(&known);
        assert_eq!(place.load(9), known);
        let other = MapFile { path: path.clone(), identity: b"two".to_vec() };
        assert_eq!(other.load(9), []);
        // Parts behind the end, and damage.
        assert_eq!(place.load(2), []);
        let bytes = std::fs::read(&path).unwrap();
        for at in [0, 20, 100, bytes.len() / 2, bytes.len() - 1] {
            let mut damaged = bytes.clone();
            damaged[at] ^= 1;
            std::fs::write(&path, &damaged).unwrap();
            assert_eq!(place.load(9), []);
            std::fs::write(&path, &bytes[..at]).unwrap();
            assert_eq!(place.load(9), []);
        }
    }

    #[test]
    fn bytes_from_outside_never_panic() {
        let mut rng = blockhaul_testkit::rng::Rng::new(blockhaul_testkit::rng::seed());
        for _ in 0..2000 {
            let bytes: Vec<u8> = (0..rng.below(64)).map(|_| rng.below(4) as u8).collect();
            if let Some(known) = decode(&bytes, 3) {
                assert!(known.iter().all(|(part, _)| *part < 3));
            }
        }
    }
}
