//! The copy engine against model devices: exact contents under every option, faults, cancels, and
//! servers that show each connection another disk.
#![allow(clippy::unwrap_used)]

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use block::{
    Another, Backend, Can, Device, DeviceExt, Facts, Intent, Kind, OpKind, Opened, Opening,
    Pending, Registry, Request, Result, Spec, Stack, Target,
};
use engine::{Options, Progress, SEGMENT, Summary, copy, verify};
use io::{Config, Engine, Pool, Runtime};
use testkit::fault::{FaultDevice, Rule, Then};
use testkit::model::{Completion, Model, ModelDevice};
use testkit::rng::{Rng, seed};

fn runtime(engine: Engine) -> Runtime {
    Runtime::start(&Config { workers: 2, engine }).unwrap()
}

/// Runs an asynchronous check on a worker.
fn on_worker<F: Future<Output = ()> + 'static>(check: impl FnOnce() -> F + Send + 'static) {
    runtime(Engine::Auto).block_on(check);
}

/// Disk-like content: runs of data, of zeroes that are allocated, and of holes.
fn content(rng: &mut Rng, size: usize) -> Vec<u8> {
    let mut bytes = vec![0; size];
    let mut at = 0;
    while at < size {
        let len = (rng.between(1, 300_000) as usize).min(size - at);
        if rng.chance(50) {
            rng.fill(&mut bytes[at..at + len]);
        }
        at += len;
    }
    bytes
}

fn source_of(bytes: &[u8], holes: bool) -> Arc<ModelDevice> {
    let mut model = Model::new(bytes.len() as u64).with_content(bytes.to_vec());
    if holes {
        model = model.with_holes();
    }
    ModelDevice::new(model, Completion::Immediate)
}

/// A target full of something else.
fn dirty(size: usize) -> Arc<ModelDevice> {
    let model = Model::new(size as u64).with_content(vec![0xa5; size]);
    ModelDevice::new(model, Completion::Immediate)
}

fn stack(device: Arc<dyn Device>) -> Stack {
    Stack::over(device).unwrap()
}

async fn run(source: &Stack, target: &Stack, options: &Options) -> Result<Summary> {
    let pool = Pool::new(64 << 20);
    let result = copy(source, target, options, &pool, &Arc::new(Progress::new())).await;
    assert_eq!(pool.reserved(), 0, "all buffers are back");
    result
}

#[test]
fn every_option_gives_the_same_bytes() {
    let seed = seed();
    for engine in [Engine::Auto, Engine::Threads] {
        runtime(engine).block_on(move || async move {
            let mut rng = Rng::new(seed);
            for round in 0..40 {
                let size = rng.between(1, 3 << 20) as usize;
                let bytes = content(&mut rng, size);
                let zeroed = rng.chance(30);
                let extra = if rng.chance(30) { rng.between(1, 9000) as usize } else { 0 };
                let target = match zeroed {
                    true => {
                        let model = Model::new((size + extra) as u64);
                        ModelDevice::new(model, Completion::Shuffled(rng.number()))
                    }
                    false => dirty(size + extra),
                };
                let options = Options {
                    connections: rng.between(1, 5) as usize,
                    requests: rng.between(1, 20) as usize,
                    adaptive: rng.chance(50),
                    request_size: 4096 << rng.below(7),
                    queue_size: rng.between(1, 4 << 20),
                    sparse: *rng.pick(&[0, 512, 4096, 65536]),
                    sampled: rng.chance(50),
                    allocated: rng.chance(30),
                    target_is_zero: zeroed && rng.chance(50),
                    extents: rng.chance(70),
                    flush: rng.chance(50),
                    synchronous: rng.chance(10),
                    ..Options::default()
                };
                let source = source_of(&bytes, rng.chance(50));
                let told = format!("seed {seed}, round {round}: {size}+{extra} bytes, {options:?}");
                let summary = run(&stack(source), &stack(target.clone()), &options).await.unwrap();
                let copied = target.bytes();
                assert!(copied[..size] == bytes, "{told}");
                let rest = if zeroed { 0 } else { 0xa5 };
                assert!(copied[size..].iter().all(|&byte| byte == rest), "tail; {told}");
                assert_eq!(summary.data + summary.zeroed + summary.skipped, size as u64, "{told}");
            }
        });
    }
}

