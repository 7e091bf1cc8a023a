//! Places of repositories.

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::{DirBuilderExt as _, FileExt as _, MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use blockhaul_block::{Error, Kind};
use rustix::fs::{AtFlags, CWD, Mode, OFlags, linkat, openat};
use rustix::io::Errno;

use crate::fault::{RepositoryFault, Result};

/// The file that makes a place a repository.
pub(crate) const CONFIG: &str = "config";

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

    /// Refuses a place in which this program cannot write.
    ///
    /// # Errors
    /// [`Kind::Unsupported`]
    fn check_writable(&self) -> Result<()> {
        let text = "restic: repositories in object stores are read only";
        let remedy = "write to a repository in a directory";
        Err(Error::new(Kind::Unsupported, text).with_remedy(remedy).into())
    }

    /// Writes a file as a whole, durably. No other program sees part of it. A file of this name that exists has the same
    /// contents, and stays.
    ///
    /// # Errors
    /// The storage fails.
    fn put(&self, file: &str, bytes: &[u8]) -> Result<()> {
        let _ = (file, bytes);
        self.check_writable()
    }

    /// Removes a file, which need not exist.
    ///
    /// # Errors
    /// The storage fails.
    fn remove(&self, file: &str) -> Result<()> {
        let _ = file;
        self.check_writable()
    }
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

    /// Permissions of new files, as restic chooses them: the group of the repository may read where it may read `config`.
    fn mode(&self) -> u32 {
        let config = fs::metadata(self.0.join(CONFIG));
        if config.is_ok_and(|found| found.mode() & 0o040 != 0) { 0o440 } else { 0o400 }
    }

    fn put_now(&self, path: &Path, bytes: &[u8]) -> io::Result<()> {
        let folder = path.parent().unwrap_or(&self.0);
        if !folder.is_dir() {
            let mode = if self.mode() & 0o040 == 0 { 0o700 } else { 0o750 };
            fs::DirBuilder::new().recursive(true).mode(mode).create(folder)?;
            blockhaul_io::sync_folder(folder)?;
        }
        if !self.put_unnamed(folder, path, bytes)? {
            self.put_named(folder, path, bytes)?;
        }
        blockhaul_io::sync_folder(path)
    }

    /// Writes a file that has no name before it is complete, so that a kill leaves nothing. False: the file system has no
    /// such files.
    fn put_unnamed(&self, folder: &Path, path: &Path, bytes: &[u8]) -> io::Result<bool> {
        let flags = OFlags::TMPFILE | OFlags::WRONLY | OFlags::CLOEXEC;
        let Ok(file) = openat(CWD, folder, flags, Mode::from_raw_mode(self.mode())) else {
            return Ok(false);
        };
        let mut file = File::from(file);
        file.write_all(bytes)?;
        file.sync_all()?;
        let unnamed = format!("/proc/self/fd/{}", file.as_raw_fd());
        match linkat(CWD, &unnamed[..], CWD, path, AtFlags::SYMLINK_FOLLOW) {
            Ok(()) | Err(Errno::EXIST) => Ok(true),
            Err(_) => Ok(false),
        }
    }

    fn put_named(&self, folder: &Path, path: &Path, bytes: &[u8]) -> io::Result<()> {
        let permissions = fs::Permissions::from_mode(self.mode());
        let mut fresh = tempfile::Builder::new();
        fresh.prefix(".blockhaul-").permissions(permissions);
        // Removed if the file cannot be written: a full file system gets its space back.
        let mut file = fresh.tempfile_in(folder)?;
        file.write_all(bytes)?;
        file.as_file().sync_all()?;
        file.persist(path).map_err(|error| error.error)?;
        Ok(())
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

    fn check_writable(&self) -> Result<()> {
        let wrong = |error: Errno| {
            let text = format!("cannot write to {}", self.0.display());
            Error::system(text, error.into()).into()
        };
        match rustix::fs::access(&self.0, rustix::fs::Access::WRITE_OK) {
            Err(Errno::NOENT) => Ok(()),
            checked => checked.map_err(wrong),
        }
    }

    fn put(&self, file: &str, bytes: &[u8]) -> Result<()> {
        let path = self.0.join(file);
        self.put_now(&path, bytes).map_err(|error| {
            let text = format!("cannot write {}", path.display());
            Error::system(text, error).into()
        })
    }

    fn remove(&self, file: &str) -> Result<()> {
        let path = self.0.join(file);
        match fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(Error::system(format!("cannot remove {}", path.display()), error).into())
            }
            _ => Ok(()),
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
