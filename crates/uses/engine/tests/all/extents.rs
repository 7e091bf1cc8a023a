//! Extents: the cost of huge disks depends on their extents, slow replies do not delay a copy, and
//! what is not selected is not copied.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use blockhaul_block::{
    BASE_ALLOCATION, Can, Device, Error, Extents, Facts, HOLE, Kind, Op, OpKind, PendingRequest,
    Reply, Request, Result, ZERO,
};
use blockhaul_catalog::Stack;
use blockhaul_engine::{
    BitmapSelection, CopyProgress, CopySummary, EngineOptions, JournalOptions, compare, copy,
    digest, manifest, verify,
};
use blockhaul_io::{Buf, IoEngine, Pool, Runtime, RuntimeConfig};
use blockhaul_testkit::model::{CompletionOrder, Model, ModelDevice};
use blockhaul_testkit::rng::{Rng, seed};

const HUGE: u64 = i64::MAX as u64;
/// Runs per reply, as most servers limit them.
const RUNS: usize = 64 << 10;

fn on_worker<F: Future<Output = ()> + 'static>(check: impl FnOnce() -> F + Send + 'static) {
    Runtime::start(&RuntimeConfig { workers: 2, engine: IoEngine::Auto }).unwrap().block_on(check);
}

/// A device that computes its extents, and counts requests.
struct Told {
    facts: Facts,
    /// Length and state of the run at an offset.
    run: Box<dyn Fn(u64) -> (u64, u64) + Send + Sync>,
    /// Time of an extents reply.
    delay: Duration,
    /// Time of a read, and bytes being read.
    read_delay: Duration,
    /// Reads wait until no extents reply is outstanding.
    exclusive: bool,
    reading: AtomicU64,
    reading_max: AtomicU64,
    /// Maximum bytes described by one reply.
    most: u64,
    asked: Mutex<Vec<(u64, u64)>>,
    waiting: AtomicUsize,
    waiting_max: AtomicUsize,
    requests: [AtomicU64; 7],
    bytes: [AtomicU64; 7],
}

impl Told {
    fn new(size: u64, run: impl Fn(u64) -> (u64, u64) + Send + Sync + 'static) -> Told {
        let can = Can::all();
        let contexts = vec![BASE_ALLOCATION.to_string()];
        Told {
            facts: Facts { can, contexts, ..Facts::new("told", size) },
            run: Box::new(run),
            delay: Duration::ZERO,
            read_delay: Duration::ZERO,
            exclusive: false,
            reading: AtomicU64::new(0),
            reading_max: AtomicU64::new(0),
            most: u64::MAX,
            asked: Mutex::default(),
            waiting: AtomicUsize::new(0),
            waiting_max: AtomicUsize::new(0),
            requests: Default::default(),
            bytes: Default::default(),
        }
    }

    fn zeroes(size: u64) -> Told {
        Told::new(size, |_| (u64::MAX, HOLE | ZERO))
    }

    fn data(size: u64) -> Told {
        Told::new(size, |_| (u64::MAX, 0))
    }

    fn requests(&self, kind: OpKind) -> u64 {
        self.requests[kind as usize].load(Ordering::Relaxed)
    }

    fn bytes(&self, kind: OpKind) -> u64 {
        self.bytes[kind as usize].load(Ordering::Relaxed)
    }

    fn list(&self, at: u64, len: u64) -> Extents {
        let mut list = Extents::new();
        let len = len.min(self.most);
        while list.total() < len && list.len() < RUNS {
            let (run, state) = (self.run)(at + list.total());
            list.push(run.min(len - list.total()), state);
        }
        list
    }
}

/// A handle that takes requests.
struct Handle(Arc<Told>);

impl Device for Handle {
    fn facts(&self) -> Arc<Facts> {
        Arc::new(self.0.facts.clone())
    }

