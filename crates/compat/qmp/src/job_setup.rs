//! What jobs have in common when they begin: their disks and settings, and which nodes they use.

use std::sync::Arc;

use blockhaul_block::{Can, Device};
use blockhaul_catalog::Stack;
use blockhaul_jobs::{OnError, Settings, To};

use crate::commands::{Arguments, needed, number, switch, text};
use crate::error::{QmpError, Result};
use crate::monitor::Monitor;
use crate::nodes::{Found, is_well_formed};
use crate::state::Use;

/// A disk that a job reads or writes.
pub struct End {
    /// The node.
    pub name: String,
    pub found: Found,
    pub device: Arc<dyn Device>,
}

impl End {
    pub fn size(&self) -> u64 {
        self.device.facts().size
    }
}

impl Monitor {
    /// The source and the target of a job.
    pub(crate) async fn ends(&self, arguments: &Arguments) -> Result<(End, End)> {
        let source = needed(arguments, "device");
        let target = needed(arguments, "target");
        let source = self.end(source).await?;
        let target = self.end(target).await?;
        if source.name == target.name {
            return Err(QmpError::generic("Source and target cannot be the same"));
        }
        if let Some(kind) = self.user(&target.name) {
            return Err(QmpError::busy(&target.name, kind));
        }
        self.check_not_target(&self.disk_of(&source.found).await?)?;
        if !target.device.facts().can.contains(Can::WRITE) {
            return Err(QmpError::generic("Block node is read-only"));
        }
        let writers = self.state().exports.iter().any(|export| export.node == target.name);
        let served = self.running(&target.name).is_some_and(|running| running.served);
        if writers || served || matches!(target.found, Found::Frozen(_)) {
            let text = format!("Node '{}' is busy: it is exported to clients", target.name);
            return Err(QmpError::generic(text));
        }
        Ok((source, target))
    }

    async fn end(&self, name: &str) -> Result<End> {
        let found = self.find(name).await?;
        let (name, device) = match &found {
            Found::Live(running) => (self.node_of(running), running.device()),
            Found::Frozen(frozen) => (frozen.name.clone(), self.live_below(frozen).await?.device()),
        };
        let device = device.ok_or_else(|| QmpError::no_node(&name))?;
        Ok(End { name, found, device })
    }

    /// How a job is controlled.
    pub(crate) fn settings(&self, arguments: &Arguments) -> Result<Settings> {
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
            Some("auto") => OnError::Enospc,
            Some(text) => OnError::parse(text).unwrap_or_default(),
            None => OnError::Report,
        };
        Ok(Settings {
            name: Some(name.to_string()),
            finalized_by_hand: !switch(arguments, "auto-finalize", true),
            dismissed_by_hand: !switch(arguments, "auto-dismiss", true),
            on_source_error: policy("on-source-error"),
            on_target_error: policy("on-target-error"),
            speed: number(arguments, "speed").unwrap_or(0),
            compress: switch(arguments, "compress", false),
        })
    }

    /// Notes what jobs use that are about to begin, and forgets what those that have ended used.
    pub(crate) fn note_uses(&self, uses: &[Use]) {
        let mut state = self.state();
        let jobs = &self.jobs;
        state.uses.retain(|one| jobs.named(&one.job).is_some_and(|job| !job.status().is_over()));
        state.uses.extend(uses.iter().cloned());
    }
}

/// The target of a job, as it is open.
pub fn target_of(end: &End) -> Result<To> {
    let Found::Live(running) = &end.found else { return Err(QmpError::no_node(&end.name)) };
    let stack: Option<Stack> = running.stack.lock().expect("no panic under this lock").clone();
    let stack = stack.ok_or_else(|| QmpError::no_node(&end.name))?;
    let spec = blockhaul_catalog::Spec::parse(running.storage().as_ref())?;
    Ok(To::Open(spec, stack, Some(running.clone())))
}
