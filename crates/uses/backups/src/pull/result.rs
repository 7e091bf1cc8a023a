//! The result of a pull, for users and for programs.

use std::path::{Path, PathBuf};

use blockhaul_store::Store;
use blockhaul_transfer::{TransferOptions, one_line};
use serde_json::{Value, json};

use super::request::{PointKind, PointPlan, PullDisk};

/// The result of a disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PullResult {
    /// The name of the disk.
    pub disk: String,
    /// The directory of its store.
    pub store: String,
    /// The point that is made.
    pub point: PointPlan,
    /// How the disk ended.
    pub outcome: PullOutcome,
    /// What happens to the unfinished point of an earlier pull, if there is one; known before a copy only.
    pub unfinished: Option<UnfinishedPoint>,
}

/// What happens to a point that an earlier pull has begun and not completed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum UnfinishedPoint {
    /// Its copy goes on, with these files.
    Resumed(PointFiles),
    /// Its copy is removed.
    Discarded,
}

/// The files of a store for the copy of a new point, with absolute paths.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PointFiles {
    /// The file that is written.
    pub data: PathBuf,
    /// The journal of the copy.
    pub journal: PathBuf,
    /// The list of what an increment holds; `None`: the point is a full backup.
    pub ranges: Option<PathBuf>,
}

impl PointFiles {
    /// The files of the point with this number.
    pub(super) fn new(store: &Store, number: u32, is_increment: bool) -> PointFiles {
        let dir = std::fs::canonicalize(store.dir()).unwrap_or_else(|_| store.dir().into());
        let absolute =
            |path: PathBuf| path.file_name().map_or_else(PathBuf::new, |name| dir.join(name));
        PointFiles {
            data: absolute(store.raw(number)),
            journal: absolute(store.journal(number)),
            ranges: is_increment.then(|| absolute(store.ranges_file(number))),
        }
    }

    /// Sets the options without which the copy makes no point: journal, ranges and flush.
    pub fn set_options(&self, options: &mut TransferOptions) {
        options.journal = Some(self.journal.clone());
        options.ranges.clone_from(&self.ranges);
        options.ranges_alone = self.ranges.is_some();
        options.flush = true;
        options.into_store = true;
    }
}

/// How a disk ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PullOutcome {
    /// The point existed.
    Already,
    /// It was not copied.
    NotStarted,
    /// It would be copied.
    Planned,
    /// The point exists now.
    Complete,
    /// There is no point, for this reason.
    Failed(String),
}

impl PullResult {
    /// The result of a disk that is not copied yet.
    pub fn new(disk: &PullDisk, point: PointPlan) -> PullResult {
        let outcome = match point.kind {
            PointKind::Existing => PullOutcome::Already,
            _ => PullOutcome::NotStarted,
        };
        PullResult {
            disk: disk.name.clone(),
            store: disk.store.display().to_string(),
            point,
            outcome,
            unfinished: None,
        }
    }

    /// The result of a disk that would be copied.
    pub(crate) fn planned(
        disk: &PullDisk,
        point: PointPlan,
        unfinished: Option<UnfinishedPoint>,
    ) -> PullResult {
        let mut result = PullResult { unfinished, ..PullResult::new(disk, point) };
        if result.outcome == PullOutcome::NotStarted {
            result.outcome = PullOutcome::Planned;
        }
        result
    }

    /// The result of a disk of a machine whose point in time has not begun.
    pub(crate) fn foreseen(disk: &str, store: &Path, point: PointPlan) -> PullResult {
        let store = store.display().to_string();
        // What a run has left is never resumed: its moment is over.
        let (outcome, unfinished) = (PullOutcome::Planned, None);
        PullResult { disk: disk.to_string(), store, point, outcome, unfinished }
    }

    fn text(&self) -> Option<String> {
        let PullResult { disk, point, .. } = self;
        let PointPlan { name, size, kind, data, .. } = point;
        let is = if self.outcome == PullOutcome::Planned { "would be" } else { "is" };
        let mut text = match (&self.outcome, kind) {
            // Standard error says why.
            (PullOutcome::NotStarted | PullOutcome::Failed(_), _) => return None,
            (PullOutcome::Already, _) | (_, PointKind::Existing) => {
                format!("{name} is complete already")
            }
            (_, PointKind::Full { reason }) => {
                let data = data.map(|data| format!(", {data} of data")).unwrap_or_default();
                format!("{name} {is} a full backup of {size} bytes{data}: {reason}")
            }
            (_, PointKind::Increment { parent, .. }) => {
                let of = format!("{name} {is} an increment of {parent}");
                match point.changed() {
                    Some(changed) => format!("{of}: {changed} of {size} bytes have changed"),
                    None => format!("{of}, which has {size} bytes"),
                }
            }
        };
        if self.outcome == PullOutcome::Planned {
            text += &format!("; in {}", self.store);
            text += match &self.unfinished {
                Some(UnfinishedPoint::Resumed(_)) => ", where the unfinished pull is resumed",
                Some(UnfinishedPoint::Discarded) => ", where the unfinished pull is discarded",
                None => "",
            };
        }
        Some(one_line(&format!("disk {disk}: {text}")))
    }

    fn json(&self) -> Value {
        let (state, error) = match &self.outcome {
            PullOutcome::Already => ("already", None),
            PullOutcome::NotStarted => ("not started", None),
            PullOutcome::Planned => ("planned", None),
            PullOutcome::Complete => ("complete", None),
            PullOutcome::Failed(error) => ("failed", Some(error)),
        };
        let PointPlan { name, checkpoint, size, kind, data, .. } = &self.point;
        let mut value = json!({
            "disk": self.disk, "store": self.store, "point": name,
            "checkpoint": checkpoint, "size": size, "state": state, "error": error,
        });
        if let Some(data) = data {
            value["data"] = (*data).into();
        }
        if let Some(unfinished) = &self.unfinished {
            let is_resumed = matches!(unfinished, UnfinishedPoint::Resumed(_));
            value["unfinished"] = if is_resumed { "resumed" } else { "discarded" }.into();
        }
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

/// Lines for users.
pub fn pull_text(disks: &[PullResult]) -> String {
    disks.iter().filter_map(PullResult::text).map(|line| line + "\n").collect()
}

/// The results for programs.
pub fn pull_json(disks: &[PullResult]) -> Value {
    json!({ "disks": disks.iter().map(PullResult::json).collect::<Vec<_>>() })
}
