//! Failed flushes: storage that loses what it could not write back, reports that once, to the first
//! flush, and still answers reads from memory.

use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use blockhaul_block::{
    Can, Device, Error, Facts, Kind, OpKind, Outcome, PendingRequest, Reply, Request, Result,
};
use blockhaul_catalog::{
    Backend, BackendTarget, DeviceSpec, HandleOpener, Intent, OpenFuture, OpenedDevice, Registry,
    Stack,
};
use blockhaul_engine::{
    CopyError, CopyProgress, CopySummary, EngineOptions, JournalOptions, RateLimit, copy,
};
use blockhaul_io::{IoEngine, Pool, Runtime, RuntimeConfig};
use blockhaul_testkit::model::{CompletionOrder, Model, ModelDevice, TrimEffect};
use blockhaul_testkit::rng::{Rng, seed};
use blockhaul_testkit::tools::ScratchDir;

const SEGMENT: u64 = 64 << 10;

/// Storage behind a page cache, as the kernel has it: one open file for all handles.
struct Storage {
    facts: Arc<Facts>,
    state: Mutex<State>,
}

struct State {
    /// What reads return.
    cached: Model,
    /// What is left after a power loss.
    disk: Vec<u8>,
    /// Ranges that were changed and not written back yet.
    dirty: Vec<(usize, usize)>,
    /// A writeback has failed, and the error was not reported yet.
    unreported: bool,
    /// Random writebacks fail after this many changes.
    faults: u64,
    sound: u64,
    /// After a failed flush all others fail, too.
    stays_failed: bool,
    /// The remedy of failed flushes.
    remedy: Option<&'static str>,
    failed: bool,
    /// The copier got the error: the reply was not lost with its connection.
    heard: bool,
    flushes: u64,
    /// Requests until a connection is lost, and how often.
    fuse: u64,
    cuts_left: u64,
    /// Changes since the first failed flush.
    changes_after: u64,
    rng: Rng,
}

impl Storage {
    fn new(facts: Facts, content: Option<Vec<u8>>, rng: &mut Rng) -> Arc<Storage> {
        let size = facts.size as usize;
        let model = Model::with_facts(facts);
        let (cached, disk) = match content {
            Some(content) => (model.with_content(content.clone()), content),
            None => (model, vec![0; size]),
        };
        let state = State {
            cached,
            disk,
            dirty: Vec::new(),
            unreported: false,
            faults: 0,
            sound: 0,
            stays_failed: false,
            remedy: None,
            failed: false,
            heard: false,
            flushes: 0,
            fuse: 0,
            cuts_left: 0,
            changes_after: 0,
            rng: Rng::new(rng.number()),
        };
        let facts = state.cached.facts();
        Arc::new(Storage { facts, state: Mutex::new(state) })
    }

    async fn open(self: &Arc<Self>) -> Stack {
        let door = Arc::new(Door(self.clone()));
        let registry = Registry { backends: vec![door], ..Registry::default() };
        let spec = DeviceSpec::Scheme { scheme: "cached".into(), rest: String::new() };
        registry.open(&spec, Vec::new(), Intent::WRITE).await.unwrap()
    }

    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }
}

impl State {
    /// Writes back the first `count` dirty ranges, or loses them.
    fn write_back(&mut self, count: usize) {
        for (at, end) in self.dirty.drain(..count) {
            if self.faults > 0 && self.sound == 0 && self.rng.chance(20) {
                self.faults -= 1;
                self.unreported = true;
                continue;
            }
            self.disk[at..end].copy_from_slice(&self.cached.bytes()[at..end]);
        }
    }

    fn apply(&mut self, request: Request) -> Outcome {
        let changes = request.kind().changes();
        let at = request.at as usize;
        let end = at + request.len as usize;
        let reply = self.cached.apply(request)?;
        if changes {
            self.changes_after += u64::from(self.failed);
            self.dirty.push((at, end));
            self.sound = self.sound.saturating_sub(1);
            // Sometimes the kernel writes back without a flush.
            if self.rng.chance(10) {
                let count = self.rng.below(self.dirty.len() as u64 + 1) as usize;
                self.write_back(count);
            }
        }
        Ok(reply)
    }

