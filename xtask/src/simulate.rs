//! `cargo xtask simulate`: server, client and engine in virtual time, with faults by a seed.

use std::fs::File;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread::JoinHandle;

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

/// CI's share of the runs, while it runs.
pub struct Running {
    thread: JoinHandle<Outcome>,
    output: PathBuf,
}

/// Builds and runs the test programs with what other processes leave of the processors. Their time is virtual:
/// it does not matter how long they wait. `directory` gets what they print.
pub fn start_tests(directory: &Path) -> Result<Running, String> {
    let output = directory.join("simulator");
    let cannot = |error| format!("{}: {error}", output.display());
    std::fs::create_dir_all(directory).map_err(cannot)?;
    let written = File::create(&output).map_err(cannot)?;
    let errors = written.try_clone().map_err(cannot)?;
    let thread = std::thread::spawn(move || {
        // What a quiet cargo runs would not name its tests.
        run::wait_for(&mut idle(run::cargo("test").arg("--no-run").args(TESTS)))?;
        let mut tests = idle(run::loud_cargo("test").args(TESTS));
        run::wait_for(tests.stdout(written).stderr(errors))
    });
    Ok(Running { thread, output })
}

/// Gives its process the policy SCHED_IDLE, or else the lowest priority, and becomes the command.
const IDLE: &str = "chrt --idle --pid 0 $$ 2>&- || renice -n 19 $$ >&- 2>&-; exec \"$@\"";

/// The same command when nothing else wants a processor.
fn idle(command: &Command) -> Command {
    let mut idle = Command::new("sh");
    idle.args(["-c", IDLE, "sh"]).arg(command.get_program()).args(command.get_args());
    idle.current_dir(run::workspace());
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => idle.env(name, value),
            None => idle.env_remove(name),
        };
    }
    idle
}

impl Running {
    /// Waits until they have ended, and prints what they have printed.
    pub fn wait(self) -> Outcome {
        println!("+ cargo test {}", TESTS.join(" "));
        let outcome = self.thread.join().unwrap_or_else(|_| Err("a thread has failed".into()));
        let output = std::fs::read(&self.output).unwrap_or_default();
        // A closed standard output does not end the tests.
        let _ = std::io::stdout().write_all(&output);
        outcome
    }
}
