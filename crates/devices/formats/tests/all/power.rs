//! Power cuts and failures at each write below an image: QEMU's check finds at most lost clusters,
//! and what was flushed is there.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use blockhaul_block::{
    Compression, Device, Facts, Kind, Op, OpKind, PendingRequest, Request, RequestFlags,
};
use blockhaul_catalog::{
    Backend, BackendTarget, DeviceSpec, HandleOpener, Intent, OpenFuture, OpenedDevice, Registry,
    Stack,
};
use blockhaul_io::{Data, Runtime, RuntimeConfig};
use blockhaul_testkit::crash::CrashDevice;
use blockhaul_testkit::fault::{FaultDevice, FaultEffect, FaultRule};
use blockhaul_testkit::history::{History, SECTOR};
use blockhaul_testkit::model::{CompletionOrder, Model, ModelDevice};
use blockhaul_testkit::rng::{self, Rng};

use blockhaul_formats::qcow2::{self, check::Repair};

use crate::checks::checked;
use crate::common::{Qemu, content, registry, write};

/// Size of the disk, and of the device with its image, in bytes.
const DISK: u64 = 1 << 20;
const DEVICE: u64 = 6 << 20;

/// `given:`: a device of the test, and its further handles.
struct Given(Arc<dyn Device>, Option<Arc<dyn HandleOpener>>);

impl Backend for Given {
    fn schemes(&self) -> &'static [&'static str] {
        &["given"]
    }

    fn operand(&self) -> &'static str {
        ""
    }

    fn summary(&self) -> &'static str {
        "a device of a test"
    }

    fn open(&self, _: BackendTarget) -> OpenFuture<OpenedDevice> {
        let opened = OpenedDevice { device: self.0.clone(), more: self.1.clone() };
        Box::pin(async move { Ok(opened) })
    }
}

/// Opens the image in a device for writing.
async fn open_over(device: Arc<dyn Device>, options: &str) -> blockhaul_block::Result<Stack> {
    open_given(Given(device, None), options).await
}

async fn open_given(given: Given, options: &str) -> blockhaul_block::Result<Stack> {
    let spec = DeviceSpec::parse(std::ffi::OsStr::new(&format!("qcow2:given:?{options}"))).unwrap();
    registry_with(given).open(&spec, Vec::new(), Intent::WRITE).await
}

/// The devices of the formats, and `given:`.
fn registry_with(given: Given) -> Registry {
    let base = registry();
    let mut backends = base.backends.clone();
    backends.push(Arc::new(given));
    Registry { backends, ..base }
}

/// Requests and power cuts of this process.
static REQUESTS: AtomicU64 = AtomicU64::new(0);
static CUTS: AtomicU64 = AtomicU64::new(0);

/// Prints how many there were so far.
fn print_counts() {
    let [requests, cuts] = [&REQUESTS, &CUTS].map(|count| count.load(Ordering::Relaxed));
    println!("{requests} requests, {cuts} power cuts");
}

/// Random requests, some at a time, and flushes; ends when `stop` says so. Failures are noted.
async fn play(device: &Arc<dyn Device>, history: &Mutex<History>, seed: u64, rounds: u64) {
    let mut rng = Rng::new(seed);
    let packs = matches!(device.facts().compression, Compression::All(_));
    for _ in 0..rounds {
        let mut flying = Vec::new();
        let mut taken = Vec::<(u64, u64)>::new();
        for _ in 0..rng.between(1, 4) {
            let at = rng.below(DISK / 512) * 512;
            let most = *rng.pick(&[4, 20, 150]);
            let len = (rng.between(1, most) * 512).min(DISK - at);
            if taken.iter().any(|&(other, end)| at < end && other < at + len) {
                continue;
            }
            taken.push((at, at + len));
            let mut bytes = vec![0; len as usize];
            let kind = rng.below(8);
            let request = match kind {
                0 => Request::zero(at, len),
                1 => Request::zero(at, len).with(blockhaul_block::RequestFlags::NO_HOLE),
                2 => Request::trim(at, len),
                _ => {
                    if packs && rng.chance(80) {
                        bytes.fill_with(|| rng.below(7) as u8);
                    } else {
                        rng.fill(&mut bytes);
                    }
                    Request::write(at, Data::copy_of(&bytes))
                }
            };
            history.lock().unwrap().begun(at, &bytes);
            flying.push((at, bytes.len(), kind, device.submit(request)));
        }
        REQUESTS.fetch_add(flying.len() as u64, Ordering::Relaxed);
        for (at, len, kind, pending) in flying {
            if pending.await.is_ok() && kind != 2 {
                history.lock().unwrap().done(at, len);
            }
        }
        if rng.chance(30) && device.submit(Request::flush()).await.is_ok() {
            history.lock().unwrap().flushed();
        }
    }
}

