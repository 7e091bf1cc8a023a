//! `extents-cache` requests extents once for all handles, and keeps its cache valid.

use std::time::Duration;

use crate::common::{layer, on_workers, runs, write};
use blockhaul_block::{
    ContextSet, Device, DeviceExt, HOLE, OpKind, Reply, Request, RequestFlags, ZERO, fence,
};
use blockhaul_catalog::Layer;
use blockhaul_layers::StatsLayer;
use blockhaul_testkit::fault::{FaultDevice, FaultEffect, FaultRule};
use blockhaul_testkit::model::{CompletionOrder, Model, ModelDevice};

#[test]
fn many_questions_make_one() {
    on_workers(|| async {
        let memory = blockhaul_backends::memory(1 << 30);
        for at in 0..500_u64 {
            write(&memory, at << 21, b"data").await;
        }
        let counter = StatsLayer::new();
        let slow = layer("delay?extents=50ms&exclusive=on").unwrap().wrap(memory).unwrap();
        let counted = counter.wrap(slow).unwrap();
        let cache = layer("extents-cache").unwrap();
        let one = cache.wrap(counted.clone()).unwrap();
        let other = cache.wrap(counted.clone()).unwrap();
        let ask = |at: u64, len: u64| Request::extents(at, len, ContextSet::first());
        // All at once, through two handles, some for one extent only.
        let asked: Vec<_> = (0..60_u64)
            .map(|index| {
                let device = if index % 2 == 0 { &one } else { &other };
                let flags =
                    if index % 3 == 0 { RequestFlags::ONE_EXTENT } else { RequestFlags::empty() };
                device.submit(ask(index << 24, 1 << 24).with(flags))
            })
            .collect();
        for pending in asked {
            let Reply::Extents(lists) = pending.await.unwrap() else { panic!("no extents") };
            assert_eq!(lists[0].runs()[0].state, 0);
        }
        let there = runs(&counted, 0, 1 << 30).await;
        let before = counter.counts(OpKind::Extents).requests;
        assert_eq!(runs(&other, 0, 1 << 30).await, there);
        assert_eq!(there.len(), 1000);
        assert_eq!(counter.counts(OpKind::Extents).requests, before);
        // One by the cache and one by this test.
        assert_eq!(before, 2);
    });
}

#[test]
fn changes_keep_it_true() {
    on_workers(|| async {
        let memory = blockhaul_backends::memory(1 << 20);
        let counter = StatsLayer::new();
        let counted = counter.wrap(memory).unwrap();
        let device = layer("extents-cache").unwrap().wrap(counted).unwrap();
        assert_eq!(runs(&device, 0, 1 << 20).await, [(1 << 20, HOLE | ZERO)]);
        write(&device, 4096, &[1; 100]).await;
        device.submit(Request::zero(512 << 10, 4096).with(RequestFlags::FUA)).await.unwrap();
        let found = runs(&device, 0, 1 << 20).await;
        let hole = HOLE | ZERO;
        let head = 4096;
        let middle = (512 << 10) - head - 100;
        let tail = (512 << 10) - 4096;
        assert_eq!(found, [(head, hole), (100, 0), (middle, hole), (4096, ZERO), (tail, hole)]);
        assert_eq!(counter.counts(OpKind::Extents).requests, 1, "known without asking");
        device.trim(0, 128 << 10).await.unwrap();
        assert_eq!(runs(&device, 0, 128 << 10).await, [(128 << 10, hole)]);
        assert_eq!(counter.counts(OpKind::Extents).requests, 2, "what was trimmed is asked for");
    });
}

/// A server that crashes may lose zeroes that were not flushed, and `retry` hides the crash.
#[test]
fn what_was_zeroed_is_cached_after_a_flush() {
    on_workers(|| async {
        let memory = blockhaul_backends::memory(1 << 20);
        write(&memory, 0, &[1; 100]).await;
        let counter = StatsLayer::new();
        let counted = counter.wrap(memory).unwrap();
        let device = layer("extents-cache").unwrap().wrap(counted).unwrap();
        let queries = async || {
            runs(&device, 512 << 10, 4096).await;
            counter.counts(OpKind::Extents).requests
        };
        assert_eq!((queries().await, queries().await), (1, 1));
        device.zero(512 << 10, 4096).await.unwrap();
        assert_eq!((queries().await, queries().await), (2, 3), "asked for each time");
        // The rest of the disk is still cached.
        runs(&device, 520 << 10, 4096).await;
        assert_eq!(counter.counts(OpKind::Extents).requests, 3);
        device.flush().await.unwrap();
        assert_eq!((queries().await, queries().await), (4, 4));
        assert_eq!(runs(&device, 512 << 10, 4096).await[0].1 & ZERO, ZERO);
    });
}

#[test]
fn it_is_for_one_device() {
    let cache = layer("extents-cache").unwrap();
    let _first = cache.wrap(blockhaul_backends::memory(1 << 20)).unwrap();
    let error = cache.wrap(blockhaul_backends::memory(2 << 20)).err().unwrap();
    assert!(error.to_string().contains("not the cached device"), "{error}");
    assert!(layer("extents-cache?bulk=0").is_err());
}

