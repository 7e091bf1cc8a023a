//! `cargo xtask libnbd-python`: the tests of libnbd's Python module, run with that module and with
//! `blockhaul.nbd` in its place.
//!
//! The tests come from Debian's source package, are unpacked below the target directory and used
//! only from there: nothing of them is part of this tree.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::libnbd_suite::ensure_source;
use crate::peers::PeerDirectory;
use crate::suite::{
    PEERS, SuitePaths, TestComparison, TestVerdict, at, exceptions, is_script, judge, make_dir,
    read, remove,
};
use crate::{TaskResult, run};

pub const HELP: &str = "\
cargo xtask libnbd-python [NAME…]

Runs the tests of libnbd's Python module twice, with the Python of the peers (see `cargo xtask peers`): with
libnbd's module, and with the package blockhaul, where `import nbd` gives `blockhaul.nbd`. Prints a table, and
fails when a test that passes with libnbd's module does not pass with ours, unless it is listed with a reason in
docs/python.md, and when a listed one passes. With NAMEs, only tests whose file names contain one of them.

The tests are those of Debian trixie's source package, fetched from the mirror of this machine's own apt
sources. They and what they print are below target/libnbd.
";

/// Directories of the source package that the tests use.
const FOLDERS: &[&str] = &["python", "tests"];
/// The folder of the tests.
const TESTS: &str = "python/t";
/// Seconds after which a test has failed: on a busy machine.
const PATIENCE: &str = "120";
/// Exceptions are rows of a table that start with the name of a test.
const PLACES: SuitePaths =
    SuitePaths { log: "target/libnbd/log/python-*", exceptions: "docs/python.md" };
/// What `import nbd` gives instead of libnbd's module.
const ALIAS: &str = "import sys\n\nimport blockhaul.nbd\n\nsys.modules[__name__] = blockhaul.nbd\n";

pub fn main(args: &[String]) -> TaskResult {
    if let Some(option) = args.iter().find(|arg| arg.starts_with('-')) {
        return run::no_more(std::slice::from_ref(option));
    }
    let peers = PeerDirectory::here();
    peers.ensure(false)?;
    let dir = run::target().join("libnbd");
    ensure_source(&dir, &PEERS)?;
    let source = dir.join("source");
    let tests = tests(&source.join(TESTS), args)?;
    let work = dir.join("work/python");
    remove(&work)?;
    make_dir(&work)?;
    for folder in FOLDERS {
        run::quiet(Command::new("cp").arg("-R").arg(source.join(folder)).arg(&work))?;
    }
    let package = package(&dir)?;
    let log = dir.join("log");
    let with = |name: &str, path: Option<PathBuf>| -> Result<LibnbdPythonTests, String> {
        let log = log.join(name);
        remove(&log)?;
        make_dir(&log)?;
        Ok(LibnbdPythonTests {
            tests: work.join(TESTS),
            peers: peers.dir().to_path_buf(),
            path,
            log,
        })
    };
    let original = with("python-libnbd", None)?;
    let ours = with("python-blockhaul", Some(package))?;
    let exceptions = exceptions(&read(&run::workspace().join(PLACES.exceptions))?, is_script);
    let mut rows = Vec::new();
    println!("{:47} {:9} blockhaul", "test", "libnbd");
    for test in tests {
        let with_original = original.run(&test)?;
        let with_ours = ours.run(&test)?;
        println!("{test:47} {:9} {}", with_original.word(), with_ours.word());
        rows.push(TestComparison { test, original: with_original, ours: Some(with_ours) });
    }
    judge(&rows, &exceptions, args.is_empty(), &PLACES)
}

/// The tests that `names` choose, or all.
fn tests(dir: &Path, names: &[String]) -> Result<Vec<String>, String> {
    let entries = fs::read_dir(dir).map_err(|error| at("read", dir, &error))?;
    let mut tests: Vec<String> = entries
        .flatten()
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .filter(|name| {
            name.ends_with(".py") && name.starts_with(|first: char| first.is_ascii_digit())
        })
        .filter(|test| names.is_empty() || names.iter().any(|name| test.contains(name)))
        .collect();
    tests.sort();
    if tests.is_empty() { Err("no test has such a name".into()) } else { Ok(tests) }
}

/// Builds the package and unpacks its wheel beside a module `nbd`; returns the directory for Python's path.
fn package(dir: &Path) -> Result<PathBuf, String> {
    let packages = ["-p", "blockhaul-python-module", "-p", "blockhaul-cli"];
    run::show(run::cargo("build").args(packages))?;
    let at_last = dir.join("package");
    remove(&at_last)?;
    make_dir(&at_last)?;
    let script = run::workspace().join("crates/programs/python/build/blockhaul_build.py");
    let compiled = run::target().join("debug");
    let mut wheel = Command::new("python3");
    wheel.arg(script).arg("wheel").arg(&at_last).arg("--from").arg(compiled);
    let name = run::quiet(&mut wheel)?;
    let wheel = at_last.join(name.trim());
    let mut unpack = Command::new("python3");
    unpack.args(["-m", "zipfile", "-e"]).arg(&wheel).arg(&at_last);
    run::quiet(&mut unpack)?;
    let alias = at_last.join("nbd.py");
    fs::write(&alias, ALIAS).map_err(|error| at("write", &alias, &error))?;
    Ok(at_last)
}

/// The tests with one module.
struct LibnbdPythonTests {
    tests: PathBuf,
    peers: PathBuf,
    /// Where Python finds the module; none: where Debian has it.
    path: Option<PathBuf>,
    log: PathBuf,
}

impl LibnbdPythonTests {
    fn run(&self, test: &str) -> Result<TestVerdict, String> {
        let mut command = Command::new(self.peers.join("enter"));
        command.args(["timeout", "--kill-after=10", PATIENCE, "/usr/bin/python3", "-B", test]);
        command.current_dir(&self.tests).env("LIBNBD_DEBUG", "1").env("srcdir", "..");
        command.env_remove("LD_LIBRARY_PATH").env_remove("PYTHONPATH");
        if let Some(path) = &self.path {
            command.env("PYTHONPATH", path);
        }
        TestVerdict::of(test, &mut command, &self.log.join(test.replace(".py", ".log")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tests_have_numbers() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["200-b.py", "100-a.py", "helper.py", "100-a.txt"] {
            fs::write(dir.path().join(name), "").unwrap();
        }
        assert_eq!(super::tests(dir.path(), &[]).unwrap(), ["100-a.py", "200-b.py"]);
        assert_eq!(super::tests(dir.path(), &["b".into()]).unwrap(), ["200-b.py"]);
        assert!(super::tests(dir.path(), &["c".into()]).is_err());
    }
}
