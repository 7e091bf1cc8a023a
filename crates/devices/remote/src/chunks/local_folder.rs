//! Objects of a disk in chunks as files below a local directory.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::{FileExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use blockhaul_block::{Error, Kind, Result};
use bytes::Bytes;
use futures_util::StreamExt as _;
use futures_util::stream::{self, BoxStream};
use object_store::UpdateVersion;
use rustix::fs::{FlockOperation, OFlags, flock};
use rustix::io::Errno;

use crate::chunks::folder::{FoundObject, ObjectFolder, other_size};
use crate::runtime::blocking;

/// The file that a writer holds a lock of.
const LOCK: &str = "lock";
/// An object that is about to replace another one.
const FRESH: &str = "manifest.new";
/// No file of another name is written.
const NOFOLLOW: i32 = OFlags::NOFOLLOW.bits().cast_signed();
/// Longest time in which others replace an object, and the pause between two looks.
const TURN: Duration = Duration::from_secs(5);
const PAUSE: Duration = Duration::from_millis(10);
/// Folders with objects.
const FOLDERS: [&str; 2] = ["chunks", "index"];

/// A directory with objects.
#[derive(Clone)]
pub(crate) struct LocalFolder {
    root: PathBuf,
    /// The open lock.
    lock: Arc<Mutex<Option<File>>>,
}

impl LocalFolder {
    /// The files below this directory.
    pub(crate) fn new(root: PathBuf) -> LocalFolder {
        LocalFolder { root, lock: Arc::default() }
    }

    fn at(&self, name: &str) -> PathBuf {
        self.root.join(name)
    }

    /// Blocks, as all methods below.
    fn put_now(&self, name: &str, bytes: &[u8]) -> io::Result<()> {
        let path = self.at(name);
        let mut options = OpenOptions::new();
        options.write(true).create(true).truncate(true).custom_flags(NOFOLLOW);
        let mut file = options.open(&path)?;
        let written = file.write_all(bytes).and_then(|()| file.sync_all());
        if let Err(error) = written {
            // A full disk stays full otherwise: the next attempt has another name.
            let _ = fs::remove_file(&path);
            return Err(error);
        }
        blockhaul_io::sync_folder(&path)
    }

    /// Makes a directory and those above it, durably.
    fn make_folder(path: &Path) -> io::Result<()> {
        let missing: Vec<_> = path.ancestors().take_while(|folder| !folder.exists()).collect();
        fs::create_dir_all(path)?;
        let made = missing.iter().filter(|folder| !folder.as_os_str().is_empty());
        made.rev().try_for_each(|folder| blockhaul_io::sync_folder(folder))
    }

    fn get_now(&self, name: &str, most: u64) -> Result<Option<FoundObject>> {
        let path = self.at(name);
        let Some(file) = found(File::open(&path)).map_err(|error| failed("read", &path, error))?
        else {
            return Ok(None);
        };
        let mut bytes = Vec::new();
        let read = file.take(most + 1).read_to_end(&mut bytes);
        read.map_err(|error| failed("read", &path, error))?;
        if bytes.len() as u64 > most {
            return Err(other_size(name, bytes.len() as u64));
        }
        let version = version_of(&bytes);
        Ok(Some(FoundObject { bytes: bytes.into(), version }))
    }

    /// Keeps others from replacing an object until the result is dropped, where the file system has locks of
    /// directories: the lock of a writer can be removed. The directory of the disk itself may be locked by its user.
    ///
    /// # Errors
    /// [`Kind::InUse`]: another program keeps the directory locked. Whoever may read it can lock it.
    fn turn(&self) -> Result<Option<File>> {
        let path = self.at(FOLDERS[1]);
        let Ok(folder) = File::open(&path) else { return Ok(None) };
        let begun = blockhaul_io::now();
        loop {
            match flock(&folder, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => return Ok(Some(folder)),
                Err(Errno::WOULDBLOCK | Errno::INTR) if blockhaul_io::now() < begun + TURN => {
                    std::thread::sleep(PAUSE);
                }
                Err(Errno::WOULDBLOCK | Errno::INTR) => break,
                Err(_) => return Ok(None),
            }
        }
        let text = format!("another program keeps {} locked", path.display());
        let remedy = "end that program (lsof names it), then open the disk again";
        Err(Error::new(Kind::InUse, text).with_remedy(remedy))
    }

    /// Makes the directories, and a file that becomes the object at once.
    fn replace_now(
        &self,
        name: &str,
        bytes: &[u8],
        expected: Option<&UpdateVersion>,
    ) -> Result<Option<UpdateVersion>> {
        let wrong = |error| failed("write", &self.at(name), error);
        if expected.is_none() {
            let folders = FOLDERS.iter().map(|folder| self.root.join(folder));
            folders.into_iter().try_for_each(|path| Self::make_folder(&path)).map_err(wrong)?;
        }
        let _turn = self.turn()?;
        self.check_lock()?;
        let found = self.get_now(name, u64::from(u32::MAX))?;
        if found.map(|found| found.version.e_tag) != expected.map(|version| version.e_tag.clone()) {
            return Ok(None);
        }
        self.put_now(FRESH, bytes).map_err(wrong)?;
        fs::rename(self.at(FRESH), self.at(name)).map_err(wrong)?;
        blockhaul_io::sync_folder(&self.at(name)).map_err(wrong)?;
        Ok(Some(version_of(bytes)))
    }

