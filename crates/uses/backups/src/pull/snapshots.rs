//! Stores in repositories of restic: the disks of one directory of a repository are pulled into one snapshot.

use std::collections::BTreeMap;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use blockhaul_block::{Error, Result};
use blockhaul_catalog::{DeviceSpec, Stack};
use blockhaul_restic::{ResticBackup, ResticDisk, ResticFile, ResticPoint, ResticStore};
use blockhaul_store::{BackupPoint, FullBackup, PointContent, Store};
use blockhaul_transfer::{CopyRequest, Endpoint, TransferOptions};
use tempfile::NamedTempFile;

use super::request::{PointKind, PointPlan, PullDisk};

/// Whether a store is a repository.
pub(crate) fn is_repository(store: &Path) -> bool {
    store.to_str().is_some_and(ResticStore::is_named_by)
}

/// Refuses names that a snapshot of these disks cannot have. Nothing is read.
///
/// # Errors
/// The name of a disk or a point.
pub(super) fn check_names(disk: &PullDisk, disks: &[PullDisk], default_point: &str) -> Result<()> {
    let beside = disks.iter().filter(|other| other.store == disk.store);
    blockhaul_restic::check_disk_names(beside.clone().map(|other| &other.name[..]))?;
    // A file that several disks name is one file of the snapshot.
    let all = beside.clone().flat_map(|other| &other.files);
    let mut files: Vec<_> = all.map(|file| blockhaul_transfer::full(file)).collect();
    files.sort();
    files.dedup();
    blockhaul_restic::check_file_names(&files, beside.map(|other| &other.name[..]))?;
    let points = [disk.point.as_deref(), disk.checkpoint.as_deref(), Some(default_point)];
    points.into_iter().flatten().try_for_each(blockhaul_restic::check_point_name)
}

/// The open repositories of a pull.
#[derive(Default)]
pub(super) struct SnapshotStores(Vec<OpenStore>);

/// An open repository.
struct OpenStore {
    name: PathBuf,
    store: ResticStore,
    /// The files beside the disks, by their paths.
    files: BTreeMap<PathBuf, ResticFile>,
}

/// The target of a disk that becomes part of a snapshot.
pub(super) struct SnapshotTarget {
    backup: Arc<ResticBackup>,
    /// The number of the disk in the backup.
    number: usize,
    /// The list of the ranges of an increment.
    ranges: Option<NamedTempFile>,
}

impl SnapshotStores {
    /// The points of a disk; the files beside it are read. Blocks.
    ///
    /// # Errors
    /// The repository cannot be opened, or a file cannot be read.
    pub(super) fn points(&mut self, disk: &PullDisk) -> Result<Store> {
        let at = self.0.iter().position(|open| open.name == disk.store);
        let at = match at {
            Some(at) => at,
            None => {
                let text = disk.store.to_str().ok_or_else(Error::misfit)?;
                let (name, store) = (disk.store.clone(), ResticStore::open(text)?);
                self.0.push(OpenStore { name, store, files: BTreeMap::new() });
                self.0.len() - 1
            }
        };
        let OpenStore { store, files, .. } = &mut self.0[at];
        for file in &disk.files {
            if !files.contains_key(file) {
                files.insert(file.clone(), ResticFile::read(file)?);
            }
        }
        let newest = store.newest_size(&disk.name)?.unwrap_or(0);
        let points = (1..).zip(store.points(&disk.name)).map(|(number, point)| {
            let ResticPoint { name, checkpoint, created } = point;
            let content = PointContent::Full(FullBackup { file: number, folding: None });
            // Only the size of the newest one matters.
            BackupPoint { number, name, checkpoint, size: newest, created, content, digest: None }
        });
        Ok(Store::of_points(&disk.store, points.collect()))
    }

    /// Locks the repositories, and begins the backup of these disks: their targets, in the same order. Blocks.
    ///
    /// # Errors
    /// A repository cannot be locked, with the index of a disk.
    pub(super) fn begin(
        self,
        planned: &[(usize, &PullDisk, &PointPlan)],
    ) -> Result<Vec<(usize, SnapshotTarget)>, (usize, Error)> {
        let mut targets = Vec::with_capacity(planned.len());
        for OpenStore { name, store, files } in self.0 {
            let mine: Vec<_> = planned.iter().filter(|(_, disk, _)| disk.store == name).collect();
            let Some((first, ..)) = mine.first() else { continue };
            let disks = mine.iter().map(|(_, disk, plan)| restic_disk(disk, plan)).collect();
            let files = files.into_values().collect();
            let backup = Arc::new(store.begin(disks, files).map_err(|error| (*first, error))?);
            for (number, (index, _, plan)) in mine.into_iter().enumerate() {
                let ranges = ranges(plan).map_err(|error| (*index, error))?;
                targets.push((*index, SnapshotTarget { backup: backup.clone(), number, ranges }));
            }
        }
        targets.sort_unstable_by_key(|(index, _)| *index);
        Ok(targets)
    }
}

fn restic_disk(disk: &PullDisk, plan: &PointPlan) -> ResticDisk {
    let parent = match &plan.kind {
        PointKind::Increment { parent, .. } => Some(parent.clone()),
        _ => None,
    };
    ResticDisk {
        name: disk.name.clone(),
        size: plan.size,
        point: plan.name.clone(),
        checkpoint: plan.checkpoint.clone(),
        parent,
    }
}

/// A file with the ranges of an increment.
fn ranges(plan: &PointPlan) -> Result<Option<NamedTempFile>> {
    let Some(ranges) = &plan.ranges else { return Ok(None) };
    let written = || {
        let mut file = NamedTempFile::new()?;
        file.write_all(ranges.to_text().as_bytes())?;
        file.flush()?;
        Ok(file)
    };
    let failed = |error| Error::system("cannot write the list of ranges", error);
    written().map(Some).map_err(failed)
}

impl SnapshotTarget {
    /// The target, for messages.
    pub(super) fn spec(&self) -> DeviceSpec {
        let name = self.backup.target_name(self.number);
        let rest = name.strip_prefix("restic:").unwrap_or(&name).to_owned();
        DeviceSpec::Scheme { scheme: "restic".to_owned(), rest }
    }

    /// Makes this the target of a copy.
    pub(super) fn attach(&self, request: &mut CopyRequest) {
        if let Some(device) = self.backup.device(self.number) {
            request.target = Endpoint::Open(self.spec(), Stack::over(device));
        }
    }

    pub(super) fn set_options(&self, options: &mut TransferOptions) {
        options.ranges = self.ranges.as_ref().map(|file| file.path().to_path_buf());
        options.ranges_alone = self.ranges.is_some();
        options.flush = true;
    }

    /// Notes that the disk was copied.
    pub(super) fn complete(&self) {
        self.backup.complete(self.number);
    }

    /// Whether both are parts of one snapshot.
    pub(super) fn is_beside(&self, other: &SnapshotTarget) -> bool {
        Arc::ptr_eq(&self.backup, &other.backup)
    }

    /// Makes the snapshot of the disks that were copied. Blocks.
    ///
    /// # Errors
    /// The repository fails.
    pub(super) fn finish(&self) -> Result<()> {
        self.backup.finish().map(drop)
    }
}
