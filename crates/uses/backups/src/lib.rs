//! Backups of disks in stores, which are directories with points in time.
//!
//! - [`list_points`], [`check_chain`], [`merge_oldest`], [`prune_points`] and [`abandon_point`] are the operations
//!   on the points of one store.
//! - A [`PullRequest`] becomes a [`PullPlan`]: a full backup or an increment of each disk. The caller copies the
//!   disks, and publishes the points.
//! - A [`RestoreRequest`] becomes the request of a copy, after its point was checked.
//! - A [`BackupContext`] has the devices and the workers that an operation uses.
//! - A [`BackupError`] is data: its kind, the step, the store, and a remedy. Front ends choose exit statuses.
//!
//! Nothing here prints, handles signals or shows progress.

#![cfg_attr(not(test), warn(clippy::disallowed_methods))]
#![cfg_attr(not(test), warn(clippy::missing_errors_doc))]

mod chain;
mod check;
mod context;
mod digests;
mod error;
mod points;
mod pull;
mod restore;

pub use chain::{ChainChange, abandon_point, merge_oldest, prune_points};
pub use check::{CheckReport, StoreDamage, check_chain};
pub use context::BackupContext;
pub use digests::FileDigests;
pub use error::{BackupError, BackupErrorKind, BackupStep};
pub use points::{PointEntry, list_points};
pub use pull::{
    ChangeBitmap, PointKind, PointPlan, PullDisk, PullMode, PullPlan, PullRequest, PullTarget,
};
pub use restore::RestoreRequest;
