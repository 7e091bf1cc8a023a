//! `cargo xtask bench`: builds blockhaul for speed and measures it next to the peers; the documents
//! and checks that belong to it.

use std::process::Command;

use crate::peers::Peers;
use crate::{Outcome, guard, pages, run};

pub const HELP: &str = "\
cargo xtask bench SCENARIO… [OPTIONS]
cargo xtask bench docs
cargo xtask bench --pages [DIR…] [--shots DIR]
cargo xtask bench --guard [--base COMMIT] [--threshold PERCENT]

Unpacks the peers, builds blockhaul for speed, and runs `blockhaul bench run SCENARIO… OPTIONS`
among the peers, so that entering their root is not timed. `cargo xtask bench copy` is the first to
try; `cargo xtask bench -- list` lists the scenarios. OPTIONS are those of `blockhaul bench run`, for
example --full, --runs N, --label TEXT.

  docs      writes the figures in README.md and docs/performance.md from the newest results
  --pages   opens the pages of results (all under bench/results, or those in DIR…) in headless
            Chromium, 360 and 1280 pixels wide, light and dark, and fails where something is wider
            than the window or hard to read. Left out, with the reason, where there is no Chromium
            --shots DIR keeps pictures of what was seen
  --guard   counts the instructions (valgrind) of fixed workloads, at this commit and at the base,
            by default where it left main, or the commit before; fails if one became more expensive
            by more than the threshold (3 %). Counts vary by less than 1 % between runs even on a
            busy machine, where times would say nothing. Left out, with the reason, without valgrind
";

pub fn main(args: &[String]) -> Outcome {
    match args.first().map(String::as_str) {
        Some("docs") => {
            run::no_more(&args[1..])?;
            return run::show(run::cargo("run").args([
                "-q",
                "-p",
                "blockhaul",
                "--",
                "bench",
                "docs",
            ]));
        }
        Some("--pages") => return pages::main(&args[1..]),
        Some("--guard") => return guard::main(&args[1..]),
        _ => {}
    }
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
