//! The request of a pull, and the decision for each disk: plain data.

use std::path::PathBuf;

use blockhaul_catalog::{DeviceSpec, Registry};
use blockhaul_store::IncrementRanges;
use blockhaul_transfer::full;

use crate::error::{BackupError, BackupErrorKind, BackupStep, Result};

/// Whether to copy all of a disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PullMode {
    /// Where an increment is not possible.
    Auto,
    /// Always.
    Full,
    /// Never.
    Increment,
}

/// A bitmap of a source with what has changed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChangeBitmap {
    /// The metadata context.
    pub context: String,
    /// The checkpoint at which the bitmap began.
    pub checkpoint: String,
}

/// A disk that is pulled into a store.
pub struct PullDisk {
    /// Its name, for messages.
    pub name: String,
    /// The directory of the store, which is created if it is absent; or `restic:REPO#DIRECTORY`.
    pub store: PathBuf,
    /// The disk.
    pub source: DeviceSpec,
    /// The kinds of devices and layers for the source. Its connections ask for the context of the bitmap.
    pub registry: Registry,
    /// Layers over the source, by their names.
    pub layers: Vec<String>,
    /// Number of times that a request is repeated after a lost connection.
    pub retries: u32,
    /// The bitmap for an increment.
    pub bitmap: Option<ChangeBitmap>,
    /// The name of the point; `None`: [`PullRequest::default_point`]. Only a pull that names its point resumes
    /// an earlier one.
    pub point: Option<String>,
    /// The name of the bitmap that begins at this point; `None`: the name of the point.
    pub checkpoint: Option<String>,
    /// Whether to copy all of the disk.
    pub mode: PullMode,
    /// The point gets digests.
    pub with_digests: bool,
    /// Files that are kept beside the disk: only where the store is a repository.
    pub files: Vec<PathBuf>,
}

/// The disks of one machine, which are pulled together.
pub struct PullRequest {
    /// The disks.
    pub disks: Vec<PullDisk>,
    /// The name of points whose disk names none. A number is appended where a store has such a point.
    pub default_point: String,
    /// What an earlier pull has left is discarded, not resumed.
    pub restart: bool,
}

impl PullRequest {
    /// Refuses two disks with one store, and names that a store cannot have.
    pub(super) fn check_stores(&self) -> Result<()> {
        for (index, disk) in self.disks.iter().enumerate() {
            // The disks of a repository are files of one snapshot.
            let is_repository = super::is_repository(&disk.store);
            if is_repository {
                let checked = super::snapshots::check_names(disk, &self.disks, &self.default_point);
                checked.map_err(|error| {
                    let error = BackupError::of_file(BackupStep::Plan, &error);
                    error.with_kind(BackupErrorKind::Request).in_store(&disk.store).of_disk(index)
                })?;
            } else if let Some(file) = disk.files.first() {
                let text = format!(
                    "a store in a directory has no files beside the disk, such as {}: leave out files, or choose a store of \
                     restic",
                    file.display()
                );
                let error = BackupError::new(BackupErrorKind::Request, BackupStep::Plan, text);
                return Err(error.in_store(&disk.store).of_disk(index));
            }
            let same = |other: &&PullDisk| {
                full(&other.store) == full(&disk.store)
                    && (!is_repository || other.name == disk.name)
            };
            if let Some(other) = self.disks[..index].iter().find(same) {
                let text =
                    format!("disk {} has the same store: choose another directory", other.name);
                let error = BackupError::new(BackupErrorKind::Request, BackupStep::Plan, text);
                return Err(error.in_store(&disk.store).of_disk(index));
            }
        }
        Ok(())
    }
}

/// The kind of a point that a pull makes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PointKind {
    /// The point exists: an earlier run of the same pull has completed it.
    Existing,
    /// All of the disk.
    Full {
        /// Why it is not an increment.
        reason: String,
    },
    /// What has changed since a point.
    Increment {
        /// The name of that point.
        parent: String,
        /// The metadata context with the changes.
        bitmap: String,
    },
}

/// The point that a pull makes of a disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PointPlan {
    /// The name of the point.
    pub name: String,
    /// The name of the bitmap that begins at it.
    pub checkpoint: String,
    /// Bytes of the disk.
    pub size: u64,
    /// The kind of the point.
    pub kind: PointKind,
    /// Bytes of data of the disk; `None`: they were not counted.
    pub data: Option<u64>,
    /// The ranges of an increment.
    pub(super) ranges: Option<IncrementRanges>,
}

impl PointPlan {
    /// Bytes that have changed; `None`: the point is no increment.
    pub fn changed(&self) -> Option<u64> {
        self.ranges.as_ref().map(IncrementRanges::total)
    }
}
