//! The largest devices under layers that record changes: work and memory are per request, not per
//! block. Apart from the other tests: it measures the memory of its process.
#![allow(clippy::unwrap_used)]

mod common;

use std::sync::Arc;

use blockhaul_block::{Device, DeviceExt, HOLE, OpKind, Request, ZERO};
use blockhaul_catalog::{Layer, Registry};
use blockhaul_layers::StatsLayer;
use blockhaul_testkit::tools::status_kib;
use common::{layer, on_workers, runs, write};

const TERABYTE: u64 = 1 << 40;
const LARGEST: u64 = 7 << 60;
/// Maximum memory of this process, in KiB.
const MEMORY: u64 = 40 << 10;

/// The peak memory of this process, in KiB.
fn peak() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    status_kib(&status, "VmHWM").unwrap()
}

/// The device below the layer, of this size, with counters.
async fn null(size: u64) -> (StatsLayer, Arc<dyn Device>) {
    let registry = Registry { backends: blockhaul_backends::all(), ..Registry::default() };
    let spec = blockhaul_catalog::DeviceSpec::parse(std::ffi::OsStr::new(&format!("null:{size}")))
        .unwrap();
    let stack = registry.open(&spec, Vec::new(), blockhaul_catalog::Intent::WRITE).await.unwrap();
    let counter = StatsLayer::new();
    let device = counter.wrap(stack.device().clone()).unwrap();
    (counter, device)
}

/// Zeroes, trims, and extents requests, of ranges up to this size. `keeps`: writes show in the
/// extents.
async fn change_everything(device: &Arc<dyn Device>, size: u64, keeps: bool) {
    let hole = HOLE | ZERO;
    let check = |what: &str| assert!(peak() < MEMORY, "{what}: {} KiB", peak());
    device.zero(0, TERABYTE).await.unwrap();
    check("a zeroing of 1 TiB");
    device.zero(0, size).await.unwrap();
    check("a zeroing of everything");
    // What is not durable may come back: `extents-cache` keeps nothing of it.
    device.flush().await.unwrap();
    assert_eq!(runs(device, 0, size).await, [(size, hole)]);
    // A write makes three runs of it.
    let middle = 1 << 30;
    write(device, middle, &[1; 4096]).await;
    let found = runs(device, 0, size).await;
    if keeps {
        assert_eq!((found.len(), found[0]), (3, (middle, hole)));
    } else {
        assert_eq!(found, [(size, hole)]);
    }
    device.submit(Request::cache(0, size)).await.unwrap();
    device.trim(0, size).await.unwrap();
    device.zero(1, size - 1).await.unwrap();
    check("a trim");
    assert!(runs(device, 0, size).await.len() <= 3);
    device.flush().await.unwrap();
    check("a flush");
}

#[test]
fn one_request_for_everything_is_little_work() {
    on_workers(|| async {
        for (text, size, keeps) in [
            ("cow?cow-block-size=4k", LARGEST, true),
            ("cow", LARGEST, true),
            // Its file is as long as the device: few file systems support files of 7 EiB.
            ("cache?cache-min-block-size=4k", 8 * TERABYTE, true),
            ("cache?cache-min-block-size=4k&cache-max-size=1M", 8 * TERABYTE, true),
            ("cache?cache=writethrough", 8 * TERABYTE, false),
            ("extents-cache", LARGEST, true),
            ("protect?protect=~0-0xefffffffffffffff", LARGEST, false),
        ] {
            let (counter, below) = null(size).await;
            let device = blockhaul_block::fence(layer(text).unwrap().wrap(below).unwrap());
            change_everything(&device, size, keeps).await;
            let asked = counter.counts(OpKind::Zero).requests;
            assert!(asked < 20, "{text}: {asked} zeroings of the device below");
        }
    });
}

#[test]
fn single_blocks_take_some_bytes_each() {
    on_workers(|| async {
        // Every second block: the maximum number of runs.
        let (_, below) = null(TERABYTE).await;
        let device =
            blockhaul_block::fence(layer("cow?cow-block-size=4k").unwrap().wrap(below).unwrap());
        for block in 0..20_000_u64 {
            write(&device, 8192 * block, &[7; 4096]).await;
        }
        assert!(peak() < MEMORY, "{} KiB", peak());
        assert_eq!(runs(&device, 0, 8192 * 20_000).await.len(), 40_000);
        device.zero(0, TERABYTE).await.unwrap();
        assert_eq!(runs(&device, 0, TERABYTE).await, [(TERABYTE, HOLE | ZERO)]);
    });
}
