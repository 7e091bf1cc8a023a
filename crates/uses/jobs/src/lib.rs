//! The exports of a running server, and what is done with their disks while clients use them: dirty bitmaps,
//! points in time, backup and mirror jobs.
//!
//! - [`ExportTableConfig`] describes exports, and [`ExportTable`] opens, changes and closes them.
//! - An [`OpenExport`] is one open export, with its layers, bitmaps and points in time. [`BitmapFiles`] keeps bitmaps
//!   beyond the end of a server.
//! - [`Jobs`] begins backups ([`BackupConfig`]) and mirrors ([`MirrorConfig`]). [`JobFiles`] keeps jobs, which the
//!   next server resumes.
//! - [`jobs_table`] and its siblings are what `ctl` prints.
//! - A [`JobError`] is data: its kind and a remedy. Front ends choose exit statuses and error numbers.
//!
//! All waiting is on workers of `blockhaul_io`; files are read and written on threads that may block.

#![cfg_attr(not(test), warn(clippy::disallowed_methods))]
#![cfg_attr(not(test), warn(clippy::missing_errors_doc))]

mod backup_jobs;
mod bitmap_files;
mod client_devices;
mod compression;
mod error;
mod export;
mod export_bitmaps;
mod export_config;
mod export_table;
mod image_bitmaps;
mod job;
mod job_config;
mod job_copy;
mod job_errors;
mod job_files;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod job_model;
mod job_rate;
mod job_report;
mod job_state;
mod jobs;
mod mirror;
mod mirror_jobs;
mod resume;
mod snapshot;
mod status_tables;
mod trace;

pub use blockhaul_control::{CopyMode, ErrorPolicy};

pub use bitmap_files::BitmapFiles;
pub use error::JobError;
pub use export::{OpenExport, SnapshotOrigin, TargetGuard};
pub use export_bitmaps::{DEFAULT_GRANULARITY, FrozenBitmap, NewBitmap};
pub use export_config::{CopyHook, ExportConfig, ExportTableConfig, intent};
pub use export_table::{ExportTable, NameReservation};
pub use job::{Job, JobEvent, JobObserver};
pub use job_config::{
    BackupConfig, BackupDisk, BackupSource, JobSettings, JobTarget, MirrorConfig,
};
pub use job_errors::ErrorAction;
pub use job_files::{JobFiles, JobRecord};
pub use job_state::{JobCommand, JobStatus};
pub use jobs::Jobs;
pub use mirror::{CLIENT_WAIT, InitialCopy, Mirror, MirrorCompletion};
pub use snapshot::{BitmapStep, JobMap, OpenSnapshot, SnapshotConfig};
pub use status_tables::{clients_table, exports_table, jobs_table};