    /// Whether the connection of this request is lost now.
    fn burns(&mut self) -> bool {
        if self.cuts_left == 0 || self.fuse > 0 {
            self.fuse = self.fuse.saturating_sub(1);
            return false;
        }
        self.cuts_left -= 1;
        self.fuse = self.rng.between(5, 60);
        true
    }

    fn flushed(&mut self) -> Outcome {
        self.flushes += 1;
        if std::mem::take(&mut self.unreported) || (self.failed && self.stays_failed) {
            self.failed = true;
            let error = Error::new(Kind::Io, "Input/output error");
            return Err(self.remedy.map_or(error.clone(), |remedy| error.with_remedy(remedy)));
        }
        Ok(Reply::Done)
    }
}

struct Door(Arc<Storage>);

struct Handle {
    storage: Arc<Storage>,
    lost: Arc<AtomicBool>,
}

impl Handle {
    fn on(storage: &Arc<Storage>) -> Arc<Handle> {
        Arc::new(Handle { storage: storage.clone(), lost: Arc::default() })
    }
}

impl Backend for Door {
    fn schemes(&self) -> &'static [&'static str] {
        &["cached"]
    }

    fn operand(&self) -> &'static str {
        ""
    }

    fn summary(&self) -> &'static str {
        "for tests"
    }

    fn open(&self, _: BackendTarget) -> OpenFuture<OpenedDevice> {
        let storage = self.0.clone();
        let device = Handle::on(&storage);
        let more = Handle::on(&storage);
        Box::pin(async move { Ok(OpenedDevice { device, more: Some(more) }) })
    }
}

impl HandleOpener for Handle {
    fn another(&self) -> OpenFuture<Arc<dyn Device>> {
        let device = Handle::on(&self.storage);
        Box::pin(async move { Ok(device as Arc<dyn Device>) })
    }
}

impl Device for Handle {
    fn facts(&self) -> Arc<Facts> {
        self.storage.facts.clone()
    }

    fn submit(&self, request: Request) -> PendingRequest {
        let storage = self.storage.clone();
        let lost = self.lost.clone();
        if storage.state().burns() {
            lost.store(true, Ordering::SeqCst);
        }
        let turns = storage.state().rng.below(20);
        let pause = async move |turns| {
            for _ in 0..turns {
                blockhaul_io::yield_now().await;
            }
        };
        PendingRequest::start(async move {
            pause(turns).await;
            let gone = || Error::new(Kind::Disconnected, "the connection was cut");
            if request.kind() != OpKind::Flush {
                let outcome = storage.state().apply(request);
                return if lost.load(Ordering::SeqCst) { Err(gone()) } else { outcome };
            }
            let turns = {
                let mut state = storage.state();
                let count = state.dirty.len();
                state.write_back(count);
                state.rng.below(40)
            };
            // The error goes to whichever flush comes first.
            pause(turns).await;
            let mut state = storage.state();
            let outcome = state.flushed();
            if lost.load(Ordering::SeqCst) {
                return Err(gone());
            }
            state.heard |= outcome.is_err();
            outcome
        })
    }
}

/// A source whose discarded ranges read as something else, and which looks at what is discarded.
struct Discarded<F> {
    inner: Arc<ModelDevice>,
    look: F,
    /// One discard in so many fails; 0: none.
    fails: u64,
    count: AtomicU64,
}

impl<F: Fn(usize, usize) + Send + Sync> Discarded<F> {
    fn new(bytes: &[u8], fails: u64, look: F) -> Arc<Discarded<F>> {
        let model = Model::new(bytes.len() as u64).with_content(bytes.to_vec());
        let inner =
            ModelDevice::new(model.with_trim(TrimEffect::Garbage), CompletionOrder::Deferred);
        Arc::new(Discarded { inner, look, fails, count: AtomicU64::new(0) })
    }
}

impl<F: Fn(usize, usize) + Send + Sync> Device for Discarded<F> {
    fn facts(&self) -> Arc<Facts> {
        self.inner.facts()
    }

    fn submit(&self, request: Request) -> PendingRequest {
        if request.kind() == OpKind::Trim {
            let count = self.count.fetch_add(1, Ordering::Relaxed) + 1;
            if self.fails > 0 && count.is_multiple_of(self.fails) {
                return PendingRequest::ready(Err(Error::new(Kind::Io, "it cannot be discarded")));
            }
            (self.look)(request.at as usize, (request.at + request.len) as usize);
        }
        self.inner.submit(request)
    }
}

