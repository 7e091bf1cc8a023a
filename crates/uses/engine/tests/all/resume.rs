//! Resumed copies: power cuts at random moments, torn journals, and changes that must be detected.

use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use blockhaul_block::{Can, Device, Facts, PendingRequest, Request, Result};
use blockhaul_catalog::{
    Backend, BackendTarget, DeviceSpec, HandleOpener, Intent, OpenFuture, OpenedDevice, Registry,
    Stack,
};
use blockhaul_engine::{
    CopyError, CopyProgress, CopySummary, EngineOptions, JournalOptions, JournalState, SEGMENT,
    Side, check_journal, copy, discard_journal, discarding_journal,
};
use blockhaul_io::{IoEngine, Pool, Runtime, RuntimeConfig, is_zero};
use blockhaul_testkit::crash::CrashDevice;
use blockhaul_testkit::model::{CompletionOrder, Model, ModelDevice, TrimEffect};
use blockhaul_testkit::rng::{Rng, seed};
use blockhaul_testkit::tools::ScratchDir;

fn on_worker<F: Future<Output = ()> + 'static>(check: impl FnOnce() -> F + Send + 'static) {
    Runtime::start(&RuntimeConfig { workers: 2, engine: IoEngine::Auto }).unwrap().block_on(check);
}

/// Storage whose power is cut after a number of requests.
struct Machine {
    storage: Arc<CrashDevice>,
    fuse: AtomicU64,
    seed: u64,
    left: Mutex<Option<Vec<u8>>>,
}

struct Handle {
    machine: Arc<Machine>,
    device: Arc<CrashDevice>,
}

struct Door(Arc<Machine>);

struct More(Arc<Machine>);

impl Machine {
    async fn start(model: Model, fuse: u64, rng: &mut Rng) -> (Stack, Arc<Machine>) {
        let storage = CrashDevice::new(model, CompletionOrder::Shuffled(rng.number()));
        let fuse = fuse.into();
        let seed = rng.number();
        let left = Mutex::new(None);
        let machine = Arc::new(Machine { storage, fuse, seed, left });
        let door = Arc::new(Door(machine.clone()));
        let registry = Registry { backends: vec![door], ..Registry::default() };
        let spec = DeviceSpec::Scheme { scheme: "crash".into(), rest: String::new() };
        (registry.open(&spec, Vec::new(), Intent::WRITE).await.unwrap(), machine)
    }

    fn handle(self: &Arc<Self>) -> Arc<dyn Device> {
        Arc::new(Handle { machine: self.clone(), device: self.storage.handle() })
    }
}

impl Backend for Door {
    fn schemes(&self) -> &'static [&'static str] {
        &["crash"]
    }

    fn operand(&self) -> &'static str {
        ""
    }

    fn summary(&self) -> &'static str {
        "for tests"
    }

    fn open(&self, _: BackendTarget) -> OpenFuture<OpenedDevice> {
        let machine = self.0.clone();
        let device = machine.handle();
        let more = Arc::new(More(machine));
        Box::pin(async move { Ok(OpenedDevice { device, more: Some(more) }) })
    }
}

impl HandleOpener for More {
    fn another(&self) -> OpenFuture<Arc<dyn Device>> {
        let handle = self.0.handle();
        Box::pin(async move { Ok(handle) })
    }
}

impl Device for Handle {
    fn facts(&self) -> Arc<Facts> {
        self.device.facts()
    }

    fn submit(&self, request: Request) -> PendingRequest {
        if self.machine.fuse.fetch_sub(1, Ordering::SeqCst) == 1 {
            let left = self.machine.storage.power_cut(self.machine.seed);
            *self.machine.left.lock().unwrap() = Some(left);
        }
        self.device.submit(request)
    }
}

fn content(rng: &mut Rng, size: usize) -> Vec<u8> {
    rng.disk(size, 200_000, 70)
}

fn source_of(bytes: &[u8]) -> Stack {
    let model = Model::new(bytes.len() as u64).with_content(bytes.to_vec());
    Stack::over(ModelDevice::new(model, CompletionOrder::Deferred))
}

fn journal(path: &Path) -> JournalOptions {
    JournalOptions {
        keep: false,
        path: path.to_path_buf(),
        restart: false,
        interval: Duration::from_millis(1),
        source: "source".into(),
        target: "target".into(),
    }
}

