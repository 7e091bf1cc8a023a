//! Copies that discard their source, where source and target are one storage, or one of them becomes another.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use blockhaul_block::{
    Can, Device, Error, Facts, Kind, Op, OpKind, PendingRequest, Reply, Request,
};
use blockhaul_catalog::{
    Backend, BackendTarget, DeviceSpec, HandleOpener, Intent, OpenFuture, OpenedDevice, Registry,
    Stack,
};
use blockhaul_engine::{
    CopyError, CopyProgress, CopySummary, EngineOptions, JournalOptions, RateLimit, Side, copy,
};
use blockhaul_io::{IoEngine, Pool, Reservation, Runtime, RuntimeConfig, is_zero};
use blockhaul_testkit::model::{CompletionOrder, Model, ModelDevice, TrimEffect};
use blockhaul_testkit::rng::{Rng, seed};
use blockhaul_testkit::tools::ScratchDir;

const SIZE: usize = 1 << 20;

fn on_worker<F: Future<Output = ()> + 'static>(check: impl FnOnce() -> F + Send + 'static) {
    Runtime::start(&RuntimeConfig { workers: 2, engine: IoEngine::Auto }).unwrap().block_on(check);
}

fn options(journal: Option<&Path>) -> EngineOptions {
    let journal = journal.map(|path| JournalOptions {
        path: path.into(),
        restart: false,
        keep: false,
        interval: Duration::ZERO,
        source: "source".into(),
        target: "target".into(),
    });
    EngineOptions {
        discard_source: true,
        segment: 64 << 10,
        request_size: 16 << 10,
        connections: 1,
        retries: 0,
        journal,
        ..EngineOptions::default()
    }
}

async fn run(
    from: &Arc<impl Device + 'static>,
    to: &Arc<impl Device + 'static>,
    options: &EngineOptions,
) -> Result<CopySummary, CopyError> {
    let [from, to] = [Stack::over(from.clone()), Stack::over(to.clone())];
    copy(&from, &to, options, &Pool::new(8 << 20), &Arc::new(CopyProgress::new())).await
}

fn bytes() -> Vec<u8> {
    let mut bytes = vec![0; SIZE];
    Rng::new(seed()).fill(&mut bytes[3 * 4096..]);
    bytes
}

fn disk(bytes: &[u8]) -> Arc<ModelDevice> {
    let model = Model::new(SIZE as u64).with_content(bytes.to_vec()).with_trim(TrimEffect::Zeroes);
    ModelDevice::new(model, CompletionOrder::Deferred)
}

/// How a disk is seen at another address.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Form {
    /// As it is.
    Same,
    /// Each byte is another one.
    Inverted,
    /// Blocks that were read once are not read again.
    Cached,
}

struct View {
    disk: Arc<ModelDevice>,
    form: Form,
    cache: Arc<Mutex<BTreeMap<u64, Vec<u8>>>>,
}

impl Device for View {
    fn facts(&self) -> Arc<Facts> {
        self.disk.facts()
    }

    fn submit(&self, request: Request) -> PendingRequest {
        if request.kind() != OpKind::Read || self.form == Form::Same {
            return self.disk.submit(request);
        }
        let (at, form, cache) = (request.at, self.form, self.cache.clone());
        let len = request.len as usize;
        let reply = self.disk.submit(request);
        PendingRequest::start(async move {
            let mut bytes = match reply.await? {
                Reply::Data(data) => data.bytes().to_vec(),
                _ => vec![0; len],
            };
            if form == Form::Inverted {
                bytes.iter_mut().for_each(|byte| *byte ^= 0xff);
            }
            for (block, at) in bytes.chunks_mut(4096).zip((at..).step_by(4096)) {
                if form == Form::Cached {
                    let mut cache = cache.lock().unwrap();
                    block.copy_from_slice(cache.entry(at).or_insert_with(|| block.to_vec()));
                }
            }
            let mut buf = Reservation::unpooled(len).into_buf();
            buf.copy_from_slice(&bytes);
            Ok(Reply::Data(buf.into()))
        })
    }
}

