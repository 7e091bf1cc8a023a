//! One engine that runs several plans: over the same connections, paused and resumed, with wanted
//! ranges, with plans that grow, cancelled; also while connections are lost. `reads`: plans that are
//! read only.

mod reads;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use blockhaul_block::{Can, Device, Kind, OpKind};
use blockhaul_catalog::Stack;
use blockhaul_engine::{CopyProgress, Engine, EngineOptions, RateLimit};
use blockhaul_io::{Pool, Runtime, RuntimeConfig};
use blockhaul_testkit::fault::FaultDevice;
use blockhaul_testkit::model::{CompletionOrder, Model, ModelDevice};
use blockhaul_testkit::rng::{Rng, seed};

use crate::server::Server;

const MIB: u64 = 1 << 20;

fn on_worker<F: Future<Output = ()> + 'static>(check: impl FnOnce() -> F + Send + 'static) {
    let config = RuntimeConfig { workers: 2, engine: blockhaul_io::IoEngine::Auto };
    Runtime::start(&config).unwrap().block_on(check);
}

fn disk(bytes: &[u8], seed: u64) -> Arc<ModelDevice> {
    let model = Model::new(bytes.len() as u64).with_content(bytes.to_vec());
    ModelDevice::new(model, CompletionOrder::Shuffled(seed))
}

/// Bytes without zeroes, different in each block.
fn filled(size: usize) -> Vec<u8> {
    (0..size).map(|at| (at / 4096 % 251) as u8 + 1).collect()
}

/// A source with latency up to `delay`, and an empty target, both observed.
struct Slow {
    bytes: Vec<u8>,
    source: Arc<FaultDevice>,
    target: Arc<ModelDevice>,
    progress: Arc<CopyProgress>,
    engine: Engine,
}

impl Slow {
    async fn new(size: u64, delay: Duration, options: EngineOptions) -> Slow {
        let bytes = filled(size as usize);
        let source = FaultDevice::over(disk(&bytes, 1), 2);
        source.delay_up_to(delay);
        let target = disk(&vec![0xa5; size as usize], 3);
        let progress = Arc::new(CopyProgress::new());
        let stacks = [Stack::over(source.clone()), Stack::over(target.clone())];
        let pool = Pool::new(8 << 20);
        let opened = Engine::open(&stacks[0], &stacks[1], &options, &pool, &progress).await;
        Slow { bytes, source, target, progress, engine: opened.unwrap() }
    }

    fn has(&self, at: u64, len: u64) -> bool {
        let range = at as usize..(at + len) as usize;
        self.target.model().bytes()[range.clone()] == self.bytes[range]
    }
}

/// One lane with few and small requests.
fn narrow() -> EngineOptions {
    EngineOptions {
        connections: 1,
        adaptive_connections: false,
        requests: 4,
        adaptive: false,
        request_size: 64 << 10,
        adaptive_size: false,
        segment: MIB,
        spread: false,
        ..EngineOptions::default()
    }
}

async fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let began = Instant::now();
    while !is_so() {
        assert!(began.elapsed() < Duration::from_secs(60), "waited in vain for: {what}");
        blockhaul_io::sleep(Duration::from_millis(1)).await;
    }
}

#[test]
fn two_plans_are_copied_over_the_same_connections() {
    on_worker(|| async {
        let size = 4 * MIB;
        let source_disk = disk(&filled(size as usize), 1);
        let target_disk = disk(&vec![0xa5; size as usize], 2);
        let (source, from) = Server::new(source_disk.clone(), 1).open().await;
        let (target, to) = Server::new(target_disk.clone(), 2).open().await;
        let options = EngineOptions { connections: 3, requests: 8, ..narrow() };
        let pool = Pool::new(8 << 20);
        let progress = Arc::new(CopyProgress::new());
        let mut engine = Engine::open(&source, &target, &options, &pool, &progress).await.unwrap();

        let plan = engine.empty_plan();
        plan.add(0, size).unwrap();
        let dials = || (from.dials.load(Ordering::SeqCst), to.dials.load(Ordering::SeqCst));
        let filler = plan.clone();
        let filling = blockhaul_io::spawn(async move {
            // It does not end before all connections are made.
            until("further connections", || dials() == (2, 2)).await;
            filler.close();
        });
        let first = engine.run(&plan).await.unwrap();
        filling.await;
        assert_eq!((first.data, first.size), (size, size));
        assert!(target_disk.bytes() == source_disk.bytes());

        // A guest writes, and the changes are copied again.
        source_disk.model().bytes_mut()[MIB as usize..2 * MIB as usize].fill(0x77);
        let plan = engine.empty_plan();
        plan.add(MIB, MIB).unwrap();
        plan.close();
        let second = engine.run(&plan).await.unwrap();
        assert_eq!((second.data, second.size), (MIB, MIB), "of this run alone");
        assert!(target_disk.bytes() == source_disk.bytes());
        assert_eq!(dials(), (2, 2), "nothing was connected to again");

        assert_eq!(engine.run(&plan).await.unwrap_err().kind(), Kind::Invalid, "it has run");
        let sum = engine.finish().await.unwrap();
        assert_eq!((sum.data, sum.size), (size + MIB, size + MIB));
        assert_eq!(pool.reserved(), 0);
    });
}

