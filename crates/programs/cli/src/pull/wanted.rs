//! What a file of `blockhaul pull` wants for a disk, and what its source has.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::SystemTime;

use blockhaul_catalog::{Intent, Layer, Registry, Spec, Stack};
use blockhaul_engine::{Bitmap, Options, Progress};
use blockhaul_snapshot::BITMAP_CONTEXT;
use blockhaul_store::{Ranges, Store, check_name};
use blockhaul_transfer::full;

use super::decide::{Decision, What, decide};
use crate::exit::{self, Failure, stored};
use crate::jobfile::Disk;
use crate::{args, devices};

/// Whether to copy all of a disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Mode {
    /// Where an increment is not possible.
    Auto,
    /// Always.
    Full,
    /// Never.
    Increment,
}

/// A disk of the file.
pub(super) struct WantedDisk {
    pub(super) name: String,
    pub(super) place: String,
    pub(super) dir: PathBuf,
    /// A metadata context, and the checkpoint at which it began.
    pub(super) bitmap: Option<(String, String)>,
    /// The name of the point, if the user has chosen it.
    pub(super) point: Option<String>,
    /// The name of the bitmap that begins now, if the user has chosen it.
    pub(super) checkpoint: Option<String>,
    pub(super) mode: Mode,
    pub(super) digests: bool,
    /// How to copy it; taken by the copy.
    pub(super) disk: Option<Disk>,
}

/// What was found at a source, and what follows.
pub(super) struct Found {
    /// Bytes of the disk.
    pub(super) size: u64,
    /// The name of the point.
    pub(super) name: String,
    pub(super) checkpoint: String,
    pub(super) what: What,
}

impl WantedDisk {
    /// Checks the keys of a disk; the command line takes precedence.
    pub(super) fn new(disk: Disk, args: &args::PullArgs) -> Result<WantedDisk, Failure> {
        let name = disk.name.clone();
        let place = disk.place.clone();
        let wrong = |text: &str| Failure::usage(format!("{place}: disk {name}: {text}"));
        let key = |key: &str, given: &Option<String>| -> Result<Option<String>, Failure> {
            let value = given.clone().or_else(|| disk.keys.get(key).cloned());
            if let Some(value) = &value {
                check_name(value).map_err(|error| wrong(&format!("{key}: {}", error.text())))?;
            }
            Ok(value)
        };
        let dir = disk.keys.get("store").filter(|dir| !dir.is_empty());
        let dir = dir.ok_or_else(|| wrong("no store: add store = \"DIR\""))?.into();
        let bitmap = key("bitmap", &args.bitmap)?;
        let parent = key("parent", &args.parent)?;
        if parent.is_some() && bitmap.is_none() {
            return Err(wrong("parent says when a bitmap began: add bitmap = \"NAME\""));
        }
        let checkpoint = key("checkpoint", &args.checkpoint)?;
        let point = key("point", &args.point)?.or_else(|| checkpoint.clone());
        let mode = match (args.full, disk.keys.get("mode").map(String::as_str)) {
            (true, _) | (_, Some("full")) => Mode::Full,
            (_, None | Some("auto")) => Mode::Auto,
            (_, Some("increment")) => Mode::Increment,
            (_, Some(_)) => return Err(wrong("mode must be auto, full or increment")),
        };
        if mode == Mode::Increment && bitmap.is_none() {
            return Err(wrong("mode increment needs a bitmap: add bitmap = \"NAME\""));
        }
        let digests = disk.keys.get("digests").is_none_or(|on| on == "true");
        let bitmap = bitmap.map(|bitmap| {
            let context =
                if bitmap.contains(':') { bitmap } else { format!("{BITMAP_CONTEXT}{bitmap}") };
            let own = context.strip_prefix(BITMAP_CONTEXT).unwrap_or(&context).to_string();
            (context, parent.unwrap_or(own))
        });
        let disk = Some(disk);
        Ok(WantedDisk { name, place, dir, bitmap, point, checkpoint, mode, digests, disk })
    }

    /// The failure, with the place of the disk.
    pub(super) fn at(&self, failure: Failure) -> Failure {
        let text = format!("{}: disk {}: {failure}", self.place, self.name);
        Failure::new(failure.status(), text)
    }

