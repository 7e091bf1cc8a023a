//! `cargo xtask libnbd-suite`: libnbd's own tests of nbdcopy and nbdinfo, run with the originals and
//! with blockhaul in their place.
//!
//! The tests come from Debian's source package, are unpacked below the target directory and used
//! only from there: nothing of them is part of this tree.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::peers::PeerDirectory;
use crate::suite::{
    self, InstallMode, NEWEST, PEERS, SuiteEdition, SuitePaths, TestComparison, TestVerdict, at,
    exceptions_of, judge, make_dir, read, remove,
};
use crate::{TaskResult, run, source};

pub const HELP: &str = "\
cargo xtask libnbd-suite [--sid] [--copied] [NAME…]

Runs libnbd's own tests of nbdcopy and nbdinfo twice: with the original programs among the peers (see
`cargo xtask peers`), and with blockhaul, built in release mode and called by their names. Prints a
table, and fails when a test that passes with the original does not pass with blockhaul, unless it is
listed with a reason in docs/coming-from-libnbd.md, and when a listed one passes. With NAMEs, only
tests whose file names contain one of them. --copied puts copies of the program in the place of the
originals, not symbolic links to it.

The tests are those of Debian trixie's source package, and with --sid those of sid's, with its programs; they are
fetched from the mirror of this machine's own apt sources. They and what they print are below target/libnbd or
target/libnbd-sid.
";

/// The version that blockhaul prints under their names: that whose options it has.
const EMULATED: &str = "1.24.4";
/// The directories of tests, and the programs they test.
const FOLDERS: &[&str] = &["copy", "info"];
/// Other directories that the tests need.
const SUPPORT: &[&str] = &["tests", "examples"];
/// The programs that are replaced.
const PROGRAMS: &[&str] = &["nbdcopy", "nbdinfo"];
/// Seconds after which a test has failed.
const PATIENCE: &str = "120";
/// Exceptions are rows of a table that start with the name of a test.
const PLACES: SuitePaths =
    SuitePaths { log: "target/libnbd/log", exceptions: "docs/coming-from-libnbd.md" };

pub fn main(args: &[String]) -> TaskResult {
    let (options, names): (Vec<_>, Vec<_>) =
        args.iter().cloned().partition(|arg| arg.starts_with('-'));
    let (mut install, mut edition) = (InstallMode::Linked, &PEERS);
    for option in &options {
        match option.as_str() {
            "--copied" => install = InstallMode::Copied,
            "--sid" => edition = &NEWEST,
            _ => return run::no_more(std::slice::from_ref(option)),
        }
    }
    let peers = if edition.is_of_peers() { PeerDirectory::here() } else { edition.peers() };
    peers.ensure(false)?;
    let dir = run::target().join(format!("libnbd{}", edition.suffix));
    let enter = peers.dir().join("enter");
    let suite = LibnbdTestDir { dir, enter, original: edition.libnbd.1 };
    ensure_source(&suite.dir, edition)?;
    run::show(&mut run::build(&["blockhaul"], true))?;
    let tests = suite.tests(&names)?;
    let original = suite.prepare("original", None)?;
    let program = run::target().join("release/blockhaul");
    let ours = suite.prepare("blockhaul", Some((&program, install)))?;
    let exceptions = exceptions_of(&read(&run::workspace().join(PLACES.exceptions))?, edition);
    let mut rows = Vec::new();
    println!("{:47} {:9} blockhaul", "test", "original");
    for test in tests {
        let with_original = original.run(&test)?;
        let with_ours = ours.run(&test)?;
        println!("{test:47} {:9} {}", with_original.word(), with_ours.word());
        rows.push(TestComparison { test, original: with_original, ours: Some(with_ours) });
    }
    judge(&rows, &exceptions, names.is_empty(), &PLACES)
}

/// Fetches libnbd's source package and unpacks it into `DIR/source` where it is missing.
pub fn ensure_source(dir: &Path, edition: &SuiteEdition) -> TaskResult {
    source::ensure(dir, edition.suite, "libnbd", edition.libnbd.0)
}

/// The directory with the tests.
struct LibnbdTestDir {
    dir: PathBuf,
    /// Runs a program among the peers.
    enter: PathBuf,
    /// The version that the original programs print.
    original: &'static str,
}