    fn submit(&self, request: Request) -> PendingRequest {
        let told = self.0.clone();
        let kind = request.kind() as usize;
        told.requests[kind].fetch_add(1, Ordering::Relaxed);
        told.bytes[kind].fetch_add(request.len, Ordering::Relaxed);
        let at = request.at;
        let len = request.len;
        match request.op {
            Op::Read(room) => {
                let (run, state) = (told.run)(at);
                if told.exclusive {
                    return PendingRequest::start(async move {
                        while told.waiting.load(Ordering::Relaxed) > 0 {
                            blockhaul_io::sleep(Duration::from_millis(1)).await;
                        }
                        Ok(Reply::Hole)
                    });
                }
                if state & ZERO != 0 && run >= len {
                    return PendingRequest::ready(Ok(Reply::Hole));
                }
                let mut buf: Buf = room.into_buf();
                buf.fill(7);
                if told.read_delay.is_zero() {
                    return PendingRequest::ready(Ok(Reply::Data(buf.into())));
                }
                let reading = told.reading.fetch_add(len, Ordering::Relaxed) + len;
                told.reading_max.fetch_max(reading, Ordering::Relaxed);
                PendingRequest::start(async move {
                    blockhaul_io::sleep(told.read_delay).await;
                    told.reading.fetch_sub(len, Ordering::Relaxed);
                    Ok(Reply::Data(buf.into()))
                })
            }
            Op::Extents(_) => {
                told.asked.lock().unwrap().push((at, len));
                let list = told.list(at, len);
                let waiting = told.waiting.fetch_add(1, Ordering::Relaxed) + 1;
                told.waiting_max.fetch_max(waiting, Ordering::Relaxed);
                PendingRequest::start(async move {
                    blockhaul_io::sleep(told.delay).await;
                    told.waiting.fetch_sub(1, Ordering::Relaxed);
                    Ok(Reply::Extents(vec![list]))
                })
            }
            _ => PendingRequest::ready(Ok(Reply::Done)),
        }
    }
}

fn stack(told: &Arc<Told>) -> Stack {
    Stack::over(Arc::new(Handle(told.clone())))
}

async fn run(source: &Stack, target: &Stack, options: &EngineOptions) -> Result<CopySummary> {
    let pool = Pool::new(32 << 20);
    let progress = Arc::new(CopyProgress::new());
    let summary = copy(source, target, options, &pool, &progress).await?;
    let done = progress.snapshot();
    assert_eq!(done.done(), done.total);
    assert_eq!(pool.reserved(), 0);
    Ok(summary)
}

#[test]
fn a_hole_of_any_size_is_zeroed_in_a_few_requests() {
    on_worker(|| async {
        let source = Arc::new(Told::zeroes(HUGE));
        let target = Arc::new(Told::data(HUGE));
        let summary =
            run(&stack(&source), &stack(&target), &EngineOptions::default()).await.unwrap();
        assert_eq!(summary.zeroed, HUGE);
        assert_eq!(target.bytes(OpKind::Zero), HUGE);
        // A lane's requests grow fourfold, and there are four lanes.
        assert!(target.requests(OpKind::Zero) < 128, "{}", target.requests(OpKind::Zero));
        assert!(source.requests(OpKind::Extents) < 16, "{:?}", source.asked);
        assert_eq!(source.requests(OpKind::Read), 0);
    });
}

#[test]
fn what_the_target_says_is_zero_is_left_alone() {
    on_worker(|| async {
        let source = Arc::new(Told::zeroes(HUGE));
        let target = Arc::new(Told::zeroes(HUGE));
        let summary =
            run(&stack(&source), &stack(&target), &EngineOptions::default()).await.unwrap();
        assert_eq!((summary.skipped, target.requests(OpKind::Zero)), (HUGE, 0));
        // Allocated zeroes are another matter.
        let small = |told: fn(u64) -> Told| Arc::new(told(1 << 30));
        let source = small(Told::zeroes);
        let target = small(Told::zeroes);
        let options = EngineOptions { allocated: true, ..EngineOptions::default() };
        run(&stack(&source), &stack(&target), &options).await.unwrap();
        assert_eq!(target.bytes(OpKind::Zero), 1 << 30);
        // In parts: only what is not zero yet is zeroed.
        let part = 1 << 20;
        let target = Arc::new(Told::new(1 << 30, move |at| {
            (part - at % part, if (at / part).is_multiple_of(2) { ZERO } else { 0 })
        }));
        let summary =
            run(&stack(&source), &stack(&target), &EngineOptions::default()).await.unwrap();
        assert_eq!((summary.skipped, summary.zeroed), (1 << 29, 1 << 29));
        assert_eq!(target.bytes(OpKind::Zero), 1 << 29);
    });
}

