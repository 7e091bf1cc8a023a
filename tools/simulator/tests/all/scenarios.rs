//! Short runs of every scenario, 5,000 in all, from the same seeds each time; more from fresh seeds with BLOCKHAUL_LONG. `cargo xtask simulate` makes more of those.

use std::sync::atomic::{AtomicU64, Ordering};

use blockhaul_simulator::{SCENARIOS, ScenarioKind, SimulationResult, SimulationRun, simulate};
use blockhaul_testkit::rng::seed;

/// Runs of a scenario in the ordinary test.
const RUNS: u64 = 1550;
/// Runs of jobs, which are longer.
const JOBS: u64 = 350;
/// The first seed of the ordinary test.
const FIRST: u64 = 1_000_000;
/// Runs with BLOCKHAUL_LONG.
const RUNS_LONG: u64 = 100_000;
/// More events than a run has.
const LOG: usize = 1_000_000;

/// Runs a scenario with many seeds on all processors.
fn many(scenario: &'static ScenarioKind, runs: u64) {
    let (runs, first) = match std::env::var_os("BLOCKHAUL_LONG") {
        None => (runs, FIRST),
        Some(_) => (RUNS_LONG, seed() >> 16),
    };
    let next = AtomicU64::new(0);
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                loop {
                    let index = next.fetch_add(1, Ordering::Relaxed);
                    if index >= runs {
                        break;
                    }
                    let run = SimulationRun::of(scenario, first + index);
                    let failure = simulate(&run).failure;
                    assert!(failure.is_none(), "{}; repeat it with: {run}", failure.unwrap());
                }
            });
        }
    });
}

// nbd: flush.waits-for-replies
#[test]
fn no_promise_is_broken_by_a_copy() {
    many(&SCENARIOS[0], RUNS);
}

#[test]
fn no_promise_is_broken_by_a_server_with_layers() {
    many(&SCENARIOS[1], RUNS);
}

#[test]
fn backups_mirrors_and_bitmaps_are_exact() {
    many(&SCENARIOS[2], JOBS);
}

#[test]
fn peers_that_break_the_protocol_harm_nobody_else() {
    many(&SCENARIOS[3], RUNS);
}

#[test]
fn the_same_seed_gives_the_same_events() {
    let mut steps = 0;
    let mut encrypted = 0;
    for scenario in SCENARIOS {
        for seed in 0..60 {
            let run = SimulationRun { log: LOG, ..SimulationRun::of(scenario, seed) };
            let one = simulate(&run);
            let two = simulate(&run);
            assert_eq!(one.failure, two.failure, "{run}");
            // What happens where encrypted bytes were changed depends on what they were.
            if scenario.name == "hostile" && uses_tls(&one) {
                encrypted += 1;
                continue;
            }
            assert_eq!(one.report.trace, two.report.trace, "{run}");
            assert_eq!(one.report.chosen, two.report.chosen, "{run}");
            steps += one.report.steps;
        }
    }
    assert!(steps > 10_000, "{steps}");
    assert!((1..10).contains(&encrypted), "{encrypted} of 60 hostile runs");
}

/// Whether a run of `hostile` is one over TLS: its first note says so.
fn uses_tls(ended: &SimulationResult) -> bool {
    ended.report.log.iter().any(|line| line.ends_with(" tls true"))
}