#[test]
fn zeroes_become_zero_requests_and_no_write_overlaps_another() {
    on_worker(|| async {
        let size = (SEGMENT + (40 << 20)) as usize;
        let mut bytes = vec![0; size];
        bytes[..1 << 20].fill(1);
        bytes[(SEGMENT as usize)..][..300_000].fill(2);
        let target = dirty(size);
        let options = Options { sampled: false, ..Options::default() };
        let summary =
            run(&stack(source_of(&bytes, false)), &stack(target.clone()), &options).await.unwrap();
        assert!(target.bytes() == bytes);
        // The source calls everything data, so the zeroes were found by looking.
        assert!(summary.data < 2 << 20 && summary.zeroed > 150 << 20, "{summary}");
        let mut ranges: Vec<_> = target
            .seen()
            .iter()
            .filter(|seen| seen.kind.changes())
            .map(|seen| (seen.at, seen.at + seen.len))
            .collect();
        ranges.sort_unstable();
        assert!(ranges.windows(2).all(|pair| pair[0].1 <= pair[1].0), "overlap");
        assert_eq!((ranges[0].0, ranges[ranges.len() - 1].1), (0, size as u64));
    });
}

#[test]
fn a_target_that_is_zero_gets_only_data() {
    on_worker(|| async {
        let mut bytes = vec![0; 8 << 20];
        bytes[3 << 20..4 << 20].fill(9);
        let target = ModelDevice::new(Model::new(8 << 20), Completion::Immediate);
        let options = Options { sampled: false, ..Options::default() };
        run(&stack(source_of(&bytes, false)), &stack(target.clone()), &options).await.unwrap();
        assert!(target.bytes() == bytes);
        assert!(target.seen().iter().all(|seen| seen.kind != OpKind::Zero));
    });
}

#[test]
fn looking_at_nothing_writes_whole_requests() {
    on_worker(|| async {
        let size = 32 << 20;
        let target = dirty(size);
        let options = Options { sparse: 0, request_size: 1 << 20, ..Options::default() };
        let source = stack(source_of(&vec![0; size], false));
        run(&source, &stack(target.clone()), &options).await.unwrap();
        let writes: Vec<_> =
            target.seen().into_iter().filter(|s| s.kind == OpKind::Write).collect();
        assert_eq!(writes.len(), 32);
        assert!(writes.iter().all(|write| write.len == 1 << 20));
    });
}

#[test]
fn samples_find_zeroes_that_the_source_calls_data() {
    on_worker(|| async {
        let size = 64 << 20;
        let mut bytes = vec![7; size];
        bytes[24 << 20..].fill(0);
        let target = dirty(size);
        let source = stack(source_of(&bytes, false));
        let options = Options { connections: 1, requests: 1, ..Options::default() };
        let summary = run(&source, &stack(target.clone()), &options).await.unwrap();
        assert!(target.bytes() == bytes);
        // At most 15 requests pass before a sample finds the zeroes.
        assert!(summary.zeroed >= (40 << 20) - 16 * (512 << 10), "{summary}");
        let all = Options { sparse: 0, ..options };
        let summary = run(&source, &stack(dirty(size)), &all).await.unwrap();
        assert_eq!(summary.zeroed, 0);
    });
}

#[test]
fn everything_is_looked_at_where_nobody_said_what_is_data() {
    on_worker(|| async {
        let size = 20 << 20;
        let mut bytes = vec![3; size];
        bytes[12 << 20..13 << 20].fill(0);
        let options = Options { extents: false, segment: 4 << 20, ..Options::default() };
        let target = dirty(size);
        let (from, to) = (stack(source_of(&bytes, true)), stack(target.clone()));
        let summary = run(&from, &to, &options).await.unwrap();
        assert_eq!((summary.routes.unseen, summary.zeroed), (0, 1 << 20));
        assert!(target.bytes() == bytes);
    });
}

#[test]
fn a_failed_question_for_extents_means_data() {
    on_worker(|| async {
        let bytes = content(&mut Rng::new(1), 5 << 20);
        let source = FaultDevice::over(source_of(&bytes, false), 1);
        source.add(Rule::new(Then::Fail(Kind::Io)).kind(OpKind::Extents));
        let target = dirty(5 << 20);
        run(&stack(source), &stack(target.clone()), &Options::default()).await.unwrap();
        assert!(target.bytes() == bytes);
    });
}

