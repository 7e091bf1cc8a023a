//! Runs the cells of a plan: rounds in random order, each run prepared, served, timed and checked.

use std::fs;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crate::calls::Calls;
use crate::error::{Error, Result};
use crate::files;
use crate::metric::Metric;
use crate::plan::{Act, Body, Plan};
use crate::process::{self, Ground, Server};
use crate::progress::Progress;
use crate::random::Random;
use crate::result::{Failure, Run};
use crate::usage::{self, Usage};

/// A cell that failed this often, and never succeeded, is not run again.
pub const FAILURES_MAX: u32 = 3;
/// Time for a step before or after a run, at least.
const STEP_TIMEOUT: Duration = Duration::from_secs(600);

/// What came of it.
pub struct Outcome {
    /// Every run, in the order of time.
    pub runs: Vec<Run>,
    /// Whether the person stopped it.
    pub interrupted: bool,
}

/// Makes the images and carries out the steps that come before all runs.
pub fn set_up(plan: &Plan, ground: &Ground<'_>, progress: &mut Progress) -> Result<()> {
    let stopped = || Error::new("stopped before the first run");
    for image in &plan.images {
        progress.note(&format!("making {}", image.path.display()));
        files::make_image(image)?;
        if ground.stop.load(Ordering::Relaxed) {
            return Err(stopped());
        }
    }
    for act in &plan.setup {
        progress.note(&act.to_string());
        carry_out(act, plan, ground).map_err(|failure| {
            if ground.stop.load(Ordering::Relaxed) {
                return stopped();
            }
            Error::new(format!("setup step {act}: {}\n{}", failure.why, failure.stderr))
        })?;
    }
    Ok(())
}

/// Runs all cells, `plan.warmup` and then `plan.runs` times.
pub fn run(plan: &Plan, ground: &Ground<'_>, progress: &mut Progress) -> Outcome {
    let width = plan.columns.len();
    let mut runs: Vec<Run> = Vec::new();
    let mut history = vec![(0_u32, false); plan.cells.len()];
    let given_up = |history: (u32, bool)| !history.1 && history.0 >= FAILURES_MAX;
    let rounds = plan.warmup.saturating_add(plan.runs);
    progress.start(rounds, plan.cells.iter().filter(|cell| cell.is_ok()).count());
    for round in 0..rounds {
        for at in order(plan, round) {
            let (Ok(body), false) = (&plan.cells[at], given_up(history[at])) else { continue };
            let (row, column) = (at / width, at % width);
            let what = format!("{}: {}", plan.rows[row].label, plan.columns[column]);
            progress.run(round, plan.warmup, &what);
            let started = Instant::now();
            let counting = round < plan.warmup && plan.show.contains(&Metric::ServersCalls);
            let mut run = run_once(body, plan, ground, counting);
            if ground.stop.load(Ordering::Relaxed) {
                // It was cut off by us; that is no failure of the command.
                return Outcome { runs, interrupted: true };
            }
            (run.row, run.column, run.round, run.warmup) =
                (row, column, round, round < plan.warmup);
            match &run.failure {
                None => history[at].1 = true,
                Some(failure) => {
                    history[at].0 += 1;
                    progress.failed(&what, failure, given_up(history[at]));
                }
            }
            progress.done(started.elapsed());
            runs.push(run);
        }
    }
    progress.end();
    Outcome { runs, interrupted: false }
}

/// Cells in the order of a round. The same seed gives the same orders.
pub fn order(plan: &Plan, round: u32) -> Vec<usize> {
    let mut cells: Vec<usize> =
        (0..plan.cells.len()).filter(|at| plan.cells[*at].is_ok()).collect();
    let mut seed = Random::new(plan.seed);
    for _ in 0..round {
        seed.number();
    }
    Random::new(seed.number()).shuffle(&mut cells);
    cells
}

/// `counting`: system calls of the servers are counted, which makes them slower.
fn run_once(body: &Body, plan: &Plan, ground: &Ground<'_>, counting: bool) -> Run {
    let mut run = Run {
        row: 0,
        column: 0,
        round: 0,
        warmup: false,
        failure: None,
        wall_s: 0.0,
        command: Usage::default(),
        servers: Vec::new(),
        others_cpu_s: 0.0,
    };
    let result = stages(body, plan, ground, counting, &mut run);
    run.failure = result.err();
    run
}

fn stages(
    body: &Body,
    plan: &Plan,
    ground: &Ground<'_>,
    counting: bool,
    run: &mut Run,
) -> std::result::Result<(), Failure> {
    for act in &body.prepare {
        carry_out(act, plan, ground).map_err(|failure| at("prepare", failure))?;
    }
    if plan.drop_caches {
        drop_caches().map_err(|error| at("prepare", plain(error.to_string())))?;
    }
    let mut servers: Vec<Server> = Vec::new();
    for server in &body.servers {
        servers.push(ground.serve(server).map_err(|failure| at("servers", failure))?);
    }
    let counts: Vec<Option<Calls>> = match counting {
        true => servers.iter().map(|server| ground.count_calls(server)).collect(),
        false => Vec::new(),
    };
    let busy_before = usage::machine_busy();
    let timed = ground.run_with(&body.command, plan.timeout, &mut servers);
    let busy = usage::machine_busy();
    run.wall_s = timed.wall.as_secs_f64();
    run.command = timed.usage;
    let mut failure = timed.failure.map(|failure| at("command", failure));
    for server in &mut servers {
        match server.usage() {
            Ok(usage) => run.servers.push((server.name.clone(), usage)),
            // A command that lost its server fails because of it; the server's words say more.
            Err(lost) => failure = Some(at("servers", lost)),
        }
    }
    for ((_, usage), calls) in run.servers.iter_mut().zip(counts) {
        usage.calls = calls.and_then(Calls::end);
    }
    run.others_cpu_s = (busy.0 - busy_before.0 - run.total_cpu_s()).max(0.0);
    // Those that were started last may be clients of the others.
    while let Some(server) = servers.pop() {
        if let Err(slow) = server.end() {
            failure.get_or_insert(at("servers", slow));
        }
    }
    if let Some(failure) = failure {
        return Err(failure);
    }
    for act in &body.check {
        carry_out(act, plan, ground).map_err(|failure| at("check", failure))?;
    }
    Ok(())
}

fn carry_out(
    act: &Act,
    plan: &Plan,
    ground: &Ground<'_>,
) -> std::result::Result<(), process::Failure> {
    let done = match act {
        Act::Run(words) => {
            let timed = ground.run(words, plan.timeout.max(STEP_TIMEOUT));
            return timed.failure.map_or(Ok(()), Err);
        }
        Act::Fresh(path, size) => files::fresh(path, *size).map(drop),
        Act::Overwrite(path, like) => files::overwrite(path, like),
        Act::Remove(path) => files::remove(path),
        Act::Evict(path) => files::evict(path),
        Act::Compare(expected, found) => files::compare(expected, found),
    };
    done.map_err(|error| plain(error.to_string()))
}

fn plain(why: String) -> process::Failure {
    process::Failure { why, stderr: String::new() }
}

fn at(stage: &str, failure: process::Failure) -> Failure {
    Failure { stage: stage.to_owned(), why: failure.why, stderr: failure.stderr }
}

/// Writes dirty pages and drops what the kernel caches of files.
fn drop_caches() -> Result<()> {
    rustix::fs::sync();
    let path = Path::new("/proc/sys/vm/drop_caches");
    fs::write(path, "3").map_err(|error| {
        Error::new(format!("cannot drop caches (needs root; or --drop-caches no): {error}"))
    })
}