#[test]
fn one_storage_is_recognized_in_another_form_and_behind_a_cache() {
    on_worker(|| async {
        let scratch = ScratchDir::new().unwrap();
        let path = scratch.file("journal");
        let bytes = bytes();
        for form in [Form::Same, Form::Inverted, Form::Cached] {
            for journal in [Some(&*path), None] {
                let target = disk(&bytes);
                for _ in 0..2 {
                    let cache = Arc::default();
                    let source = Arc::new(View { disk: target.clone(), form, cache });
                    let error = run(&source, &target, &options(journal)).await.unwrap_err();
                    assert_eq!((error.kind(), error.side), (Kind::Invalid, Some(Side::Target)));
                    assert!(error.to_string().contains("one storage"), "{form:?}: {error}");
                    assert!(!path.exists() && target.bytes() == bytes, "{form:?}");
                }
                assert!(target.seen().iter().all(|seen| seen.kind != OpKind::Trim), "{form:?}");
            }
        }
    });
}

/// A disk that is replaced by another one after some writes of data, without an error.
struct SwappedDisk {
    disks: [Arc<ModelDevice>; 2],
    left: AtomicU64,
}

impl Device for SwappedDisk {
    fn facts(&self) -> Arc<Facts> {
        self.disks[0].facts()
    }

    fn submit(&self, request: Request) -> PendingRequest {
        let counts = request.len == 16 << 10;
        let left = self.left.load(Ordering::SeqCst);
        if left > 0 && counts {
            self.left.fetch_sub(1, Ordering::SeqCst);
        }
        self.disks[usize::from(left == 0)].submit(request)
    }
}

/// What the source lacks is on the target that the copy began with.
#[track_caller]
fn nothing_is_lost(source: &ModelDevice, target: &ModelDevice, bytes: &[u8]) {
    let (left, there) = (source.bytes(), target.bytes());
    for at in (0..SIZE).step_by(4096) {
        let block = at..at + 4096;
        assert!(
            left[block.clone()] == bytes[block.clone()] || there[block.clone()] == bytes[block],
            "lost at {at}"
        );
    }
}

#[test]
fn a_side_that_becomes_another_disk_without_an_error_ends_the_copy() {
    on_worker(|| async {
        let scratch = ScratchDir::new().unwrap();
        let path = scratch.file("journal");
        let bytes = bytes();
        let blank = vec![0; SIZE];
        for left in (1..44).step_by(3) {
            for journal in [Some(&*path), None] {
                let _ = std::fs::remove_file(&path);
                let mut options = options(journal);
                // One batch: no write is under way between its check and its marker.
                if let Some(journal) = &mut options.journal {
                    journal.interval = Duration::from_secs(60);
                }
                let source = disk(&bytes);
                let disks = [disk(&blank), disk(&blank)];
                let target = Arc::new(SwappedDisk { disks, left: left.into() });
                let error = run(&source, &target, &options)
                    .await
                    .expect_err(&format!("{left} {journal:?}"));
                assert_eq!(error.side, Some(Side::Target), "{left}: {error}");
                assert!(error.to_string().contains("is it another disk?"), "{left}: {error}");
                nothing_is_lost(&source, &target.disks[0], &bytes);
                let _ = std::fs::remove_file(&path);
                let disks = [disk(&bytes), disk(&blank)];
                let source = Arc::new(SwappedDisk { disks, left: left.into() });
                let target = disk(&blank);
                let error = run(&source, &target, &options).await.unwrap_err();
                assert_eq!(error.side, Some(Side::Source), "{left}: {error}");
                nothing_is_lost(&source.disks[0], &target, &bytes);
                assert!(is_zero(&source.disks[1].bytes()));
            }
        }
    });
}

/// A disk that fails after some requests, and keeps the states that it had before its writes.
struct FailingDisk {
    disk: Arc<ModelDevice>,
    left: AtomicU64,
    states: Mutex<Vec<Vec<u8>>>,
}

impl FailingDisk {
    fn new(bytes: &[u8], left: u64) -> Arc<FailingDisk> {
        Arc::new(FailingDisk { disk: disk(bytes), left: left.into(), states: Mutex::default() })
    }

    /// All states, the newest one last.
    fn states(&self) -> Vec<Vec<u8>> {
        let mut states = self.states.lock().unwrap().clone();
        states.push(self.disk.bytes());
        states.dedup();
        states
    }
}

impl Device for FailingDisk {
    fn facts(&self) -> Arc<Facts> {
        self.disk.facts()
    }