#[test]
fn huge_devices_are_read_as_far_as_they_hold_something() {
    on_worker(|| async {
        let some = |at: u64| match at {
            0..100_000 => (100_000 - at, 0),
            _ => (u64::MAX, HOLE | ZERO),
        };
        let one = Arc::new(Told::new(HUGE, some));
        let other = Arc::new(Told::new(HUGE, some));
        let a = stack(&one);
        let b = stack(&other);
        let options = EngineOptions::default();
        let progress = Arc::new(CopyProgress::new());
        let pool = Pool::new(16 << 20);
        let found = compare(&a, &b, &options, &pool, &progress).await.unwrap();
        assert_eq!(found.differs_at, None);
        assert_eq!((one.bytes(OpKind::Read), other.bytes(OpKind::Read)), (100_000, 100_000));
        let verified = verify(&a, &b, &options, &pool, &progress).await.unwrap();
        assert_eq!(verified.bytes, HUGE);
        let made = manifest(&a, None, &options, &pool, &progress).await.unwrap();
        assert_eq!(Some(made.digest()), verified.digest);
        assert!(made.to_string().lines().count() < 10, "{made}");
        assert!(one.requests(OpKind::Read) < 10);
        // Zeroes must be hashed, but not read.
        let small = Arc::new(Told::new(1 << 30, some));
        digest(
            &stack(&small),
            blockhaul_engine::DigestAlgorithm::Blksum,
            &options,
            &pool,
            &progress,
        )
        .await
        .unwrap();
        assert!(small.bytes(OpKind::Read) <= 1 << 18);
    });
}

#[test]
fn answers_that_never_come_hold_nothing_up() {
    on_worker(|| async {
        let mut source = Told::data(64 << 20);
        source.delay = Duration::from_secs(3600);
        let source = Arc::new(source);
        let target = Arc::new(Told::data(64 << 20));
        let summary =
            run(&stack(&source), &stack(&target), &EngineOptions::default()).await.unwrap();
        assert_eq!(summary.data, 64 << 20);
        // Nor does a target that reports no extents.
        let mut target = Told::data(1 << 40);
        target.delay = Duration::from_secs(3600);
        let source = Arc::new(Told::zeroes(1 << 40));
        let target = Arc::new(target);
        let summary =
            run(&stack(&source), &stack(&target), &EngineOptions::default()).await.unwrap();
        assert_eq!(summary.zeroed, 1 << 40);
    });
}

#[test]
fn answers_that_are_late_are_about_what_is_ahead() {
    on_worker(|| async {
        let mut delay = Duration::from_millis(600);
        loop {
            let mut source = Told::zeroes(16 << 40);
            source.delay = delay;
            let source = Arc::new(source);
            let target = Arc::new(Told::zeroes(16 << 40));
            let summary =
                run(&stack(&source), &stack(&target), &EngineOptions::default()).await.unwrap();
            assert_eq!(summary.skipped + summary.zeroed, 16 << 40);
            assert!(source.requests(OpKind::Extents) < 20, "{:?}", source.asked);
            // Lanes continued meanwhile, but not to the end.
            let read = source.bytes(OpKind::Read);
            assert!(read < 4 << 40, "{read}");
            if read > 0 {
                return;
            }
            // A machine that stalls for that long proves nothing.
            delay *= 2;
            assert!(delay < Duration::from_secs(30), "they wait for answers");
        }
    });
}

