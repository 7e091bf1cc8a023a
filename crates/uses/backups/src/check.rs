//! The check of the files of points by their digests.

use std::collections::BTreeSet;
use std::fmt;
use std::path::{Path, PathBuf};

use blockhaul_block::Error;
use blockhaul_io::Runtime;
use blockhaul_store::{BackupPoint, Store};
use blockhaul_transfer::one_line;
use serde_json::{Value, json};

use crate::context::BackupContext;
use crate::digests::{manifest, read_digests};
use crate::error::{BackupError, BackupStep, Result};
use crate::points::open_store;

/// Damage of a point or of a file of a store.
#[derive(Debug, Clone)]
pub enum StoreDamage {
    /// A file that the point needs is missing or invalid.
    Point {
        /// The name of the point.
        point: String,
        /// Why the point cannot be read.
        error: Error,
    },
    /// Data has changed since it was written.
    Data {
        /// The file.
        file: PathBuf,
        /// The offset, in bytes.
        at: u64,
        /// The length, in bytes.
        len: u64,
    },
    /// A file with data or digests cannot be read.
    Unreadable {
        /// Why, with the name of the file.
        error: Error,
    },
}

impl StoreDamage {
    fn json(&self) -> Value {
        let text = self.to_string();
        match self {
            StoreDamage::Point { point, .. } => json!({ "point": point, "error": text }),
            StoreDamage::Data { file, at, len } => {
                json!({ "file": file.display().to_string(), "offset": at, "length": len, "error": text })
            }
            StoreDamage::Unreadable { .. } => json!({ "error": text }),
        }
    }
}

impl fmt::Display for StoreDamage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            StoreDamage::Point { point, error } => write!(f, "point {point:?}: {error}"),
            StoreDamage::Data { file, at, len } => {
                write!(f, "{}: {len} bytes at offset {at} have changed", file.display())
            }
            StoreDamage::Unreadable { error } => error.fmt(f),
        }
    }
}

/// Result of a check.
#[derive(Debug, Clone, Default)]
pub struct CheckReport {
    /// Number of points.
    pub points: usize,
    /// Damage, in the order of the points.
    pub damage: Vec<StoreDamage>,
    /// Number of files whose data agrees with their digests.
    pub intact: usize,
    /// Number of files without digests, which were not read.
    pub without_digests: usize,
    /// Names of files that belong to no complete point; empty for the check of a single point.
    pub orphans: Vec<String>,
}

impl CheckReport {
    /// Lines for users.
    pub fn text(&self) -> String {
        let CheckReport { points, damage, intact, without_digests, orphans } = self;
        let line = |damage: &StoreDamage| format!("damaged: {}\n", one_line(&damage.to_string()));
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
            text += &one_line(&format!("note: {orphan} belongs to no complete point"));
            text.push('\n');
        }
        text
    }

    /// The report for programs.
    pub fn json(&self) -> Value {
        let CheckReport { points, damage, intact, without_digests, orphans } = self;
        json!({
            "points": points, "intact": intact, "without-digests": without_digests,
            "damage": damage.iter().map(StoreDamage::json).collect::<Vec<_>>(), "orphans": orphans,
        })
    }
}

/// Checks all files that the points of the store in `dir` need, or those of one point.
///
/// # Errors
/// If the store cannot be opened, or has no such point. Damage is no error.
pub fn check_chain(
    context: &BackupContext,
    dir: &Path,
    point: Option<&str>,
) -> Result<CheckReport> {
    let store = open_store(dir)?;
    let failed = |error| BackupError::of_store(BackupStep::Check, dir, error);
    if point.is_some() {
        let point = store.point(point).map_err(failed)?;
        return check_points(context, &store, std::slice::from_ref(point));
    }
    let report = check_points(context, &store, store.points())?;
    Ok(CheckReport { orphans: store.orphans().map_err(failed)?, ..report })
}

/// Checks all files that these points need, each once.
pub(crate) fn check_points(
    context: &BackupContext,
    store: &Store,
    points: &[BackupPoint],
) -> Result<CheckReport> {
    let runtime = context.start(BackupStep::Check)?;
    let report = CheckReport { points: points.len(), ..CheckReport::default() };
    let mut check = ChainCheck { context, runtime, store, seen: BTreeSet::new(), report };
    for point in points {
        check.point(point)?;
    }
    Ok(check.report)
}

/// A check of files of a store.
struct ChainCheck<'a> {
    context: &'a BackupContext,
    runtime: Runtime,
    store: &'a Store,
    /// The numbers of the files that were checked.
    seen: BTreeSet<u32>,
    report: CheckReport,
}

impl ChainCheck<'_> {
    fn point(&mut self, point: &BackupPoint) -> Result<()> {
        let store = self.store;
        if let Err(error) = store.check(point) {
            self.report.damage.push(StoreDamage::Point { point: point.name.clone(), error });
            return Ok(());
        }
        let chain = store.chain(point);
        let failed = |error| BackupError::of_store(BackupStep::Check, store.dir(), error);
        for one in chain.map_err(failed)? {
            let folding = one.folding().map(|folding| (one.number, &folding.digest));
            for (number, digest) in [Some((one.file(), &one.digest)), folding].into_iter().flatten()
            {
                if self.seen.insert(number) {
                    self.file(number, digest.as_deref());
                }
            }
        }
        Ok(())
    }

    /// Compares a file with its digests.
    fn file(&mut self, number: u32, digest: Option<&str>) {
        let Some(digest) = digest else {
            self.report.without_digests += 1;
            return;
        };
        match self.differences(number, digest) {
            Ok(differences) if differences.is_empty() => self.report.intact += 1,
            Ok(differences) => {
                let file = self.store.raw(number);
                let damage = |(at, len)| StoreDamage::Data { file: file.clone(), at, len };
                self.report.damage.extend(differences.into_iter().map(damage));
            }
            Err(error) => self.report.damage.push(StoreDamage::Unreadable { error }),
        }
    }

    /// The offsets and lengths at which a file differs from its digests.
    fn differences(&self, number: u32, digest: &str) -> Result<Vec<(u64, u64)>, Error> {
        let kept = read_digests(&self.store.digests(number), digest)?;
        let like = kept.clone();
        let file = self.store.raw(number);
        let registry = self.context.registry.clone();
        let progress = self.context.progress.clone();
        let found = self.runtime.block_on(move || async move {
            manifest(registry, file, Some(&like), &progress).await
        })?;
        Ok(kept.differences(&found))
    }
}
