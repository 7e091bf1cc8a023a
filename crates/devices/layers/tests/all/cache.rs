//! `cache` reads each block once, loses no data, writes back in order, and stays within its limit.

use std::sync::Arc;
use std::time::Duration;

use crate::common::{
    disk_of_clients, layer, on_workers, opened, read, refused, runs, stacked, write,
};
use blockhaul_block::{
    Can, Device, DeviceExt, HOLE, Kind, OpKind, Reply, Request, RequestFlags, ZERO,
};
use blockhaul_catalog::{HandleOpener, Layer, OpenFuture, OpenedDevice};
use blockhaul_io::{Data, Runtime, RuntimeConfig};
use blockhaul_layers::StatsLayer;
use blockhaul_testkit::conform::{self, ConformOptions, Subject};
use blockhaul_testkit::crash::CrashDevice;
use blockhaul_testkit::fault::{FaultDevice, FaultEffect, FaultRule};
use blockhaul_testkit::model::{CompletionOrder, Model, ModelDevice};

const BLOCK: u64 = 64 << 10;
const SIZE: u64 = 10 * BLOCK + 100;

/// A device with a pattern, and counters of its requests.
fn counted(size: u64) -> (Arc<ModelDevice>, StatsLayer, Arc<dyn Device>) {
    let bytes = (0..size).map(|at| (at / 7 % 251) as u8 + 1).collect();
    let model = ModelDevice::new(Model::new(size).with_content(bytes), CompletionOrder::Deferred);
    let counter = StatsLayer::new();
    let device = counter.wrap(blockhaul_block::emulate::emulate(model.clone())).unwrap();
    (model, counter, device)
}

/// The changes of a device, in order of submission.
fn changes(model: &ModelDevice) -> Vec<(OpKind, u64, u64)> {
    let seen = model.seen().into_iter();
    seen.map(|seen| (seen.kind, seen.at, seen.len)).filter(|seen| seen.0.changes()).collect()
}

#[test]
fn writes_stay_until_a_flush_carries_them_in_order() {
    on_workers(|| async {
        let (model, counter, device) = counted(SIZE);
        let before = model.bytes();
        let cache = stacked(device, &["cache"]).unwrap();
        assert!(cache.facts().can.contains(Can::WRITE | Can::FLUSH | Can::CACHE | Can::FAST_ZERO));
        let mut expected = before.clone();
        for block in [7, 2, 10, 3] {
            let at = block * BLOCK + 50;
            write(&cache, at, b"written").await;
            expected[at as usize..][..7].copy_from_slice(b"written");
        }
        cache.zero(5 * BLOCK - 10, BLOCK + 20).await.unwrap();
        expected[(5 * BLOCK - 10) as usize..][..BLOCK as usize + 20].fill(0);
        assert!(read(&cache, 0, SIZE as usize).await == expected);
        assert_eq!((model.bytes() == before, changes(&model).len()), (true, 0));
        // Data that is not below yet shows in the extents, too.
        assert_eq!(runs(&cache, 5 * BLOCK, BLOCK).await, [(BLOCK, HOLE | ZERO)]);
        cache.flush().await.unwrap();
        assert!(model.bytes() == expected);
        let carried = changes(&model);
        assert!(carried.is_sorted_by_key(|(_, at, _)| *at), "{carried:?}");
        assert!(carried.contains(&(OpKind::Zero, 5 * BLOCK, BLOCK)), "{carried:?}");
        assert_eq!(model.seen().last().unwrap().kind, OpKind::Flush);
        // Nothing is written back twice, and it is still cached.
        let reads = counter.counts(OpKind::Read).requests;
        cache.flush().await.unwrap();
        assert_eq!(changes(&model), carried);
        assert_eq!(read(&cache, 2 * BLOCK, 100).await, expected[2 * BLOCK as usize..][..100]);
        assert_eq!(counter.counts(OpKind::Read).requests, reads);
    });
}

