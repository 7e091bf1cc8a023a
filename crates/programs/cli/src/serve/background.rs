//! Leaving the terminal once the server is ready.
//!
//! Without `fork`: the command starts itself again as a child in a session of its own, and waits for
//! the child's word on a pipe. What the child has to print comes through the pipe, too.

use std::ffi::OsString;
use std::io::Read as _;
use std::os::fd::AsFd as _;
use std::os::unix::process::CommandExt as _;
use std::process::{Command, Stdio};

use rustix::process::{Pid, Signal, kill_process};

use super::stdio;
use crate::exit::{FAILED, Failure, Outcome, plain};
use crate::out;

/// Ends what the child has to print, and says that it is ready.
const READY: u8 = 0;
/// Longest text that a child may want to have printed.
const TEXT_MAX: u64 = 64 << 10;

/// Starts this program again in the background, and returns when it is ready.
pub fn start() -> Outcome {
    let words = ["serve", "--in-background"].map(OsString::from).into_iter();
    start_with(words.chain(std::env::args_os().skip(2)), Stdio::null())
}

/// The same, with these words as arguments. Whatever the child reads from standard input before it is
/// ready comes from `input`.
pub fn start_with(words: impl Iterator<Item = OsString>, input: Stdio) -> Outcome {
    let cannot = |error: std::io::Error| {
        let text = format!("cannot go to the background: {}; try --foreground", plain(&error));
        Failure::new(FAILED, text)
    };
    let (reader, writer) = std::io::pipe().map_err(cannot)?;
    let mut command = Command::new(std::env::current_exe().map_err(cannot)?);
    // The name in the first word decides which program it stands in for, and that is done already.
    let mut child = command
        .arg0("blockhaul")
        .args(words)
        .stdin(input)
        .stdout(writer)
        .spawn()
        .map_err(cannot)?;
    // Only the child holds the writing end now.
    drop(command);
    let mut said = Vec::new();
    let mut byte = [0];
    let mut reader = reader.take(TEXT_MAX);
    while let Ok(1) = reader.read(&mut byte) {
        if byte[0] == READY {
            return match out::print(&said) {
                Ok(_) => Ok(0),
                Err(failure) => {
                    // Who hears of a failure does not look for a server.
                    let _ = kill_process(Pid::from_child(&child), Signal::TERM);
                    child.wait().map_err(cannot)?;
                    Err(failure)
                }
            };
        }
        said.push(byte[0]);
    }
    // It ended before it was ready, and has said why.
    let status = child.wait().map_err(cannot)?;
    Ok(super::command::exit_status(status))
}

/// The child's side.
pub struct Background {
    entered: bool,
}

impl Background {
    /// Nothing to leave: the server stays in the foreground.
    pub fn none() -> Background {
        Background { entered: false }
    }

    /// Leaves the terminal's session.
    pub fn enter() -> Result<Background, Failure> {
        // Fails only for a leader of a group, which a fresh child is not.
        let _ = rustix::process::setsid();
        Ok(Background { entered: true })
    }

    /// Prints `text`, says that the server is ready, and lets go of the terminal: standard error stays
    /// only for a verbose server.
    pub fn ready(&self, text: &str, verbose: bool) -> Result<(), Failure> {
        if !self.entered {
            return stdio::print(text.as_bytes());
        }
        let cannot = |error: std::io::Error| {
            Failure::new(FAILED, format!("cannot go to the background: {}", plain(&error)))
        };
        let null = stdio::null().map_err(cannot)?;
        let mut message = text.as_bytes().to_vec();
        message.push(READY);
        stdio::print(&message)?;
        rustix::stdio::dup2_stdin(null.as_fd()).map_err(|error| cannot(error.into()))?;
        rustix::stdio::dup2_stdout(null.as_fd()).map_err(|error| cannot(error.into()))?;
        if !verbose {
            rustix::stdio::dup2_stderr(null.as_fd()).map_err(|error| cannot(error.into()))?;
        }
        // So that no file system is kept busy.
        std::env::set_current_dir("/").map_err(cannot)
    }
}
