//! A store as readers see it.

use std::fs::File;
use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use blockhaul_block::{Error, FileId, Kind, Result};

use crate::files::{self, failed};
use crate::manifest::{self, BackupPoint};
use crate::ranges::IncrementRanges;

/// Maximum number of points from a full backup to the last increment on it: each needs a descriptor.
pub const CHAIN_MAX: usize = 512;

/// The points of a store, as its manifest listed them at one moment.
#[derive(Debug, Clone)]
pub struct Store {
    dir: PathBuf,
    points: Vec<BackupPoint>,
}

/// A file that has a part of a point.
#[derive(Debug)]
pub(crate) struct OverlayLevel {
    pub(crate) number: u32,
    /// What it has; `None`: all of the disk.
    pub(crate) ranges: Option<IncrementRanges>,
}

/// The remedy for the directory of a machine's backup, whose disks have a store each: names them. `None`: there is no
/// store below `dir`.
fn stores_below(dir: &Path) -> Option<String> {
    const SHOWN_MAX: usize = 8;
    let listed = std::fs::read_dir(dir).ok()?;
    let paths = listed.flatten().map(|entry| entry.path());
    let mut stores: Vec<_> = paths.filter(|path| path.join(files::MANIFEST).is_file()).collect();
    stores.sort();
    let more = if stores.len() > SHOWN_MAX { ", …" } else { "" };
    let shown: Vec<_> =
        stores.iter().take(SHOWN_MAX).map(|store| store.display().to_string()).collect();
    let remedy = format!("each disk has a store of its own: name {}{more}", shown.join(" or "));
    (!stores.is_empty()).then_some(remedy)
}

/// The directory of the store to which a file belongs, or would belong if it were made. Blocks.
pub fn store_of_file(file: &Path) -> Option<PathBuf> {
    let path = std::fs::canonicalize(file).unwrap_or_else(|_| file.to_path_buf());
    let is_own = path.file_name()?.to_str().is_some_and(files::is_own);
    let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let has_manifest = || Store::open(dir).is_ok_and(|store| !store.points.is_empty());
    (is_own && (Store::is_begun(dir) || has_manifest())).then(|| dir.to_path_buf())
}

impl Store {
    /// Reads the manifest of the store in `dir`. Blocks.
    ///
    /// # Errors
    /// [`Kind::NotFound`] if there is none; [`Kind::Usage`] if `dir` is a file; [`Kind::Invalid`] if it is
    /// damaged.
    pub fn open(dir: &Path) -> Result<Store> {
        if std::fs::metadata(dir).is_ok_and(|data| !data.is_dir()) {
            return Err(Error::new(Kind::Usage, format!("{}: not a directory", dir.display())));
        }
        let path = dir.join(files::MANIFEST);
        let Some(text) = files::read(&path, manifest::LENGTH_MAX)? else {
            if !dir.exists() {
                let text = format!("{} does not exist: check the name", dir.display());
                return Err(Error::new(Kind::NotFound, text).complete());
            }
            let text = format!("{} has no {}: it holds no backup", dir.display(), files::MANIFEST);
            let error = Error::new(Kind::NotFound, text);
            return Err(match stores_below(dir) {
                Some(remedy) => error.with_remedy(remedy),
                None => error,
            });
        };
        let points = manifest::from_text(&path, &text)?;
        Ok(Store { dir: dir.to_path_buf(), points })
    }

    /// Whether a pull has begun a point in `dir`, and has not ended it. Blocks.
    pub fn is_begun(dir: &Path) -> bool {
        dir.join(files::UNFINISHED).exists()
    }

