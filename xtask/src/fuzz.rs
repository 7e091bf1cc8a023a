//! `cargo xtask fuzz`: the parsers' fuzz targets, coverage-guided where the toolchain allows and
//! seeded from a corpus everywhere.

use std::path::PathBuf;
use std::process::Command;

use crate::{Outcome, run};

pub const HELP: &str = "\
cargo xtask fuzz [TARGET] [--seconds N] [--seed N] [--stable] [--list]

Fuzzes one parser, or each in turn. Where a nightly toolchain with cargo-fuzz is installed the runs
are coverage-guided (libFuzzer, workspace fuzz/); elsewhere a seeded runner on the stable toolchain
mutates the corpus. A failing input is printed or kept by the runner, with how to run it again.

  --seconds N   time for each target (default 20)
  --seed N      start of the random numbers; a run with the same seed makes the same inputs
  --stable      the stable runner even where cargo-fuzz is installed
  --list        print the targets and do nothing else
";

/// What the command line asks for.
#[derive(Debug, Default, PartialEq, Eq)]
struct Wish {
    target: Option<String>,
    seconds: Option<u64>,
    seed: Option<u64>,
    stable: bool,
    list: bool,
}

/// Seconds for each target when none are given.
const DEFAULT_SECONDS: u64 = 20;

/// The toolchain that cargo-fuzz needs.
const NIGHTLY: &str = "nightly";

pub fn main(args: &[String]) -> Outcome {
    let wish = Wish::parse(args)?;
    let known = targets()?;
    if wish.list {
        known.iter().for_each(|name| println!("{name}"));
        return Ok(());
    }
    let chosen: Vec<&String> = match &wish.target {
        None => known.iter().collect(),
        Some(name) => vec![known.iter().find(|known| *known == name).ok_or_else(|| {
            format!("no fuzz target '{name}'; the targets are {}", known.join(", "))
        })?],
    };
    let guided = !wish.stable && have_cargo_fuzz();
    let runner = if guided { "cargo-fuzz, coverage-guided" } else { "the seeded stable runner" };
    println!("fuzzing with {runner}: {} targets", chosen.len());
    for target in chosen {
        if guided { run_guided(target, &wish)? } else { run_stable(target, &wish)? }
    }
    Ok(())
}

impl Wish {
    fn parse(args: &[String]) -> Result<Wish, String> {
        let mut wish = Wish::default();
        let mut args = args.iter();
        while let Some(arg) = args.next() {
            let mut number = || {
                let value = args.next().ok_or_else(|| format!("{arg} needs a number"))?;
                value.parse().map_err(|_| format!("{arg} needs a number, not '{value}'"))
            };
            match arg.as_str() {
                "--seconds" => wish.seconds = Some(number()?),
                "--seed" => wish.seed = Some(number()?),
                "--stable" => wish.stable = true,
                "--list" => wish.list = true,
                name if !name.starts_with('-') && wish.target.is_none() => {
                    wish.target = Some(name.to_owned());
                }
                _ => run::no_more(std::slice::from_ref(arg))?,
            }
        }
        Ok(wish)
    }
}

/// Names of the fuzz targets: one file each, of the same name, in fuzz/fuzz_targets.
fn targets() -> Result<Vec<String>, String> {
    let dir = fuzz_dir().join("fuzz_targets");
    let entries = std::fs::read_dir(&dir)
        .map_err(|error| format!("cannot read the fuzz targets in {}: {error}", dir.display()))?;
    let mut names: Vec<String> = entries
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "rs"))
        .filter_map(|path| Some(path.file_stem()?.to_str()?.to_owned()))
        .collect();
    names.sort();
    Ok(names)
}

fn fuzz_dir() -> PathBuf {
    run::workspace().join("fuzz")
}

fn have_cargo_fuzz() -> bool {
    run::have("rustup")
        && run::quiet(Command::new("rustup").args(["run", NIGHTLY, "cargo", "fuzz", "--version"]))
            .is_ok()
}

fn run_guided(target: &str, wish: &Wish) -> Outcome {
    let mut command = Command::new("rustup");
    // The variables of the cargo that runs us point at its own toolchain.
    for name in ["CARGO", "RUSTC", "RUSTDOC", "RUSTUP_TOOLCHAIN", "LD_LIBRARY_PATH"] {
        command.env_remove(name);
    }
    command.current_dir(run::workspace());
    command.args(["run", NIGHTLY, "cargo", "fuzz", "run", target, "--"]);
    command.arg(format!("-max_total_time={}", wish.seconds.unwrap_or(DEFAULT_SECONDS)));
    if let Some(seed) = wish.seed {
        command.arg(format!("-seed={seed}"));
    }
    run::show(&mut command)
}

fn run_stable(target: &str, wish: &Wish) -> Outcome {
    let mut command = run::cargo("test");
    command.args(["--release", "-p", "blockhaul-wire", "--test", "fuzz_smoke", "--", target]);
    let seconds = wish.seconds.unwrap_or(DEFAULT_SECONDS);
    command.env("BLOCKHAUL_FUZZ_SECONDS", seconds.to_string());
    if let Some(seed) = wish.seed {
        command.env("BLOCKHAUL_FUZZ_SEED", seed.to_string());
    }
    run::show(&mut command)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(args: &[&str]) -> Result<Wish, String> {
        Wish::parse(&args.iter().map(|arg| arg.to_string()).collect::<Vec<_>>())
    }

    #[test]
    fn arguments_are_read_in_any_order_and_unknown_ones_refused() {
        let wish = parse(&["--seconds", "3", "reply", "--seed", "9", "--stable"]).unwrap();
        assert_eq!(wish.target.as_deref(), Some("reply"));
        assert_eq!((wish.seconds, wish.seed, wish.stable), (Some(3), Some(9), true));
        assert_eq!(parse(&[]), Ok(Wish::default()));
        assert!(parse(&["a", "b"]).unwrap_err().contains("'b'"));
        assert!(parse(&["--seconds", "x"]).unwrap_err().contains("--seconds"));
        assert!(parse(&["--seed"]).is_err());
        assert!(parse(&["--what"]).is_err());
    }
}
