//! `cargo xtask test`: unpacks the peers, builds everything and runs every test.

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::Path;
use std::process::{Command, Stdio};

use crate::peers::PeerDirectory;
use crate::test_programs::TestProgram;
use crate::{TaskResult, npm_tools, python_tools, run, simulate, source, test_programs};

pub const HELP: &str = "\
cargo xtask test [-- ARGS…]

Unpacks the peer programs where they are missing (see `cargo xtask peers`), prints their versions,
builds the whole workspace and runs every test, documentation tests and simulations too. ARGS go to `cargo test`
(`-- interop`, `-- interop -- --nocapture`; `-- -p blockhaul-wire` builds and tests one package). The tests
that were skipped are listed, and at the end those that failed.

Without the peers (not a Debian machine, no network) the tests that need them are skipped, each with
a reason; where CI=true or BLOCKHAUL_REQUIRE_PEERS=1 they fail instead. BLOCKHAUL_REQUIRE=1 lets every test
fail that would be skipped for what the machine lacks. BLOCKHAUL_LONG=1 runs the long tests, too. Three tests
per processor run at a time; RUST_TEST_THREADS changes that. Without ARGS, two test programs run at a time; what
they print is also in target/test-output.

Tests use mypy and the Python library qemu.qmp. Where one is missing, both are installed from PyPI into
target/python-tools; where that fails, these tests are skipped.
";

/// Names the file that lists skipped tests (`testkit::tools::skip`).
const LIST: &str = "BLOCKHAUL_SKIPPED";

/// Sets the number of tests that a program runs at a time.
const THREADS: &str = "RUST_TEST_THREADS";
/// Most tests wait for other processes.
const TESTS_PER_PROCESSOR: usize = 3;

pub fn main(args: &[String]) -> TaskResult {
    let passed_on = match args.split_first() {
        None => &[],
        Some((first, rest)) if first == "--" => rest,
        Some(_) => return run::no_more(args),
    };
    // What is fetched and unpacked needs the network and the disk, and building needs the processors.
    let preparation = std::thread::spawn(prepare);
    let prepared = move || preparation.join().map_err(|_| "a thread has failed".to_owned())?;
    let list = run::target().join("tests-skipped");
    // Of an earlier run; otherwise it is not there.
    let _ = fs::remove_file(&list);
    let mut results = TestResults::default();
    let outcome = if passed_on.is_empty() {
        whole(&mut results, &list, prepared)
    } else {
        prepared().and_then(|()| some(passed_on, &mut results, &list))
    };
    outcome.map_err(|why| results.failures(why))
}

/// Makes the programs ready that tests are compared with.
fn prepare() -> TaskResult {
    let peers = PeerDirectory::here();
    let ready = peers.ensure(false).and_then(|()| peers.print_versions());
    match ready.and_then(|()| source::main(&[])) {
        Ok(()) => {}
        Err(why) if run::ci() => return Err(why),
        Err(why) => println!("going on without peers: {why}"),
    }
    if let Err(why) = python_tools::ensure() {
        println!("going on without packages of PyPI: {why}");
    }
    if let Err(why) = npm_tools::ensure() {
        println!("going on without packages of npm: {why}");
    }
    Ok(())
}

/// Builds and tests the whole workspace, all of it with the simulated driver: two builds, with and without it,
/// would take a tenth of the whole time more. Clippy and the documentation see the code without it.
fn whole(
    results: &mut TestResults,
    list: &Path,
    prepared: impl FnOnce() -> TaskResult,
) -> TaskResult {
    run::show(run::cargo("build").args(["--workspace", "--all-targets", simulate::FEATURE]))?;
    let programs = test_programs::build()?;
    prepared()?;
    let outputs = run::target().join("test-output");
    let env = [
        (LIST, list.to_string_lossy().into_owned()),
        (THREADS, test_threads().div_ceil(test_programs::AT_A_TIME).to_string()),
    ];
    let (simulations, programs): (Vec<_>, _) =
        programs.into_iter().partition(|program| program.is_in(simulate::DIRECTORY));
    // Their time is virtual: it does not matter how long they wait for a processor.
    let simulations = simulations.into_iter().map(TestProgram::idle).collect();
    let failed = std::thread::scope(|scope| {
        let simulated = scope.spawn(|| captured(simulations, &outputs, &env));
        let mut out = std::io::stdout();
        let seen = |line: &str| results.count(line);
        let mut failed = test_programs::run(programs, &outputs, &env, &mut out, seen)?;
        let mut documentation = run::loud_cargo("test");
        documentation.args(["--doc", "--workspace", "--no-fail-fast", simulate::FEATURE]);
        if let Err(why) = results.run(&mut documentation) {
            failed.push(why);
        }
        let (printed, others) = simulated.join().map_err(|_| "a thread has failed")??;
        // A closed standard output does not end the tests.
        let _ = out.write_all(&printed);
        String::from_utf8_lossy(&printed).lines().for_each(|line| results.count(line));
        failed.extend(others);
        Ok::<_, String>(failed)
    })?;
    results.report(list);
    if failed.is_empty() { Ok(()) } else { Err(format!("failed: {}", failed.join(", "))) }
}

/// Runs programs as [`test_programs::run`] does; returns what they have printed and which have failed.
fn captured(
    programs: Vec<TestProgram>,
    outputs: &Path,
    env: &[(&str, String)],
) -> Result<(Vec<u8>, Vec<String>), String> {
    let mut printed = Vec::new();
    let failed = test_programs::run(programs, outputs, env, &mut printed, |_| {})?;
    Ok((printed, failed))
}

