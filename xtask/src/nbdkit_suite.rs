//! `cargo xtask nbdkit-suite`: nbdkit's own shell tests, run with Debian's nbdkit and with blockhaul in
//! its place.
//!
//! The tests come from Debian's source package, are unpacked below the target directory and used
//! only from there: nothing of them is part of this tree.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::sync::Mutex;

use crate::nbdkit_bench::Bench;
use crate::peers::Peers;
use crate::suite::{End, Install, at, exceptions, make_dir, read};
use crate::{Outcome, run, source};

pub const HELP: &str = "\
cargo xtask nbdkit-suite [--again] [--release] [--copied] [--python-host] [NAME…]

Runs nbdkit's own shell tests twice: with Debian's nbdkit among the peers (see `cargo xtask peers`), and
with blockhaul, called by its name. Prints a table, and fails when a test that passes with Debian's does
not pass with blockhaul, unless it is listed with a reason in docs/coming-from-nbdkit.md, and when a
listed one passes. With NAMEs, only tests whose names contain one of them. How tests end with Debian's
nbdkit is remembered; --again asks anew. --release runs an optimised blockhaul, --copied a copy of the
program whose file is called nbdkit, not a symbolic link to it. --python-host hides nbdkit's plugin for
Python from blockhaul, which then runs plugins in Python itself; without NAMEs it runs the tests about Python.

The tests are those of Debian trixie's source package, fetched from the mirror of this machine's own
apt sources, and need a C compiler. They and what they print are below target/nbdkit-suite.
";

/// Packages that tests need besides the peers: programs that they call, and a compiler for plugins
/// in C.
const HELPERS: &str = "python3-packaging lzip expect libc-bin gcc g++ libc6-dev";
/// Seconds after which a test has failed: on a busy machine.
const PATIENCE: &str = "300";
/// Scripts that look like tests and are parts of others.
const PARTS: &[&str] = &["test-shell.sh", "test-multi-conn-plugin.sh"];
/// Tests at a time.
const TOGETHER: usize = 2;
/// Where exceptions are listed: rows of a table that start with the name of a test.
const EXCEPTIONS: &str = "docs/coming-from-nbdkit.md";
/// The tests of plugins with old interfaces, each by a run of one script.
const OLD: &[&str] = &["version", "help", "dump", "nbd"];
const OLD_PREFIX: &str = "test-old-plugins-";

pub fn main(args: &[String]) -> Outcome {
    let (options, mut names): (Vec<_>, Vec<_>) =
        args.iter().cloned().partition(|arg| arg.starts_with('-'));
    let mut again = false;
    let mut release = false;
    let mut install = Install::Linked;
    let mut python_host = false;
    for option in &options {
        match option.as_str() {
            "--again" => again = true,
            "--release" => release = true,
            "--copied" => install = Install::Copied,
            "--python-host" => python_host = true,
            _ => return run::no_more(std::slice::from_ref(option)),
        }
    }
    let dir = run::target().join("nbdkit-suite");
    let peers = Peers::with(HELPERS, dir.join("peers"));
    peers.ensure(false)?;
    let source = run::target().join("nbdkit");
    make_dir(&source)?;
    source::ensure_nbdkit(&source)?;
    let mut build = run::cargo("build");
    build.args(["-p", "blockhaul"]).args(release.then_some("--release"));
    run::show(&mut build)?;
    let program = run::target().join(if release { "release" } else { "debug" }).join("blockhaul");
    let from = source.join("source");
    let at = peers.dir();
    let original = Bench::prepare(&dir, "original", at, &from, None)?;
    let mut ours = match install {
        Install::Linked => Bench::prepare(&dir, "blockhaul", at, &from, Some(&program))?,
        Install::Copied => {
            let folder = dir.join("copy");
            make_dir(&folder)?;
            let copy = folder.join("nbdkit");
            // It is made anew for each run, and one that runs cannot be written over.
            let _ = fs::remove_file(&copy);
            install.put(&program, &copy)?;
            Bench::prepare(&dir, "blockhaul-copied", at, &from, Some(&copy))?
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
    let mut remembered = if again { BTreeMap::new() } else { recall(&memory) };
    let exceptions = exceptions(&read(&run::workspace().join(EXCEPTIONS))?);
    let unknown: Vec<String> =
        tests.iter().filter(|test| !remembered.contains_key(*test)).cloned().collect();
    if !unknown.is_empty() {
        println!("with Debian's nbdkit: {} tests", unknown.len());
        // Printed as it arrives: it takes a quarter of an hour.
        for some in unknown.chunks(REMEMBERED) {
            remembered.extend(run_all(&original, some, |_, _| {})?);
            remember(&memory, &remembered)?;
        }
    }
    println!("{:47} {:9} blockhaul", "test", "original");
    // Tests without a reference result are not run.
    let judged: Vec<String> =
        tests.iter().filter(|test| remembered.get(*test) == Some(&End::Pass)).cloned().collect();
    let ends = run_all(&ours, &judged, |test, end| println!("{test:47} pass      {}", end.word()))?;
    let rows: Vec<Row> = tests
        .iter()
        .map(|test| Row {
            test: test.clone(),
            original: remembered.get(test).copied().unwrap_or(End::Fail),
            ours: ends.get(test).copied(),
        })
        .collect();
    judge(&rows, &exceptions, names.is_empty())
}

/// Number of tests after which the results with Debian's nbdkit are saved.
const REMEMBERED: usize = 32;

/// A test and its result with either program; with ours only if it passes with Debian's.
struct Row {
    test: String,
    original: End,
    ours: Option<End>,
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

/// Runs tests, a few at a time, and reports each.
fn run_all(
    bench: &Bench,
    tests: &[String],
    tell: impl Fn(&str, End) + Sync,
) -> Result<BTreeMap<String, End>, String> {
    let left = Mutex::new(tests.iter());
    let ends = Mutex::new(BTreeMap::new());
    let next = || left.lock().expect("no panic under this lock").next();
    let work = || -> Result<(), String> {
        while let Some(test) = next() {
            let end = run_one(bench, test)?;
            tell(test, end);
            ends.lock().expect("no panic under this lock").insert(test.clone(), end);
        }
        Ok(())
    };
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..TOGETHER).map(|_| scope.spawn(work)).collect();
        workers.into_iter().try_for_each(|worker| worker.join().expect("no panic in a worker"))
    })?;
    Ok(ends.into_inner().expect("no panic under this lock"))
}