/// A disk of 1 GiB with 500 pieces of data, each 2 MiB apart, whose queries take `delay`.
async fn pieces(delay: &str) -> (StatsLayer, std::sync::Arc<dyn Device>) {
    let memory = blockhaul_backends::memory(1 << 30);
    for at in 0..500_u64 {
        write(&memory, at << 21, b"data").await;
    }
    let counter = StatsLayer::new();
    let counted = counter.wrap(layer(delay).unwrap().wrap(memory).unwrap()).unwrap();
    (counter, counted)
}

/// The runs of the first GiB, asked for in steps of 16 MiB.
async fn in_steps(device: &std::sync::Arc<dyn Device>) -> Vec<(u64, u64)> {
    let mut found = Vec::new();
    for step in 0..64_u64 {
        found.extend(runs(device, step << 24, 1 << 24).await);
    }
    found
}

#[test]
fn only_slow_sources_are_asked_in_bulk() {
    on_workers(|| async {
        for (delay, most) in [("delay?extents=25ms", 3), ("delay?extents=0s", 64)] {
            let (counter, counted) = pieces(delay).await;
            let expected = in_steps(&counted).await;
            let before = counter.counts(OpKind::Extents).requests;
            assert_eq!(before, 64);
            let cache = layer("extents-cache?slow=20ms").unwrap().wrap(counted).unwrap();
            assert_eq!(in_steps(&cache).await, expected);
            let asked = counter.counts(OpKind::Extents).requests - before;
            assert_eq!(asked, most, "{delay}");
        }
    });
}

#[test]
fn queries_that_hold_up_reads_are_slow() {
    on_workers(|| async {
        // Quicker than the limit, but no read ends meanwhile.
        for (exclusive, most) in [("on", 3), ("off", 64)] {
            let delay = format!("delay?extents=12ms&read=1ms&exclusive={exclusive}");
            let (counter, counted) = pieces(&delay).await;
            let cache = layer("extents-cache?slow=500ms").unwrap().wrap(counted).unwrap();
            for step in 0..64_u64 {
                let asked = Request::extents(step << 24, 1 << 24, ContextSet::first());
                let asked = cache.submit(asked);
                let read = blockhaul_io::start({
                    let cache = cache.clone();
                    async move { cache.read(0, 4096).await.map(drop) }
                });
                asked.await.unwrap();
                read.await.unwrap();
            }
            assert_eq!(counter.counts(OpKind::Extents).requests, most, "exclusive={exclusive}");
        }
    });
}

#[test]
fn a_source_with_a_limit_is_asked_in_parallel() {
    on_workers(|| async {
        // Replies describe 128 MiB at most: the cache learns that, and queries of others need not wait.
        let (counter, counted) = pieces("delay?extents=25ms").await;
        let faults = FaultDevice::over(std::sync::Arc::new(Limited(counted)), 1);
        let cache = layer("extents-cache?slow=20ms").unwrap().wrap(faults.clone()).unwrap();
        for at in [0, 1 << 20, 2 << 20] {
            assert!(!runs(&cache, at, 1 << 20).await.is_empty());
        }
        let before = counter.counts(OpKind::Extents).requests;
        faults.add(FaultRule::new(FaultEffect::Hang).kind(OpKind::Extents));
        let asked: Vec<_> = (2..8_u64)
            .map(|step| cache.submit(Request::extents(step << 27, 1 << 27, ContextSet::first())))
            .collect();
        let all_asked = async {
            while faults.hanging() < 6 {
                blockhaul_io::sleep(Duration::from_millis(1)).await;
            }
        };
        blockhaul_io::timeout(Duration::from_secs(60), all_asked)
            .await
            .expect("one waits for another");
        faults.heal();
        faults.release();
        for pending in asked {
            pending.await.unwrap();
        }
        assert_eq!(counter.counts(OpKind::Extents).requests - before, 6);
    });
}

/// Describes 128 MiB in a reply at most.
struct Limited(std::sync::Arc<dyn Device>);

impl Device for Limited {
    fn facts(&self) -> std::sync::Arc<blockhaul_block::Facts> {
        self.0.facts()
    }

    fn submit(&self, mut request: Request) -> blockhaul_block::PendingRequest {
        request.len = request.len.min(128 << 20);
        self.0.submit(request)
    }
}

/// The partial block at the end is part of what is asked for.
#[test]
fn the_end_need_not_be_a_whole_block() {
    on_workers(|| async {
        const SIZE: u64 = 100_003;
        let mut facts = Model::all_facts(SIZE);
        facts.block.minimum = 4096;
        let model = ModelDevice::new(Model::with_facts(facts), CompletionOrder::Immediate);
        let start = SIZE - SIZE % 4096;
        for at in [start, start - 4096, 0] {
            let device = fence(layer("extents-cache").unwrap().wrap(fence(model.clone())).unwrap());
            for _ in 0..2 {
                let found = runs(&device, at, SIZE - at).await;
                assert_eq!(found.iter().map(|(len, _)| len).sum::<u64>(), SIZE - at);
            }
        }
    });
}
