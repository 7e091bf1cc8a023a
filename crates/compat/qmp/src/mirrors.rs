//! Mirrors, as the monitor protocol begins and changes them.

use blockhaul_jobs::{CopyMode, InitialCopy, Job, MirrorConfig};

use crate::commands::{Arguments, needed, text};
use crate::error::{QmpError, Result};
use crate::job_setup::{check_same_size, target_of};
use crate::monitor::Monitor;
use crate::nodes::{BARRIER, NodeDisk};
use crate::state::JobNodes;

impl Monitor {
    /// `blockdev-mirror`.
    pub(crate) async fn mirror(&self, arguments: &Arguments) -> Result<()> {
        let sync = needed(arguments, "sync");
        let initial = match (sync, text(arguments, "bitmap")) {
            ("full" | "top", None) => InitialCopy::All,
            ("none", None) => InitialCopy::Nothing,
            ("incremental" | "bitmap", Some(name)) => InitialCopy::Dirty(name.to_string()),
            _ => return Err(QmpError::generic(format!("Sync mode '{sync}' not supported"))),
        };
        if text(arguments, "replaces").is_some() {
            return Err(QmpError::generic("Parameter 'replaces' is not supported"));
        }
        let (source, target) = self.job_disks(arguments).await?;
        let NodeDisk::Live(running) = &source.node_disk else {
            return Err(QmpError::generic(format!("Node '{}' does not change", source.name)));
        };
        let settings = self.settings(arguments)?;
        if let InitialCopy::Dirty(name) = &initial {
            self.free_bitmap(&source.name, name).await?;
        }
        check_same_size(&source, &target)?;
        let nodes = JobNodes {
            job: settings.name.clone().unwrap_or_default(),
            source: source.name.clone(),
            target: target.name.clone(),
            bitmap: None,
        };
        let wanted = MirrorConfig {
            export: running.clone(),
            target: target_of(&target)?,
            options: Vec::new(),
            within: BARRIER,
            initial,
            copy_mode: copy_mode(arguments),
            settings,
            resumes: None,
        };
        let job = nodes.job.clone();
        self.note_job_nodes(&[nodes]);
        let begun = self.jobs.mirror(&self.table, wanted).await;
        if begun.is_err() {
            self.state().job_nodes.retain(|one| one.job != job);
        }
        begun?;
        Ok(())
    }

    /// Clients of a mirror have moved to its target: nodes and disks are the other way round.
    pub(crate) fn pivot(&self, job: &Job) {
        let nodes = self.state().job_nodes.iter().rfind(|one| one.job == job.name()).cloned();
        let Some(JobNodes { source, target, .. }) = nodes else { return };
        let (Some(from), Some(to)) = (self.running(&source), self.running(&target)) else { return };
        let old = job.mirror().and_then(|mirror| mirror.former_disk());
        if let (Some((old, storage)), Some(shared)) = (old, to.shared.clone()) {
            let device = self.table.config().served(&old, to.write);
            *to.storage.lock().expect("no panic under this lock") = storage;
            *to.stack.lock().expect("no panic under this lock") = Some(old);
            if let Ok(device) = device {
                drop(blockhaul_io::spawn(async move {
                    let barrier = blockhaul_catalog::Barrier::None;
                    // It has no clients.
                    let _ = shared.switch().swap(device, barrier, async || Ok(())).await;
                }));
            }
        }
        from.exchange_bitmap_stores(&to);
        from.claims.exchange(&from.owner, &to.owner);
        let mut state = self.state();
        state.moved.retain(|(node, _)| *node != source && *node != target);
        state.moved.push((source.clone(), to.name.clone()));
        state.moved.push((target.clone(), from.name.clone()));
        for export in &mut state.exports {
            if export.node == source {
                export.node.clone_from(&target);
                export.drive.clone_from(&target);
            }
        }
    }

    /// `block-job-change`: only a mirror's copy mode can change, as in QEMU from `background`.
    pub(crate) fn change_job(&self, job: &Job, arguments: &Arguments) -> Result<()> {
        let Some(mirror) = job.mirror() else {
            return Err(QmpError::generic("Job type does not support change"));
        };
        mirror.set_copy_mode(copy_mode(arguments));
        Ok(())
    }
}

/// When the target of a mirror has what clients write.
fn copy_mode(arguments: &Arguments) -> CopyMode {
    text(arguments, "copy-mode").and_then(CopyMode::parse).unwrap_or_default()
}
