//! Changes of the points of a store: merging, pruning, and removing a point that an interrupted pull has begun.

use std::path::Path;
use std::sync::Arc;

use blockhaul_block::Error;
use blockhaul_catalog::{DeviceSpec, Intent, Registry};
use blockhaul_engine::{CopyProgress, EngineOptions};
use blockhaul_io::Pool;
use blockhaul_store::{Fold, Store, StoreWriter};

use crate::check::check_points;
use crate::context::BackupContext;
use crate::digests::FileDigests;
use crate::error::{BackupError, BackupErrorKind, BackupStep, Result};
use crate::points::open_store;

/// Result of merging or pruning.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChainChange {
    /// Number of points that were removed.
    pub removed: usize,
    /// Number of points that are left.
    pub kept: usize,
    /// The name of the oldest point; empty if there is none.
    pub oldest: String,
}

/// Merges the oldest increment of the store in `dir` into the full backup below it, or completes a merge that
/// was interrupted. `with_digests`: the files are checked before, and the result gets digests.
///
/// # Errors
/// If there is no increment on the oldest point, the store is in use, a file is damaged, or a file cannot be
/// read or written.
pub fn merge_oldest(
    context: &BackupContext,
    dir: &Path,
    with_digests: bool,
) -> Result<ChainChange> {
    let mut work = ChainWork::begin(context, dir, with_digests)?;
    if !work.complete_fold()? && !work.fold(true)? {
        let text = format!(
            "{} has no increment on its oldest point: there is nothing to merge",
            dir.display()
        );
        return Err(nothing_to_do(BackupStep::Merge, dir, text));
    }
    Ok(work.change())
}

/// Removes the oldest points of the store in `dir` until `keep` are left; 0 is taken as 1. Points that newer
/// ones need are merged, with `with_digests` as in [`merge_oldest`].
///
/// # Errors
/// If the store is in use, a file is damaged, or a file cannot be read, written or removed.
pub fn prune_points(
    context: &BackupContext,
    dir: &Path,
    keep: u32,
    with_digests: bool,
) -> Result<ChainChange> {
    let mut work = ChainWork::begin(context, dir, with_digests)?;
    work.complete_fold()?;
    loop {
        let extra = work.writer.store().points().len().saturating_sub(keep.max(1) as usize);
        if extra == 0 || !work.drop_oldest()? && !work.fold(extra == 1)? {
            return Ok(work.change());
        }
    }
}

/// Removes the point that an interrupted pull has begun in the store in `dir`. Returns the name of the point.
///
/// # Errors
/// If there is no such point, the store is in use, or a file cannot be removed.
pub fn abandon_point(dir: &Path) -> Result<String> {
    // A directory without backups is not made one.
    if !Store::is_begun(dir) {
        open_store(dir)?;
        let text = format!("{} has no unfinished point: there is nothing to remove", dir.display());
        return Err(nothing_to_do(BackupStep::Abandon, dir, text));
    }
    let mut writer = lock(dir)?;
    let name = writer.unfinished().map_or_else(String::new, |point| point.name.clone());
    let removed = writer.abandon();
    removed.map_err(|error| BackupError::of_store(BackupStep::Abandon, dir, error))?;
    Ok(name)
}

fn nothing_to_do(step: BackupStep, dir: &Path, text: String) -> BackupError {
    BackupError::new(BackupErrorKind::Request, step, text).in_store(dir)
}

fn lock(dir: &Path) -> Result<StoreWriter> {
    StoreWriter::lock(dir).map_err(|error| BackupError::of_store(BackupStep::OpenStore, dir, error))
}

/// Merging and pruning.
struct ChainWork<'a> {
    context: &'a BackupContext,
    writer: StoreWriter,
    /// Check files before they are merged, and write digests of the result.
    with_digests: bool,
    /// Points before.
    before: usize,
}