    fn submit(&self, request: Request) -> PendingRequest {
        if request.kind() == OpKind::Write {
            let left = self.left.load(Ordering::SeqCst);
            if left == 0 {
                let error = Error::new(Kind::NoSpace, "full");
                return PendingRequest::start(async move { Err(error) });
            }
            self.left.fetch_sub(1, Ordering::SeqCst);
            self.states.lock().unwrap().push(self.disk.bytes());
        }
        self.disk.submit(request)
    }
}

/// Runs a copy to a target that fails after some writes.
async fn begun(
    bytes: &[u8],
    left: u64,
    options: &EngineOptions,
) -> (Arc<ModelDevice>, Arc<FailingDisk>) {
    let source = disk(bytes);
    let target = FailingDisk::new(&vec![0; SIZE], left);
    let error = run(&source, &target, options).await.unwrap_err();
    assert_eq!(error.kind(), Kind::NoSpace, "{error}");
    (source, target)
}

#[test]
fn a_target_that_is_rolled_back_below_the_journal_is_refused() {
    on_worker(|| async {
        let scratch = ScratchDir::new().unwrap();
        let path = scratch.file("journal");
        let bytes = bytes();
        let mut refused = 0;
        for left in [1, 2, 3, 9, 14, 15, 16, 17, 18, 40, 55, 66] {
            let _ = std::fs::remove_file(&path);
            let options = options(Some(&path));
            let (source, target) = begun(&bytes, left, &options).await;
            let journal = std::fs::read(&path).unwrap();
            let source = source.bytes();
            let states = target.states();
            let first = states.len().saturating_sub(24);
            for (number, state) in states.iter().enumerate().skip(first) {
                std::fs::write(&path, &journal).unwrap();
                let (source, target) = (disk(&source), disk(state));
                let copied = run(&source, &target, &options).await;
                let is_newest = number + 1 == states.len();
                match copied {
                    Ok(_) => assert!(target.bytes() == bytes, "{left}: state {number}"),
                    Err(error) => {
                        assert!(!is_newest, "{left}: {error}");
                        assert_eq!((error.kind(), error.side), (Kind::Invalid, Some(Side::Target)));
                        assert!(target.bytes() == *state, "{left}: state {number} was changed");
                        refused += 1;
                    }
                }
            }
        }
        assert!(refused > 0, "states of before the last record");
    });
}

#[test]
fn what_the_marker_has_replaced_in_one_storage_is_written_back_by_the_same_command() {
    on_worker(|| async {
        let scratch = ScratchDir::new().unwrap();
        let path = scratch.file("journal");
        let bytes = bytes();
        let target = FailingDisk::new(&bytes, 1);
        let (disk, cache) = (target.disk.clone(), Arc::default());
        let source = Arc::new(View { disk, form: Form::Same, cache });
        let error = run(&source, &target, &options(Some(&path))).await.unwrap_err().to_string();
        assert!(
            error.contains("one storage") && error.contains("only the same command"),
            "{error}"
        );
        assert!(!error.contains("another storage") && target.disk.bytes() != bytes);
        target.left.store(9, Ordering::SeqCst);
        let error = run(&source, &target, &options(Some(&path))).await.unwrap_err().to_string();
        assert!(error.contains("copy to another storage"), "{error}");
        assert!(target.disk.bytes() == bytes && !path.exists());
    });
}

#[test]
fn the_marker_of_another_copy_is_refused_on_both_sides() {
    on_worker(|| async {
        let scratch = ScratchDir::new().unwrap();
        let [path, other] = ["journal", "other"].map(|name| scratch.file(name));
        let bytes = bytes();
        let (source, target) = begun(&bytes, 40, &options(Some(&path))).await;
        let before = target.disk.bytes();
        for journal in [Some(&*other), None] {
            let error = run(&source, &target.disk, &options(journal)).await.unwrap_err();
            assert_eq!((error.kind(), error.side), (Kind::Invalid, Some(Side::Target)));
            assert!(error.to_string().contains("the marker of another copy"), "{error}");
            let empty = disk(&vec![0; SIZE]);
            let error = run(&target.disk, &empty, &options(journal)).await.unwrap_err();
            assert_eq!((error.kind(), error.side), (Kind::Invalid, Some(Side::Source)));
            assert!(error.to_string().contains("has overwritten"), "{error}");
            assert!(is_zero(&empty.bytes()) && target.disk.bytes() == before);
            assert!(!other.exists());
        }
        // It is the first content that the target has.
        let mut first = vec![0; SIZE];
        let at = before.windows(16).position(|bytes| bytes == b"blockhaul marker").unwrap();
        first[at..].copy_from_slice(&before[at..]);
        let incomplete = disk(&first);
        let error = run(&incomplete, &disk(&bytes), &options(None)).await.unwrap_err();
        assert!(error.to_string().contains("has overwritten"), "{error}");
        run(&source, &target.disk, &options(Some(&path))).await.unwrap();
        assert!(target.disk.bytes() == bytes);
    });
}

