//! The exports of a running server, and what is done with their disks while clients use them: dirty bitmaps,
//! points in time, backup and mirror jobs.
//!
//! - [`WantedExports`] describes exports, and [`Table`] opens, changes and closes them.
//! - A [`Running`] is one open export, with its layers, bitmaps and points in time. [`BitmapFiles`] keeps bitmaps
//!   beyond the end of a server.
//! - [`Jobs`] begins backups ([`WantedJobs`]) and mirrors ([`WantedMirror`]). [`JobFiles`] keeps jobs, which the
//!   next server resumes.
//! - A [`JobError`] is data: its kind and a remedy. Front ends choose exit statuses and error numbers.
//!
//! All waiting is on workers of `blockhaul_io`; files are read and written on threads that may block.

#![cfg_attr(not(test), warn(clippy::disallowed_methods))]
#![cfg_attr(not(test), warn(clippy::missing_errors_doc))]

mod bitmap_files;
mod client_devices;
mod compressed;
mod error;
mod export;
mod export_config;
mod export_table;
mod job_errors;
mod job_files;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod job_model;
mod job_state;
mod jobs;
mod kept_jobs;
mod mirror;
mod snapshot;
mod trace;

pub use bitmap_files::BitmapFiles;
pub use error::JobError;
pub use export::{Running, SnapshotOf, TargetGuard};
pub use export_config::{CopyHook, One, WantedExports, intent};
pub use export_table::{NameReservation, Table};
pub use job_errors::{Action, OnError};
pub use job_files::{JobFiles, Kept};
pub use job_state::{Status, Verb};
pub use jobs::{
    Happened, Item, Job, Jobs, Observer, Settings, Source, To, WantedJobs, WantedMirror,
};
pub use mirror::{CopyMode, Ending, First, Mirror, WITHIN};
pub use snapshot::{AtOnce, Begin, Begun, GRANULARITY, NewBitmap, Taken, Tracked};
