//! Fewer faults for the same failure.

use crate::run::{SimulationResult, SimulationRun, simulate};

/// Runs at most while shrinking.
const RUNS_MAX: usize = 400;

/// A failing run with as few faults as were found to be enough.
pub struct ShrinkResult {
    /// The run.
    pub run: SimulationRun,
    /// How it ends.
    pub ended: SimulationResult,
    /// Runs that were needed.
    pub runs: usize,
}

/// Leaves out faults of a failing run, as long as it still fails (with whatever failure).
pub fn shrink(run: &SimulationRun) -> ShrinkResult {
    let mut best = ShrinkResult { run: run.clone(), ended: simulate(run), runs: 1 };
    if best.ended.failure.is_none() {
        return best;
    }
    let quiet = SimulationRun { quiet: true, ..best.run.clone() };
    accept(&mut best, quiet);
    let all = numbers(&best.ended);
    let same = SimulationRun { keep: Some(all), ..best.run.clone() };
    accept(&mut best, same);
    let mut size = best.run.keep.as_ref().map_or(0, Vec::len).div_ceil(2);
    while size > 0 && best.runs < RUNS_MAX {
        if !without_parts(&mut best, size) {
            size = if size == 1 { 0 } else { size.div_ceil(2) };
        }
    }
    best
}

/// Tries to leave out each part of `size` faults; true if that has succeeded once.
fn without_parts(best: &mut ShrinkResult, size: usize) -> bool {
    let mut start = 0;
    let mut less = false;
    while best.runs < RUNS_MAX {
        let keep = best.run.keep.clone().unwrap_or_default();
        if start >= keep.len() {
            break;
        }
        let end = keep.len().min(start + size);
        let rest: Vec<u64> = [&keep[..start], &keep[end..]].concat();
        // What follows a fault that is left out may be numbered differently.
        let fewer = SimulationRun { keep: Some(rest), ..best.run.clone() };
        if accept(best, fewer) {
            less = true;
        } else {
            start = end;
        }
    }
    less
}

/// Takes `run` as the best one if it fails, too.
fn accept(best: &mut ShrinkResult, run: SimulationRun) -> bool {
    let ended = simulate(&run);
    best.runs += 1;
    let fails = ended.failure.is_some();
    if fails {
        let happened = numbers(&ended);
        let keep = run.keep.as_ref().map(|_| happened);
        (best.run, best.ended) = (SimulationRun { keep, ..run }, ended);
    }
    fails
}

/// The faults that happened.
fn numbers(ended: &SimulationResult) -> Vec<u64> {
    ended.report.chosen.iter().map(|(number, _)| *number).collect()
}