#[test]
fn an_error_names_its_place_and_nothing_is_left_in_flight() {
    for (on_source, kind) in [(true, OpKind::Read), (false, OpKind::Write), (false, OpKind::Zero)] {
        on_worker(move || async move {
            let bytes = content(&mut Rng::new(7), 20 << 20);
            let source = FaultDevice::over(source_of(&bytes, false), 1);
            let target = FaultDevice::over(dirty(20 << 20), 2);
            let bad = if on_source { &source } else { &target };
            bad.add(Rule::new(Then::Fail(Kind::NoSpace)).kind(kind).range(9 << 20..12 << 20));
            target.delay_up_to(std::time::Duration::from_millis(2));
            let result =
                run(&stack(source.clone()), &stack(target.clone()), &Options::default()).await;
            let error = result.unwrap_err();
            assert_eq!(error.kind(), Kind::NoSpace);
            let (failed, at, len) = error.request().unwrap();
            assert_eq!(failed, kind);
            assert!(at < 12 << 20 && at + len > 9 << 20, "{error}");
            assert_eq!((source.in_flight(), target.in_flight()), (0, 0), "drained");
        });
    }
}

#[test]
fn a_cancelled_copy_stops_after_what_is_in_flight() {
    on_worker(|| async {
        let size = 64 << 20;
        let target = FaultDevice::over(dirty(size), 2);
        target.delay_up_to(std::time::Duration::from_millis(5));
        let source = stack(source_of(&vec![7; size], false));
        let progress = Arc::new(Progress::new());
        let watcher = progress.clone();
        drop(io::spawn(async move {
            while watcher.snapshot().done() == 0 {
                io::sleep(std::time::Duration::from_millis(1)).await;
            }
            watcher.cancel();
        }));
        let pool = Pool::new(8 << 20);
        let end = stack(target.clone());
        let error = copy(&source, &end, &Options::default(), &pool, &progress).await.unwrap_err();
        assert_eq!(error.kind(), Kind::ShuttingDown);
        assert!(progress.snapshot().done() < size as u64);
        assert_eq!((target.in_flight(), pool.reserved()), (0, 0));
    });
}

#[test]
fn a_pool_of_one_request_is_enough() {
    on_worker(|| async {
        let bytes = content(&mut Rng::new(3), 9 << 20);
        let target = dirty(9 << 20);
        let pool = Pool::new(512 << 10);
        let (source, end) = (stack(source_of(&bytes, false)), stack(target.clone()));
        let progress = Arc::new(Progress::new());
        let options = Options::default();
        let work = copy(&source, &end, &options, &pool, &progress);
        let done = io::timeout(std::time::Duration::from_secs(20), work).await;
        done.expect("no deadlock").unwrap();
        assert!(target.bytes() == bytes);
    });
}

#[test]
fn targets_that_cannot_hold_the_source_are_refused() {
    on_worker(|| async {
        let source = stack(source_of(&[1; 10_000], false));
        let error = run(&source, &stack(dirty(9_999)), &Options::default()).await.unwrap_err();
        assert_eq!(error.kind(), Kind::NoSpace);
        assert!(error.to_string().contains("9999") && error.to_string().contains("10000"));
        let mut facts = Model::all_facts(10_000);
        facts.can -= Can::CHANGES;
        let target = ModelDevice::new(Model::with_facts(facts), Completion::Immediate);
        let error = run(&source, &stack(target), &Options::default()).await.unwrap_err();
        assert_eq!(error.kind(), Kind::ReadOnly);
    });
}

/// A device whose size is no multiple of its blocks.
fn with_tail(size: usize, minimum: u32, byte: u8) -> Arc<ModelDevice> {
    let mut facts: Facts = Model::all_facts(size as u64);
    facts.zeroed = false;
    facts.block.minimum = minimum;
    let model = Model::with_facts(facts).with_content(vec![byte; size]);
    ModelDevice::new(model, Completion::Immediate)
}

