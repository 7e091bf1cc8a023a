//! What is wrong on the command line, at the other end of a connection, or in the storage: one clear
//! line, a documented exit status, no hang, and never success with wrong bytes.

mod answers;
mod handshakes;
mod storage;
mod words;

use std::fs::{self, File};
use std::io::{Read as _, Write as _};
use std::net::TcpListener;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use blockhaul_testkit::arbitrary::WriteFill;
use blockhaul_testkit::image;
use blockhaul_testkit::model::Model;
use blockhaul_testkit::peer::{HandshakeFault, Offer, ReplyFault, ReplyFaultKind, ScriptedServer};
use blockhaul_testkit::require_peer;
use blockhaul_testkit::rng;
use blockhaul_testkit::tools::{self, PeerServer, ScratchDir, until, wait_within};
use blockhaul_tests::{LIMIT, assert_same, bounded, done, garbage, lossy, serve, succeed, text};
use blockhaul_wire::ReplyForm;

/// Exit statuses, as the help documents them.
const USAGE: i32 = 2;
const OPEN: i32 = 3;
const SOURCE: i32 = 4;
const TARGET: i32 = 5;
const FULL: i32 = 6;
const LOST: i32 = 7;

/// Nothing here may take longer, with a `--timeout` of a second or two.
const SOON: Duration = Duration::from_secs(120);

/// Checks the end of a run that has to fail; gives its line.
#[track_caller]
fn refused_by(output: &Output, what: &str, status: i32, words: &[&str]) -> String {
    let said = lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(status), "{what}: {said}");
    assert!(!said.contains("panicked") && !said.contains("RUST_BACKTRACE"), "{what}: {said}");
    let lines: Vec<&str> = said.lines().filter(|line| !line.trim().is_empty()).collect();
    assert_eq!(lines.len(), 1, "{what}: one line, not {said}");
    assert!(lines[0].starts_with("blockhaul: "), "{what}: {said}");
    for word in words {
        assert!(said.contains(word), "{what}: no {word:?} in {said}");
    }
    assert!(output.stdout.is_empty(), "{what}: {}", lossy(&output.stdout));
    lines[0].to_owned()
}

/// Runs a command that has to fail with one line that holds all of the words; gives the line.
#[track_caller]
fn refused(args: &[&str], status: i32, words: &[&str]) -> String {
    let output = bounded(&mut blockhaul(args), SOON);
    refused_by(&output, &format!("{args:?}"), status, words)
}

/// The program under test. What fails is not tried again here: the first failure ends a copy, as it
/// does after the last repetition, which have tests of their own.
fn blockhaul(args: &[&str]) -> Command {
    match args {
        ["copy", rest @ ..] => {
            blockhaul_tests::blockhaul(&[&["copy", "--retries", "0"], rest].concat())
        }
        _ => blockhaul_tests::blockhaul(args),
    }
}

/// A sparse random image.
fn random_image(path: &Path, size: u64) {
    let seed = rng::seed();
    println!("BLOCKHAUL_SEED={seed}");
    image::sparse(path, size, seed).unwrap();
}

/// Bytes after which all connections of a copy are at work.
const UNDER_WAY: u64 = 3 << 20;

/// Starts a copy on another thread and does something once it is under way, as the file shows that takes
/// its bytes and has none before; then waits for the copy.
fn meanwhile(args: &[&str], file: &Path, act: impl FnOnce()) -> Output {
    assert_eq!(image::space(file).map_or(0, |space| space.allocated), 0, "{file:?} has bytes");
    std::thread::scope(|scope| {
        let copy = scope.spawn(|| bounded(&mut blockhaul(args), SOON));
        until(&format!("{args:?} is under way"), || {
            assert!(!copy.is_finished(), "{args:?} ended before anything happened");
            image::space(file).map_or(0, |space| space.allocated) >= UNDER_WAY
        });
        act();
        copy.join().unwrap()
    })
}

/// The test of the tests: what is refused with two lines is found.
#[test]
#[should_panic(expected = "one line")]
fn two_lines_are_found() {
    let output = bounded(Command::new("sh").args(["-c", "echo a >&2; echo b >&2; exit 3"]), LIMIT);
    refused_by(&output, "two lines", 3, &[]);
}
