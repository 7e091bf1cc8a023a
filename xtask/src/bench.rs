//! `cargo xtask bench`: builds blockhaul for speed and measures it next to the peers.

use std::process::Command;

use crate::peers::Peers;
use crate::{Outcome, run};

pub const HELP: &str = "\
cargo xtask bench SCENARIO… [OPTIONS]

Unpacks the peers, builds blockhaul for speed, and runs `blockhaul bench run SCENARIO… OPTIONS`
among the peers, so that entering their root is not timed. `cargo xtask bench copy` is the first to
try; `cargo xtask bench -- list` lists the scenarios. OPTIONS are those of `blockhaul bench run`, for
example --full, --runs N, --label TEXT.
";

pub fn main(args: &[String]) -> Outcome {
    let peers = Peers::here();
    peers.ensure(false)?;
    run::show(run::cargo("build").args(["--release", "-p", "blockhaul"]))?;
    let commit = run::quiet(Command::new("git").args(["rev-parse", "HEAD"]));
    let mut bench = Command::new(run::target().join("peers/enter"));
    bench.current_dir(run::workspace());
    bench.arg(run::target().join("release/blockhaul")).arg("bench");
    match args.split_first() {
        Some((first, rest)) if first == "--" => bench.args(rest),
        _ => {
            bench.arg("run").args(args);
            // There is no git among the peers; without a commit the results say so.
            if let Ok(commit) = commit {
                bench.args(["--commit", commit.trim()]);
            }
            &mut bench
        }
    };
    run::show(&mut bench)
}
