//! Requests about jobs.

use std::sync::Arc;

use blockhaul_control::{
    BackupRequest, BackupTarget, CopyMode, ErrorPolicy, JobReport, MirrorRequest, Refusal, Seconds,
    SyncMode,
};
use blockhaul_jobs::{
    BackupConfig, BackupDisk, InitialCopy, Job, JobSettings, JobStatus, JobTarget,
    MirrorCompletion, MirrorConfig, SnapshotConfig,
};
use serde::Serialize;
use serde_json::{Value, json};

use super::bitmaps::options as snapshot_options;
use super::copy_options::named_options;
use super::exports::spec;
use super::operations::{ControlReply, Operations};
use crate::exit;

impl Operations {
    pub(super) fn list_jobs(&self) -> Value {
        json!({ "jobs": self.jobs.all().iter().map(|job| described(job)).collect::<Vec<_>>() })
    }

    /// Begins a backup, with a job for each disk.
    pub(super) async fn begin_backup(&self, request: BackupRequest) -> ControlReply {
        let BackupRequest { export, target, with, options, bitmap, start_bitmap, .. } = request;
        let within = request.seconds.0;
        let settings =
            settings(request.on_source_error, request.on_target_error, request.finalize_by_hand);
        let mut disks = Vec::new();
        for BackupTarget { export, target } in
            [BackupTarget { export, target }].into_iter().chain(with)
        {
            let begin = SnapshotConfig {
                options: snapshot_options(&request.snapshot),
                bitmap: bitmap.clone(),
                start: start_bitmap.clone(),
                within,
                ..SnapshotConfig::default()
            };
            let export = self.export(&export)?;
            let target = spec("backup: \"target\"", target)?;
            let options = named_options("backup", &options.0)?;
            let settings = settings.clone();
            disks.push(BackupDisk { options, settings, ..BackupDisk::new(export, target, begin) });
        }
        let jobs = self.jobs.backup(&self.table, BackupConfig::new(disks)).await?;
        for job in &jobs {
            log::info!(export = job.export(); "job {}: backup of {:?} to {}", job.id(), job.export(),
                job.target());
        }
        match &jobs[..] {
            [only] => Ok(described(only)),
            _ => Ok(json!({ "jobs": jobs.iter().map(|job| described(job)).collect::<Vec<_>>() })),
        }
    }

    /// Begins a mirror.
    pub(super) async fn begin_mirror(&self, request: MirrorRequest) -> ControlReply {
        let MirrorRequest { export, target, options, bitmap, sync, copy_mode, .. } = request;
        let initial = match (bitmap, sync) {
            (Some(bitmap), None) => InitialCopy::Dirty(bitmap),
            (None, None | Some(SyncMode::Full)) => InitialCopy::All,
            (None, Some(SyncMode::None)) => InitialCopy::Nothing,
            (Some(_), Some(_)) => {
                let text = "mirror: \"sync\" is full or none, without \"bitmap\"";
                return Err(Refusal::usage(text));
            }
        };
        let wanted = MirrorConfig {
            export: self.export(&export)?,
            target: JobTarget::Spec(spec("mirror: \"target\"", target)?),
            options: named_options("mirror", &options.0)?,
            within: request.seconds.0,
            initial,
            copy_mode: copy_mode.unwrap_or_default(),
            settings: settings(
                request.on_source_error,
                request.on_target_error,
                request.finalize_by_hand,
            ),
            resumes: None,
        };
        let job = self.jobs.mirror(&self.table, wanted).await?;
        log::info!(export = &*export; "job {}: mirror of {export:?} to {}", job.id(), job.target());
        Ok(described(&job))
    }

    fn job(&self, number: u64) -> Result<Arc<Job>, Refusal> {
        let found = self.jobs.find(number);
        found.ok_or_else(|| Refusal::absent(format!("there is no job {number}")))
    }

    pub(super) fn pause_job(&self, number: u64) -> ControlReply {
        let job = self.job(number)?;
        controlled(&job, job.pause(true))
    }