#[test]
fn little_is_read_from_a_source_that_answers_no_reads_during_a_query() {
    on_worker(|| async {
        let mut source = Told::zeroes(16 << 30);
        source.delay = Duration::from_secs(1);
        source.exclusive = true;
        let source = Arc::new(source);
        let target = Arc::new(Told::data(16 << 30));
        let options = EngineOptions { connections: 4, adaptive: false, ..EngineOptions::default() };
        run(&stack(&source), &stack(&target), &options).await.unwrap();
        // One segment of one connection for each query.
        let read = source.bytes(OpKind::Read);
        let queries = source.requests(OpKind::Extents);
        assert!(queries <= 2 && read <= queries * (128 << 20), "{read}: {:?}", source.asked);
    });
}

#[test]
fn servers_that_answer_little_at_a_time_are_asked_in_parallel() {
    const MOST: u64 = 0xffff_0000;
    on_worker(|| async {
        let size = 1 << 40;
        let mut source = Told::zeroes(size);
        source.most = MOST;
        source.delay = Duration::from_millis(1);
        let source = Arc::new(source);
        let target = Arc::new(Told::zeroes(size));
        run(&stack(&source), &stack(&target), &EngineOptions::default()).await.unwrap();
        let least = size / MOST;
        let asked = source.requests(OpKind::Extents);
        assert!(asked < least + 16, "{asked} for {least}");
        assert!(source.waiting_max.load(Ordering::Relaxed) >= 4);
    });
}

#[test]
fn a_million_extents_are_asked_for_in_bulk() {
    on_worker(|| async {
        let run_of = |at: u64| {
            (4096 - at % 4096, if (at / 4096).is_multiple_of(2) { ZERO } else { HOLE | ZERO })
        };
        let source = Arc::new(Told::new(4096 << 20, run_of));
        let target = Arc::new(Told::zeroes(4096 << 20));
        run(&stack(&source), &stack(&target), &EngineOptions::default()).await.unwrap();
        // 16 times 64 Ki, requested in pieces of 16 Ki and more.
        let asked = source.requests(OpKind::Extents);
        assert!((16..=70).contains(&asked), "{asked}");
    });
}

#[test]
fn no_more_than_the_queue_size_is_in_flight_and_no_less() {
    on_worker(|| async {
        let mut source = Told::data(16 << 20);
        source.read_delay = Duration::from_millis(10);
        let source = Arc::new(source);
        let target = Arc::new(Told::data(16 << 20));
        let options = EngineOptions {
            connections: 1,
            adaptive: false,
            adaptive_size: false,
            request_size: 128 << 10,
            queue_size: 1 << 20,
            ..EngineOptions::default()
        };
        run(&stack(&source), &stack(&target), &options).await.unwrap();
        assert_eq!(source.reading_max.load(Ordering::Relaxed), 1 << 20);
    });
}

#[test]
fn a_target_said_to_be_zero_is_looked_at_where_it_holds_something() {
    on_worker(|| async {
        let source = Arc::new(Told::zeroes(1 << 40));
        let some = |at: u64| match at {
            0..777_777 => (777_777 - at, ZERO),
            777_777..777_999 => (777_999 - at, 0),
            _ => (u64::MAX, ZERO),
        };
        let target = Arc::new(Told::new(1 << 40, some));
        let mut options = EngineOptions { target_is_zero: true, ..EngineOptions::default() };
        let error = run(&stack(&source), &stack(&target), &options).await.unwrap_err();
        assert!(error.to_string().contains("there is data at offset 77"), "{error}");
        assert!(target.requests(OpKind::Read) < 4 && target.requests(OpKind::Zero) == 0);
        options.trust_zero = true;
        assert_eq!(run(&stack(&source), &stack(&target), &options).await.unwrap().zeroed, 0);
        // Without extents, at places all over it.
        let mut full = Told::data(1 << 40);
        full.facts.can.remove(Can::EXTENTS);
        options.trust_zero = false;
        assert!(run(&stack(&source), &stack(&Arc::new(full)), &options).await.is_err());
        let empty = Arc::new(Told::zeroes(1 << 40));
        run(&stack(&source), &stack(&empty), &options).await.unwrap();
        assert_eq!(empty.requests(OpKind::Read), 0);
    });
}

