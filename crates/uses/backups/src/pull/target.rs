//! The file of a store, or the file in a snapshot, to which a disk is copied.

use std::path::{Path, PathBuf};

use blockhaul_catalog::DeviceSpec;
use blockhaul_io::plain;
use blockhaul_store::{BackupPoint, FullBackup, Increment, PointContent, StoreWriter};
use blockhaul_transfer::{CopyRequest, TransferOptions};

use super::request::{PointKind, PointPlan, PullDisk};
use super::result::PointFiles;
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
    Files(Box<NewPoint>),
    Snapshot(SnapshotTarget),
}

/// A new point in a directory.
struct NewPoint {
    writer: StoreWriter,
    /// The number of the files.
    number: u32,
    files: PointFiles,
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
        let files = PointFiles::new(writer.store(), number, ranges.is_some());
        let point = NewPoint { writer, number, files, with_digests };
        Ok(PullTarget { disk: index, store, place: TargetPlace::Files(Box::new(point)) })
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
            TargetPlace::Files(point) => DeviceSpec::Path(point.files.data.clone()),
            TargetPlace::Snapshot(target) => target.spec(),
        }
    }

    /// Sets the options without which the copy makes no point: journal, ranges and flush.
    pub fn set_options(&self, options: &mut TransferOptions) {
        match &self.place {
            TargetPlace::Files(point) => point.files.set_options(options),
            TargetPlace::Snapshot(target) => target.set_options(options),
        }
    }

    /// Makes a target that is open already the target of a copy.
    pub fn attach(&self, request: &mut CopyRequest) {
        if let TargetPlace::Snapshot(target) = &self.place {
            target.attach(request);
        }
    }

    /// The file of which the point gets digests ([`FileDigests::of_file`]), after the copy.
    pub fn file_for_digests(&self) -> Option<PathBuf> {
        match &self.place {
            TargetPlace::Files(point) => {
                point.with_digests.then(|| point.writer.store().raw(point.number))
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
        let point = match &mut self.place {
            TargetPlace::Files(point) => point,
            TargetPlace::Snapshot(target) => {
                target.complete();
                return Ok(());
            }
        };
        let published = point.writer.publish(created, digests.map(FileDigests::pair));
        published.map_err(|error| BackupError::of_store(BackupStep::Publish, &self.store, error))
    }

    /// Removes what is recorded of a copy that has not begun. A copy that has begun can be resumed.
    ///
    /// # Errors
    /// If a file of the store cannot be removed.
    pub fn forget_unstarted(&mut self) -> Result<()> {
        let TargetPlace::Files(point) = &mut self.place else { return Ok(()) };
        if point.writer.unfinished().is_none() || point.files.journal.exists() {
            return Ok(());
        }
        let removed = point.writer.abandon();
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
