//! Places of repositories.

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt as _, FileExt as _, MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use blockhaul_block::Error;
use rustix::fs::{AtFlags, CWD, Mode, OFlags, fsync, linkat, mkdirat, openat, statat};
use rustix::io::Errno;

use crate::fault::{RepositoryFault, Result};
use crate::parallel::try_each;

/// The file that makes a place a repository.
pub(crate) const CONFIG: &str = "config";
/// The folders of a repository.
pub(crate) const FOLDERS: [&str; 5] = ["data", "index", "keys", "locks", "snapshots"];

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

    /// Bytes of a file.
    ///
    /// # Errors
    /// [`RepositoryFault::MissingFile`]; the storage fails.
    fn size(&self, file: &str) -> Result<u64>;

    /// The names of all packs whose names begin with one of these bytes, in any order; others may be among them.
    ///
    /// # Errors
    /// The storage fails.
    fn packs(&self, begins: &[u8]) -> Result<Vec<String>> {
        let list = |byte: &u8| self.list(&format!("data/{byte:02x}"));
        Ok(try_each(self.parallel(), begins, list)?.concat())
    }

    /// Refuses a place in which this program cannot write, as far as it shows without a write.
    ///
    /// # Errors
    /// The place is read-only.
    fn check_writable(&self) -> Result<()>;

    /// Makes the place and the folders of a new repository, where they are absent.
    ///
    /// # Errors
    /// The storage fails.
    fn make(&self) -> Result<()>;

    /// Binds all writes that follow to the repository that has this place now.
    ///
    /// # Errors
    /// [`RepositoryFault::NoRepository`]; the storage fails.
    fn hold(&self) -> Result<()>;

    /// Checks that the repository of [`RepositoryStorage::hold`] still has its place.
    ///
    /// # Errors
    /// [`RepositoryFault::RepositoryGone`]; the storage fails.
    fn check_held(&self) -> Result<()>;

    /// Writes a file as a whole, durably. No other program sees part of it. A file of this name that exists stays. False: it
    /// exists. Folders of packs alone are made.
    ///
    /// # Errors
    /// [`RepositoryFault::RepositoryGone`]; the storage fails.
    fn put_new(&self, file: &str, bytes: &[u8]) -> Result<bool>;

    /// Writes a file whose name is that of its contents: one that exists is the same.
    ///
    /// # Errors
    /// Those of [`RepositoryStorage::put_new`].
    fn put(&self, file: &str, bytes: &[u8]) -> Result<()> {
        self.put_new(file, bytes).map(drop)
    }

    /// Removes a file, which need not exist.
    ///
    /// # Errors
    /// The storage fails.
    fn remove(&self, file: &str) -> Result<()>;
}

/// Requests to a file system that are worth having under way.
const FILES: usize = 8;

/// A directory.
pub(crate) struct DirectoryStorage {
    path: PathBuf,
    /// The directory to which writes go, whatever has its path.
    root: OnceLock<OwnedFd>,
    /// The file `config` of the repository that is written. Open, so that no other file gets its inode number.
    config: OnceLock<File>,
}

const FOLDER_FLAGS: OFlags = OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC);

impl DirectoryStorage {
    pub(crate) fn new(path: impl Into<PathBuf>) -> DirectoryStorage {
        DirectoryStorage { path: path.into(), root: OnceLock::new(), config: OnceLock::new() }
    }

    fn open(&self, file: &str) -> Result<File> {
        let path = self.path.join(file);
        blockhaul_io::open_regular_file(&path).map_err(|error| failed(file, &path, error))
    }

    fn root(&self) -> io::Result<BorrowedFd<'_>> {
        if let Some(root) = self.root.get() {
            return Ok(root.as_fd());
        }
        let root = openat(CWD, &self.path, FOLDER_FLAGS, Mode::empty())?;
        Ok(self.root.get_or_init(|| root).as_fd())
    }

    fn gone(&self) -> RepositoryFault {
        RepositoryFault::RepositoryGone { place: self.path.display().to_string() }
    }

    /// The fault of a change.
    fn unwritten(&self, action: &str, file: &str, error: io::Error) -> RepositoryFault {
        if error.kind() == io::ErrorKind::NotFound {
            return self.gone();
        }
        let text = format!("cannot {action} {}", self.path.join(file).display());
        Error::system(text, error).into()
    }

    /// Permissions of new files, as restic chooses them: the group of the repository may read where it may read `config`.
    fn mode(&self, root: BorrowedFd<'_>) -> u32 {
        let config = statat(root, CONFIG, AtFlags::empty());
        if config.is_ok_and(|found| found.st_mode & 0o040 != 0) { 0o440 } else { 0o400 }
    }

    fn make_now(&self) -> io::Result<()> {
        if !self.path.is_dir() {
            fs::DirBuilder::new().recursive(true).mode(0o700).create(&self.path)?;
            blockhaul_io::sync_folder(&self.path)?;
        }
        let root = self.root()?;
        for folder in FOLDERS {
            make_folder(root, folder, 0o700)?;
        }
        Ok(fsync(root)?)
    }

    fn put_now(&self, file: &str, bytes: &[u8]) -> io::Result<bool> {
        let root = self.root()?;
        let mode = self.mode(root);
        let (folder, name) = file.rsplit_once('/').unwrap_or((".", file));
        let opened = openat(root, folder, FOLDER_FLAGS, Mode::empty());
        let folder = match (opened, folder.split_once('/')) {
            // A folder of packs. Its own folder belongs to the repository, and must exist.
            (Err(Errno::NOENT), Some((above, new))) => {
                let above = openat(root, above, FOLDER_FLAGS, Mode::empty())?;
                make_folder(above.as_fd(), new, if mode & 0o040 == 0 { 0o700 } else { 0o750 })?;
                fsync(&above)?;
                openat(above, new, FOLDER_FLAGS, Mode::empty())?
            }
            (opened, _) => opened?,
        };
        let is_new = match put_unnamed(folder.as_fd(), name, mode, bytes)? {
            Some(is_new) => is_new,
            None => put_named(folder.as_fd(), name, mode, bytes)?,
        };
        fsync(folder)?;
        Ok(is_new)
    }
}

