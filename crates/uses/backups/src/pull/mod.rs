//! Pulling the disks of one machine, each in full or what has changed, as a new point of its store.
//!
//! [`PullRequest::plan`] reads the stores, opens the sources (`source`), decides for each disk (`decision`), and
//! locks the stores. Only then files are written: what is to be copied. The caller copies each disk to the file
//! of its [`PullTarget`], and publishes the point.

mod decision;
mod request;
mod result;
mod resumption;
#[cfg(feature = "restic")]
mod snapshots;
#[cfg(not(feature = "restic"))]
#[path = "snapshots_absent.rs"]
mod snapshots;
mod source;
mod target;

use std::path::Path;

use blockhaul_block::Error;
use blockhaul_store::{Store, StoreWriter};
use rustix::fs::{Access, AtFlags, CWD, accessat};

use crate::context::BackupContext;
use crate::error::{BackupError, BackupErrorKind, BackupStep, Result};
use resumption::{PullStart, pull_start};
use snapshots::SnapshotStores;

pub(crate) use decision::PullQuestion;
pub use request::{ChangeBitmap, PointKind, PointPlan, PullDisk, PullMode, PullRequest};
pub use result::{PointFiles, PullOutcome, PullResult, UnfinishedPoint, pull_json, pull_text};
pub(crate) use snapshots::is_repository;
pub use target::{PullTarget, finish_pull};

/// The decisions of a pull, and the locked stores.
pub struct PullPlan {
    /// The new point of each disk, in the order of the request.
    pub points: Vec<PointPlan>,
    /// The targets of the disks that are copied, in the same order.
    pub targets: Vec<PullTarget>,
}

/// The store of a disk that is copied.
struct LockedStore {
    /// The index of the disk.
    index: usize,
    writer: StoreWriter,
    start: PullStart,
}

impl PullRequest {
    /// Decides for each disk, and records in its store what is about to be copied. Nothing is written before
    /// all sources are read, and all stores locked and checked. The sources are closed again. Call this outside
    /// of workers.
    ///
    /// # Errors
    /// If two disks share a store, a store or source cannot be opened, an increment is refused, or what an
    /// earlier pull has left cannot be continued.
    pub fn plan(&self, context: &BackupContext) -> Result<PullPlan> {
        self.check_stores()?;
        let (stores, snapshots) = self.open_stores()?;
        let points = self.decide(context, &stores, false)?;
        let locked = self.lock(&stores, &points)?;
        let mut targets = self.begin_snapshots(snapshots, &points)?;
        for LockedStore { index, writer, start } in locked {
            let disk = (index, &self.disks[index]);
            let target = PullTarget::begin(disk, writer, &points[index], &start);
            targets.push(target.map_err(|error| error.of_disk(index))?);
        }
        targets.sort_by_key(PullTarget::disk);
        Ok(PullPlan { points, targets })
    }

    /// Decides for each disk, as [`PullRequest::plan`] does, and changes nothing: no store is made or locked. Call
    /// this outside of workers.
    ///
    /// # Errors
    /// Those of [`PullRequest::plan`], except what only a locked store shows.
    pub fn preview(&self, context: &BackupContext) -> Result<Vec<PullResult>> {
        self.check_stores()?;
        let (stores, _) = self.open_stores()?;
        self.each(|disk| check_writable(&disk.store))?;
        let points = self.decide(context, &stores, true)?;
        let planned = self.disks.iter().zip(&stores).zip(points).enumerate();
        let result = |(index, ((disk, store), plan))| {
            let unfinished = self.unfinished(disk, store, &plan);
            let unfinished = unfinished.map_err(|error| error.of_disk(index))?;
            Ok(PullResult::planned(disk, plan, unfinished))
        };
        planned.map(result).collect()
    }

    /// What happens to the unfinished point of a store.
    fn unfinished(
        &self,
        disk: &PullDisk,
        store: &Store,
        plan: &PointPlan,
    ) -> Result<Option<UnfinishedPoint>> {
        if is_repository(&disk.store) || plan.kind == PointKind::Existing {
            return Ok(None);
        }
        let left = store.unfinished();
        let left =
            left.map_err(|error| BackupError::of_store(BackupStep::OpenStore, &disk.store, error))?;
        let start = pull_start(store, left.as_ref(), disk, plan, self.restart)?;
        Ok(left.map(|_| match start {
            PullStart::Resumed(number) => {
                UnfinishedPoint::Resumed(PointFiles::new(store, number, plan.ranges.is_some()))
            }
            PullStart::New => UnfinishedPoint::Discarded,
        }))
    }

