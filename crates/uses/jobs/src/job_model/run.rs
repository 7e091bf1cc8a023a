//! A schedule: one job after another, and what must be true after each.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use blockhaul_block::{Kind, OpKind};
use blockhaul_catalog::{DeviceSpec, NamedStorage, Registry, SharedDevice, Stack};
use blockhaul_snapshot::{OnFailure, PointOptions};
use blockhaul_testkit::rng::Rng;
use blockhaul_transfer::NamedOption;

use super::disk::{DiskFault, ModelDisk, ModelHandle};
use super::guests::Guests;
use crate::export::OpenExport;
use crate::export_config::ExportTableConfig;
use crate::export_table::ExportTable;
use crate::job::Job;
use crate::job_config::{BackupConfig, BackupDisk, JobSettings, JobTarget, MirrorConfig};
use crate::job_state::JobStatus;
use crate::jobs::Jobs;
use crate::mirror::{InitialCopy, MirrorCompletion};
use crate::snapshot::{BitmapStep, SnapshotConfig};
use blockhaul_control::CopyMode;
use blockhaul_control::ErrorPolicy;

const SIZE: usize = (192 << 10) + 512;
/// Comparison of disks with bitmaps.
const UNIT: usize = 512;
/// A job that takes longer hangs.
const LIMIT: Duration = Duration::from_secs(60);
/// Random actions on one job; then it is only helped to its end.
const ACTIONS: u32 = 40;

/// The served disk, and all that is known of it.
struct ModelWorld {
    seed: u64,
    rng: Rng,
    table: Arc<ExportTable>,
    jobs: Arc<Jobs>,
    export: Arc<OpenExport>,
    guests: Guests,
    /// What the clients use now.
    disk: Arc<ModelDisk>,
    multi_conn: bool,
    bitmaps: Vec<BitmapBase>,
    /// Number of bitmaps so far.
    begun: u32,
    /// A backup that increments continue.
    chain: Option<BackupChain>,
}

/// A bitmap, and the disk of the moment when it began.
struct BitmapBase {
    name: String,
    base: Vec<u8>,
}

/// A backup, and the bitmap of what has changed since.
struct BackupChain {
    bitmap: String,
    target: Arc<ModelDisk>,
}

/// How a job went.
struct JobOutcome {
    completed: bool,
    cancelled: bool,
    /// Clients were quiet when it completed.
    quiet: bool,
    error: Option<String>,
}

/// Which requests fail, and what the job does then.
struct FaultPlan {
    source: ErrorPolicy,
    target: ErrorPolicy,
    /// The engine repeats nothing by itself.
    strict: bool,
}

/// Jobs of one disk at random.
pub async fn schedule(seed: u64) {
    let mut world = ModelWorld::new(seed);
    for _ in 0..world.rng.between(2, 4) {
        match world.rng.below(10) {
            0..=2 => world.full_backup().await,
            3..=5 if world.chain.is_some() => world.increment().await,
            3..=5 => world.full_backup().await,
            6 if world.chain.is_some() => world.mirror_of_changes().await,
            7 => world.mirror_of_nothing().await,
            _ => world.mirror_of_all().await,
        }
        world.check_bitmaps();
    }
    world.end().await;
}

impl ModelWorld {
    fn new(seed: u64) -> ModelWorld {
        let mut rng = Rng::new(seed);
        let contents = rng.disk(SIZE, 50_000, 70);
        let multi_conn = rng.chance(70);
        let disk = ModelDisk::new(contents.clone(), multi_conn, Rng::new(rng.number()));
        let (table, export) = served(&disk);
        let switch = export.shared.as_ref().unwrap().switch().clone();
        let guests = Guests::start(seed, 3, &contents, || switch.handle());
        ModelWorld {
            seed,
            rng,
            table,
            jobs: Arc::default(),
            export,
            guests,
            disk,
            multi_conn,
            bitmaps: Vec::new(),
            begun: 0,
            chain: None,
        }
    }