#[test]
fn tails_that_no_request_reaches_are_refused_before_anything_is_written() {
    on_worker(|| async {
        for minimum in [512, 4096, 65536] {
            let whole = 4 * minimum as usize;
            let size = whole + 200;
            let options = Options::default();
            let ends = [
                (source_of(&vec![1; size], true), with_tail(size, minimum, 2), "written"),
                (with_tail(size, minimum, 1), dirty(size + 4096), "read"),
            ];
            for (source, target, done) in ends {
                let before = target.bytes();
                let error =
                    run(&stack(source), &stack(target.clone()), &options).await.unwrap_err();
                assert_eq!(error.kind(), Kind::Invalid);
                let said = error.to_string();
                assert!(said.contains(&format!("the last 200 of {size}")), "{said}");
                assert!(said.contains(done), "{said}");
                assert!(target.bytes() == before, "{said}");
            }
            // What is in reach is copied, to whole blocks and to a part of one.
            for len in [whole, whole - 100] {
                let target = with_tail(size, minimum, 2);
                let source = source_of(&vec![1; len], true);
                run(&stack(source), &stack(target.clone()), &options).await.unwrap();
                let copied = target.bytes();
                assert!(copied[..len].iter().all(|&byte| byte == 1), "{minimum} {len}");
                assert!(copied[len..].iter().all(|&byte| byte == 2), "{minimum} {len}");
            }
            let part = Options { ranges: Some(vec![(0, whole as u64)].into()), ..options };
            let target = dirty(size);
            run(&stack(with_tail(size, minimum, 1)), &stack(target.clone()), &part).await.unwrap();
            assert!(target.bytes()[..whole].iter().all(|&byte| byte == 1), "{minimum}");
        }
    });
}

#[test]
fn targets_with_large_blocks_and_few_abilities_are_filled_exactly() {
    on_worker(|| async {
        let mut rng = Rng::new(5);
        for minimum in [1, 512, 4096, 65536] {
            let size = rng.between(1, 2 << 20) as usize;
            let bytes = content(&mut rng, size);
            let room = size.next_multiple_of(65536);
            let mut facts: Facts = Model::all_facts(room as u64);
            facts.can = Can::WRITE;
            facts.zeroed = false;
            facts.contexts.clear();
            facts.block.minimum = minimum;
            facts.block.maximum = 65536 * 2;
            let model = Model::with_facts(facts).with_content(vec![0x5a; room]);
            let target = ModelDevice::new(model, Completion::Immediate);
            let options = Options { flush: true, ..Options::default() };
            run(&stack(source_of(&bytes, true)), &stack(target.clone()), &options).await.unwrap();
            let copied = target.bytes();
            assert!(copied[..size] == bytes, "minimum {minimum}, {size} bytes");
            assert!(copied[size..].iter().all(|&byte| byte == 0x5a), "tail");
        }
    });
}

#[test]
fn verification_finds_the_first_difference() {
    on_worker(|| async {
        let size = (SEGMENT + (3 << 20)) as usize;
        let mut bytes = vec![0; size];
        bytes[..5 << 20].fill(3);
        let target = source_of(&bytes, false);
        let source = stack(source_of(&bytes, true));
        let (options, pool) = (Options::default(), Pool::new(16 << 20));
        let check = || async {
            let progress = Arc::new(Progress::new());
            verify(&source, &stack(target.clone()), &options, &pool, &progress).await
        };
        let same = check().await.unwrap();
        assert_eq!(same.bytes, size as u64);
        assert_eq!(same.digest.as_ref().unwrap().len(), 64);
        let manifest = |device: Arc<ModelDevice>| async move {
            let (options, pool) = (Options::default(), Pool::new(16 << 20));
            let progress = Arc::new(Progress::new());
            engine::manifest(&stack(device), None, &options, &pool, &progress).await.unwrap()
        };
        let kept = manifest(target.clone()).await;
        assert_eq!((kept.size(), Some(kept.digest())), (size as u64, same.digest));
        target.model().bytes_mut()[size - 1] ^= 1;
        let changed = manifest(target.clone()).await;
        assert_eq!(kept.differences(&changed), [(SEGMENT + (2 << 20), 1 << 20)]);
        let error = check().await.unwrap_err();
        assert!(error.to_string().contains(&format!("offset {}", size - 1)), "{error}");
        target.model().bytes_mut()[12_345] ^= 1;
        let error = check().await.unwrap_err();
        assert!(error.to_string().contains("offset 12345"), "{error}");
    });
}