#[test]
fn zeroes_are_written_where_a_plan_before_has_left_something_else() {
    on_worker(|| async {
        let size = 4 * MIB;
        let source_disk = disk(&filled(size as usize), 1);
        let target_disk = disk(&vec![0; size as usize], 2);
        let stacks = [Stack::over(source_disk.clone()), Stack::over(target_disk.clone())];
        let options = EngineOptions { target_is_zero: true, trust_zero: true, ..narrow() };
        let pool = Pool::new(8 << 20);
        let progress = Arc::new(CopyProgress::new());
        let mut engine =
            Engine::open(&stacks[0], &stacks[1], &options, &pool, &progress).await.unwrap();
        let plan = engine.plan();
        engine.run(&plan).await.unwrap();
        source_disk.model().bytes_mut()[..2 * MIB as usize].fill(0);
        let plan = engine.plan();
        let again = engine.run_last(&plan).await.unwrap();
        assert!(target_disk.bytes() == source_disk.bytes());
        assert_eq!(again.skipped, 0);
    });
}

#[test]
fn nothing_moves_while_the_engine_is_paused() {
    on_worker(|| async {
        let delay = Duration::from_millis(2);
        let Slow { bytes, source, target, progress, engine } =
            Slow::new(16 * MIB, delay, narrow()).await;
        let control = engine.control();
        let plan = engine.plan();
        let running = blockhaul_io::spawn(async move { engine.run_last(&plan).await });
        for _ in 0..3 {
            let before = progress.snapshot().done();
            until("something to be copied", || progress.snapshot().done() > before).await;
            control.pause();
            control.paused().await;
            assert!(control.is_paused());
            let moved = (source.seen().len(), target.seen().len(), progress.snapshot());
            assert_eq!(source.in_flight(), 0, "what was under way has completed");
            blockhaul_io::sleep(Duration::from_millis(60)).await;
            assert_eq!(moved, (source.seen().len(), target.seen().len(), progress.snapshot()));
            assert!(progress.snapshot().done() < 16 * MIB);
            // The rate limit is independent.
            control.set_rate(MIB, 0);
            control.set_rate(0, 0);
            blockhaul_io::sleep(Duration::from_millis(20)).await;
            assert_eq!(moved.0, source.seen().len(), "no limit does not mean to go on");
            control.resume();
        }
        let summary = running.await.unwrap();
        assert_eq!(summary.data, 16 * MIB);
        assert!(target.bytes() == bytes);
    });
}

#[test]
fn an_engine_that_ignores_its_rate_waits_for_no_tokens() {
    on_worker(|| async {
        let rate = Arc::new(RateLimit::new(1, 0));
        let options = EngineOptions { rate: Some(rate.clone()), ..narrow() };
        let Slow { bytes, source, target, engine, .. } =
            Slow::new(4 * MIB, Duration::ZERO, options).await;
        let control = engine.control();
        let plan = engine.plan();
        let running = blockhaul_io::spawn(async move { engine.run_last(&plan).await });
        until("the first request", || !source.seen().is_empty()).await;
        assert!(target.bytes() != bytes, "at a byte per second");
        control.ignore_rate(true);
        running.await.unwrap();
        assert!(target.bytes() == bytes);
        assert_eq!(rate.limits(), (1, 0), "others keep to it");
    });
}

