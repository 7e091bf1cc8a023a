//! The file of a store to which a disk is copied.

use std::path::{Path, PathBuf};

use blockhaul_catalog::DeviceSpec;
use blockhaul_io::plain;
use blockhaul_store::{BackupPoint, FullBackup, Increment, PointContent, StoreWriter};
use blockhaul_transfer::TransferOptions;

use super::request::{PointKind, PointPlan, PullDisk};
use super::resumption::PullStart;
use crate::digests::FileDigests;
use crate::error::{BackupError, BackupErrorKind, BackupStep, Result};

/// The files of a new point, in a store that is locked while this value lives.
pub struct PullTarget {
    disk: usize,
    writer: StoreWriter,
    /// The number of the files.
    number: u32,
    /// The store, as an absolute path.
    dir: PathBuf,
    is_increment: bool,
    with_digests: bool,
}

impl PullTarget {
    /// Records in the store what is about to be copied.
    pub(super) fn begin(
        (index, disk): (usize, &PullDisk),
        mut writer: StoreWriter,
        plan: &PointPlan,
        start: &PullStart,
    ) -> Result<PullTarget> {
        let failed = |error| BackupError::of_store(BackupStep::Record, &disk.store, error);
        let ranges = plan.ranges.as_ref();
        let number = match *start {
            PullStart::Resumed(number) => {
                writer.list(number, ranges).map_err(failed)?;
                number
            }
            PullStart::New => {
                writer.abandon().map_err(failed)?;
                let number = writer.next_number().map_err(failed)?;
                writer.begin(point(number, plan), ranges).map_err(failed)?;
                number
            }
        };
        let dir = std::fs::canonicalize(&disk.store).map_err(|error| {
            let text = format!("{}: {}", disk.store.display(), plain(&error));
            let failed = BackupError::new(BackupErrorKind::Open, BackupStep::Record, text);
            failed.in_store(&disk.store)
        })?;
        let with_digests = disk.with_digests;
        let is_increment = ranges.is_some();
        Ok(PullTarget { disk: index, writer, number, dir, is_increment, with_digests })
    }

    /// The index of the disk in the request.
    pub fn disk(&self) -> usize {
        self.disk
    }

    /// The file to which the disk is copied.
    pub fn spec(&self) -> DeviceSpec {
        DeviceSpec::Path(self.absolute(&self.writer.store().raw(self.number)))
    }

    /// Sets the options without which the copy makes no point: journal, ranges and flush.
    pub fn set_options(&self, options: &mut TransferOptions) {
        options.journal = Some(self.absolute(&self.writer.journal(self.number)));
        let ranges = || self.absolute(&self.writer.ranges(self.number));
        options.ranges = self.is_increment.then(ranges);
        options.ranges_alone = self.is_increment;
        options.flush = true;
    }

    fn absolute(&self, path: &Path) -> PathBuf {
        path.file_name().map_or_else(|| path.to_path_buf(), |name| self.dir.join(name))
    }

    /// The file of which the point gets digests ([`FileDigests::of_file`]), after the copy.
    pub fn file_for_digests(&self) -> Option<PathBuf> {
        self.with_digests.then(|| self.writer.store().raw(self.number))
    }

    /// Lists the point, whose disk is copied. `created`: seconds since 1970.
    ///
    /// # Errors
    /// If a file of the store cannot be written.
    pub fn publish(&mut self, created: u64, digests: Option<&FileDigests>) -> Result<()> {
        let published = self.writer.publish(created, digests.map(FileDigests::pair));
        published.map_err(|error| BackupError::of_store(BackupStep::Publish, &self.dir, error))
    }

    /// Removes what is recorded of a copy that has not begun. A copy that has begun can be resumed.
    ///
    /// # Errors
    /// If a file of the store cannot be removed.
    pub fn forget_unstarted(&mut self) -> Result<()> {
        let has_journal = self.writer.journal(self.number).exists();
        if self.writer.unfinished().is_none() || has_journal {
            return Ok(());
        }
        let removed = self.writer.abandon();
        removed.map_err(|error| BackupError::of_store(BackupStep::Abandon, &self.dir, error))
    }
}

/// The point that is made of a disk.
fn point(number: u32, plan: &PointPlan) -> BackupPoint {
    let content = match (&plan.kind, &plan.ranges) {
        (PointKind::Increment { parent, bitmap }, Some(ranges)) => {
            PointContent::Increment(Increment {
                parent: parent.clone(),
                bitmap: bitmap.clone(),
                ranges: ranges.digest(),
                changed: ranges.total(),
            })
        }
        _ => PointContent::Full(FullBackup { file: number, folding: None }),
    };
    BackupPoint {
        number,
        name: plan.name.clone(),
        checkpoint: plan.checkpoint.clone(),
        size: plan.size,
        created: 0,
        content,
        digest: None,
    }
}
