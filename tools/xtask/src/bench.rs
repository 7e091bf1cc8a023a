//! `cargo xtask bench`: builds blockhaul for speed and measures it next to the peers; also the
//! related documents and checks.

use std::ffi::OsString;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

use crate::peers::PeerDirectory;
use crate::{TaskResult, guard, run};

pub const HELP: &str = "\
cargo xtask bench SCENARIO… [OPTIONS]
cargo xtask bench docs
cargo xtask bench --guard [--base COMMIT] [--threshold PERCENT]

Unpacks the peers, builds blockhaul for speed, and runs `blockhaul bench run SCENARIO… OPTIONS`
among the peers, so that entering their root is not timed. `cargo xtask bench copy` is the first to
try; `cargo xtask bench -- list` lists the scenarios. OPTIONS are those of `blockhaul bench run`, for
example --full, --runs N, --label TEXT.

  docs      writes the figures in README.md and docs/performance.md from the newest results
  --guard   counts the instructions (valgrind) of fixed workloads, at this commit and at the base,
            by default where it left main, or the commit before; fails if one became more expensive
            by more than the threshold (3 %). Counts vary by less than 1 % between runs even on a
            busy machine, where times would say nothing. Left out, with the reason, without valgrind
";

pub fn main(args: &[String]) -> TaskResult {
    match args.first().map(String::as_str) {
        Some("docs") => {
            run::no_more(&args[1..])?;
            return run::show(run::cargo("run").args([
                "-q",
                "-p",
                "blockhaul-bench",
                "--",
                "docs",
            ]));
        }
        Some("--guard") => return guard::main(&args[1..]),
        _ => {}
    }
    let peers = PeerDirectory::here();
    peers.ensure(false)?;
    run::show(&mut run::build(&["blockhaul", "blockhaul-bench"], true))?;
    let commit = run::quiet(Command::new("git").args(["rev-parse", "HEAD"]));
    let mut bench = Command::new(run::target().join("peers/enter"));
    bench.current_dir(run::workspace());
    if let Some(path) = with_perf(&run::target().join("bench-tools"))? {
        bench.env("PATH", path);
    }
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

/// PATH with a directory appended that has the machine's perf(1): it belongs to the kernel, not to
/// the peers, whose `/usr` hides it. It runs in this process's own mount namespace, which root may
/// enter. `None`: this machine has none.
fn with_perf(dir: &Path) -> Result<Option<OsString>, String> {
    let path = env::var_os("PATH").unwrap_or_default();
    let mut folders: Vec<PathBuf> = env::split_paths(&path).collect();
    let found = folders.iter().map(|folder| folder.join("perf")).find(|perf| perf.is_file());
    let Some(perf) = found.filter(|perf| perf.is_absolute()) else { return Ok(None) };
    let failed = |error| format!("cannot write {}: {error}", dir.display());
    fs::create_dir_all(dir).map_err(failed)?;
    let wrapper = dir.join("perf");
    fs::write(&wrapper, wrapper_text(std::process::id(), &perf)).map_err(failed)?;
    fs::set_permissions(&wrapper, fs::Permissions::from_mode(0o755)).map_err(failed)?;
    folders.push(dir.to_path_buf());
    env::join_paths(folders).map(Some).map_err(|error| format!("PATH: {error}"))
}

fn wrapper_text(here: u32, perf: &Path) -> String {
    let perf = perf.display().to_string().replace('\'', "'\\''");
    format!("#!/bin/sh\nexec nsenter --mount=/proc/{here}/ns/mnt -- '{perf}' \"$@\"\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_wrapper_runs_what_it_is_given_with_its_arguments() {
        let dir = tempfile::tempdir().unwrap();
        let perf = dir.path().join("per'f");
        fs::write(&perf, "#!/bin/sh\necho \"$2\"\n").unwrap();
        fs::set_permissions(&perf, fs::Permissions::from_mode(0o755)).unwrap();
        // Entering needs permission: that word means it here.
        let text = wrapper_text(std::process::id(), &perf).replace("nsenter --mount", "env A");
        let text = text.replace(" -- ", " ");
        let output = Command::new("sh").args(["-c", &text, "perf", "stat", "a b"]).output();
        assert_eq!(output.unwrap().stdout, b"a b\n");
    }
}