    async fn full_backup(&mut self) {
        let target = self.target();
        self.begun += 1;
        let start = self.rng.chance(60).then(|| format!("b{}", self.begun));
        let begin = self.begin(None, start.clone());
        let (ended, moment) = self.backup(&target, begin).await;
        if let Some(name) = start {
            self.bitmaps.push(BitmapBase { name: name.clone(), base: moment });
            if ended.completed {
                self.chain = Some(BackupChain { bitmap: name, target });
            }
        }
    }

    async fn increment(&mut self) {
        let Some(BackupChain { bitmap, target }) = &self.chain else { return };
        let bitmap = bitmap.clone();
        let target = target.clone();
        let begin = self.begin(Some(bitmap.clone()), None);
        let (ended, moment) = self.backup(&target, begin).await;
        if ended.completed {
            self.rebase(&bitmap, moment);
        }
    }

    /// A backup of now: how it went, and the disk of its moment.
    async fn backup(
        &mut self,
        target: &Arc<ModelDisk>,
        begin: SnapshotConfig,
    ) -> (JobOutcome, Vec<u8>) {
        let trouble = self.trouble(target);
        let breaks = begin.options.on_failure == OnFailure::BreakSnapshot;
        let limited = begin.options.max < SIZE as u64;
        let moment = Arc::new(Mutex::new(Vec::new()));
        let seen = moment.clone();
        let disk = self.disk.clone();
        let look: BitmapStep = Box::new(move || *seen.lock().unwrap() = disk.bytes());
        let mut options = Vec::new();
        if self.rng.chance(25) {
            options.push(NamedOption::flag("verify"));
        }
        if trouble.strict {
            options.push(NamedOption::new("retries", 0));
        }
        let settings = self.settings(&trouble);
        let item = BackupDisk {
            options,
            settings,
            ..BackupDisk::new(self.export.clone(), to(target), begin)
        };
        let wanted = BackupConfig { bitmap_steps: vec![look], ..BackupConfig::new(vec![item]) };
        let jobs = self.jobs.backup(&self.table, wanted).await;
        let job = jobs.unwrap_or_else(|why| panic!("{}: {why}", self.place())).remove(0);
        let ended = self.drive(&job, None).await;
        let moment = moment.lock().unwrap().clone();
        if ended.completed {
            let exact = target.bytes() == moment;
            assert!(
                exact,
                "{}: a backup is not the disk of its moment: {:?}",
                self.place(),
                job.report()
            );
            assert_eq!(target.unflushed(), 0, "{}: not flushed", self.place());
        }
        let lost = limited || breaks && self.disk.failed(OpKind::Read) > 0;
        self.check_outcome(&job, &ended, target, &trouble, lost);
        (ended, moment)
    }

    async fn mirror_of_all(&mut self) {
        let target = self.target();
        self.mirror(&target, InitialCopy::All).await;
    }

    async fn mirror_of_nothing(&mut self) {
        let target = self.target();
        self.guests.pause();
        while self.guests.are_busy() {
            blockhaul_io::sleep(Duration::from_micros(100)).await;
        }
        target.take(self.disk.bytes());
        self.mirror(&target, InitialCopy::Nothing).await;
    }

    async fn mirror_of_changes(&mut self) {
        let Some(BackupChain { bitmap, target }) = &self.chain else { return };
        let bitmap = bitmap.clone();
        let target = target.clone();
        if !self.mirror(&target, InitialCopy::Dirty(bitmap.clone())).await {
            return;
        }
        if Arc::ptr_eq(&self.disk, &target) {
            self.chain = None;
            self.bitmaps.retain(|kept| kept.name != bitmap);
        } else {
            self.rebase(&bitmap, target.bytes());
        }
    }