/// Cuts the power when a device gets its change or flush of this number.
struct Cut {
    inner: Arc<CrashDevice>,
    number: u64,
    seed: u64,
    seen: AtomicU64,
    left: Mutex<Option<Vec<u8>>>,
}

impl Cut {
    fn new(inner: Arc<CrashDevice>, number: u64, seed: u64) -> Cut {
        Cut { inner, number, seed, seen: AtomicU64::new(0), left: Mutex::default() }
    }

    /// What the device has after the cut, if there was one.
    fn left(&self) -> Option<Vec<u8>> {
        self.left.lock().unwrap().take()
    }
}

impl Device for Cut {
    fn facts(&self) -> Arc<Facts> {
        self.inner.facts()
    }

    fn submit(&self, request: Request) -> PendingRequest {
        let counts = !matches!(request.op, Op::Read(_) | Op::Extents(_) | Op::Cache);
        if counts && self.seen.fetch_add(1, Ordering::SeqCst) + 1 == self.number {
            *self.left.lock().unwrap() = Some(self.inner.power_cut(self.seed));
            CUTS.fetch_add(1, Ordering::Relaxed);
        }
        self.inner.submit(request)
    }
}

/// Cuts the power at each change below an image in turn, until `change` ends without a cut: it must
/// succeed then. Gives `check` what is left, and a label. Returns the number of cuts.
pub fn cut_at_each_change(
    image: &Growing<'_>,
    label: &str,
    seed: u64,
    change: impl Fn(Arc<dyn Device>) -> bool,
    check: impl Fn(&[u8], &str),
) -> usize {
    let cuts = (1..).take_while(|&number| {
        let label = format!("{label}, seed {seed}, cut at {number}");
        let inner = CrashDevice::new(image.model(), CompletionOrder::Shuffled(seed));
        let cut = Arc::new(Cut::new(inner, number, seed ^ number));
        let done = change(cut.clone());
        let left = cut.left();
        assert!(done || left.is_some(), "{label}");
        left.is_some_and(|left| {
            check(&left, &label);
            true
        })
    });
    cuts.count()
}

/// An image in a device.
pub struct Growing<'a> {
    pub image: &'a [u8],
    /// Whether the device is as long as the image, and grows.
    pub grows: bool,
}

impl Growing<'_> {
    fn model(&self) -> Model {
        let mut facts = Model::all_facts(DEVICE);
        facts.grows_from = self.grows.then_some(self.image.len() as u64);
        facts.zeroed = false;
        let mut bytes = self.image.to_vec();
        bytes.resize(DEVICE as usize, 0);
        Model::with_facts(facts).with_content(bytes)
    }
}

/// Runs `change` with a registry in which `given:` is the device; whether it succeeds.
pub fn change_given<F>(
    device: Arc<dyn Device>,
    change: impl FnOnce(Registry) -> F + Send + 'static,
) -> bool
where
    F: Future<Output = bool> + 'static,
{
    let runtime =
        Runtime::start(&RuntimeConfig { workers: 1, ..RuntimeConfig::default() }).unwrap();
    runtime.block_on(move || change(registry_with(Given(device, None))))
}

/// An image to start with.
struct Start {
    image: Vec<u8>,
    disk: Vec<u8>,
    options: &'static str,
    grows: bool,
    /// Writes are compressed.
    packs: bool,
}