    /// How to look at the source.
    pub(super) fn look(&self) -> Result<Look, Failure> {
        let disk = self.disk.as_ref().expect("not yet taken");
        let context = self.bitmap.as_ref().map(|bitmap| bitmap.0.clone());
        let options = &disk.options;
        let registry =
            devices::registry_asking(options.timeout, options.min_rate, context.as_slice());
        let layers = devices::layers(&registry, &options.source_layer)?;
        let spec = disk.source.clone();
        let question = Question {
            bitmap: self.bitmap.clone(),
            point: self.point.clone(),
            checkpoint: self.checkpoint.clone(),
            mode: self.mode,
        };
        Ok(Look { registry, spec, layers, retries: options.retries, question })
    }
}

/// What decides between a full backup and an increment, besides the source and the store.
#[derive(Debug, Clone)]
pub(super) struct Question {
    pub(super) bitmap: Option<(String, String)>,
    pub(super) point: Option<String>,
    pub(super) checkpoint: Option<String>,
    pub(super) mode: Mode,
}

/// A source that is about to be opened.
pub(super) struct Look {
    registry: Registry,
    spec: Spec,
    layers: Vec<Arc<dyn Layer>>,
    retries: u32,
    question: Question,
}

impl Look {
    /// Opens the source, and reads the bitmap if an increment is possible. Runs on a worker.
    pub(super) async fn run(mut self, store: Store) -> (Result<Found, Failure>, Option<Stack>) {
        let layers = std::mem::take(&mut self.layers);
        let opened = self.registry.open(&self.spec, layers, Intent::READ).await;
        let stack = match opened {
            Ok(stack) => stack,
            Err(error) => {
                return (Err(Failure::opening("source", &self.spec.to_string(), &error)), None);
            }
        };
        let found = self.find(&stack, &store).await;
        (found, Some(stack))
    }

    async fn find(&self, stack: &Stack, store: &Store) -> Result<Found, Failure> {
        let facts = stack.device().facts();
        let context = self.question.bitmap.as_ref().map(|bitmap| bitmap.0.as_str());
        let has_bitmap = context.is_some_and(|context| facts.context(context).is_some());
        let fresh = fresh_name(store);
        let decided = decide(&self.question, store, (facts.size, has_bitmap), &fresh)?;
        let Decision { name, checkpoint, kind } = decided;
        let what = match kind {
            decide::Kind::Already => What::Already,
            decide::Kind::Full { why } => What::Full { why },
            decide::Kind::Increment { parent, bitmap } => {
                let newest = store.point(Some(&parent)).map_err(stored)?;
                // An increment on something damaged would be lost.
                store.check(newest).map_err(stored)?;
                let ranges = self.ranges(stack, &bitmap).await?;
                let ranges = Ranges::new(ranges, facts.size).map_err(stored)?;
                What::Increment { parent, bitmap, ranges }
            }
        };
        Ok(Found { size: facts.size, name, checkpoint, what })
    }

    async fn ranges(&self, stack: &Stack, context: &str) -> Result<Vec<(u64, u64)>, Failure> {
        let bitmap = Bitmap { context: context.to_string(), mask: u64::MAX };
        let options = Options { retries: self.retries, ..Options::default() };
        let progress = Arc::new(Progress::new());
        let read = blockhaul_engine::bitmap_ranges(stack, &bitmap, &options, &progress).await;
        read.map_err(|error| {
            let failure = Failure::from(error.error);
            let lost = failure.status() == exit::LOST;
            if lost { failure } else { failure.with_status(exit::SOURCE) }
        })
    }
}

use super::decide;

/// The time in UTC, as the name of a point that the store does not have.
fn fresh_name(store: &Store) -> String {
    let now = jiff::Timestamp::try_from(SystemTime::now()).unwrap_or(jiff::Timestamp::UNIX_EPOCH);
    let now = now.strftime("%Y-%m-%dT%H:%M:%SZ").to_string();
    let is_taken = |name: &String| store.points().iter().any(|point| point.name == *name);
    let names = std::iter::once(now.clone()).chain((2..).map(|count| format!("{now}-{count}")));
    names.into_iter().find(|name| !is_taken(name)).unwrap_or(now)
}

/// Refuses two disks with one store.
pub(super) fn check_together(wanted: &[WantedDisk]) -> Result<(), Failure> {
    for (index, one) in wanted.iter().enumerate() {
        let same = |other: &&WantedDisk| full(&other.dir) == full(&one.dir);
        if let Some(other) = wanted[..index].iter().find(same) {
            let text = format!("disk {} has the same store: choose another directory", other.name);
            return Err(one.at(Failure::usage(text)));
        }
    }
    Ok(())
}