fn on_worker<F: Future<Output = ()> + 'static>(check: impl FnOnce() -> F + Send + 'static) {
    Runtime::start(&RuntimeConfig { workers: 2, engine: IoEngine::Auto }).unwrap().block_on(check);
}

fn source_of(bytes: &[u8]) -> Stack {
    let model = Model::new(bytes.len() as u64).with_content(bytes.to_vec());
    Stack::over(ModelDevice::new(model, CompletionOrder::Deferred))
}

fn journal(path: &Path, interval: Duration) -> JournalOptions {
    JournalOptions {
        keep: false,
        path: path.to_path_buf(),
        restart: false,
        interval,
        source: "source".into(),
        target: "target".into(),
    }
}

fn options() -> EngineOptions {
    EngineOptions {
        flush: true,
        segment: SEGMENT,
        request_size: 16 << 10,
        adaptive_size: false,
        retries: 5,
        retry_delay: Duration::from_millis(1),
        ..EngineOptions::default()
    }
}

fn facts(size: usize) -> Facts {
    let mut facts = Model::all_facts(size as u64);
    facts.zeroed = false;
    // The storage does not look for it.
    facts.can.remove(Can::FUA);
    facts
}

async fn run(
    source: &Stack,
    target: &Stack,
    options: &EngineOptions,
) -> Result<CopySummary, CopyError> {
    let pool = Pool::new(8 << 20);
    copy(source, target, options, &pool, &Arc::new(CopyProgress::new())).await
}

#[test]
fn nothing_that_a_failed_flush_has_lost_is_taken_for_durable() {
    let seed = seed();
    on_worker(move || async move {
        let mut rng = Rng::new(seed);
        let scratch = ScratchDir::new().unwrap();
        let mut heard = 0;
        let mut failed = 0;
        let mut resumed = 0;
        // The number of copies that fail after recording something is random.
        let mut rounds = 0..4000;
        while heard < 50 || failed < 10 || resumed < 2 || rounds.start < 300 {
            let round = rounds.next().expect("enough flushes fail");
            let size = rng.between(1, 2 << 20) as usize;
            let bytes = rng.disk(size, 200_000, 60);
            let source = source_of(&bytes);
            let mut facts = facts(size);
            facts.can.set(Can::MULTI_CONN, rng.chance(70));
            let content = rng.chance(70).then(|| vec![0xa5; size]);
            let storage = Storage::new(facts.clone(), content, &mut rng);
            {
                let mut state = storage.state();
                state.faults = rng.between(0, 5);
                state.sound = rng.below(200);
                state.stays_failed = rng.chance(20);
                (state.fuse, state.cuts_left) = (rng.between(1, 60), rng.between(0, 2));
                if rng.chance(30) {
                    // Zeroes that an earlier run has written without a flush.
                    state.disk.fill(0xa5);
                    state.dirty.push((0, size));
                }
            }
            let path = scratch.file(&format!("journal-{round}"));
            let interval = Duration::from_millis(rng.between(0, 3));
            let options = EngineOptions {
                connections: rng.between(1, 4) as usize,
                sparse: *rng.pick(&[0, 4096]),
                sampled: rng.chance(50),
                journal: rng.chance(60).then(|| journal(&path, interval)),
                ..options()
            };
            let told = format!("seed {seed}, round {round}: {size} bytes, {options:?}");
            let result = run(&source, &storage.open().await, &options).await;
            let disk = {
                let state = storage.state();
                heard += u64::from(state.heard);
                state.disk.clone()
            };
            match result {
                Ok(_) => {
                    assert!(disk == bytes, "success, but bytes are missing; {told}");
                    continue;
                }
                Err(error) => {
                    assert_eq!(error.kind(), Kind::Io, "{error}; {told}");
                    assert!(error.to_string().contains("may be missing"), "{error}; {told}");
                    failed += 1;
                }
            }
            // The power fails, and the copy continues with what was durable.
            if options.journal.is_some() {
                let storage = Storage::new(facts, Some(disk), &mut rng);
                let summary = run(&source, &storage.open().await, &options).await.unwrap();
                assert!(storage.state().disk == bytes, "recorded, but missing; {told}");
                let differs = |text: &String| text.contains("does not contain what the journal");
                assert!(!summary.warnings.iter().any(differs), "recorded, but lost; {told}");
                resumed += u64::from(summary.resumed > 0);
            }
        }
    });
}