#[test]
fn one_block_is_brought_once_whoever_wants_it() {
    on_workers(|| async {
        let (model, counter, device) = counted(SIZE);
        let slow = layer("delay?read=20ms").unwrap().wrap(device).unwrap();
        let cache = layer("cache?cache-on-read=true").unwrap();
        let handles = [0, 1].map(|_| cache.wrap(slow.clone()).unwrap());
        let bytes = model.bytes();
        let asked: Vec<_> = (0..64_u64)
            .map(|index| {
                let at = 3 * BLOCK + index * 1000;
                let room = blockhaul_io::Reservation::unpooled(900);
                (at, handles[index as usize % 2].submit(Request::read(at, room)))
            })
            .collect();
        for (at, pending) in asked {
            let Reply::Data(data) = pending.await.unwrap() else { panic!("no data") };
            assert_eq!(data.bytes(), &bytes[at as usize..][..900]);
        }
        let reads = counter.counts(OpKind::Read);
        assert_eq!((reads.requests, reads.bytes), (1, BLOCK));
        // A hint fetches, too, and without cache-on-read nothing else does.
        let plain = stacked(slow, &["cache"]).unwrap();
        plain.submit(Request::cache(0, 3 * BLOCK)).await.unwrap();
        let before = counter.counts(OpKind::Read).requests;
        assert_eq!(read(&plain, 10, 2 * BLOCK as usize).await, bytes[10..][..2 * BLOCK as usize]);
        assert_eq!(counter.counts(OpKind::Read).requests, before);
        for _ in 0..2 {
            assert_eq!(read(&plain, 8 * BLOCK, 9).await, bytes[8 * BLOCK as usize..][..9]);
        }
        assert_eq!(counter.counts(OpKind::Read).requests, before + 2);
    });
}

#[test]
fn a_path_says_whether_reads_are_kept() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("switch");
    let text = format!("cache?cache-on-read={}", path.display());
    on_workers(move || async move {
        let (_, counter, device) = counted(SIZE);
        let cache = stacked(device, &[&text]).unwrap();
        let reads = || counter.counts(OpKind::Read).requests;
        read(&cache, 0, 9).await;
        read(&cache, 0, 9).await;
        assert_eq!(reads(), 2);
        std::fs::write(&path, "").unwrap();
        read(&cache, 0, 9).await;
        read(&cache, 0, 9).await;
        assert_eq!(reads(), 3);
    });
    drop(dir);
}

#[test]
fn modes_differ_in_what_reaches_the_device_and_when() {
    on_workers(|| async {
        let (model, counter, device) = counted(SIZE);
        let through = stacked(device.clone(), &["cache?cache=writethrough"]).unwrap();
        // A whole block and a part: both are below at once, the whole one is cached.
        let whole = vec![9; BLOCK as usize + 5];
        write(&through, BLOCK, &whole).await;
        assert_eq!(model.bytes()[BLOCK as usize..][..whole.len()], whole);
        let reads = counter.counts(OpKind::Read).requests;
        assert_eq!(read(&through, BLOCK, BLOCK as usize).await, whole[..BLOCK as usize]);
        assert_eq!(counter.counts(OpKind::Read).requests, reads);
        through.zero(BLOCK + 10, 10).await.unwrap();
        assert_eq!(model.bytes()[BLOCK as usize + 10..][..10], [0; 10]);
        assert_eq!(read(&through, BLOCK + 9, 12).await, [&[9][..], &[0; 10], &[9]].concat());

        let before = model.bytes();
        let lazy = stacked(device.clone(), &["cache?cache=unsafe"]).unwrap();
        let durable = Request::write(0, Data::copy_of(b"lost")).with(RequestFlags::FUA);
        lazy.submit(durable).await.unwrap();
        lazy.flush().await.unwrap();
        assert_eq!(read(&lazy, 0, 4).await, b"lost");
        assert!(model.bytes() == before);

        let back = stacked(device, &["cache"]).unwrap();
        write(&back, 0, b"later").await;
        let durable = Request::write(4 * BLOCK, Data::copy_of(b"now")).with(RequestFlags::FUA);
        back.submit(durable).await.unwrap();
        assert_eq!(model.bytes()[4 * BLOCK as usize..][..3], *b"now");
        assert!(model.bytes()[..5] == before[..5]);
        back.trim(0, BLOCK).await.unwrap();
        back.flush().await.unwrap();
        assert_ne!(model.bytes()[..5], *b"later", "what was trimmed is not carried");
    });
}

#[test]
fn the_end_carries_what_was_not_flushed() {
    let (model, _, device) = counted(SIZE);
    let runtime =
        Runtime::start(&RuntimeConfig { workers: 2, ..RuntimeConfig::default() }).unwrap();
    let cache = runtime.block_on(|| async move {
        let slow = layer("delay?write=30ms").unwrap().wrap(device).unwrap();
        let cache = stacked(slow, &["cache"]).unwrap();
        for block in 0..10 {
            write(&cache, block * BLOCK, b"kept").await;
        }
        cache
    });
    assert!(changes(&model).is_empty());
    // As a server ends: the devices first, on a thread that is not a worker.
    drop(cache);
    drop(runtime);
    for block in 0..10 {
        assert_eq!(model.bytes()[(block * BLOCK) as usize..][..4], *b"kept");
    }
    assert_eq!(model.seen().last().unwrap().kind, OpKind::Flush);
}

