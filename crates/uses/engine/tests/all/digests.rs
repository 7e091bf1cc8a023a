//! The digest of a copy equals that of the source, whatever the route.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use blockhaul_block::{Device, Kind};
use blockhaul_catalog::Stack;
use blockhaul_engine::{
    CopyProgress, DigestAlgorithm, EngineOptions, copy, copy_from_pipe, copy_to_pipe, digest,
};
use blockhaul_io::{IoEngine, Pool, Runtime, RuntimeConfig};
use blockhaul_testkit::fault::{FaultDevice, FaultEffect, FaultRule};
use blockhaul_testkit::model::{CompletionOrder, Model, ModelDevice};
use blockhaul_testkit::rng::{Rng, seed};

const ALL: [DigestAlgorithm; 3] =
    [DigestAlgorithm::Blake3, DigestAlgorithm::Sha256, DigestAlgorithm::Blksum];

fn on_worker<F: Future<Output = ()> + 'static>(check: impl FnOnce() -> F + Send + 'static) {
    Runtime::start(&RuntimeConfig { workers: 2, engine: IoEngine::Auto }).unwrap().block_on(check);
}

/// Runs of data and of zeroes, without alignment.
fn content(rng: &mut Rng, size: usize) -> Vec<u8> {
    rng.disk(size, 400_000, 50)
}

fn model(bytes: &[u8], completion: CompletionOrder) -> Arc<ModelDevice> {
    let model = Model::new(bytes.len() as u64).with_content(bytes.to_vec()).with_holes();
    ModelDevice::new(model, completion)
}

fn stack(device: Arc<dyn Device>) -> Stack {
    Stack::over(device)
}

#[test]
fn a_copy_tells_the_digest_of_its_source() {
    let seed = seed();
    on_worker(move || async move {
        let mut rng = Rng::new(seed);
        let mut on_the_way = 0;
        let mut again = 0;
        for round in 0..60 {
            let size = rng.between(0, 3 << 20) as usize;
            let bytes = content(&mut rng, size);
            let source = stack(model(&bytes, CompletionOrder::Shuffled(rng.number())));
            let target = model(&vec![0xa5; size], CompletionOrder::Shuffled(rng.number()));
            let algorithm = *rng.pick(&ALL);
            let options = EngineOptions {
                connections: rng.between(1, 5) as usize,
                request_size: 16384 << rng.below(6),
                sparse: *rng.pick(&[0, 4096, 4096, 65536]),
                sampled: rng.chance(50),
                allocated: rng.chance(30),
                extents: rng.chance(70),
                segment: 64 << 10 << rng.below(5),
                digest: Some(algorithm),
                ..EngineOptions::default()
            };
            let pool = Pool::new(64 << 20);
            let progress = Arc::new(CopyProgress::new());
            let summary =
                copy(&source, &stack(target.clone()), &options, &pool, &progress).await.unwrap();
            let told = format!("seed {seed}, round {round}: {size} bytes, {options:?}");
            assert!(target.bytes() == bytes, "{told}");
            match progress.snapshot().verified {
                0 if size > 0 => on_the_way += 1,
                _ => again += 1,
            }
            let wanted =
                digest(&source, algorithm, &options, &pool, &Arc::new(CopyProgress::new())).await;
            assert_eq!(summary.digest, Some(wanted.unwrap()), "{told}");
        }
        assert!(on_the_way > 10 && again > 10, "{on_the_way} and {again}");
    });
}

#[test]
fn requests_that_were_repeated_count_once() {
    on_worker(|| async {
        let mut rng = Rng::new(seed());
        let bytes = content(&mut rng, 5 << 20);
        for algorithm in ALL {
            let source = model(&bytes, CompletionOrder::Immediate);
            let target = model(&vec![1; bytes.len()], CompletionOrder::Immediate);
            let faults = FaultDevice::over(target.clone(), 1);
            faults.add(FaultRule::new(FaultEffect::Fail(Kind::Io)).nth(3));
            faults.add(FaultRule::new(FaultEffect::Fail(Kind::Io)).nth(17));
            let options = EngineOptions {
                request_size: 64 << 10,
                retries: 5,
                retry_delay: std::time::Duration::from_millis(1),
                digest: Some(algorithm),
                ..EngineOptions::default()
            };
            let pool = Pool::new(64 << 20);
            let progress = Arc::new(CopyProgress::new());
            let source = stack(source);
            let faulty = stack(faults);
            let summary = copy(&source, &faulty, &options, &pool, &progress).await.unwrap();
            assert!(summary.retried.target_requests > 0, "{:?}", summary.retried);
            assert!(target.bytes() == bytes);
            let wanted = digest(&source, algorithm, &options, &pool, &progress).await.unwrap();
            assert_eq!(summary.digest, Some(wanted));
        }
    });
}

#[test]
fn pipes_are_digested_on_their_way() {
    on_worker(|| async {
        let mut rng = Rng::new(seed());
        let bytes = content(&mut rng, 3_000_001);
        let source = stack(model(&bytes, CompletionOrder::Immediate));
        for algorithm in ALL {
            let options = EngineOptions {
                request_size: 16 << 10,
                digest: Some(algorithm),
                ..EngineOptions::default()
            };
            let pool = Pool::new(64 << 20);
            let progress = Arc::new(CopyProgress::new());
            let wanted = digest(&source, algorithm, &options, &pool, &progress).await.unwrap();
            let (from, to) = std::io::pipe().unwrap();
            let target = model(&vec![7; bytes.len()], CompletionOrder::Immediate);
            let taker = {
                let target = stack(target.clone());
                let options = options.clone();
                let pool = pool.clone();
                blockhaul_io::start(async move {
                    let progress = Arc::new(CopyProgress::new());
                    let fd = OwnedFd::from(from);
                    copy_from_pipe(fd, &target, &options, &pool, &progress).await
                })
            };
            let sent =
                copy_to_pipe(&source, OwnedFd::from(to), &options, &pool, &progress).await.unwrap();
            let taken = taker.await.unwrap();
            assert!(target.bytes() == bytes);
            assert_eq!((sent.digest, taken.digest), (Some(wanted.clone()), Some(wanted)));
        }
    });
}