#[test]
fn a_comparison_finds_the_first_difference_wherever_it_is() {
    let seed = seed();
    on_worker(move || async move {
        let mut rng = Rng::new(seed);
        let (options, pool) = (Options::default(), Pool::new(4 << 20));
        for round in 0..60 {
            let size = rng.between(1, 2 << 20) as usize;
            let bytes = content(&mut rng, size);
            let mut changed = bytes.clone();
            // One may be longer: zeroes there make no difference.
            changed.resize(size + rng.below(300_000) as usize, 0);
            let mut expected = None;
            for _ in 0..rng.below(3) {
                let at = rng.below(changed.len() as u64) as usize;
                changed[at] ^= 0x40;
            }
            for (at, byte) in changed.iter().enumerate() {
                if *byte != bytes.get(at).copied().unwrap_or(0) {
                    expected = Some(at as u64);
                    break;
                }
            }
            let sizes = (size as u64, changed.len() as u64);
            // As memory tells its holes: written where there is something.
            let mut ends = Vec::new();
            for bytes in [&bytes, &changed] {
                let model = Model::new(bytes.len() as u64);
                let device = ModelDevice::new(model, Completion::Shuffled(rng.number()));
                for (start, block) in bytes.chunks(4096).enumerate() {
                    if !engine::is_zero(block) {
                        let data = io::Data::copy_of(block);
                        device.write(start as u64 * 4096, data).await.unwrap();
                    }
                }
                ends.push((device.clone(), stack(device)));
            }
            let flipped = rng.chance(50);
            let (one, other) = if flipped { (1, 0) } else { (0, 1) };
            let progress = Arc::new(Progress::new());
            let found =
                engine::compare(&ends[one].1, &ends[other].1, &options, &pool, &progress).await;
            let found = found.unwrap();
            assert_eq!(found.differs_at, expected, "seed {seed}, round {round}");
            assert_eq!(found.sizes, if flipped { (sizes.1, sizes.0) } else { sizes });
            let read = |device: &Arc<ModelDevice>| {
                let reads = device.seen().into_iter().filter(|seen| seen.kind == OpKind::Read);
                reads.map(|seen| seen.len).sum::<u64>()
            };
            let filled = bytes.chunks(4096).filter(|block| !engine::is_zero(block)).count();
            assert!(read(&ends[0].0) <= filled as u64 * 4096, "holes are not read");
            assert_eq!(pool.reserved(), 0);
        }
    });
}

#[test]
fn digests_are_those_of_the_bytes_and_holes_are_not_read() {
    use engine::Algorithm;
    let seed = seed();
    on_worker(move || async move {
        let mut rng = Rng::new(seed);
        let options = Options { retries: 3, retry_delay: Default::default(), ..Options::default() };
        for round in 0..30 {
            let size = rng.between(0, 3 << 20) as usize;
            let mut bytes = content(&mut rng, size);
            if size > 2 << 20 {
                bytes[600_000..1_900_000].fill(0);
            }
            let device =
                ModelDevice::new(Model::new(size as u64), Completion::Shuffled(rng.number()));
            for (start, block) in bytes.chunks(4096).enumerate() {
                if !engine::is_zero(block) {
                    let data = io::Data::copy_of(block);
                    device.write(start as u64 * 4096, data).await.unwrap();
                }
            }
            let faults = FaultDevice::over(device.clone(), rng.number());
            faults.add(Rule::new(Then::Fail(Kind::Io)).kind(OpKind::Read).percent(10).times(3));
            let source = stack(faults);
            let pool = Pool::new(rng.between(1, 8) * (256 << 10));
            let progress = Arc::new(Progress::new());
            let found =
                engine::digest(&source, Algorithm::Blake3, &options, &pool, &progress).await;
            let told = format!("seed {seed}, round {round}, {size} bytes");
            assert_eq!(found.unwrap(), blake3::hash(&bytes).to_hex().as_str(), "{told}");
            if size > 2 << 20 {
                let whole_piece = |seen: &testkit::model::Seen| {
                    seen.kind == OpKind::Read && seen.at >= 3 << 18 && seen.at < 7 << 18
                };
                assert!(!device.seen().iter().any(whole_piece), "{told}");
            }
            assert_eq!(pool.reserved(), 0);
        }
    });
}