impl Start {
    fn new(qemu: &Qemu, options: &str, grows: bool, fill: &[String]) -> Start {
        let backed = options.contains("backing_file");
        if backed {
            let mut bytes = vec![0; DISK as usize - 100 * SECTOR];
            Rng::new(5).fill(&mut bytes[70_000..900_000]);
            write(&qemu.file("base"), &bytes);
        }
        qemu.create("start", options, DISK);
        qemu.io("qcow2", "start", fill);
        let image = std::fs::read(qemu.file("start")).unwrap();
        let disk = qemu.raw("start");
        let options = if backed { "backing=file:base" } else { "" };
        Start { image, disk, options, grows, packs: false }
    }

    /// The same image, whose writes are compressed.
    fn packed(self) -> Start {
        Start { packs: true, ..self }
    }

    /// The device with the image.
    fn model(&self) -> Model {
        Growing { image: &self.image, grows: self.grows }.model()
    }

    fn options(&self, qemu: &Qemu) -> String {
        let packs = if self.packs { "on" } else { "off" };
        match self.options {
            "" => format!("compress={packs}"),
            _ => format!("compress={packs}&backing={}", qemu.file("base").display()),
        }
    }
}

/// Images that differ in what a write does.
fn starts(qemu: &Qemu) -> Vec<(String, Start)> {
    let noise: Vec<u8> = (0..200_003_u32).map(|n| (n % 251 * n % 17) as u8 + 1).collect();
    write(&qemu.file("noise"), &noise);
    let packed = ["write -c -s noise 64k 256k".into(), "write -s noise 600k 150k".into()];
    let plain = ["write -s noise 100k 150k".to_string()];
    let mut all = Vec::new();
    for (options, grows, fill) in [
        ("cluster_size=4k", true, &packed[..]),
        ("cluster_size=512,refcount_bits=64", false, &plain[..]),
        ("cluster_size=64k,backing_file=base,backing_fmt=raw", true, &plain[..]),
        ("cluster_size=16k,extended_l2=on,backing_file=base,backing_fmt=raw", false, &plain[..]),
        ("cluster_size=4k,compat=0.10", true, &plain[..]),
    ] {
        all.push((options.to_string(), Start::new(qemu, options, grows, fill)));
    }
    // A snapshot shares clusters with the disk.
    qemu.create("start", "cluster_size=4k", DISK);
    qemu.io("qcow2", "start", &plain);
    qemu.img(&["snapshot", "-c", "one", "start"]);
    let image = std::fs::read(qemu.file("start")).unwrap();
    let disk = qemu.raw("start");
    let start =
        |packs| Start { image: image.clone(), disk: disk.clone(), options: "", grows: true, packs };
    all.push(("snapshot".into(), start(false)));
    all.push(("snapshot, compressed".into(), start(true)));
    for (options, grows, fill) in [
        ("cluster_size=4k,compression_type=zstd,refcount_bits=2", true, &packed[..]),
        ("cluster_size=512", false, &plain[..]),
        ("cluster_size=16k,extended_l2=on,backing_file=base,backing_fmt=raw", true, &plain[..]),
        ("cluster_size=4k,compat=0.10,backing_file=base,backing_fmt=raw", false, &plain[..]),
    ] {
        let start = Start::new(qemu, options, grows, fill).packed();
        all.push((format!("{options}, compressed"), start));
    }
    all
}

/// Runs the requests over a device; all that can be written is when it returns.
fn run(device: Arc<dyn Device>, options: String, history: &Arc<Mutex<History>>, seed: u64) {
    let runtime =
        Runtime::start(&RuntimeConfig { workers: 2, ..RuntimeConfig::default() }).unwrap();
    let history = history.clone();
    runtime.block_on(move || async move {
        // After an early cut, the image cannot be opened.
        if let Ok(stack) = open_over(device, &options).await {
            play(stack.device(), &history, seed, 14).await;
        }
    });
}

