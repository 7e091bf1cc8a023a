//! Small files beside the disks of a snapshot: descriptions of machines.

use std::path::{Path, PathBuf};

use blockhaul_block::{Error, Kind, Result};
use jiff::Timestamp;

use crate::digest::Digest;
use crate::index::BlobKind;
use crate::writer::session::BackupSession;
use crate::writer::tree_text::checked_path;

/// Longest file.
const FILE_MAX: u64 = 16 << 20;
/// Bytes of its blobs.
const CHUNK: usize = 1 << 20;

/// A small file that is kept beside disks.
#[derive(Debug, Clone)]
pub struct ResticFile {
    /// The name that it has in the directory of the disks.
    pub(crate) name: String,
    bytes: Vec<u8>,
    pub(crate) time: Timestamp,
}

/// The name in a snapshot of a file.
fn name_of(path: &Path) -> Result<&str> {
    let name = path.file_name().and_then(|name| name.to_str());
    let name = name.ok_or_else(|| {
        let text = format!("restic: {} has no name in UTF-8", path.display());
        Error::new(Kind::Usage, text).with_remedy("name a file")
    })?;
    checked_path(name)
}

/// Refuses files that have no names in a directory with these disks. Nothing is read.
///
/// # Errors
/// [`Kind::Usage`]
pub fn check_file_names<'a>(
    files: &[PathBuf],
    disks: impl Iterator<Item = &'a str> + Clone,
) -> Result<()> {
    for (number, file) in files.iter().enumerate() {
        let name = name_of(file)?;
        let is_taken = |path: &str| {
            path == name || path.strip_prefix(name).is_some_and(|rest| rest.starts_with('/'))
        };
        let other = files[..number].iter().find(|other| name_of(other).is_ok_and(is_taken));
        let other = other.map(|other| other.display().to_string());
        let disk = disks.clone().find(|disk| is_taken(disk)).map(|disk| format!("disk {disk}"));
        if let Some(other) = other.or(disk) {
            let text =
                format!("restic: {} has the name of {other} in the snapshot", file.display());
            return Err(Error::new(Kind::Usage, text).with_remedy("rename the file"));
        }
    }
    Ok(())
}

impl ResticFile {
    /// Reads a file of at most 16 MiB. Blocks.
    ///
    /// # Errors
    /// The file cannot be read, or is larger.
    pub fn read(path: &Path) -> Result<ResticFile> {
        let name = name_of(path)?.to_owned();
        let failed = |error: std::io::Error| {
            let error = Error::system(format!("cannot read {}", path.display()), error);
            error.or_remedy("check the entry files: it names small files of at most 16 MiB")
        };
        let bytes = blockhaul_io::read_regular_file(path, FILE_MAX).map_err(failed)?;
        let changed = path.metadata().and_then(|found| found.modified()).map_err(failed)?;
        let time = Timestamp::try_from(changed).unwrap_or_default();
        Ok(ResticFile { name, bytes, time })
    }

    pub(crate) fn size(&self) -> u64 {
        self.bytes.len() as u64
    }

    /// Saves the blobs of the file, and returns their digests.
    ///
    /// # Errors
    /// The repository fails.
    pub(crate) fn save(&self, session: &BackupSession) -> crate::fault::Result<Vec<Digest>> {
        let save = |bytes: &[u8]| {
            let digest = Digest::of(bytes);
            session.save(BlobKind::Data, digest, bytes).map(|()| digest)
        };
        self.bytes.chunks(CHUNK).map(save).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_files_are_none_of_disks() {
        let check = |files: &[&str], disks: &[&str]| {
            let files: Vec<_> = files.iter().map(PathBuf::from).collect();
            check_file_names(&files, disks.iter().copied())
        };
        check(&["a/vm.xml", "nvram"], &["vda", "x/vdb"]).unwrap();
        for (files, disks) in [
            (&["a/vda"][..], &["vda"][..]),
            (&["x"], &["x/vdb"]),
            (&["a/vm.xml", "b/vm.xml"], &[]),
            (&["a/.."], &[]),
            (&["/"], &[]),
            (&["a\n"], &[]),
        ] {
            assert_eq!(check(files, disks).unwrap_err().kind(), Kind::Usage, "{files:?}");
        }
    }

    #[test]
    fn files_that_are_large_or_none_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.xml");
        assert!(ResticFile::read(&path).unwrap_err().remedy().is_some());
        std::fs::write(&path, "<domain/>").unwrap();
        let file = ResticFile::read(&path).unwrap();
        assert_eq!((&file.name[..], file.size()), ("a.xml", 9));
        let large = std::fs::File::options().write(true).open(&path).unwrap();
        large.set_len(FILE_MAX + 1).unwrap();
        assert!(ResticFile::read(&path).is_err());
        assert!(ResticFile::read(dir.path()).is_err());
    }
}
