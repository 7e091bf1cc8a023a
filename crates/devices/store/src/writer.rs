//! Changes of a store: a new point, and the removal of the oldest one.

use std::fs::{File, OpenOptions};
use std::path::{Path, PathBuf};

use blockhaul_block::{Error, Kind, Result};
use rustix::fs::FlockOperation;

use crate::files::{self, failed};
use crate::manifest::{self, BackupPoint, FoldState, FullBackup, PointContent};
use crate::ranges::IncrementRanges;
use crate::store::{self, Store};

/// A store that no other program changes until this is dropped.
#[derive(Debug)]
pub struct StoreWriter {
    store: Store,
    unfinished: Option<BackupPoint>,
    readers: File,
    _lock: File,
}

/// An increment that is to be copied into the full backup below it.
#[derive(Debug)]
pub struct Fold {
    /// The file of the increment.
    pub from: PathBuf,
    /// The file of the full backup.
    pub to: PathBuf,
    /// What is copied.
    pub ranges: IncrementRanges,
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
        Ok(StoreWriter { store, unfinished, readers, _lock: lock })
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

    /// Where the journal of the copy of a new point is.
    pub fn journal(&self, number: u32) -> PathBuf {
        files::numbered(self.store.dir(), number, files::JOURNAL)
    }

    /// Where the ranges of an increment are listed.
    pub fn ranges(&self, number: u32) -> PathBuf {
        files::numbered(self.store.dir(), number, files::RANGES)
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
        files::replace(&self.ranges(number), ranges.to_text().as_bytes())
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
        files::remove(&self.journal(number))?;
        files::remove(&self.store.dir().join(files::UNFINISHED))
    }

    /// Removes the oldest point, if the next one does not need it; `false`: it does, or there is no next
    /// one. Blocks.
    ///
    /// # Errors
    /// [`Kind::InUse`] if it is being read; or the manifest cannot be replaced.
    pub fn drop_oldest(&mut self) -> Result<bool> {
        let [oldest, next, ..] = self.store.points() else { return Ok(false) };
        if next.full().is_none() {
            return Ok(false);
        }
        let numbers: Vec<u32> = oldest.files().collect();
        let left = self.store.points()[1..].to_vec();
        self.replace_without_oldest(left)?;
        numbers.into_iter().try_for_each(|number| self.remove_files(number))?;
        Ok(true)
    }

    /// Begins to fold the second point, an increment, into the oldest one, which no longer exists then;
    /// or goes on with that. `None`: there is nothing to fold. Blocks.
    ///
    /// # Errors
    /// [`Kind::InUse`] if the oldest point is being read; or a file is missing or damaged.
    pub fn begin_fold(&mut self) -> Result<Option<Fold>> {
        let points = self.store.points();
        if points.first().is_none_or(|oldest| oldest.folding().is_none()) {
            let [oldest, next, rest @ ..] = points else { return Ok(None) };
            let Some(increment) = next.increment() else { return Ok(None) };
            // All that is needed is there and in order.
            self.store.check(next)?;
            let folding =
                FoldState { ranges: increment.ranges.clone(), digest: next.digest.clone() };
            let full = FullBackup { file: oldest.file(), folding: Some(folding) };
            let folded =
                BackupPoint { content: PointContent::Full(full), digest: None, ..next.clone() };
            let left = [&[folded], rest].concat();
            self.replace_without_oldest(left)?;
        }
        let Some(point) = self.store.points().first() else { return Ok(None) };
        let Some(folding) = point.folding() else { return Ok(None) };
        let ranges = self.store.ranges(point.number, point.size, &folding.ranges)?;
        let from = self.store.raw(point.number);
        let to = self.store.raw(point.file());
        Ok(Some(Fold { from, to, ranges }))
    }

    /// Ends a fold: all is copied. `digests` as for [`StoreWriter::publish`]. Blocks.
    ///
    /// # Errors
    /// A file cannot be made durable. The fold can be repeated then.
    pub fn end_fold(&mut self, digests: Option<(&str, &str)>) -> Result<()> {
        let mut points = self.store.points().to_vec();
        let Some(point) = points.first_mut() else { return Ok(()) };
        let number = point.number;
        let file = point.file();
        files::sync(&self.store.raw(file))?;
        if let Some((text, _)) = digests {
            files::replace(&self.store.digests(file), text.as_bytes())?;
        }
        point.content = PointContent::Full(FullBackup { file, folding: None });
        point.digest = digests.map(|(_, digest)| digest.to_string());
        self.replace(points)?;
        self.remove_files(number)
    }

    /// Replaces the points by all but the oldest, unless somebody reads that one.
    fn replace_without_oldest(&mut self, points: Vec<BackupPoint>) -> Result<()> {
        let old = self.store.points().to_vec();
        let Some(oldest) = old.first() else { return Ok(()) };
        self.refuse_readers(oldest)?;
        self.replace(points)?;
        // A reader that came before the manifest was replaced has seen the old one, and reads on. Those
        // that come later see the new one.
        if let Err(error) = self.refuse_readers(oldest) {
            self.replace(old)?;
            return Err(error);
        }
        Ok(())
    }

    fn refuse_readers(&self, point: &BackupPoint) -> Result<()> {
        match blockhaul_os::locked_by_others(&self.readers, point.number.into()) {
            Ok(true) => {
                let text = format!(
                    "point {:?} is being read: wait until no program has it open",
                    point.name
                );
                Err(Error::new(Kind::InUse, text))
            }
            Ok(false) => Ok(()),
            Err(error) => {
                log::debug!("{} cannot be locked: {error}", self.store.dir().display());
                Ok(())
            }
        }
    }

    fn replace(&mut self, points: Vec<BackupPoint>) -> Result<()> {
        let text = manifest::to_text(&points)?;
        files::replace(&self.store.dir().join(files::MANIFEST), text.as_bytes())?;
        self.store = self.store.replaced(points);
        Ok(())
    }

    fn remove_files(&self, number: u32) -> Result<()> {
        let endings = [files::RAW, files::RANGES, files::DIGESTS, files::JOURNAL];
        let dir = self.store.dir();
        endings.iter().try_for_each(|ending| files::remove(&files::numbered(dir, number, ending)))
    }
}

/// The point that an earlier run has begun and not listed.
fn read_unfinished(store: &Store) -> Result<Option<BackupPoint>> {
    let path = store.dir().join(files::UNFINISHED);
    let Some(text) = files::read(&path, manifest::LENGTH_MAX)? else { return Ok(None) };
    let point: BackupPoint = serde_json::from_str(&text).map_err(|error| {
        let text = format!("{}: {error}: remove it to begin again", path.display());
        Error::new(Kind::Invalid, text)
    })?;
    // Its last step, the removal of the file, is missing.
    if store.points().iter().any(|listed| listed.number == point.number) {
        files::remove(&files::numbered(store.dir(), point.number, files::JOURNAL))?;
        files::remove(&path)?;
        return Ok(None);
    }
    // The number is used in names of files that are replaced.
    if store.points().iter().flat_map(BackupPoint::files).any(|number| number == point.number) {
        let text = format!("{}: its number is that of another point", path.display());
        return Err(Error::new(Kind::Invalid, text));
    }
    Ok(Some(point))
}