// nbd: flush.waits-for-replies
#[test]
fn nothing_is_discarded_at_the_source_that_the_target_can_still_lose() {
    let seed = seed();
    on_worker(move || async move {
        let mut rng = Rng::new(seed);
        let scratch = ScratchDir::new().unwrap();
        let mut heard = 0;
        let mut resumed = 0;
        let mut lost = 0;
        let mut discarded = 0;
        let mut rounds = 0..4000;
        while heard < 30 || resumed < 5 || lost < 5 || rounds.start < 150 {
            let round = rounds.next().expect("enough flushes fail, and connections are lost");
            let size = rng.between(1, 2 << 20) as usize;
            let bytes = rng.disk(size, 200_000, 60);
            let mut facts = facts(size);
            facts.can.set(Can::MULTI_CONN, rng.chance(70));
            let storage = Storage::new(facts.clone(), Some(vec![0xa5; size]), &mut rng);
            {
                let mut state = storage.state();
                state.faults = rng.between(0, 5);
                state.sound = rng.below(200);
                state.stays_failed = rng.chance(20);
                (state.fuse, state.cuts_left) = (rng.between(1, 60), rng.between(0, 2));
            }
            // Only what is on the disk is discarded, and nothing twice.
            let gone: Arc<Mutex<Vec<(usize, usize)>>> = Arc::default();
            let now = Arc::new(Mutex::new(storage.clone()));
            let before = bytes.clone();
            let on = now.clone();
            let noted = gone.clone();
            let wrong: Arc<Mutex<Vec<String>>> = Arc::default();
            let found = wrong.clone();
            let look = move |at: usize, end: usize| {
                let storage = on.lock().unwrap().clone();
                let mut noted = noted.lock().unwrap();
                if storage.state().disk[at..end] != before[at..end] {
                    found.lock().unwrap().push(format!("{at} to {end} is not safe"));
                }
                if noted.iter().any(|old| at < old.1 && old.0 < end) {
                    found.lock().unwrap().push(format!("{at} to {end} again"));
                }
                noted.push((at, end));
            };
            let source = Stack::over(Discarded::new(&bytes, rng.below(4) * 7, look));
            let path = scratch.file(&format!("journal-{round}"));
            let interval = Duration::from_millis(rng.between(0, 3));
            // Several in a segment, of which some may be safe earlier than others.
            let ranges = rng.chance(50).then(|| {
                let mut ranges = Vec::new();
                let mut at = rng.below(size as u64);
                while at < size as u64 {
                    let len = rng.between(1, 40_000).min(size as u64 - at);
                    ranges.push((at, len));
                    at += len + rng.between(1, 20_000);
                }
                Arc::from(ranges)
            });
            let options = EngineOptions {
                connections: rng.between(1, 4) as usize,
                sparse: *rng.pick(&[0, 4096]),
                journal: rng.chance(60).then(|| journal(&path, interval)),
                ranges,
                flush: false,
                discard_source: true,
                ..options()
            };
            let told = format!("seed {seed}, round {round}: {size} bytes, {options:?}");
            let mut expected = vec![0xa5; size];
            let all: Arc<[(u64, u64)]> = Arc::from([(0, size as u64)]);
            for &(at, len) in options.ranges.as_ref().unwrap_or(&all).iter() {
                let range = at as usize..(at + len) as usize;
                expected[range.clone()].copy_from_slice(&bytes[range]);
            }
            let result = run(&source, &storage.open().await, &options).await;
            let disk = {
                let state = storage.state();
                heard += u64::from(state.heard);
                state.disk.clone()
            };
            assert!(wrong.lock().unwrap().is_empty(), "{wrong:?}; {told}");
            for &(at, end) in gone.lock().unwrap().iter() {
                assert!(disk[at..end] == bytes[at..end], "discarded, but lost; {told}");
                discarded += 1;
            }
            match result {
                Ok(summary) => {
                    assert!(disk == expected, "success, but bytes are missing; {told}");
                    let bytes =
                        gone.lock().unwrap().iter().map(|gone| gone.1 - gone.0).sum::<usize>();
                    assert_eq!(summary.discarded, bytes as u64, "{told}");
                    let count = |words: &str| {
                        summary.warnings.iter().filter(|text| text.contains(words)).count()
                    };
                    // A discard that has failed, and a write of the marker that may follow.
                    let warned = [count("cannot discard"), count("run the same command again")];
                    assert!(warned.iter().all(|count| *count <= 1), "{warned:?}; {told}");
                    let is_kept = summary.not_discarded > 0;
                    assert_eq!(warned != [0, 0], is_kept, "{warned:?}; {told}");
                    continue;
                }
                Err(error) if error.kind() == Kind::Disconnected => {
                    let text = error.to_string();
                    assert!(text.contains("parts of the source are discarded"), "{error}; {told}");
                    lost += 1;
                }
                Err(error) => {
                    assert!(error.to_string().contains("may be missing"), "{error}; {told}");
                }
            }
            // The power fails, and the copy goes on without what is gone from the source.
            if options.journal.is_some() {
                let storage = Storage::new(facts, Some(disk), &mut rng);
                *now.lock().unwrap() = storage.clone();
                let summary = run(&source, &storage.open().await, &options).await.expect(&told);
                assert!(
                    storage.state().disk == expected,
                    "it went on, but bytes are missing; {told}"
                );
                resumed += u64::from(summary.resumed > 0);
            }
        }
        assert!(discarded > 1000, "{discarded}");
    });
}

