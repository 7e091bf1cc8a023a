//! `cargo xtask test`: unpacks the peers, builds everything and runs every test.

use crate::peers::Peers;
use crate::{Outcome, run, simulate, source};

pub const HELP: &str = "\
cargo xtask test [-- ARGS…]

Unpacks the peer programs where they are missing (see `cargo xtask peers`), prints their versions,
builds the whole workspace and runs every test, documentation tests and simulations too. ARGS go to `cargo test`
(`-- interop`, `-- interop -- --nocapture`; `-- -p blockhaul-wire` builds and tests one package).

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
    let ready = peers.ensure(false).and_then(|()| peers.print_versions());
    match ready.and_then(|()| source::main(&[])) {
        Ok(()) => {}
        Err(why) if run::ci() => return Err(why),
        Err(why) => println!("going on without peers: {why}"),
    }
    let mut chosen: Vec<&str> = passed_on.iter().map(String::as_str).collect();
    let mut own = chosen.iter().take_while(|arg| **arg != "--");
    // A choice of packages and the whole workspace exclude each other.
    let whole = !own.any(|arg| arg.starts_with("-p") || arg.starts_with("--package"));
    if whole {
        chosen.insert(0, "--workspace");
        run::show(run::cargo("build").args(["--workspace", "--all-targets"]))?;
    }
    if run::ci() {
        // What is still to be compiled is compiled here, where cargo is quiet about it.
        run::show(run::cargo("test").arg("--no-run").args(&chosen))?;
    }
    let tested = run::show(run::loud_cargo("test").arg("--no-fail-fast").args(&chosen));
    // Another build of the crate `io`: apart from the programs that the other tests run.
    let simulated = if whole && passed_on.is_empty() { simulate::test() } else { Ok(()) };
    tested.and(simulated)
}
