//! A copy that follows a disk in use ends equal to it, whether writers wait for the copy or not.

use std::cell::Cell;
use std::rc::Rc;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use blockhaul_block::{Device, DeviceExt as _, Kind, OpKind};
use blockhaul_catalog::Stack;
use blockhaul_snapshot::ChangeTracker;
use blockhaul_testkit::fault::{FaultDevice, FaultEffect, FaultRule};
use blockhaul_testkit::rng::{self, Rng};
use blockhaul_testkit::tools;

use crate::support::{Slow, on_worker, read, write};

const SIZE: u64 = (512 << 10) + 512;
const WRITERS: usize = 4;
const WRITES: usize = 80;

#[test]
fn the_copy_equals_the_disk_in_the_end() {
    let first = rng::seed();
    for round in 0..if tools::long() { 3000 } else { 25 } {
        let seed = first.wrapping_add(round);
        println!("BLOCKHAUL_SEED={seed:#x}");
        on_worker(move || one_round(seed));
    }
}

/// Writers whose writes overlap, a copier, and changes between both ways.
async fn one_round(seed: u64) {
    let mut rng = Rng::new(seed);
    let [memory, copy] = [0, 1].map(|_| blockhaul_backends::memory(SIZE));
    let mut slow = |inner: &Arc<dyn Device>| -> Arc<dyn Device> {
        Arc::new(Slow { inner: inner.clone(), rng: Mutex::new(Rng::new(rng.number())) })
    };
    let disk = slow(&memory);
    let target = slow(&copy);
    let failing = FaultDevice::over(slow(&copy), seed);
    failing.add(FaultRule::new(FaultEffect::Fail(Kind::Io)).kind(OpKind::Write).percent(5));
    failing.add(FaultRule::new(FaultEffect::Fail(Kind::Io)).kind(OpKind::Zero).percent(5));
    let changes = ChangeTracker::new(SIZE, 512 << rng.below(6)).unwrap();
    let live = Stack::over(disk.clone()).with_layer(changes.layer()).await.unwrap();
    let writers: Vec<_> = (0..WRITERS)
        .map(|_| blockhaul_io::start(writer(live.device().clone(), Rng::new(rng.number()))))
        .collect();
    let over = Rc::new(Cell::new(false));
    let copier = blockhaul_io::start(copier(
        changes.clone(),
        (disk, target),
        failing,
        over.clone(),
        Rng::new(rng.number()),
    ));
    for writer in writers {
        writer.await;
    }
    over.set(true);
    copier.await;
    assert_eq!(changes.bytes(), 0);
    assert!(read(&memory, 0, SIZE as usize).await == read(&copy, 0, SIZE as usize).await);
}

async fn writer(live: Arc<dyn Device>, mut rng: Rng) {
    for _ in 0..WRITES {
        let at = rng.below(SIZE - 1);
        let longest = if rng.chance(10) { 100_000 } else { 6000 };
        let len = rng.between(1, longest).min(SIZE - at);
        match rng.below(10) {
            0 => live.trim(at, len).await.unwrap(),
            1 | 2 => live.zero(at, len).await.unwrap(),
            _ => {
                let mut data = vec![0; len as usize];
                rng.fill(&mut data);
                write(&live, at, &data).await;
            }
        }
    }
}

/// Copies what has changed, until the writers are done and there is nothing left.
async fn copier(
    changes: ChangeTracker,
    (disk, target): (Arc<dyn Device>, Arc<dyn Device>),
    also: Arc<dyn Device>,
    over: Rc<Cell<bool>>,
    mut rng: Rng,
) {
    loop {
        let was_over = over.get();
        changes.write_also(rng.chance(70).then(|| also.clone()));
        let dirty = changes.take();
        for (at, len) in dirty.iter().copied() {
            let mut lock = changes.lock(at, len).await;
            // Before, while, or after the piece is copied, or not.
            let opens = rng.below(4);
            if opens == 0 {
                lock.open();
            }
            let data = read(&disk, at, len as usize).await;
            if opens == 1 {
                lock.open();
            }
            write(&target, at, &data).await;
            if opens == 2 {
                lock.open();
            }
        }
        if was_over && dirty.is_empty() {
            return;
        }
        blockhaul_io::yield_now().await;
    }
}

