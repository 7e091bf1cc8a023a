//! The file of a store, or the file in a snapshot, to which a disk is copied.

use std::path::{Path, PathBuf};

use blockhaul_catalog::DeviceSpec;
use blockhaul_io::plain;
use blockhaul_store::{BackupPoint, FullBackup, Increment, PointContent, StoreWriter};
use blockhaul_transfer::{CopyRequest, TransferOptions};

use super::request::{PointKind, PointPlan, PullDisk};
use super::resumption::PullStart;
use super::snapshots::SnapshotTarget;
use crate::digests::FileDigests;
use crate::error::{BackupError, BackupErrorKind, BackupStep, Result};

/// The place of a new point, in a store that is locked while this value lives.
pub struct PullTarget {
    disk: usize,
    /// The store: a directory as an absolute path.
    store: PathBuf,
    place: TargetPlace,
}

enum TargetPlace {
    Files(Box<PointFiles>),
    Snapshot(SnapshotTarget),
}

/// The files of a new point in a directory.
struct PointFiles {
    writer: StoreWriter,
    /// The number of the files.
    number: u32,
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
        let store = std::fs::canonicalize(&disk.store).map_err(|error| {
            let text = format!("{}: {}", disk.store.display(), plain(&error));
            let failed = BackupError::new(BackupErrorKind::Open, BackupStep::Record, text);
            failed.in_store(&disk.store)
        })?;
        let with_digests = disk.with_digests;
        let is_increment = ranges.is_some();
        let files = PointFiles { writer, number, is_increment, with_digests };
        Ok(PullTarget { disk: index, store, place: TargetPlace::Files(Box::new(files)) })
    }

    pub(super) fn of_snapshot(disk: usize, store: &Path, target: SnapshotTarget) -> PullTarget {
        PullTarget { disk, store: store.to_path_buf(), place: TargetPlace::Snapshot(target) }
    }

    /// The index of the disk in the request.
    pub fn disk(&self) -> usize {
        self.disk
    }

    /// The device to which the disk is copied.
    pub fn spec(&self) -> DeviceSpec {
        match &self.place {
            TargetPlace::Files(files) => {
                DeviceSpec::Path(self.absolute(&files.writer.store().raw(files.number)))
            }
            TargetPlace::Snapshot(target) => target.spec(),
        }
    }

    /// Sets the options without which the copy makes no point: journal, ranges and flush.
    pub fn set_options(&self, options: &mut TransferOptions) {
        let files = match &self.place {
            TargetPlace::Files(files) => files,
            TargetPlace::Snapshot(target) => return target.set_options(options),
        };
        options.journal = Some(self.absolute(&files.writer.journal(files.number)));
        let ranges = || self.absolute(&files.writer.ranges(files.number));
        options.ranges = files.is_increment.then(ranges);
        options.ranges_alone = files.is_increment;
        options.flush = true;
    }

    /// Makes a target that is open already the target of a copy.
    pub fn attach(&self, request: &mut CopyRequest) {
        if let TargetPlace::Snapshot(target) = &self.place {
            target.attach(request);
        }
    }

    fn absolute(&self, path: &Path) -> PathBuf {
        path.file_name().map_or_else(|| path.to_path_buf(), |name| self.store.join(name))
    }

    /// The file of which the point gets digests ([`FileDigests::of_file`]), after the copy.
    pub fn file_for_digests(&self) -> Option<PathBuf> {
        match &self.place {
            TargetPlace::Files(files) => {
                files.with_digests.then(|| files.writer.store().raw(files.number))
            }
            // The digests of its blobs are their names.
            TargetPlace::Snapshot(_) => None,
        }
    }

    /// Lists the point, whose disk is copied; a point in a repository is listed by [`finish_pull`]. `created`: seconds
    /// since 1970.
    ///
    /// # Errors
    /// If a file of the store cannot be written.
    pub fn publish(&mut self, created: u64, digests: Option<&FileDigests>) -> Result<()> {
        let files = match &mut self.place {
            TargetPlace::Files(files) => files,
            TargetPlace::Snapshot(target) => {
                target.complete();
                return Ok(());
            }
        };
        let published = files.writer.publish(created, digests.map(FileDigests::pair));
        published.map_err(|error| BackupError::of_store(BackupStep::Publish, &self.store, error))
    }

    /// Removes what is recorded of a copy that has not begun. A copy that has begun can be resumed.
    ///
    /// # Errors
    /// If a file of the store cannot be removed.
    pub fn forget_unstarted(&mut self) -> Result<()> {
        let TargetPlace::Files(files) = &mut self.place else { return Ok(()) };
        let has_journal = files.writer.journal(files.number).exists();
        if files.writer.unfinished().is_none() || has_journal {
            return Ok(());
        }
        let removed = files.writer.abandon();
        removed.map_err(|error| BackupError::of_store(BackupStep::Abandon, &self.store, error))
    }

    fn snapshot(&self) -> Option<&SnapshotTarget> {
        match &self.place {
            TargetPlace::Files(_) => None,
            TargetPlace::Snapshot(target) => Some(target),
        }
    }
}

/// Makes the snapshots of the disks that were published in repositories, and unlocks these. Returns the targets, by their
/// indexes here, whose snapshot cannot be made. Blocks.
pub fn finish_pull(targets: &[PullTarget]) -> Vec<(usize, BackupError)> {
    let mut failed = Vec::new();
    for (index, target) in targets.iter().enumerate() {
        let Some(snapshot) = target.snapshot() else { continue };
        let is_same =
            |other: &PullTarget| other.snapshot().is_some_and(|other| other.is_beside(snapshot));
        if targets[..index].iter().any(is_same) {
            continue;
        }
        let Err(error) = snapshot.finish() else { continue };
        let error = BackupError::of_store(BackupStep::Publish, &target.store, error);
        let all = targets.iter().enumerate().filter(|(_, other)| is_same(other));
        failed.extend(all.map(|(index, _)| (index, error.clone())));
    }
    failed
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
