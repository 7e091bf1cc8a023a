//! `blockhaul chain`: lists, checks, merges and prunes the points of a store.

use std::path::Path;
use std::time::Duration;

use blockhaul_backups::{BackupContext, ChainChange, CheckReport, PointEntry, StoreDamage};
use serde_json::{Value, json};

use crate::args::{self, ChainCommand};
use crate::exit::{self, CommandResult};
use crate::{devices, logger, out};

/// Runs `blockhaul chain`.
pub fn run(args: &args::ChainArgs) -> CommandResult {
    logger::start(false);
    match &args.command {
        ChainCommand::List { dir, json } => list(&blockhaul_backups::list_points(dir)?, *json),
        ChainCommand::Check { dir, point, engine } => {
            let context = context(engine.config(0));
            let report = blockhaul_backups::check_chain(&context, dir, point.as_deref())?;
            out::print(check_text(&report).as_bytes())?;
            Ok(if report.damage.is_empty() { 0 } else { exit::DIFFERENT })
        }
        ChainCommand::Merge { dir, no_check, engine } => {
            let context = context(engine.config(0));
            tell(&blockhaul_backups::merge_oldest(&context, dir, !no_check)?)
        }
        ChainCommand::Abandon { dir } => abandon(dir),
        ChainCommand::Prune { dir, keep, no_check, engine } => {
            let context = context(engine.config(0));
            tell(&blockhaul_backups::prune_points(&context, dir, *keep, !no_check)?)
        }
    }
}

/// The devices of this program, with these workers.
pub(crate) fn context(workers: blockhaul_io::RuntimeConfig) -> BackupContext {
    BackupContext { registry: devices::registry(Duration::ZERO), workers }
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

/// Prints the number of points that are left.
fn tell(ChainChange { removed, kept, oldest }: &ChainChange) -> CommandResult {
    let text = format!("removed {removed}, kept {kept}; the oldest point is {oldest}");
    out::print(format!("{}\n", out::one_line(&text)).as_bytes())?;
    Ok(0)
}