/// Writers do not make more to copy, however fast they are.
#[test]
fn what_has_changed_becomes_less_while_writes_go_to_both() {
    on_worker(|| async {
        let [disk, copy] = [0, 1].map(|_| blockhaul_backends::memory(SIZE));
        let changes = ChangeTracker::new(SIZE, 4096).unwrap();
        let live = Stack::over(disk.clone()).with_layer(changes.layer()).await.unwrap();
        let live = live.device().clone();
        write(&live, 1000, &[1; 10_000]).await;
        let before = changes.bytes();
        assert_eq!(before, 12288);
        changes.write_also(Some(copy.clone()));
        write(&live, 100_000, &[2; 10_000]).await;
        live.zero(200_000, 10_000).await.unwrap();
        assert_eq!(changes.bytes(), before);
        assert_eq!(read(&copy, 100_000, 10_000).await, [2; 10_000]);
        // A write waits for the copy of its range.
        let lock = changes.lock(0, 4096).await;
        let waiting = {
            let live = live.clone();
            blockhaul_io::start(async move { write(&live, 500, &[3; 100]).await })
        };
        blockhaul_io::sleep(Duration::from_millis(5)).await;
        assert_eq!(read(&disk, 500, 100).await, [0; 100]);
        drop(lock);
        waiting.await;
        assert_eq!(read(&copy, 500, 100).await, [3; 100]);
        // Not once the range is opened: then it only marks.
        let _ = changes.take();
        let mut lock = changes.lock(0, 4096).await;
        lock.open();
        write(&live, 4000, &[5; 200]).await;
        assert_eq!(read(&disk, 4000, 200).await, [5; 200]);
        assert_eq!(read(&copy, 4000, 200).await, [0; 200]);
        assert_eq!(changes.take(), [(0, 8192)]);
        drop(lock);
        write(&live, 500, &[6; 100]).await;
        assert_eq!(read(&copy, 500, 100).await, [6; 100]);
        // What is trimmed is copied later.
        assert_eq!(changes.bytes(), 0);
        live.trim(300_000, 4096).await.unwrap();
        assert!(changes.bytes() > 0);
        changes.write_also(None);
        write(&live, 400_000, &[4; 10]).await;
        assert_eq!(read(&copy, 400_000, 10).await, [0; 10]);
    });
}

/// A round without locks may begin only then: it could copy what was there before the write.
#[test]
fn writes_that_still_go_to_both_are_waited_for() {
    on_worker(|| async {
        let [disk, copy] = [0, 1].map(|_| blockhaul_backends::memory(SIZE));
        let hanging = FaultDevice::over(copy.clone(), 1);
        hanging.add(FaultRule::new(FaultEffect::Hang).kind(OpKind::Write).times(1));
        let changes = ChangeTracker::new(SIZE, 4096).unwrap();
        let live = Stack::over(disk).with_layer(changes.layer()).await.unwrap();
        let live = live.device().clone();
        changes.settle().await;
        changes.write_also(Some(hanging.clone()));
        let writing = {
            let live = live.clone();
            blockhaul_io::start(async move { write(&live, 500, &[3; 100]).await })
        };
        blockhaul_io::yield_now().await;
        changes.write_also(None);
        let short = Duration::from_millis(20);
        let settled = blockhaul_io::timeout(short, changes.settle()).await;
        assert!(settled.is_err(), "a write is in flight");
        hanging.release();
        changes.settle().await;
        assert_eq!(read(&copy, 500, 100).await, [3; 100]);
        writing.await;
        assert_eq!(changes.bytes(), 0);
    });
}