/// Checks what is left of an image.
fn check(qemu: &Qemu, start: &Start, image: &[u8], history: &Mutex<History>, label: &str) -> u64 {
    write(&qemu.file("left"), image);
    let (errors, leaks) = qemu.faults("left");
    if errors > 0 {
        let kept = std::env::temp_dir().join("left.qcow2");
        write(&kept, image);
        panic!("{label}: {errors} errors ({})", kept.display());
    }
    check_ours(qemu, leaks, label);
    if !start.options.is_empty() {
        qemu.img(&["rebase", "-u", "-f", "qcow2", "-F", "raw", "-b", "base", "left"]);
    }
    let right = history.lock().unwrap().check(&qemu.raw("left"));
    right.unwrap_or_else(|wrong| panic!("{label}: {wrong}"));
    leaks
}

/// Our check finds the same as QEMU's, and repairs it.
fn check_ours(qemu: &Qemu, leaks: u64, label: &str) {
    let found = checked(&qemu.file("left"), Repair::Nothing);
    let summary = (found.corruptions, found.leaks);
    assert_eq!(summary, (0, leaks), "{label}: {:?}", found.faults);
    if leaks > 0 {
        std::fs::copy(qemu.file("left"), qemu.file("repaired")).unwrap();
        let found = checked(&qemu.file("repaired"), Repair::Leaks);
        let summary = (found.corruptions, found.leaks, found.leaks_fixed);
        assert_eq!(summary, (0, 0, leaks), "{label}: {:?}", found.faults);
        qemu.check("repaired", label);
    }
}

fn long() -> bool {
    std::env::var_os("BLOCKHAUL_LONG").is_some()
}

#[test]
fn a_power_cut_at_any_write_loses_nothing_that_was_flushed() {
    let Some(qemu) = Qemu::find() else { return };
    let seed = rng::seed();
    eprintln!("BLOCKHAUL_SEED={seed}");
    for (name, start) in starts(&qemu) {
        for round in 0..if long() { 3 } else { 1 } {
            cut_at_each(&qemu, &name, &start, seed.wrapping_add(round));
        }
    }
    print_counts();
}

fn cut_at_each(qemu: &Qemu, name: &str, start: &Start, seed: u64) {
    let mut number = 1;
    let mut cuts = 0;
    loop {
        let label = format!("{name}, seed {seed}, cut at {number}");
        let inner = CrashDevice::new(start.model(), CompletionOrder::Shuffled(seed));
        let cut = Arc::new(Cut::new(inner, number, seed ^ number));
        let history = Arc::new(Mutex::new(History::new(&start.disk)));
        run(cut.clone(), start.options(qemu), &history, seed);
        let Some(left) = cut.left() else { break };
        check(qemu, start, &left, &history, &label);
        cuts += 1;
        // Neighbours differ little.
        number += if long() { 1 } else { 1 + number / 3 };
    }
    assert!(cuts > 5, "{name}: {cuts} cuts");
}

#[test]
fn a_failure_at_any_write_ruins_nothing() {
    let Some(qemu) = Qemu::find() else { return };
    let seed = rng::seed();
    eprintln!("BLOCKHAUL_SEED={seed}");
    for (name, start) in starts(&qemu) {
        for (kind, op) in [
            (Kind::NoSpace, OpKind::Write),
            (Kind::Io, OpKind::Write),
            (Kind::Io, OpKind::Flush),
            (Kind::Io, OpKind::Read),
        ] {
            let mut number = 1;
            loop {
                let label = format!("{name}, seed {seed}, {kind:?} of {op:?} {number}");
                let model = ModelDevice::new(start.model(), CompletionOrder::Shuffled(seed));
                let fault = FaultDevice::over(model.clone(), seed);
                // Later ones fail as well, as on a full disk, or not.
                let rule = FaultRule::new(FaultEffect::Fail(kind)).kind(op).nth(number);
                fault.add(rule);
                let history = Arc::new(Mutex::new(History::new(&start.disk)));
                run(fault.clone(), start.options(&qemu), &history, seed);
                check(&qemu, &start, &model.bytes(), &history, &label);
                if fault.failures().is_empty() {
                    break;
                }
                number += if long() { 1 } else { 1 + number };
            }
            assert!(number > 1, "{name}: no {op:?}");
        }
    }
}

