//! Backups, as the monitor protocol begins them.

use std::path::{Path, PathBuf};
use std::time::Duration;

use blockhaul_block::{Can, Compression};
use blockhaul_jobs::{AtOnce, Begin, Item, Source, Taken, WantedJobs};
use blockhaul_snapshot::{Options, Trim};
use blockhaul_transfer::NamedOption;
use serde_json::Value;

use crate::commands::{Arguments, needed, number, text};
use crate::error::{QmpError, Result};
use crate::job_setup::{End, target_of};
use crate::monitor::Monitor;
use crate::nodes::{BARRIER, Found};
use crate::points_in_time::on_failure;
use crate::state::Use;

/// A backup that was checked.
pub struct Prepared {
    pub item: Item,
    pub uses: Use,
    /// What happens to bitmaps at its moment.
    pub at_once: Vec<AtOnce>,
}

impl Monitor {
    /// `blockdev-backup`.
    pub(crate) async fn backup(&self, arguments: &Arguments) -> Result<()> {
        let Prepared { item, uses, at_once } = self.prepare_backup(arguments).await?;
        self.begin(WantedJobs { disks: vec![item], grouped: true, at_once }, vec![uses]).await
    }

    /// Begins checked backups.
    pub(crate) async fn begin(&self, wanted: WantedJobs, uses: Vec<Use>) -> Result<()> {
        self.note_uses(&uses);
        let begun = self.jobs.backup(&self.table, wanted).await;
        if begun.is_err() {
            let ours = |one: &Use| uses.iter().any(|other| other.job == one.job);
            self.state().uses.retain(|one| !ours(one));
        }
        begun?;
        Ok(())
    }

    /// Checks the arguments of a backup. Nothing has begun.
    pub(crate) async fn prepare_backup(&self, arguments: &Arguments) -> Result<Prepared> {
        let (source, target) = self.ends(arguments).await?;
        let settings = self.settings(arguments)?;
        let bitmap = BitmapUse::of(arguments)?;
        if source.size() != target.size() {
            return Err(QmpError::generic("Source and target image have different sizes"));
        }
        if settings.compress && !can_compress(&target) {
            let text = format!("Compression is not supported for this drive {}", target.name);
            return Err(QmpError::generic(text));
        }
        let mut at_once: Vec<AtOnce> = Vec::new();
        let name = needed(arguments, "bitmap");
        let live = match bitmap {
            BitmapUse::None => None,
            _ => Some(self.free_bitmap(&source.name, name).await.map_err(|error| {
                if error == QmpError::no_bitmap(name) {
                    QmpError::generic(format!("Bitmap '{name}' could not be found"))
                } else {
                    error
                }
            })?),
        };
        let uses = Use {
            job: settings.name.clone().unwrap_or_default(),
            source: source.name.clone(),
            target: target.name.clone(),
            bitmap: live.as_ref().map(|bitmap| bitmap.name().to_string()),
        };
        let clears = matches!(bitmap, BitmapUse::Selects { clears: true });
        let (export, source) = match &source.found {
            Found::Frozen(frozen) => {
                let taken = live.map(Taken::later);
                let shown = taken.iter().map(|taken| taken.dirty().clone()).collect();
                let view = self.view(frozen, shown).await?;
                if let Some(taken) = taken.clone() {
                    at_once.push(Box::new(move || taken.fill(clears)));
                }
                let given_back = taken.filter(|_| clears);
                (self.live_below(frozen).await?, Source::Still(view, given_back))
            }
            Found::Live(running) if !source.device.facts().can.contains(Can::WRITE) => {
                (running.clone(), Source::Still(source.device.clone(), None))
            }
            Found::Live(running) => {
                let bitmap = live.as_ref().map(|bitmap| bitmap.name().to_string());
                let begin = self.begin_of(arguments, &target, bitmap, clears);
                (running.clone(), Source::Now(begin))
            }
        };
        let item = Item {
            export,
            target: target_of(&target)?,
            options: copy_options(arguments),
            source,
            selects: uses.bitmap.clone(),
            settings,
            resumes: None,
        };
        Ok(Prepared { item, uses, at_once })
    }

    /// The point in time of a backup.
    fn begin_of(
        &self,
        arguments: &Arguments,
        target: &End,
        bitmap: Option<String>,
        clears: bool,
    ) -> Begin {
        let directory = self.node(&target.name);
        let directory = directory.filter(|node| node.filename.starts_with('/'));
        let directory = directory
            .and_then(|node| Path::new(&node.filename).parent().map(PathBuf::from))
            .filter(|directory| directory.is_dir());
        let options = Options {
            directory,
            // A write of the guest waits as long as it takes, as in QEMU.
            guest_timeout: Duration::ZERO,
            on_failure: on_failure(text(arguments, "on-cbw-error")),
            ..Options::default()
        };
        Begin { options, bitmap, clears, start: None, trim: Trim::Releases, within: BARRIER }
    }
}

/// What a backup does with a bitmap.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum BitmapUse {
    None,
    /// It selects what is copied; `clears`: it is clean from then on, if the job succeeds.
    Selects {
        clears: bool,
    },
}

impl BitmapUse {
    fn of(arguments: &Arguments) -> Result<BitmapUse> {
        let sync = needed(arguments, "sync");
        let bitmap = text(arguments, "bitmap");
        let mode = text(arguments, "bitmap-mode");
        let wrong = |text: &str| Err(QmpError::generic(text));
        match (sync, bitmap, mode) {
            ("incremental" | "bitmap", None, _) => Err(QmpError::generic(format!(
                "must provide a valid bitmap name for '{sync}' sync mode"
            ))),
            (_, None, Some(_)) => wrong("Cannot specify bitmap sync mode without a bitmap"),
            ("none", ..) => wrong(
                "Sync mode 'none' not supported: use nodes of copy-before-write and snapshot-access",
            ),
            (_, None, None) => Ok(BitmapUse::None),
            ("incremental", _, None | Some("on-success")) => {
                Ok(BitmapUse::Selects { clears: true })
            }
            ("incremental", ..) => {
                wrong("Bitmap sync mode must be 'on-success' when using sync mode 'incremental'")
            }
            (_, _, None) => wrong("Bitmap sync mode must be given when providing a bitmap"),
            ("bitmap", _, Some(mode)) => Ok(BitmapUse::Selects { clears: mode != "never" }),
            (sync, _, Some("never")) => Err(QmpError::generic(format!(
                "Bitmap sync mode 'never' has no meaningful effect when combined with sync mode '{sync}'"
            ))),
            (sync, ..) => Err(QmpError::generic(format!(
                "Sync mode '{sync}' with a bitmap is not supported: add or clear a bitmap in the same \
                 transaction"
            ))),
        }
    }
}

/// Whether the target of a job can store data compressed.
fn can_compress(end: &End) -> bool {
    let Found::Live(running) = &end.found else { return false };
    let stack = running.stack.lock().expect("no panic under this lock");
    let compression = stack.as_ref().map(|stack| stack.device().facts().compression);
    compression.unwrap_or_default() != Compression::None
}

/// Options of `copy` for `x-perf`.
fn copy_options(arguments: &Arguments) -> Vec<NamedOption> {
    let mut options = Vec::new();
    let tuning = arguments.get("x-perf").and_then(Value::as_object);
    let workers = tuning.and_then(|tuning| number(tuning, "max-workers"));
    if let Some(workers) = workers.filter(|workers| (1..=64).contains(workers)) {
        options.push(NamedOption::new("connections", 1));
        options.push(NamedOption::new("requests", workers));
    }
    options
}
