//! Places of repositories.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use blockhaul_block::Error;

use crate::fault::{RepositoryFault, Result};

/// A place with the files of a repository, which have names such as `snapshots/DIGEST`. Its methods block.
pub(crate) trait RepositoryStorage: Send + Sync + 'static {
    /// Requests that are worth having under way, at least 1.
    fn parallel(&self) -> usize;

    /// The names of the files in a folder, without it, in any order. A folder that does not exist is empty.
    ///
    /// # Errors
    /// The storage fails.
    fn list(&self, folder: &str) -> Result<Vec<String>>;

    /// A whole file of at most `most` bytes.
    ///
    /// # Errors
    /// [`RepositoryFault::MissingFile`]; the file is longer, or the storage fails.
    fn whole(&self, file: &str, most: u64) -> Result<Vec<u8>>;

    /// `len` bytes of a file at offset `at`.
    ///
    /// # Errors
    /// [`RepositoryFault::MissingFile`]; the file is shorter, or the storage fails.
    fn range(&self, file: &str, at: u64, len: usize) -> Result<Vec<u8>>;
}

/// Requests to a file system that are worth having under way.
const FILES: usize = 8;

/// A directory.
pub(crate) struct DirectoryStorage(PathBuf);

impl DirectoryStorage {
    pub(crate) fn new(path: impl Into<PathBuf>) -> DirectoryStorage {
        DirectoryStorage(path.into())
    }

    fn open(&self, file: &str) -> Result<File> {
        let path = self.0.join(file);
        blockhaul_io::open_regular_file(&path).map_err(|error| failed(file, &path, error))
    }
}

impl RepositoryStorage for DirectoryStorage {
    fn parallel(&self) -> usize {
        std::thread::available_parallelism().map_or(2, usize::from).clamp(2, FILES)
    }

    fn list(&self, folder: &str) -> Result<Vec<String>> {
        let path = self.0.join(folder);
        let wrong = |error| Error::system(format!("cannot list {}", path.display()), error);
        let entries = match fs::read_dir(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries.map_err(wrong)?,
        };
        let name = |entry: io::Result<fs::DirEntry>| {
            let entry = entry.map_err(wrong)?;
            Ok(entry.file_name().to_string_lossy().into_owned())
        };
        entries.map(name).collect()
    }

    fn whole(&self, file: &str, most: u64) -> Result<Vec<u8>> {
        let path = self.0.join(file);
        let read = blockhaul_io::read_regular_file(&path, most);
        read.map_err(|error| failed(file, &path, error))
    }

    fn range(&self, file: &str, at: u64, len: usize) -> Result<Vec<u8>> {
        let mut bytes = vec![0; len];
        match self.open(file)?.read_exact_at(&mut bytes, at) {
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                let why = format!("it ends before byte {}", at.saturating_add(len as u64));
                Err(RepositoryFault::damaged(file, why))
            }
            Err(error) => Err(failed(file, &self.0.join(file), error)),
            Ok(()) => Ok(bytes),
        }
    }
}

fn failed(file: &str, path: &Path, error: io::Error) -> RepositoryFault {
    match error.kind() {
        io::ErrorKind::NotFound => RepositoryFault::missing(file),
        io::ErrorKind::FileTooLarge => RepositoryFault::damaged(file, "it is too long"),
        io::ErrorKind::InvalidInput => RepositoryFault::damaged(file, error.to_string()),
        _ => Error::system(format!("cannot read {}", path.display()), error).into(),
    }
}