#[test]
fn only_what_was_chosen_is_copied() {
    let seed = seed();
    on_worker(move || async move {
        let mut rng = Rng::new(seed);
        for round in 0..40 {
            let size = rng.between(1, 4 << 20);
            let mut bytes = vec![0; size as usize];
            let mut at = 0;
            while at < size {
                let end = (at + rng.between(1, 300_000)).min(size);
                if rng.chance(50) {
                    rng.fill(&mut bytes[at as usize..end as usize]);
                }
                at = end;
            }
            let mut ranges = Vec::new();
            let mut at = rng.below(size);
            while at < size && ranges.len() < 5 {
                let len = rng.between(1, 900_000).min(size - at);
                ranges.push((at, len));
                at += len + rng.below(300_000);
            }
            let model = Model::new(size).with_content(bytes.clone()).with_holes();
            let source = ModelDevice::new(model, CompletionOrder::Immediate);
            let old = Model::new(size).with_content(vec![0xa5; size as usize]);
            let target = ModelDevice::new(old, CompletionOrder::Shuffled(rng.number()));
            let options = EngineOptions {
                ranges: Some(ranges.clone().into()),
                connections: rng.between(1, 4) as usize,
                request_size: 4096 << rng.below(6),
                segment: 65536 << rng.below(4),
                sampled: rng.chance(50),
                extents: rng.chance(70),
                ..EngineOptions::default()
            };
            let told = format!("seed {seed}, round {round}: {size} bytes, {ranges:?}");
            let ends = [source.clone(), target.clone()].map(|device| Stack::over(device));
            let summary = run(&ends[0], &ends[1], &options).await.unwrap();
            let chosen = ranges.iter().map(|range| range.1).sum::<u64>();
            assert_eq!(summary.size, chosen, "{told}");
            let mut expected = vec![0xa5; size as usize];
            for (at, len) in ranges {
                let range = at as usize..(at + len) as usize;
                expected[range.clone()].copy_from_slice(&bytes[range]);
            }
            assert!(target.bytes() == expected, "{told}");
            let pool = Pool::new(16 << 20);
            let progress = Arc::new(CopyProgress::new());
            let verified = verify(&ends[0], &ends[1], &options, &pool, &progress).await;
            assert_eq!(verified.unwrap().bytes, chosen, "{told}");
        }
    });
}

/// A model with a second context, whose bits say which blocks have changed.
struct WithBitmap {
    inner: Arc<ModelDevice>,
    grain: u64,
    dirty: Vec<bool>,
}

impl Device for WithBitmap {
    fn facts(&self) -> Arc<Facts> {
        let mut facts = Facts::clone(&self.inner.facts());
        facts.can |= Can::EXTENTS;
        facts.contexts = vec![BASE_ALLOCATION.to_string(), "test:dirty".to_string()];
        Arc::new(facts)
    }

    fn submit(&self, request: Request) -> PendingRequest {
        match request.op {
            Op::Extents(contexts) => {
                let mut lists = Vec::new();
                for context in contexts.iter() {
                    let mut list = Extents::new();
                    for at in request.at..request.at + request.len {
                        let dirty = self.dirty[(at / self.grain) as usize];
                        list.push(1, if context == 1 { u64::from(dirty) << 2 } else { 0 });
                    }
                    lists.push(list);
                }
                PendingRequest::ready(Ok(Reply::Extents(lists)))
            }
            _ => self.inner.submit(request),
        }
    }
}

