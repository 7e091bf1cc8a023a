//! Common parts of other projects' test suites: the result of a test, runs of several tests, the
//! verdict with its exceptions, and templates that `configure` would fill in.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Mutex;

use crate::peers::{self, PeerDirectory};
use crate::{TaskResult, run};

/// Packages that the tests of nbdkit need besides the peers: programs that they call, and a compiler for plugins in C.
const HELPERS: &str = "python3-packaging lzip expect libc-bin gcc g++ libc6-dev";

/// The status with which a test says that it cannot run here (automake's).
const SKIP: i32 = 77;

/// How a test ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TestVerdict {
    Pass,
    Skip,
    Fail,
}

impl TestVerdict {
    pub const ALL: [TestVerdict; 3] = [TestVerdict::Pass, TestVerdict::Skip, TestVerdict::Fail];

    pub fn word(self) -> &'static str {
        match self {
            TestVerdict::Pass => "pass",
            TestVerdict::Skip => "skip",
            TestVerdict::Fail => "FAIL",
        }
    }

    /// Runs a test, which writes to `log`.
    pub fn of(test: &str, command: &mut Command, log: &Path) -> Result<TestVerdict, String> {
        let file = fs::File::create(log).map_err(|error| at("write", log, &error))?;
        let copy = file.try_clone().map_err(|error| at("write", log, &error))?;
        let status = command.stdin(Stdio::null()).stdout(file).stderr(copy).status();
        let status = status.map_err(|error| format!("cannot start {test}: {error}"))?;
        Ok(match status.code() {
            Some(0) => TestVerdict::Pass,
            Some(SKIP) => TestVerdict::Skip,
            _ => TestVerdict::Fail,
        })
    }
}

/// How blockhaul takes the place of another program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum InstallMode {
    /// A symbolic link with the other's name.
    Linked,
    /// A copy with the other's name.
    Copied,
}

impl InstallMode {
    /// Puts `program` at `place`.
    pub fn put(self, program: &Path, place: &Path) -> TaskResult {
        let put = match self {
            InstallMode::Linked => std::os::unix::fs::symlink(program, place),
            InstallMode::Copied => fs::copy(program, place).map(drop),
        };
        put.map_err(|error| at("make", place, &error))
    }
}

/// A test and its result with either program.
pub struct TestComparison {
    pub test: String,
    pub original: TestVerdict,
    /// None: it was not run, as it does not pass with the original.
    pub ours: Option<TestVerdict>,
}

impl TestComparison {
    /// The name under which the test is listed: its file's.
    fn listed_as(&self) -> &str {
        self.test.rsplit('/').next().unwrap_or(&self.test)
    }
}

/// Where a suite keeps what people look for: the tests' output, and the exceptions.
pub struct SuitePaths {
    pub log: &'static str,
    pub exceptions: &'static str,
}

/// Prints the sums and the verdict. `all`: every test was run, so that exceptions can be checked,
/// too.
pub fn judge(
    rows: &[TestComparison],
    exceptions: &BTreeMap<String, String>,
    all: bool,
    places: &SuitePaths,
) -> TaskResult {
    let count = |end| rows.iter().filter(|row| row.original == end).count();
    let [pass, skip, fail] = TestVerdict::ALL.map(count);
    println!("original: {pass} pass, {skip} skip, {fail} fail");
    let judged = || rows.iter().filter(|row| row.original == TestVerdict::Pass);
    let ours = |end| judged().filter(|row| row.ours == Some(end)).count();
    let [both, skip, fail] = TestVerdict::ALL.map(ours);
    println!("of the {pass} that pass, with blockhaul: {both} pass, {skip} skip, {fail} fail");
    let mut wrong = Vec::new();
    for row in judged() {
        match (row.ours, exceptions.get(row.listed_as())) {
            (Some(TestVerdict::Pass), Some(_)) => {
                wrong.push(format!("{} passes but is listed", row.test))
            }
            (Some(TestVerdict::Pass), None) => {}
            (_, Some(reason)) => println!("{}: listed: {reason}", row.test),
            (end, None) => {
                wrong.push(format!("{}: {}", row.test, end.map_or("not run", TestVerdict::word)));
            }
        }
    }
    for name in exceptions.keys().filter(|_| all) {
        if !rows.iter().any(|row| row.listed_as() == *name) {
            wrong.push(format!("{name} is listed and no such test exists"));
        }
    }
    let SuitePaths { log, exceptions } = places;
    if pass == 0 {
        return Err(format!("no test passes with the original: see {log}"));
    }
    if wrong.is_empty() {
        return Ok(());
    }
    Err(format!(
        "{}; what the tests print is in {log}, exceptions are listed in {exceptions}",
        wrong.join(", ")
    ))
}