    /// A mirror. True: it has completed.
    async fn mirror(&mut self, target: &Arc<ModelDisk>, initial: InitialCopy) -> bool {
        let trouble = self.trouble(target);
        target.follow(Some(self.disk.clone()));
        let modes = [CopyMode::Background, CopyMode::WriteBlocking];
        let wanted = MirrorConfig {
            export: self.export.clone(),
            target: to(target),
            options: Vec::new(),
            within: LIMIT,
            initial,
            copy_mode: *self.rng.pick(&modes),
            settings: self.settings(&trouble),
            resumes: None,
        };
        let job = self.jobs.mirror(&self.table, wanted).await;
        let job = job.unwrap_or_else(|why| panic!("{}: {why}", self.place()));
        self.guests.resume();
        let switch = self.rng.chance(50);
        let ended = self.drive(&job, Some(switch)).await;
        let old = self.disk.clone();
        if ended.completed {
            let copied = match (ended.quiet, switch) {
                (true, _) => old.bytes() == target.bytes(),
                (false, true) => target.has_seen(&old.bytes()),
                (false, false) => target.has_seen(&target.bytes()),
            };
            let how = format!(
                "quiet {}, switch {switch}, {:?}",
                ended.quiet,
                differences(&old.bytes(), &target.bytes())
            );
            assert!(copied, "{}: a mirror is not the disk: {how} {:?}", self.place(), job.report());
            assert!(switch || target.unflushed() == 0, "{}: not flushed", self.place());
        }
        self.check_outcome(&job, &ended, target, &trouble, false);
        self.guests.resume();
        target.follow(None);
        if ended.completed && switch {
            self.disk = target.clone();
        }
        ended.completed
    }

    /// Controls a job at random until it has ended; `switch`: how a mirror is to end.
    async fn drive(&mut self, job: &Arc<Job>, switch: Option<bool>) -> JobOutcome {
        let started = blockhaul_io::now();
        let cancels = self.rng.chance(25);
        let quiet = self.rng.chance(50);
        let mut actions = 0;
        let mut cancelled = false;
        let mut completing = false;
        while !job.is_over() {
            let late = blockhaul_io::elapsed(started) > LIMIT;
            assert!(!late, "{}: a job hangs: {:?}", self.place(), job.report());
            let time = self.rng.between(50, 1000);
            blockhaul_io::sleep(Duration::from_micros(time)).await;
            actions += 1;
            match self.rng.below(if actions > ACTIONS { 4 } else { 9 }) {
                0 => drop(job.pause(false)),
                1 => drop(job.limit(0)),
                2 if job.status() == JobStatus::Pending => job.finalize(),
                2 | 3
                    if matches!(job.status(), JobStatus::Ready | JobStatus::Standby)
                        && !completing =>
                {
                    if quiet {
                        self.quieten(job).await;
                    }
                    let within = Duration::from_secs(10);
                    job.complete(MirrorCompletion { within, switch: switch == Some(true) });
                    completing = true;
                }
                4 => drop(job.pause(true)),
                5 => drop(job.limit(self.rng.between(1 << 20, 16 << 20))),
                6 if cancels && self.rng.chance(25) => {
                    cancelled = true;
                    job.cancel();
                }
                7 => self.switch_mode(job),
                _ => {}
            }
        }
        let (error, _) = job.outcome().unwrap();
        JobOutcome { completed: error.is_none(), cancelled, quiet: quiet && completing, error }
    }

    /// Clients become quiet. Their writes may wait for a job that is paused.
    async fn quieten(&self, job: &Job) {
        self.guests.pause();
        while self.guests.are_busy() && !job.is_over() {
            job.pause(false);
            job.limit(0);
            blockhaul_io::sleep(Duration::from_micros(100)).await;
        }
    }

    fn switch_mode(&mut self, job: &Job) {
        let modes = [CopyMode::Background, CopyMode::WriteBlocking];
        if let Some(mirror) = job.mirror() {
            mirror.set_copy_mode(*self.rng.pick(&modes));
        }
    }

