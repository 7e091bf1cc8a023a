//! Backups, and reads of a point in time.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use blockhaul_block::{DeviceExt as _, Kind};
use blockhaul_catalog::DeviceSpec;
use blockhaul_io::simulation::note;
use blockhaul_jobs::{BackupConfig, BackupDisk, BitmapStep, SnapshotConfig};
use blockhaul_snapshot::{OnFailure, PointOptions, ViewTrim};
use blockhaul_transfer::NamedOption;

use super::world::JobWorld;
use crate::oracle::SECTOR;

/// The disk at a moment, once it is there.
#[derive(Clone, Default)]
struct PointInTimeDisk(Arc<Mutex<Option<Vec<u8>>>>);

impl PointInTimeDisk {
    fn seen(&self) -> Option<Vec<u8>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl JobWorld {
    /// A full backup, perhaps with a bitmap that begins with it.
    pub(super) async fn full_backup(&mut self) -> Result<bool, String> {
        self.new_target(None).await?;
        self.begun += 1;
        let start = self.rng.chance(60).then(|| format!("b{}", self.begun));
        let begin = self.point(None, start.clone());
        let before = self.starts;
        let (completed, moment) = self.backup(begin).await?;
        if let (Some(name), Some(moment)) = (start, moment) {
            let base = self.base(moment);
            self.bitmaps.add(&name, base, true, self.starts != before);
            self.chain = completed.then_some(name);
            self.check_bitmaps()?;
        }
        Ok(completed)
    }

    /// A backup of what has changed since the one on the target.
    pub(super) async fn increment(&mut self) -> Result<bool, String> {
        let Some(bitmap) = self.chain.clone() else { return Ok(false) };
        let begin = self.point(Some(bitmap.clone()), None);
        self.bitmaps.take(&bitmap);
        let (completed, moment) = self.backup(begin).await?;
        // Otherwise what was dirty is so again; the target has a part of it.
        let base = moment.filter(|_| completed).map(|moment| self.base(moment));
        self.bitmaps.give_back(&bitmap, base);
        Ok(completed)
    }

    /// A backup: whether it is complete, and the disk of its moment.
    async fn backup(&mut self, begin: SnapshotConfig) -> Result<(bool, Option<Vec<u8>>), String> {
        let (worker, desk) = self.desk()?;
        let breaks = begin.options.on_failure == OnFailure::BreakSnapshot;
        let before = self.before(breaks && begin.options.max != u64::MAX);
        let (moment, look) = self.look()?;
        let mut options = self.copy_options();
        if self.rng.chance(25) {
            options.push(NamedOption::flag("verify"));
        }
        note(&format!("a backup of {:?} with {options:?}", begin.bitmap));
        let settings = self.settings();
        let target = target(&self.target.uri())?;
        let item =
            BackupDisk { options, settings, ..BackupDisk::new(desk.export.clone(), target, begin) };
        let wanted = BackupConfig { bitmap_steps: vec![look], ..BackupConfig::new(vec![item]) };
        let beginning =
            worker.spawn(move || async move { desk.jobs.backup(&desk.table, wanted).await });
        let Some(job) = self.begun(beginning).await?.and_then(|mut jobs| jobs.pop()) else {
            return Ok((false, None));
        };
        let ended = self.drive(&job, None, &before).await?;
        let is_known = ended.completed || !ended.lost;
        let Some(moment) = moment.seen().filter(|_| is_known) else { return Ok((false, None)) };
        if ended.completed {
            same("a backup", &self.target.live(), &moment)?;
            same("a backup after a power cut", &self.target.durable(), &moment)?;
        }
        Ok((ended.completed, Some(moment)))
    }

    /// Reads a point in time twice.
    pub(super) async fn fleece(&mut self) -> Result<(), String> {
        let (worker, desk) = self.desk()?;
        let mut begin = self.point(None, None);
        begin.trim = ViewTrim::Refused;
        let (moment, look) = self.look()?;
        let before = self.starts;
        let there = desk.clone();
        let begun = worker.spawn(move || async move {
            let exports = [(&*there.export, &begin, None)];
            there.table.begin_snapshots(&exports, &[look]).await
        });
        let Some(point) = self.begun(begun).await?.and_then(|mut points| points.pop()) else {
            return Ok(());
        };
        for _ in 0..2 {
            self.calamity().await?;
            let view = point.view.clone();
            let size = moment.seen().map_or(0, |moment| moment.len());
            let read = worker.spawn(move || async move { view.read(0, size).await });
            let Ok(read) = read.await else { break };
            match (read, moment.seen()) {
                (Ok(data), Some(moment)) => same("a point in time", data.bytes(), &moment)?,
                (Err(error), _) if error.kind() != Kind::Invalid => note(&error.to_string()),
                (Err(error), _) => return Err(format!("a point in time fails: {error}")),
                (Ok(_), None) => return Err("a point in time began at no moment".to_string()),
            }
            blockhaul_io::sleep(Duration::from_millis(self.rng.below(3000))).await;
        }
        if self.starts == before {
            let ended = worker.spawn(move || async move {
                desk.table.end_snapshot(&desk.export, &point.snapshot).await;
            });
            ended.await.map_err(|_| "the server is gone".to_string())?;
        }
        Ok(())
    }

    /// Sees the disk at the moment when a point in time begins.
    fn look(&self) -> Result<(PointInTimeDisk, BitmapStep), String> {
        let moment = PointInTimeDisk::default();
        let seen = moment.clone();
        let disk = self.disk()?;
        let look = move || {
            *seen.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(disk.live());
        };
        Ok((moment, Box::new(look)))
    }

    /// How a point in time begins.
    fn point(&mut self, bitmap: Option<String>, start: Option<String>) -> SnapshotConfig {
        let rng = &mut self.rng;
        let is_limited = !self.is_calm && rng.chance(10);
        let on_failure = [OnFailure::BreakSnapshot, OnFailure::FailWrite];
        let options = PointOptions {
            block: 4096 << rng.below(5),
            directory: Some(self.dir.clone()),
            max: if is_limited { 64 << 10 } else { u64::MAX },
            guest_timeout: Duration::from_secs(*rng.pick(&[0, 1, 60])),
            on_failure: *rng.pick(&on_failure),
        };
        let within = Duration::from_secs(*rng.pick(&[1, 60]));
        SnapshotConfig { options, bitmap, start, within, ..SnapshotConfig::default() }
    }
}

/// The target of a job.
pub(super) fn target(uri: &str) -> Result<DeviceSpec, String> {
    DeviceSpec::parse(uri.as_ref()).map_err(|error| error.to_string())
}

/// Checks that a disk has these contents.
pub(super) fn same(what: &str, found: &[u8], expected: &[u8]) -> Result<(), String> {
    if found.len() != expected.len() {
        return Err(format!("{what} has {} bytes, not {}", found.len(), expected.len()));
    }
    let differs = |(one, other): (&[u8], &[u8])| one != other;
    match found.chunks(SECTOR).zip(expected.chunks(SECTOR)).position(differs) {
        None => Ok(()),
        Some(sector) => Err(format!("{what} differs from the disk in sector {sector}")),
    }
}
