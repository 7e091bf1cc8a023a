//! `cargo xtask fuzz`: the fuzz targets, coverage-guided if the toolchain supports it and
//! seeded from a corpus everywhere.

use std::process::Command;

use crate::{TaskResult, run};

pub const HELP: &str = "\
cargo xtask fuzz [TARGET] [--seconds N] [--seed N] [--stable] [--list]

Fuzzes one target, or each in turn. Where a nightly toolchain with cargo-fuzz is installed the runs
are coverage-guided (libFuzzer, workspace fuzz/); elsewhere a seeded runner on the stable toolchain
mutates the corpus. A failing input is printed or kept by the runner, with how to run it again.

  --seconds N   time for each target (default 20)
  --seed N      start of the random numbers; a run with the same seed makes the same inputs
  --stable      the stable runner even where cargo-fuzz is installed; it has the protocol's targets,
                and tests of their crates mutate the inputs of the others
  --list        print the targets and do nothing else
";

/// The parsed command line.
#[derive(Debug, Default, PartialEq, Eq)]
struct Wish {
    target: Option<String>,
    seconds: Option<u64>,
    seed: Option<u64>,
    stable: bool,
    list: bool,
}

/// Default seconds for each target.
const DEFAULT_SECONDS: u64 = 20;

/// The table of the targets that both runners have.
const TABLE: &str = "crates/ground/wire/src/fuzz.rs";

/// The table of the other targets. Their seeded forms are tests of their crates.
const OTHERS: &str = "fuzz/fuzz_targets/others.rs";

/// Where inputs are stored in the tree, one directory per target, and their maximum length in bytes:
/// files with headers are longer than messages.
const CORPORA: [(&str, u64); 2] =
    [("crates/ground/wire/tests/corpus", 4096), ("fuzz/corpus", 16384)];

/// The toolchain that cargo-fuzz needs.
const NIGHTLY: &str = "nightly";

pub fn main(args: &[String]) -> TaskResult {
    let wish = Wish::parse(args)?;
    let mut known = targets(TABLE)?;
    let guided = !wish.stable && have_cargo_fuzz();
    if guided || wish.list {
        known.extend(targets(OTHERS)?);
    }
    if wish.list {
        known.iter().for_each(|name| println!("{name}"));
        return Ok(());
    }
    if let Some(name) = &wish.target
        && !known.contains(name)
    {
        let more = if guided { "" } else { "; others need cargo-fuzz" };
        return Err(format!("no fuzz target '{name}'; the targets are {}{more}", known.join(", ")));
    }
    if !guided {
        println!("fuzzing with the seeded runner of the stable toolchain");
        return run_stable(&wish);
    }
    println!("fuzzing with cargo-fuzz, guided by coverage");
    for target in known.iter().filter(|name| wish.target.as_ref().is_none_or(|one| one == *name)) {
        run_guided(target, &wish)?;
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

/// Names of the fuzz targets of a table.
fn targets(table: &str) -> Result<Vec<String>, String> {
    let path = run::workspace().join(table);
    let text = std::fs::read_to_string(&path)
        .map_err(|error| format!("cannot read the fuzz targets in {}: {error}", path.display()))?;
    let names = names_in(&text);
    if names.is_empty() { Err(format!("{table} has no table of fuzz targets")) } else { Ok(names) }
}

/// Names in the table `TARGETS`, whose lines are `("NAME", FUNCTION),`.
fn names_in(text: &str) -> Vec<String> {
    let table = text.lines().skip_while(|line| !line.starts_with("pub const TARGETS"));
    let entries = table.skip(1).take_while(|line| !line.starts_with("];"));
    entries.filter_map(|line| Some(line.split('"').nth(1)?.to_owned())).collect()
}

fn have_cargo_fuzz() -> bool {
    run::have("rustup")
        && run::quiet(Command::new("rustup").args(["run", NIGHTLY, "cargo", "fuzz", "--version"]))
            .is_ok()
}

fn run_guided(target: &str, wish: &Wish) -> TaskResult {
    // New inputs go to the first directory; those of the tree are read only.
    let own = run::target().join("fuzz");
    let found = own.join("corpus").join(target);
    let artifacts = own.join("artifacts").join(target);
    for dir in [&found, &artifacts] {
        std::fs::create_dir_all(dir)
            .map_err(|error| format!("cannot make {}: {error}", dir.display()))?;
    }
    let mut command = Command::new("rustup");
    // The variables of the cargo that runs us point at its own toolchain.
    for name in ["CARGO", "RUSTC", "RUSTDOC", "RUSTUP_TOOLCHAIN", "LD_LIBRARY_PATH"] {
        command.env_remove(name);
    }
    command.current_dir(run::workspace()).env("BLOCKHAUL_FUZZ_TARGET", target);
    command.args(["run", NIGHTLY, "cargo", "fuzz", "run", "--target-dir"]).arg(&own);
    // The parsers have no code in which a memory sanitizer could find errors.
    command.args(["--sanitizer", "none", "parser"]).arg(&found);
    let trees = CORPORA.map(|(corpus, len)| (run::workspace().join(corpus).join(target), len));
    let Some((tree, len)) = trees.into_iter().find(|(tree, _)| tree.is_dir()) else {
        return Err(format!("there is no corpus for the fuzz target '{target}'"));
    };
    command.arg(tree).args(["--", "-timeout=10"]).arg(format!("-max_len={len}"));
    command.arg(format!("-artifact_prefix={}/", artifacts.display()));
    command.arg(format!("-max_total_time={}", wish.seconds.unwrap_or(DEFAULT_SECONDS)));
    if let Some(seed) = wish.seed {
        command.arg(format!("-seed={seed}"));
    }
    println!("target {target}");
    run::show(&mut command)
}

fn run_stable(wish: &Wish) -> TaskResult {
    let mut command = run::loud_cargo("test");
    command.args(["--release", "-p", "blockhaul-wire", "--lib", "fuzz::tests", "--"]);
    command.arg("--nocapture");
    let seconds = wish.seconds.unwrap_or(DEFAULT_SECONDS);
    command.env("BLOCKHAUL_FUZZ_SECONDS", seconds.to_string());
    if let Some(seed) = wish.seed {
        command.env("BLOCKHAUL_FUZZ_SEED", seed.to_string());
    }
    if let Some(target) = &wish.target {
        command.env("BLOCKHAUL_FUZZ_TARGET", target);
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

    #[test]
    fn names_come_from_the_table_alone() {
        let text = "(\"no\", f),\npub const TARGETS: &[Target] = &[\n    (\"a\", fuzz_a),\n    \
            (\"b_32\", fuzz_b_32),\n];\n    (\"no\", f),\n";
        assert_eq!(names_in(text), ["a", "b_32"]);
        assert!(names_in("").is_empty());
    }
}