fn options(path: &Path) -> EngineOptions {
    EngineOptions {
        journal: Some(journal(path)),
        segment: 64 << 10,
        request_size: 16 << 10,
        // The power is cut after a number of requests: there must be as many.
        adaptive_size: false,
        connections: 2,
        requests: 4,
        ..EngineOptions::default()
    }
}

async fn run(
    source: &Stack,
    target: &Stack,
    options: &EngineOptions,
) -> Result<CopySummary, CopyError> {
    let pool = Pool::new(8 << 20);
    let result = copy(source, target, options, &pool, &Arc::new(CopyProgress::new())).await;
    assert_eq!(pool.reserved(), 0, "all buffers are back");
    result
}

#[test]
fn a_copy_whose_target_loses_power_again_and_again_ends_identical() {
    let seed = seed();
    on_worker(move || async move {
        let mut rng = Rng::new(seed);
        let scratch = ScratchDir::new().unwrap();
        let mut cuts = 0;
        let mut useful = 0;
        let mut skipped = 0_u64;
        // How many cuts leave something to resume from is random: repeat until there were enough.
        let mut rounds = 0..1000;
        while cuts < 100 || useful < 30 {
            let round = rounds.next().expect("a thousand rounds have enough useful cuts");
            let size = rng.between(1 << 20, 3 << 20) as usize;
            let bytes = content(&mut rng, size);
            let source = source_of(&bytes);
            let path = scratch.file(&format!("journal-{round}"));
            let promise = rng.chance(50);
            let retries = rng.between(0, 1) as u32;
            let mut facts = Model::all_facts(size as u64);
            facts.can.set(Can::MULTI_CONN, promise);
            facts.zeroed = false;
            let mut image = vec![0xa5; size];
            let told = format!("seed {seed}, round {round}: promise {promise}, retries {retries}");
            for attempt in 0.. {
                let fuse = if attempt < 3 { rng.between(10, 200) } else { u64::MAX };
                let model = Model::with_facts(facts.clone()).with_content(image.clone());
                let (target, machine) = Machine::start(model, fuse, &mut rng).await;
                let options = EngineOptions {
                    connections: rng.between(1, 3) as usize,
                    sparse: *rng.pick(&[0, 4096]),
                    retries,
                    retry_delay: Duration::from_millis(1),
                    ..options(&path)
                };
                let result = run(&source, &target, &options).await;
                let left = machine.left.lock().unwrap().take();
                match (left, result) {
                    // A cut at the very end may come too late to be noticed.
                    (_, Ok(summary)) => {
                        assert!(machine.storage.durable() == bytes, "durable; {told}");
                        assert!(!path.exists(), "{told}");
                        skipped += summary.resumed;
                        useful += u64::from(summary.resumed > 0);
                        break;
                    }
                    (Some(left), Err(_)) => {
                        image = left;
                        cuts += 1;
                        // The journal's machine may have lost power as well.
                        if path.exists() && rng.chance(50) {
                            let len = std::fs::metadata(&path).unwrap().len();
                            let torn = rng.between(0, 40).min(len - 4096);
                            let file = std::fs::File::options().write(true).open(&path).unwrap();
                            file.set_len(len - torn).unwrap();
                        }
                    }
                    (None, Err(error)) => panic!("{error}; {told}"),
                }
            }
        }
        assert!(skipped > 0, "{cuts} {useful} {skipped}");
    });
}

#[test]
fn a_flush_that_lies_is_found_out_at_the_edge() {
    on_worker(|| async {
        let mut rng = Rng::new(3);
        let scratch = ScratchDir::new().unwrap();
        let path = scratch.file("journal");
        let bytes = vec![7; 2 << 20];
        let source = source_of(&bytes);
        let facts = || {
            let mut facts = Model::all_facts(2 << 20);
            facts.zeroed = false;
            facts
        };
        let model = || Model::with_facts(facts()).with_content(vec![0; 2 << 20]);
        // Again if nothing was recorded before the power was cut.
        let begun = Instant::now();
        loop {
            let (target, _) = Machine::start(model(), 90, &mut rng).await;
            run(&source, &target, &options(&path)).await.unwrap_err();
            if std::fs::metadata(&path).unwrap().len() > 4096 {
                break;
            }
            assert!(begun.elapsed() < Duration::from_secs(60), "nothing is recorded");
            std::fs::remove_file(&path).unwrap();
        }
        // Nothing of what was recorded is there: another disk, or one that lost its data.
        let (target, machine) = Machine::start(model(), u64::MAX, &mut rng).await;
        let summary = run(&source, &target, &options(&path)).await.unwrap();
        assert!(machine.storage.durable() == bytes);
        assert!(summary.warnings.iter().any(|text| text.contains("everything that it")));
    });
}