/// Runs tests, `together` at a time, and reports each.
pub fn run_all(
    tests: &[String],
    together: usize,
    run: impl Fn(&str) -> Result<TestVerdict, String> + Sync,
    tell: impl Fn(&str, TestVerdict) + Sync,
) -> Result<BTreeMap<String, TestVerdict>, String> {
    let left = Mutex::new(tests.iter());
    let ends = Mutex::new(BTreeMap::new());
    let next = || left.lock().expect("no panic under this lock").next();
    let work = || -> Result<(), String> {
        while let Some(test) = next() {
            let end = run(test)?;
            tell(test, end);
            ends.lock().expect("no panic under this lock").insert(test.clone(), end);
        }
        Ok(())
    };
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..together).map(|_| scope.spawn(work)).collect();
        workers.into_iter().try_for_each(|worker| worker.join().expect("no panic in a worker"))
    })?;
    Ok(ends.into_inner().expect("no panic under this lock"))
}

/// The results of tests with the original, which do not change: each is run once.
pub struct ResultCache<'a> {
    path: &'a Path,
    /// What they depend on.
    state: &'a str,
    ends: BTreeMap<String, TestVerdict>,
}

impl ResultCache<'_> {
    /// Number of tests after which the results are saved.
    const SAVED: usize = 32;

    /// Begins the line of a file with what its results depend on.
    const STATE: &'static str = "# ";

    /// The results in a file; none if `again`, or if they depend on something else than `state`, so that
    /// all tests are run.
    pub fn new<'a>(path: &'a Path, state: &'a str, again: bool) -> ResultCache<'a> {
        let text = fs::read_to_string(path).unwrap_or_default();
        let first = text.lines().next().and_then(|line| line.strip_prefix(Self::STATE));
        let is_known = !again && first.unwrap_or_default() == state;
        let text = if is_known { text } else { String::new() };
        let row = |line: &str| {
            let (test, word) = line.rsplit_once(' ')?;
            let end = TestVerdict::ALL.into_iter().find(|end| end.word() == word)?;
            Some((test.to_owned(), end))
        };
        ResultCache { path, state, ends: text.lines().filter_map(row).collect() }
    }

    /// Learns the results that are missing, by `run_all`.
    pub fn learn(
        &mut self,
        tests: &[String],
        run_all: impl Fn(&[String]) -> Result<BTreeMap<String, TestVerdict>, String>,
    ) -> TaskResult {
        let unknown: Vec<String> =
            tests.iter().filter(|test| !self.ends.contains_key(*test)).cloned().collect();
        if unknown.is_empty() {
            return Ok(());
        }
        println!("with the original: {} tests", unknown.len());
        // Saved as they arrive: all take a quarter of an hour.
        for some in unknown.chunks(Self::SAVED) {
            self.ends.extend(run_all(some)?);
            self.save()?;
        }
        Ok(())
    }

    /// The result of a test with the original.
    pub fn of(&self, test: &str) -> TestVerdict {
        self.ends.get(test).copied().unwrap_or(TestVerdict::Fail)
    }

    fn save(&self) -> TaskResult {
        let line = |(test, end): (&String, &TestVerdict)| format!("{test} {}\n", end.word());
        let first = match self.state {
            "" => String::new(),
            state => format!("{}{state}\n", Self::STATE),
        };
        let text = first + &self.ends.iter().map(line).collect::<String>();
        fs::write(self.path, text).map_err(|error| at("write", self.path, &error))
    }
}

