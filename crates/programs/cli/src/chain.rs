//! `blockhaul chain`: lists, checks, merges and prunes the points of a store.

use std::collections::BTreeSet;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use blockhaul_block::Error;
use blockhaul_catalog::{Intent, Spec};
use blockhaul_engine::{Manifest, Options, Progress};
use blockhaul_io::{Config, Pool, Runtime};
use blockhaul_store::{Fold, Point, Store, Writer};
use serde_json::{Value, json};

use crate::args::{self, ChainCommand};
use crate::exit::{self, Failure, Outcome, plain, stored};
use crate::pull::digests;
use crate::{devices, logger, out};

/// Longest file with digests, in bytes: far more than the engine makes of the largest disk.
const DIGESTS_MAX: u64 = 1 << 30;

/// Runs `blockhaul chain`.
pub fn run(args: &args::Chain) -> Outcome {
    logger::start(false);
    match &args.command {
        ChainCommand::List { dir, json } => list(&Store::open(dir).map_err(stored)?, *json),
        ChainCommand::Check { dir, point, engine } => {
            let store = Store::open(dir).map_err(stored)?;
            check_all(&engine.config(0), &store, point.as_deref())
        }
        ChainCommand::Merge { dir, no_check, engine } => {
            let mut work = Work::begin(dir, engine.config(0), !no_check)?;
            if !work.complete_fold()? && !work.fold(true)? {
                let text = format!(
                    "{} has no increment on its oldest point: there is nothing to merge",
                    dir.display()
                );
                return Err(Failure::usage(text));
            }
            work.tell()
        }
        ChainCommand::Abandon { dir } => abandon(dir),
        ChainCommand::Prune { dir, keep, no_check, engine } => {
            let mut work = Work::begin(dir, engine.config(0), !no_check)?;
            work.complete_fold()?;
            loop {
                let extra = work.writer.store().points().len().saturating_sub(*keep as usize);
                let is_done = extra == 0
                    || !work.writer.drop_oldest().map_err(stored)? && !work.fold(extra == 1)?;
                if is_done {
                    break;
                }
            }
            work.tell()
        }
    }
}

/// Removes the point that an interrupted pull has begun.
fn abandon(dir: &Path) -> Outcome {
    // A directory without backups is not made one.
    if !Store::is_begun(dir) {
        Store::open(dir).map_err(stored)?;
        let text = format!("{} has no unfinished point: there is nothing to remove", dir.display());
        return Err(Failure::usage(text));
    }
    let mut writer = Writer::lock(dir).map_err(stored)?;
    let name = writer.unfinished().map_or_else(String::new, |point| point.name.clone());
    writer.abandon().map_err(stored)?;
    let text = format!("the unfinished point {name:?} is removed");
    out::print(format!("{}\n", out::one_line(&text)).as_bytes())?;
    Ok(0)
}

/// Prints the points.
fn list(store: &Store, as_json: bool) -> Outcome {
    let points = store.points();
    if as_json {
        let all: Vec<Value> = points.iter().map(|point| as_value(store, point)).collect();
        out::print(format!("{}\n", json!({ "points": all })).as_bytes())?;
        return Ok(0);
    }
    let mut rows =
        vec![["POINT", "MADE", "KIND", "SIZE", "STORED", "CHECKPOINT"].map(String::from)];
    rows.extend(points.iter().map(|point| {
        [
            out::one_word(&point.name),
            made_at(point),
            if point.full().is_some() { "full" } else { "increment" }.to_string(),
            point.size.to_string(),
            stored_bytes(store, point).to_string(),
            out::one_word(&point.checkpoint),
        ]
    }));
    let widths: Vec<usize> = (0..6)
        .map(|column| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0))
        .collect();
    let mut text = String::new();
    for row in &rows {
        let cells = row.iter().zip(&widths).map(|(cell, width)| format!("{cell:width$}"));
        text += cells.collect::<Vec<_>>().join("  ").trim_end();
        text.push('\n');
    }
    out::print(text.as_bytes())?;
    Ok(0)
}

fn as_value(store: &Store, point: &Point) -> Value {
    let increment = point.increment();
    json!({
        "name": point.name,
        "checkpoint": point.checkpoint,
        "kind": if increment.is_some() { "increment" } else { "full" },
        "parent": increment.map(|increment| &increment.parent),
        "bitmap": increment.map(|increment| &increment.bitmap),
        "changed": increment.map(|increment| increment.changed),
        "size": point.size,
        "stored": stored_bytes(store, point),
        "created": made_at(point),
        "file": store.raw(point.file()).display().to_string(),
        "digest": point.digest,
    })
}

