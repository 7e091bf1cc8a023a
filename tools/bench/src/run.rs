//! Runs the cells of a plan: rounds in random order, each run prepared, served, timed and checked.

use std::collections::VecDeque;
use std::fs;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::calls::SystemCallCounter;
use crate::files;
use crate::metric::Metric;
use crate::plan::{CellPlan, PlanStep, ScenarioPlan};
use crate::process::{self, ProcessContext, TimedServer};
use crate::progress::RunProgress;
use crate::result::{CellRun, RunFailure};
use crate::usage::{self, Usage};
use blockhaul_measure::RandomGenerator;
use blockhaul_measure::{MeasureError, Result};

/// A cell that failed this often, and never succeeded, is not run again.
pub const FAILURES_MAX: u32 = 3;
/// Time for a step before or after a run, at least.
const STEP_TIMEOUT: Duration = Duration::from_secs(600);

/// What came of it.
pub struct RunOutcome {
    /// Every run, in the order of time.
    pub runs: Vec<CellRun>,
    /// Whether the person stopped it.
    pub interrupted: bool,
}

/// Makes the images and carries out the steps that come before all runs.
pub fn set_up(
    plan: &ScenarioPlan,
    ground: &ProcessContext<'_>,
    progress: &mut RunProgress,
) -> Result<()> {
    let stopped = || MeasureError::new("stopped before the first run");
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
            MeasureError::new(format!("setup step {act}: {}\n{}", failure.why, failure.stderr))
        })?;
    }
    Ok(())
}

/// Runs all cells, `plan.warmup` and then `plan.runs` times.
pub fn run(
    plan: &ScenarioPlan,
    ground: &ProcessContext<'_>,
    progress: &mut RunProgress,
) -> RunOutcome {
    let rounds = plan.warmup.saturating_add(plan.runs);
    progress.start(rounds, plan.cells.iter().filter(|cell| cell.is_ok()).count());
    let history = vec![(0_u32, false); plan.cells.len()];
    let queue = VecDeque::new();
    let runs = Vec::new();
    let mut state = RoundState { queue, history, runs, progress, interrupted: false };
    for round in 0..rounds {
        state.queue = order(plan, round).into();
        let course = MeasurementRound { plan, ground, round, state: Mutex::new(state) };
        std::thread::scope(|scope| {
            for number in 1..plan.together {
                let course = &course;
                scope.spawn(move || course.work(number));
            }
            course.work(0);
        });
        state = course.state.into_inner().unwrap_or_else(PoisonError::into_inner);
        if state.interrupted {
            return RunOutcome { runs: state.runs, interrupted: true };
        }
    }
    state.progress.end();
    RunOutcome { runs: state.runs, interrupted: false }
}

/// A round: its cells, and those that run them.
struct MeasurementRound<'a> {
    plan: &'a ScenarioPlan,
    ground: &'a ProcessContext<'a>,
    round: u32,
    state: Mutex<RoundState<'a>>,
}

/// What the workers of a round share.
struct RoundState<'a> {
    /// Cells to run.
    queue: VecDeque<usize>,
    /// Failures of each cell, and whether it succeeded once.
    history: Vec<(u32, bool)>,
    runs: Vec<CellRun>,
    progress: &'a mut RunProgress,
    interrupted: bool,
}

impl<'a> MeasurementRound<'a> {
    fn lock(&self) -> MutexGuard<'_, RoundState<'a>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs cells until there are no more. Each worker has a folder of its own for what programs
    /// print.
    fn work(&self, number: u32) {
        let ProcessContext { places, path, logs, stop } = *self.ground;
        let logs = match number {
            0 => logs.to_path_buf(),
            _ => logs.join(format!("worker-{number}")),
        };
        // If there is no folder, the commands fail and say so.
        fs::create_dir_all(&logs).ok();
        let ground = ProcessContext { places, path, logs: &logs, stop };
        let given_up = |history: (u32, bool)| !history.1 && history.0 >= FAILURES_MAX;
        let plan = self.plan;
        let width = plan.columns.len();
        while let Some((at, what)) = self.next(given_up) {
            let Ok(body) = &plan.cells[at] else { continue };
            let started = Instant::now();
            let warmup = self.round < plan.warmup;
            let mut run =
                run_once(body, plan, &ground, warmup && plan.show.contains(&Metric::ServersCalls));
            let mut state = self.lock();
            if stop.load(Ordering::Relaxed) {
                // It was cut off by us; that is no failure of the command.
                state.interrupted = true;
                return;
            }
            (run.row, run.column, run.round, run.warmup) =
                (at / width, at % width, self.round, warmup);
            match &run.failure {
                None => state.history[at].1 = true,
                Some(failure) => {
                    state.history[at].0 += 1;
                    let last = given_up(state.history[at]);
                    state.progress.failed(&what, failure, last);
                }
            }
            state.progress.done(started.elapsed());
            state.runs.push(run);
        }
    }

