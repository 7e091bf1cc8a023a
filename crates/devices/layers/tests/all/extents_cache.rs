//! `extents-cache` requests extents once for all handles, and keeps its cache valid.

use crate::common::{layer, on_workers, runs, write};
use blockhaul_block::{Contexts, Device, DeviceExt, Flags, HOLE, OpKind, Reply, Request, ZERO};
use blockhaul_catalog::Layer;
use blockhaul_layers::StatsLayer;

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
        let (one, other) =
            (cache.wrap(counted.clone()).unwrap(), cache.wrap(counted.clone()).unwrap());
        let ask = |at: u64, len: u64| Request::extents(at, len, Contexts::first());
        // All at once, through two handles, some for one extent only.
        let asked: Vec<_> = (0..60_u64)
            .map(|index| {
                let device = if index % 2 == 0 { &one } else { &other };
                let flags = if index % 3 == 0 { Flags::ONE_EXTENT } else { Flags::empty() };
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
        device.zero(512 << 10, 4096).await.unwrap();
        let found = runs(&device, 0, 1 << 20).await;
        let (hole, head) = (HOLE | ZERO, 4096);
        let middle = (512 << 10) - head - 100;
        let tail = (512 << 10) - 4096;
        assert_eq!(found, [(head, hole), (100, 0), (middle, hole), (4096, ZERO), (tail, hole)]);
        assert_eq!(counter.counts(OpKind::Extents).requests, 1, "known without asking");
        device.trim(0, 128 << 10).await.unwrap();
        assert_eq!(runs(&device, 0, 128 << 10).await, [(128 << 10, hole)]);
        assert_eq!(counter.counts(OpKind::Extents).requests, 2, "what was trimmed is asked for");
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