#[test]
fn a_paused_engine_can_be_cancelled_and_says_what_was_done() {
    on_worker(|| async {
        let delay = Duration::from_millis(5);
        let Slow { target, progress, mut engine, .. } = Slow::new(16 * MIB, delay, narrow()).await;
        let control = engine.control();
        let plan = engine.plan();
        let seen = progress.clone();
        let waits = plan.clone();
        let waiting = blockhaul_io::spawn(async move { waits.want(15 * MIB, 4096).await });
        control.pause();
        let cancelling = blockhaul_io::spawn(async move {
            control.resume();
            until("something to be copied", || seen.snapshot().done() > 0).await;
            control.pause();
            control.paused().await;
            control.cancel();
            Instant::now()
        });
        let error = engine.run(&plan).await.unwrap_err();
        assert!(cancelling.await.elapsed() < Duration::from_secs(5));
        assert_eq!(error.kind(), Kind::ShuttingDown);
        let done = engine.summary();
        assert!(done.data > 0 && done.data < 16 * MIB, "{done}");
        // It came first, or was no longer copied.
        let wanted = waiting.await;
        assert!(wanted.is_ok_and(|()| true) || target.bytes()[15 * MIB as usize] == 0xa5);
        let another = engine.plan();
        assert_eq!(engine.run(&another).await.unwrap_err().kind(), Kind::ShuttingDown);
    });
}

#[test]
fn a_range_that_is_asked_for_arrives_before_the_rest() {
    // In segments that no lane has taken; and later in the segment of the only lane.
    for segment in [MIB, 64 * MIB] {
        on_worker(move || async move {
            let options = EngineOptions { segment, ..narrow() };
            let mut slow = Slow::new(32 * MIB, Duration::from_millis(4), options).await;
            let plan = slow.engine.plan();
            let waits = plan.clone();
            let control = slow.engine.control();
            let progress = slow.progress.clone();
            let waiting = blockhaul_io::spawn(async move {
                until("something to be copied", || progress.snapshot().done() > 0).await;
                let mut done = Vec::new();
                for at in [31 * MIB, 20 * MIB + 12_288, 31 * MIB, 0] {
                    waits.want(at, 200_000).await.unwrap();
                    done.push((at, progress.snapshot().done()));
                }
                control.pause();
                control.paused().await;
                (done, control)
            });
            let progress = slow.progress.clone();
            let running =
                blockhaul_io::spawn(async move { (slow.engine.run(&plan).await, slow.engine) });
            let (done, control) = waiting.await;
            for &(at, done) in &done {
                let range = at as usize..at as usize + 200_000;
                assert!(slow.target.model().bytes()[range.clone()] == slow.bytes[range]);
                assert!(done < 8 * MIB, "at {at}: after {done} bytes, segments of {segment}");
            }
            assert!(progress.snapshot().done() < 16 * MIB);
            control.resume();
            let (ran, _engine) = running.await;
            assert_eq!(ran.unwrap().data, 32 * MIB, "each byte is copied once");
            assert!(slow.target.bytes() == slow.bytes);
        });
    }
}

#[test]
fn a_plan_grows_while_it_runs() {
    on_worker(|| async {
        let mut slow = Slow::new(16 * MIB, Duration::from_millis(1), narrow()).await;
        let plan = slow.engine.empty_plan();
        plan.add(8 * MIB, 2 * MIB).unwrap();
        for (at, len) in [(9 * MIB, MIB), (15 * MIB, 2 * MIB), (u64::MAX, 1)] {
            assert_eq!(plan.add(at, len).unwrap_err().kind(), Kind::Invalid, "{at} {len}");
        }
        let more = plan.clone();
        let growing = blockhaul_io::spawn(async move {
            more.want(8 * MIB, 2 * MIB).await.unwrap();
            more.want(0, MIB).await.unwrap();
            // Before the existing range, after it, and a part of a segment.
            more.add(0, MIB + 4096).unwrap();
            more.add(12 * MIB, 4 * MIB).unwrap();
            more.want(15 * MIB, MIB).await.unwrap();
            more.want(MIB, 4096).await.unwrap();
            more.add(3 * MIB, 512).unwrap();
            more.close();
            assert_eq!(more.add(5 * MIB, 512).unwrap_err().kind(), Kind::Invalid);
        });
        let summary = slow.engine.run(&plan).await.unwrap();
        growing.await;
        assert_eq!(summary.data, 7 * MIB + 4096 + 512);
        assert_eq!(slow.progress.snapshot().total, summary.data);
        for (at, len) in [(0, MIB + 4096), (3 * MIB, 512), (8 * MIB, 2 * MIB), (12 * MIB, 4 * MIB)]
        {
            assert!(slow.has(at, len), "{at}");
        }
        let untouched = 5 * MIB as usize..8 * MIB as usize;
        assert!(slow.target.bytes()[untouched].iter().all(|&byte| byte == 0xa5));
    });
}

