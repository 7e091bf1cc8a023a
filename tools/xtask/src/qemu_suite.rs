//! `cargo xtask qemu-suite`: QEMU's own tests of images, run with Debian's qemu-img and qemu-nbd and
//! with blockhaul in their place.
//!
//! The tests come from Debian's source package, are unpacked below the target directory and used
//! only from there: nothing of them is part of this tree.

use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::peers::PeerDirectory;
use crate::suite::{
    InstallMode, ResultCache, SuitePaths, TestComparison, TestVerdict, exceptions, judge, make_dir,
    read, remove, run_all, write_script,
};
use crate::{TaskResult, run, source};

pub const HELP: &str = "\
cargo xtask qemu-suite [--again] [--release] [--copied] [KIND] [NAME…]

Runs QEMU's tests of images (tests/qemu-iotests) for qcow2 images, raw images, and raw images behind
qemu-nbd twice: with Debian's qemu-img and qemu-nbd among the peers (see `cargo xtask peers`), and with
blockhaul, called by their names. QEMU's qemu-io and qemu-storage-daemon are used in both runs. Prints a
table, and fails when a test that passes with Debian's does not pass with blockhaul, unless it is listed
with a reason in docs/qemu-img.md, and when a listed one passes. Tests that call neither program, and those that need an emulator, are skipped.

With KIND (qcow2, raw, nbd), only tests of this kind; with NAMEs (001, qemu-img-bitmaps), only these.
How tests end with Debian's programs is remembered as long as they are run in the same way; --again asks anew. --release runs an optimised
blockhaul, --copied copies of the program, not symbolic links to it.

The tests are those of Debian trixie's source package, fetched from the mirror of this machine's own
apt sources. They and what they print are below target/qemu-suite.
";

/// The release that the source package comes from: that of the peers.
const SUITE: &str = "trixie";
/// Required prefix of its version: the tests compare messages of the program.
const VERSION: &str = "10.0.";
/// What is tested, and the options of QEMU's program for it.
const KINDS: &[(&str, &[&str])] =
    &[("qcow2", &["-qcow2"]), ("raw", &["-raw"]), ("nbd", &["-raw", "-nbd"])];
/// The programs that are replaced.
const PROGRAMS: &[&str] = &["qemu-img", "qemu-nbd"];
/// Seconds after which a test has failed: on a busy machine.
const PATIENCE: &str = "400";
/// Tests at a time.
const TOGETHER: usize = 2;
/// Folders of the source package that tests use.
const FOLDERS: &[&str] = &["tests/qemu-iotests", "python/qemu"];
/// Exceptions are rows of a table that start with the kind and the name of a test.
const PLACES: SuitePaths =
    SuitePaths { log: "target/qemu-suite/*/log", exceptions: "docs/qemu-img.md" };

/// In the place of an emulator. Tests ask it for machines, formats and devices before they do anything;
/// those that start a machine fail, and are not judged.
const EMULATOR: &str = "\
#!/bin/sh
case \"$*\" in
'-machine help') echo 'Supported machines are:' ;;
*'-drive format=help')
    echo \"Supported formats: $(/usr/bin/qemu-img --help | sed -e '1,/^Supported image formats:/d' -e '/^See /,$d' | tr -s '\\n' ' ')\"
    ;;
*'-device help') echo 'name \"virtio-blk\"' ;;
*) echo \"${0##*/}: there is no emulator here\" >&2; exit 1 ;;
esac
";
/// In the place of bzip2's program.
const BZCAT: &str = "\
#!/usr/bin/python3
import bz2, shutil, sys
shutil.copyfileobj(bz2.open(sys.argv[1]), sys.stdout.buffer)
";

