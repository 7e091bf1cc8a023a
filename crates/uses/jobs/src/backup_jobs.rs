//! Backup jobs: several disks at one point in time, which succeed or fail together.

use std::sync::{Arc, OnceLock};

use blockhaul_block::Error;
use blockhaul_catalog::Stack;
use blockhaul_io::Pool;
use blockhaul_snapshot::Snapshot;
use blockhaul_transfer::{CopyReport, CopySetup, OpenCopy};

use crate::error::JobError;
use crate::export::OpenExport;
use crate::export_bitmaps::FrozenBitmap;
use crate::export_table::ExportTable;
use crate::job::{BackupSnapshot, Job, JobEvent, JobStart, JobWork};
use crate::job_config::{BackupConfig, BackupDisk, BackupSource};
use crate::job_copy::{copy, with_source_policy};
use crate::job_state::JobStatus;
use crate::jobs::Jobs;
use crate::snapshot::OpenSnapshot;

/// A disk of a backup that has begun, with its job.
struct DiskJob {
    export: Arc<OpenExport>,
    /// The point in time, which ends with the job.
    snapshot: Option<Snapshot>,
    frozen: Option<FrozenBitmap>,
    job: Arc<Job>,
}

impl Jobs {
    /// Begins a backup: a job for each disk. On a worker; returns when the point in time has begun,
    /// and all that can be refused without the target was refused.
    ///
    /// A group is complete as a whole or not at all: if one disk fails, the others are cancelled.
    ///
    /// # Errors
    /// If options or a description are invalid, the export lacks a bitmap, a target is in use, or the point
    /// in time cannot begin. Bitmaps are as they were then. A target that cannot be opened makes the job
    /// fail.
    pub async fn backup(
        self: &Arc<Self>,
        table: &Arc<ExportTable>,
        config: BackupConfig,
    ) -> Result<Vec<Arc<Job>>, JobError> {
        let BackupConfig { disks, grouped, bitmap_steps } = config;
        let copies = copies(table, &disks, grouped)?;
        let mut writing = Vec::new();
        for disk in &disks {
            writing.push(disk.target.begin().await?);
        }
        let records = self.backup_records(table, &disks, grouped).await?;
        let mut all =
            Jobs::begin_snapshots(table, &disks, &records, &bitmap_steps).await?.into_iter();
        let mut begun = Vec::new();
        let mut running = Vec::new();
        let starts = disks.into_iter().zip(copies).zip(records).zip(writing);
        for (((item, mut copy), record), writing) in starts {
            let BackupDisk { export, target, source, settings, resumes, .. } = item;
            let (device, snapshot, frozen) = match source {
                BackupSource::Still(device, frozen) => (device, None, frozen),
                BackupSource::Now(_) => {
                    let OpenSnapshot { snapshot, view, frozen } =
                        all.next().ok_or_else(Error::misfit)?;
                    (view, Some(snapshot), frozen)
                }
            };
            let start = JobStart::new(&export, &target, writing, settings, record);
            copy.read_snapshot(with_source_policy(&start.errors, Stack::over(device)).await?);
            if resumes.is_some_and(|record| record.has_target()) {
                copy.keep_target();
            }
            let work = JobWork::Backup(BackupSnapshot::new(snapshot.clone()));
            let job = self.begin(start, work, &mut copy);
            begun.push(DiskJob { export, snapshot, frozen, job });
            running.push(copy);
        }
        let jobs: Vec<_> = begun.iter().map(|disk| disk.job.clone()).collect();
        if grouped {
            drop(blockhaul_io::spawn(run_group(table.clone(), begun, running)));
        } else {
            for (disk, copy) in begun.into_iter().zip(running) {
                drop(blockhaul_io::spawn(run_group(table.clone(), vec![disk], vec![copy])));
            }
        }
        Ok(jobs)
    }
}

/// Copies the disks of a backup.
async fn run_group(table: Arc<ExportTable>, disks: Vec<DiskJob>, copies: Vec<CopySetup>) {
    let mut results = copy_group(&disks, copies).await;
    if results.iter().all(Result::is_ok) && !finalize_group(&disks).await {
        let text = "the group was cancelled before it was finalized";
        results.iter_mut().for_each(|result| *result = Err(JobError::other(text)));
    }
    let failed = results.iter().any(Result::is_err);
    for (disk, result) in disks.iter().zip(results) {
        let mut lost = None;
        if let Some(record) = disk.job.record()
            && (result.is_ok() || !disk.job.is_interrupted())
        {
            // The end of the snapshot takes the layer away.
            if let Some(map) = record.map() {
                disk.export.maps().retain(|other| !other.is_same(&map));
            }
            let record = record.clone();
            let _ = blockhaul_io::offload(move || record.remove()).await;
        }
        if let Some(snapshot) = &disk.snapshot {
            lost = snapshot.stats().broken;
            table.end_snapshot(&disk.export, snapshot).await;
        }
        if let Some(frozen) = &disk.frozen {
            if failed { frozen.give_back() } else { frozen.settle() }
        }
        disk.job.end(result, lost);
    }
}