    fn open_stores(&self) -> Result<(Vec<Store>, SnapshotStores)> {
        let mut snapshots = SnapshotStores::default();
        let stores = self.each(|disk| {
            let opened = if is_repository(&disk.store) {
                snapshots.points(disk)
            } else {
                Store::open_or_new(&disk.store)
            };
            opened.map_err(|error| BackupError::of_store(BackupStep::OpenStore, &disk.store, error))
        })?;
        Ok((stores, snapshots))
    }

    /// Begins the snapshots of the disks whose stores are repositories.
    fn begin_snapshots(
        &self,
        snapshots: SnapshotStores,
        points: &[PointPlan],
    ) -> Result<Vec<PullTarget>> {
        let planned = self.disks.iter().zip(points).enumerate();
        let copied = planned.filter(|(_, (disk, plan))| {
            is_repository(&disk.store) && plan.kind != PointKind::Existing
        });
        let copied: Vec<_> = copied.map(|(index, (disk, plan))| (index, disk, plan)).collect();
        let targets = snapshots.begin(&copied).map_err(|(index, error)| {
            let store = &self.disks[index].store;
            BackupError::of_store(BackupStep::Record, store, error).of_disk(index)
        })?;
        let target =
            |(index, target)| PullTarget::of_snapshot(index, &self.disks[index].store, target);
        Ok(targets.into_iter().map(target).collect())
    }

    /// Locks the stores of all disks that are copied.
    fn lock(&self, stores: &[Store], points: &[PointPlan]) -> Result<Vec<LockedStore>> {
        let planned = self.disks.iter().zip(stores).zip(points).enumerate();
        let copied = planned.filter(|(_, ((disk, _), plan))| {
            !is_repository(&disk.store) && plan.kind != PointKind::Existing
        });
        copied
            .map(|(index, ((disk, store), plan))| {
                let locked = lock(disk, store, plan, self.restart);
                let (writer, start) = locked.map_err(|error| error.of_disk(index))?;
                Ok(LockedStore { index, writer, start })
            })
            .collect()
    }

    /// Opens each source, and reads its bitmap if an increment is possible. `counts`: the data of full backups is
    /// counted.
    fn decide(
        &self,
        context: &BackupContext,
        stores: &[Store],
        counts: bool,
    ) -> Result<Vec<PointPlan>> {
        let runtime = context.start(BackupStep::OpenSource)?;
        let mut points = Vec::with_capacity(stores.len());
        for (index, (disk, store)) in self.disks.iter().zip(stores).enumerate() {
            let source = source::PullSource::new(disk, &self.default_point)?;
            let store = store.clone();
            let (plan, open) = runtime.block_on(move || source.plan(store, counts));
            // Not on a worker: this waits for the server of a `[ CMD ]`.
            drop(open);
            points.push(plan.map_err(|error| error.in_store(&disk.store).of_disk(index))?);
        }
        Ok(points)
    }

    /// The result for each disk, or the first error.
    fn each<T>(&self, mut work: impl FnMut(&PullDisk) -> Result<T>) -> Result<Vec<T>> {
        let disks = self.disks.iter().enumerate();
        disks.map(|(index, disk)| work(disk).map_err(|error| error.of_disk(index))).collect()
    }
}

/// Refuses the directory of a store in which no file can be made.
fn check_writable(store: &Path) -> Result<()> {
    if is_repository(store) {
        return Ok(());
    }
    let above = store.parent().filter(|above| !above.as_os_str().is_empty());
    let above = above.unwrap_or(Path::new("."));
    let dir = if store.exists() { store } else { above };
    let access = Access::WRITE_OK | Access::EXEC_OK;
    let checked = accessat(CWD, dir, access, AtFlags::EACCESS);
    checked.map_err(|errno| {
        let text = format!("cannot write to {}", dir.display());
        let error = Error::system(text, errno.into());
        let remedy = "choose another directory, or change the permissions";
        BackupError::of_store(BackupStep::OpenStore, store, error.with_remedy(remedy))
    })
}

/// Locks the store of a disk, if its points are those for which was decided.
fn lock(
    disk: &PullDisk,
    store: &Store,
    plan: &PointPlan,
    restart: bool,
) -> Result<(StoreWriter, PullStart)> {
    let writer = StoreWriter::lock(&disk.store);
    let writer =
        writer.map_err(|error| BackupError::of_store(BackupStep::OpenStore, &disk.store, error))?;
    if writer.store().points() != store.points() {
        let text = format!("{} has just been changed: run it again", disk.store.display());
        let error = BackupError::new(BackupErrorKind::Open, BackupStep::OpenStore, text);
        return Err(error.in_store(&disk.store));
    }
    let start = pull_start(writer.store(), writer.unfinished(), disk, plan, restart)?;
    Ok((writer, start))
}
