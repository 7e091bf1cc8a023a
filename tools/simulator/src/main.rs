//! `cargo xtask simulate`: runs scenarios by their seeds.

use std::collections::BTreeMap;
use std::io::Write as _;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use blockhaul_simulator::{SCENARIOS, ScenarioKind, SimulationRun, scenario, shrink, simulate};

/// Virtual events to print of a failure.
const LOG: usize = 60;

const HELP: &str = "\
cargo xtask simulate [--seed N] [--runs N | --hours H] [--threads N] [--keep LIST]
                     [--quiet-network] [--no-shrink] [--log N] [SCENARIO…]

Runs server, client and engine in virtual time with faults by a seed, and checks that no promise is
broken. docs/simulation.md explains it.

  --seed N          The first seed [default: random]. Alone: one run.
  --runs N          Number of runs of each scenario, with ascending seeds [default: 1000]
  --hours H         Run for H hours instead
  --threads N       Runs at a time [default: one per CPU]
  --keep LIST       Only these faults of the seed happen, by number, separated by commas
  --quiet-network   Sends and receives are whole and at once
  --no-shrink       Print the first failure as it is
  --log N           Last events to print of a failure [default: 60]; of a single run also if it succeeds
";

struct SimulatorOptions {
    seed: Option<u64>,
    runs: Option<u64>,
    time: Option<Duration>,
    threads: usize,
    keep: Option<Vec<u64>>,
    quiet: bool,
    shrinks: bool,
    log: Option<usize>,
    scenarios: Vec<&'static ScenarioKind>,
}

/// The exit status of a program whose standard output was closed, as that of SIGPIPE in a shell.
const CLOSED: i32 = 141;

/// Prints a line. Where nobody reads it any more, the program ends.
macro_rules! say {
    ($($text:tt)*) => {
        if writeln!(std::io::stdout(), $($text)*).is_err() {
            std::process::exit(CLOSED);
        }
    };
}

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    if args.iter().any(|arg| arg == "--help" || arg == "-h") {
        say!("{HELP}\nScenarios:");
        for scenario in SCENARIOS {
            say!("  {:<16}  {}", scenario.name, scenario.summary);
        }
        return ExitCode::SUCCESS;
    }
    let wanted = match parse(&args) {
        Ok(wanted) => wanted,
        Err(error) => {
            eprintln!("simulate: {error} (see --help)");
            return ExitCode::from(2);
        }
    };
    if let (Some(seed), None, None) = (wanted.seed, wanted.runs, wanted.time) {
        return single(&wanted, seed);
    }
    many(&wanted)
}

fn parse(args: &[String]) -> Result<SimulatorOptions, String> {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let mut wanted = SimulatorOptions {
        seed: None,
        runs: None,
        time: None,
        threads,
        keep: None,
        quiet: false,
        shrinks: true,
        log: None,
        scenarios: Vec::new(),
    };
    let mut args = args.iter();
    while let Some(arg) = args.next() {
        let mut value = || args.next().ok_or_else(|| format!("{arg} needs a value"));
        match arg.as_str() {
            "--seed" => wanted.seed = Some(number(value()?)?),
            "--runs" => wanted.runs = Some(number(value()?)?),
            "--hours" => wanted.time = Some(hours(value()?)?),
            "--threads" => wanted.threads = number::<usize>(value()?)?.max(1),
            "--log" => wanted.log = Some(number(value()?)?),
            "--quiet-network" => wanted.quiet = true,
            "--no-shrink" => wanted.shrinks = false,
            "--keep" => {
                let list = value()?.split(',').filter(|item| !item.is_empty());
                wanted.keep = Some(list.map(number).collect::<Result<_, _>>()?);
            }
            name => {
                let found = scenario(name).ok_or_else(|| format!("no scenario {name:?}"))?;
                wanted.scenarios.push(found);
            }
        }
    }
    if wanted.scenarios.is_empty() {
        wanted.scenarios = SCENARIOS.iter().collect();
    }
    Ok(wanted)
}

fn number<T: std::str::FromStr>(text: &str) -> Result<T, String> {
    text.parse().map_err(|_| format!("{text:?} is not a number"))
}