#[test]
fn a_fresh_target_is_found_out_behind_zeroes() {
    on_worker(|| async {
        let mut rng = Rng::new(3);
        let scratch = ScratchDir::new().unwrap();
        let path = scratch.file("journal");
        let mut bytes = vec![0; 4 << 20];
        rng.fill(&mut bytes[..1 << 20]);
        let source = source_of(&bytes);
        let mut facts = Model::all_facts(4 << 20);
        facts.zeroed = false;
        // In order, each segment flushed as soon as it is finished: the last ones are zeroes.
        let once = EngineOptions {
            journal: Some(JournalOptions { interval: Duration::ZERO, ..journal(&path) }),
            connections: 1,
            adaptive_size: false,
            synchronous: true,
            extents: false,
            ..options(&path)
        };
        let model = || Model::with_facts(facts.clone()).with_content(vec![0; 4 << 20]);
        let begun = Instant::now();
        loop {
            let (target, _) = Machine::start(model(), 200, &mut rng).await;
            run(&source, &target, &once).await.unwrap_err();
            let (target, machine) = Machine::start(model(), u64::MAX, &mut rng).await;
            let summary = run(&source, &target, &once).await.unwrap();
            assert!(machine.storage.durable() == bytes);
            // Again if the journal was far behind when the power was cut within the zeroes.
            if summary.resumed > 1 << 20 {
                assert!(summary.warnings.iter().any(|text| text.contains("everything that it")));
                break;
            }
            assert!(begun.elapsed() < Duration::from_secs(60), "{} were recorded", summary.resumed);
        }
    });
}

#[test]
fn a_copy_goes_on_with_other_connections_and_requests() {
    on_worker(|| async {
        let scratch = ScratchDir::new().unwrap();
        let path = scratch.file("journal");
        let size = 2_usize << 20;
        let bytes = content(&mut Rng::new(9), size);
        let begun = EngineOptions { segment: SEGMENT, spread: true, ..options(&path) };
        let source = source_of(&bytes);
        let small = EngineOptions { request_size: 4096, ..begun.clone() };
        // As late as something is recorded before the power is cut.
        let mut fuses = (50..).step_by(10);
        let left = loop {
            let _ = std::fs::remove_file(&path);
            let model = Model::new(size as u64);
            let fuse = fuses.next().unwrap();
            let (target, machine) = Machine::start(model, fuse, &mut Rng::new(5)).await;
            run(&source, &target, &small).await.unwrap_err();
            if std::fs::metadata(&path).unwrap().len() > 4096 {
                break machine.left.lock().unwrap().take().unwrap();
            }
        };
        let disk = ModelDevice::new(
            Model::new(size as u64).with_content(left),
            CompletionOrder::Immediate,
        );
        let end = Stack::over(disk.clone());
        let other = EngineOptions { connections: 1, request_size: 1 << 20, ..begun };
        let summary = run(&source, &end, &other).await.unwrap();
        assert!(summary.resumed > 0);
        assert!(disk.bytes() == bytes);
    });
}

