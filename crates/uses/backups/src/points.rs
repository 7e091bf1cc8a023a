//! The list of the points of a store.

use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use blockhaul_store::{BackupPoint, Store};

use crate::error::{BackupError, BackupStep, Result};

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

/// The points of the store in `dir`, the oldest first.
///
/// # Errors
/// If the directory is not a store, or its manifest is invalid.
pub fn list_points(dir: &Path) -> Result<Vec<PointEntry>> {
    let store = open_store(dir)?;
    Ok(store.points().iter().map(|point| entry(&store, point)).collect())
}

/// Opens a store for reading.
pub(crate) fn open_store(dir: &Path) -> Result<Store> {
    Store::open(dir).map_err(|error| BackupError::of_store(BackupStep::OpenStore, dir, error))
}

fn entry(store: &Store, point: &BackupPoint) -> PointEntry {
    let file = store.raw(point.file());
    // Blocks of 512 bytes (stat(2)).
    let stored = std::fs::metadata(&file).map_or(0, |data| data.blocks().saturating_mul(512));
    PointEntry { point: point.clone(), file, stored }
}