/// A disk with a replica, which has all that was written before the newest marker. After some requests, connections
/// to the disk are lost: all of them, or only one, and each later one leads to the replica.
struct ReplicatedDisk {
    disk: Arc<ModelDevice>,
    replica: Mutex<Option<Arc<ModelDevice>>>,
    /// What the disk had with the newest marker.
    state: Mutex<Vec<u8>>,
    left: AtomicU64,
    is_split: bool,
    cut: AtomicBool,
    /// Whether the disk promises that all connections show it.
    promises: bool,
    connections: AtomicU64,
    /// The number of the marker that is in flight when its connection is lost, from 1; 0: none.
    lost_marker: u64,
    markers: AtomicU64,
    /// What that write has, until it is carried out: after the next write to its place, or after the copy.
    late: Mutex<Option<(u64, Vec<u8>)>>,
    is_soon: bool,
}

struct Connection {
    shared: Arc<ReplicatedDisk>,
    disk: Arc<ModelDevice>,
    is_lost: AtomicBool,
}

impl ReplicatedDisk {
    fn new(left: u64, is_split: bool, promises: bool) -> Arc<ReplicatedDisk> {
        let bytes = vec![0; SIZE];
        let (disk, state) = (disk(&bytes), Mutex::new(bytes));
        let replica = Mutex::default();
        Arc::new(ReplicatedDisk {
            disk,
            replica,
            state,
            left: left.into(),
            is_split,
            cut: false.into(),
            promises,
            connections: 0.into(),
            lost_marker: 0,
            markers: 0.into(),
            late: Mutex::default(),
            is_soon: false,
        })
    }

    /// The same, where the connection of a marker is lost.
    fn late(lost_marker: u64, is_soon: bool) -> Arc<ReplicatedDisk> {
        let mut shared = ReplicatedDisk::new(u64::MAX, false, true);
        let changed = Arc::get_mut(&mut shared).unwrap();
        (changed.lost_marker, changed.is_soon) = (lost_marker, is_soon);
        shared
    }

    /// Keeps a write that is in flight when its connection is lost.
    fn keeps(&self, request: &Request) -> bool {
        let Op::Write(data) = &request.op else { return false };
        let is_lost = data.bytes().starts_with(b"blockhaul marker")
            && self.markers.fetch_add(1, Ordering::SeqCst) + 1 == self.lost_marker;
        if is_lost {
            *self.late.lock().unwrap() = Some((request.at, data.bytes().to_vec()));
        }
        is_lost
    }

    /// Carries out the write of the lost connection.
    async fn carry_out(&self) {
        let Some((at, bytes)) = self.late.lock().unwrap().take() else { return };
        let mut room = Reservation::unpooled(bytes.len()).into_buf();
        room.copy_from_slice(&bytes);
        self.disk.submit(Request::write(at, room.into())).await.unwrap();
    }

    /// Whether a request over a connection to the disk is lost.
    fn is_cut(&self, is_lost: &AtomicBool) -> bool {
        let left =
            self.left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1));
        if left.is_err() && (!self.is_split || !self.cut.swap(true, Ordering::SeqCst)) {
            is_lost.store(true, Ordering::SeqCst);
        }
        is_lost.load(Ordering::SeqCst)
    }
}

impl Device for Connection {
    fn facts(&self) -> Arc<Facts> {
        let mut facts = Facts::clone(&self.disk.facts());
        facts.can.set(Can::MULTI_CONN, self.shared.promises);
        Arc::new(facts)
    }

