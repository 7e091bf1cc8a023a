//! Disks, settings and nodes of a job that begins.

use std::sync::Arc;

use blockhaul_block::{Can, Device};
use blockhaul_catalog::Stack;
use blockhaul_jobs::{ErrorPolicy, JobSettings, JobTarget};

use crate::commands::{Arguments, needed, number, switch, text};
use crate::error::{QmpError, Result};
use crate::monitor::Monitor;
use crate::nodes::{NodeDisk, is_well_formed};
use crate::state::JobNodes;

/// A disk that a job reads or writes.
pub struct JobDisk {
    /// The node.
    pub name: String,
    pub node_disk: NodeDisk,
    pub device: Arc<dyn Device>,
}

impl Monitor {
    /// The source and the target of a job.
    pub(crate) async fn job_disks(&self, arguments: &Arguments) -> Result<(JobDisk, JobDisk)> {
        let source = needed(arguments, "device");
        let target = needed(arguments, "target");
        let source = self.job_disk(source).await?;
        let target = self.job_disk(target).await?;
        if source.name == target.name {
            return Err(QmpError::generic("Source and target cannot be the same"));
        }
        if let Some(kind) = self.user(&target.name) {
            return Err(QmpError::busy(&target.name, kind));
        }
        self.check_not_target(&self.disk_of(&source.node_disk).await?)?;
        if !target.device.facts().can.contains(Can::WRITE) {
            return Err(QmpError::generic("Block node is read-only"));
        }
        let writers = self.state().exports.iter().any(|export| export.node == target.name);
        let served = self.running(&target.name).is_some_and(|running| running.served);
        if writers || served || matches!(target.node_disk, NodeDisk::Frozen(_)) {
            let text = format!("Node '{}' is busy: it is exported to clients", target.name);
            return Err(QmpError::generic(text));
        }
        Ok((source, target))
    }

    async fn job_disk(&self, name: &str) -> Result<JobDisk> {
        let found = self.find(name).await?;
        let (name, device) = match &found {
            NodeDisk::Live(running) => (self.node_of(running), running.device()),
            NodeDisk::Frozen(frozen) => {
                (frozen.name.clone(), self.live_below(frozen).await?.device())
            }
        };
        let device = device.ok_or_else(|| QmpError::no_node(&name))?;
        Ok(JobDisk { name, node_disk: found, device })
    }

    /// How a job is controlled.
    pub(crate) fn settings(&self, arguments: &Arguments) -> Result<JobSettings> {
        let device = needed(arguments, "device");
        // Without a name it has that of its device, if there is one; nodes have none.
        let is_device = self.devices().iter().any(|one| one.id == device);
        let fallback = if is_device { device } else { "" };
        let name = text(arguments, "job-id").unwrap_or(fallback);
        if !is_well_formed(name) {
            return Err(QmpError::generic(format!("Invalid job ID '{name}'")));
        }
        if self.jobs.named(name).is_some() {
            return Err(QmpError::generic(format!("Job ID '{name}' already in use")));
        }
        let policy = |name: &str| match text(arguments, name) {
            Some("auto") => ErrorPolicy::Enospc,
            Some(text) => ErrorPolicy::parse(text).unwrap_or_default(),
            None => ErrorPolicy::Report,
        };
        Ok(JobSettings {
            name: Some(name.to_string()),
            finalized_by_hand: !switch(arguments, "auto-finalize", true),
            dismissed_by_hand: !switch(arguments, "auto-dismiss", true),
            on_source_error: policy("on-source-error"),
            on_target_error: policy("on-target-error"),
            speed: number(arguments, "speed").unwrap_or(0),
            compress: switch(arguments, "compress", false),
        })
    }

    /// Records the nodes of jobs that are about to begin, and forgets those of jobs that have ended.
    pub(crate) fn note_job_nodes(&self, nodes: &[JobNodes]) {
        let mut state = self.state();
        state.job_nodes.retain(|one| self.active_job(&one.job).is_some());
        state.job_nodes.extend(nodes.iter().cloned());
    }
}

/// The target of a job, as it is open.
pub fn target_of(disk: &JobDisk) -> Result<JobTarget> {
    let NodeDisk::Live(running) = &disk.node_disk else {
        return Err(QmpError::no_node(&disk.name));
    };
    let stack: Option<Stack> = running.stack.lock().expect("no panic under this lock").clone();
    let stack = stack.ok_or_else(|| QmpError::no_node(&disk.name))?;
    let spec = blockhaul_catalog::DeviceSpec::parse(running.storage().as_ref())?;
    Ok(JobTarget::Open(spec, stack, Some(running.clone())))
}

/// Refuses a target of another size than the source.
pub fn check_same_size(source: &JobDisk, target: &JobDisk) -> Result<()> {
    if source.device.facts().size == target.device.facts().size {
        Ok(())
    } else {
        Err(QmpError::generic("Source and target image have different sizes"))
    }
}
