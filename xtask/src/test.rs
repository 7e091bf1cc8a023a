//! `cargo xtask test`: peers, then everything is built and every test is run.

use crate::peers::Peers;
use crate::{Outcome, run};

pub const HELP: &str = "\
cargo xtask test [-- ARGS…]

Unpacks the peer programs where they are missing (see `cargo xtask peers`), prints their versions,
builds the whole workspace and runs every test, documentation tests too. ARGS go to `cargo test`
(`-- -p blockhaul-wire`, `-- interop -- --nocapture`, …).

Without the peers (not a Debian machine, no network) the tests that need them are skipped, each with
a reason; where CI=true or BLOCKHAUL_REQUIRE_PEERS=1 they fail instead.
";

pub fn main(args: &[String]) -> Outcome {
    let passed_on = match args.split_first() {
        None => &[],
        Some((first, rest)) if first == "--" => rest,
        Some(_) => return run::no_more(args),
    };
    let peers = Peers::here();
    match peers.ensure(false).and_then(|()| peers.print_versions()) {
        Ok(()) => {}
        Err(why) if run::ci() => return Err(why),
        Err(why) => println!("going on without peers: {why}"),
    }
    println!("building");
    run::show(cargo("build").args(["--workspace", "--all-targets"]))?;
    let mut tests = cargo("test");
    // A choice of packages and the whole workspace exclude each other.
    let own = passed_on.iter().take_while(|arg| *arg != "--");
    if !own.clone().any(|arg| arg.starts_with("-p") || arg.starts_with("--package")) {
        tests.arg("--workspace");
    }
    run::show(tests.arg("--no-fail-fast").args(passed_on))
}

/// Cargo, quiet about what it compiles in continuous integration: those lines name paths of the
/// machine. The closing lines of test runs are the test programs' own and always appear.
fn cargo(subcommand: &str) -> std::process::Command {
    let mut command = run::cargo(subcommand);
    if run::ci() {
        command.env("CARGO_TERM_QUIET", "true");
    }
    command
}