    /// The same for a directory that may be missing, or empty: a store without points.
    ///
    /// # Errors
    /// [`Kind::Usage`] if `dir` has files of others; [`Kind::NotFound`] if it cannot be created, because its
    /// own directory is missing; and those of [`Store::open`].
    pub fn open_or_new(dir: &Path) -> Result<Store> {
        match Store::open(dir) {
            Err(error) if error.kind() == Kind::NotFound => {}
            found => return found,
        }
        let above = dir.parent().filter(|above| !above.as_os_str().is_empty());
        if !dir.exists() && above.is_some_and(|above| !above.is_dir()) {
            // Only the last one is created: where a file system is not mounted, nothing fills the one below.
            let text = format!("cannot create {}: create its directory first", dir.display());
            return Err(Error::new(Kind::NotFound, text).complete());
        }
        for name in names(dir, |error| failed("cannot list", dir, error))? {
            if !files::is_own(&name) {
                let text = format!(
                    "{}: it has no {} but other files, such as {name:?}: choose an empty directory",
                    dir.display(),
                    files::MANIFEST
                );
                return Err(Error::new(Kind::Usage, text));
            }
        }
        Ok(Store { dir: dir.to_path_buf(), points: Vec::new() })
    }

    /// A store whose points are not in a directory of this crate. `name`: for messages.
    pub fn of_points(name: &Path, points: Vec<BackupPoint>) -> Store {
        Store { dir: name.to_path_buf(), points }
    }

    /// The directory.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The identities of all files of the store.
    pub(crate) fn file_ids(&self) -> Vec<FileId> {
        let listed = std::fs::read_dir(&self.dir).into_iter().flatten().flatten();
        let known = listed.filter_map(|entry| entry.metadata().ok());
        known.map(|data| (data.dev(), data.ino())).collect()
    }

    /// The points, the oldest first.
    pub fn points(&self) -> &[BackupPoint] {
        &self.points
    }

    pub(crate) fn replaced(&self, points: Vec<BackupPoint>) -> Store {
        Store { dir: self.dir.clone(), points }
    }

    /// The newest point.
    pub fn newest(&self) -> Option<&BackupPoint> {
        self.points.last()
    }

    /// The point of this name, or the newest one.
    ///
    /// # Errors
    /// [`Kind::NotFound`] if there is none, with the names that there are.
    pub fn point(&self, name: Option<&str>) -> Result<&BackupPoint> {
        let found = match name {
            None => self.newest(),
            Some(name) => self.points.iter().find(|point| point.name == name),
        };
        found.ok_or_else(|| {
            let dir = self.dir.display();
            let text = match (name, self.newest()) {
                (Some(name), Some(newest)) => format!(
                    "{dir} has no point {name:?}: the newest is {:?}; list all with blockhaul chain list",
                    newest.name
                ),
                _ => format!("{dir} has no points"),
            };
            Error::new(Kind::NotFound, text)
        })
    }

    /// The points that `point` consists of, from its full backup on.
    ///
    /// # Errors
    /// [`Kind::Unsupported`] if there are more than [`CHAIN_MAX`].
    pub fn chain(&self, point: &BackupPoint) -> Result<&[BackupPoint]> {
        let last = self.points.iter().position(|one| one.number == point.number);
        let upto = &self.points[..last.map_or(0, |last| last + 1)];
        let first = upto.iter().rposition(|one| one.full().is_some()).unwrap_or(0);
        let chain = &upto[first..];
        if chain.len() > CHAIN_MAX {
            let text = format!(
                "point {:?} consists of more than {CHAIN_MAX} increments: use blockhaul chain merge",
                point.name
            );
            return Err(Error::new(Kind::Unsupported, text));
        }
        Ok(chain)
    }

    /// The file with the data of a point.
    pub fn raw(&self, number: u32) -> PathBuf {
        files::numbered(&self.dir, number, files::RAW)
    }

    /// The file with the digests of that file.
    pub fn digests(&self, number: u32) -> PathBuf {
        files::numbered(&self.dir, number, files::DIGESTS)
    }

