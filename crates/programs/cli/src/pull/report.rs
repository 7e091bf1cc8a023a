//! The result of `blockhaul pull`, for users and for programs.

use blockhaul_backups::{PointKind, PointPlan, PullDisk};
use serde_json::{Value, json};

use crate::exit::CommandFailure;
use crate::out;

/// The result of a disk.
pub(super) struct PullResult {
    disk: String,
    store: String,
    point: PointPlan,
    state: PullOutcome,
}

/// How a disk ended.
#[derive(Debug, PartialEq, Eq)]
enum PullOutcome {
    /// The point existed.
    Already,
    /// It was not copied.
    NotStarted,
    /// The point exists now.
    Complete,
    /// There is no point.
    Failed(String),
}

impl PullResult {
    /// The result of a disk that is not copied yet.
    pub(super) fn new(disk: &PullDisk, point: PointPlan) -> PullResult {
        let state = match point.kind {
            PointKind::Existing => PullOutcome::Already,
            _ => PullOutcome::NotStarted,
        };
        PullResult {
            disk: disk.name.clone(),
            store: disk.store.display().to_string(),
            point,
            state,
        }
    }

    fn text(&self) -> Option<String> {
        let PullResult { disk, point: PointPlan { name, size, kind, .. }, .. } = self;
        let what = match (&self.state, kind) {
            // Standard error says why.
            (PullOutcome::NotStarted | PullOutcome::Failed(_), _) => return None,
            (PullOutcome::Already, _) | (_, PointKind::Existing) => {
                format!("{name} is complete already")
            }
            (PullOutcome::Complete, PointKind::Full { reason }) => {
                format!("{name} is a full backup of {size} bytes: {reason}")
            }
            (PullOutcome::Complete, PointKind::Increment { parent, .. }) => {
                let changed = self.point.changed().unwrap_or(0);
                format!(
                    "{name} is an increment of {parent}: {changed} of {size} bytes have changed"
                )
            }
        };
        Some(out::one_line(&format!("disk {disk}: {what}")))
    }

    fn json(&self) -> Value {
        let (state, error) = match &self.state {
            PullOutcome::Already => ("already", None),
            PullOutcome::NotStarted => ("not started", None),
            PullOutcome::Complete => ("complete", None),
            PullOutcome::Failed(error) => ("failed", Some(error)),
        };
        let PointPlan { name, checkpoint, size, kind, .. } = &self.point;
        let mut value = json!({
            "disk": self.disk, "store": self.store, "point": name,
            "checkpoint": checkpoint, "size": size, "state": state, "error": error,
        });
        let kind = match kind {
            PointKind::Existing => json!({}),
            PointKind::Full { reason } => json!({ "kind": "full", "reason": reason }),
            PointKind::Increment { parent, bitmap } => {
                let changed = self.point.changed();
                json!({ "kind": "increment", "parent": parent, "bitmap": bitmap, "changed": changed })
            }
        };
        if let (Value::Object(value), Value::Object(kind)) = (&mut value, kind) {
            value.extend(kind);
        }
        value
    }
}

/// The rows with the results of those that were copied, in the same order.
pub(super) fn filled(
    mut rows: Vec<PullResult>,
    results: Vec<Option<Result<(), String>>>,
) -> Vec<PullResult> {
    let mut results = results.into_iter();
    for row in rows.iter_mut().filter(|row| row.state != PullOutcome::Already) {
        row.state = match results.next().flatten() {
            None => PullOutcome::NotStarted,
            Some(Ok(())) => PullOutcome::Complete,
            Some(Err(error)) => PullOutcome::Failed(error),
        };
    }
    rows
}

/// Prints the result.
pub(super) fn print(rows: &[PullResult], as_json: bool) -> Result<(), CommandFailure> {
    let text = if as_json {
        format!("{}\n", json!({ "disks": rows.iter().map(PullResult::json).collect::<Vec<_>>() }))
    } else {
        rows.iter().filter_map(PullResult::text).map(|line| line + "\n").collect()
    };
    out::print(text.as_bytes()).map(drop)
}
