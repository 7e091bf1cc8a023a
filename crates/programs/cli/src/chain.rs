//! `blockhaul chain`: lists, checks, merges and prunes the points of a store.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use blockhaul_backups::{
    BackupContext, BackupError, ChainChange, CheckReport, PointEntry, StoreDamage,
};
use serde_json::{Value, json};

use crate::args::{self, ChainCommand, ChainReporting};
use crate::exit::{self, CommandFailure, CommandResult};
use crate::progress::WorkProgress;
use crate::{devices, logger, out};

/// Runs `blockhaul chain`.
pub fn run(args: &args::ChainArgs) -> CommandResult {
    logger::start(false);
    match &args.command {
        ChainCommand::List { dir, json } => list(&blockhaul_backups::list_points(dir)?, *json),
        ChainCommand::Check { dir, point, reporting } => {
            let report = reporting.run("check", |context| {
                blockhaul_backups::check_chain(context, dir, point.as_deref())
            })?;
            out::result(reporting.json, &check_value(&report), &check_text(&report))?;
            Ok(if report.damage.is_empty() { 0 } else { exit::DIFFERENT })
        }
        ChainCommand::Merge { dir, no_check, reporting } => {
            let merge = |context: &_| blockhaul_backups::merge_oldest(context, dir, !no_check);
            tell(&reporting.run("merge", merge)?, reporting.json)
        }
        ChainCommand::Abandon { dir } => abandon(dir),
        ChainCommand::Prune { dir, keep, no_check, reporting } => {
            let prune =
                |context: &_| blockhaul_backups::prune_points(context, dir, *keep, !no_check);
            tell(&reporting.run("prune", prune)?, reporting.json)
        }
    }
}

impl ChainReporting {
    /// Runs an operation on a store, and shows its progress.
    fn run<T>(
        &self,
        command: &'static str,
        operation: impl FnOnce(&BackupContext) -> Result<T, BackupError>,
    ) -> Result<T, CommandFailure> {
        let shown = WorkProgress::start(command, &self.reporting)?;
        let context =
            BackupContext { progress: shown.progress(), ..context(self.engine.config(0)) };
        let result = operation(&context);
        shown.finish(result.is_ok());
        Ok(result?)
    }
}

/// The devices of this program, with these workers.
pub(crate) fn context(workers: blockhaul_io::RuntimeConfig) -> BackupContext {
    let registry = devices::registry(Duration::ZERO);
    BackupContext { registry, workers, progress: Arc::default() }
}

/// Removes the point that an interrupted pull has begun.
fn abandon(dir: &Path) -> CommandResult {
    let name = blockhaul_backups::abandon_point(dir)?;
    let text = format!("the unfinished point {name:?} is removed");
    out::print(format!("{}\n", out::one_line(&text)).as_bytes())?;
    Ok(0)
}

/// Prints the points.
fn list(points: &[PointEntry], as_json: bool) -> CommandResult {
    let text = if as_json {
        let all: Vec<Value> = points.iter().map(as_value).collect();
        format!("{}\n", json!({ "points": all }))
    } else {
        table(points)
    };
    out::print(text.as_bytes())?;
    Ok(0)
}

fn table(points: &[PointEntry]) -> String {
    let mut rows =
        vec![["POINT", "MADE", "KIND", "SIZE", "STORED", "CHECKPOINT"].map(String::from)];
    rows.extend(points.iter().map(row));
    let widths: Vec<usize> = (0..6)
        .map(|column| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0))
        .collect();
    let mut text = String::new();
    for row in &rows {
        let cells = row.iter().zip(&widths).map(|(cell, width)| format!("{cell:width$}"));
        text += cells.collect::<Vec<_>>().join("  ").trim_end();
        text.push('\n');
    }
    text
}

fn row(PointEntry { point, stored, .. }: &PointEntry) -> [String; 6] {
    [
        out::one_word(&point.name),
        made_at(point.created),
        if point.full().is_some() { "full" } else { "increment" }.to_string(),
        point.size.to_string(),
        stored.to_string(),
        out::one_word(&point.checkpoint),
    ]
}

fn as_value(PointEntry { point, file, stored }: &PointEntry) -> Value {
    let increment = point.increment();
    json!({
        "name": point.name,
        "checkpoint": point.checkpoint,
        "kind": if increment.is_some() { "increment" } else { "full" },
        "parent": increment.map(|increment| &increment.parent),
        "bitmap": increment.map(|increment| &increment.bitmap),
        "changed": increment.map(|increment| increment.changed),
        "size": point.size,
        "stored": stored,
        "created": made_at(point.created),
        "file": file.display().to_string(),
        "digest": point.digest,
    })
}

/// Seconds since 1970 as a time in UTC.
fn made_at(seconds: u64) -> String {
    let seconds = i64::try_from(seconds).ok();
    let at = seconds.and_then(|seconds| jiff::Timestamp::from_second(seconds).ok());
    at.map_or_else(|| "-".to_string(), |at| at.strftime("%Y-%m-%dT%H:%M:%SZ").to_string())
}

/// The result of a check, in lines.
fn check_text(report: &CheckReport) -> String {
    let CheckReport { points, damage, intact, without_digests, orphans } = report;
    let line = |damage: &StoreDamage| format!("damaged: {}\n", out::one_line(&damage.to_string()));
    let mut text: String = damage.iter().map(line).collect();
    if damage.is_empty() {
        text += &match (points, intact) {
            (1, 1) => "1 point: its file is as it was written".to_string(),
            _ => format!("{points} points: {intact} files are as they were written"),
        };
        text += &match without_digests {
            0 => "\n".to_string(),
            _ => format!(", {without_digests} have no digests\n"),
        };
    }
    for orphan in orphans {
        text += &out::one_line(&format!("note: {orphan} belongs to no complete point"));
        text.push('\n');
    }
    text
}

/// The result of a check, as JSON.
fn check_value(report: &CheckReport) -> Value {
    let CheckReport { points, damage, intact, without_digests, orphans } = report;
    let one = |damage: &StoreDamage| match damage {
        StoreDamage::Data { file, at, len } => {
            let file = file.display().to_string();
            json!({ "message": damage.to_string(), "file": file, "offset": at, "length": len })
        }
        _ => json!({ "message": damage.to_string() }),
    };
    json!({
        "points": points,
        "intact": intact,
        "without-digests": without_digests,
        "damage": damage.iter().map(one).collect::<Vec<_>>(),
        "orphans": orphans,
    })
}

/// Prints the number of points that are left.
fn tell(ChainChange { removed, kept, oldest }: &ChainChange, as_json: bool) -> CommandResult {
    let text = format!("removed {removed}, kept {kept}; the oldest point is {oldest}");
    let value = json!({ "removed": removed, "kept": kept, "oldest": oldest });
    out::result(as_json, &value, &format!("{}\n", out::one_line(&text)))?;
    Ok(0)
}
