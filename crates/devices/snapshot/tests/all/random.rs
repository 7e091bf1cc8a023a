//! Writers, readers of the view and a reader that discards, in random order: the view is always the
//! disk as it was, and the live disk is what its writers have made of it.

use std::cell::Cell;
use std::rc::Rc;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use blockhaul_block::{BASE_ALLOCATION, Device, DeviceExt as _, ZERO};
use blockhaul_snapshot::{PointOptions, Snapshot, ViewTrim};
use blockhaul_testkit::rng::{self, Rng};

use crate::support::{Slow, begun, on_worker, read, write};

const SIZE: usize = (1 << 20) + 512;
const WRITERS: usize = 4;
const WRITES: usize = 60;

#[test]
fn the_view_is_the_disk_as_it_was() {
    let long = std::env::var_os("BLOCKHAUL_LONG").is_some();
    let first = rng::seed();
    for round in 0..if long { 3000 } else { 25 } {
        let seed = first.wrapping_add(round);
        println!("BLOCKHAUL_SEED={seed:#x}");
        on_worker(move || one_round(seed));
    }
}

async fn one_round(seed: u64) {
    let mut rng = Rng::new(seed);
    let before = rng.disk(SIZE, 100_000, 70);
    let memory = blockhaul_backends::memory(SIZE as u64);
    write(&memory, 0, &before).await;
    let slow = Slow { inner: memory.clone(), rng: Mutex::new(Rng::new(rng.number())) };
    let options = PointOptions {
        block: 4096 << rng.below(6),
        guest_timeout: Duration::from_secs(60),
        ..PointOptions::default()
    };
    let disk: Arc<dyn Device> = Arc::new(slow);
    let (snapshot, live) = begun(&disk, &options).await;
    let view = snapshot.view(Vec::new(), ViewTrim::Releases).unwrap();
    let before = Rc::new(before);
    let over = Rc::new(Cell::new(false));
    let writers: Vec<_> = (0..WRITERS)
        .map(|index| {
            let live = live.clone();
            let before = before.clone();
            blockhaul_io::start(writer(live, before, index, Rng::new(rng.number())))
        })
        .collect();
    let readers: Vec<_> = (0..3)
        .map(|_| {
            let view = view.clone();
            let before = before.clone();
            let over = over.clone();
            blockhaul_io::start(reader(view, before, over, Rng::new(rng.number())))
        })
        .collect();
    let mut after = Vec::new();
    for writer in writers {
        after.push(writer.await);
    }
    over.set(true);
    for reader in readers {
        reader.await;
    }
    check_end(&snapshot, &view, &before, &memory, &after).await;
}

/// Writes to its share of the disk, which it returns as it must be then.
async fn writer(
    live: Arc<dyn Device>,
    before: Rc<Vec<u8>>,
    index: usize,
    mut rng: Rng,
) -> (usize, Vec<u8>) {
    let share = SIZE / WRITERS;
    let start = index * share;
    let end = if index + 1 == WRITERS { SIZE } else { start + share };
    let mut mine = before[start..end].to_vec();
    for _ in 0..WRITES {
        let at = rng.below((mine.len() - 1) as u64) as usize;
        let longest = if rng.chance(10) { 200_000 } else { 6000 };
        let len = rng.between(1, longest).min((mine.len() - at) as u64) as usize;
        let part = &mut mine[at..at + len];
        let place = (start + at) as u64;
        if rng.chance(20) {
            part.fill(0);
            live.zero(place, len as u64).await.unwrap();
        } else {
            rng.fill(part);
            write(&live, place, part).await;
        }
        assert_eq!(read(&live, place, len).await, part, "the live disk, read back");
    }
    (start, mine)
}

async fn reader(view: Arc<dyn Device>, before: Rc<Vec<u8>>, over: Rc<Cell<bool>>, mut rng: Rng) {
    let base = view.facts().context(BASE_ALLOCATION).unwrap();
    while !over.get() {
        let at = rng.below(SIZE as u64 - 1) as usize;
        let len = rng.between(1, 150_000).min((SIZE - at) as u64) as usize;
        let expected = &before[at..at + len];
        if rng.chance(30) {
            let lists = view.extents(at as u64, len as u64, base).await.unwrap();
            for (from, run) in lists[0].ranges(at as u64) {
                let (from, to) = (from as usize - at, (from + run.len) as usize - at);
                let is_zero = expected[from..to.min(len)].iter().all(|byte| *byte == 0);
                assert!(run.state & ZERO == 0 || is_zero, "zero that was data, at {at}");
            }
        } else {
            assert!(read(&view, at as u64, len).await == expected, "the view at {at}, {len} bytes");
        }
        blockhaul_io::yield_now().await;
    }
}

async fn check_end(
    snapshot: &Snapshot,
    view: &Arc<dyn Device>,
    before: &[u8],
    memory: &Arc<dyn Device>,
    after: &[(usize, Vec<u8>)],
) {
    for (start, bytes) in after {
        assert!(read(memory, *start as u64, bytes.len()).await == *bytes, "the disk at {start}");
    }
    assert!(read(view, 0, SIZE).await == before, "the view in the end");
    let stats = snapshot.stats();
    assert_eq!(stats.broken, None);
    assert!(stats.kept > 0 && stats.kept == stats.saved && stats.waits > 0, "{stats:?}");
    view.trim(0, SIZE as u64).await.unwrap();
    assert_eq!(snapshot.stats().kept, 0, "all is released");
    assert!(view.read(0, 512).await.is_err());
}
