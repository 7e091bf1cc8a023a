//! `cargo xtask lint`: formatting, clippy, documentation, and where unsafe code is allowed.

use std::fs;
use std::path::Path;
use std::process::Command;

use crate::rust_files::rust_files;
use crate::{TaskResult, circles, links, names, places, protocol, rows, run, simulate};

pub const HELP: &str = "\
cargo xtask lint [--sources | --compiled]

Checks the formatting (cargo fmt), lints (cargo clippy, warnings are errors; the program also without its
features), builds the documentation (warnings are errors), checks the links of all Markdown files, checks
licences, sources and duplicates of dependencies (deny.toml; needs cargo-deny, without which it says so). Checks
that each requirement of the protocol is implemented and tested (cargo xtask protocol), that no more than two
files of a crate import each other in a circle, that no crate depends on one of a higher row, that only
programs use clap, and that few names of types say too little. Makes sure that code which the compiler cannot
vouch for is in crates/ground/io, crates/ground/os, crates/devices/cabi and two modules for VMware's library only,
and that only named modules ask the system for the time or put a thread to sleep: everything else can be
simulated.

  --sources   only what needs no compiler
  --compiled  only what needs one, but for clippy of the whole workspace: .ci/run builds the tests with clippy
              (tools/xtask/compile.sh)
";

/// What may have unsafe code: the two crates that call the operating system, the one that calls C,
/// and the modules that call VMware's library and simulate it.
const UNSAFE_HOMES: &[&str] = &[
    "crates/ground/io",
    "crates/ground/os",
    "crates/devices/cabi",
    "crates/devices/vddk/src/library.rs",
    "tools/testkit/vddk-simulator/src/ffi",
];

/// Calls that a simulation cannot replace.
const CLOCKS: &[&str] =
    &["Instant::now(", "SystemTime::now(", "UNIX_EPOCH.elapsed(", "thread::sleep("];

/// The modules of the program that may call them, and why.
const CLOCK_HOMES: &[(&str, &str)] = &[
    ("crates/ground/io/src/clock.rs", "the clock that all others ask"),
    ("crates/ground/io/src/driver", "drivers measure what sleeping and spinning cost"),
    ("crates/ground/io/src/simulation/world.rs", "the simulated clock begins at some instant"),
    ("crates/ground/io/src/net.rs", "waits for another process before a server starts"),
    (
        "crates/devices/backends/src/file/lock.rs",
        "waits for another process before a file is opened",
    ),
    ("crates/ground/os/src/lock.rs", "waits for another process before a worker starts"),
    ("crates/core/tls/src/make.rs", "dates of certificates"),
    (
        "crates/devices/client/src/command.rs",
        "waits for the end of a process, on a thread for that",
    ),
    (
        "crates/devices/client/src/blocking/replies.rs",
        "threads outside of workers wait for each other before a connection changes hands",
    ),
    ("crates/devices/client/src/guard.rs", "a name for a temporary directory"),
    (
        "crates/devices/remote/src/chunks/local_folder.rs",
        "waits for another process before a file is replaced, on a thread for that",
    ),
    (
        "crates/devices/restic/src/writer/init.rs",
        "waits for another process before a repository is opened, on a thread for that",
    ),
    ("crates/devices/script/src/call.rs", "waits for a script, on a thread for that"),
    ("crates/devices/python/src/process.rs", "waits for processes when the program ends"),
    ("crates/devices/vddk/src/query.rs", "a thread for the library repeats what has failed"),
    ("crates/devices/cabi/src/api.rs", "plugins in C sleep on their own threads"),
    ("crates/devices/layers/src/pause.rs", "a thread that listens to a socket"),
    ("crates/compat/nbdkit-devices/src/gates/exitwhen.rs", "a thread that watches files"),
    ("crates/compat/nbdkit-devices/src/devices/info.rs", "a disk whose contents are the time"),
    ("crates/compat/qmp/src/events.rs", "events with the time of day"),
    ("crates/compat/command-lines/src/nbdkit/natives.rs", "a seed that the command line left out"),
    ("crates/compat/qemu-img/src/snapshot.rs", "the date of a snapshot"),
    (
        "crates/uses/jobs/src/job_files.rs",
        "names of jobs that differ from those of earlier servers",
    ),
    ("crates/uses/jobs/src/job.rs", "the time of day at which a job has ended"),
    ("crates/uses/backups/src/pull/decision.rs", "points whose time lies in the future"),
    ("crates/uses/backups/src/machine", "waits for a machine, on the thread of the caller"),
    ("crates/uses/follow/src/command.rs", "waits for a command, on the thread of the caller"),
    (
        "crates/uses/follow/src/run.rs",
        "measures rounds and waits for the cut-over, on the thread of the caller",
    ),
    ("crates/uses/metrics/src/text.rs", "metrics with the time of day"),
    ("crates/uses/transfer/src/rate_limit.rs", "a thread that reads a rate limit again"),
    ("crates/programs/cli", "threads of the program itself; dates in reports and names"),
    ("crates/programs/python/src/polling.rs", "a thread that lets a worker have a connection"),
];