/// Tests that may fail, and why: rows of a table like ``| `test-x.sh` | reason |``, where a test is
/// what `is_test` says.
pub fn exceptions(text: &str, is_test: impl Fn(&str) -> bool) -> BTreeMap<String, String> {
    let row = |line: &str| {
        let (name, rest) = line.strip_prefix("| `")?.split_once("` |")?;
        let reason = rest.trim().trim_end_matches('|').trim();
        is_test(name).then(|| (name.to_owned(), reason.to_owned()))
    };
    text.lines().filter_map(row).collect()
}

/// The exceptions of an edition. Those of an edition that is not that of the peers begin with its name and a colon.
pub fn exceptions_of(text: &str, edition: &SuiteEdition) -> BTreeMap<String, String> {
    let rows = exceptions(text, is_script).into_iter();
    let own = rows.filter_map(|(name, reason)| match name.split_once(": ") {
        None => edition.is_of_peers().then_some((name, reason)),
        Some((suite, test)) => (suite == edition.suite).then(|| (test.to_owned(), reason)),
    });
    own.collect()
}

/// A release of Debian whose source packages have the tests, and the versions of these packages.
pub struct SuiteEdition {
    /// The release.
    pub suite: &'static str,
    /// Required prefix of the version of nbdkit: newer tests need newer programs.
    pub nbdkit: &'static str,
    /// That of libnbd, and the version that its programs print.
    pub libnbd: (&'static str, &'static str),
    /// The end of names of directories.
    pub suffix: &'static str,
}

/// The edition of the peers.
pub const PEERS: SuiteEdition =
    SuiteEdition { suite: peers::SUITE, nbdkit: "1.42.", libnbd: ("1.22.", "1.22.2"), suffix: "" };
/// The newest edition that there is.
pub const NEWEST: SuiteEdition =
    SuiteEdition { suite: "sid", nbdkit: "1.48.", libnbd: ("1.24.", "1.24.4"), suffix: "-sid" };

impl SuiteEdition {
    /// Whether its programs are the peers of all tests.
    pub fn is_of_peers(&self) -> bool {
        self.suffix.is_empty()
    }

    /// The programs of this edition, with what the tests of nbdkit need.
    pub fn peers(&self) -> PeerDirectory {
        let dir = run::target().join(format!("nbdkit-suite{}", self.suffix)).join("peers");
        PeerDirectory::with(self.suite, HELPERS, dir)
    }
}

/// Whether a name is that of a script.
pub fn is_script(name: &str) -> bool {
    name.ends_with(".sh") || name.ends_with(".py")
}

/// A template with the result of `value` for each `@NAME@`.
pub fn filled(template: &str, value: impl Fn(&str) -> String) -> String {
    let mut text = String::new();
    let mut rest = template;
    while let Some((before, after)) = rest.split_once('@') {
        text.push_str(before);
        let name = after.split_once('@').map(|(name, _)| name).filter(|name| {
            !name.is_empty() && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
        });
        match name {
            None => {
                text.push('@');
                rest = after;
            }
            Some(name) => {
                text.push_str(&value(name));
                rest = &after[name.len() + 1..];
            }
        }
    }
    text + rest
}

pub fn read(path: &Path) -> Result<String, String> {
    fs::read_to_string(path).map_err(|error| at("read", path, &error))
}

/// Removes a directory with what is in it, if there is one.
pub fn remove(path: &Path) -> TaskResult {
    match fs::remove_dir_all(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(at("remove", path, &error))
        }
        _ => Ok(()),
    }
}

/// Writes a file that can be run.
pub fn write_script(path: &Path, text: &str) -> TaskResult {
    fs::write(path, text).map_err(|error| at("write", path, &error))?;
    let mode = fs::Permissions::from_mode(0o755);
    fs::set_permissions(path, mode).map_err(|error| at("write", path, &error))
}