/// Runs `cargo test` with `args`.
fn some(args: &[String], results: &mut TestResults, list: &Path) -> TaskResult {
    let mut chosen: Vec<&str> = args.iter().map(String::as_str).collect();
    let mut own = chosen.iter().take_while(|arg| **arg != "--");
    // A choice of packages and the whole workspace exclude each other.
    if !own.any(|arg| arg.starts_with("-p") || arg.starts_with("--package")) {
        chosen.insert(0, "--workspace");
        run::show(run::cargo("build").args(["--workspace", "--all-targets"]))?;
    }
    let mut tests = run::loud_cargo("test");
    tests.arg("--no-fail-fast").args(&chosen).env(LIST, list);
    tests.env(THREADS, test_threads().to_string());
    let tested = results.run(&mut tests);
    results.report(list);
    tested
}

/// Number of tests that run at a time.
fn test_threads() -> usize {
    let chosen = std::env::var(THREADS).ok().and_then(|text| text.parse().ok());
    chosen.unwrap_or_else(|| {
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        TESTS_PER_PROCESSOR * processors
    })
}

/// Lines of the output of a failed test that are repeated at the end.
const LINES_OF_A_FAILURE: usize = 60;

/// What the test programs have printed about their tests.
#[derive(Default)]
struct TestResults {
    passed: u64,
    failed: Vec<String>,
    /// The outputs of failed tests: who reads only the end of a long log sees why they failed.
    outputs: Vec<String>,
    /// Lines of the last output that still fit; `None` outside of outputs.
    room: Option<usize>,
}

impl TestResults {
    /// Runs `cargo test`, and forwards what it prints.
    fn run(&mut self, command: &mut Command) -> TaskResult {
        run::announce(command);
        let mut child = run::start(command.stdout(Stdio::piped()))?;
        let mut lines = BufReader::new(child.stdout.take().expect("it is piped"));
        let mut line = Vec::new();
        while matches!(lines.read_until(b'\n', &mut line), Ok(1..)) {
            // A closed standard output does not end the tests.
            let _ = std::io::stdout().write_all(&line);
            self.count(String::from_utf8_lossy(&line).trim_end());
            line.clear();
        }
        run::wait(command, &mut child)
    }

    fn count(&mut self, line: &str) {
        self.keep_output(line);
        let Some((name, result)) = line.strip_prefix("test ").and_then(|l| l.split_once(" ... "))
        else {
            return;
        };
        match result {
            "ok" => self.passed += 1,
            "FAILED" => self.failed.push(name.to_owned()),
            _ => {}
        }
    }

    /// Keeps the beginning of what a failed test has printed: the lines from its header to the next one, or to
    /// the list of failures.
    fn keep_output(&mut self, line: &str) {
        if line.starts_with("---- ") && line.ends_with(" stdout ----") {
            self.outputs.push(String::new());
            self.room = Some(LINES_OF_A_FAILURE);
        } else if line == "failures:" || line.starts_with("test result:") {
            self.room = None;
        }
        let Some((room, output)) = self.room.as_mut().zip(self.outputs.last_mut()) else { return };
        if *room > 0 {
            *room -= 1;
            output.push_str(line);
            output.push('\n');
        }
    }

    /// Prints how many tests have passed, why others failed, and which were skipped.
    fn report(&self, list: &Path) {
        print_skipped(&fs::read_to_string(list).unwrap_or_default());
        self.outputs.iter().for_each(|output| print!("\n{output}"));
        println!("\n{} tests passed, {} failed", self.passed, self.failed.len());
    }

    /// What failed, with the names of the tests.
    fn failures(&self, why: String) -> String {
        self.failed.iter().fold(why, |text, name| text + "\n  failed: " + name)
    }
}

/// Prints the skipped tests by reason.
fn print_skipped(list: &str) {
    let mut reasons = BTreeMap::<&str, Vec<&str>>::new();
    for (test, reason) in list.lines().filter_map(|line| line.split_once('\t')) {
        reasons.entry(reason).or_default().push(test);
    }
    if !reasons.is_empty() {
        println!("\nskipped tests:");
    }
    for (reason, mut tests) in reasons {
        tests.sort_unstable();
        tests.dedup();
        println!("  {reason}: {} ({})", tests.len(), tests.join(", "));
    }
}

#[cfg(test)]
mod tests {
    use super::{LINES_OF_A_FAILURE, TestResults};

    #[test]
    fn passed_and_failed_tests_are_counted() {
        let mut results = TestResults::default();
        for line in ["test a::b ... ok", "test c ... FAILED", "test result: ok. 1 passed", "x"] {
            results.count(line);
        }
        assert_eq!(
            (results.passed, results.failures("why".into())),
            (1, "why\n  failed: c".into())
        );
    }

    #[test]
    fn outputs_of_failed_tests_are_kept() {
        let mut results = TestResults::default();
        for line in
            ["before", "failures:", "---- a::b stdout ----", "it is 3", "---- c stdout ----"]
        {
            results.count(line);
        }
        for _ in 0..2 * LINES_OF_A_FAILURE {
            results.count("x");
        }
        for line in ["failures:", "    a::b", "test result: FAILED. 1 passed"] {
            results.count(line);
        }
        let long = format!("---- c stdout ----\n{}", "x\n".repeat(LINES_OF_A_FAILURE - 1));
        assert_eq!(results.outputs, ["---- a::b stdout ----\nit is 3\n".to_owned(), long]);
    }
}