    /// Bytes that the increments from the index `first` to `last` hold together. Blocks.
    ///
    /// # Errors
    /// If a list of ranges is missing or damaged.
    pub fn held_bytes(&self, first: usize, last: usize) -> Result<u64> {
        let mut held = IncrementRanges::default();
        for point in self.points.get(first..=last).unwrap_or_default() {
            let Some(increment) = point.increment() else { continue };
            held = held.union(&self.ranges(point.number, point.size, &increment.ranges)?);
        }
        Ok(held.total())
    }

    /// Reads the ranges of an increment of a disk of `size` bytes.
    pub(crate) fn ranges(&self, number: u32, size: u64, digest: &str) -> Result<IncrementRanges> {
        IncrementRanges::read(&self.ranges_file(number), size, digest)
    }

    /// The files of a point, the full backup first. Checks that all are there and have the right size.
    /// Blocks.
    pub(crate) fn levels(&self, point: &BackupPoint) -> Result<Vec<OverlayLevel>> {
        let mut levels = Vec::new();
        for one in self.chain(point)? {
            let mut add = |number, ranges: Option<&str>| -> Result<()> {
                self.check_size(number, one.size)?;
                let read = |digest| self.ranges(number, one.size, digest);
                levels.push(OverlayLevel { number, ranges: ranges.map(read).transpose()? });
                Ok(())
            };
            add(one.file(), one.increment().map(|increment| increment.ranges.as_str()))?;
            if let Some(folding) = one.folding() {
                add(one.number, Some(&folding.ranges))?;
            }
        }
        Ok(levels)
    }

    fn check_size(&self, number: u32, size: u64) -> Result<()> {
        let path = self.raw(number);
        let data = std::fs::metadata(&path).map_err(|error| failed("cannot open", &path, error))?;
        if data.is_file() && data.len() == size {
            return Ok(());
        }
        let text = format!(
            "{} has {} bytes, not the {size} of the disk: it is damaged",
            path.display(),
            data.len()
        );
        Err(Error::new(Kind::Invalid, text))
    }

    /// Checks that the files of a point are there, have the right size, and list the right ranges.
    /// Does not read their data. Blocks.
    ///
    /// # Errors
    /// What is wrong with the first one.
    pub fn check(&self, point: &BackupPoint) -> Result<()> {
        self.levels(point).map(drop)
    }

    /// Names of files of points that belong to no point.
    ///
    /// # Errors
    /// The directory cannot be read.
    pub fn orphans(&self) -> Result<Vec<String>> {
        let used: Vec<u32> = self.points.iter().flat_map(BackupPoint::files).collect();
        let mut names = names(&self.dir, |error| failed("cannot list", &self.dir, error))?;
        names.retain(|name| files::number_of(name).is_some_and(|number| !used.contains(&number)));
        names.sort();
        Ok(names)
    }

    /// Prevents that the point is removed until the result is dropped. `None` if nothing in the store
    /// was ever locked, or its file system has no locks.
    pub(crate) fn hold(&self, point: &BackupPoint) -> Result<Option<File>> {
        let path = self.dir.join(files::READERS);
        let file = match File::open(&path) {
            Ok(file) => file,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(failed("cannot open", &path, error)),
        };
        if let Err(error) = blockhaul_os::lock_shared(&file, point.number.into()) {
            log::debug!("{} cannot be locked: {error}", path.display());
            return Ok(None);
        }
        // It may have been removed before it was locked.
        if Store::open(&self.dir)?.points.contains(point) {
            return Ok(Some(file));
        }
        let text = format!("point {:?} has just been changed: try again", point.name);
        Err(Error::new(Kind::InUse, text))
    }
}

/// The names in a directory; none if it does not exist.
pub(crate) fn names(dir: &Path, failed: impl Fn(std::io::Error) -> Error) -> Result<Vec<String>> {
    let entries = match std::fs::read_dir(dir) {
        Ok(entries) => entries,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(failed(error)),
    };
    let mut names = Vec::new();
    for entry in entries {
        let entry = entry.map_err(&failed)?;
        names.push(entry.file_name().to_string_lossy().into_owned());
    }
    Ok(names)
}
