//! The result of `blockhaul pull`, for users and for programs.

use blockhaul_backups::{PointKind, PointPlan, PullDisk};
use serde_json::{Value, json};

use crate::exit::Failure;
use crate::out;

/// The result of a disk.
pub(super) struct Row {
    disk: String,
    store: String,
    point: PointPlan,
    state: State,
}

/// How a disk ended.
#[derive(Debug, PartialEq, Eq)]
enum State {
    /// The point existed.
    Already,
    /// It was not copied.
    NotStarted,
    /// The point exists now.
    Complete,
    /// There is no point.
    Failed(String),
}

impl Row {
    /// The result of a disk that is not copied yet.
    pub(super) fn new(disk: &PullDisk, point: PointPlan) -> Row {
        let state = match point.kind {
            PointKind::Existing => State::Already,
            _ => State::NotStarted,
        };
        Row { disk: disk.name.clone(), store: disk.store.display().to_string(), point, state }
    }

    fn text(&self) -> Option<String> {
        let Row { disk, point: PointPlan { name, size, kind, .. }, .. } = self;
        let what = match (&self.state, kind) {
            // Standard error says why.
            (State::NotStarted | State::Failed(_), _) => return None,
            (State::Already, _) | (_, PointKind::Existing) => format!("{name} is complete already"),
            (State::Complete, PointKind::Full { reason }) => {
                format!("{name} is a full backup of {size} bytes: {reason}")
            }
            (State::Complete, PointKind::Increment { parent, .. }) => {
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
            State::Already => ("already", None),
            State::NotStarted => ("not started", None),
            State::Complete => ("complete", None),
            State::Failed(error) => ("failed", Some(error)),
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
pub(super) fn filled(mut rows: Vec<Row>, results: Vec<Option<Result<(), String>>>) -> Vec<Row> {
    let mut results = results.into_iter();
    for row in rows.iter_mut().filter(|row| row.state != State::Already) {
        row.state = match results.next().flatten() {
            None => State::NotStarted,
            Some(Ok(())) => State::Complete,
            Some(Err(error)) => State::Failed(error),
        };
    }
    rows
}

/// Prints the result.
pub(super) fn print(rows: &[Row], as_json: bool) -> Result<(), Failure> {
    let text = if as_json {
        format!("{}\n", json!({ "disks": rows.iter().map(Row::json).collect::<Vec<_>>() }))
    } else {
        rows.iter().filter_map(Row::text).map(|line| line + "\n").collect()
    };
    out::print(text.as_bytes()).map(drop)
}
