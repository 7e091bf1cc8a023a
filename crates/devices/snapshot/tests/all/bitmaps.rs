//! Dirty bitmaps show all that was written, and little else.

use std::sync::Arc;

use blockhaul_block::{BASE_ALLOCATION, ContextSet, Device, DeviceExt as _, Kind};
use blockhaul_catalog::Stack;
use blockhaul_snapshot::{DIRTY, DirtyBitmap, tracking};
use blockhaul_testkit::rng::{self, Rng};

use crate::support::{BLOCK, on_worker, write};

async fn tracked(device: &Arc<dyn Device>, bitmaps: &[&Arc<DirtyBitmap>]) -> Arc<dyn Device> {
    let layer = tracking(bitmaps.iter().map(|bitmap| (*bitmap).clone()).collect());
    Stack::over(device.clone()).with_layer(layer).await.unwrap().device().clone()
}

async fn dirty(device: &Arc<dyn Device>, context: &str) -> Vec<(u64, u64)> {
    let facts = device.facts();
    let context = facts.context(context).unwrap();
    let lists = device.extents(0, facts.size, context).await.unwrap();
    let ranges = lists[0].ranges(0).filter(|(_, run)| run.state == DIRTY);
    ranges.map(|(at, run)| (at, run.len)).collect()
}

#[test]
fn bitmaps_of_several_granularities_are_contexts_beside_the_extents() {
    on_worker(|| async {
        let size = 8 * BLOCK + 100;
        let memory = blockhaul_backends::memory(size);
        let fine = Arc::new(DirtyBitmap::new("fine", size, 4096).unwrap());
        let coarse = Arc::new(DirtyBitmap::new("coarse", size, BLOCK).unwrap());
        let device = tracked(&memory, &[&fine, &coarse]).await;
        let facts = device.facts();
        let names = ["base:allocation", "qemu:dirty-bitmap:fine", "qemu:dirty-bitmap:coarse"];
        assert_eq!(facts.contexts, names);
        write(&device, 4095, b"ab").await;
        device.zero(7 * BLOCK, BLOCK + 100).await.unwrap();
        device.trim(3 * BLOCK, 4096).await.unwrap();
        let end = (7 * BLOCK, BLOCK + 100);
        assert_eq!(dirty(&device, names[1]).await, [(0, 8192), (3 * BLOCK, 4096), end]);
        assert_eq!(dirty(&device, names[2]).await, [(0, BLOCK), (3 * BLOCK, BLOCK), end]);
        assert_eq!(coarse.dirty_bytes(), 3 * BLOCK + 100);
        // All contexts in one request, in their order.
        let all = facts.context(BASE_ALLOCATION).unwrap().with(1).with(2);
        let lists = device.extents(0, 4096, all).await.unwrap();
        assert_eq!(lists.len(), 3);
        assert_eq!((lists[1].runs()[0].state, lists[2].runs()[0].state), (DIRTY, DIRTY));
        let one = device.extents(0, 4096, ContextSet::empty().with(2)).await.unwrap();
        assert_eq!(one.len(), 1);
        // What was dirty is handed over, and comes back if it is needed again.
        let taken = fine.take();
        assert_eq!((fine.dirty_bytes(), taken.dirty_bytes() > 0), (0, true));
        write(&device, BLOCK, b"x").await;
        fine.merge(&taken);
        let expected = [(0, 8192), (BLOCK, 4096), (3 * BLOCK, 4096), end];
        assert_eq!(dirty(&device, names[1]).await, expected);
        fine.clear();
        assert_eq!(dirty(&device, names[1]).await, []);
    });
}

#[test]
fn every_written_byte_is_dirty() {
    let seed = rng::seed();
    println!("BLOCKHAUL_SEED={seed:#x}");
    on_worker(move || async move {
        let rng = &mut Rng::new(seed);
        let size = 300_000;
        let memory = blockhaul_backends::memory(size);
        for granularity in [512, 4096, 65536] {
            let bitmap = Arc::new(DirtyBitmap::new("b", size, granularity).unwrap());
            let device = tracked(&memory, &[&bitmap]).await;
            let mut blocks = vec![false; size.div_ceil(granularity) as usize];
            for _ in 0..20 {
                let at = rng.below(size - 1);
                let len = rng.between(1, 3000).min(size - at);
                write(&device, at, &vec![1; len as usize]).await;
                let last = (at + len - 1) / granularity;
                blocks[(at / granularity) as usize..=last as usize].fill(true);
                let found = dirty(&device, "qemu:dirty-bitmap:b").await;
                let is_dirty = |block: usize| {
                    let at = block as u64 * granularity;
                    found.iter().any(|(from, len)| (*from..from + len).contains(&at))
                };
                for (block, expected) in blocks.iter().enumerate() {
                    assert_eq!(is_dirty(block), *expected, "block {block} of {granularity}");
                }
            }
        }
    });
}

#[test]
fn what_was_handed_over_is_kept_until_it_is_settled() {
    let new = || Arc::new(DirtyBitmap::new("b", 1 << 20, 4096).unwrap());
    let bitmap = new();
    bitmap.set(0, 4096);
    let first = new();
    bitmap.hand_over(&first);
    bitmap.set(8192, 1);
    assert_eq!((bitmap.ranges(), first.ranges()), (vec![(8192, 4096)], vec![(0, 4096)]));
    assert_eq!(bitmap.unsettled_ranges(), [(0, 4096), (8192, 4096)]);
    let second = new();
    bitmap.hand_over(&second);
    bitmap.settle(&first);
    assert!(bitmap.ranges().is_empty());
    assert_eq!(bitmap.unsettled_ranges(), [(8192, 4096)]);
    bitmap.give_back(&second);
    assert_eq!(bitmap.ranges(), [(8192, 4096)]);
    assert_eq!(bitmap.unsettled_ranges(), bitmap.ranges());
}

#[test]
fn wrong_bitmaps_are_refused() {
    for granularity in [0, 256, 1000, 128 << 20] {
        let refused = DirtyBitmap::new("b", 1 << 20, granularity).unwrap_err();
        assert_eq!(refused.kind(), Kind::Usage, "{granularity}");
    }
    for name in ["", "a\0b", &"x".repeat(1024)] {
        assert!(DirtyBitmap::new(name, 1 << 20, 4096).is_err());
    }
}