/// The whole workspace, with the simulated driver.
const ALL: &[&str] = &["--workspace", simulate::FEATURE];
/// The program without its features, and what it uses, without the simulated driver.
const LEAST: &[&str] = &["-p", "blockhaul-cli", "-p", "blockhaul-io", "--no-default-features"];

/// The arguments `-D warnings` as cargo clippy passes them to the compiler.
const CLIPPY_ARGS: &str = "-D__CLIPPY_HACKERY__warnings__CLIPPY_HACKERY__";

/// The word to search for, written so that this file does not contain it.
const WORD: &str = concat!("un", "safe");

pub fn main(args: &[String]) -> TaskResult {
    match args.first().map(String::as_str) {
        Some("--sources") => {
            run::no_more(&args[1..])?;
            sources()
        }
        Some("--compiled") => {
            run::no_more(&args[1..])?;
            compiled()
        }
        _ => {
            run::no_more(args)?;
            clippy(ALL, &["--all-targets"])?;
            compiled()?;
            sources()
        }
    }
}

/// Checks what needs no compiler.
fn sources() -> TaskResult {
    protocol::check(&run::workspace())?;
    circles::check(&run::workspace())?;
    rows::check(&run::workspace())?;
    places::check(&run::workspace())?;
    names::check(&run::workspace())?;
    run::show(run::cargo("fmt").args(["--all", "--check"]))?;
    run::show(run::cargo("fmt").args(["--manifest-path", "fuzz/Cargo.toml", "--check"]))?;
    check_links()?;
    check_dependencies()?;
    let found = clocks(&run::workspace())?;
    if !found.is_empty() {
        return Err(format!(
            "the system's time or sleep, where a simulation needs blockhaul_io::now and sleep:\n  {}",
            found.join("\n  ")
        ));
    }
    let found = misplaced(&run::workspace())?;
    if found.is_empty() {
        println!("lint: clean; no {WORD} code outside {}", UNSAFE_HOMES.join(" and "));
        return Ok(());
    }
    Err(format!("{WORD} code outside {}:\n  {}", UNSAFE_HOMES.join(" and "), found.join("\n  ")))
}

/// Builds the documentation, and checks the program without its features.
fn compiled() -> TaskResult {
    // With the simulated driver, so that its code is documented; the program is built without it below.
    run::show(documentation()?.args(ALL))?;
    clippy(LEAST, &[])?;
    run::show(documentation()?.args(LEAST))
}

fn clippy(selected: &[&str], targets: &[&str]) -> TaskResult {
    let mut clippy = run::cargo("clippy");
    run::show(clippy.args(selected).args(targets).args(["--", "-D", "warnings"]))
}

/// Cargo, which builds documentation. It runs the compiler as cargo clippy does: then it uses what that has
/// checked, and checks nothing again.
fn documentation() -> Result<Command, String> {
    let mut doc = run::cargo("doc");
    doc.arg("--no-deps").env("RUSTDOCFLAGS", "-D warnings");
    let system = run::quiet(Command::new("rustc").args(["--print", "sysroot"]))?;
    let driver = Path::new(system.trim()).join("bin/clippy-driver");
    if driver.is_file() {
        doc.env("RUSTC_WORKSPACE_WRAPPER", driver).env("CLIPPY_ARGS", CLIPPY_ARGS);
    }
    Ok(doc)
}

fn check_links() -> TaskResult {
    let found = links::broken(&run::workspace())?;
    if found.is_empty() {
        return Ok(());
    }
    Err(format!("links of the documentation lead nowhere:\n  {}", found.join("\n  ")))
}

/// Checks dependencies by `deny.toml`, except for advisories, which need a network.
fn check_dependencies() -> TaskResult {
    let version = run::cargo("deny").arg("--version").output();
    if !version.is_ok_and(|output| output.status.success()) {
        println!("lint: cargo-deny is not installed: dependencies are not checked");
        return Ok(());
    }
    run::show(run::cargo("deny").args(["check", "bans", "licenses", "sources"]))
}

/// Calls of [`CLOCKS`] in code of the program outside of the named modules, `PATH:LINE`.
fn clocks(root: &Path) -> Result<Vec<String>, String> {
    let mut files = Vec::new();
    rust_files(root, Path::new("crates"), &mut files)?;
    files.sort();
    let tools = ["crates/programs/measure"];
    files.retain(|file| {
        let is_test = file.components().any(|part| part.as_os_str() == "tests")
            || file.file_name().is_some_and(|name| name == "tests.rs");
        let mut named = CLOCK_HOMES.iter().map(|home| home.0).chain(tools);
        !is_test && !named.any(|home| file.starts_with(home))
    });
    let mut found = Vec::new();
    for file in files {
        let text = read(root, &file)?;
        // Tests come last in a file.
        let lines = text.lines().take_while(|line| *line != "#[cfg(test)]");
        for (index, line) in lines.enumerate() {
            let code = code_of(line);
            if CLOCKS.iter().any(|call| code.contains(call)) {
                found.push(format!("{}:{}", file.display(), index + 1));
            }
        }
    }
    Ok(found)
}

