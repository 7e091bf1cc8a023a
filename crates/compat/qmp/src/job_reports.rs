//! Jobs, as queries and events of the monitor protocol show them.

use std::sync::Arc;

use blockhaul_jobs::{Job, JobError, JobEvent};
use serde_json::{Map, Value, json};

use crate::monitor::Monitor;
use crate::state::JobNodes;

impl Monitor {
    /// `query-jobs`.
    pub(crate) fn described_jobs(&self) -> Value {
        self.listed_jobs().iter().map(|job| described(job)).collect()
    }

    /// `query-block-jobs`.
    pub(crate) fn described_block_jobs(&self) -> Value {
        self.listed_jobs().iter().map(|job| described_as_block_job(job)).collect()
    }

    fn listed_jobs(&self) -> Vec<Arc<Job>> {
        let all = self.jobs.all();
        let null = blockhaul_jobs::JobStatus::Null;
        all.into_iter().filter(|job| job.status() != null).collect()
    }

    /// Tells clients what has happened to a job.
    pub(crate) fn job_event(&self, job: &Job, happened: &JobEvent) {
        match happened {
            JobEvent::Status(status) => {
                let data = json!({ "id": job.name(), "status": status.name() });
                self.queues.send_event("JOB_STATUS_CHANGE", data);
            }
            JobEvent::Ready => self.queues.send_event("BLOCK_JOB_READY", numbers(job).into()),
            JobEvent::Pending => {
                let data = json!({ "id": job.name(), "type": job.kind() });
                self.queues.send_event("BLOCK_JOB_PENDING", data);
            }
            JobEvent::Error { is_read, action, text } => {
                log::debug!("job {}: {text}", job.name());
                let operation = if *is_read { "read" } else { "write" };
                let data = json!({
                    "device": job.name(), "operation": operation, "action": action.name(),
                });
                self.queues.send_event("BLOCK_JOB_ERROR", data);
            }
            JobEvent::Ended => self.job_has_ended(job),
        }
    }

    fn job_has_ended(&self, job: &Job) {
        let Some((error, cancelled)) = job.outcome() else { return };
        let target = self.state().job_nodes.iter().rfind(|one| one.job == job.name()).cloned();
        if let Some(JobNodes { target, .. }) = target {
            self.mark_target(&target);
        }
        let switches = job.mirror().is_some_and(|mirror| mirror.switches());
        if error.is_none() && switches {
            self.pivot(job);
        }
        let mut data = numbers(job);
        let event = match (error, cancelled) {
            (Some(_), true) => "BLOCK_JOB_CANCELLED",
            (Some(_), false) => {
                data.insert("error".to_string(), job.failure().map(JobError::facts).into());
                "BLOCK_JOB_COMPLETED"
            }
            (None, _) => "BLOCK_JOB_COMPLETED",
        };
        self.queues.send_event(event, data.into());
    }

    /// A job may have changed all of a node, unseen by its bitmaps.
    fn mark_target(&self, node: &str) {
        let Some(running) = self.running(node) else { return };
        running.bitmaps().iter().for_each(|bitmap| bitmap.set(0, bitmap.size()));
    }
}

/// A job for `query-jobs`.
fn described(job: &Job) -> Value {
    let (done, total) = job.bytes();
    let mut described = json!({
        "id": job.name(),
        "type": job.kind(),
        "status": job.status().name(),
        "current-progress": done,
        "total-progress": total,
    });
    if let Some(failure) = job.failure() {
        described["error"] = failure.facts().into();
    }
    described
}

/// A job for `query-block-jobs`.
fn described_as_block_job(job: &Job) -> Value {
    use blockhaul_jobs::JobStatus::{Paused, Ready, Running, Standby};
    let status = job.status();
    let mut described = numbers(job);
    described.insert("io-status".into(), job.io_status().into());
    described.insert("auto-finalize".into(), (!job.settings().finalized_by_hand).into());
    described.insert("auto-dismiss".into(), (!job.settings().dismissed_by_hand).into());
    described.insert("busy".into(), (status == Running).into());
    described.insert("paused".into(), matches!(status, Paused | Standby).into());
    described.insert("ready".into(), matches!(status, Ready | Standby).into());
    described.insert("status".into(), status.name().into());
    if let Some(mirror) = job.mirror() {
        described.insert("actively-synced".into(), mirror.is_synced().into());
    }
    if let Some(failure) = job.failure() {
        described.insert("error".into(), failure.facts().into());
    }
    Value::Object(described)
}

/// Members of a job in events and lists.
fn numbers(job: &Job) -> Map<String, Value> {
    let (done, total) = job.bytes();
    let mut numbers = Map::new();
    numbers.insert("device".into(), job.name().into());
    numbers.insert("type".into(), job.kind().into());
    numbers.insert("len".into(), total.into());
    numbers.insert("offset".into(), done.into());
    numbers.insert("speed".into(), job.speed().into());
    numbers
}