/// Options of a new image, at random.
fn any_options(rng: &mut Rng) -> String {
    let cluster = *rng.pick(&["512", "1k", "4k", "16k", "64k", "256k"]);
    let mut options = format!("cluster={cluster}&cache={}", rng.pick(&["4k", "1M"]));
    let may_have_subclusters = !["512", "1k", "4k"].contains(&cluster);
    if rng.chance(20) {
        options += "&version=2";
    } else {
        options += &format!("&refcount-bits={}", rng.pick(&[1, 2, 4, 8, 16, 32, 64]));
        if rng.chance(30) {
            options += "&lazy-refcounts=on";
        }
        if may_have_subclusters && rng.chance(40) {
            options += "&subclusters=on";
        }
        if rng.chance(40) {
            options += "&compression=zstd";
        }
    }
    if rng.chance(30) { options + "&compress=on" } else { options }
}

/// Makes an image in a device, and leaves it.
fn make(device: Arc<dyn Device>, options: &str) {
    let spec = DeviceSpec::parse(format!("qcow2:given:?{options}").as_ref()).unwrap();
    let done = change_given(device, move |registry| async move {
        let made = registry.open_target(&spec, Vec::new(), Intent::target(DISK)).await;
        let (stack, ready) = made.unwrap();
        ready.run().await.unwrap();
        stack.device().submit(Request::flush()).await.is_ok()
    });
    assert!(done);
}

/// Checks an image in memory, and returns its disk.
fn checked_disk(image: Vec<u8>, label: &str) -> Vec<u8> {
    let model = Model::with_facts(Model::all_facts(DEVICE)).with_content(image);
    let device = ModelDevice::new(model, CompletionOrder::Immediate);
    let runtime =
        Runtime::start(&RuntimeConfig { workers: 1, ..RuntimeConfig::default() }).unwrap();
    let label = label.to_string();
    runtime.block_on(move || async move {
        let file: Arc<dyn Device> = device.clone();
        let found = qcow2::check::check(&file, Repair::Nothing);
        let found = found.await.unwrap_or_else(|error| panic!("{label}: {error}"));
        assert_eq!(found.corruptions, 0, "{label}: {:?}", found.faults);
        let stack = open_over(device, "").await.unwrap_or_else(|error| panic!("{label}: {error}"));
        content(stack.device()).await.unwrap()
    })
}

/// An image with random options: requests until the power is cut, several times one after another.
fn cut_again_and_again(qemu: &Qemu, seed: u64) {
    let mut rng = Rng::new(seed);
    let options = any_options(&mut rng);
    let mut facts = Model::all_facts(DEVICE);
    facts.zeroed = false;
    let model = Model::with_facts(facts.clone()).with_content(vec![0; DEVICE as usize]);
    let device = ModelDevice::new(model, CompletionOrder::Immediate);
    make(device.clone(), &options);
    let mut image = device.bytes();
    let mut history = History::new(&vec![0; DISK as usize]);
    let packs = if options.contains("compress=on") { "on" } else { "off" };
    for cut in 0..6 {
        let label = format!("seed {seed:#x}, cut {cut}: {options}");
        let model = Model::with_facts(facts.clone()).with_content(image);
        let inner = CrashDevice::new(model, CompletionOrder::Shuffled(rng.number()));
        let number = rng.between(1, 500);
        let device = Arc::new(Cut::new(inner.clone(), number, rng.number()));
        let shared = Arc::new(Mutex::new(history));
        let seed = rng.number();
        let below = device.clone();
        let played = shared.clone();
        let cache = *rng.pick(&["4k", "1M"]);
        let opened = format!("cache={cache}&compress={packs}");
        let runtime =
            Runtime::start(&RuntimeConfig { workers: 2, ..RuntimeConfig::default() }).unwrap();
        runtime.block_on(move || async move {
            if let Ok(stack) = open_over(below, &opened).await {
                play(stack.device(), &played, seed, 90).await;
            }
        });
        drop(runtime);
        // Without a cut, it has ended in order.
        image = device.left().unwrap_or_else(|| inner.live());
        let disk = checked_disk(image.clone(), &label);
        let right = shared.lock().unwrap().check(&disk);
        right.unwrap_or_else(|wrong| panic!("{label}: {wrong}"));
        if rng.chance(3) {
            write(&qemu.file("left"), &image);
            assert_eq!(qemu.faults("left").0, 0, "{label}");
            assert!(qemu.raw("left") == disk, "{label}: qemu-img reads other bytes");
        }
        history = History::new(&disk);
    }
}