#[test]
fn what_is_copied_is_discarded_while_the_copy_runs() {
    on_worker(|| async {
        let bytes = vec![7; 4 << 20];
        let storage = Storage::new(facts(bytes.len()), None, &mut Rng::new(7));
        let gone = Arc::new(AtomicU64::new(0));
        let noted = gone.clone();
        let source = Discarded::new(&bytes, 0, move |at, end| {
            noted.fetch_add((end - at) as u64, Ordering::Relaxed);
        });
        // Half of it takes two seconds; discards begin after one.
        let rate = Arc::new(RateLimit::new(1 << 20, 0));
        let options = EngineOptions { discard_source: true, rate: Some(rate), ..options() };
        let pool = Pool::new(8 << 20);
        let progress = Arc::new(CopyProgress::new());
        let target = storage.open().await;
        let seen = progress.clone();
        let mut first = 0;
        let running = blockhaul_io::start(async move {
            copy(&Stack::over(source), &target, &options, &pool, &seen).await
        });
        while first == 0 && progress.snapshot().done() < 4 << 20 {
            blockhaul_io::sleep(Duration::from_millis(10)).await;
            first = gone.load(Ordering::Relaxed);
        }
        assert!(first > 0 && first < 4 << 20, "{first}");
        let summary = running.await.unwrap();
        assert_eq!((summary.discarded, gone.load(Ordering::Relaxed)), (4 << 20, 4 << 20));
    });
}

#[test]
fn a_source_is_discarded_only_where_that_is_possible_and_safe() {
    on_worker(|| async {
        let refused = async |source: Facts, target: Facts, options: EngineOptions| {
            let open =
                |facts| ModelDevice::new(Model::with_facts(facts), CompletionOrder::Immediate);
            let source = open(source);
            let target = open(target);
            let ends = [source.clone() as Arc<dyn Device>, target.clone()].map(Stack::over);
            let error = run(&ends[0], &ends[1], &options).await.unwrap_err();
            assert!(source.seen().is_empty() && target.seen().is_empty());
            error.to_string()
        };
        let options = EngineOptions { discard_source: true, ..options() };
        let facts = || facts(1 << 20);
        let without = |can| Facts { can: Can::all() - can, ..facts() };
        let text = refused(without(Can::WRITE), facts(), options.clone()).await;
        assert!(text.contains("read-only: make it writable"), "{text}");
        let text = refused(without(Can::TRIM), facts(), options.clone()).await;
        assert!(text.contains("cannot trim: leave out"), "{text}");
        let text = refused(facts(), without(Can::FLUSH), options.clone()).await;
        assert!(text.contains("the target cannot be flushed"), "{text}");
        let digest = Some(blockhaul_engine::DigestAlgorithm::Blake3);
        let text = refused(facts(), facts(), EngineOptions { digest, ..options }).await;
        assert!(text.contains("may need the source again"), "{text}");
    });
}