pub fn main(args: &[String]) -> TaskResult {
    let (options, mut names): (Vec<_>, Vec<_>) =
        args.iter().cloned().partition(|arg| arg.starts_with('-'));
    let mut again = false;
    let mut release = false;
    let mut install = InstallMode::Linked;
    for option in &options {
        match option.as_str() {
            "--again" => again = true,
            "--release" => release = true,
            "--copied" => install = InstallMode::Copied,
            _ => return run::no_more(std::slice::from_ref(option)),
        }
    }
    let kinds: Vec<String> = names.extract_if(.., |name| options_of(name).is_some()).collect();
    let peers = PeerDirectory::here();
    peers.ensure(false)?;
    let dir = run::target().join("qemu-suite");
    make_dir(&dir)?;
    source::ensure(&dir, SUITE, "qemu", VERSION)?;
    run::show(&mut run::build(&["blockhaul"], release))?;
    let program = run::target().join(if release { "release" } else { "debug" }).join("blockhaul");
    let original = QemuTests::prepare(&dir, "original", &peers, None)?;
    let ours = QemuTests::prepare(&dir, "blockhaul", &peers, Some((&program, install)))?;
    let tests = original.tests(&kinds, &names)?;
    let memory = dir.join("original.txt");
    let state = original.state();
    let mut original_ends = ResultCache::new(&memory, &state, again);
    original_ends
        .learn(&tests, |some| run_all(some, TOGETHER, |test| original.run(test), |_, _| {}))?;
    println!("{:47} {:9} blockhaul", "test", "original");
    // Tests without a reference result are not run.
    let judged: Vec<String> =
        tests.iter().filter(|test| original_ends.of(test) == TestVerdict::Pass).cloned().collect();
    let tell = |test: &str, end: TestVerdict| println!("{test:47} pass      {}", end.word());
    let ends = run_all(&judged, TOGETHER, |test| ours.run(test), tell)?;
    let row = |test: &String| TestComparison {
        test: test.clone(),
        original: original_ends.of(test),
        ours: ends.get(test).copied(),
    };
    let rows: Vec<TestComparison> = tests.iter().map(row).collect();
    let text = read(&run::workspace().join(PLACES.exceptions))?;
    judge(&rows, &exceptions(&text, is_test), args.is_empty(), &PLACES)
}

/// The options of QEMU's program for a kind of tests.
fn options_of(kind: &str) -> Option<&'static [&'static str]> {
    KINDS.iter().find(|one| one.0 == kind).map(|one| one.1)
}

/// Whether a row of a table is about a test.
fn is_test(name: &str) -> bool {
    name.split_once(' ').is_some_and(|(kind, _)| options_of(kind).is_some())
}

/// A copy of the tests, with either programs.
struct QemuTests {
    dir: PathBuf,
    /// The directory of the peers.
    peers: PathBuf,
    /// Where the tests' output goes.
    log: PathBuf,
}

impl QemuTests {
    /// Copies the tests and makes what they need. `program`: replaces qemu-img and qemu-nbd.
    fn prepare(
        base: &Path,
        name: &str,
        peers: &PeerDirectory,
        program: Option<(&Path, InstallMode)>,
    ) -> Result<QemuTests, String> {
        let dir = base.join(name);
        remove(&dir)?;
        let bench = QemuTests { log: dir.join("log"), dir, peers: peers.dir().to_path_buf() };
        for folder in ["log", "bin", "real", "called", "tests", "python"] {
            make_dir(&bench.dir.join(folder))?;
        }
        for folder in FOLDERS {
            let from = base.join("source").join(folder);
            let to = bench.dir.join(folder);
            run::quiet(Command::new("cp").arg("-R").arg(from).arg(to))?;
        }
        write_script(&bench.dir.join("bin/emulator"), EMULATOR)?;
        write_script(&bench.dir.join("bin/bzcat"), BZCAT)?;
        for name in PROGRAMS {
            let real = match program {
                None => PathBuf::from("/usr/bin").join(name),
                Some((program, install)) => {
                    let real = bench.dir.join("real").join(name);
                    install.put(program, &real)?;
                    real
                }
            };
            // Notes that the test has called it.
            let text = format!(
                "#!/bin/bash\n: > \"$BLOCKHAUL_CALLED\"\nexec -a {name} '{}' \"$@\"\n",
                real.display()
            );
            write_script(&bench.dir.join("bin").join(name), &text)?;
        }
        Ok(bench)
    }

