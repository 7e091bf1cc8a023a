//! An engine that reads: verification, comparison, manifests and digests, paused, cancelled, within
//! a rate limit, after a copy, while connections are lost.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use blockhaul_block::{Kind, OpKind, Result};
use blockhaul_catalog::Stack;
use blockhaul_engine::{
    CopyProgress, DigestAlgorithm, Engine, EngineControl, EngineOptions, RateLimit, Side,
};
use blockhaul_io::{Pool, Task};
use blockhaul_testkit::fault::{FaultDevice, FaultEffect, FaultRule};
use blockhaul_testkit::model::ModelDevice;

use super::{MIB, disk, filled, narrow, on_worker, until};
use crate::server::Server;

const SIZE: u64 = 16 * MIB;

/// What an engine reads for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Work {
    Verify,
    Compare,
    Manifest,
    Digest,
}

use Work::{Compare, Digest, Manifest, Verify};

impl Work {
    /// Reads; the digest, if there is one.
    async fn run(self, engine: &mut Engine) -> Result<Option<String>> {
        Ok(match self {
            Verify => engine.verify().await?.digest,
            Compare => {
                assert_eq!(engine.compare().await?, None);
                None
            }
            Manifest => Some(engine.manifest(None).await?.digest()),
            Digest => Some(engine.digest(DigestAlgorithm::Blake3).await?),
        })
    }

    fn has_target(self) -> bool {
        matches!(self, Verify | Compare)
    }
}

/// Two equal disks behind faults, and an engine to read them.
struct Pair {
    source: Arc<FaultDevice>,
    target: Arc<FaultDevice>,
    progress: Arc<CopyProgress>,
    pool: Pool,
}

impl Pair {
    /// Reads from offset `from` on hang at both sides.
    fn hanging(work: Work, from: u64, options: &EngineOptions) -> (Pair, Engine) {
        let ends = [1, 2].map(|seed| {
            let device = FaultDevice::over(disk(&filled(SIZE as usize), seed), seed);
            device.add(FaultRule::new(FaultEffect::Hang).kind(OpKind::Read).range(from..SIZE));
            device
        });
        let [source, target] = ends;
        let stacks = [&source, &target].map(|device| Stack::over(device.clone()));
        let pool = Pool::new(8 << 20);
        let progress = Arc::new(CopyProgress::new());
        let end = work.has_target().then_some(&stacks[1]);
        let engine = Engine::open_to_read(&stacks[0], end, options, &pool, &progress).unwrap();
        (Pair { source, target, progress, pool }, engine)
    }

    fn reads(&self) -> usize {
        reads(&self.source) + reads(&self.target)
    }

    /// Pauses while reads hang, and lets those go.
    async fn pause(&self, control: &EngineControl) {
        until("a read to hang", || self.source.hanging() > 0).await;
        control.pause();
        for side in [&self.source, &self.target] {
            side.heal();
            until("reads to end", || {
                side.release();
                side.in_flight() == 0
            })
            .await;
        }
        control.paused().await;
    }
}

/// Reads and closes the engine.
fn running(work: Work, mut engine: Engine) -> Task<Result<Option<String>>> {
    blockhaul_io::spawn(async move {
        let result = work.run(&mut engine).await;
        engine.close().await;
        result
    })
}

fn reads(device: &FaultDevice) -> usize {
    device.seen().iter().filter(|seen| seen.kind == OpKind::Read).count()
}

/// Lanes with few requests.
fn lanes(connections: usize) -> EngineOptions {
    EngineOptions { connections, ..narrow() }
}

#[test]
fn nothing_is_read_while_the_engine_is_paused() {
    for (work, connections) in
        [(Verify, 1), (Verify, 3), (Compare, 2), (Manifest, 1), (Manifest, 2), (Digest, 1)]
    {
        on_worker(move || async move {
            let (pair, engine) = Pair::hanging(work, 2 * MIB, &lanes(connections));
            let control = engine.control();
            let running = running(work, engine);
            pair.pause(&control).await;
            let before = (pair.reads(), pair.progress.snapshot().verified);
            assert!(before.1 < SIZE, "{work:?}: {before:?}");
            // The rate limit is independent.
            control.set_rate(0, 0);
            blockhaul_io::sleep(Duration::from_millis(60)).await;
            assert_eq!(before.0, pair.reads(), "{work:?}");
            control.resume();
            running.await.unwrap();
            assert_eq!(pair.progress.snapshot().verified, SIZE, "{work:?}");
            assert_eq!(pair.pool.reserved(), 0, "{work:?}");
        });
    }
}