    fn submit(&self, request: Request) -> PendingRequest {
        let shared = self.shared.clone();
        let is_disk = Arc::ptr_eq(&self.disk, &shared.disk);
        if is_disk && shared.is_cut(&self.is_lost) {
            let error = Error::new(Kind::Disconnected, "the connection was cut");
            return PendingRequest::start(async move { Err(error) });
        }
        if shared.keeps(&request) {
            self.is_lost.store(true, Ordering::SeqCst);
            let error = Error::new(Kind::Disconnected, "the connection was cut");
            return PendingRequest::start(async move { Err(error) });
        }
        let range = request.at..request.at + request.len;
        let is_write = matches!(request.op, Op::Write(_));
        let is_marker = match &request.op {
            Op::Write(data) => is_disk && data.bytes().starts_with(b"blockhaul marker"),
            _ => false,
        };
        let inner = self.disk.submit(request);
        PendingRequest::start(async move {
            let outcome = inner.await;
            let late = shared.late.lock().unwrap().as_ref().map(|late| late.0);
            let is_over = is_write && !is_marker && late.is_some_and(|at| range.contains(&at));
            if shared.is_soon && is_over {
                shared.carry_out().await;
            }
            if is_marker {
                *shared.state.lock().unwrap() = shared.disk.bytes();
            }
            outcome
        })
    }
}

struct Listener(Arc<ReplicatedDisk>);

impl Listener {
    fn connect(&self) -> Arc<dyn Device> {
        let shared = self.0.clone();
        shared.connections.fetch_add(1, Ordering::SeqCst);
        let state = shared.state.lock().unwrap().clone();
        let disk = if shared.left.load(Ordering::SeqCst) > 0 {
            shared.disk.clone()
        } else {
            shared.replica.lock().unwrap().get_or_insert_with(|| disk(&state)).clone()
        };
        Arc::new(Connection { shared, disk, is_lost: false.into() })
    }
}

impl Backend for Listener {
    fn schemes(&self) -> &'static [&'static str] {
        &["replicated"]
    }

    fn operand(&self) -> &'static str {
        ""
    }

    fn summary(&self) -> &'static str {
        "for tests"
    }

    fn open(&self, _: BackendTarget) -> OpenFuture<OpenedDevice> {
        let device = self.connect();
        let more = Arc::new(Listener(self.0.clone()));
        Box::pin(async move { Ok(OpenedDevice { device, more: Some(more) }) })
    }
}

impl HandleOpener for Listener {
    fn another(&self) -> OpenFuture<Arc<dyn Device>> {
        let device = self.connect();
        Box::pin(async move { Ok(device) })
    }
}

#[test]
fn what_a_replica_lacks_of_the_last_flush_is_copied_again() {
    on_worker(|| async {
        for left in 4..150 {
            for lanes in [1, 3] {
                fail_over(left, lanes, false).await;
            }
            fail_over(left, 3, true).await;
        }
    });
}

/// A stack over connections to a disk.
async fn connected(shared: &Arc<ReplicatedDisk>) -> Stack {
    let backends: Vec<Arc<dyn Backend>> = vec![Arc::new(Listener(shared.clone()))];
    let registry = Registry { backends, ..Registry::default() };
    let spec = DeviceSpec::Scheme { scheme: "replicated".into(), rest: String::new() };
    registry.open(&spec, Vec::new(), Intent::WRITE).await.unwrap()
}

#[test]
fn a_copy_is_stopped_while_a_lane_waits_to_be_examined() {
    on_worker(|| async {
        let shared = ReplicatedDisk::new(u64::MAX, false, false);
        let to = connected(&shared).await;
        let from = Stack::over(disk(&bytes()));
        // The first lane waits for its rate, and the second one for a block that the first one has written.
        let options = EngineOptions {
            connections: 2,
            adaptive_connections: false,
            rate: Some(Arc::new(RateLimit::new(16 << 10, 0))),
            ..options(None)
        };
        let progress = Arc::new(CopyProgress::new());
        let copying = {
            let progress = progress.clone();
            async move { copy(&from, &to, &options, &Pool::new(8 << 20), &progress).await }
        };
        let cancelling = async {
            while shared.connections.load(Ordering::SeqCst) < 2 {
                blockhaul_io::sleep(Duration::from_millis(1)).await;
            }
            blockhaul_io::sleep(Duration::from_millis(50)).await;
            progress.cancel();
        };
        let copied = blockhaul_io::timeout(Duration::from_secs(60), async {
            let copying = blockhaul_io::spawn(copying);
            cancelling.await;
            copying.await
        });
        let error = copied.await.expect("the copy ends").unwrap_err();
        assert_eq!(error.kind(), Kind::ShuttingDown, "{error}");
    });
}

