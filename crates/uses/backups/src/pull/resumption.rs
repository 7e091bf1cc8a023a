//! Whether what an earlier pull has left is resumed.

use blockhaul_block::Error;
use blockhaul_store::{BackupPoint, Store};

use super::request::{PointKind, PointPlan, PullDisk};
use crate::error::{BackupError, BackupErrorKind, BackupStep, Result};

/// The beginning of the copy of a disk.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum PullStart {
    /// With what an earlier run has copied into the file of this number.
    Resumed(u32),
    /// With nothing; what an earlier run has copied is discarded.
    New,
}

/// Decides whether what an earlier run has left, the point `left`, is continued.
pub(super) fn pull_start(
    store: &Store,
    left: Option<&BackupPoint>,
    disk: &PullDisk,
    plan: &PointPlan,
    restart: bool,
) -> Result<PullStart> {
    let Some(left) = left else { return Ok(PullStart::New) };
    let failed = |error: Error| BackupError::of_store(BackupStep::Plan, &disk.store, error);
    let refused = |text| {
        let error = BackupError::new(BackupErrorKind::Open, BackupStep::Plan, text);
        Err(error.in_store(&disk.store))
    };
    let journal = store.journal(left.number);
    let dir = store.dir().display();
    let is_discarded = blockhaul_engine::discarding_journal(&journal).map_err(failed)?.is_some();
    let abandon = format!("if its source is gone: blockhaul chain abandon {dir}");
    if restart {
        if is_discarded {
            return refused(format!(
                "{}: what it records was discarded at the source, and is in {dir} only: resume the pull \
                 without --restart; {abandon}",
                journal.display()
            ));
        }
        blockhaul_engine::check_journal(&journal, true).map_err(failed)?;
        return Ok(PullStart::New);
    }
    if !journal.exists() {
        return Ok(PullStart::New);
    }
    let is_named = disk.point.is_some() && left.name == plan.name;
    let is_same = is_same_content(left, plan);
    if is_named && is_same && left.size == plan.size && left.checkpoint == plan.checkpoint {
        return Ok(PullStart::Resumed(left.number));
    }
    let is_increment = matches!(plan.kind, PointKind::Increment { .. });
    let why = match (is_named, left.increment().is_some(), is_same) {
        (false, ..) => format!("resume it with --point {:?}", left.name),
        (true, true, false) if !is_increment => {
            "it is an increment, and this pull makes a full backup".to_string()
        }
        (true, false, false) if is_increment => {
            "it is a full backup, and this pull makes an increment".to_string()
        }
        (true, _, false) => "the source now has other changes than when it began".to_string(),
        (true, _, true) => {
            "the source or the checkpoint is another one than when it began".to_string()
        }
    };
    let next = if is_discarded {
        format!("what it records was discarded at the source, and is in {dir} only; {abandon}")
    } else if is_named {
        "discard it with --restart".to_string()
    } else {
        "or discard it with --restart".to_string()
    };
    refused(format!("{dir} has an unfinished point {:?}: {why}; {next}", left.name))
}

/// Whether the point that was begun has the contents of the plan.
fn is_same_content(left: &BackupPoint, plan: &PointPlan) -> bool {
    match (left.increment(), &plan.kind, &plan.ranges) {
        (None, PointKind::Full { .. }, _) => true,
        (Some(increment), PointKind::Increment { parent, bitmap }, Some(ranges)) => {
            increment.parent == *parent
                && increment.bitmap == *bitmap
                && increment.ranges == ranges.digest()
        }
        _ => false,
    }
}