#[test]
fn a_reading_is_cancelled_also_while_it_is_paused() {
    for (work, pauses) in [(Verify, true), (Compare, false), (Manifest, true), (Digest, true)] {
        on_worker(move || async move {
            let (pair, engine) = Pair::hanging(work, 2 * MIB, &lanes(2));
            let control = engine.control();
            let running = running(work, engine);
            if pauses {
                pair.pause(&control).await;
                control.cancel();
            } else {
                until("a read to hang", || pair.source.hanging() > 0).await;
                control.cancel();
                pair.pause(&control).await;
            }
            assert_eq!(running.await.unwrap_err().kind(), Kind::ShuttingDown, "{work:?}");
            assert!(pair.progress.snapshot().verified < SIZE, "{work:?}");
            assert_eq!((pair.source.in_flight(), pair.pool.reserved()), (0, 0), "{work:?}");
        });
    }
}

#[test]
fn a_reading_keeps_to_the_rate_and_to_its_change() {
    for work in [Verify, Compare, Manifest, Digest] {
        on_worker(move || async move {
            // After the first request, the next one would have to wait for days.
            let rate = Arc::new(RateLimit::new(1, 0));
            let options = EngineOptions { rate: Some(rate.clone()), ..lanes(2) };
            let (pair, engine) = Pair::hanging(work, SIZE, &options);
            let running = running(work, engine);
            until("the first read", || reads(&pair.source) > 0).await;
            blockhaul_io::sleep(Duration::from_millis(60)).await;
            assert_eq!(reads(&pair.source), 1, "{work:?}");
            rate.set(0, 0);
            running.await.unwrap();
            assert_eq!(pair.progress.snapshot().verified, SIZE, "{work:?}");
        });
    }
}

/// A copy between two servers over three connections to each side.
struct Copied {
    source_disk: Arc<ModelDevice>,
    target_disk: Arc<ModelDevice>,
    from: &'static Server,
    to: &'static Server,
    engine: Engine,
}

impl Copied {
    async fn new(options: EngineOptions) -> Copied {
        let source_disk = disk(&filled(SIZE as usize), 1);
        let target_disk = disk(&vec![0xa5; SIZE as usize], 2);
        let (source, from) = Server::new(source_disk.clone(), 1).open().await;
        let (target, to) = Server::new(target_disk.clone(), 2).open().await;
        let pool = Pool::new(8 << 20);
        let progress = Arc::new(CopyProgress::new());
        let mut engine = Engine::open(&source, &target, &options, &pool, &progress).await.unwrap();
        let plan = engine.empty_plan();
        plan.add(0, SIZE).unwrap();
        let filler = plan.clone();
        let filling = blockhaul_io::spawn(async move {
            // It does not end before all connections are made.
            until("further connections", || dials(from, to) == (2, 2)).await;
            filler.close();
        });
        engine.complete(&plan).await.unwrap();
        filling.await;
        Copied { source_disk, target_disk, from, to, engine }
    }

    fn dials(&self) -> (u64, u64) {
        dials(self.from, self.to)
    }
}

fn dials(from: &Server, to: &Server) -> (u64, u64) {
    (from.dials.load(Ordering::SeqCst), to.dials.load(Ordering::SeqCst))
}

