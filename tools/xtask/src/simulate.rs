//! `cargo xtask simulate`: server, client and engine in virtual time, with faults by a seed.

use crate::{TaskResult, run};

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

pub fn main(args: &[String]) -> TaskResult {
    let args = match args.split_first() {
        Some((first, rest)) if first == "--" => rest,
        _ => args,
    };
    let mut command = run::cargo("run");
    command.args(["-q", "--release"]).args(PACKAGE).arg("--").args(args);
    run::show(command.env("GLIBC_TUNABLES", KEEP_MEMORY))
}

/// Keeps freed memory: a run frees its disks, and the next one needs as much. Giving it back to the kernel and
/// taking it again is a tenth of the processor time.
const KEEP_MEMORY: &str =
    "glibc.malloc.trim_threshold=1073741824:glibc.malloc.mmap_threshold=33554432";

/// Turns the simulated driver on where the whole workspace is selected.
pub const FEATURE: &str = "--features=blockhaul-simulator/simulation";

/// The package, relative to the workspace.
pub const DIRECTORY: &str = "tools/simulator";
