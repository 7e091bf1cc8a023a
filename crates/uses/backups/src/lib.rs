//! Backups of disks in stores, which are directories with points in time.
//!
//! - [`list_points`], [`check_chain`], [`merge_oldest`], [`prune_points`] and [`abandon_point`] are the operations
//!   on the points of one store.
//! - A [`RetentionPolicy`] decides which points in time are kept; a [`ChainPlan`] says what happens to each point.
//! - A [`PullRequest`] becomes a [`PullPlan`]: a full backup or an increment of each disk. The caller copies the
//!   disks, and publishes the points.
//! - A [`RestoreRequest`] becomes the request of a copy, after its point was checked.
//! - A [`MachineBackup`] is a point in time of a virtual machine, whose disks are pulled.
//! - A [`BackupContext`] has the devices and the workers that an operation uses.
//! - A [`BackupError`] is data: its kind, the step, the store, and a remedy. Front ends choose exit statuses.
//!
//! Nothing here prints, handles signals or shows progress.

#![cfg_attr(not(test), warn(clippy::disallowed_methods))]
#![cfg_attr(not(test), warn(clippy::missing_errors_doc))]

mod chain;
mod chain_plan;
mod check;
mod context;
mod digests;
mod error;
mod machine;
mod points;
mod pull;
mod restore;
mod retention;

pub use chain::{ChainChange, abandon_point, merge_oldest, plan_merge, plan_prune, prune_points};
pub use chain_plan::{ChainPlan, PlannedPoint};
pub use check::{CheckReport, StoreDamage, check_chain};
pub use context::BackupContext;
pub use digests::FileDigests;
pub use error::{BackupError, BackupErrorKind, BackupStep};
pub use machine::{MachineAddress, MachineBackup, MachineDisk, MachineRequest, PointRequest};
pub use points::{PointEntry, PointList, list_points};
pub use pull::{
    ChangeBitmap, PointFiles, PointKind, PointPlan, PullDisk, PullMode, PullOutcome, PullPlan,
    PullRequest, PullResult, PullTarget, UnfinishedPoint, finish_pull, pull_json, pull_text,
};
pub use restore::RestoreRequest;
pub use retention::{KeepCount, KeepDuration, RetentionDecision, RetentionPolicy};
