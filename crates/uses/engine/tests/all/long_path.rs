//! Reading over a long path: as many requests are in flight as memory allows.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use blockhaul_block::{Device, Facts, Op, PendingRequest, Request};
use blockhaul_catalog::Stack;
use blockhaul_engine::{CopyProgress, DigestAlgorithm, EngineOptions};
use blockhaul_io::{IoEngine, Pool, Runtime, RuntimeConfig};
use blockhaul_testkit::model::{CompletionOrder, Model, ModelDevice};

const SIZE: u64 = 64 << 20;
const MEMORY: u64 = 24 << 20;

/// A disk behind a long path, which counts the bytes of the reads in flight.
struct Far {
    disk: Arc<dyn Device>,
    /// Memory is taken when replies arrive.
    claims: bool,
    now: Arc<AtomicU64>,
    most: Arc<AtomicU64>,
}

impl Device for Far {
    fn facts(&self) -> Arc<Facts> {
        let facts = Facts::clone(&self.disk.facts());
        Arc::new(Facts { claims_room: self.claims, ..facts })
    }

    fn submit(&self, request: Request) -> PendingRequest {
        let len = if matches!(request.op, Op::Read(_)) { request.len } else { 0 };
        let disk = self.disk.clone();
        let now = self.now.clone();
        self.most.fetch_max(now.fetch_add(len, Ordering::SeqCst) + len, Ordering::SeqCst);
        PendingRequest::start(async move {
            blockhaul_io::sleep(Duration::from_millis(100)).await;
            now.fetch_sub(len, Ordering::SeqCst);
            let Request { op, at, len, flags } = request;
            let op = match op {
                Op::Read(room) => Op::Read(room.claim().await),
                op => op,
            };
            disk.submit(Request { op, at, len, flags }).await
        })
    }
}

/// A device behind a long path, and the most bytes of reads that were in flight.
fn far() -> (Stack, Arc<AtomicU64>) {
    far_that(false, SIZE)
}

fn far_that(claims: bool, size: u64) -> (Stack, Arc<AtomicU64>) {
    let model = Model::new(size).with_content(vec![7; size as usize]);
    let disk: Arc<dyn Device> = ModelDevice::new(model, CompletionOrder::Immediate);
    let most = Arc::new(AtomicU64::new(0));
    let far = Far { disk, claims, now: Arc::default(), most: most.clone() };
    (Stack::over(Arc::new(far)), most)
}

/// As many requests in flight as allowed: what is learned on a busy machine varies.
fn options() -> EngineOptions {
    EngineOptions { adaptive: false, adaptive_size: false, ..EngineOptions::default() }
}

fn on_worker<F: Future<Output = ()> + 'static>(work: impl FnOnce() -> F + Send + 'static) {
    Runtime::start(&RuntimeConfig { workers: 1, engine: IoEngine::Auto }).unwrap().block_on(work);
}

#[test]
fn a_comparison_fills_the_path_on_both_sides() {
    on_worker(|| async {
        let (source, one) = far();
        let (target, other) = far();
        let options = options();
        let progress = Arc::new(CopyProgress::new());
        let pool = Pool::new(MEMORY);
        blockhaul_engine::verify(&source, &target, &options, &pool, &progress).await.unwrap();
        for most in [one, other].map(|most| most.load(Ordering::SeqCst)) {
            assert!(most > MEMORY / 3, "{most} bytes were under way");
            assert!(most <= MEMORY / 2, "{most} bytes are more than half of the memory");
        }
    });
}

#[test]
fn a_digest_fills_the_path() {
    on_worker(|| async {
        let (source, most) = far();
        let options = options();
        let progress = Arc::new(CopyProgress::new());
        let pool = Pool::new(MEMORY);
        blockhaul_engine::digest(&source, DigestAlgorithm::Blake3, &options, &pool, &progress)
            .await
            .unwrap();
        let most = most.load(Ordering::SeqCst);
        assert!((MEMORY / 2..=MEMORY).contains(&most), "{most} bytes were under way");
    });
}

#[test]
fn more_than_the_memory_is_under_way_where_answers_claim_it_and_never_more_is_used() {
    on_worker(|| async {
        for (claims, slow_target) in [(false, false), (true, false), (true, true)] {
            let size = SIZE / 4;
            let (source, most) = far_that(claims, size);
            let target: Arc<dyn Device> =
                ModelDevice::new(Model::new(size), CompletionOrder::Immediate);
            let target = if slow_target {
                let now = Arc::default();
                let most = Arc::default();
                Arc::new(Far { disk: target, claims: false, now, most })
            } else {
                target
            };
            let target = Stack::over(target);
            let pool = Pool::new(4 << 20);
            let options = options();
            let progress = Arc::new(CopyProgress::new());
            blockhaul_engine::copy(&source, &target, &options, &pool, &progress).await.unwrap();
            blockhaul_engine::verify(&source, &target, &options, &pool, &progress).await.unwrap();
            let most = most.load(Ordering::SeqCst);
            assert_eq!(claims, most > pool.limit(), "{most} bytes were under way");
            assert!(pool.peak() <= pool.limit(), "{} bytes were used", pool.peak());
            assert_eq!(pool.reserved(), 0);
        }
    });
}
