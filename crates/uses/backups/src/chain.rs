//! Changes of the points of a store: merging, pruning, and removing a point that an interrupted pull has begun.

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use blockhaul_block::Error;
use blockhaul_catalog::{DeviceSpec, Intent, Registry};
use blockhaul_engine::{CopyProgress, EngineOptions};
use blockhaul_io::Pool;
use blockhaul_store::{BackupPoint, Fold, Store, StoreWriter};
use jiff::Timestamp;
use jiff::tz::TimeZone;

use crate::chain_plan::ChainPlan;
use crate::check::check_points;
use crate::context::BackupContext;
use crate::digests::FileDigests;
use crate::error::{BackupError, BackupErrorKind, BackupStep, Result};
use crate::points::open_store;
use crate::retention::{RetentionDecision, RetentionPolicy};

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
    if !work.complete_fold()? && !work.fold(0, true)? {
        return Err(nothing_to_merge(dir));
    }
    Ok(work.change())
}

/// What [`merge_oldest`] would do; nothing is changed.
///
/// # Errors
/// If the directory is not a store, a point that goes is being read, the list of what an increment holds is damaged, or
/// there is nothing to merge.
pub fn plan_merge(dir: &Path) -> Result<ChainPlan> {
    let store = open_store(dir)?;
    let is_folding = store.points().first().is_some_and(|oldest| oldest.folding().is_some());
    let next = store.points().get(1).filter(|next| next.increment().is_some());
    if is_folding || next.is_none() {
        return Err(nothing_to_merge(dir));
    }
    let decide = |index| match index {
        0 => RetentionDecision::default(),
        _ => RetentionDecision { reasons: vec!["not the oldest".into()] },
    };
    ChainPlan::new(&store, decide)
}

/// Removes the points of the store in `dir` that `policy` does not keep, by the times in the zone of this machine. The
/// newest point is kept in any case. What newer points need is merged, with `with_digests` as in [`merge_oldest`].
///
/// # Errors
/// If the policy has no rule, the store is in use, a file is damaged, or a file cannot be read, written or removed.
/// Each step is complete or has changed nothing, and the next prune goes on.
pub fn prune_points(
    context: &BackupContext,
    dir: &Path,
    policy: &RetentionPolicy,
    with_digests: bool,
) -> Result<ChainChange> {
    let kept = plan_prune(dir, policy)?.kept_names();
    let mut work = ChainWork::begin(context, dir, with_digests)?;
    work.complete_fold()?;
    // Points that were added meanwhile are kept.
    let known: HashSet<String> = work.names().collect();
    let is_removed = |name: &str| known.contains(name) && !kept.contains(name);
    while let Some(step) = work.next_step(&is_removed) {
        if !work.take(step)? {
            break;
        }
    }
    Ok(work.change())
}