pub fn make_dir(path: &Path) -> TaskResult {
    fs::create_dir_all(path).map_err(|error| at("make", path, &error))
}

pub fn at(what: &str, path: &Path, error: &std::io::Error) -> String {
    format!("cannot {what} {}: {error}", path.display())
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLACES: SuitePaths = SuitePaths { log: "log", exceptions: "docs" };

    fn row(test: &str, original: TestVerdict, ours: Option<TestVerdict>) -> TestComparison {
        TestComparison { test: test.into(), original, ours }
    }

    #[test]
    fn exceptions_are_rows_that_start_with_a_test() {
        let text = "| Test | Why |\n|---|---|\n| `copy-tls.sh` | no TLS yet |\n| `--flush` | x |\n\
                    | `620-stats.py` | none |\n";
        let found = exceptions(text, is_script);
        assert_eq!(found.len(), 2);
        assert_eq!(found["620-stats.py"], "none");
        assert_eq!(found["copy-tls.sh"], "no TLS yet");
        assert_eq!(exceptions(text, |name| name.starts_with("--"))["--flush"], "x");
    }

    #[test]
    fn what_passes_with_the_original_only_is_wrong_unless_listed() {
        let listed = exceptions("| `b.sh` | why |", is_script);
        let judge = |rows: &[TestComparison], listed: &BTreeMap<String, String>, all| {
            super::judge(rows, listed, all, &PLACES)
        };
        let none = BTreeMap::new();
        let fine = [
            row("copy/a.sh", TestVerdict::Pass, Some(TestVerdict::Pass)),
            row("copy/b.sh", TestVerdict::Pass, Some(TestVerdict::Fail)),
            row("c.sh", TestVerdict::Skip, None),
        ];
        assert_eq!(judge(&fine, &listed, true), Ok(()));
        assert!(judge(&fine, &none, true).unwrap_err().contains("copy/b.sh: FAIL"));
        let passes = [row("copy/b.sh", TestVerdict::Pass, Some(TestVerdict::Pass))];
        assert!(judge(&passes, &listed, true).unwrap_err().contains("is listed"));
        let gone = [row("copy/a.sh", TestVerdict::Pass, Some(TestVerdict::Pass))];
        assert!(judge(&gone, &listed, true).unwrap_err().contains("no such test"));
        assert_eq!(judge(&gone, &listed, false), Ok(()));
        let broken = [row("copy/a.sh", TestVerdict::Fail, Some(TestVerdict::Pass))];
        assert!(judge(&broken, &none, true).is_err());
        let skipped = [
            row("copy/a.sh", TestVerdict::Pass, Some(TestVerdict::Skip)),
            row("x/y.sh", TestVerdict::Skip, Some(TestVerdict::Skip)),
        ];
        assert!(judge(&skipped, &none, true).unwrap_err().contains("a.sh: skip"));
    }

    #[test]
    fn results_with_the_original_are_remembered() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("ends");
        let tests = ["a.sh", "raw 001"].map(str::to_owned);
        let run = |tests: &[String]| run_all(tests, 2, |_| Ok(TestVerdict::Skip), |_, _| {});
        ResultCache::new(&path, "", false).learn(&tests, run).unwrap();
        let mut found = ResultCache::new(&path, "", false);
        assert_eq!(found.of("raw 001"), TestVerdict::Skip);
        assert_eq!(found.of("b.sh"), TestVerdict::Fail);
        found.learn(&tests, |_| Err("all are known".into())).unwrap();
        let asks =
            |memory: &mut ResultCache| memory.learn(&tests, |_| Err("asked".into())).is_err();
        assert!(asks(&mut ResultCache::new(&path, "", true)));
        // Of another runner.
        let mut other = ResultCache::new(&path, "2", false);
        assert!(asks(&mut other));
        other.learn(&tests, run).unwrap();
        assert!(!asks(&mut ResultCache::new(&path, "2", false)));
        assert!(asks(&mut ResultCache::new(&path, "", false)));
    }
}