    pub(super) fn limit_job(&self, number: u64, rate: u64) -> ControlReply {
        let job = self.job(number)?;
        controlled(&job, job.limit(rate))
    }

    pub(super) fn set_copy_mode(&self, number: u64, mode: CopyMode) -> ControlReply {
        let job = self.job(number)?;
        let wrong = || Refusal::usage("job-copy-mode: the job is not a mirror");
        job.mirror().ok_or_else(wrong)?.set_copy_mode(mode);
        controlled(&job, !job.is_over())
    }

    pub(super) fn finalize_job(&self, number: u64) -> ControlReply {
        let job = self.job(number)?;
        if job.status() != JobStatus::Pending {
            return Err(Refusal::failed("the job is not pending"));
        }
        job.finalize();
        Ok(described(&job))
    }

    /// Asks a mirror to complete; `within` is the time that clients may wait, and `switch` says
    /// whether they move to the target.
    pub(super) fn complete_job(&self, number: u64, within: Seconds, switch: bool) -> ControlReply {
        let job = self.job(number)?;
        if job.is_over() {
            return Err(Refusal::failed("the job has ended"));
        }
        if !job.complete(MirrorCompletion { within: within.0, switch }) {
            return Err(Refusal::usage("job-complete: the job is not a mirror"));
        }
        Ok(described(&job))
    }

    /// Continues a paused job, or one of an earlier server; `new_moment` says that a backup may become
    /// the disk of now.
    pub(super) async fn resume_job(&self, number: u64, new_moment: bool) -> ControlReply {
        let job = self.job(number)?;
        if job.resumable().is_none() {
            return controlled(&job, job.pause(false));
        }
        let resumed = self.jobs.resume(&self.table, job.id(), new_moment).await?;
        resumed.iter().for_each(|job| log::info!("job {}: resumed", job.id()));
        let same = resumed.iter().find(|one| one.id() == job.id());
        Ok(described(same.unwrap_or(&job)))
    }

    /// Ends a job soon, or forgets one of an earlier server.
    pub(super) async fn cancel_job(&self, number: u64) -> ControlReply {
        let job = self.job(number)?;
        if job.resumable().is_none() {
            job.cancel();
        } else if !self.jobs.forget(&self.table, job.id()).await {
            return Err(Refusal::failed("the job was resumed or cancelled just now"));
        }
        Ok(described(&job))
    }

    /// Waits until a job has ended, or a mirror is ready.
    pub(super) async fn wait_for_job(&self, number: u64, ready: bool) -> ControlReply {
        let job = self.job(number)?;
        if ready {
            job.ready().await
        } else {
            job.over().await
        }
        Ok(described(&job))
    }
}

/// The reply about a job that copies.
fn controlled(job: &Job, copies: bool) -> ControlReply {
    let text = "the job is not copying: it has ended, or clients wait for its end";
    if copies { Ok(described(job)) } else { Err(Refusal::failed(text)) }
}

/// A job, with the exit status of a command that ends as it does.
#[derive(Serialize)]
pub struct JobReply {
    #[serde(flatten)]
    pub report: JobReport,
    /// None while the job runs.
    pub exit_status: Option<u8>,
}

/// The report about a job.
pub fn reply(job: &Job) -> JobReply {
    let report = job.report();
    let has_ended = report.result.is_some() || report.error.is_some();
    let exit_status =
        has_ended.then(|| job.failure().map_or(0, |error| exit::status_of(error.kind())));
    JobReply { report, exit_status }
}

fn described(job: &Job) -> Value {
    json!(reply(job))
}

/// How a job is controlled.
fn settings(
    on_source_error: Option<ErrorPolicy>,
    on_target_error: Option<ErrorPolicy>,
    finalized_by_hand: bool,
) -> JobSettings {
    JobSettings {
        finalized_by_hand,
        on_source_error: on_source_error.unwrap_or_default(),
        on_target_error: on_target_error.unwrap_or_default(),
        ..JobSettings::default()
    }
}
