//! `blockhaul pull`: the disks of one machine, each in full or what has changed, as a new point of its
//! store.
//!
//! Order: read the file, read the stores, open the sources (`wanted`), decide for each disk (`decide`), lock
//! the stores. Only then files are written: what is to be copied, the copies, the new manifests.

mod decide;
mod report;
mod wanted;

use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use blockhaul_catalog::{Intent, Spec};
use blockhaul_engine::{Options, Progress};
use blockhaul_io::{Pool, Runtime};
use blockhaul_store::{Content, Full, Increment, Point, Store, Writer};

use self::decide::{Begin, What, begin};
use self::report::Row;
use self::wanted::{Found, WantedDisk};
use crate::exit::{self, Failure, Outcome, plain, stored};
use crate::jobfile::{self, Disk, JobFile};
use crate::jobs::{Copies, DiskRequest};
use crate::progress::Reporter;
use crate::{args, devices, logger};

/// Runs `blockhaul pull`.
pub fn run(args: &args::PullArgs) -> Outcome {
    logger::start(args.verbose);
    let JobFile { common, disks } = jobfile::read_pull(&args.job)?;
    let sink = Reporter::open(args.progress, args.no_progress)?;
    let mut wanted = Vec::with_capacity(disks.len());
    for disk in disks {
        wanted.push(WantedDisk::new(disk, args)?);
    }
    wanted::check_together(&wanted)?;
    let stores = all(&wanted, |one| Store::open_or_new(&one.dir).map_err(stored))?;
    let config = common.session.config();
    let found = look(&config, &wanted, &stores)?;
    let (mut pulls, rows) = prepare(wanted, found, &stores, args.restart)?;
    if pulls.is_empty() {
        let name = rows.first().map_or("", |row| &row.point);
        let text = format!("all disks have the point {name:?} already: choose another name");
        return Err(Failure::usage(text));
    }
    let requests: Result<Vec<_>, _> = pulls.iter_mut().map(Pull::request).collect();
    let mut copies = match requests.and_then(|disks| Copies::prepare(common, disks)) {
        Ok(copies) => copies,
        Err(failure) => {
            pulls.iter_mut().for_each(Pull::forget);
            return Err(failure);
        }
    };
    copies.run(sink)?;
    for (index, pull) in pulls.iter_mut().enumerate() {
        let copied = copies.results().nth(index).flatten().is_some_and(|result| result.is_ok());
        if copied && let Err(failure) = publish(pull, &copies) {
            copies.fail(index, failure);
        }
        pull.forget();
    }
    let results = copies.results().map(|result| result.map(|result| result.map_err(text_of)));
    let rows = report::filled(rows, results.collect());
    // On standard output, before the failures.
    report::print(&rows, args.json)?;
    copies.end(args.verbose)
}

fn text_of(failure: &Failure) -> String {
    failure.to_string()
}

/// The result for each disk, or the first failure with the place of the disk.
fn all<T>(
    wanted: &[WantedDisk],
    work: impl Fn(&WantedDisk) -> Result<T, Failure>,
) -> Result<Vec<T>, Failure> {
    wanted.iter().map(|one| work(one).map_err(|failure| one.at(failure))).collect()
}

/// Opens each source, and reads its bitmap if an increment is possible.
fn look(
    config: &blockhaul_io::Config,
    wanted: &[WantedDisk],
    stores: &[Store],
) -> Result<Vec<Found>, Failure> {
    let runtime = Runtime::start(config).map_err(|error| {
        Failure::new(exit::FAILED, format!("cannot start workers: {}", plain(&error)))
    })?;
    let mut found = Vec::with_capacity(wanted.len());
    for (one, store) in wanted.iter().zip(stores) {
        let looked = one.look()?;
        let store = store.clone();
        let (result, open) = runtime.block_on(move || looked.run(store));
        // Not on a worker: this waits for the server of a `[ CMD ]`.
        drop(open);
        found.push(result.map_err(|failure| one.at(failure))?);
    }
    Ok(found)
}

/// A disk that is copied.
struct Pull {
    /// The disk and its target; taken by the copy.
    disk: Option<(Disk, Spec)>,
    wanted: WantedDisk,
    writer: Writer,
    number: u32,
}

impl Pull {
    /// Removes what was recorded of a copy that has not begun.
    fn forget(&mut self) {
        if self.writer.unfinished().is_none() || self.writer.journal(self.number).exists() {
            return;
        }
        if let Err(error) = self.writer.abandon() {
            log::warn!("disk {}: {error}", self.wanted.name);
        }
    }