#[test]
fn a_source_that_is_discarded_is_neither_read_again_nor_copied_anew() {
    on_worker(|| async {
        let scratch = ScratchDir::new().unwrap();
        let path = scratch.file("journal");
        let mut rng = Rng::new(seed());
        let bytes = content(&mut rng, 2 << 20);
        let options = EngineOptions { discard_source: true, ..options(&path) };
        // How much is flushed, and so discarded, before the machine fails depends on the order of
        // requests.
        let mut requests = 120;
        let (device, left) = loop {
            let model =
                Model::new(2 << 20).with_content(bytes.clone()).with_trim(TrimEffect::Garbage);
            let device = ModelDevice::new(model, CompletionOrder::Deferred);
            let mut facts = Model::all_facts(2 << 20);
            facts.zeroed = false;
            let (target, machine) =
                Machine::start(Model::with_facts(facts), requests, &mut rng).await;
            let result = run(&Stack::over(device.clone()), &target, &options).await;
            if result.is_err() && device.bytes() != bytes {
                break (device, machine.left.lock().unwrap().take().unwrap());
            }
            std::fs::remove_file(&path).unwrap();
            requests = if result.is_ok() { 120 } else { requests + 10 };
        };
        let source = Stack::over(device.clone());
        // Neither another way to go on, nor another beginning.
        let model = Model::new(2 << 20).with_content(left);
        let disk = ModelDevice::new(model, CompletionOrder::Immediate);
        let target = Stack::over(disk.clone());
        let mut other = EngineOptions { discard_source: false, ..options.clone() };
        let error = run(&source, &target, &other).await.unwrap_err().to_string();
        assert!(
            error.contains("with --discard-source") && error.contains("target only"),
            "{error}"
        );
        assert!(!error.contains("--restart"), "{error}");
        if let Some(journal) = &mut other.journal {
            journal.restart = true;
        }
        let error = run(&source, &target, &other).await.unwrap_err().to_string();
        assert!(error.contains("is on the target only"), "{error}");
        assert!(blockhaul_engine::check_journal(&path, true).is_err());
        assert!(disk.seen().iter().all(|seen| !seen.kind.changes()), "the target is untouched");
        let summary = run(&source, &target, &options).await.unwrap();
        assert!(summary.resumed > 0 && summary.journal_stays && disk.bytes() == bytes);
        assert_eq!(discarding_journal(&path).unwrap(), Some(JournalState::Complete));
        std::fs::remove_file(&path).unwrap();
        // A journal that was begun without is not one with.
        let mut facts = Model::all_facts(2 << 20);
        facts.zeroed = false;
        let fresh = source_of(&bytes);
        let image = interrupted(&path, &fresh, 2 << 20).await;
        let disk =
            ModelDevice::new(Model::new(2 << 20).with_content(image), CompletionOrder::Immediate);
        let error = run(&fresh, &Stack::over(disk), &options).await.unwrap_err().to_string();
        assert!(
            error.contains("without --discard-source") && error.contains("--restart"),
            "{error}"
        );
    });
}

#[test]
fn a_discarding_copy_that_is_complete_is_never_repeated() {
    on_worker(|| async {
        let scratch = ScratchDir::new().unwrap();
        let path = scratch.file("journal");
        let size = 2_u64 << 20;
        // With zeroes of several segments, which have one record.
        let mut bytes = content(&mut Rng::new(seed()), size as usize);
        bytes[1 << 20..].fill(0);
        let options = EngineOptions { discard_source: true, connections: 1, ..options(&path) };
        let model = Model::new(size).with_content(bytes.clone()).with_trim(TrimEffect::Garbage);
        let device = ModelDevice::new(model, CompletionOrder::Immediate);
        let source = Stack::over(device.clone());
        let model = Model::new(size).with_content(vec![0xaa; size as usize]);
        let disk = ModelDevice::new(model, CompletionOrder::Immediate);
        let target = Stack::over(disk.clone());
        let summary = run(&source, &target, &options).await.unwrap();
        assert!(summary.journal_stays && summary.discarded == size && disk.bytes() == bytes);
        assert!(device.bytes()[1 << 20..] != bytes[1 << 20..]);
        assert_eq!(discarding_journal(&path).unwrap(), Some(JournalState::Complete));
        let whole = std::fs::read(&path).unwrap();
        // Killed at the end, while it recorded that it is complete, and before.
        for cut in [0, 10, 32] {
            std::fs::write(&path, &whole[..whole.len() - cut]).unwrap();
            let state = if cut == 0 { JournalState::Complete } else { JournalState::Begun };
            assert_eq!(discarding_journal(&path).unwrap(), Some(state));
            let before = disk.seen().len();
            let again = run(&source, &target, &options).await.unwrap();
            assert_eq!((again.resumed, again.discarded), (size, 0), "cut by {cut}");
            let seen = &disk.seen()[before..];
            assert!(seen.iter().all(|seen| !seen.kind.changes()), "cut by {cut}: {seen:?}");
            assert!(disk.bytes() == bytes && again.journal_stays);
            assert!(std::fs::read(&path).unwrap() == whole, "cut by {cut}");
        }
        // A damaged record that no crash leaves so.
        let mut damaged = whole.clone();
        damaged[4096 + 5] ^= 1;
        std::fs::write(&path, &damaged).unwrap();
        assert_eq!(discarding_journal(&path).unwrap(), Some(JournalState::Begun));
        let mut restart = options.clone();
        restart.journal.as_mut().unwrap().restart = true;
        let before = disk.seen().len();
        for (options, words) in [
            (&options, "its record 1 (at offset 4096) is damaged, and valid ones follow"),
            (&restart, "on the target only"),
        ] {
            let error = run(&source, &target, options).await.unwrap_err();
            let said = error.to_string();
            assert!(said.contains(words) && said.contains("on the target only"), "{said}");
            assert!(!said.contains("--restart") && !said.contains("remove"), "{said}");
            assert_eq!(error.kind(), blockhaul_block::Kind::Invalid);
        }
        assert!(disk.seen()[before..].iter().all(|seen| !seen.kind.changes()));
        assert!(std::fs::read(&path).unwrap() == damaged, "the journal was changed");
        std::fs::write(&path, &whole).unwrap();
        // Nor is anything else done with this journal.
        let mut anew = options.clone();
        anew.journal.as_mut().unwrap().restart = true;
        let mut other = options.clone();
        other.journal.as_mut().unwrap().target.push_str(" other");
        for (options, words) in [
            (&anew, ["its copy is complete", "remove this file only if"]),
            (&other, ["the target is not", "it is the journal of another copy"]),
        ] {
            let error = run(&source, &target, options).await.unwrap_err().to_string();
            assert!(words.iter().all(|words| error.contains(words)), "{error}");
            assert!(error.contains("use another journal and another target"), "{error}");
            assert!(error.contains(path.to_str().unwrap()), "{error}");
        }
        // Where no block can be discarded, nothing was.
        std::fs::remove_file(&path).unwrap();
        let part = EngineOptions { ranges: Some(vec![(1, 100)].into()), ..options };
        let summary = run(&target, &source, &part).await.unwrap();
        assert!(!summary.journal_stays && summary.discarded == 0 && !path.exists());
    });
}

