//! Changes of a store: a new point. `removal` has the removal of points.

use std::fs::{File, OpenOptions};
use std::path::{Path, PathBuf};

use blockhaul_block::{Error, Kind, Result};
use rustix::fs::FlockOperation;

use crate::files::{self, failed};
use crate::manifest::{self, BackupPoint};
use crate::ranges::IncrementRanges;
use crate::store::{self, Store};

/// A store that no other program changes until this is dropped.
#[derive(Debug)]
pub struct StoreWriter {
    pub(crate) store: Store,
    unfinished: Option<BackupPoint>,
    pub(crate) readers: File,
    _lock: File,
}

impl StoreWriter {
    /// Locks the store in `dir`, which is created if it does not exist. Blocks.
    ///
    /// # Errors
    /// [`Kind::InUse`] if another program changes it; and those of [`Store::open_or_new`].
    pub fn lock(dir: &Path) -> Result<StoreWriter> {
        Store::open_or_new(dir)?;
        match std::fs::create_dir(dir) {
            Ok(()) => blockhaul_io::sync_folder(dir)
                .map_err(|error| failed("cannot sync the directory of", dir, error))?,
            Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(failed("cannot create", dir, error)),
        }
        let open = |name: &str| {
            let path = dir.join(name);
            let mut options = OpenOptions::new();
            let opened = options.read(true).write(true).create(true).truncate(false).open(&path);
            opened.map_err(|error| failed("cannot open", &path, error))
        };
        let lock = open(files::LOCK)?;
        if let Err(error) = rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive) {
            if error == rustix::io::Errno::WOULDBLOCK {
                let dir = dir.display();
                let text =
                    format!("{dir} is in use by another pull, merge or prune: wait until it ends");
                return Err(Error::new(Kind::InUse, text));
            }
            return Err(failed("cannot lock", dir, error.into()));
        }
        let readers = open(files::READERS)?;
        // Only now it cannot change any more.
        let store = Store::open_or_new(dir)?;
        let unfinished = read_unfinished(&store)?;
        let writer = StoreWriter { store, unfinished, readers, _lock: lock };
        writer.clear_join()?;
        Ok(writer)
    }

    /// The points.
    pub fn store(&self) -> &Store {
        &self.store
    }

    /// The point that an earlier run has begun.
    pub fn unfinished(&self) -> Option<&BackupPoint> {
        self.unfinished.as_ref()
    }

    /// A number that no file of the store has.
    ///
    /// # Errors
    /// All numbers are taken.
    pub fn next_number(&self) -> Result<u32> {
        let dir = self.store.dir();
        let names = store::names(dir, |error| failed("cannot list", dir, error))?;
        let files = names.iter().filter_map(|name| files::number_of(name));
        let points = self.store.points().iter().map(|point| point.number);
        let last = files.chain(points).max().unwrap_or(0);
        let next = last.checked_add(1);
        next.ok_or_else(|| {
            Error::new(Kind::Invalid, format!("{}: no number is left", dir.display()))
        })
    }

    /// Begins a point: its file can be written then. `ranges`: what an increment holds. Blocks.
    ///
    /// # Errors
    /// A file cannot be written.
    pub fn begin(&mut self, point: BackupPoint, ranges: Option<&IncrementRanges>) -> Result<()> {
        self.list(point.number, ranges)?;
        let text = serde_json::to_vec_pretty(&point).map_err(manifest::unserialized)?;
        files::replace(&self.store.dir().join(files::UNFINISHED), &text)?;
        self.unfinished = Some(point);
        Ok(())
    }

    /// Lists again what an increment holds, before it is resumed: the list may have been damaged. Blocks.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn list(&self, number: u32, ranges: Option<&IncrementRanges>) -> Result<()> {
        let Some(ranges) = ranges else { return Ok(()) };
        files::replace(&self.store.ranges_file(number), ranges.to_text().as_bytes())
    }

    /// Removes the point that was begun, with its files. Blocks.
    ///
    /// # Errors
    /// A file cannot be removed.
    pub fn abandon(&mut self) -> Result<()> {
        let Some(point) = &self.unfinished else { return Ok(()) };
        self.remove_files(point.number)?;
        files::remove(&self.store.dir().join(files::UNFINISHED))?;
        self.unfinished = None;
        Ok(())
    }

    /// Lists the point that was begun, and whose file is complete. `created`: now, in seconds since
    /// 1970; `digests`: the manifest of its file, and the digest of that. Blocks.
    ///
    /// # Errors
    /// A file cannot be made durable. The point is not listed then, and can be tried again.
    pub fn publish(&mut self, created: u64, digests: Option<(&str, &str)>) -> Result<()> {
        let Some(point) = self.unfinished.clone() else { return Ok(()) };
        let number = point.number;
        let raw = self.store.raw(number);
        files::sync(&raw)?;
        blockhaul_io::sync_folder(&raw)
            .map_err(|error| failed("cannot sync the directory of", &raw, error))?;
        if let Some((text, _)) = digests {
            files::replace(&self.store.digests(number), text.as_bytes())?;
        }
        let digest = digests.map(|(_, digest)| digest.to_string());
        let mut points = self.store.points().to_vec();
        points.push(BackupPoint { created, digest, ..point });
        self.replace(points)?;
        self.unfinished = None;
        files::remove(&self.store.journal(number))?;
        files::remove(&self.store.dir().join(files::UNFINISHED))
    }

    pub(crate) fn replace(&mut self, points: Vec<BackupPoint>) -> Result<()> {
        let text = manifest::to_text(&points)?;
        files::replace(&self.store.dir().join(files::MANIFEST), text.as_bytes())?;
        self.store = self.store.replaced(points);
        Ok(())
    }

    pub(crate) fn remove_files(&self, number: u32) -> Result<()> {
        let endings = [files::RAW, files::RANGES, files::DIGESTS, files::JOURNAL];
        let dir = self.store.dir();
        endings.iter().try_for_each(|ending| files::remove(&files::numbered(dir, number, ending)))
    }
}

