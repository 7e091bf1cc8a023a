//! Random doors of one server to the same storages, from a printed seed: exports, nodes, clients of a
//! directory, targets of jobs, by names, links and images, one after another and two at once, while
//! clients write and read back. What is not refused must be right: every read equals the model, the
//! target of a job equals the disk, and a file that nobody may write does not change. The server is
//! killed again and again, and started with the same exports: what was flushed is there, and no image
//! is corrupt.
//!
//! - `files`: the files, and their contents. `rules`: which uses of a file fit. `clients`: requests.
//!   `world`: the server, its doors and jobs.

mod clients;
mod files;
mod rules;
mod world;

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Instant;

use blockhaul_testkit::{rng, tools};

pub use clients::assert_same;
use world::World;

/// What has happened.
#[derive(Debug, Default)]
struct Counts {
    requests: u64,
    reads: u64,
    /// Doors that were tried, and those that were opened.
    tried: u64,
    opened: u64,
    refused: u64,
    jobs: u64,
    /// Jobs with a second door meanwhile, or to a target that was open.
    jobs_beside: u64,
    copies: u64,
    moves: u64,
    cancelled: u64,
    failed: u64,
    /// Completed before the target was opened by others, and looked at after it.
    overtaken: u64,
    killed_jobs: u64,
    snapshots: u64,
    audits: u64,
    kills: u64,
    stops: u64,
    checks: u64,
    /// What was refused or failed, although nothing is known against it, and how often.
    unexpected: BTreeMap<String, u64>,
}

impl Counts {
    fn add(&mut self, other: Counts) {
        let Counts { unexpected, .. } = &other;
        for (why, count) in unexpected {
            *self.unexpected.entry(why.clone()).or_default() += count;
        }
        for (sum, count) in [
            (&mut self.requests, other.requests),
            (&mut self.reads, other.reads),
            (&mut self.tried, other.tried),
            (&mut self.opened, other.opened),
            (&mut self.refused, other.refused),
            (&mut self.jobs, other.jobs),
            (&mut self.jobs_beside, other.jobs_beside),
            (&mut self.copies, other.copies),
            (&mut self.moves, other.moves),
            (&mut self.cancelled, other.cancelled),
            (&mut self.failed, other.failed),
            (&mut self.overtaken, other.overtaken),
            (&mut self.killed_jobs, other.killed_jobs),
            (&mut self.snapshots, other.snapshots),
            (&mut self.audits, other.audits),
            (&mut self.kills, other.kills),
            (&mut self.stops, other.stops),
            (&mut self.checks, other.checks),
        ] {
            *sum += count;
        }
    }

    fn unexpected(&mut self, why: &str) {
        // Without what differs from run to run.
        let words = why.split(' ').map(|word| match word.rsplit_once("/files/") {
            Some((_, file)) => file,
            None => word,
        });
        let text: String = words.collect::<Vec<_>>().join(" ");
        let text: String = text.chars().filter(|letter| !letter.is_ascii_digit()).collect();
        *self.unexpected.entry(text).or_default() += 1;
    }
}

/// The latest steps; printed after a failure.
pub struct Story(Vec<String>, Instant);

impl Story {
    pub fn of(seed: u64) -> Story {
        Story(vec![format!("seed {seed:#x}")], Instant::now())
    }

    pub fn add(&mut self, step: String) {
        let seconds = self.1.elapsed().as_secs_f64();
        self.0.push(format!("{seconds:.3} {step}"));
    }
}

impl Drop for Story {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let first = self.0.len().saturating_sub(60);
            self.0[..1].iter().chain(&self.0[first..]).for_each(|line| eprintln!("  {line}"));
        }
    }
}

#[test]
fn doors_to_one_storage_succeed_rightly_or_are_refused() {
    // The short form always makes the same choices.
    let is_random = tools::long() || std::env::var_os("BLOCKHAUL_SEED").is_some();
    let seed = if is_random { rng::seed() } else { 1 };
    println!("BLOCKHAUL_SEED={seed:#x}");
    let counts = Mutex::new(Counts::default());
    let number = AtomicU64::new(0);
    let (servers, steps) = if tools::long() { (6, 150) } else { (1, 40) };
    thread::scope(|scope| {
        for _ in 0..servers {
            scope.spawn(|| {
                loop {
                    let number = number.fetch_add(1, Ordering::Relaxed);
                    let mut own = Counts::default();
                    World::new(seed.wrapping_add(number), &mut own).run(steps);
                    let mut counts = counts.lock().unwrap();
                    counts.add(own);
                    if !tools::long() || counts.jobs_beside >= 1000 && counts.kills >= 300 {
                        return;
                    }
                    println!("{counts:?}");
                }
            });
        }
    });
    let counts = counts.into_inner().unwrap();
    println!("{counts:#?}");
    assert!(counts.requests > 0 && counts.audits > 0 && counts.kills + counts.stops > 0);
}