#[test]
fn a_discarding_copy_goes_on_with_its_own_target_and_its_latest_journal_only() {
    on_worker(|| async {
        let scratch = ScratchDir::new().unwrap();
        let path = scratch.file("journal");
        let size = 2_u64 << 20;
        let mut bytes = vec![0; size as usize];
        Rng::new(seed()).fill(&mut bytes);
        let options = EngineOptions { discard_source: true, connections: 1, ..options(&path) };
        let model = Model::new(size).with_content(bytes.clone()).with_trim(TrimEffect::Zeroes);
        let source = ModelDevice::new(model, CompletionOrder::Immediate);
        let target = ModelDevice::new(Model::new(size), CompletionOrder::Immediate);
        let other = ModelDevice::new(Model::new(size), CompletionOrder::Immediate);
        let [from, to, wrong] = [&source, &target, &other].map(|disk| Stack::over(disk.clone()));
        run(&from, &to, &options).await.unwrap();
        assert!(target.bytes() == bytes && is_zero(&source.bytes()));
        let whole = std::fs::read(&path).unwrap();
        let records = (whole.len() - 4096) / 32;
        assert!(records > 8);
        let before = target.seen().len();
        for count in 0..records - 1 {
            let journal = &whole[..4096 + count * 32];
            std::fs::write(&path, journal).unwrap();
            let error = run(&from, &to, &options).await.unwrap_err();
            assert_eq!(error.side, Some(Side::Target));
            assert!(error.to_string().contains("put the latest journal back"), "{count}: {error}");
            assert!(std::fs::read(&path).unwrap() == journal, "{count}: the journal was changed");
        }
        for count in [1, records - 1, records] {
            std::fs::write(&path, &whole[..4096 + count * 32]).unwrap();
            let error = run(&from, &wrong, &options).await.unwrap_err().to_string();
            assert!(error.contains("put the target of the journal back"), "{count}: {error}");
        }
        assert!(target.seen()[before..].iter().all(|seen| !seen.kind.changes()));
        assert!(other.seen().iter().all(|seen| !seen.kind.changes()));
        // Nothing but the record is missing that all is copied.
        std::fs::write(&path, &whole[..4096 + (records - 1) * 32]).unwrap();
        run(&from, &to, &options).await.unwrap();
        assert!(target.bytes() == bytes);
    });
}