#[test]
fn a_plan_is_durable_after_a_flush() {
    on_worker(|| async {
        let mut slow = Slow::new(2 * MIB, Duration::ZERO, narrow()).await;
        assert!(slow.target.facts().can.contains(Can::FLUSH));
        let target = slow.target.clone();
        let flushes = || target.seen().iter().filter(|seen| seen.kind == OpKind::Flush).count();
        let plan = slow.engine.plan();
        slow.engine.run(&plan).await.unwrap();
        assert_eq!(flushes(), 0);
        slow.engine.flush().await.unwrap();
        assert_eq!(flushes(), 1);
        slow.engine.flush().await.unwrap();
        assert_eq!(flushes(), 1, "there is nothing new");
        let plan = slow.engine.plan();
        slow.engine.run(&plan).await.unwrap();
        slow.engine.flush().await.unwrap();
        assert_eq!(flushes(), 2);
        slow.engine.finish().await.unwrap();
        assert_eq!(flushes(), 2, "the options do not ask for it");
    });
}

#[test]
fn ranges_arrive_and_plans_grow_while_connections_die() {
    let seed = seed();
    on_worker(move || async move {
        let mut rng = Rng::new(seed);
        let mut reconnected = 0;
        for round in 0..40 {
            let size = rng.between(2, 40) * 64 * 1024;
            let source_disk = disk(&rng.disk(size as usize, 200_000, 60), rng.number());
            let mut from = Server::new(source_disk.clone(), rng.number());
            let target_disk = disk(&vec![0xa5; size as usize], rng.number());
            let mut to = Server::new(target_disk.clone(), rng.number());
            for server in [&mut from, &mut to] {
                server.promise = rng.chance(70);
                *server.fuse.get_mut() = rng.between(1, 60);
                *server.cuts_left.get_mut() = rng.between(0, 4);
                *server.refused_dials.get_mut() = rng.between(0, 2);
            }
            let (source, _) = from.open().await;
            let (target, _) = to.open().await;
            let options = EngineOptions {
                retries: 8,
                retry_delay: Duration::from_millis(1),
                segment: 256 << 10,
                request_size: 16 << 10,
                connections: rng.between(1, 4) as usize,
                flush: rng.chance(50),
                ..EngineOptions::default()
            };
            let told = format!("seed {seed}, round {round}: {size} bytes, {options:?}");
            let pool = Pool::new(8 << 20);
            let progress = Arc::new(CopyProgress::new());
            let opened = Engine::open(&source, &target, &options, &pool, &progress).await;
            let mut engine = opened.unwrap();
            for number in 0..3 {
                let plan = engine.empty_plan();
                let control = engine.control();
                let grows = plan.clone();
                let from_disk = source_disk.clone();
                let to_disk = target_disk.clone();
                let mut rng = Rng::new(rng.number());
                let growing = blockhaul_io::spawn(async move {
                    let mut blocks: Vec<u64> = (0..size / 65536).collect();
                    while !blocks.is_empty() {
                        let block = blocks.swap_remove(
                            rng.between(0, blocks.len() as u64) as usize % blocks.len(),
                        );
                        grows.add(block * 65536, 65536).unwrap();
                        if rng.chance(20) {
                            control.pause();
                            control.paused().await;
                            control.resume();
                        }
                        if rng.chance(30) {
                            let at = block * 65536 + rng.between(0, 60_000);
                            grows.want(at, 4096).await.unwrap();
                            let range = at as usize..at as usize + 4096;
                            let here = to_disk.model().bytes()[range.clone()].to_vec();
                            let there = from_disk.model().bytes()[range].to_vec();
                            let differs = (0..4096).find(|&byte| here[byte] != there[byte]);
                            assert!(
                                differs.is_none(),
                                "{at}+{differs:?}, run {number}: {:?} {:?}",
                                here[differs.unwrap()],
                                there[differs.unwrap()]
                            );
                        }
                    }
                    grows.close();
                });
                let ran = engine.run(&plan).await;
                ran.unwrap_or_else(|error| panic!("{error}; run {number}; {told}"));
                growing.await;
                // Also requests that are carried out late.
                blockhaul_io::sleep(Duration::from_millis(5)).await;
                assert!(target_disk.bytes() == source_disk.bytes(), "run {number}; {told}");
                source_disk.model().bytes_mut().rotate_left(4096);
            }
            source_disk.model().bytes_mut().rotate_right(4096);
            let sum = engine.finish().await;
            let sum = sum.unwrap_or_else(|error| panic!("{error}; {told}"));
            assert_eq!(sum.data + sum.zeroed + sum.skipped, 3 * size, "{told}");
            assert_eq!(pool.reserved(), 0, "{told}");
            reconnected += sum.retried.source_connections + sum.retried.target_connections;
        }
        assert!(reconnected > 0);
    });
}