    fn lock_now(&self) -> Result<()> {
        let path = self.at(LOCK);
        let wrong = |error| failed("open", &path, error);
        Self::make_folder(&self.root).map_err(wrong)?;
        let file =
            OpenOptions::new().read(true).write(true).create(true).truncate(false).open(&path);
        let file = file.map_err(wrong)?;
        flock(&file, FlockOperation::NonBlockingLockExclusive).map_err(|errno| {
            if errno != Errno::WOULDBLOCK {
                return wrong(errno.into());
            }
            let text = "another program has the disk open for writing";
            Error::new(Kind::InUse, text).with_remedy("end that program, or open it read-only")
        })?;
        *self.lock.lock().unwrap_or_else(PoisonError::into_inner) = Some(file);
        Ok(())
    }

    /// Whether a lock is held, which is the one that others look at.
    fn check_lock(&self) -> Result<bool> {
        let held = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(held) = &*held else { return Ok(false) };
        let path = self.at(LOCK);
        let wrong = |error| failed("check", &path, error);
        let identity = |file: fs::Metadata| (file.dev(), file.ino());
        let own = held.metadata().map(identity).map_err(wrong)?;
        if found(fs::metadata(&path)).map_err(wrong)?.map(identity) == Some(own) {
            return Ok(true);
        }
        let text = format!("{} was removed: another writer may have the disk", path.display());
        let remedy = "open the disk again; what was not flushed is lost";
        Err(Error::new(Kind::InUse, text).with_remedy(remedy))
    }

    fn names_now(&self) -> Result<Vec<String>> {
        let wrong = |error| failed("list", &self.root, error);
        let mut names = Vec::new();
        let in_root = [String::new()].into_iter();
        for folder in in_root.chain(FOLDERS.map(|folder| format!("{folder}/"))) {
            let path = self.at(&folder);
            let Some(entries) = found(fs::read_dir(path)).map_err(wrong)? else { continue };
            for entry in entries {
                let entry = entry.map_err(wrong)?;
                let name = entry.file_name().to_string_lossy().into_owned();
                let is_own = FOLDERS.contains(&name.as_str()) || name == LOCK || name == FRESH;
                if !(folder.is_empty() && is_own) {
                    names.push(format!("{folder}{name}"));
                }
            }
        }
        Ok(names)
    }
}

#[async_trait]
impl ObjectFolder for LocalFolder {
    async fn get(&self, name: &str, most: u64) -> Result<Option<FoundObject>> {
        let (folder, name) = (self.clone(), name.to_owned());
        blocking(move || folder.get_now(&name, most)).await
    }

    async fn read(&self, name: &str, whole: u64, at: u64, buf: &mut [u8]) -> Result<bool> {
        let (path, name, len) = (self.at(name), name.to_owned(), buf.len());
        let read = blocking(move || {
            let wrong = |error| failed("read", &path, error);
            let Some(file) = found(File::open(&path)).map_err(wrong)? else { return Ok(None) };
            let size = file.metadata().map_err(wrong)?.len();
            if size != whole {
                return Err(other_size(&name, size));
            }
            let mut bytes = vec![0; len];
            file.read_exact_at(&mut bytes, at).map_err(wrong)?;
            Ok(Some(bytes))
        });
        let Some(bytes) = read.await? else { return Ok(false) };
        buf.copy_from_slice(&bytes);
        Ok(true)
    }

    async fn put(&self, name: &str, bytes: Bytes) -> Result<()> {
        let (folder, name) = (self.clone(), name.to_owned());
        let put = move || {
            let put = folder.put_now(&name, &bytes);
            put.map_err(|error| failed("write", &folder.at(&name), error))
        };
        blocking(put).await
    }

    async fn replace(
        &self,
        name: &str,
        bytes: Bytes,
        expected: Option<&UpdateVersion>,
    ) -> Result<Option<UpdateVersion>> {
        let (folder, name, expected) = (self.clone(), name.to_owned(), expected.cloned());
        blocking(move || folder.replace_now(&name, &bytes, expected.as_ref())).await
    }

    async fn remove(&self, name: &str) -> Result<()> {
        let path = self.at(name);
        let remove = move || {
            let removed = found(fs::remove_file(&path));
            removed.map(drop).map_err(|error| failed("remove", &path, error))
        };
        blocking(remove).await
    }

    fn names(&self) -> BoxStream<'static, Result<String>> {
        let folder = self.clone();
        let listed = stream::once(blocking(move || folder.names_now()));
        let each = |names: Result<Vec<String>>| match names {
            Ok(names) => stream::iter(names.into_iter().map(Ok).collect::<Vec<_>>()),
            Err(error) => stream::iter(vec![Err(error)]),
        };
        listed.flat_map(each).boxed()
    }

    async fn lock(&self) -> Result<bool> {
        let folder = self.clone();
        blocking(move || folder.lock_now()).await.map(|()| true)
    }

    async fn holds_lock(&self) -> Result<bool> {
        let folder = self.clone();
        blocking(move || folder.check_lock()).await
    }
}

/// The version of a file with these bytes: files have none of their own.
fn version_of(bytes: &[u8]) -> UpdateVersion {
    let digest: String =
        openssl::sha::sha256(bytes).iter().map(|byte| format!("{byte:02x}")).collect();
    UpdateVersion { e_tag: Some(digest), version: None }
}

fn found<T>(result: io::Result<T>) -> io::Result<Option<T>> {
    match result {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        result => result.map(Some),
    }
}

fn failed(what: &str, path: &Path, error: io::Error) -> Error {
    Error::system(format!("cannot {what} {}", path.display()), error)
}