#[test]
fn the_end_carries_what_was_not_flushed_below_layers_that_work_in_the_background() {
    for round in 0..30 {
        for above in [
            &["scan?scan-size=64k&scan-forever=on"][..],
            &["delay?cache=20ms", "scan?scan-size=64k"],
            &["delay?cache=20ms", "readahead"],
        ] {
            let (model, _, device) = counted(SIZE);
            let runtime =
                Runtime::start(&RuntimeConfig { workers: 2, ..RuntimeConfig::default() }).unwrap();
            let cache = runtime.block_on(move || async move {
                let cache = stacked(device, &[&["cache"], above].concat()).unwrap();
                for block in 0..10 {
                    write(&cache, block * BLOCK, b"kept").await;
                }
                // Two reads in order, for readahead.
                read(&cache, 0, 512).await;
                read(&cache, 512, 512).await;
                blockhaul_io::sleep(Duration::from_millis(round % 5)).await;
                cache
            });
            drop(cache);
            drop(runtime);
            for block in 0..10 {
                let found = &model.bytes()[(block * BLOCK) as usize..][..4];
                assert_eq!(found, *b"kept", "{above:?}, round {round}");
            }
            assert_eq!(model.seen().last().unwrap().kind, OpKind::Flush);
        }
    }
}

#[test]
fn a_zeroing_that_is_refused_has_changed_nothing() {
    on_workers(|| async {
        let (_, _, device) = counted(SIZE);
        let cache = stacked(device, &["cow", "cache"]).unwrap();
        let before = read(&cache, 0, SIZE as usize).await;
        let flags = RequestFlags::FAST | RequestFlags::NO_HOLE;
        for (at, len) in [(BLOCK - 10, 2 * BLOCK), (5, SIZE - 5), (100, 3000)] {
            let outcome = cache.submit(Request::zero(at, len).with(flags)).await;
            assert_eq!(outcome.unwrap_err().kind(), Kind::Unsupported);
            assert!(read(&cache, 0, SIZE as usize).await == before, "{len} bytes at {at}");
        }
    });
}

#[test]
fn what_is_never_written_back_outlives_the_connections_to_an_export() {
    on_workers(|| async {
        for multi_conn in [true, false] {
            let disk = disk_of_clients(SIZE, multi_conn);
            let cache = layer("cache?cache=unsafe").unwrap();
            write(&opened(&cache, &disk, "a").await, 5, b"kept").await;
            assert_eq!(read(&opened(&cache, &disk, "a").await, 5, 4).await, b"kept");
            assert_eq!(read(&opened(&cache, &disk, "b").await, 5, 4).await, [0; 4]);
        }
    });
}

#[test]
fn a_client_that_connects_while_the_last_one_leaves_loses_nothing() {
    on_workers(|| async {
        let disk = disk_of_clients(SIZE, false);
        let faults = FaultDevice::over(disk.clone(), 1);
        faults.add(
            FaultRule::new(FaultEffect::Delay(Duration::from_millis(300)))
                .kind(OpKind::Flush)
                .times(1),
        );
        let below: Arc<dyn Device> = faults.clone();
        let cache = layer("cache").unwrap();
        let first = opened(&cache, &below, "a").await;
        write(&first, BLOCK, b"first").await;
        drop(first);
        // It has been written back, and is being flushed.
        while read(&disk, BLOCK, 5).await != b"first" || faults.in_flight() == 0 {
            blockhaul_io::sleep(Duration::from_millis(1)).await;
        }
        let second = opened(&cache, &below, "a").await;
        write(&second, 0, b"second").await;
        while faults.in_flight() > 0 {
            blockhaul_io::sleep(Duration::from_millis(1)).await;
        }
        blockhaul_io::sleep(Duration::from_millis(10)).await;
        assert_eq!(read(&second, 0, 6).await, b"second");
        drop(second);
        while read(&disk, 0, 6).await != b"second" {
            blockhaul_io::sleep(Duration::from_millis(1)).await;
        }
    });
}

#[test]
fn a_failed_flush_keeps_what_it_could_not_carry() {
    on_workers(|| async {
        let (model, _, device) = counted(SIZE);
        let faults = FaultDevice::over(device, 1);
        let cache = stacked(faults.clone(), &["cache"]).unwrap();
        for block in [1, 4, 8] {
            write(&cache, block * BLOCK, b"dirty").await;
        }
        faults.add(
            FaultRule::new(FaultEffect::Fail(Kind::Io))
                .range(4 * BLOCK..5 * BLOCK)
                .kind(OpKind::Write),
        );
        assert_eq!(cache.flush().await.unwrap_err().kind(), Kind::Io);
        assert_eq!(read(&cache, 4 * BLOCK, 5).await, b"dirty");
        faults.heal();
        cache.flush().await.unwrap();
        for block in [1, 4, 8] {
            assert_eq!(model.bytes()[(block * BLOCK) as usize..][..5], *b"dirty");
        }
    });
}