#[test]
fn a_copy_is_verified_over_its_own_connections() {
    on_worker(|| async {
        let mut copied = Copied::new(lanes(3)).await;
        let verified = copied.engine.verify().await.unwrap();
        assert_eq!(verified.bytes, SIZE);
        let manifest = copied.engine.manifest(None).await.unwrap();
        assert_eq!(verified.digest, Some(manifest.digest()));
        let digest = copied.engine.digest(DigestAlgorithm::Blake3).await.unwrap();
        let bytes = copied.source_disk.bytes();
        assert_eq!(digest, blake3::hash(&bytes).to_hex().as_str());
        assert_eq!(copied.dials(), (2, 2), "nothing was connected to again");

        // A difference does not end the engine.
        for at in [SIZE - 1, 5 * MIB + 7] {
            copied.target_disk.model().bytes_mut()[at as usize] ^= 1;
            let error = copied.engine.verify().await.unwrap_err();
            assert!(error.to_string().contains(&format!("offset {at}:")), "{error}");
            assert_eq!(copied.engine.compare().await.unwrap(), Some(at));
        }
        assert_eq!(copied.dials(), (2, 2));
        let plan = copied.engine.plan();
        let error = copied.engine.run(&plan).await.unwrap_err();
        assert_eq!(error.kind(), Kind::Invalid, "its copy is complete");
        copied.engine.close().await;
    });
}

#[test]
fn a_verification_survives_connections_that_die() {
    on_worker(|| async {
        let options =
            EngineOptions { retries: 8, retry_delay: Duration::from_millis(1), ..lanes(3) };
        let mut copied = Copied::new(options).await;
        for server in [copied.from, copied.to] {
            server.fuse.store(7, Ordering::SeqCst);
            server.cuts_left.store(3, Ordering::SeqCst);
        }
        // Each has 64 reads, and a connection dies after at most 60.
        for _ in 0..4 {
            copied.engine.verify().await.unwrap();
        }
        for server in [copied.from, copied.to] {
            assert_eq!(server.cuts_left.load(Ordering::SeqCst), 0);
        }
        let retried = copied.engine.summary().retried;
        assert!(retried.source_requests >= 3 && retried.target_requests >= 3, "{retried}");
        assert_eq!(retried.rewritten, 0, "a verification writes nothing");
        // Retries end, and the error is that of the read.
        copied.from.refused_dials.store(100, Ordering::SeqCst);
        copied.from.fuse.store(2, Ordering::SeqCst);
        copied.from.cuts_left.store(1, Ordering::SeqCst);
        let error = copied.engine.verify().await.unwrap_err();
        assert_eq!(error.error.request().unwrap().0, OpKind::Read, "{error}");
        assert_eq!(error.side, Some(Side::Source), "{error}");
        copied.engine.close().await;
    });
}

#[test]
fn another_run_may_follow_a_verification() {
    on_worker(|| async {
        let source_disk = disk(&filled(SIZE as usize), 1);
        let target_disk = disk(&vec![0xa5; SIZE as usize], 2);
        let stacks = [Stack::over(source_disk.clone()), Stack::over(target_disk.clone())];
        let pool = Pool::new(8 << 20);
        let progress = Arc::new(CopyProgress::new());
        let opened = Engine::open(&stacks[0], &stacks[1], &lanes(2), &pool, &progress).await;
        let mut engine = opened.unwrap();
        for round in 0..3 {
            assert!(engine.compare().await.unwrap().is_some(), "round {round}");
            let plan = engine.plan();
            engine.run(&plan).await.unwrap();
            engine.verify().await.unwrap();
            source_disk.model().bytes_mut().rotate_left(4096);
        }
        engine.finish().await.unwrap();
        assert_eq!(pool.reserved(), 0);
    });
}

#[test]
fn connections_that_may_show_other_disks_are_not_made_to_read() {
    on_worker(|| async {
        let [one, other] = [1, 2].map(|seed| {
            let mut server = Server::new(disk(&filled(SIZE as usize), seed), seed);
            server.promise = false;
            server
        });
        let (source, from) = one.open().await;
        let (target, to) = other.open().await;
        let pool = Pool::new(8 << 20);
        let progress = Arc::new(CopyProgress::new());
        let opened = Engine::open_to_read(&source, Some(&target), &lanes(3), &pool, &progress);
        let mut engine = opened.unwrap();
        assert_eq!(engine.compare().await.unwrap(), None);
        assert_eq!(dials(from, to), (0, 0));
        let plan = engine.plan();
        assert_eq!(engine.run(&plan).await.unwrap_err().kind(), Kind::Invalid, "it only reads");
        engine.close().await;
    });
}