/// What it says of its source is not known then: what it recorded may be on the target only.
#[test]
fn a_journal_with_a_damaged_header_is_not_begun_anew() {
    on_worker(|| async {
        let scratch = ScratchDir::new().unwrap();
        let path = scratch.file("journal");
        let size = 1_u64 << 20;
        let bytes = content(&mut Rng::new(seed()), size as usize);
        let source = ModelDevice::new(
            Model::new(size).with_content(bytes.clone()).with_trim(TrimEffect::Garbage),
            CompletionOrder::Immediate,
        );
        let target = ModelDevice::new(
            Model::new(size).with_content(vec![0xaa; size as usize]),
            CompletionOrder::Immediate,
        );
        let options = EngineOptions { discard_source: true, connections: 1, ..options(&path) };
        let ends = [&source, &target].map(|end| Stack::over(end.clone()));
        run(&ends[0], &ends[1], &options).await.unwrap();
        let whole = std::fs::read(&path).unwrap();
        let before = target.seen().len();
        let assert_refused = |at: usize, error: &str| {
            let words = ["its header is damaged", "on the target only", path.to_str().unwrap()];
            assert!(words.iter().all(|words| error.contains(words)), "byte {at}: {error}");
            assert!(!error.contains("--restart"), "byte {at}: {error}");
        };
        for at in 0..4096 {
            let mut damaged = whole.clone();
            damaged[at] ^= 1 << (at % 8);
            std::fs::write(&path, &damaged).unwrap();
            let mut errors = vec![
                discarding_journal(&path).unwrap_err(),
                check_journal(&path, at % 2 == 0).unwrap_err(),
            ];
            if at % 256 == 0 {
                errors.push(check_journal(&path, at % 512 != 0).unwrap_err());
                errors.push(discard_journal(&path).unwrap_err());
                for restart in [false, true] {
                    let mut options = options.clone();
                    options.journal.as_mut().unwrap().restart = restart;
                    errors.push(run(&ends[0], &ends[1], &options).await.unwrap_err().error);
                }
            }
            errors.iter().for_each(|error| assert_refused(at, &error.to_string()));
            assert!(std::fs::read(&path).unwrap() == damaged, "byte {at}: the journal was changed");
        }
        // All that names it as a journal, a file that was cut, and what a loss of power may leave.
        for damaged in [
            [&[0; 20], &whole[20..]].concat(),
            whole[..4095].to_vec(),
            Vec::new(),
            vec![0; 512],
            [&[0; 4096], &whole[4096..]].concat(),
        ] {
            std::fs::write(&path, &damaged).unwrap();
            assert_refused(0, &check_journal(&path, true).unwrap_err().to_string());
        }
        assert!(target.seen()[before..].iter().all(|seen| !seen.kind.changes()));
    });
}

#[test]
fn a_directory_is_not_a_journal() {
    let scratch = ScratchDir::new().unwrap();
    for restart in [false, true] {
        let error = check_journal(scratch.path(), restart).unwrap_err();
        assert_eq!(error.kind(), blockhaul_block::Kind::Usage);
        assert!(error.to_string().contains("it is a directory: give the name"), "{error}");
    }
}

/// A journal of several records that was begun and not finished, and the contents of the target.
async fn interrupted(path: &Path, source: &Stack, size: u64) -> Vec<u8> {
    let mut rng = Rng::new(5);
    loop {
        let mut facts = Model::all_facts(size);
        facts.zeroed = false;
        let (target, machine) = Machine::start(Model::with_facts(facts), 90, &mut rng).await;
        run(source, &target, &options(path)).await.unwrap_err();
        let left = machine.left.lock().unwrap().take();
        // On a busy machine, the power may be cut before the interval of the journal has passed twice.
        if std::fs::metadata(path).unwrap().len() >= 4096 + 2 * 32 {
            return left.unwrap();
        }
        std::fs::remove_file(path).unwrap();
    }
}