#[test]
fn a_bitmap_says_what_is_copied() {
    let seed = seed();
    on_worker(move || async move {
        let mut rng = Rng::new(seed);
        for round in 0..20 {
            let size = rng.between(1, 1 << 20);
            let mut bytes = vec![0; size as usize];
            rng.fill(&mut bytes);
            let grain = 512 << rng.below(8);
            let dirty: Vec<_> = (0..size.div_ceil(grain)).map(|_| rng.chance(30)).collect();
            let model = Model::new(size).with_content(bytes.clone());
            let inner = ModelDevice::new(model, CompletionOrder::Immediate);
            let source = Arc::new(WithBitmap { inner, grain, dirty: dirty.clone() });
            let old = Model::new(size).with_content(vec![0xa5; size as usize]);
            let target = ModelDevice::new(old, CompletionOrder::Immediate);
            let mut of = |context: &str, mask| {
                let bitmap = Some(BitmapSelection { context: context.to_string(), mask });
                EngineOptions { bitmap, segment: 65536 << rng.below(4), ..EngineOptions::default() }
            };
            let mut none = of("test:dirty", !4);
            let options = of("test:dirty", 4);
            let ends = [source as Arc<dyn Device>, target.clone()];
            let ends = ends.map(Stack::over);
            // Another flag than the one that is set.
            assert_eq!(run(&ends[0], &ends[1], &none).await.unwrap().size, 0);
            let summary = run(&ends[0], &ends[1], &options).await.unwrap();
            let expected: Vec<_> = (0..size as usize)
                .map(|at| if dirty[at / grain as usize] { bytes[at] } else { 0xa5 })
                .collect();
            assert!(target.bytes() == expected, "seed {seed}, round {round}");
            let chosen = (0..size).filter(|at| dirty[(at / grain) as usize]).count();
            assert_eq!(summary.size, chosen as u64);
            none.bitmap = Some(BitmapSelection { context: "test:other".into(), mask: 1 });
            let error = run(&ends[0], &ends[1], &none).await.unwrap_err();
            assert!(error.to_string().contains("test:other"), "{error}");
        }
    });
}

/// A disk at a point in time as QEMU shows it through a bitmap: what the bitmap calls clean can
/// neither be read nor asked about, but in the bitmap's own context.
struct Then {
    size: u64,
    /// What is dirty, ascending.
    dirty: Vec<(u64, u64)>,
    /// Requests for extents in `base:allocation`, and bytes read.
    asked: AtomicU64,
    read: AtomicU64,
    /// Maximum bytes described by a reply about the bitmap.
    most: u64,
}

impl Then {
    /// Everything at an odd MiB is a hole.
    fn run(at: u64) -> (u64, u64) {
        let odd = !(at >> 20).is_multiple_of(2);
        ((1 << 20) - at % (1 << 20), if odd { HOLE | ZERO } else { 0 })
    }

    fn dirt(&self, at: u64) -> (u64, u64) {
        let next = self.dirty.partition_point(|range| range.1 <= at);
        match self.dirty.get(next) {
            Some(&(start, end)) if start <= at => (end - at, 1),
            Some(&(start, _)) => (start - at, 0),
            None => (self.size - at, 0),
        }
    }
}

impl Device for Then {
    fn facts(&self) -> Arc<Facts> {
        let mut facts = Facts::new("then", self.size);
        facts.can = Can::EXTENTS;
        facts.contexts = vec![BASE_ALLOCATION.to_string(), "test:dirty".to_string()];
        Arc::new(facts)
    }

