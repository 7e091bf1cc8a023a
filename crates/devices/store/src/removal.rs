//! The removal of points: what newer ones need of them is folded into a full backup, or joined with the increment
//! above.

use std::fs::File;
use std::path::PathBuf;

use blockhaul_block::{Error, Kind, Result};
use serde::{Deserialize, Serialize};

use crate::files::{self, failed};
use crate::manifest::{self, BackupPoint, FoldState, FullBackup, Increment, PointContent};
use crate::ranges::IncrementRanges;
use crate::store::Store;
use crate::writer::StoreWriter;

/// A part of an increment that is to be copied into another file.
#[derive(Debug)]
pub struct Fold {
    /// The file of the increment.
    pub from: PathBuf,
    /// The file of the full backup, or of a new increment.
    pub to: PathBuf,
    /// What is copied.
    pub ranges: IncrementRanges,
}

/// Increments that become one, in a new file.
#[derive(Debug)]
pub struct Join {
    /// The copies, each of what no newer one of these increments has.
    pub parts: Vec<Fold>,
    /// The new file.
    pub to: PathBuf,
    /// The points that the new one replaces: from this index to the one before the second.
    place: (usize, usize),
    point: BackupPoint,
}

/// A join that is not complete, or whose old files are not removed yet.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct JoinRecord {
    /// The number of the new files.
    number: u32,
    /// The numbers of the old ones.
    removed: Vec<u32>,
}

impl StoreWriter {
    /// Removes the points from the index `first` to the one before `end`, if the one at `end` does not need them;
    /// `false`: it does, or there is none. Blocks.
    ///
    /// # Errors
    /// [`Kind::InUse`] if one is being read; or the manifest cannot be replaced.
    pub fn remove(&mut self, first: usize, end: usize) -> Result<bool> {
        let points = self.store.points();
        let is_needed = points.get(end).is_none_or(|next| next.full().is_none());
        if is_needed || first > end {
            return Ok(false);
        }
        let numbers: Vec<u32> = points[first..end].iter().flat_map(BackupPoint::files).collect();
        let left = [&points[..first], &points[end..]].concat();
        self.replace_unread((first, end), left)?;
        numbers.into_iter().try_for_each(|number| self.remove_files(number))?;
        Ok(true)
    }

    /// The index of the full backup into which an increment is being folded.
    pub fn folding(&self) -> Option<usize> {
        self.store.points().iter().position(|point| point.folding().is_some())
    }

    /// Begins to fold the increment on the full backup at this index into it, whose point no longer exists then; or
    /// goes on with that. `None`: there is nothing to fold. Blocks.
    ///
    /// # Errors
    /// [`Kind::InUse`] if the point is being read; or a file is missing or damaged.
    pub fn begin_fold(&mut self, index: usize) -> Result<Option<Fold>> {
        let points = self.store.points();
        let Some(below) = points.get(index).filter(|below| below.full().is_some()) else {
            return Ok(None);
        };
        if below.folding().is_none() {
            let Some(next) = points.get(index + 1) else { return Ok(None) };
            let Some(increment) = next.increment() else { return Ok(None) };
            // All that is needed is there and in order.
            self.store.check(next)?;
            let folding =
                FoldState { ranges: increment.ranges.clone(), digest: next.digest.clone() };
            let full = FullBackup { file: below.file(), folding: Some(folding) };
            let folded =
                BackupPoint { content: PointContent::Full(full), digest: None, ..next.clone() };
            let left = [&points[..index], &[folded], &points[index + 2..]].concat();
            self.replace_unread((index, index + 1), left)?;
        }
        let Some(point) = self.store.points().get(index) else { return Ok(None) };
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
        let folded = points.iter_mut().find(|point| point.folding().is_some());
        let Some(point) = folded else { return Ok(()) };
        let number = point.number;
        let file = point.file();
        point.content = PointContent::Full(FullBackup { file, folding: None });
        point.digest = self.keep_file(file, digests)?;
        self.replace(points)?;
        self.remove_files(number)
    }

    /// Begins to join the increments from the index `first` to `last`: a new one holds what they hold, and all but
    /// the last of their points are removed at the end. Blocks.
    ///
    /// # Errors
    /// [`Kind::InUse`] if one of the points is being read; [`Kind::Invalid`] if one is no increment, or no number is
    /// left; or a file is missing, damaged, or cannot be written.
    pub fn begin_join(&mut self, first: usize, last: usize) -> Result<Join> {
        let misfit = || Error::new(Kind::Invalid, "these points are no increments on each other");
        let points = self.store.points();
        let parent = first.checked_sub(1).and_then(|below| points.get(below)).ok_or_else(misfit)?;
        let joined =
            points.get(first..=last).filter(|joined| joined.len() > 1).ok_or_else(misfit)?;
        let newest = joined.last().ok_or_else(misfit)?;
        joined.iter().try_for_each(|point| self.refuse_readers(point))?;
        self.store.check(newest)?;
        let number = self.next_number()?;
        let to = self.store.raw(number);
        let mut held = IncrementRanges::default();
        let mut parts = Vec::with_capacity(joined.len());
        for point in joined.iter().rev() {
            let increment = point.increment().ok_or_else(misfit)?;
            let ranges = self.store.ranges(point.number, point.size, &increment.ranges)?;
            let (from, to) = (self.store.raw(point.number), to.clone());
            parts.push(Fold { from, to, ranges: ranges.without(&held) });
            held = held.union(&ranges);
        }
        let bitmap = newest.increment().map(|own| own.bitmap.clone()).unwrap_or_default();
        let (parent, changed, ranges) = (parent.name.clone(), held.total(), held.digest());
        let content = PointContent::Increment(Increment { parent, bitmap, ranges, changed });
        let point = BackupPoint { number, content, digest: None, ..newest.clone() };
        let removed = joined.iter().map(|point| point.number).collect();
        self.begin_join_files(&JoinRecord { number, removed }, point.size, &held)?;
        Ok(Join { parts, to, place: (first, last + 1), point })
    }