fn hours(text: &str) -> Result<Duration, String> {
    let hours: f64 = number(text)?;
    Duration::try_from_secs_f64(hours * 3600.0).map_err(|_| format!("{text:?} is not a duration"))
}

/// One run of each scenario, with its events if it fails.
fn single(wanted: &SimulatorOptions, seed: u64) -> ExitCode {
    let mut failed = false;
    for scenario in &wanted.scenarios {
        let mut run = SimulationRun::of(scenario, seed);
        (run.keep, run.quiet) = (wanted.keep.clone(), wanted.quiet);
        run.log = wanted.log.unwrap_or(LOG);
        let ended = simulate(&run);
        say!(
            "{run}: {}; {} steps, {:.3} s of virtual time, trace {:016x}",
            ended.failure.as_deref().unwrap_or("no promise is broken"),
            ended.report.steps,
            ended.report.time.as_secs_f64(),
            ended.report.trace
        );
        failed |= ended.failure.is_some();
        if ended.failure.is_some() || wanted.log.is_some() {
            print(&ended);
        }
    }
    ExitCode::from(u8::from(failed))
}

fn print(ended: &blockhaul_simulator::SimulationResult) {
    say!("faults:");
    for (number, what) in &ended.report.chosen {
        say!("  {number}: {what}");
    }
    say!("last events:");
    for line in &ended.report.log {
        say!("  {line}");
    }
}

/// Runs of ascending seeds on several threads, up to the first failure.
fn many(wanted: &SimulatorOptions) -> ExitCode {
    let first = wanted.seed.unwrap_or_else(blockhaul_testkit::rng::seed) & (u64::MAX >> 16);
    let runs = wanted.runs.unwrap_or(if wanted.time.is_some() { u64::MAX } else { 1000 });
    say!("from seed {first}");
    let begun = Instant::now();
    let next = AtomicU64::new(0);
    let made = AtomicU64::new(0);
    let stop = AtomicBool::new(false);
    let found: Mutex<Vec<SimulationRun>> = Mutex::default();
    let faults: Mutex<BTreeMap<&str, u64>> = Mutex::default();
    std::thread::scope(|scope| {
        for _ in 0..wanted.threads {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    let index = next.fetch_add(1, Ordering::Relaxed);
                    let over = wanted.time.is_some_and(|time| begun.elapsed() >= time);
                    if index >= runs || over {
                        break;
                    }
                    for scenario in &wanted.scenarios {
                        let run = SimulationRun::of(scenario, first.wrapping_add(index));
                        made.fetch_add(1, Ordering::Relaxed);
                        let ended = simulate(&run);
                        let mut faults = faults.lock().unwrap_or_else(PoisonError::into_inner);
                        for (_, what) in &ended.report.chosen {
                            *faults.entry(what).or_default() += 1;
                        }
                        if ended.failure.is_some() {
                            stop.store(true, Ordering::Relaxed);
                            found.lock().unwrap_or_else(PoisonError::into_inner).push(run);
                        }
                    }
                }
            });
        }
    });
    let made = made.into_inner();
    let time = begun.elapsed().as_secs_f64();
    say!("{made} runs in {time:.1} s: {:.0} runs a second", made as f64 / time.max(0.001));
    for (what, count) in faults.into_inner().unwrap_or_default() {
        say!("{count:>9}  {what}");
    }
    let found = found.into_inner().unwrap_or_default();
    for run in &found {
        report(wanted, run);
    }
    ExitCode::from(u8::from(!found.is_empty()))
}

/// Prints a failure, with as few faults as are enough for it.
fn report(wanted: &SimulatorOptions, run: &SimulationRun) {
    let run = SimulationRun { log: wanted.log.unwrap_or(LOG), ..run.clone() };
    let ended = simulate(&run);
    say!(
        "{run}: {}",
        ended.failure.as_deref().unwrap_or("not again: it depends on something else")
    );
    if !wanted.shrinks || ended.failure.is_none() {
        return print(&ended);
    }
    let shrunk = shrink(&run);
    let failure = shrunk.ended.failure.as_deref().unwrap_or("none");
    say!(
        "with {} faults of {}: {}",
        shrunk.ended.report.chosen.len(),
        ended.report.chosen.len(),
        failure
    );
    say!("repeat it with: {}", shrunk.run);
    print(&shrunk.ended);
}
