//! What a job is to do: disks, target, options, and how the job is controlled.

use std::sync::Arc;
use std::time::Duration;

use blockhaul_block::Device;
use blockhaul_catalog::{DeviceSpec, Stack};
use blockhaul_control::{CopyMode, ErrorPolicy};
use blockhaul_transfer::{NamedOption, TransferErrorKind};

use crate::error::JobError;
use crate::export::{OpenExport, TargetGuard};
use crate::export_bitmaps::FrozenBitmap;
use crate::job_files::JobRecord;
use crate::mirror::InitialCopy;
use crate::snapshot::{BitmapStep, SnapshotConfig};

/// A backup of one or more disks.
pub struct BackupConfig {
    /// The disks, all at one point in time.
    pub disks: Vec<BackupDisk>,
    /// Whether the others are cancelled if one fails, and a rate is for all together.
    pub grouped: bool,
    /// Changes of bitmaps at the point in time, once nothing can fail any more.
    pub bitmap_steps: Vec<BitmapStep>,
}

impl BackupConfig {
    /// A backup of these disks as one group.
    pub fn new(disks: Vec<BackupDisk>) -> BackupConfig {
        BackupConfig { disks, grouped: true, bitmap_steps: Vec::new() }
    }
}

/// A disk of a backup, and its target.
pub struct BackupDisk {
    /// The disk.
    pub export: Arc<OpenExport>,
    /// The target of the copy.
    pub target: JobTarget,
    /// Options of the copy by the names of the command line, such as `retries`.
    pub options: Vec<NamedOption>,
    /// The contents that are read.
    pub source: BackupSource,
    /// The bitmap that selects what is copied; `None`: everything.
    pub selects: Option<String>,
    /// How the job is controlled.
    pub settings: JobSettings,
    /// The job of an earlier server that this one continues.
    pub resumes: Option<Arc<JobRecord>>,
}

impl BackupDisk {
    /// A backup of the disk at a point in time that begins now; if `begin` names a bitmap, of what that
    /// marks. The target keeps what a backup with a bitmap does not overwrite.
    pub fn new(
        export: Arc<OpenExport>,
        target: impl Into<JobTarget>,
        begin: SnapshotConfig,
    ) -> BackupDisk {
        BackupDisk {
            export,
            target: target.into(),
            options: Vec::new(),
            selects: begin.bitmap.clone(),
            source: BackupSource::Now(begin),
            settings: JobSettings::default(),
            resumes: None,
        }
    }
}

/// The contents that a backup reads.
pub enum BackupSource {
    /// A point in time that begins now.
    Now(SnapshotConfig),
    /// A device that does not change, and the bitmap that was frozen with it.
    Still(Arc<dyn Device>, Option<FrozenBitmap>),
}

/// A mirror of a disk.
pub struct MirrorConfig {
    /// The disk.
    pub export: Arc<OpenExport>,
    /// The target of the copy.
    pub target: JobTarget,
    /// Options of the copy by the names of the command line, such as `retries`.
    pub options: Vec<NamedOption>,
    /// Maximum time for requests in flight to end when the job begins.
    pub within: Duration,
    /// The ranges that are copied before changes are.
    pub initial: InitialCopy,
    /// When the target has what clients write.
    pub copy_mode: CopyMode,
    /// How the job is controlled.
    pub settings: JobSettings,
    /// The job of an earlier server that this one continues.
    pub resumes: Option<Arc<JobRecord>>,
}

/// The target of a job.
#[derive(Clone)]
pub enum JobTarget {
    /// A target in the notation of `copy`.
    Spec(DeviceSpec),
    /// The description of an open device, which is neither created nor emptied, and its disk, if it is
    /// one of the server.
    Open(DeviceSpec, Stack, Option<Arc<OpenExport>>),
}

impl From<DeviceSpec> for JobTarget {
    fn from(spec: DeviceSpec) -> JobTarget {
        JobTarget::Spec(spec)
    }
}

impl JobTarget {
    /// The description of the target.
    pub fn spec(&self) -> &DeviceSpec {
        match self {
            JobTarget::Spec(spec) | JobTarget::Open(spec, ..) => spec,
        }
    }

    /// Claims a target that is a disk of the server.
    pub(crate) async fn begin(&self) -> Result<Option<TargetGuard>, JobError> {
        let JobTarget::Open(spec, _, Some(running)) = self else { return Ok(None) };
        if let DeviceSpec::Scheme { scheme, rest } = spec
            && blockhaul_client::is_own_export(&format!("{scheme}:{rest}")).await.unwrap_or(false)
        {
            let text = format!("{spec} is an export of this server: choose another target");
            return Err(JobError::new(TransferErrorKind::Open, text));
        }
        running.begin_writing().map(Some)
    }
}

/// How a job is controlled.
#[derive(Debug, Clone, Default)]
pub struct JobSettings {
    /// The name of the job; `None`: `job` and its number.
    pub name: Option<String>,
    /// Whether the job waits until it is finalized ([`Job::finalize`](crate::Job::finalize)) once everything is copied.
    pub finalized_by_hand: bool,
    /// Whether the job stays in the list of the monitor protocol until it is dismissed.
    pub dismissed_by_hand: bool,
    /// The policy for errors of the source.
    pub on_source_error: ErrorPolicy,
    /// The policy for errors of the target.
    pub on_target_error: ErrorPolicy,
    /// Rate limit in bytes per second; 0: none.
    pub speed: u64,
    /// Whether the target stores the data compressed, if it can.
    pub compress: bool,
}