#[test]
fn a_target_that_a_flush_publishes_has_its_own_remedy() {
    for remedy in ["unlock it", ""] {
        on_worker(move || async move {
            let bytes = vec![7; 2 << 20];
            let mut facts = facts(bytes.len());
            facts.flush_publishes = true;
            let storage = Storage::new(facts, None, &mut Rng::new(9));
            {
                let mut state = storage.state();
                (state.unreported, state.stays_failed) = (true, true);
                state.remedy = Some(remedy).filter(|remedy| !remedy.is_empty());
            }
            let error = run(&source_of(&bytes), &storage.open().await, &options()).await;
            let error = error.unwrap_err().error;
            let expected = if remedy.is_empty() { "copy again" } else { remedy };
            assert_eq!((error.kind(), error.remedy()), (Kind::Io, Some(expected)), "{error}");
        });
    }
}

#[test]
fn storage_that_stays_failed_ends_the_copy_without_writing_again() {
    for connections in [1, 4] {
        on_worker(move || async move {
            let mut rng = Rng::new(7);
            let bytes = vec![7; 2 << 20];
            let storage = Storage::new(facts(bytes.len()), None, &mut rng);
            {
                let mut state = storage.state();
                (state.unreported, state.stays_failed) = (true, true);
            }
            let options = EngineOptions { connections, ..options() };
            let error = run(&source_of(&bytes), &storage.open().await, &options).await;
            let error = error.unwrap_err();
            assert_eq!((error.kind(), error.error.request().unwrap().0), (Kind::Io, OpKind::Flush));
            let text = error.to_string();
            assert!(text.contains("Input/output error; what was written since"), "{text}");
            let state = storage.state();
            assert!(state.flushes <= 4 + connections as u64, "{} flushes", state.flushes);
            // Other lanes may have been active when the first flush failed.
            assert!(connections > 1 || state.changes_after == 0, "{}", state.changes_after);
        });
    }
}

#[test]
fn a_disk_that_loses_the_same_place_each_time_ends_the_copy() {
    on_worker(|| async {
        let mut rng = Rng::new(7);
        let bytes = vec![7; 1 << 20];
        let storage = Storage::new(facts(bytes.len()), None, &mut rng);
        storage.state().faults = u64::MAX;
        let options = EngineOptions { retries: 100, ..options() };
        let error = run(&source_of(&bytes), &storage.open().await, &options).await.unwrap_err();
        assert!(error.to_string().contains("may be missing"), "{error}");
    });
}

#[test]
fn a_failed_flush_that_nobody_asked_for_is_no_success_either() {
    // After a lost connection the copier flushes before it compares; lanes that have ended before
    // that do not write again.
    let seed = seed();
    on_worker(move || async move {
        let mut rng = Rng::new(seed);
        let mut written_again = 0;
        let mut ended = 0;
        for round in 0..300 {
            let bytes = rng.disk(1 << 20, 100_000, 80);
            let storage = Storage::new(facts(bytes.len()), None, &mut rng);
            {
                let mut state = storage.state();
                state.faults = rng.between(1, 3);
                (state.fuse, state.cuts_left) = (rng.between(10, 100), rng.between(1, 2));
            }
            let options = EngineOptions { flush: false, connections: 3, ..options() };
            let result = run(&source_of(&bytes), &storage.open().await, &options).await;
            let mut state = storage.state();
            if !state.heard {
                result.unwrap();
                continue;
            }
            if let Err(error) = result {
                assert!(error.to_string().contains("may be missing"), "{error}");
                ended += 1;
                continue;
            }
            written_again += 1;
            state.faults = 0;
            let count = state.dirty.len();
            state.write_back(count);
            assert!(state.disk == bytes, "success, but bytes are missing; seed {seed}, {round}");
        }
        assert!(written_again > 0 && ended > 0, "{written_again} {ended}");
    });
}
