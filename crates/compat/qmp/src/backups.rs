//! Backups, as the monitor protocol begins them.

use std::sync::Arc;
use std::time::Duration;

use blockhaul_block::{Can, Compression};
use blockhaul_jobs::{
    BackupConfig, BackupDisk, BackupSource, BitmapStep, FrozenBitmap, OpenExport, SnapshotConfig,
};
use blockhaul_snapshot::{DirtyBitmap, PointOptions, ViewTrim};
use blockhaul_transfer::NamedOption;
use serde_json::Value;

use crate::commands::{Arguments, needed, number, text};
use crate::error::{QmpError, Result};
use crate::job_setup::{JobDisk, check_same_size, target_of};
use crate::monitor::Monitor;
use crate::nodes::{BARRIER, NodeDisk, file_of};
use crate::points_in_time::on_failure;
use crate::state::JobNodes;

/// A backup whose arguments are checked; nothing has begun.
pub struct BackupPlan {
    pub item: BackupDisk,
    pub nodes: JobNodes,
    /// Changes of bitmaps at the moment of the backup.
    pub bitmap_steps: Vec<BitmapStep>,
}

impl Monitor {
    /// `blockdev-backup`.
    pub(crate) async fn backup(&self, arguments: &Arguments) -> Result<()> {
        let BackupPlan { item, nodes, bitmap_steps } = self.prepare_backup(arguments).await?;
        self.begin(BackupConfig { disks: vec![item], grouped: true, bitmap_steps }, vec![nodes])
            .await
    }

    /// Begins checked backups.
    pub(crate) async fn begin(&self, wanted: BackupConfig, nodes: Vec<JobNodes>) -> Result<()> {
        self.note_job_nodes(&nodes);
        let begun = self.jobs.backup(&self.table, wanted).await;
        if begun.is_err() {
            let ours = |one: &JobNodes| nodes.iter().any(|other| other.job == one.job);
            self.state().job_nodes.retain(|one| !ours(one));
        }
        begun?;
        Ok(())
    }

    /// Checks the arguments of a backup. Nothing has begun.
    pub(crate) async fn prepare_backup(&self, arguments: &Arguments) -> Result<BackupPlan> {
        let (source, target) = self.job_disks(arguments).await?;
        let settings = self.settings(arguments)?;
        let bitmap_use = BitmapUse::from_arguments(arguments)?;
        check_same_size(&source, &target)?;
        if settings.compress && !can_compress(&target) {
            let text = format!("Compression is not supported for this drive {}", target.name);
            return Err(QmpError::generic(text));
        }
        let bitmap = match bitmap_use {
            BitmapUse::None => None,
            BitmapUse::Selects { .. } => {
                Some(self.backup_bitmap(&source.name, needed(arguments, "bitmap")).await?)
            }
        };
        let nodes = JobNodes {
            job: settings.name.clone().unwrap_or_default(),
            source: source.name.clone(),
            target: target.name.clone(),
            bitmap: bitmap.as_ref().map(|bitmap| bitmap.name().to_string()),
        };
        let begin = SnapshotConfig {
            options: self.snapshot_options(arguments, &target),
            bitmap: nodes.bitmap.clone(),
            clears: matches!(bitmap_use, BitmapUse::Selects { clears: true }),
            start: None,
            trim: ViewTrim::Releases,
            within: BARRIER,
        };
        let (export, source, bitmap_steps) = self.backup_source(&source, bitmap, begin).await?;
        let item = BackupDisk {
            export,
            target: target_of(&target)?,
            options: copy_options(arguments),
            source,
            selects: nodes.bitmap.clone(),
            settings,
            resumes: None,
        };
        Ok(BackupPlan { item, nodes, bitmap_steps })
    }

    /// The bitmap that selects the blocks of a backup.
    async fn backup_bitmap(&self, node: &str, name: &str) -> Result<Arc<DirtyBitmap>> {
        self.free_bitmap(node, name).await.map_err(|error| {
            if error == QmpError::no_bitmap(name) {
                QmpError::generic(format!("Bitmap '{name}' could not be found"))
            } else {
                error
            }
        })
    }

    /// How the point in time of a backup keeps old contents.
    fn snapshot_options(&self, arguments: &Arguments, target: &JobDisk) -> PointOptions {
        let directory = self.node(&target.name);
        let directory = directory.and_then(|node| Some(file_of(&node)?.parent()?.to_path_buf()));
        PointOptions {
            directory: directory.filter(|directory| directory.is_dir()),
            // A write of the guest waits as long as it takes, as in QEMU.
            guest_timeout: Duration::ZERO,
            on_failure: on_failure(text(arguments, "on-cbw-error")),
            ..PointOptions::default()
        }
    }