fn read(root: &Path, file: &Path) -> Result<String, String> {
    fs::read_to_string(root.join(file))
        .map_err(|error| format!("cannot read {}: {error}", file.display()))
}

/// Places of the word in code, `PATH:LINE`, outside the allowed crates.
fn misplaced(root: &Path) -> Result<Vec<String>, String> {
    let mut files = Vec::new();
    rust_files(root, Path::new(""), &mut files)?;
    files.sort();
    let mut found = Vec::new();
    for file in files.iter().filter(|file| !UNSAFE_HOMES.iter().any(|home| file.starts_with(home)))
    {
        let text = read(root, file)?;
        for (index, line) in text.lines().enumerate() {
            if has_word(&code_of(line)) {
                found.push(format!("{}:{}", file.display(), index + 1));
            }
        }
    }
    Ok(found)
}

/// The line without a `//` comment and without text in double quotes or in backticks, which Rust
/// code never has, but manual texts do. Strings and comments of several lines are not recognized;
/// the word in those is reported, which is noticed at once.
fn code_of(line: &str) -> String {
    let mut code = String::new();
    let mut quoted = false;
    let mut ticked = false;
    let mut chars = line.chars().peekable();
    while let Some(c) = chars.next() {
        match c {
            '\\' if quoted => {
                chars.next();
            }
            // A quotation mark as a character literal opens no string.
            '\'' if !quoted && chars.peek() == Some(&'"') => {
                chars.next();
            }
            '"' => quoted = !quoted,
            '`' if !quoted => ticked = !ticked,
            '/' if !quoted && chars.peek() == Some(&'/') => break,
            _ if !quoted && !ticked => code.push(c),
            _ => {}
        }
    }
    code
}

/// An option of that name in a manual text is none: code has no word behind two dashes.
fn has_word(code: &str) -> bool {
    let code = code.replace(&format!("--{WORD}"), "");
    code.split(|c: char| !c.is_ascii_alphanumeric() && c != '_').any(|word| word == WORD)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_word_counts_in_code_only() {
        let found = |line: &str| has_word(&code_of(&line.replace('#', WORD)));
        assert!(found("    # { *pointer }"));
        assert!(found("pub # fn f() {}"));
        assert!(!found("text in which `cache=#` is named \\"));
        assert!(!found("      blockhaul rebase --# vm.qcow2"));
        assert!(found("let s = \"a\\\"\"; #{}"));
        assert!(found("let c = '\"'; # {}"));
        assert!(!found("//! no # here"));
        assert!(!found("let s = \"# \\\" #\"; // #"));
        assert!(!found("#_code = \"deny\""));
    }

    #[test]
    fn only_named_modules_ask_the_system_for_the_time() {
        let scratch = tempfile::tempdir().unwrap();
        let root = scratch.path();
        let sleep = "fn f() {\n    std::thread::sleep(TIME);\n}\n";
        for (file, text) in [
            ("crates/uses/engine/src/lane.rs", sleep.to_string()),
            ("crates/ground/io/src/clock.rs", "fn now() { Instant::now() }".into()),
            ("crates/uses/engine/src/rate.rs", format!("#[cfg(test)]\nmod tests {{ {sleep} }}")),
            (
                "crates/uses/engine/src/text.rs",
                "// Instant::now()\nlet s = \"SystemTime::now()\";".into(),
            ),
            ("crates/uses/engine/tests/copy.rs", sleep.to_string()),
        ] {
            fs::create_dir_all(root.join(file).parent().unwrap()).unwrap();
            fs::write(root.join(file), text).unwrap();
        }
        assert_eq!(clocks(root).unwrap(), ["crates/uses/engine/src/lane.rs:2"]);
        assert_eq!(clocks(&run::workspace()).unwrap(), [""; 0]);
    }

    #[test]
    fn files_outside_the_home_are_found() {
        let scratch = tempfile::tempdir().unwrap();
        let root = scratch.path().to_path_buf();
        for dir in [
            "crates/ground/io/src",
            "crates/devices/cabi/src",
            "crates/ground/wire/src",
            "target/x",
        ] {
            fs::create_dir_all(root.join(dir)).unwrap();
            fs::write(root.join(dir).join("a.rs"), format!("\n{WORD} {{}}\n")).unwrap();
        }
        assert_eq!(misplaced(&root).unwrap(), ["crates/ground/wire/src/a.rs:2"]);
    }
}