fn make_folder(above: BorrowedFd<'_>, name: &str, mode: u32) -> io::Result<()> {
    match mkdirat(above, name, Mode::from_raw_mode(mode)) {
        Ok(()) | Err(Errno::EXIST) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// Writes a file that has no name before it is complete, so that a kill leaves nothing. None: the file system has no such
/// files. False: a file has this name.
fn put_unnamed(
    folder: BorrowedFd<'_>,
    name: &str,
    mode: u32,
    bytes: &[u8],
) -> io::Result<Option<bool>> {
    let flags = OFlags::TMPFILE | OFlags::WRONLY | OFlags::CLOEXEC;
    let Ok(file) = openat(folder, ".", flags, Mode::from_raw_mode(mode)) else {
        return Ok(None);
    };
    let mut file = File::from(file);
    file.write_all(bytes)?;
    file.sync_all()?;
    let unnamed = format!("/proc/self/fd/{}", file.as_raw_fd());
    match linkat(CWD, &unnamed[..], folder, name, AtFlags::SYMLINK_FOLLOW) {
        Ok(()) => Ok(Some(true)),
        Err(Errno::EXIST) => Ok(Some(false)),
        Err(_) => Ok(None),
    }
}

/// Writes a file under another name first. False: a file has this name.
fn put_named(folder: BorrowedFd<'_>, name: &str, mode: u32, bytes: &[u8]) -> io::Result<bool> {
    let folder = PathBuf::from(format!("/proc/self/fd/{}", folder.as_raw_fd()));
    let mut fresh = tempfile::Builder::new();
    fresh.prefix(".blockhaul-").permissions(fs::Permissions::from_mode(mode));
    // Removed if the file cannot be written: a full file system gets its space back.
    let mut file = fresh.tempfile_in(&folder)?;
    file.write_all(bytes)?;
    file.as_file().sync_all()?;
    match file.persist_noclobber(folder.join(name)) {
        Ok(_) => Ok(true),
        Err(error) if error.error.kind() == io::ErrorKind::AlreadyExists => Ok(false),
        Err(error) => Err(error.error),
    }
}

impl RepositoryStorage for DirectoryStorage {
    fn parallel(&self) -> usize {
        std::thread::available_parallelism().map_or(2, usize::from).clamp(2, FILES)
    }

    fn list(&self, folder: &str) -> Result<Vec<String>> {
        let path = self.path.join(folder);
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
        let path = self.path.join(file);
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
            Err(error) => Err(failed(file, &self.path.join(file), error)),
            Ok(()) => Ok(bytes),
        }
    }

    fn size(&self, file: &str) -> Result<u64> {
        let path = self.path.join(file);
        let found = fs::metadata(&path).map_err(|error| failed(file, &path, error))?;
        Ok(found.len())
    }

    fn check_writable(&self) -> Result<()> {
        let wrong = |error: Errno| {
            let text = format!("cannot write to {}", self.path.display());
            Error::system(text, error.into()).into()
        };
        match rustix::fs::access(&self.path, rustix::fs::Access::WRITE_OK) {
            Err(Errno::NOENT) => Ok(()),
            checked => checked.map_err(wrong),
        }
    }

    fn make(&self) -> Result<()> {
        self.make_now().map_err(|error| self.unwritten("make", "", error))
    }

    fn hold(&self) -> Result<()> {
        let config = match self.open(CONFIG) {
            Err(RepositoryFault::MissingFile { .. }) => return Err(RepositoryFault::NoRepository),
            config => config?,
        };
        self.root().map_err(|error| self.unwritten("open", "", error))?;
        self.config.get_or_init(|| config);
        self.check_held()
    }

    fn check_held(&self) -> Result<()> {
        let Some(config) = self.config.get() else { return Err(RepositoryFault::NoRepository) };
        let failed = |error| self.unwritten("look for", CONFIG, error);
        let identity = |found: fs::Metadata| (found.dev(), found.ino());
        let held = config.metadata().map(identity).map_err(failed)?;
        let here = fs::metadata(self.path.join(CONFIG)).map(identity).map_err(failed)?;
        let root = self.root().and_then(|root| Ok(statat(root, CONFIG, AtFlags::empty())?));
        let root = root.map_err(failed)?;
        if held == here && held == (root.st_dev, root.st_ino) { Ok(()) } else { Err(self.gone()) }
    }

    fn put_new(&self, file: &str, bytes: &[u8]) -> Result<bool> {
        self.put_now(file, bytes).map_err(|error| self.unwritten("write", file, error))
    }

    fn remove(&self, file: &str) -> Result<()> {
        let removed =
            self.root().and_then(|root| match rustix::fs::unlinkat(root, file, AtFlags::empty()) {
                Err(Errno::NOENT) => Ok(()),
                removed => Ok(removed?),
            });
        removed.map_err(|error| self.unwritten("remove", file, error))
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