#[test]
fn a_marker_that_is_written_late_is_not_left_on_the_target() {
    on_worker(|| async {
        let scratch = ScratchDir::new().unwrap();
        let path = scratch.file("journal");
        let bytes = bytes();
        let mut kept = 0;
        for (number, is_soon) in (1..12).flat_map(|number| [(number, false), (number, true)]) {
            let which = format!("marker {number}, soon: {is_soon}");
            let _ = std::fs::remove_file(&path);
            let shared = ReplicatedDisk::late(number, is_soon);
            let source = disk(&bytes);
            let from = Stack::over(source.clone());
            let options = EngineOptions {
                retries: 3,
                retry_delay: Duration::from_millis(1),
                ..options(Some(&path))
            };
            let again = async || {
                let to = connected(&shared).await;
                copy(&from, &to, &options, &Pool::new(8 << 20), &Arc::new(CopyProgress::new()))
                    .await
            };
            let first = again().await.unwrap();
            assert!(shared.disk.bytes() == bytes, "{which}");
            let late = shared.late.lock().unwrap().as_ref().map(|late| late.0 as usize);
            if first.not_discarded == 0 {
                assert!(is_zero(&source.bytes()) && late.is_none(), "{which}");
                continue;
            }
            kept += 1;
            assert!(first.warnings.iter().any(|text| text.contains("run the same command")));
            shared.carry_out().await;
            // A marker that fits the journal is removed.
            if let (Some(at), Err(error)) = (late, again().await) {
                let error = error.to_string();
                assert!(error.contains(&format!("--range {at}:4096")), "{which}: {error}");
                let block = source.bytes()[at..at + 4096].to_vec();
                let mut room = Reservation::unpooled(4096).into_buf();
                room.copy_from_slice(&block);
                shared.disk.submit(Request::write(at as u64, room.into())).await.unwrap();
            }
            let second = again().await.unwrap();
            assert_eq!(second.not_discarded, 0, "{which}");
            assert!(shared.disk.bytes() == bytes && is_zero(&source.bytes()), "{which}");
        }
        assert!(kept > 10, "{kept}");
    });
}

async fn fail_over(left: u64, lanes: usize, is_split: bool) {
    let scratch = ScratchDir::new().unwrap();
    let path = scratch.file("journal");
    let bytes = bytes();
    for journal in [Some(&*path), None] {
        let shared = ReplicatedDisk::new(left, is_split, true);
        let to = connected(&shared).await;
        let source = disk(&bytes);
        let from = Stack::over(source.clone());
        let options = EngineOptions {
            connections: lanes,
            adaptive_connections: false,
            retries: 3,
            retry_delay: Duration::from_millis(1),
            ..options(journal)
        };
        let progress = Arc::new(CopyProgress::new());
        let copied = copy(&from, &to, &options, &Pool::new(8 << 20), &progress).await;
        let which = format!("{left} requests, {lanes} lanes, split: {is_split}, {journal:?}");
        let (disk, source) = (shared.disk.bytes(), source.bytes());
        let replica = shared.replica.lock().unwrap().clone();
        let replica = replica.map_or_else(|| disk.clone(), |replica| replica.bytes());
        match copied {
            // All requests may have succeeded before the connections were lost.
            Ok(_) => assert!(replica == bytes || disk == bytes, "{which}"),
            // The replica is that of before the copy, or lacks the removal of the marker.
            Err(error) => assert_eq!(error.side, Some(Side::Target), "{which}: {error}"),
        }
        if is_split {
            let has = |disk: &[u8], range: Range<usize>| disk[range.clone()] == bytes[range];
            for at in (0..SIZE).step_by(4096) {
                let block = || at..at + 4096;
                let is_marker = disk[at..].starts_with(b"blockhaul marker");
                let is_there = [&disk, &replica, &source].iter().any(|disk| has(disk, block()));
                assert!(is_there || is_marker, "{which}: block {} is lost", at / 4096);
            }
        }
    }
}
