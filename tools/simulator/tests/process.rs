//! The command that a failure prints repeats the run, in a process of its own.
//!
//! Apart from the other tests: a process that is being started has the sockets of all simulations of this
//! one open for a moment, and delays their ends.
#![allow(clippy::unwrap_used)]

use std::process::{Command, Stdio};

use blockhaul_simulator::{SCENARIOS, SimulationRun, simulate};

#[test]
fn the_same_seed_gives_the_same_events_in_another_process() {
    for scenario in SCENARIOS {
        // None of `hostile` uses TLS here: what happens to changed bytes then depends on random numbers.
        for seed in 2..12 {
            let run = SimulationRun::of(scenario, seed);
            let trace = format!("trace {:016x}", simulate(&run).report.trace);
            let mut command = Command::new(env!("CARGO_BIN_EXE_blockhaul-simulate"));
            let output =
                command.args(["--seed", &seed.to_string(), scenario.name]).output().unwrap();
            assert!(output.status.success(), "{run}");
            let there = String::from_utf8(output.stdout).unwrap();
            assert!(there.contains(&trace), "{trace} here; {there}");
        }
    }
}

/// Nobody reads its output: it ends, with the status of SIGPIPE, and without a panic.
#[test]
fn a_closed_output_ends_the_program() {
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let mut command = Command::new(env!("CARGO_BIN_EXE_blockhaul-simulate"));
    let output = command.arg("--help").stdout(writer).stderr(Stdio::piped()).output().unwrap();
    assert_eq!(output.status.code(), Some(141));
    assert_eq!(String::from_utf8_lossy(&output.stderr), "");
}