/// All disks are copied: waits until their jobs are finalized. False: one was cancelled.
async fn finalize_group(disks: &[DiskJob]) -> bool {
    disks.iter().for_each(|disk| disk.job.enter(JobStatus::Waiting));
    for disk in disks {
        disk.job.enter(JobStatus::Pending);
        if disk.job.settings().finalized_by_hand {
            disk.job.send_event(&JobEvent::Pending);
        }
    }
    for disk in disks {
        disk.job.is_finalized(|| disks.iter().any(|disk| disk.job.is_ending())).await;
    }
    !disks.iter().any(|disk| disk.job.is_ending())
}

/// Copies all disks; once one has failed, the others end soon.
async fn copy_group(
    disks: &[DiskJob],
    copies: Vec<CopySetup>,
) -> Vec<Result<CopyReport, JobError>> {
    let pool = Pool::new(copies.first().map_or(0, CopySetup::memory));
    let copies = match open_group(copies).await {
        Ok(copies) => copies,
        Err((index, failure)) => {
            let others = |_| Err(group_failure(disks, index, &failure));
            let mut results: Vec<_> = disks.iter().map(others).collect();
            results[index] = Err(failure);
            return results;
        }
    };
    let jobs: Arc<[Arc<Job>]> = disks.iter().map(|disk| disk.job.clone()).collect();
    let first = Arc::new(OnceLock::new());
    let running: Vec<_> = copies
        .into_iter()
        .enumerate()
        .map(|(index, copy)| {
            let pool = pool.clone();
            let jobs = jobs.clone();
            let first = first.clone();
            blockhaul_io::start(async move {
                let result = copy.run(pool).await;
                if result.is_err() {
                    // The others fail because of it.
                    let _ = first.set(index);
                    jobs.iter().for_each(|job| job.stop());
                }
                result.map_err(JobError::from)
            })
        })
        .collect();
    let mut results = Vec::new();
    for one in running {
        results.push(one.await);
    }
    if let Some(&first) = first.get() {
        let result = results.remove(first);
        if let Err(failure) = &result {
            results
                .iter_mut()
                .for_each(|result| *result = Err(group_failure(disks, first, failure)));
        }
        results.insert(first, result);
    }
    results
}

/// Opens all disks: all checks come before a target is touched. Fails with the index of the disk that
/// cannot be opened.
async fn open_group(copies: Vec<CopySetup>) -> Result<Vec<OpenCopy>, (usize, JobError)> {
    let mut opened = Vec::new();
    for (index, copy) in copies.into_iter().enumerate() {
        match copy.open().await {
            Ok(copy) => opened.push(copy),
            Err(error) => {
                // Not on a worker: it may wait for the server of `[ CMD ]`.
                let _ = blockhaul_io::offload(move || drop(opened)).await;
                return Err((index, error.into()));
            }
        }
    }
    Ok(opened)
}

/// Why the other disks of a group are not complete.
fn group_failure(disks: &[DiskJob], failed: usize, failure: &JobError) -> JobError {
    let name = &disks[failed].export.name;
    let why = failure.facts();
    failure.reworded(format!("the backup of export {name:?}, of the same group, has failed: {why}"))
}

/// The copies of the disks of a backup.
fn copies(
    table: &ExportTable,
    disks: &[BackupDisk],
    grouped: bool,
) -> Result<Vec<CopySetup>, JobError> {
    let mut copies = Vec::new();
    let mut rate = None;
    for (index, item) in disks.iter().enumerate() {
        if grouped && disks[..index].iter().any(|other| other.export.name == item.export.name) {
            let name = &item.export.name;
            let text = format!("backup: export {name:?} is in the group twice");
            return Err(JobError::request(text));
        }
        let mut copy = copy(
            table,
            "backup",
            &item.export,
            &item.target,
            &item.options,
            item.selects.as_deref(),
        )?;
        if grouped {
            let engine = copy.engine();
            rate = rate.or(engine.rate.take());
            engine.rate.clone_from(&rate);
        }
        copies.push(copy);
    }
    Ok(copies)
}