#[test]
fn a_comparison_tells_what_could_not_be_done() {
    on_worker(|| async {
        let bytes = vec![7; 3 << 20];
        let (options, pool) = (Options::default(), Pool::new(4 << 20));
        for kind in [OpKind::Read, OpKind::Extents] {
            let bad = FaultDevice::over(source_of(&bytes, false), 1);
            bad.add(Rule::new(Then::Fail(Kind::Io)).kind(kind).times(1));
            let (one, other) = (stack(source_of(&bytes, false)), stack(bad.clone()));
            let progress = Arc::new(Progress::new());
            let error =
                engine::compare(&one, &other, &options, &pool, &progress).await.unwrap_err();
            assert_eq!(error.request().unwrap().0, kind);
            assert_eq!((bad.in_flight(), pool.reserved()), (0, 0), "drained");
        }
    });
}

#[test]
fn pipes_are_copied_both_ways() {
    on_worker(|| async {
        let bytes = content(&mut Rng::new(11), (3 << 20) + 77);
        let (options, pool) = (Options::default(), Pool::new(4 << 20));
        let progress = || Arc::new(Progress::new());
        let (reader, writer) = std::io::pipe().unwrap();
        let expected = bytes.clone();
        let collect = std::thread::spawn(move || {
            let mut all = Vec::new();
            std::io::Read::read_to_end(&mut { reader }, &mut all).unwrap();
            assert!(all == expected);
        });
        let source = stack(source_of(&bytes, true));
        engine::copy_to_pipe(&source, writer.into(), &options, &pool, &progress()).await.unwrap();
        collect.join().unwrap();

        let (reader, writer) = std::io::pipe().unwrap();
        let sent = bytes.clone();
        let feed = std::thread::spawn(move || std::io::Write::write_all(&mut { writer }, &sent));
        let target = dirty(bytes.len() + 10);
        let end = stack(target.clone());
        let summary = engine::copy_from_pipe(reader.into(), &end, &options, &pool, &progress())
            .await
            .unwrap();
        feed.join().unwrap().unwrap();
        assert_eq!(summary.size, bytes.len() as u64);
        assert!(target.bytes()[..bytes.len()] == bytes);
        assert!(summary.zeroed > 0, "zeroes of a pipe are found: {summary}");

        let (reader, writer) = std::io::pipe().unwrap();
        let feed =
            std::thread::spawn(move || std::io::Write::write_all(&mut { writer }, &[1; 9000]));
        let small = stack(dirty(8192));
        let error =
            engine::copy_from_pipe(reader.into(), &small, &options, &pool, &progress()).await;
        assert_eq!(error.unwrap_err().kind(), Kind::NoSpace);
        feed.join().unwrap().unwrap();
        assert_eq!(pool.reserved(), 0);
    });
}

#[test]
fn all_lanes_together_keep_to_the_rate_and_to_its_change() {
    on_worker(|| async {
        let size = 4 << 20;
        let target = dirty(size);
        let rate = Arc::new(engine::Rate::new(8 << 20, 0));
        let options = Options {
            segment: 1 << 20,
            request_size: 64 << 10,
            rate: Some(rate.clone()),
            ..Options::default()
        };
        let (source, end) = (stack(source_of(&vec![7; size], false)), stack(target.clone()));
        let summary = run(&source, &end, &options).await.unwrap();
        let seconds = summary.elapsed.as_secs_f64();
        // Half a second's worth, less what may pass at once.
        assert!((0.35..2.0).contains(&seconds), "{seconds}");
        // Unbearably slow at first.
        rate.set(1, 0);
        drop(io::spawn(async move {
            io::sleep(std::time::Duration::from_millis(150)).await;
            rate.set(0, 0);
        }));
        let summary = run(&source, &end, &options).await.unwrap();
        let seconds = summary.elapsed.as_secs_f64();
        assert!((0.1..2.0).contains(&seconds), "{seconds}");
    });
}

/// A store whose handles are connections without the multi-conn promise: all on one disk, or each on
/// a disk of its own.
struct Connections {
    disks: Vec<Arc<dyn Device>>,
    /// Next disk to hand out; the first handle is disk 0.
    next: AtomicUsize,
}