    /// Records a join, and makes its files.
    fn begin_join_files(&self, join: &JoinRecord, size: u64, held: &IncrementRanges) -> Result<()> {
        let text = serde_json::to_vec_pretty(join).map_err(manifest::unserialized)?;
        files::replace(&self.store.dir().join(files::JOINING), &text)?;
        let raw = self.store.raw(join.number);
        let made = File::create_new(&raw).and_then(|file| file.set_len(size));
        made.map_err(|error| failed("cannot create", &raw, error))?;
        self.list(join.number, Some(held))
    }

    /// Ends a join: all is copied. `digests` as for [`StoreWriter::publish`]. Blocks.
    ///
    /// # Errors
    /// [`Kind::InUse`] if one of the old points is being read; or a file cannot be made durable. Nothing has changed
    /// then.
    pub fn end_join(&mut self, join: Join, digests: Option<(&str, &str)>) -> Result<()> {
        let Join { place: (first, end), mut point, .. } = join;
        point.digest = self.keep_file(point.number, digests)?;
        let points = self.store.points();
        let left = [&points[..first], &[point], &points[end..]].concat();
        self.replace_unread((first, end), left)?;
        self.clear_join()
    }

    /// Removes what a join has left: its new files, or the old ones if it is complete.
    pub(crate) fn clear_join(&self) -> Result<()> {
        let path = self.store.dir().join(files::JOINING);
        let Some(text) = files::read(&path, manifest::LENGTH_MAX)? else { return Ok(()) };
        let join: JoinRecord = serde_json::from_str(&text).map_err(|error| {
            let text = format!("{}: {error}: remove it", path.display());
            Error::new(Kind::Invalid, text)
        })?;
        let used: Vec<u32> = self.store.points().iter().flat_map(BackupPoint::files).collect();
        let is_complete = used.contains(&join.number);
        let left = if is_complete { join.removed } else { vec![join.number] };
        let unused = left.into_iter().filter(|number| !used.contains(number));
        unused.into_iter().try_for_each(|number| self.remove_files(number))?;
        files::remove(&path)
    }

    /// Makes a file durable, with its digests. Returns the digest of these.
    fn keep_file(&self, file: u32, digests: Option<(&str, &str)>) -> Result<Option<String>> {
        let raw = self.store.raw(file);
        files::sync(&raw)?;
        blockhaul_io::sync_folder(&raw)
            .map_err(|error| failed("cannot sync the directory of", &raw, error))?;
        if let Some((text, _)) = digests {
            files::replace(&self.store.digests(file), text.as_bytes())?;
        }
        Ok(digests.map(|(_, digest)| digest.to_string()))
    }

    /// Replaces the points, unless somebody reads one from the index `first` to the one before `end`.
    fn replace_unread(
        &mut self,
        (first, end): (usize, usize),
        new: Vec<BackupPoint>,
    ) -> Result<()> {
        let old = self.store.points().to_vec();
        let removed = &old[first..end];
        removed.iter().try_for_each(|point| self.refuse_readers(point))?;
        self.replace(new)?;
        // A reader that came before the manifest was replaced has seen the old one, and reads on. Those
        // that come later see the new one.
        if let Err(error) = removed.iter().try_for_each(|point| self.refuse_readers(point)) {
            self.replace(old)?;
            return Err(error);
        }
        Ok(())
    }

    fn refuse_readers(&self, point: &BackupPoint) -> Result<()> {
        refuse_readers(&self.store, &self.readers, point)
    }
}

impl Store {
    /// Refuses a point that a program reads now. Blocks.
    ///
    /// # Errors
    /// [`Kind::InUse`] with the name of the point.
    pub fn refuse_readers(&self, point: &BackupPoint) -> Result<()> {
        match File::open(self.dir().join(files::READERS)) {
            Ok(readers) => refuse_readers(self, &readers, point),
            // Nobody has read, or may say so.
            Err(_) => Ok(()),
        }
    }
}

fn refuse_readers(store: &Store, readers: &File, point: &BackupPoint) -> Result<()> {
    match blockhaul_os::locked_by_others(readers, point.number.into()) {
        Ok(true) => {
            let text =
                format!("point {:?} is being read: wait until no program has it open", point.name);
            Err(Error::new(Kind::InUse, text))
        }
        Ok(false) => Ok(()),
        Err(error) => {
            log::debug!("{} cannot be locked: {error}", store.dir().display());
            Ok(())
        }
    }
}