impl ChainWork<'_> {
    fn begin<'a>(
        context: &'a BackupContext,
        dir: &Path,
        with_digests: bool,
    ) -> Result<ChainWork<'a>> {
        // A directory without backups is not made one.
        open_store(dir)?;
        let writer = lock(dir)?;
        let before = writer.store().points().len();
        Ok(ChainWork { context, writer, with_digests, before })
    }

    fn failed(&self, step: BackupStep) -> impl FnOnce(Error) -> BackupError + use<> {
        let dir = self.writer.store().dir().to_path_buf();
        move |error| BackupError::of_store(step, &dir, error)
    }

    /// Removes the oldest point, if no newer one needs it; `false`: one needs it.
    fn drop_oldest(&mut self) -> Result<bool> {
        let failed = self.failed(BackupStep::Prune);
        self.writer.drop_oldest().map_err(failed)
    }

    /// Completes a merge that was interrupted; `false`: there was none.
    fn complete_fold(&mut self) -> Result<bool> {
        let oldest = self.writer.store().points().first();
        let is_folding = oldest.is_some_and(|oldest| oldest.folding().is_some());
        if is_folding { self.copy(true) } else { Ok(false) }
    }

    /// Merges the oldest increment; `false`: there is none. `is_last`: the result is not merged again at
    /// once, so that it gets digests.
    fn fold(&mut self, is_last: bool) -> Result<bool> {
        let store = self.writer.store();
        let Some(next) = store.points().get(1).filter(|next| next.increment().is_some()) else {
            return Ok(false);
        };
        if self.with_digests {
            let report = check_points(self.context, store, std::slice::from_ref(next))?;
            if let Some(damage) = report.damage.first() {
                let text = format!("{damage}: nothing was merged");
                let error = BackupError::new(BackupErrorKind::Damage, BackupStep::Merge, text);
                let remedy = "; make a full backup, or merge it as it is with --no-check";
                return Err(error.in_store(store.dir()).and(remedy));
            }
        }
        self.copy(is_last)
    }

    /// Copies the increment into the full backup.
    fn copy(&mut self, is_last: bool) -> Result<bool> {
        let failed = self.failed(BackupStep::Merge);
        let Some(fold) = self.writer.begin_fold().map_err(failed)? else { return Ok(false) };
        let to = fold.to.clone();
        let runtime = self.context.start(BackupStep::Merge)?;
        let with_digests = self.with_digests && is_last;
        let registry = self.context.registry.clone();
        let progress = self.context.progress.clone();
        let failed = self.failed(BackupStep::Merge);
        let made = runtime.block_on(move || async move {
            let copied = copy(&registry, fold, &progress).await;
            copied.map_err(|error| failed(error).with_kind(BackupErrorKind::Target))?;
            if !with_digests {
                return Ok(None);
            }
            let made = FileDigests::counted(registry, to, &progress).await;
            made.map(Some).map_err(|error| BackupError::of_file(BackupStep::Merge, &error))
        })?;
        let failed = self.failed(BackupStep::Merge);
        self.writer.end_fold(made.as_ref().map(FileDigests::pair)).map_err(failed)?;
        Ok(true)
    }

    fn change(&self) -> ChainChange {
        let points = self.writer.store().points();
        let oldest = points.first().map_or_else(String::new, |oldest| oldest.name.clone());
        let kept = points.len();
        ChainChange { removed: self.before.saturating_sub(kept), kept, oldest }
    }
}

async fn copy(registry: &Registry, fold: Fold, progress: &Arc<CopyProgress>) -> Result<(), Error> {
    let source = registry.open(&DeviceSpec::Path(fold.from), Vec::new(), Intent::READ).await?;
    let target = registry.open(&DeviceSpec::Path(fold.to), Vec::new(), Intent::TARGET).await?;
    let options = EngineOptions {
        ranges: Some(fold.ranges.list().into()),
        flush: true,
        ..EngineOptions::default()
    };
    let pool = Pool::new(options.memory());
    let progress = progress.part();
    blockhaul_engine::copy(&source, &target, &options, &pool, &progress).await?;
    Ok(())
}
