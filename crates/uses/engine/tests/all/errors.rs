//! Every class of error, on every operation, at random places: a copy that succeeds is exact, one
//! that fails reports the injected error, and no resource leaks.

use std::sync::Arc;
use std::time::Duration;

use blockhaul_block::{Kind, OpKind};
use blockhaul_catalog::Stack;
use blockhaul_engine::{CopyProgress, EngineOptions, Side, copy};
use blockhaul_io::{IoEngine, Pool, Runtime, RuntimeConfig};
use blockhaul_testkit::fault::{FaultDevice, FaultEffect, FaultRule};
use blockhaul_testkit::model::{CompletionOrder, Model, ModelDevice};
use blockhaul_testkit::rng::{Rng, seed};

const SIZE: usize = 1 << 20;
const REQUEST: u32 = 64 << 10;
const RETRIES: u32 = 3;

/// Transient errors.
const PASSING: [Kind; 5] =
    [Kind::Io, Kind::NoMemory, Kind::Disconnected, Kind::TimedOut, Kind::ShuttingDown];
/// Permanent errors.
const LASTING: [Kind; 8] = [
    Kind::ReadOnly,
    Kind::Invalid,
    Kind::NoSpace,
    Kind::TooLarge,
    Kind::Unsupported,
    Kind::NotFound,
    Kind::Refused,
    Kind::Usage,
];

/// Runs of data and holes.
fn content(rng: &mut Rng) -> Vec<u8> {
    let mut bytes = vec![0; SIZE];
    for block in bytes.chunks_mut(32 << 10) {
        if rng.chance(60) {
            rng.fill(block);
        }
    }
    bytes
}

/// Failures of a kind of request on one side.
#[derive(Clone, Copy)]
struct Failures {
    on_source: bool,
    op: OpKind,
    then: FaultEffect,
    /// How often a request fails.
    times: u64,
}

/// A copy with these failures.
async fn inject(rng: &mut Rng, failures: Failures, told: &str) {
    let Failures { on_source, op, then, times } = failures;
    let bytes = content(rng);
    let model = Model::new(SIZE as u64).with_content(bytes.clone()).with_holes();
    let source = ModelDevice::new(model, CompletionOrder::Shuffled(rng.number()));
    let model = Model::new(SIZE as u64).with_content(vec![0xa5; SIZE]);
    let target_disk = ModelDevice::new(model, CompletionOrder::Shuffled(rng.number()));
    let source = FaultDevice::over(source, rng.number());
    let target = FaultDevice::over(target_disk.clone(), rng.number());
    let at = rng.below(SIZE as u64 - 1);
    let rule = match op {
        OpKind::Flush => FaultRule::new(then).kind(op),
        _ => FaultRule::new(then).kind(op).range(at..at + 1),
    };
    let bad = if on_source { &source } else { &target };
    bad.add(rule.times(times));
    let options = EngineOptions {
        connections: rng.between(1, 4) as usize,
        request_size: REQUEST,
        segment: 256 << 10,
        sparse: *rng.pick(&[0, 4096]),
        retries: RETRIES,
        retry_delay: Duration::from_micros(100),
        flush: true,
        ..EngineOptions::default()
    };
    let ends = [&source, &target].map(|device| Stack::over(device.clone()));
    let pool = Pool::new(16 << 20);
    let progress = Arc::new(CopyProgress::new());
    let copied = copy(&ends[0], &ends[1], &options, &pool, &progress).await;
    assert_eq!(pool.reserved(), 0, "all buffers are back; {told}");
    let (FaultEffect::Fail(kind) | FaultEffect::FailAfter(kind) | FaultEffect::FailHalfway(kind)) =
        then
    else {
        panic!("{told}");
    };
    match copied {
        Ok(_) => assert!(target_disk.bytes() == bytes, "exact; {told}, at {at}"),
        Err(error) => {
            assert_eq!(error.kind(), kind, "{told}, at {at}: {error}");
            let side = if on_source { Side::Source } else { Side::Target };
            assert_eq!(error.side, Some(side), "{told}, at {at}: {error}");
            let error = error.error;
            assert!(error.request().is_some(), "it says where; {told}, at {at}: {error}");
            let passes = PASSING.contains(&kind) && times <= u64::from(RETRIES);
            assert!(!passes, "what passes is repeated; {told}, at {at}: {error}");
            assert_ne!(op, OpKind::Extents, "extents are a help, not a need; {told}: {error}");
        }
    }
}

#[test]
fn every_class_of_error_at_random_places() {
    let seed = seed();
    let runtime = Runtime::start(&RuntimeConfig { workers: 2, engine: IoEngine::Auto }).unwrap();
    runtime.block_on(move || async move {
        let mut rng = Rng::new(seed);
        let places = [
            (true, OpKind::Read),
            (true, OpKind::Extents),
            (false, OpKind::Write),
            (false, OpKind::Zero),
            (false, OpKind::Flush),
        ];
        for (on_source, op) in places {
            for kind in PASSING.into_iter().chain(LASTING) {
                for then in [FaultEffect::Fail, FaultEffect::FailAfter, FaultEffect::FailHalfway] {
                    let times = *rng.pick(&[1, u64::from(RETRIES), 1000]);
                    let told = format!("{op:?} {:?} {times} times, seed {seed}", then(kind));
                    let failures = Failures { on_source, op, then: then(kind), times };
                    inject(&mut rng, failures, &told).await;
                }
            }
        }
    });
}
