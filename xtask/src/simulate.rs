//! `cargo xtask simulate`: server, client and engine in virtual time, with faults by a seed.

use std::process::{Child, Command};

use crate::{Outcome, run};

pub const HELP: &str = "\
cargo xtask simulate [OPTION…] [SCENARIO…]

Runs server, client and engine on one thread in virtual time, with faults by a seed, and checks that
no promise is broken: no wrong byte, nothing lost that was flushed, nothing that hangs. A failure is
repeated with fewer faults and printed with the command that repeats it. docs/simulation.md explains
it; `cargo xtask simulate -- --help` lists options and scenarios.

  cargo xtask simulate                       1000 runs of each scenario, with new seeds
  cargo xtask simulate --hours 8             as many as fit
  cargo xtask simulate --seed 17 copy        one run
";

/// The package, and what turns the simulated driver on.
const PACKAGE: &[&str] = &["-p", "blockhaul-simulator", "--features", "simulation"];

pub fn main(args: &[String]) -> Outcome {
    let args = match args.split_first() {
        Some((first, rest)) if first == "--" => rest,
        _ => args,
    };
    run::show(run::cargo("run").args(["-q", "--release"]).args(PACKAGE).arg("--").args(args))
}

/// Turns the simulated driver on where the whole workspace is selected.
pub const FEATURE: &str = "--features=blockhaul-simulator/simulation";

/// The test programs that need it: of the crates `simulator` and `io`. All packages but the program are
/// selected: dependencies have the features, and are the compiled libraries, that the other tests use, and
/// the program is built with the few features that the simulator asks for.
const TESTS: &[&str] = &[
    "--workspace",
    "--exclude=blockhaul",
    FEATURE,
    "--test=oracle",
    "--test=process",
    "--test=scenarios",
    "--test=simulation",
    "--test=waiting",
];

/// The test programs while they are built.
pub struct Building {
    command: Command,
    child: Child,
}

/// Starts to build the test programs, with what other processes leave of the processors.
pub fn build_tests() -> Result<Building, String> {
    let cargo = run::cargo("test");
    let mut command = Command::new("nice");
    command.args(["-n", "19"]).arg(cargo.get_program()).args(cargo.get_args());
    command.args(["--no-run"]).args(TESTS).current_dir(run::workspace());
    for (name, value) in cargo.get_envs() {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
    run::announce(&command);
    let child = run::start(&mut command)?;
    Ok(Building { command, child })
}

impl Building {
    /// Runs CI's share of the runs, once the programs are built.
    pub fn test(mut self) -> Outcome {
        run::wait(&self.command, &mut self.child)?;
        run::show(run::loud_cargo("test").args(TESTS))
    }
}