    /// The tests of these kinds that `names` choose, or all, as `KIND NAME`.
    fn tests(&self, kinds: &[String], names: &[String]) -> Result<Vec<String>, String> {
        let mut tests = Vec::new();
        for (kind, _) in KINDS {
            if !kinds.is_empty() && !kinds.iter().any(|one| one == kind) {
                continue;
            }
            let list = run::quiet(&mut self.check(kind, &["-n"], &self.dir))?;
            let found = list.lines().map(|name| name.rsplit('/').next().unwrap_or(name));
            let chosen =
                found.filter(|name| names.is_empty() || names.iter().any(|one| one == name));
            tests.extend(chosen.map(|name| format!("{kind} {name}")));
        }
        if tests.is_empty() { Err("no test has such a name".into()) } else { Ok(tests) }
    }

    /// What results depend on besides the tests: results of another runner may be wrong here.
    fn state(&self) -> String {
        let mut hasher = DefaultHasher::new();
        (EMULATOR, BZCAT, PROGRAMS, FOLDERS, VERSION).hash(&mut hasher);
        for (kind, _) in KINDS {
            // Without the places of this tree.
            let mut command = format!("{:?}", self.check(kind, &[], Path::new("called")));
            for dir in [&self.dir, &self.peers] {
                command = command.replace(&dir.display().to_string(), "");
            }
            command.hash(&mut hasher);
        }
        format!("QEMU {VERSION}, run as {:016x}", hasher.finish())
    }

    /// Runs `KIND NAME`. A test that calls neither program is skipped.
    fn run(&self, test: &str) -> Result<TestVerdict, String> {
        let (kind, name) = test.split_once(' ').unwrap_or(("raw", test));
        let log = self.log.join(format!("{kind}-{name}.log"));
        let called = self.dir.join("called").join(format!("{kind}-{name}"));
        let end = TestVerdict::of(test, &mut self.check(kind, &["-tap", name], &called), &log)?;
        if end == TestVerdict::Pass && (!called.exists() || is_skipped(&read(&log)?)) {
            return Ok(TestVerdict::Skip);
        }
        Ok(end)
    }

    /// QEMU's program that runs tests, among the peers.
    fn check(&self, kind: &str, args: &[&str], called: &Path) -> Command {
        let mut command = Command::new(self.peers.join("enter"));
        // Inside, as entering puts the peers first.
        let script = "PATH=\"$PATH:$0\" exec \"$@\"";
        let bin = self.dir.join("bin");
        command.args(["sh", "-c", script]).arg(&bin).args(["timeout", "--kill-after=10", PATIENCE]);
        command.args(["python3", "./check"]).args(options_of(kind).unwrap_or_default()).args(args);
        command.current_dir(self.dir.join("tests/qemu-iotests"));
        for (variable, name) in [
            ("QEMU_PROG", "emulator"),
            ("QEMU_IMG_PROG", "qemu-img"),
            ("QEMU_NBD_PROG", "qemu-nbd"),
        ] {
            command.env(variable, bin.join(name));
        }
        command.env("QEMU_IO_PROG", "/usr/bin/qemu-io");
        command.env("QSD_PROG", "/usr/bin/qemu-storage-daemon");
        command.env("TEST_DIR", self.dir.join("scratch")).env("BLOCKHAUL_CALLED", called);
        // The tested programs do not use Cargo's own libraries.
        command.env_remove("LD_LIBRARY_PATH").env_remove("PYTHONPATH");
        command
    }
}

/// Whether what `check -tap` printed about one test says that it cannot run here.
fn is_skipped(log: &str) -> bool {
    log.lines().any(|line| line.starts_with("ok ") && line.ends_with(" # SKIP"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exceptions_name_kind_and_test() {
        let text = "| `qcow2 026` | why |\n| `info` | x |\n| `raw tests-x` | y |\n";
        let found = exceptions(text, is_test);
        assert_eq!(found.keys().collect::<Vec<_>>(), ["qcow2 026", "raw tests-x"]);
    }

    #[test]
    fn what_cannot_run_is_skipped() {
        assert!(is_skipped("TAP version 13\n1..1\nok raw 002 # SKIP\n"));
        assert!(!is_skipped("TAP version 13\n1..1\n# SKIP\nok raw 002\n"));
    }
}