#[test]
fn images_are_right_after_requests_and_power_cuts_in_great_numbers() {
    let Some(qemu) = Qemu::find() else { return };
    let seed = rng::seed();
    println!("BLOCKHAUL_SEED={seed:#x}");
    // Other tests of this process count, too.
    let first = REQUESTS.load(Ordering::Relaxed);
    let most = if long() { 2_000_000 } else { 1 };
    for number in 0.. {
        cut_again_and_again(&qemu, seed.wrapping_add(number));
        if REQUESTS.load(Ordering::Relaxed) - first >= most {
            break;
        }
        if long() && number % 100 == 0 {
            print_counts();
        }
    }
    print_counts();
}

/// Size of a disk whose L2 table has three slices.
const LARGE: u64 = 24 << 20;

/// Carries out one request on an image, with a cache that keeps hardly anything, while the request of
/// this number below fails; returns what is left, and whether there was such a request.
fn fail_at(image: &[u8], request: Request, op: OpKind, number: u64) -> (Vec<u8>, bool) {
    let mut facts = Model::all_facts(2 * LARGE);
    facts.grows_from = Some(image.len() as u64);
    let mut bytes = image.to_vec();
    bytes.resize(2 * LARGE as usize, 0);
    let model = Model::with_facts(facts).with_content(bytes);
    let model = ModelDevice::new(model, CompletionOrder::Immediate);
    let fault = FaultDevice::over(model.clone(), 1);
    let below = fault.clone();
    let runtime =
        Runtime::start(&RuntimeConfig { workers: 1, ..RuntimeConfig::default() }).unwrap();
    let is_done = runtime.block_on(move || async move {
        let stack = open_over(below.clone(), "cache=4k").await.unwrap();
        below.add(FaultRule::new(FaultEffect::Fail(Kind::Io)).kind(op).nth(number));
        stack.device().submit(request).await.is_ok()
    });
    // Changed tables are written.
    drop(runtime);
    let has_failed = !fault.failures().is_empty();
    assert!(is_done || has_failed);
    (model.bytes(), has_failed)
}

/// A request changes several slices of a table, and fails before the last one. The entries that it has
/// changed refer to clusters that are counted.
#[test]
fn entries_of_a_request_that_fails_halfway_refer_to_counted_clusters() {
    let Some(qemu) = Qemu::find() else { return };
    qemu.create("start", "cluster_size=16k", LARGE);
    qemu.io("qcow2", "start", &["write -P 1 23M 16k".into()]);
    let image = std::fs::read(qemu.file("start")).unwrap();
    let data = Data::copy_of(&[7; (8 << 20) + (100 << 10)]);
    let (at, len) = ((8 << 20) - (50 << 10), data.len() as u64);
    let requests: [&dyn Fn() -> Request; 3] = [
        &|| Request::write(at, data.clone()),
        &|| Request::write(at, data.clone()).with(RequestFlags::COMPRESS),
        &|| Request::zero(at, len).with(RequestFlags::NO_HOLE),
    ];
    for (kind, request) in requests.into_iter().enumerate() {
        for op in [OpKind::Read, OpKind::Write] {
            let failures = (1..).take_while(|&number| {
                let (left, has_failed) = fail_at(&image, request(), op, number);
                write(&qemu.file("left"), &left);
                let (errors, _) = qemu.faults("left");
                assert_eq!(errors, 0, "request {kind}, {op:?} {number}");
                has_failed
            });
            let failures = failures.count();
            assert!(failures > 2, "request {kind}: {failures} failures of {op:?}");
        }
    }
}