#[test]
fn changes_are_refused_and_restart_begins_anew() {
    on_worker(|| async {
        let scratch = ScratchDir::new().unwrap();
        let path = scratch.file("journal");
        let size = 2_u64 << 20;
        let mut bytes = content(&mut Rng::new(9), size as usize);
        bytes[..4096].fill(1);
        let left = interrupted(&path, &source_of(&bytes), size).await;
        let target = || {
            let model = Model::new(size).with_content(left.clone());
            ModelDevice::new(model, CompletionOrder::Immediate)
        };
        let refused = |source: Vec<u8>, options: EngineOptions| async move {
            let end = Stack::over(target());
            run(&source_of(&source), &end, &options).await.unwrap_err().to_string()
        };
        // The content, at a place that is checked.
        let mut changed = bytes.clone();
        changed[100] ^= 1;
        let text = refused(changed.clone(), options(&path)).await;
        assert!(text.contains("content of the source has changed"), "{text}");
        assert!(text.contains("--restart"), "{text}");
        for (name, word) in [("source", "the source is not"), ("target", "the target is not")] {
            let mut other = journal(&path);
            let field = if name == "source" { &mut other.source } else { &mut other.target };
            field.push_str(" changed");
            let options = EngineOptions { journal: Some(other), ..options(&path) };
            let text = refused(bytes.clone(), options).await;
            assert!(text.contains(word), "{text}");
        }
        let other = EngineOptions { segment: 128 << 10, spread: false, ..options(&path) };
        let text = refused(bytes.clone(), other).await;
        assert!(text.contains("segment size"), "{text}");

        let whole = std::fs::read(&path).unwrap();
        assert!(whole.len() >= 4096 + 2 * 32);
        let mut damaged = whole.clone();
        damaged[4096] ^= 1;
        std::fs::write(&path, &damaged).unwrap();
        let text = refused(bytes.clone(), options(&path)).await;
        assert!(text.contains("its record 1 (at offset 4096) is damaged"), "{text}");
        assert!(text.contains("--restart"), "{text}");

        // Started over, with the current contents of the source.
        let anew = JournalOptions { restart: true, ..journal(&path) };
        let anew = EngineOptions { journal: Some(anew), ..options(&path) };
        let disk = target();
        let end = Stack::over(disk.clone());
        let summary = run(&source_of(&changed), &end, &anew).await.unwrap();
        assert_eq!(summary.resumed, 0);
        assert!(disk.bytes() == changed && !path.exists());
    });
}

#[test]
fn files_that_are_no_journals_and_journals_in_use_are_left_alone() {
    on_worker(|| async {
        let scratch = ScratchDir::new().unwrap();
        let path = scratch.file("letter");
        std::fs::write(&path, "dear all").unwrap();
        let source = source_of(&[1; 100_000]);
        for restart in [false, true] {
            let journal = JournalOptions { restart, ..journal(&path) };
            let options = EngineOptions { journal: Some(journal), ..options(&path) };
            let target = source_of(&[0; 100_000]);
            let error = run(&source, &target, &options).await.unwrap_err().to_string();
            assert!(error.contains("not a journal"), "{error}");
        }
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "dear all");
        // The neighbouring names are foreign files, too.
        std::fs::write(scratch.file("fresh.new"), "dear all").unwrap();
        let fresh = scratch.file("fresh");
        run(&source, &source_of(&[0; 100_000]), &options(&fresh)).await.unwrap();
        assert_eq!(std::fs::read_to_string(scratch.file("fresh.new")).unwrap(), "dear all");
        // These have no end.
        for restart in [false, true] {
            let journal = JournalOptions { restart, ..journal(Path::new("/dev/full")) };
            let options = EngineOptions { journal: Some(journal), ..options(&path) };
            let target = source_of(&[0; 100_000]);
            let error = run(&source, &target, &options).await.unwrap_err().to_string();
            assert!(error.contains("not a regular file"), "{error}");
        }

        let path = scratch.file("journal");
        let bytes = content(&mut Rng::new(9), 2 << 20);
        interrupted(&path, &source_of(&bytes), 2 << 20).await;
        let held = std::fs::File::open(&path).unwrap();
        rustix::fs::flock(&held, rustix::fs::FlockOperation::LockExclusive).unwrap();
        let target = source_of(&[0; 2 << 20]);
        let error = run(&source_of(&bytes), &target, &options(&path)).await.unwrap_err();
        assert!(error.to_string().contains("another copy is using it"), "{error}");
    });
}

#[test]
fn a_target_without_flush_is_recorded_and_said_so() {
    on_worker(|| async {
        let scratch = ScratchDir::new().unwrap();
        let path = scratch.file("journal");
        let bytes = content(&mut Rng::new(2), 2 << 20);
        let mut facts = Model::all_facts(2 << 20);
        facts.can -= Can::FLUSH | Can::FUA;
        let disk = ModelDevice::new(Model::with_facts(facts), CompletionOrder::Immediate);
        let end = Stack::over(disk.clone());
        let summary = run(&source_of(&bytes), &end, &options(&path)).await.unwrap();
        assert!(disk.bytes() == bytes);
        assert!(summary.warnings.iter().any(|text| text.contains("cannot be flushed")));
    });
}