    fn submit(&self, request: Request) -> PendingRequest {
        let at = request.at;
        let len = request.len;
        let (told, dirty) = self.dirt(at);
        if dirty == 0 || told < len {
            let text = format!("{:?} of {len} bytes at {at}, which is clean", request.kind());
            let about_bitmap =
                matches!(&request.op, Op::Extents(contexts) if contexts.iter().eq([1]));
            if !about_bitmap {
                return PendingRequest::ready(Err(Error::new(Kind::Invalid, text)));
            }
        }
        match request.op {
            Op::Read(room) => {
                self.read.fetch_add(len, Ordering::Relaxed);
                let mut buf: Buf = room.into_buf();
                for (byte, at) in buf.iter_mut().zip(at..) {
                    *byte = if Then::run(at).1 == 0 { 7 } else { 0 };
                }
                PendingRequest::ready(Ok(Reply::Data(buf.into())))
            }
            Op::Extents(contexts) => {
                let mut lists = Vec::new();
                for context in contexts.iter() {
                    let mut list = Extents::new();
                    if context == 0 {
                        self.asked.fetch_add(1, Ordering::Relaxed);
                    }
                    let len = if context == 1 { len.min(self.most) } else { len };
                    while list.total() < len {
                        let here = at + list.total();
                        let (run, state) =
                            if context == 1 { self.dirt(here) } else { Then::run(here) };
                        list.push(run.min(len - list.total()), state);
                    }
                    lists.push(list);
                }
                PendingRequest::ready(Ok(Reply::Extents(lists)))
            }
            _ => PendingRequest::ready(Err(Error::new(Kind::ReadOnly, "read-only"))),
        }
    }
}

#[test]
fn what_a_bitmap_calls_clean_is_neither_read_nor_asked_about() {
    let seed = seed();
    on_worker(move || async move {
        let mut rng = Rng::new(seed);
        let folder = blockhaul_testkit::tools::ScratchDir::new().unwrap();
        for round in 0..20 {
            let size = 256 << 20;
            let mut dirty = Vec::new();
            let mut at = rng.below(3) << 20;
            while at < size {
                let len = (65536 * rng.between(1, 200)).min(size - at);
                dirty.push((at, at + len));
                at += len + 65536 * rng.between(1, 100);
            }
            // A server may report long dirty ranges in pieces that are too short to ask about.
            let short = rng.chance(50);
            let most = 65536 * rng.between(1, if short { 16 } else { 4096 });
            let asked = AtomicU64::new(0);
            let read = AtomicU64::new(0);
            let source = Arc::new(Then { size, dirty: dirty.clone(), asked, read, most });
            let target = Arc::new(Told::data(size));
            // With a journal the bitmap is read before the copy, which also takes a sample.
            let journal = rng.chance(50).then(|| JournalOptions {
                path: folder.file(&format!("journal{round}")),
                restart: false,
                keep: false,
                interval: Duration::from_secs(5),
                source: "source".to_string(),
                target: "target".to_string(),
            });
            let samples = if journal.is_some() { 64 << 16 } else { 0 };
            let bitmap = Some(BitmapSelection { context: "test:dirty".to_string(), mask: 1 });
            let options = EngineOptions { bitmap, journal, ..EngineOptions::default() };
            let ends = [Stack::over(source.clone()), stack(&target)];
            let told = format!("seed {seed}, round {round}, most {most}: {dirty:?}");
            let summary = run(&ends[0], &ends[1], &options).await.expect(&told);
            let total: u64 = dirty.iter().map(|range| range.1 - range.0).sum();
            assert_eq!(summary.size, total, "{told}");
            assert_eq!(target.bytes(OpKind::Zero) + target.bytes(OpKind::Write), total, "{told}");
            // Holes in long dirty ranges are not read.
            assert!(source.asked.load(Ordering::Relaxed) > 0, "{told}");
            let short: u64 = dirty.iter().map(|r| r.1 - r.0).filter(|len| *len < 2 << 20).sum();
            let holes: u64 = dirty.iter().map(|range| holes(*range)).sum();
            let read = source.read.load(Ordering::Relaxed);
            assert!(
                read <= total - holes + short + samples + total / 4,
                "{read} of {total}, {told}"
            );
        }
    });
}

/// Bytes of odd MiBs in a range.
fn holes((start, end): (u64, u64)) -> u64 {
    let before = |at: u64| (at >> 21 << 20) + (at % (2 << 20)).saturating_sub(1 << 20);
    before(end) - before(start)
}