/// Two handles write to neighbouring sectors of the same clusters; one of them flushes.
#[test]
fn a_flush_on_one_handle_covers_what_another_has_written() {
    let Some(qemu) = Qemu::find() else { return };
    let seed = rng::seed();
    eprintln!("BLOCKHAUL_SEED={seed}");
    for (name, start) in starts(&qemu) {
        let crash = CrashDevice::new(start.model(), CompletionOrder::Shuffled(seed));
        let left = crash.clone();
        let options = start.options(&qemu);
        let runtime =
            Runtime::start(&RuntimeConfig { workers: 2, ..RuntimeConfig::default() }).unwrap();
        let image = runtime.block_on(move || async move {
            let given = Given(crash.clone(), Some(crash));
            let stack = open_given(given, &options).await.unwrap();
            assert!(stack.has_more());
            let other = stack.another().await.unwrap();
            let mut flying = Vec::new();
            for sector in 0..DISK / 512 {
                let device = if sector % 2 == 0 { stack.device() } else { &other };
                let data = Data::copy_of(&[(sector % 251) as u8 + 1; SECTOR]);
                flying.push(device.submit(Request::write(sector * 512, data)));
                if flying.len() == 64 {
                    for pending in flying.drain(..) {
                        pending.await.unwrap();
                    }
                }
            }
            for pending in flying {
                pending.await.unwrap();
            }
            other.submit(Request::flush()).await.unwrap();
            // What follows is lost.
            left.power_cut(seed);
            let data = Data::copy_of(&[253; SECTOR]);
            assert!(other.submit(Request::write(0, data)).await.is_err());
            left.durable()
        });
        write(&qemu.file("left"), &image);
        let (errors, _) = qemu.faults("left");
        assert_eq!(errors, 0, "{name}");
        if !start.options.is_empty() {
            qemu.img(&["rebase", "-u", "-f", "qcow2", "-F", "raw", "-b", "base", "left"]);
        }
        let wanted: Vec<u8> =
            (0..DISK / 512).flat_map(|sector| [(sector % 251) as u8 + 1; SECTOR]).collect();
        assert!(qemu.raw("left") == wanted, "{name}");
    }
}

/// A device that cannot become longer takes an image until it is full.
#[test]
fn a_full_device_is_an_error_and_ruins_nothing() {
    let Some(qemu) = Qemu::find() else { return };
    let mut facts = Model::all_facts(DEVICE);
    facts.zeroed = false;
    let model = Model::with_facts(facts).with_content(vec![0x55; DEVICE as usize]);
    let device = ModelDevice::new(model, CompletionOrder::Immediate);
    let below = device.clone();
    let runtime =
        Runtime::start(&RuntimeConfig { workers: 2, ..RuntimeConfig::default() }).unwrap();
    let written = runtime.block_on(move || async move {
        let base = registry();
        let mut backends = base.backends.clone();
        backends.push(Arc::new(Given(below, None)));
        let spec = DeviceSpec::parse("qcow2:given:".as_ref()).unwrap();
        let registry = Registry { backends, ..base };
        let intent = Intent::target(64 << 20);
        let (stack, ready) = registry.open_target(&spec, Vec::new(), intent).await.unwrap();
        ready.run().await.unwrap();
        let mut written = 0;
        let error = loop {
            let data = Data::copy_of(&[7; 100_000]);
            match stack.device().submit(Request::write(written * 100_000, data)).await {
                Ok(_) => written += 1,
                Err(error) => break error,
            }
        };
        assert_eq!(error.kind(), Kind::NoSpace, "{error}");
        // What was freed can be used.
        stack.device().submit(Request::trim(0, 1 << 20)).await.unwrap();
        stack.device().submit(Request::flush()).await.unwrap();
        let data = Data::copy_of(&[8; 100_000]);
        stack.device().submit(Request::write(0, data)).await.unwrap();
        written
    });
    drop(runtime);
    assert!(written > 40, "{written}");
    write(&qemu.file("left"), &device.bytes());
    assert_eq!(qemu.faults("left").0, 0);
    let disk = qemu.raw("left");
    assert!(disk[..100_000].iter().all(|&byte| byte == 8));
    assert!(disk[1 << 20..written as usize * 100_000].iter().all(|&byte| byte == 7));
}