    /// A job fails for a reason, and does not fail where its policies exclude that.
    fn check_outcome(
        &mut self,
        job: &Job,
        ended: &JobOutcome,
        target: &Arc<ModelDisk>,
        trouble: &FaultPlan,
        lost: bool,
    ) {
        let said = || format!("{}: {:?}: {:?}", self.place(), ended.error, job.report());
        let insists = |policy| matches!(policy, ErrorPolicy::Ignore | ErrorPolicy::Stop);
        let read = self.disk.failed(OpKind::Read);
        let flush = target.failed(OpKind::Flush);
        let written = target.failed(OpKind::Write) + target.failed(OpKind::Zero);
        let faults = read + flush + written;
        if !ended.completed {
            assert!(ended.cancelled || lost || faults > 0, "failed without a reason: {}", said());
            let unexplained = !ended.cancelled
                && !lost
                && flush == 0
                && (read == 0 || insists(trouble.source))
                && (written == 0 || insists(trouble.target));
            assert!(!unexplained, "failed in spite of its policies: {}", said());
        } else if job.mirror().is_none() && trouble.strict {
            let failed = written > 0 && trouble.target == ErrorPolicy::Report;
            assert!(!failed, "completed in spite of an error: {}", said());
        }
        self.disk.fail(Vec::new());
        target.fail(Vec::new());
    }

    /// Every byte that differs is in a dirty block.
    fn check_bitmaps(&self) {
        for BitmapBase { name, base } in &self.bitmaps {
            self.check_bitmap(name, base, "its beginning");
        }
        if let Some(BackupChain { bitmap, target }) = &self.chain {
            self.check_bitmap(bitmap, &target.bytes(), "the backup");
        }
    }

    fn check_bitmap(&self, name: &str, base: &[u8], since: &str) {
        let now = self.disk.bytes();
        // Later: what is written meanwhile is marked before.
        let dirty = self.export.bitmap(name).unwrap().ranges();
        let units = now.chunks(UNIT).zip(base.chunks(UNIT)).enumerate();
        for (index, _) in units.filter(|(_, (now, base))| now != base) {
            let at = (index * UNIT) as u64;
            let shown = dirty.iter().any(|(from, len)| *from <= at && at < from + len);
            assert!(shown, "{}: {name} lacks {at}, since {since}: {dirty:?}", self.place());
        }
    }

    async fn end(self) {
        let place = self.place();
        let expected = self.guests.end().await;
        assert!(self.disk.bytes() == expected, "{place}: the live disk is wrong");
        assert!(self.export.snapshots().is_empty(), "{place}: a snapshot is left");
        assert!(self.export.mirrored().is_none(), "{place}: a mirror is left");
    }

    /// A target with other contents.
    fn target(&mut self) -> Arc<ModelDisk> {
        let contents = self.rng.disk(SIZE, 50_000, 50);
        ModelDisk::new(contents, self.multi_conn, Rng::new(self.rng.number()))
    }

    fn begin(&mut self, bitmap: Option<String>, start: Option<String>) -> SnapshotConfig {
        let breaks = self.rng.chance(60);
        let limited = breaks && self.rng.chance(10);
        let options = PointOptions {
            block: 4096 << self.rng.below(5),
            max: if limited { 64 << 10 } else { u64::MAX },
            guest_timeout: LIMIT,
            on_failure: if breaks { OnFailure::BreakSnapshot } else { OnFailure::FailWrite },
            ..PointOptions::default()
        };
        SnapshotConfig { options, bitmap, start, within: LIMIT, ..SnapshotConfig::default() }
    }

    fn settings(&mut self, trouble: &FaultPlan) -> JobSettings {
        JobSettings {
            finalized_by_hand: self.rng.chance(20),
            dismissed_by_hand: self.rng.chance(20),
            on_source_error: trouble.source,
            on_target_error: trouble.target,
            speed: if self.rng.chance(30) { self.rng.between(1 << 20, 8 << 20) } else { 0 },
            ..JobSettings::default()
        }
    }

