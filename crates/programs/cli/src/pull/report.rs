//! The result of `blockhaul pull`, for users and for programs.

use serde_json::{Value, json};

use super::decide::What;
use super::wanted::{Found, WantedDisk};
use crate::exit::Failure;
use crate::out;

/// The result of a disk.
pub(super) struct Row {
    disk: String,
    store: String,
    /// The name of the point.
    pub(super) point: String,
    checkpoint: String,
    size: u64,
    kind: RowKind,
    state: State,
}

enum RowKind {
    Full { why: String },
    Increment { parent: String, bitmap: String, changed: u64 },
}

/// How a disk ended.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum State {
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
    pub(super) fn new(wanted: &WantedDisk, found: &Found) -> Row {
        let kind = match &found.what {
            What::Increment { parent, bitmap, ranges } => RowKind::Increment {
                parent: parent.clone(),
                bitmap: bitmap.clone(),
                changed: ranges.total(),
            },
            What::Full { why } => RowKind::Full { why: why.clone() },
            What::Already => RowKind::Full { why: String::new() },
        };
        let state = match found.what {
            What::Already => State::Already,
            _ => State::NotStarted,
        };
        Row {
            disk: wanted.name.clone(),
            store: wanted.dir.display().to_string(),
            point: found.name.clone(),
            checkpoint: found.checkpoint.clone(),
            size: found.size,
            kind,
            state,
        }
    }

    fn text(&self) -> Option<String> {
        let Row { disk, point, size, .. } = self;
        let what = match (&self.state, &self.kind) {
            (State::Already, _) => format!("{point} is complete already"),
            (State::Complete, RowKind::Full { why }) => {
                format!("{point} is a full backup of {size} bytes: {why}")
            }
            (State::Complete, RowKind::Increment { parent, changed, .. }) => {
                format!(
                    "{point} is an increment of {parent}: {changed} of {size} bytes have changed"
                )
            }
            // Standard error says why.
            (State::NotStarted | State::Failed(_), _) => return None,
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
        let mut value = json!({
            "disk": self.disk, "store": self.store, "point": self.point,
            "checkpoint": self.checkpoint, "size": self.size, "state": state, "error": error,
        });
        let kind = match &self.kind {
            _ if self.state == State::Already => json!({}),
            RowKind::Full { why } => json!({ "kind": "full", "reason": why }),
            RowKind::Increment { parent, bitmap, changed } => {
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
pub(super) fn filled(rows: Vec<Row>, results: Vec<Option<Result<(), String>>>) -> Vec<Row> {
    let mut results = results.into_iter();
    let mut rows = rows;
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