/// When a point was made, in UTC.
fn made_at(point: &Point) -> String {
    let seconds = i64::try_from(point.created).ok();
    let at = seconds.and_then(|seconds| jiff::Timestamp::from_second(seconds).ok());
    at.map_or_else(|| "-".to_string(), |at| at.strftime("%Y-%m-%dT%H:%M:%SZ").to_string())
}

/// Bytes that the data of a point occupies; 0 if its file is missing.
fn stored_bytes(store: &Store, point: &Point) -> u64 {
    // Blocks of 512 bytes (stat(2)).
    std::fs::metadata(store.raw(point.file())).map_or(0, |data| data.blocks().saturating_mul(512))
}

/// What a check has found.
#[derive(Debug, Default)]
pub(crate) struct Checked {
    /// Damage, a line each.
    pub(crate) problems: Vec<String>,
    /// Files whose data was read and is right.
    right: usize,
    /// Files without digests.
    unknown: usize,
}

/// Runs `blockhaul chain check`.
fn check_all(config: &Config, store: &Store, name: Option<&str>) -> Outcome {
    let points = match name {
        Some(name) => std::slice::from_ref(store.point(Some(name)).map_err(stored)?),
        None => store.points(),
    };
    let found = check(config, store, points)?;
    let mut text: String = found.problems.iter().map(|line| format!("damaged: {line}\n")).collect();
    let count = points.len();
    let right = found.right;
    let unknown = found.unknown;
    if found.problems.is_empty() {
        text += &match (count, right) {
            (1, 1) => "1 point: its file is as it was written".to_string(),
            _ => format!("{count} points: {right} files are as they were written"),
        };
        text += &match unknown {
            0 => "\n".to_string(),
            _ => format!(", {unknown} have no digests\n"),
        };
    }
    for orphan in if name.is_none() { store.orphans().map_err(stored)? } else { Vec::new() } {
        text += &out::one_line(&format!("note: {orphan} belongs to no complete point"));
        text.push('\n');
    }
    out::print(text.as_bytes())?;
    Ok(if found.problems.is_empty() { 0 } else { exit::DIFFERENT })
}

/// Checks all files that points need, each once.
pub(crate) fn check(config: &Config, store: &Store, points: &[Point]) -> Result<Checked, Failure> {
    let runtime = start(config)?;
    let mut checked = Checked::default();
    let mut seen = BTreeSet::new();
    for point in points {
        if let Err(error) = store.check(point) {
            checked.problems.push(out::one_line(&format!("point {:?}: {error}", point.name)));
            continue;
        }
        for one in store.chain(point).map_err(stored)? {
            let folding = one.folding().map(|folding| (one.number, &folding.digest));
            for (number, digest) in [Some((one.file(), &one.digest)), folding].into_iter().flatten()
            {
                if seen.insert(number) {
                    check_file(&runtime, store, (number, digest.as_deref()), &mut checked);
                }
            }
        }
    }
    Ok(checked)
}

/// Compares a file with its digests.
fn check_file(
    runtime: &Runtime,
    store: &Store,
    (number, digest): (u32, Option<&str>),
    checked: &mut Checked,
) {
    let Some(digest) = digest else {
        checked.unknown += 1;
        return;
    };
    match differences(runtime, store, number, digest) {
        Ok(differences) if differences.is_empty() => checked.right += 1,
        Ok(differences) => {
            let path = store.raw(number);
            checked.problems.extend(differences.iter().map(|(at, len)| {
                format!("{}: {len} bytes at offset {at} have changed", path.display())
            }));
        }
        Err(error) => checked.problems.push(out::one_line(&error.to_string())),
    }
}