/// What [`prune_points`] would do; nothing is changed.
///
/// # Errors
/// If the policy has no rule, the directory is not a store, a point that goes is being read, or the list of what an
/// increment holds is damaged.
pub fn plan_prune(dir: &Path, policy: &RetentionPolicy) -> Result<ChainPlan> {
    if policy.is_empty() {
        let text = "no rule says which points are kept: add --keep-last, --keep-daily, --keep-weekly, \
                    --keep-monthly, --keep-yearly or --keep-within";
        return Err(BackupError::new(BackupErrorKind::Request, BackupStep::Prune, text));
    }
    let store = open_store(dir)?;
    let zone = TimeZone::system();
    let time = |point: &BackupPoint| {
        let seconds = i64::try_from(point.created).ok();
        let at = seconds.and_then(|seconds| Timestamp::from_second(seconds).ok());
        at.unwrap_or(Timestamp::MAX).to_zoned(zone.clone())
    };
    let times: Vec<_> = store.points().iter().map(time).collect();
    let mut decisions = policy.decide(&times);
    if let Some(newest) = decisions.last_mut().filter(|newest| !newest.is_kept()) {
        newest.reasons.push("newest point".into());
    }
    ChainPlan::new(&store, |index| decisions[index].clone())
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

fn nothing_to_merge(dir: &Path) -> BackupError {
    let text = format!(
        "{} has no increment on its oldest point: there is nothing to merge",
        dir.display()
    );
    nothing_to_do(BackupStep::Merge, dir, text)
}

fn nothing_to_do(step: BackupStep, dir: &Path, text: String) -> BackupError {
    BackupError::new(BackupErrorKind::Request, step, text).in_store(dir)
}

fn lock(dir: &Path) -> Result<StoreWriter> {
    StoreWriter::lock(dir).map_err(|error| BackupError::of_store(BackupStep::OpenStore, dir, error))
}

/// A step of pruning, by the indices of points.
enum RemovalStep {
    /// Nothing needs the points from the first index to the one before the second.
    Remove(usize, usize),
    /// The full backup takes in the increment on it. `is_last`: and no further one.
    Fold { full: usize, is_last: bool },
    /// The increments from the first index to the second become one.
    Join(usize, usize),
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

    fn failed(&self, step: BackupStep) -> impl Fn(Error) -> BackupError + use<> {
        let dir = self.writer.store().dir().to_path_buf();
        move |error| BackupError::of_store(step, &dir, error)
    }

    fn names(&self) -> impl Iterator<Item = String> {
        self.writer.store().points().iter().map(|point| point.name.clone())
    }

    /// The next step towards a store without the points that `is_removed`; `None`: there is none.
    fn next_step(&self, is_removed: &impl Fn(&str) -> bool) -> Option<RemovalStep> {
        let points = self.writer.store().points();
        let first = points.iter().position(|point| is_removed(&point.name))?;
        let run = points[first..].iter().take_while(|point| is_removed(&point.name)).count();
        let end = first + run;
        // The newest point is kept.
        let next = points.get(end)?;
        let full = (first..end).rev().find(|&index| points[index].full().is_some());
        Some(match full {
            _ if next.full().is_some() => RemovalStep::Remove(first, end),
            Some(full) if full > first => RemovalStep::Remove(first, full),
            Some(full) => RemovalStep::Fold { full, is_last: full + 1 == end },
            None => RemovalStep::Join(first, end),
        })
    }

    /// Takes a step; `false`: it was not possible.
    fn take(&mut self, step: RemovalStep) -> Result<bool> {
        match step {
            RemovalStep::Remove(first, end) => {
                let failed = self.failed(BackupStep::Prune);
                self.writer.remove(first, end).map_err(failed)
            }
            RemovalStep::Fold { full, is_last } => self.fold(full, is_last),
            RemovalStep::Join(first, last) => self.join(first, last).map(|()| true),
        }
    }

    /// Completes a merge that was interrupted; `false`: there was none.
    fn complete_fold(&mut self) -> Result<bool> {
        match self.writer.folding() {
            Some(full) => self.copy_fold(full, true),
            None => Ok(false),
        }
    }

    /// Merges the increment on the full backup at the index `full`; `false`: there is none. `is_last`: the result is
    /// not merged again at once, so that it gets digests.
    fn fold(&mut self, full: usize, is_last: bool) -> Result<bool> {
        let store = self.writer.store();
        let Some(next) = store.points().get(full + 1).filter(|next| next.increment().is_some())
        else {
            return Ok(false);
        };
        self.check_before(std::slice::from_ref(next))?;
        self.copy_fold(full, is_last)
    }

    /// Refuses points whose files are damaged.
    fn check_before(&self, points: &[BackupPoint]) -> Result<()> {
        if !self.with_digests {
            return Ok(());
        }
        let store = self.writer.store();
        let report = check_points(self.context, store, points)?;
        let Some(damage) = report.damage.first() else { return Ok(()) };
        let text = format!("{damage}: nothing was merged");
        let error = BackupError::new(BackupErrorKind::Damage, BackupStep::Merge, text);
        let remedy = "; make a full backup, or merge it as it is with --no-check";
        Err(error.in_store(store.dir()).and(remedy))
    }

    /// Copies an increment into the full backup at the index `full`.
    fn copy_fold(&mut self, full: usize, is_last: bool) -> Result<bool> {
        let failed = self.failed(BackupStep::Merge);
        let Some(fold) = self.writer.begin_fold(full).map_err(failed)? else { return Ok(false) };
        let to = fold.to.clone();
        let made = self.copy(vec![fold], to, self.with_digests && is_last)?;
        let failed = self.failed(BackupStep::Merge);
        self.writer.end_fold(made.as_ref().map(FileDigests::pair)).map_err(failed)?;
        Ok(true)
    }

    /// Joins the increments from the index `first` to `last` to one.
    fn join(&mut self, first: usize, last: usize) -> Result<()> {
        self.check_before(&self.writer.store().points()[first..=last])?;
        let failed = self.failed(BackupStep::Merge);
        let mut join = self.writer.begin_join(first, last).map_err(failed)?;
        let parts = std::mem::take(&mut join.parts);
        let made = self.copy(parts, join.to.clone(), self.with_digests)?;
        let failed = self.failed(BackupStep::Merge);
        self.writer.end_join(join, made.as_ref().map(FileDigests::pair)).map_err(failed)
    }

    /// Copies the parts of a file, and makes its digests.
    fn copy(
        &self,
        parts: Vec<Fold>,
        to: PathBuf,
        with_digests: bool,
    ) -> Result<Option<FileDigests>> {
        let runtime = self.context.start(BackupStep::Merge)?;
        let registry = self.context.registry.clone();
        let progress = self.context.progress.clone();
        let failed = self.failed(BackupStep::Merge);
        runtime.block_on(move || async move {
            for part in parts {
                let copied = copy(&registry, part, &progress).await;
                copied.map_err(|error| failed(error).with_kind(BackupErrorKind::Target))?;
            }
            if !with_digests {
                return Ok(None);
            }
            let made = FileDigests::counted(registry, to, &progress).await;
            made.map(Some).map_err(|error| BackupError::of_file(BackupStep::Merge, &error))
        })
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
