//! One run of a scenario.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use blockhaul_io::simulation::{
    self, Faults, SimulationError, SimulationReport, SimulationSettings,
};
use blockhaul_testkit::rng::Rng;

use crate::{ScenarioKind, ScenarioSetup};

/// Virtual time of a run: more than all timeouts and retries of any scenario together.
const TIME: Duration = Duration::from_secs(7 * 86_400);
/// Steps of a run: some hundred times as many as a usual one has. A task that waits takes none.
const STEPS: u64 = 1_000_000;

/// A run to make.
#[derive(Clone)]
pub struct SimulationRun {
    /// What happens.
    pub scenario: &'static ScenarioKind,
    /// Decides everything.
    pub seed: u64,
    /// The faults that happen, by number; `None`: all.
    pub keep: Option<Vec<u64>>,
    /// Sends and receives are whole and at once.
    pub quiet: bool,
    /// Number of last events to keep as text.
    pub log: usize,
}

/// How a run ended.
pub struct SimulationResult {
    /// The promise that was broken, if any.
    pub failure: Option<String>,
    /// What happened.
    pub report: SimulationReport,
}

impl SimulationRun {
    /// All of a seed.
    pub fn of(scenario: &'static ScenarioKind, seed: u64) -> SimulationRun {
        SimulationRun { scenario, seed, keep: None, quiet: false, log: 0 }
    }
}

impl fmt::Display for SimulationRun {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "cargo xtask simulate --seed {}", self.seed)?;
        if let Some(keep) = &self.keep {
            let list: Vec<_> = keep.iter().map(u64::to_string).collect();
            write!(f, " --keep '{}'", list.join(","))?;
        }
        if self.quiet {
            f.write_str(" --quiet-network")?;
        }
        write!(f, " {}", self.scenario.name)
    }
}

/// Makes a run on this thread.
pub fn simulate(run: &SimulationRun) -> SimulationResult {
    let scratch = match scratch() {
        Ok(scratch) => scratch,
        Err(error) => {
            let failure = Some(format!("cannot make a directory for a run: {error}"));
            return SimulationResult { failure, report: SimulationReport::default() };
        }
    };
    let mut rng = Rng::new(run.seed ^ 0x5ee0_5ee0);
    let mut faults = crate::noise::faults(&mut rng);
    if run.quiet {
        faults = Faults { short: 0, stall: 0, socket_delay: Duration::ZERO, ..faults };
    }
    let settings = SimulationSettings {
        seed: run.seed,
        faults,
        keep: run.keep.clone(),
        time: TIME,
        steps: STEPS,
        log: run.log,
    };
    let setting = ScenarioSetup { rng, dir: scratch.path().to_path_buf(), faults };
    let (output, report) = simulation::run(&settings, || (run.scenario.start)(setting));
    let failure = failure(output, &report);
    SimulationResult { failure, report }
}

fn failure(
    output: Result<Result<(), String>, SimulationError>,
    report: &SimulationReport,
) -> Option<String> {
    if let Some(panic) = report.panics.first() {
        return Some(format!("a task has panicked: {panic}"));
    }
    match output {
        Ok(Ok(())) => None,
        Ok(Err(broken)) => Some(broken),
        Err(stuck) => Some(stuck.to_string()),
    }
}

/// A directory in memory if there is one: runs make many small files.
fn scratch() -> std::io::Result<tempfile::TempDir> {
    let memory = PathBuf::from("/dev/shm");
    let builder = || {
        let mut builder = tempfile::Builder::new();
        builder.prefix("simulate-");
        builder
    };
    builder().tempdir_in(memory).or_else(|_| builder().tempdir())
}