struct More(&'static Connections);

impl Another for More {
    fn another(&self) -> Opening<Arc<dyn Device>> {
        let index = self.0.next.fetch_add(1, Ordering::Relaxed) % self.0.disks.len();
        let disk = self.0.disks[index].clone();
        Box::pin(async move { Ok(disk) })
    }
}

impl Backend for &'static Connections {
    fn schemes(&self) -> &'static [&'static str] {
        &["connections"]
    }

    fn operand(&self) -> &'static str {
        ""
    }

    fn summary(&self) -> &'static str {
        "for tests"
    }

    fn open(&self, _: Target) -> Opening<Opened> {
        let (device, more) = (self.disks[0].clone(), Arc::new(More(self)));
        Box::pin(async move { Ok(Opened { device, more: Some(more) }) })
    }
}

/// A device that does not promise that a flush covers other connections.
struct NoPromise(Arc<dyn Device>);

impl Device for NoPromise {
    fn facts(&self) -> Arc<Facts> {
        let mut facts = Facts::clone(&self.0.facts());
        facts.can -= Can::MULTI_CONN;
        facts.zeroed = false;
        Arc::new(facts)
    }

    fn submit(&self, request: Request) -> Pending {
        self.0.submit(request)
    }
}

/// Sparse disks in memory of six segments.
async fn disks(count: usize) -> Vec<Arc<dyn Device>> {
    let registry = Registry { backends: backends::all(), ..Registry::default() };
    let spec = Spec::Scheme { scheme: "memory".into(), rest: "768M".into() };
    let mut disks: Vec<Arc<dyn Device>> = Vec::new();
    for _ in 0..count {
        let stack = registry.open(&spec, Vec::new(), Intent::WRITE).await.unwrap();
        disks.push(Arc::new(NoPromise(stack.device().clone())));
    }
    disks
}

/// A slow source with data at the start of each segment, and a target of these disks.
async fn ends(target_disks: &[Arc<dyn Device>]) -> (Stack, Stack) {
    let source = disks(1).await.remove(0);
    for segment in 0..6 {
        let data = io::Data::copy_of(&vec![segment as u8 + 1; 4 << 20]);
        source.write(segment * SEGMENT, data).await.unwrap();
    }
    let slow = FaultDevice::over(source, 1);
    slow.delay_up_to(std::time::Duration::from_millis(2));
    let store: &'static Connections =
        Box::leak(Box::new(Connections { disks: target_disks.to_vec(), next: 1.into() }));
    let backend: &'static &'static Connections = Box::leak(Box::new(store));
    let registry = Registry { backends: vec![backend], ..Registry::default() };
    let spec = Spec::Scheme { scheme: "connections".into(), rest: String::new() };
    let target = registry.open(&spec, Vec::new(), Intent::WRITE).await.unwrap();
    (stack(slow), target)
}

async fn same_on(source: &Stack, disk: &Arc<dyn Device>) -> bool {
    let (options, pool) = (Options::default(), Pool::new(16 << 20));
    let progress = Arc::new(Progress::new());
    verify(source, &stack(disk.clone()), &options, &pool, &progress).await.is_ok()
}

#[test]
fn connections_that_share_a_disk_are_all_used() {
    on_worker(|| async {
        let disks = disks(1).await;
        let (source, target) = ends(&disks).await;
        let summary = run(&source, &target, &Options::default()).await.unwrap();
        assert!(same_on(&source, &disks[0]).await);
        assert!(summary.lanes > 1, "{summary}");
        assert!(summary.warnings.is_empty(), "{:?}", summary.warnings);
    });
}

#[test]
fn connections_that_each_have_a_disk_are_found_out() {
    on_worker(|| async {
        // Only disk 0 is the one to be filled; all others are handed to further connections.
        let disks = disks(2).await;
        let (source, target) = ends(&disks).await;
        let summary =
            run(&source, &target, &Options { connections: 2, ..Options::default() }).await.unwrap();
        assert!(same_on(&source, &disks[0]).await, "everything is on the first disk");
        assert_eq!(summary.lanes, 1);
        assert!(summary.warnings.iter().any(|text| text.contains("a disk of its own")));
    });
}
