//! Reports about jobs.

use serde::Serialize;

use crate::values::CopyMode;

/// A job, in the list `jobs` and in the replies to requests about it.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct JobReport {
    /// Number of the job; never used again by the same server.
    pub job: u64,
    /// Name of the job in the monitor protocol.
    pub name: String,
    /// `backup` or `mirror`.
    #[serde(rename = "type")]
    pub kind: &'static str,
    /// Name of the export that is copied.
    pub export: String,
    /// Target, for people.
    pub target: String,
    /// `running`, `paused`, `ready`, `completing`, `pending`, `completed`, `cancelled`, `interrupted` or
    /// `failed`.
    pub state: &'static str,
    /// State of the devices: `ok`, `nospace` or `failed`.
    pub io_status: &'static str,
    /// Bytes that are done.
    pub done: u64,
    /// Bytes that are to be done, as far as known.
    pub total: u64,
    /// Bytes of data that the job writes per second now; 0 when it has ended.
    pub data_rate: u64,
    /// Seconds since the job began, or that it took.
    pub seconds: f64,
    /// Time at which the job ended, in seconds since 1970.
    pub end_time: Option<f64>,
    /// Result of a job that is complete, in one sentence.
    pub summary: Option<String>,
    /// Counters of a job that is complete.
    pub result: Option<String>,
    /// Reason why the job has failed.
    pub error: Option<String>,
    /// Members that depend on the type and the state.
    #[serde(flatten)]
    pub figures: JobFigures,
}

/// The members of a [`JobReport`] that depend on the type and the state of the job.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(untagged)]
pub enum JobFigures {
    /// A backup.
    Backup(BackupFigures),
    /// A mirror.
    Mirror(MirrorFigures),
    /// A job of an earlier server.
    Interrupted(InterruptedFigures),
}

/// Figures of a backup.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct BackupFigures {
    /// Bytes of the point in time that were copied and need not be saved any more.
    pub released: u64,
    /// Bytes of old contents that were saved.
    pub saved: u64,
    /// Bytes of old contents that are stored now.
    pub kept: u64,
    /// Number of writes of clients that waited until old contents were saved.
    pub writes_delayed: u64,
    /// Longest of these waits, in seconds.
    pub longest_delay: f64,
}

/// Figures of a mirror.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct MirrorFigures {
    /// Whether the mirror could complete.
    pub ready: bool,
    /// When the target has what clients write.
    pub copy_mode: CopyMode,
    /// Whether the target equals the disk, and each write goes to both.
    pub synced: bool,
    /// Bytes that have changed and are not copied yet.
    pub dirty: u64,
    /// Number of rounds that are complete.
    pub rounds: u64,
    /// Rate of the latest round of some size, in bytes per second.
    pub rate: Option<f64>,
    /// Seconds that clients would wait if the mirror completed now.
    pub predicted_downtime: Option<f64>,
    /// Seconds that clients have waited.
    pub downtime: Option<f64>,
    /// Reason why the latest attempt to complete was given up.
    pub postponed: Option<String>,
}

/// Figures of a job of an earlier server.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct InterruptedFigures {
    /// How the job can be resumed; none: it cannot.
    pub resume: Option<ResumeMode>,
    /// Bytes that are still to be copied.
    pub dirty: Option<u64>,
    /// Time at which the job began, in seconds since 1970.
    pub begun: Option<u64>,
}

/// How a job of an earlier server can be resumed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum ResumeMode {
    /// As it was: a mirror.
    Same,
    /// At another point in time: a backup.
    NewMoment,
}