    /// Lets requests of both sides fail, or not.
    fn trouble(&mut self, target: &Arc<ModelDisk>) -> FaultPlan {
        let rng = &mut self.rng;
        let policies =
            [ErrorPolicy::Report, ErrorPolicy::Ignore, ErrorPolicy::Stop, ErrorPolicy::Enospc];
        let mut source = Vec::new();
        let mut both = Vec::new();
        if rng.chance(25) {
            source.push(fault(rng, OpKind::Read));
        }
        if rng.chance(10) {
            source.push(fault(rng, OpKind::Write));
        }
        if rng.chance(40) {
            both.extend([fault(rng, OpKind::Write), fault(rng, OpKind::Zero)]);
        }
        if rng.chance(8) {
            both.push(fault(rng, OpKind::Flush));
        }
        self.disk.fail(source);
        target.fail(both);
        let strict = rng.chance(50);
        FaultPlan { source: *rng.pick(&policies), target: *rng.pick(&policies), strict }
    }

    fn rebase(&mut self, bitmap: &str, base: Vec<u8>) {
        let kept = self.bitmaps.iter_mut().find(|kept| kept.name == bitmap);
        kept.unwrap().base = base;
    }

    /// For messages.
    fn place(&self) -> String {
        format!("BLOCKHAUL_SEED={:#x}", self.seed)
    }
}

/// Where two disks differ, in units: the first, the last and the number of them.
fn differences(one: &[u8], other: &[u8]) -> (Option<usize>, Option<usize>, usize) {
    let units = one.chunks(UNIT).zip(other.chunks(UNIT)).enumerate();
    let differ: Vec<_> = units.filter(|(_, (one, other))| one != other).map(|(at, _)| at).collect();
    (differ.first().copied(), differ.last().copied(), differ.len())
}

fn fault(rng: &mut Rng, on: OpKind) -> DiskFault {
    let kind = *rng.pick(&[Kind::Io, Kind::NoSpace]);
    DiskFault { on, kind, percent: rng.between(5, 60), left: rng.between(1, 2) }
}

fn to(target: &Arc<ModelDisk>) -> JobTarget {
    let stack = Stack::over(Arc::new(ModelHandle(target.clone())));
    JobTarget::Open(DeviceSpec::parse("memory:1".as_ref()).unwrap(), stack, None)
}

/// A table of exports with this disk.
fn served(disk: &Arc<ModelDisk>) -> (Arc<ExportTable>, Arc<OpenExport>) {
    let table = ExportTable::new(ExportTableConfig::new(registry()));
    let stack = Stack::over(Arc::new(ModelHandle(disk.clone())));
    let shared = SharedDevice::new("a", "", stack.device().clone());
    let running = OpenExport {
        name: "a".to_string(),
        description: String::new(),
        storage: Mutex::new("memory:2".to_string()),
        write: true,
        served: true,
        single: true,
        own: None,
        shared: Some(shared.clone()),
        stack: Mutex::new(Some(stack)),
        layers: Mutex::default(),
        snapshots: Mutex::default(),
        bitmaps: Mutex::default(),
        bitmap_store: Mutex::default(),
        inconsistent: Mutex::default(),
        mirrored: Mutex::default(),
        maps: Mutex::default(),
        claims: blockhaul_catalog::Claims::for_process(),
        owner: blockhaul_catalog::ClaimOwner::default(),
        written: Arc::default(),
        snapshot_of: None,
    };
    let name = "a".to_string();
    let description = String::new();
    let named = NamedStorage { name, description, exports: shared, single: true };
    table.serve(named, running).unwrap();
    let export = table.exports().remove(0);
    (Arc::new(table), export)
}

/// The devices that the descriptions of both sides name.
fn registry() -> Registry {
    Registry {
        backends: blockhaul_backends::all(),
        layers: blockhaul_layers::all(),
        path: blockhaul_backends::PATH_SCHEME,
        ..Registry::default()
    }
    .for_command()
}
