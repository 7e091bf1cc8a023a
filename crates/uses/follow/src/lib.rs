//! Warm moves: the disks of a machine in use are copied in rounds, each of what has changed since the one before, until
//! the last round, for which the machine is stopped, is short enough.
//!
//! - [`FollowMachine`]: the states of a move, without I/O: which round is next, what its figures predict, when to cut over.
//! - [`FollowPlatform`]: what a move needs of the world. [`run_follow`] carries out the actions of the machine on it.
//! - [`FollowPlan`]: the file of `blockhaul follow`. [`FollowRun`]: the platform of a plan: a provider command, and copies
//!   by `transfer`.
//! - [`protocol`]: requests to a provider, and its replies.

#![cfg_attr(not(test), warn(clippy::missing_errors_doc))]

mod command;
mod error;
mod limits;
mod machine;
mod plan;
mod platform;
mod prediction;
pub mod protocol;
mod run;
mod state_file;

pub use error::{FollowError, FollowErrorKind};
pub use limits::{FollowLimits, VerifyScope};
pub use machine::{FollowAction, FollowMachine, FollowPhase, FollowState, FollowedDisk, RoundCopy};
pub use plan::{CutOver, FollowDisk, FollowPlan};
pub use platform::{FollowPlatform, FollowResult, run_follow};
pub use prediction::{CopyFigures, RoundFigures, predict};
pub use run::{FollowControl, FollowRun, follow, run_plan};