#[test]
fn a_bad_place_spoils_no_more_than_itself() {
    on_workers(|| async {
        let (model, _, device) = counted(SIZE);
        let faults = FaultDevice::over(device, 1);
        faults.add(
            FaultRule::new(FaultEffect::Fail(Kind::Io))
                .range(BLOCK..BLOCK + 512)
                .kind(OpKind::Read),
        );
        let cache = stacked(faults, &["cache?cache-on-read=true"]).unwrap();
        let at = BLOCK + 4096;
        assert_eq!(read(&cache, at, 9).await, model.bytes()[at as usize..][..9]);
        write(&cache, at, b"rescued").await;
        assert_eq!(model.bytes()[at as usize..][..7], *b"rescued", "not kept, but not lost");
        assert_eq!(cache.read(BLOCK, 9).await.unwrap_err().kind(), Kind::Io);
    });
}

#[test]
fn the_bound_holds_and_the_oldest_go_first() {
    on_workers(|| async {
        // Eviction runs besides requests, without a signal: each check itself changes the order of
        // use. Wait longer and longer.
        let mut found = None;
        for millis in [100, 1000, 10_000] {
            let (model, counter, device) = counted(64 * BLOCK);
            let slow = layer("delay?write=1ms").unwrap().wrap(device).unwrap();
            let text = "cache?cache-on-read=true&cache-max-size=640k&cache-high-threshold=90";
            let cache = stacked(slow, &[text]).unwrap();
            let reads = || counter.counts(OpKind::Read).requests;
            for block in 0..9 {
                read(&cache, block * BLOCK, 10).await;
            }
            // The first is used again and stays, the next ones are evicted.
            read(&cache, 0, 10).await;
            assert_eq!(reads(), 9);
            read(&cache, 9 * BLOCK, 10).await;
            blockhaul_io::sleep(Duration::from_millis(millis)).await;
            read(&cache, 0, 10).await;
            assert_eq!(reads(), 10);
            read(&cache, BLOCK, 10).await;
            if reads() == 11 {
                found = Some((model, cache));
                break;
            }
        }
        let (model, cache) = found.expect("the oldest have gone");
        let mut expected = model.bytes();
        // Much more than fits, all at once, changed and read.
        for round in 0..3_u8 {
            let writes: Vec<_> = (0..64)
                .map(|block| {
                    let at = block * BLOCK + u64::from(round) * 1000;
                    let bytes = [round + 100; 3000];
                    expected[at as usize..][..3000].copy_from_slice(&bytes);
                    cache.submit(Request::write(at, Data::copy_of(&bytes)))
                })
                .collect();
            for written in writes {
                written.await.unwrap();
            }
            for block in 0..64 {
                let found = read(&cache, block * BLOCK, 6000).await;
                assert!(found == expected[(block * BLOCK) as usize..][..6000], "block {block}");
            }
        }
        cache.flush().await.unwrap();
        assert!(model.bytes() == expected);
    });
}

/// Handles of one cache on one device.
struct More {
    cache: Arc<dyn Layer>,
    below: Arc<CrashDevice>,
}

impl More {
    fn device(&self) -> Arc<dyn Device> {
        self.cache.wrap(blockhaul_block::emulate::emulate(self.below.handle())).unwrap()
    }
}

impl HandleOpener for More {
    fn another(&self) -> OpenFuture<Arc<dyn Device>> {
        Box::pin(std::future::ready(Ok(self.device())))
    }
}

#[test]
fn what_was_flushed_survives_a_power_cut() {
    for text in
        ["cache", "cache?cache=writethrough", "cache?cache-max-size=128k&cache-min-block-size=4k"]
    {
        conform::check(
            text,
            ConformOptions { rounds: 2, steps: 60, ..ConformOptions::default() },
            move || async move {
                let below = CrashDevice::new(Model::new(200_000), CompletionOrder::Deferred);
                let more = More { cache: layer(text)?, below: below.clone() };
                let device = more.device();
                let opened = OpenedDevice { device, more: Some(Arc::new(more)) };
                Ok(Subject::from(opened).durable(move || below.durable()))
            },
        );
    }
}

#[test]
fn wrong_options_are_refused() {
    for wrong in [
        "cache?cache-min-block-size=5k",
        "cache?cache-min-block-size=512",
        "cache?cache-on-read=maybe",
        "cache?cache-max-size=1G&cache-low-threshold=95",
        "cache?cache-max-size=1G&cache-high-threshold=101",
        "cache?cache-max-size=10k",
        "cache?cache-low-threshold=0",
        "cache?dir=/nonexistent",
    ] {
        assert!(refused(wrong).to_string().starts_with("cache: "), "{wrong}");
    }
    assert!(refused("cache?cache=write").to_string().contains("writeback, writethrough, unsafe"));
}