impl LibnbdTestDir {
    /// The tests as `FOLDER/NAME.sh`: those that `names` choose, or all.
    fn tests(&self, names: &[String]) -> Result<Vec<String>, String> {
        let mut tests = Vec::new();
        for folder in FOLDERS {
            let dir = self.dir.join("source").join(folder);
            let entries = fs::read_dir(&dir).map_err(|error| at("read", &dir, &error))?;
            let mut found: Vec<String> = entries
                .flatten()
                .map(|entry| entry.file_name().to_string_lossy().into_owned())
                .filter(|name| name.ends_with(".sh"))
                .map(|name| format!("{folder}/{name}"))
                .collect();
            found.sort();
            tests.append(&mut found);
        }
        tests.retain(|test| names.is_empty() || names.iter().any(|name| test.contains(name)));
        if tests.is_empty() { Err("no test has such a name".into()) } else { Ok(tests) }
    }

    /// A copy of the tests, with `program` in the place of the originals if there is one.
    fn prepare(
        &self,
        name: &str,
        program: Option<(&Path, InstallMode)>,
    ) -> Result<LibnbdTests, String> {
        let dir = self.dir.join("work").join(name);
        remove(&dir)?;
        let bin = dir.join("bin");
        make_dir(&bin)?;
        for program_name in PROGRAMS {
            if let Some((program, install)) = program {
                install.put(program, &bin.join(program_name))?;
            }
        }
        let source = self.dir.join("source");
        for folder in FOLDERS.iter().chain(SUPPORT) {
            run::quiet(Command::new("cp").arg("-R").arg(source.join(folder)).arg(&dir))?;
        }
        let functions = dir.join("tests/functions.sh");
        let template = read(&dir.join("tests/functions.sh.in"))?;
        let text = configured(&template, &dir.display().to_string());
        fs::write(&functions, text).map_err(|error| at("write", &functions, &error))?;
        let log = self.dir.join("log").join(name);
        remove(&log)?;
        make_dir(&log)?;
        let version = if program.is_some() { EMULATED } else { self.original };
        let bench = LibnbdTests { dir, enter: self.enter.clone(), log, version };
        // As libnbd's makefile does it; without it the test with certificates is skipped.
        let keys = "SRCDIR=. CERTTOOL=certtool ./make-pki.sh pki && touch pki/stamp-pki";
        run::quiet(&mut bench.command("tests", "bash", &["-c", keys]))?;
        Ok(bench)
    }
}

/// The value of `@NAME@` in libnbd's `configure`: the directory, else the plain name of the
/// program.
fn configured(template: &str, top: &str) -> String {
    suite::filled(template, |name| match name {
        "abs_top_srcdir" | "abs_top_builddir" => top.to_owned(),
        "PYTHON" => "python3".to_owned(),
        _ => name.to_ascii_lowercase().replace('_', "-"),
    })
}

/// A copy of the tests, ready to be run.
struct LibnbdTests {
    dir: PathBuf,
    /// Runs a program among the peers.
    enter: PathBuf,
    log: PathBuf,
    /// The version that the tested programs are expected to print.
    version: &'static str,
}

impl LibnbdTests {
    fn run(&self, test: &str) -> Result<TestVerdict, String> {
        let (folder, script) = test.split_once('/').unwrap_or((".", test));
        let path = self.log.join(script.replace(".sh", ".log"));
        let script = format!("./{script}");
        let mut command =
            self.command(folder, "timeout", &["--kill-after=10", PATIENCE, "bash", &script]);
        TestVerdict::of(test, &mut command, &path)
    }

    /// A command in a directory of the tests, among the peers, with `bin` first in its search path.
    fn command(&self, folder: &str, program: &str, args: &[&str]) -> Command {
        let mut command = Command::new(&self.enter);
        // Inside, as entering puts the peers first.
        let script = "PATH=\"$0:$PATH\" exec \"$@\"";
        command.args(["sh", "-c", script]).arg(self.dir.join("bin")).arg(program).args(args);
        command.current_dir(self.dir.join(folder));
        command.env("LIBNBD_DEBUG", "1").env("EXPECTED_VERSION", self.version).env("srcdir", ".");
        command.env("PSKTOOL", "psktool").env("QEMU_NBD", "qemu-nbd");
        // The tested programs do not use Cargo's own libraries.
        command.env_remove("LD_LIBRARY_PATH");
        command
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn templates_are_filled_in_as_configure_does() {
        let text = "top=@abs_top_srcdir@ n=@NBDKIT@ p=@PYTHON@ \"$@\" q=@QEMU_STORAGE_DAEMON@ a@b";
        let filled = configured(text, "/t");
        assert_eq!(filled, "top=/t n=nbdkit p=python3 \"$@\" q=qemu-storage-daemon a@b");
    }
}
