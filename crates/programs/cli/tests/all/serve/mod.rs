//! `blockhaul serve` as a process: readiness, listeners, `--run`, socket activation, the stop.

mod config;
mod exports;
mod life;
mod listeners;

use std::io::{BufRead as _, BufReader};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use blockhaul_testkit::tools::{self, PeerServer, ScratchDir, text};
use rustix::process::{Pid, Signal, kill_process};

const LIMIT: Duration = Duration::from_secs(120);
const OURS: &str = env!("CARGO_BIN_EXE_blockhaul");

fn blockhaul(args: &[&str]) -> Output {
    tools::output(Command::new(OURS).args(args), LIMIT).unwrap()
}

fn pid(number: u32) -> Pid {
    Pid::from_raw(i32::try_from(number).unwrap()).unwrap()
}

#[track_caller]
fn assert_fails(args: &[&str], status: i32, words: &[&str]) {
    let output = blockhaul(args);
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(status), "{args:?}: {said}");
    assert_eq!(said.lines().count(), 1, "{args:?}: {said}");
    assert!(words.iter().all(|word| said.contains(word)), "{args:?}: {said}");
    assert!(!said.contains("panic"), "{said}");
}

fn start(scratch: &ScratchDir, args: &[&str]) -> PeerServer {
    PeerServer::blockhaul(OURS.as_ref(), &scratch.socket("own"), args).unwrap()
}

fn size(uri: &str) -> String {
    text(&blockhaul(&["info", "--size", uri]).stdout).trim().to_string()
}