    fn request(&mut self) -> Result<DiskRequest, Failure> {
        let (disk, target) = self.disk.take().expect("taken once");
        DiskRequest::with_target(disk, target)
    }
}

/// Locks the stores, and records in each what is about to be copied. Nothing is written before all are
/// locked and checked.
fn prepare(
    wanted: Vec<WantedDisk>,
    found: Vec<Found>,
    stores: &[Store],
    restart: bool,
) -> Result<(Vec<Pull>, Vec<Row>), Failure> {
    let mut begun = Vec::new();
    let mut rows = Vec::new();
    for ((one, found), store) in wanted.into_iter().zip(found).zip(stores) {
        rows.push(Row::new(&one, &found));
        if matches!(found.what, What::Already) {
            continue;
        }
        let at = |failure: Failure| one.at(failure);
        let writer = Writer::lock(&one.dir).map_err(stored).map_err(at)?;
        if writer.store().points() != store.points() {
            let text = format!("{} has just been changed: run it again", one.dir.display());
            return Err(one.at(Failure::new(exit::OPEN, text)));
        }
        let next = begin(&writer, &one, &found, restart).map_err(at)?;
        begun.push((one, found, writer, next));
    }
    let mut pulls = Vec::new();
    for (one, found, writer, next) in begun {
        let place = (one.name.clone(), one.place.clone());
        let pull = start(one, found, writer, next);
        pulls.push(pull.map_err(|failure| {
            Failure::new(failure.status(), format!("{}: disk {}: {failure}", place.1, place.0))
        })?);
    }
    Ok((pulls, rows))
}

/// Records what is about to be copied, and makes the copy of it.
fn start(
    mut one: WantedDisk,
    found: Found,
    mut writer: Writer,
    next: Begin,
) -> Result<Pull, Failure> {
    let number = match next {
        Begin::Resume(number) => {
            writer.list(number, found.what.ranges()).map_err(stored)?;
            number
        }
        Begin::Anew => {
            writer.abandon().map_err(stored)?;
            let number = writer.next_number().map_err(stored)?;
            let point = point(number, &found);
            writer.begin(point, found.what.ranges()).map_err(stored)?;
            number
        }
    };
    let dir = std::fs::canonicalize(&one.dir).map_err(|error| {
        Failure::new(exit::OPEN, format!("{}: {}", one.dir.display(), plain(&error)))
    })?;
    let absolute =
        |path: std::path::PathBuf| path.file_name().map_or(path.clone(), |name| dir.join(name));
    let disk = one.disk.take().map(|mut disk| {
        let options = &mut disk.options;
        options.journal = Some(absolute(writer.journal(number)));
        options.ranges = found.what.ranges().map(|_| absolute(writer.ranges(number)));
        options.flush = true;
        (disk, Spec::Path(absolute(writer.store().raw(number))))
    });
    Ok(Pull { disk, wanted: one, writer, number })
}

/// The point that is made of a disk.
fn point(number: u32, found: &Found) -> Point {
    let content = match &found.what {
        What::Increment { parent, bitmap, ranges } => Content::Increment(Increment {
            parent: parent.clone(),
            bitmap: bitmap.clone(),
            ranges: ranges.digest(),
            changed: ranges.total(),
        }),
        What::Full { .. } | What::Already => Content::Full(Full { file: number, folding: None }),
    };
    Point {
        number,
        name: found.name.clone(),
        checkpoint: found.checkpoint.clone(),
        size: found.size,
        created: 0,
        content,
        digest: None,
    }
}

/// Lists the point of a disk that is copied.
fn publish(pull: &mut Pull, copies: &Copies) -> Result<(), Failure> {
    let digests = match (pull.wanted.digests, copies.session()) {
        (true, Some(session)) => {
            let path = pull.writer.store().raw(pull.number);
            Some(session.block_on(|| digests(path))?)
        }
        _ => None,
    };
    let digests = digests.as_ref().map(|(text, digest)| (text.as_str(), digest.as_str()));
    pull.writer.publish(now(), digests).map_err(stored)
}

/// The manifest of a file, and its digest.
async fn digests(path: std::path::PathBuf) -> Result<(String, String), Failure> {
    // The copy that wrote the file may have it open.
    let registry = devices::registry(std::time::Duration::ZERO).for_command();
    let stack = registry.open(&Spec::Path(path), Vec::new(), Intent::READ).await?;
    let options = Options::default();
    let progress = Arc::new(Progress::new());
    let pool = Pool::new(options.memory());
    let made = blockhaul_engine::manifest(&stack, None, &options, &pool, &progress).await;
    let made = made.map_err(|failed| failed.error)?;
    Ok((made.to_string(), made.digest()))
}

/// Seconds since 1970.
fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}
