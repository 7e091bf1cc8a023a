//! Jobs, as the monitor protocol controls them.

use std::sync::Arc;

use blockhaul_jobs::{CLIENT_WAIT, Job, JobCommand, MirrorCompletion};

use crate::commands::{Arguments, number, switch, text};
use crate::error::{QmpError, Result};
use crate::monitor::Monitor;
use crate::state::JobNodes;

impl Monitor {
    /// The commands `job-*` and `block-job-*`, also for jobs of an earlier server: a mirror of it can be resumed,
    /// and every job dismissed.
    pub(crate) async fn control_any_job(&self, command: &str, arguments: &Arguments) -> Result<()> {
        let name = text(arguments, "id").or(text(arguments, "device")).unwrap_or_default();
        let found = self.jobs.named(name).filter(|job| job.resumable().is_some());
        match (found, command.trim_start_matches("block-")) {
            (Some(job), "job-resume") => self.resume_job(&job).await?,
            (Some(job), "job-dismiss" | "job-cancel") => {
                self.jobs.forget(&self.table, job.id()).await;
            }
            _ => self.control_job(command, arguments)?,
        }
        Ok(())
    }

    /// Continues a job of an earlier server; its target may be a node that has it open.
    async fn resume_job(&self, job: &Job) -> Result<()> {
        let resumed = self.jobs.resume(&self.table, job.id(), false).await?;
        let all = self.table.exports();
        for job in resumed {
            let source = all.iter().find(|one| one.name == job.export());
            let target = all.iter().find(|one| !one.served && one.storage() == job.target());
            let (Some(source), Some(target)) = (source, target) else { continue };
            let nodes = JobNodes {
                job: job.name(),
                source: self.node_of(source),
                target: self.node_of(target),
                bitmap: None,
            };
            self.state().job_nodes.push(nodes);
        }
        Ok(())
    }

    /// The commands `job-*` and `block-job-*` for jobs of this server.
    fn control_job(&self, command: &str, arguments: &Arguments) -> Result<()> {
        let block_job = command.strip_prefix("block-");
        let verb = block_job.unwrap_or(command);
        let name = text(arguments, "id").or(text(arguments, "device")).unwrap_or_default();
        let of = |verb| self.job(name, verb, block_job.is_some());
        match verb {
            "job-cancel" => {
                let job = of(JobCommand::Cancel)?;
                let soft = block_job.is_some() && !switch(arguments, "force", false);
                let is_ready = job.mirror().is_some_and(|mirror| mirror.is_ready());
                if soft && is_ready {
                    job.complete(MirrorCompletion { within: CLIENT_WAIT, switch: false });
                } else {
                    job.cancel();
                }
            }
            "job-complete" => {
                of(JobCommand::Complete)?
                    .complete(MirrorCompletion { within: CLIENT_WAIT, switch: true });
            }
            "job-pause" => pause(&of(JobCommand::Pause)?)?,
            "job-resume" => resume(&of(JobCommand::Resume)?)?,
            "job-set-speed" => {
                let speed = number(arguments, "speed").unwrap_or(0);
                of(JobCommand::SetSpeed)?.limit(speed);
            }
            "job-change" => self.change_job(&*of(JobCommand::Change)?, arguments)?,
            "job-finalize" => of(JobCommand::Finalize)?.finalize(),
            "job-dismiss" => of(JobCommand::Dismiss)?.dismiss(),
            _ => {
                return Err(QmpError::no_command(format!(
                    "The command {command} has not been found"
                )));
            }
        }
        Ok(())
    }

    /// The job of this name, if it accepts the request.
    fn job(&self, name: &str, verb: JobCommand, is_block_job: bool) -> Result<Arc<Job>> {
        let found = self.jobs.named(name);
        let job = found.ok_or_else(|| {
            if is_block_job {
                QmpError::no_block_job(name)
            } else {
                QmpError::generic("Job not found")
            }
        })?;
        if !job.status().accepts(verb) {
            return Err(QmpError::generic(format!(
                "Job '{name}' in state '{}' cannot accept command verb '{}'",
                job.status().name(),
                verb.name()
            )));
        }
        Ok(job)
    }
}

fn pause(job: &Arc<Job>) -> Result<()> {
    use blockhaul_jobs::JobStatus::{Paused, Standby};
    if matches!(job.status(), Paused | Standby) {
        return Err(QmpError::generic("Job is already paused"));
    }
    if job.pause(true) {
        Ok(())
    } else {
        Err(QmpError::generic("clients wait for the end of the job just now"))
    }
}

fn resume(job: &Arc<Job>) -> Result<()> {
    use blockhaul_jobs::JobStatus::{Paused, Standby};
    if !matches!(job.status(), Paused | Standby) {
        return Err(QmpError::generic("Can't resume a job that was not paused"));
    }
    job.pause(false);
    Ok(())
}