    /// The export and the source of a backup, and the changes of its bitmap at its moment. A disk that cannot
    /// change needs no point in time that begins.
    async fn backup_source(
        &self,
        disk: &JobDisk,
        bitmap: Option<Arc<DirtyBitmap>>,
        begin: SnapshotConfig,
    ) -> Result<(Arc<OpenExport>, BackupSource, Vec<BitmapStep>)> {
        let frozen = match &disk.node_disk {
            NodeDisk::Frozen(frozen) => frozen,
            NodeDisk::Live(running) => {
                let source = if disk.device.facts().can.contains(Can::WRITE) {
                    BackupSource::Now(begin)
                } else {
                    BackupSource::Still(disk.device.clone(), None)
                };
                return Ok((running.clone(), source, Vec::new()));
            }
        };
        let bitmap = bitmap.map(FrozenBitmap::later);
        let shown = bitmap.iter().map(|bitmap| bitmap.dirty().clone()).collect();
        let view = self.view(frozen, shown).await?;
        let mut bitmap_steps: Vec<BitmapStep> = Vec::new();
        if let Some(bitmap) = bitmap.clone() {
            bitmap_steps.push(Box::new(move || bitmap.fill(begin.clears)));
        }
        let given_back = bitmap.filter(|_| begin.clears);
        Ok((self.live_below(frozen).await?, BackupSource::Still(view, given_back), bitmap_steps))
    }
}

/// Use of a bitmap by a backup.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum BitmapUse {
    None,
    /// The dirty blocks are copied. `clears`: they are clean at the moment of the backup, unless the job fails.
    Selects {
        clears: bool,
    },
}

impl BitmapUse {
    fn from_arguments(arguments: &Arguments) -> Result<BitmapUse> {
        let sync = needed(arguments, "sync");
        let bitmap = text(arguments, "bitmap");
        let mode = text(arguments, "bitmap-mode");
        let wrong = |text: &str| Err(QmpError::generic(text));
        match (sync, bitmap, mode) {
            ("incremental" | "bitmap", None, _) => Err(QmpError::generic(format!(
                "must provide a valid bitmap name for '{sync}' sync mode"
            ))),
            (_, None, Some(_)) => wrong("Cannot specify bitmap sync mode without a bitmap"),
            ("none", ..) => wrong(
                "Sync mode 'none' not supported: use nodes of copy-before-write and snapshot-access",
            ),
            (_, None, None) => Ok(BitmapUse::None),
            ("incremental", _, None | Some("on-success")) => {
                Ok(BitmapUse::Selects { clears: true })
            }
            ("incremental", ..) => {
                wrong("Bitmap sync mode must be 'on-success' when using sync mode 'incremental'")
            }
            (_, _, None) => wrong("Bitmap sync mode must be given when providing a bitmap"),
            ("bitmap", _, Some(mode)) => Ok(BitmapUse::Selects { clears: mode != "never" }),
            (sync, _, Some("never")) => Err(QmpError::generic(format!(
                "Bitmap sync mode 'never' has no meaningful effect when combined with sync mode '{sync}'"
            ))),
            (sync, ..) => Err(QmpError::generic(format!(
                "Sync mode '{sync}' with a bitmap is not supported: add or clear a bitmap in the same \
                 transaction"
            ))),
        }
    }
}

/// Whether the target of a job can store data compressed.
fn can_compress(disk: &JobDisk) -> bool {
    let NodeDisk::Live(running) = &disk.node_disk else { return false };
    let stack = running.stack.lock().expect("no panic under this lock");
    let compression = stack.as_ref().map(|stack| stack.device().facts().compression);
    compression.unwrap_or_default() != Compression::None
}

/// Options of `copy` for `x-perf`.
fn copy_options(arguments: &Arguments) -> Vec<NamedOption> {
    let mut options = Vec::new();
    let tuning = arguments.get("x-perf").and_then(Value::as_object);
    let workers = tuning.and_then(|tuning| number(tuning, "max-workers"));
    if let Some(workers) = workers.filter(|workers| (1..=64).contains(workers)) {
        options.push(NamedOption::new("connections", 1));
        options.push(NamedOption::new("requests", workers));
    }
    options
}