fn run_one(bench: &Bench, test: &str) -> Result<End, String> {
    let path = bench.log.join(test.replace(".sh", ".log"));
    let old = test.strip_prefix(OLD_PREFIX).map(|rest| rest.trim_end_matches(".sh"));
    let script = match old {
        Some(_) => "./test-old-plugins.sh".to_string(),
        None => format!("./{test}"),
    };
    let mut words = vec!["--kill-after=10", PATIENCE, "bash", &script];
    words.extend(old);
    End::of(test, &mut bench.command("timeout", &words), &path)
}

/// Prints the sums and the verdict. `all`: every test was run, so that exceptions can be checked,
/// too.
fn judge(rows: &[Row], exceptions: &BTreeMap<String, String>, all: bool) -> Outcome {
    let count = |end| rows.iter().filter(|row| row.original == end).count();
    let [pass, skip, fail] = End::ALL.map(count);
    println!("original: {pass} pass, {skip} skip, {fail} fail");
    let ours = |end| rows.iter().filter(|row| row.ours == Some(end)).count();
    let [both, skip, fail] = End::ALL.map(ours);
    println!("of the {pass} that pass, with blockhaul: {both} pass, {skip} skip, {fail} fail");
    let mut wrong = Vec::new();
    for row in rows.iter().filter(|row| row.original == End::Pass) {
        match (row.ours, exceptions.get(&row.test)) {
            (Some(End::Pass), Some(_)) => wrong.push(format!("{} passes but is listed", row.test)),
            (Some(End::Pass), None) => {}
            (_, Some(reason)) => println!("{}: listed: {reason}", row.test),
            (end, None) => {
                wrong.push(format!("{}: {}", row.test, end.map_or("not run", End::word)))
            }
        }
    }
    for name in exceptions.keys().filter(|_| all) {
        if !rows.iter().any(|row| row.test == *name) {
            wrong.push(format!("{name} is listed and no such test exists"));
        }
    }
    if pass == 0 {
        return Err("no test passes with Debian's nbdkit: see target/nbdkit-suite/original".into());
    }
    if wrong.is_empty() {
        return Ok(());
    }
    Err(format!(
        "{}; what the tests print is in target/nbdkit-suite/*/log, exceptions are listed in \
         {EXCEPTIONS}",
        wrong.join(", ")
    ))
}

fn recall(path: &Path) -> BTreeMap<String, End> {
    let text = fs::read_to_string(path).unwrap_or_default();
    let row = |line: &str| {
        let (test, word) = line.split_once(' ')?;
        let end = End::ALL.into_iter().find(|end| end.word() == word)?;
        Some((test.to_owned(), end))
    };
    text.lines().filter_map(row).collect()
}

fn remember(path: &Path, ends: &BTreeMap<String, End>) -> Outcome {
    let text: String = ends.iter().map(|(test, end)| format!("{test} {}\n", end.word())).collect();
    fs::write(path, text).map_err(|error| at("write", path, &error))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(test: &str, original: End, ours: Option<End>) -> Row {
        Row { test: test.into(), original, ours }
    }

    #[test]
    fn what_passes_with_the_original_only_is_wrong_unless_listed() {
        let listed = exceptions("| `test-b.sh` | why |");
        assert_eq!(listed["test-b.sh"], "why");
        let fine = [
            row("test-a.sh", End::Pass, Some(End::Pass)),
            row("test-b.sh", End::Pass, Some(End::Fail)),
            row("test-c.sh", End::Skip, None),
        ];
        assert_eq!(judge(&fine, &listed, true), Ok(()));
        assert!(judge(&fine, &BTreeMap::new(), true).unwrap_err().contains("test-b.sh: FAIL"));
        let passes = [row("test-b.sh", End::Pass, Some(End::Pass))];
        assert!(judge(&passes, &listed, true).unwrap_err().contains("is listed"));
        let gone = [row("test-a.sh", End::Pass, Some(End::Pass))];
        assert!(judge(&gone, &listed, true).unwrap_err().contains("no such test"));
        assert_eq!(judge(&gone, &listed, false), Ok(()));
        let none = [row("test-a.sh", End::Fail, None)];
        assert!(judge(&none, &BTreeMap::new(), true).is_err());
    }

    #[test]
    fn ends_are_remembered() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("ends");
        let ends = BTreeMap::from([("a.sh".to_string(), End::Pass), ("b.sh".into(), End::Skip)]);
        remember(&path, &ends).unwrap();
        assert_eq!(recall(&path), ends);
        assert!(recall(&dir.path().join("none")).is_empty());
    }
}
