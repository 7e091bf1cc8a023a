//! The list of the points of a store.

use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use blockhaul_catalog::rounded_size;
use blockhaul_store::{BackupPoint, Store};
use blockhaul_transfer::one_word;
use serde_json::{Value, json};

use crate::error::{BackupError, BackupErrorKind, BackupStep, Result};
use crate::pull::is_repository;

/// A point of a store, and its file.
#[derive(Debug, Clone)]
pub struct PointEntry {
    /// The facts that the store records.
    pub point: BackupPoint,
    /// The file with the data of the point.
    pub file: PathBuf,
    /// Bytes that the file occupies; 0 if it is missing.
    pub stored: u64,
}

/// The points of a store.
#[derive(Debug, Clone)]
pub struct PointList {
    /// The points, the oldest first.
    pub points: Vec<PointEntry>,
    /// The name of the point that an earlier pull has begun and not completed.
    pub unfinished: Option<String>,
}

/// The points of the store in `dir`. A store whose first pull has not ended has none.
///
/// # Errors
/// If the directory is not a store, or its manifest is invalid.
pub fn list_points(dir: &Path) -> Result<PointList> {
    let failed = |error| BackupError::of_store(BackupStep::OpenStore, dir, error);
    let store = if !is_repository(dir) && Store::is_begun(dir) {
        Store::open_or_new(dir).map_err(failed)?
    } else {
        open_store(dir)?
    };
    let points = store.points().iter().map(|point| entry(&store, point)).collect();
    let unfinished = store.unfinished().map_err(failed)?.map(|point| point.name);
    Ok(PointList { points, unfinished })
}

/// Opens a store for reading.
pub(crate) fn open_store(dir: &Path) -> Result<Store> {
    if is_repository(dir) {
        let text = format!(
            "{} is a repository, and its points are snapshots: list, check and prune them with restic snapshots, check \
             and forget; restore with blockhaul copy restic:REPO#SNAPSHOT/PATH TARGET",
            dir.display()
        );
        let error = BackupError::new(BackupErrorKind::Request, BackupStep::OpenStore, text);
        return Err(error.in_store(dir));
    }
    Store::open(dir).map_err(|error| BackupError::of_store(BackupStep::OpenStore, dir, error))
}

fn entry(store: &Store, point: &BackupPoint) -> PointEntry {
    PointEntry { point: point.clone(), file: store.raw(point.file()), stored: stored(store, point) }
}

/// Bytes that the file of a point occupies; 0 if it is missing.
pub(crate) fn stored(store: &Store, point: &BackupPoint) -> u64 {
    // Blocks of 512 bytes (stat(2)).
    let data = std::fs::metadata(store.raw(point.file()));
    data.map_or(0, |data| data.blocks().saturating_mul(512))
}

/// Seconds since 1970 as a time in UTC; `-` if it is not in the calendar.
pub(crate) fn made_at(seconds: u64) -> String {
    let seconds = i64::try_from(seconds).ok();
    let at = seconds.and_then(|seconds| jiff::Timestamp::from_second(seconds).ok());
    at.map_or_else(|| "-".to_string(), |at| at.strftime("%Y-%m-%dT%H:%M:%SZ").to_string())
}

impl PointList {
    /// The points as a table for users.
    pub fn text(&self) -> String {
        let PointList { points, unfinished } = self;
        let mut rows =
            vec![["POINT", "MADE", "KIND", "SIZE", "STORED", "CHECKPOINT"].map(String::from)];
        rows.extend(points.iter().map(PointEntry::row));
        if let Some(name) = unfinished {
            let of = [
                one_word(name),
                "-".into(),
                "unfinished".into(),
                "-".into(),
                "-".into(),
                "-".into(),
            ];
            rows.push(of);
        }
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

    /// The points for programs.
    pub fn json(&self) -> Value {
        let points: Vec<_> = self.points.iter().map(PointEntry::json).collect();
        json!({ "points": points, "unfinished": self.unfinished })
    }
}

impl PointEntry {
    fn row(&self) -> [String; 6] {
        let PointEntry { point, stored, .. } = self;
        [
            one_word(&point.name),
            made_at(point.created),
            if point.full().is_some() { "full" } else { "increment" }.to_string(),
            rounded_size(point.size),
            rounded_size(*stored),
            one_word(&point.checkpoint),
        ]
    }

    /// The point for programs.
    fn json(&self) -> Value {
        let PointEntry { point, file, stored } = self;
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
}
