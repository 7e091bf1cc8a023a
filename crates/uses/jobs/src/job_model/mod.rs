//! Whole jobs at random, from a printed seed: clients write, zero, trim and read back, while backups,
//! increments and mirrors run one after another, are paused, limited and cancelled, and meet errors
//! of both sides under every policy. A completed job has the disk of its moment, byte for byte; the
//! live disk is what its clients have made of it; bitmaps show every difference.
//!
//! - `disk`: the disks. `guests`: their clients. `run`: one job after another.

mod disk;
mod guests;
mod run;

use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use blockhaul_io::{Runtime, RuntimeConfig};
use blockhaul_testkit::{rng, tools};

/// Schedules that run at the same time: most of their time is waiting.
const AT_ONCE: u64 = 16;

#[test]
fn jobs_are_exact_whatever_happens_meanwhile() {
    let first = rng::seed();
    let all = if tools::long() { 3000 } else { 120 };
    println!("BLOCKHAUL_SEED={first:#x}");
    let next = AtomicU64::new(0);
    thread::scope(|scope| {
        for _ in 0..AT_ONCE {
            scope.spawn(|| {
                let runtime =
                    Runtime::start(&RuntimeConfig { workers: 2, ..RuntimeConfig::default() })
                        .unwrap();
                loop {
                    let number = next.fetch_add(1, Ordering::SeqCst);
                    if number >= all {
                        return;
                    }
                    let seed = first.wrapping_add(number);
                    let stops = ScheduleGuard(&next);
                    // A panic of the schedule names the seed.
                    runtime.block_on(move || run::schedule(seed));
                    std::mem::forget(stops);
                }
            });
        }
    });
}

/// After a panic, no other schedule begins.
struct ScheduleGuard<'a>(&'a AtomicU64);

impl Drop for ScheduleGuard<'_> {
    fn drop(&mut self) {
        self.0.store(u64::MAX / 2, Ordering::SeqCst);
    }
}
