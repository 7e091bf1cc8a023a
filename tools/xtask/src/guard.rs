//! `cargo xtask bench --guard`: instructions of fixed workloads, at this commit and at its base.
//!
//! Valgrind counts them, one thread at a time, so that a busy machine does not matter. Each
//! workload is run twice, with few and with many repetitions; the difference is the cost of the
//! work without the startup. Kernel time is not counted.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::{TaskResult, run};

/// A workload, its numbers of repetitions in the first and the second run, and the meaning of one.
const WORKLOADS: &[(&str, u32, u32, &str)] = &[
    ("codec", 200, 1200, "headers and a status, three forms"),
    ("extents", 500, 5500, "a list of 64"),
    ("request", 200, 1200, "a read of 4 KiB, client and server"),
    ("plan", 16, 48, "4 MiB planned and copied to nowhere"),
];

/// Failure threshold in percent: several times the variation of the counts.
const THRESHOLD: f64 = 3.0;

pub fn main(args: &[String]) -> TaskResult {
    let mut base = None;
    let mut threshold = THRESHOLD;
    let mut args = args.iter();
    while let Some(arg) = args.next() {
        let mut value = || args.next().ok_or(format!("{arg} needs a value"));
        match arg.as_str() {
            "--base" => base = Some(value()?.clone()),
            "--threshold" => {
                let text = value()?.trim_end_matches('%');
                threshold =
                    text.parse().map_err(|_| format!("'{text}' is no number of percent"))?;
            }
            _ => return Err(format!("unknown argument '{arg}' (see --help)")),
        }
    }
    if !run::have("valgrind") {
        let why = "valgrind, which counts the instructions, is not there";
        return if run::ci() { Err(why.into()) } else { left_out(why) };
    }
    let git = |args: &[&str]| {
        run::quiet(Command::new("git").current_dir(run::workspace()).args(args))
            .map(|text| text.trim().to_owned())
    };
    let base = match base {
        Some(base) => git(&["rev-parse", "--verify", &format!("{base}^{{commit}}")])?,
        None => {
            let here = git(&["rev-parse", "HEAD"])?;
            match git(&["merge-base", "HEAD", "main"]) {
                Ok(left) if left != here => left,
                _ => git(&["rev-parse", "--verify", "HEAD~1"])?,
            }
        }
    };
    let dir = run::target().join("guard");
    let new = build(&run::workspace(), &dir.join("head"))?;
    let tree = dir.join("base-tree");
    let path = tree.display().to_string();
    if tree.exists() {
        git(&["worktree", "remove", "--force", &path])?;
    }
    git(&["worktree", "add", "--detach", &path, &base])?;
    let old = build(&tree, &dir.join("base"));
    git(&["worktree", "remove", "--force", &path])?;
    let old = old?;
    println!("instructions at {} and here", &base[..base.len().min(12)]);
    let mut worse = Vec::new();
    for (name, few, many, what) in WORKLOADS {
        let after = instructions(&new, name, *few, *many)?;
        let Ok(before) = instructions(&old, name, *few, *many) else {
            println!("  {name:8} {after:12.0}  the base does not have it ({what})");
            continue;
        };
        let percent = 100.0 * (after / before - 1.0);
        println!("  {name:8} {before:12.0} {after:12.0}  {percent:+.2} %  ({what})");
        if percent > threshold {
            worse.push(format!("{name} {percent:+.1} %"));
        }
    }
    if worse.is_empty() {
        Ok(())
    } else {
        Err(format!("more expensive by more than {threshold} %: {}", worse.join(", ")))
    }
}

fn left_out(why: &str) -> TaskResult {
    println!("left out: {why}");
    Ok(())
}

/// Builds blockhaul for counting: optimized, but without the optimizations that take long.
fn build(tree: &Path, target: &Path) -> Result<PathBuf, String> {
    let mut cargo = run::cargo("build");
    // In older trees the workloads are part of blockhaul.
    let homes = ["tools/bench", "crates/programs/bench"];
    let own = homes.iter().any(|home| tree.join(home).join("src/main.rs").is_file());
    let package = if own { "blockhaul-bench" } else { "blockhaul" };
    cargo.current_dir(tree).args(["--release", "-p", package, "--target-dir"]).arg(target);
    let settings = ["lto=\"off\"", "codegen-units=16", "debug=false"];
    for setting in settings {
        cargo.arg("--config").arg(format!("profile.release.{setting}"));
    }
    run::show(&mut cargo)?;
    Ok(target.join("release").join(package))
}

/// Instructions of one repetition of a workload. The program has a short name and no environment: their lengths
/// change where malloc puts memory, and the count of `extents` by 8 %.
fn instructions(program: &Path, name: &str, few: u32, many: u32) -> Result<f64, String> {
    let (Some(folder), Some(file)) = (program.parent(), program.file_name()) else {
        return Err(format!("{} is no program", program.display()));
    };
    let count = |times: u32| -> Result<u64, String> {
        let output = Command::new("valgrind")
            .current_dir(folder)
            .env_clear()
            .args(["--tool=cachegrind", "--cache-sim=no", "--fair-sched=yes"])
            .arg("--cachegrind-out-file=/dev/null")
            .arg(Path::new(".").join(file))
            .args(program.ends_with("blockhaul").then_some("bench"))
            .args(["helper", "work", name, &times.to_string()])
            .output()
            .map_err(|error| format!("cannot start valgrind: {error}"))?;
        let text = String::from_utf8_lossy(&output.stderr);
        let found = counted(&text).filter(|_| output.status.success());
        found.ok_or_else(|| format!("workload {name}: {}", text.lines().last().unwrap_or_default()))
    };
    let first = count(few)?;
    let second = count(many)?;
    Ok(second.saturating_sub(first) as f64 / f64::from(many - few))
}

/// The number in `==1== I refs:  1,234`.
fn counted(text: &str) -> Option<u64> {
    let line = text.lines().find(|line| line.contains("I ") && line.contains("refs:"))?;
    line.rsplit_once("refs:")?.1.trim().replace(',', "").parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_count_is_found_in_what_valgrind_prints() {
        assert_eq!(counted("==7== \n==7== I   refs:      1,234,567\n==7== "), Some(1_234_567));
        assert_eq!(counted("==7== I refs:  99\n"), Some(99));
        assert_eq!(counted("valgrind: no such file"), None);
    }
}
