//! `cargo xtask nbdkit-suite`: nbdkit's own shell tests, run with Debian's nbdkit and with blockhaul in
//! its place.
//!
//! The tests come from Debian's source package, are unpacked below the target directory and used
//! only from there: nothing of them is part of this tree.

use std::fs;
use std::path::Path;

use crate::nbdkit_bench::NbdkitTests;
use crate::suite::{
    InstallMode, NEWEST, PEERS, ResultCache, SuitePaths, TestComparison, TestVerdict, at,
    exceptions_of, judge, make_dir, read, run_all,
};
use crate::{TaskResult, run, source};

pub const HELP: &str = "\
cargo xtask nbdkit-suite [--sid] [--again] [--release] [--copied] [--python-host] [NAME…]

Runs nbdkit's own shell tests twice: with Debian's nbdkit among the peers (see `cargo xtask peers`), and
with blockhaul, called by its name. Prints a table, and fails when a test that passes with Debian's does
not pass with blockhaul, unless it is listed with a reason in docs/coming-from-nbdkit.md, and when a
listed one passes. With NAMEs, only tests whose names contain one of them. How tests end with Debian's
nbdkit is remembered; --again asks anew. --release runs an optimised blockhaul, --copied a copy of the
program whose file is called nbdkit, not a symbolic link to it. --python-host hides nbdkit's plugin for
Python from blockhaul, which then runs plugins in Python itself; without NAMEs it runs the tests about Python.

The tests are those of Debian trixie's source package, and with --sid those of sid's, with its nbdkit; they are
fetched from the mirror of this machine's own apt sources. They and what they print are below target/nbdkit-suite
or target/nbdkit-suite-sid.
";

/// Seconds after which a test has failed: on a busy machine.
const PATIENCE: &str = "300";
/// Scripts that look like tests and are parts of others.
const PARTS: &[&str] = &["test-shell.sh", "test-multi-conn-plugin.sh"];
/// Tests at a time.
const TOGETHER: usize = 2;
/// Exceptions are rows of a table that start with the name of a test.
const PLACES: SuitePaths =
    SuitePaths { log: "target/nbdkit-suite*/*/log", exceptions: "docs/coming-from-nbdkit.md" };
/// The tests of plugins with old interfaces, each by a run of one script.
const OLD: &[&str] = &["version", "help", "dump", "nbd"];
const OLD_PREFIX: &str = "test-old-plugins-";

pub fn main(args: &[String]) -> TaskResult {
    let (options, mut names): (Vec<_>, Vec<_>) =
        args.iter().cloned().partition(|arg| arg.starts_with('-'));
    let mut again = false;
    let mut release = false;
    let mut install = InstallMode::Linked;
    let mut python_host = false;
    let mut edition = &PEERS;
    for option in &options {
        match option.as_str() {
            "--again" => again = true,
            "--release" => release = true,
            "--copied" => install = InstallMode::Copied,
            "--python-host" => python_host = true,
            "--sid" => edition = &NEWEST,
            _ => return run::no_more(std::slice::from_ref(option)),
        }
    }
    let dir = run::target().join(format!("nbdkit-suite{}", edition.suffix));
    let peers = edition.peers();
    peers.ensure(false)?;
    let source = run::target().join(format!("nbdkit{}", edition.suffix));
    make_dir(&source)?;
    source::ensure_nbdkit(&source, edition)?;
    run::show(&mut run::build(&["blockhaul"], release))?;
    let program = run::target().join(if release { "release" } else { "debug" }).join("blockhaul");
    let from = source.join("source");
    let at = peers.dir();
    let original = NbdkitTests::prepare(&dir, "original", at, &from, None)?;
    let mut ours = match install {
        InstallMode::Linked => NbdkitTests::prepare(&dir, "blockhaul", at, &from, Some(&program))?,
        InstallMode::Copied => {
            let folder = dir.join("copy");
            make_dir(&folder)?;
            let copy = folder.join("nbdkit");
            // It is made anew for each run, and one that runs cannot be written over.
            let _ = fs::remove_file(&copy);
            install.put(&program, &copy)?;
            NbdkitTests::prepare(&dir, "blockhaul-copied", at, &from, Some(&copy))?
        }
    };
    if python_host {
        ours = ours.without_plugin("python")?;
        if names.is_empty() {
            names.push("python".into());
        }
    }
    let tests = tests(&source.join("source/tests"), &names)?;
    let memory = dir.join("original.txt");
    let mut original_ends = ResultCache::new(&memory, "", again);
    let exceptions = exceptions_of(&read(&run::workspace().join(PLACES.exceptions))?, edition);
    original_ends.learn(&tests, |some| {
        run_all(some, TOGETHER, |test| run_one(&original, test), |_, _| {})
    })?;
    println!("{:47} {:9} blockhaul", "test", "original");
    // Tests without a reference result are not run.
    let judged: Vec<String> =
        tests.iter().filter(|test| original_ends.of(test) == TestVerdict::Pass).cloned().collect();
    let tell = |test: &str, end: TestVerdict| println!("{test:47} pass      {}", end.word());
    let ends = run_all(&judged, TOGETHER, |test| run_one(&ours, test), tell)?;
    let row = |test: &String| TestComparison {
        test: test.clone(),
        original: original_ends.of(test),
        ours: ends.get(test).copied(),
    };
    let rows: Vec<TestComparison> = tests.iter().map(row).collect();
    judge(&rows, &exceptions, names.is_empty(), &PLACES)
}

/// The tests that `names` choose, or all: shell scripts, and one script once per old plugin.
fn tests(dir: &Path, names: &[String]) -> Result<Vec<String>, String> {
    let entries = fs::read_dir(dir).map_err(|error| at("read", dir, &error))?;
    let mut tests: Vec<String> = entries
        .flatten()
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .filter(|name| name.starts_with("test-") && name.ends_with(".sh"))
        // Takes an argument: below.
        .filter(|name| name != "test-old-plugins.sh" && !PARTS.contains(&name.as_str()))
        .collect();
    tests.sort();
    let arch = std::env::consts::ARCH;
    let old = dir.join("old-plugins").join(arch).join("Linux");
    let mut versions: Vec<String> = fs::read_dir(&old)
        .map_err(|error| at("read", &old, &error))?
        .flatten()
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .collect();
    versions.sort();
    for version in versions {
        tests
            .extend(OLD.iter().map(|what| format!("{OLD_PREFIX}{arch}-Linux-{version}-{what}.sh")));
    }
    tests.retain(|test| names.is_empty() || names.iter().any(|name| test.contains(name)));
    tests.dedup();
    if tests.is_empty() { Err("no test has such a name".into()) } else { Ok(tests) }
}

fn run_one(bench: &NbdkitTests, test: &str) -> Result<TestVerdict, String> {
    let path = bench.log.join(test.replace(".sh", ".log"));
    let old = test.strip_prefix(OLD_PREFIX).map(|rest| rest.trim_end_matches(".sh"));
    let script = match old {
        Some(_) => "./test-old-plugins.sh".to_string(),
        None => format!("./{test}"),
    };
    let mut words = vec!["--kill-after=10", PATIENCE, "bash", &script];
    words.extend(old);
    TestVerdict::of(test, &mut bench.command("timeout", &words), &path)
}
