//! `cargo xtask simulate`: server, client and engine in virtual time, with faults by a seed.

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

/// CI's share of the runs.
pub fn test() -> Outcome {
    run::show(run::loud_cargo("test").args(TESTS))
}