    /// The next cell to run, and its name.
    fn next(&self, given_up: impl Fn((u32, bool)) -> bool) -> Option<(usize, String)> {
        let plan = self.plan;
        let mut state = self.lock();
        let width = plan.columns.len();
        while !state.interrupted {
            let at = state.queue.pop_front()?;
            if plan.cells[at].is_err() || given_up(state.history[at]) {
                continue;
            }
            let what = format!("{}: {}", plan.rows[at / width].label, plan.columns[at % width]);
            state.progress.run(self.round, plan.warmup, &what);
            return Some((at, what));
        }
        None
    }
}

/// Cells in the order of a round. The same seed gives the same orders. If several run at the same
/// time, those that take long must not be the last: scenarios have them at the end.
pub fn order(plan: &ScenarioPlan, round: u32) -> Vec<usize> {
    let mut cells: Vec<usize> =
        (0..plan.cells.len()).filter(|at| plan.cells[*at].is_ok()).collect();
    if plan.together > 1 {
        cells.reverse();
        return cells;
    }
    let mut seed = RandomGenerator::new(plan.seed);
    for _ in 0..round {
        seed.number();
    }
    RandomGenerator::new(seed.number()).shuffle(&mut cells);
    cells
}

/// `counting`: system calls of the servers are counted, which makes them slower.
fn run_once(
    body: &CellPlan,
    plan: &ScenarioPlan,
    ground: &ProcessContext<'_>,
    counting: bool,
) -> CellRun {
    let mut run = CellRun {
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
    body: &CellPlan,
    plan: &ScenarioPlan,
    ground: &ProcessContext<'_>,
    counting: bool,
    run: &mut CellRun,
) -> std::result::Result<(), RunFailure> {
    for act in &body.prepare {
        carry_out(act, plan, ground).map_err(|failure| at("prepare", failure))?;
    }
    if plan.drop_caches {
        drop_caches().map_err(|error| at("prepare", plain(error.to_string())))?;
    }
    let mut servers: Vec<TimedServer> = Vec::new();
    for server in &body.servers {
        servers.push(ground.serve(server).map_err(|failure| at("servers", failure))?);
    }
    let counts: Vec<Option<SystemCallCounter>> = if counting {
        servers.iter().map(|server| ground.count_calls(server)).collect()
    } else {
        Vec::new()
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
        usage.calls = calls.and_then(SystemCallCounter::end);
    }
    // Among others are the cells that run at the same time.
    if plan.together == 1 {
        run.others_cpu_s = (busy.0 - busy_before.0 - run.total_cpu_s()).max(0.0);
    }
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
    act: &PlanStep,
    plan: &ScenarioPlan,
    ground: &ProcessContext<'_>,
) -> std::result::Result<(), process::ProcessFailure> {
    let done = match act {
        PlanStep::Run(words) => {
            let timed = ground.run(words, plan.timeout.max(STEP_TIMEOUT));
            return timed.failure.map_or(Ok(()), Err);
        }
        PlanStep::Fresh(path, size) => files::fresh(path, *size).map(drop),
        PlanStep::Overwrite(path, like) => files::overwrite(path, like),
        PlanStep::Remove(path) => files::remove(path),
        PlanStep::Evict(path) => files::evict(path),
        PlanStep::Compare(expected, found) => files::compare(expected, found),
    };
    done.map_err(|error| plain(error.to_string()))
}

fn plain(why: String) -> process::ProcessFailure {
    process::ProcessFailure { why, stderr: String::new() }
}

fn at(stage: &str, failure: process::ProcessFailure) -> RunFailure {
    RunFailure { stage: stage.to_owned(), why: failure.why, stderr: failure.stderr }
}

/// Writes dirty pages and drops what the kernel caches of files.
fn drop_caches() -> Result<()> {
    rustix::fs::sync();
    let path = Path::new("/proc/sys/vm/drop_caches");
    fs::write(path, "3").map_err(|error| {
        MeasureError::new(format!("cannot drop caches (needs root; or --drop-caches no): {error}"))
    })
}