/// Where a file differs from its digests.
fn differences(
    runtime: &Runtime,
    store: &Store,
    number: u32,
    digest: &str,
) -> Result<Vec<(u64, u64)>, Error> {
    let path = store.digests(number);
    let failed = |error| Error::system(format!("cannot read {}", path.display()), error);
    let mut text = String::new();
    let file = std::fs::File::open(&path).map_err(failed)?;
    let mut file = std::io::Read::take(file, DIGESTS_MAX);
    std::io::Read::read_to_string(&mut file, &mut text).map_err(failed)?;
    let wrong = |why: &str| {
        Error::new(blockhaul_block::Kind::Invalid, format!("{}: {why}", path.display()))
    };
    let kept: Manifest = text.parse().map_err(|error: Error| wrong(&error.text()))?;
    if kept.digest() != digest {
        return Err(wrong("these are not the digests that the store lists"));
    }
    let raw = store.raw(number);
    let like = kept.clone();
    let found = runtime.block_on(move || async move {
        let registry = devices::registry(Duration::ZERO);
        let stack = registry.open(&Spec::Path(raw), Vec::new(), Intent::READ).await?;
        let options = Options::default();
        let progress = Arc::new(Progress::new());
        let pool = Pool::new(options.memory());
        let found = blockhaul_engine::manifest(&stack, Some(&like), &options, &pool, &progress);
        found.await.map_err(|failed| failed.error)
    })?;
    Ok(kept.differences(&found))
}

fn start(config: &Config) -> Result<Runtime, Failure> {
    Runtime::start(config).map_err(|error| {
        Failure::new(exit::FAILED, format!("cannot start workers: {}", plain(&error)))
    })
}

/// Merging and pruning.
struct Work {
    writer: Writer,
    config: Config,
    /// Check files before they are merged, and write digests of the result.
    with_digests: bool,
    /// Points before.
    before: usize,
}

impl Work {
    fn begin(dir: &Path, config: Config, with_digests: bool) -> Result<Work, Failure> {
        // A directory without backups is not made one.
        Store::open(dir).map_err(stored)?;
        let writer = Writer::lock(dir).map_err(stored)?;
        let before = writer.store().points().len();
        Ok(Work { writer, config, with_digests, before })
    }

    /// Completes a merge that was interrupted; `false`: there was none.
    fn complete_fold(&mut self) -> Result<bool, Failure> {
        let oldest = self.writer.store().points().first();
        let is_folding = oldest.is_some_and(|oldest| oldest.folding().is_some());
        if is_folding { self.copy(true) } else { Ok(false) }
    }

    /// Merges the oldest increment; `false`: there is none. `is_last`: the result is not merged again at
    /// once, so that it gets digests.
    fn fold(&mut self, is_last: bool) -> Result<bool, Failure> {
        let store = self.writer.store();
        let Some(next) = store.points().get(1).filter(|next| next.increment().is_some()) else {
            return Ok(false);
        };
        if self.with_digests {
            let found = check(&self.config, store, std::slice::from_ref(next))?;
            if let Some(problem) = found.problems.first() {
                let text = format!(
                    "{problem}: nothing was merged; make a full backup, or merge it as it is with --no-check"
                );
                return Err(Failure::new(exit::DIFFERENT, text));
            }
        }
        self.copy(is_last)
    }

    /// Copies the increment into the full backup.
    fn copy(&mut self, is_last: bool) -> Result<bool, Failure> {
        let Some(fold) = self.writer.begin_fold().map_err(stored)? else { return Ok(false) };
        let to = fold.to.clone();
        let runtime = start(&self.config)?;
        let with_digests = self.with_digests && is_last;
        let made = runtime.block_on(move || async move {
            copy(fold).await.map_err(|error| stored(error).with_status(exit::TARGET))?;
            if with_digests { digests(to).await.map(Some) } else { Ok(None) }
        })?;
        let made = made.as_ref().map(|(text, digest)| (text.as_str(), digest.as_str()));
        self.writer.end_fold(made).map_err(stored)?;
        Ok(true)
    }

    /// Prints what is left.
    fn tell(&self) -> Outcome {
        let points = self.writer.store().points();
        let oldest = points.first().map_or("", |oldest| &oldest.name);
        let removed = self.before.saturating_sub(points.len());
        let text =
            format!("removed {removed}, kept {}; the oldest point is {oldest}", points.len());
        out::print(format!("{}\n", out::one_line(&text)).as_bytes())?;
        Ok(0)
    }
}

async fn copy(fold: Fold) -> Result<(), Error> {
    let registry = devices::registry(Duration::ZERO);
    let source = registry.open(&Spec::Path(fold.from), Vec::new(), Intent::READ).await?;
    let target = registry.open(&Spec::Path(fold.to), Vec::new(), Intent::TARGET).await?;
    let options =
        Options { ranges: Some(fold.ranges.list().into()), flush: true, ..Options::default() };
    let pool = Pool::new(options.memory());
    let progress = Arc::new(Progress::new());
    blockhaul_engine::copy(&source, &target, &options, &pool, &progress).await?;
    Ok(())
}