impl Store {
    /// The journal of the copy of a point.
    pub fn journal(&self, number: u32) -> PathBuf {
        files::numbered(self.dir(), number, files::JOURNAL)
    }

    /// The file that lists the ranges of an increment.
    pub fn ranges_file(&self, number: u32) -> PathBuf {
        files::numbered(self.dir(), number, files::RANGES)
    }

    /// The point that an earlier run has begun and not listed. Blocks.
    ///
    /// # Errors
    /// [`Kind::Invalid`] if its record is damaged; another kind if it cannot be read.
    pub fn unfinished(&self) -> Result<Option<BackupPoint>> {
        let point = recorded(self)?;
        Ok(point.filter(|point| !is_listed(self, point)))
    }
}

/// Whether the last step of a run is missing, the removal of its record.
fn is_listed(store: &Store, point: &BackupPoint) -> bool {
    store.points().iter().any(|listed| listed.number == point.number)
}

/// The point that an earlier run has begun and not listed. What a run that has listed its point has left is removed.
fn read_unfinished(store: &Store) -> Result<Option<BackupPoint>> {
    let Some(point) = recorded(store)? else { return Ok(None) };
    if is_listed(store, &point) {
        files::remove(&files::numbered(store.dir(), point.number, files::JOURNAL))?;
        files::remove(&store.dir().join(files::UNFINISHED))?;
        return Ok(None);
    }
    Ok(Some(point))
}

/// The point in the record of a run.
fn recorded(store: &Store) -> Result<Option<BackupPoint>> {
    let path = store.dir().join(files::UNFINISHED);
    let Some(text) = files::read(&path, manifest::LENGTH_MAX)? else { return Ok(None) };
    let point: BackupPoint = serde_json::from_str(&text).map_err(|error| {
        let text = format!("{}: {error}: remove it to begin again", path.display());
        Error::new(Kind::Invalid, text)
    })?;
    // The number is used in names of files that are replaced.
    if !is_listed(store, &point)
        && store.points().iter().flat_map(BackupPoint::files).any(|number| number == point.number)
    {
        let text = format!("{}: its number is that of another point", path.display());
        return Err(Error::new(Kind::Invalid, text));
    }
    Ok(Some(point))
}
