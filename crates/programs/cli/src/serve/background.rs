//! Goes to the background once the server is ready.
//!
//! Without `fork`: the command starts itself again as a child in a new session, and waits for the
//! child's ready message on a pipe. The child's output also comes through the pipe.

use std::ffi::OsString;
use std::io::Read as _;
use std::os::fd::AsFd as _;
use std::os::unix::process::CommandExt as _;
use std::process::{Command, Stdio};

use rustix::fs::FileType;
use rustix::process::{Pid, Signal, kill_process};

use super::stdio;
use crate::exit::{CommandFailure, CommandResult, FAILED, plain};
use crate::{logger, out};

/// Ends the child's output, and signals that it is ready.
const READY: u8 = 0;
/// Maximum output of a child.
const TEXT_MAX: u64 = 64 << 10;

/// Starts this program again in the background, with the same command, and returns when it is ready.
pub fn start(command: &str) -> CommandResult {
    let words = [command, "--in-background"].map(OsString::from).into_iter();
    start_with(words.chain(std::env::args_os().skip(2)), Stdio::null())
}

/// The same, with these words as arguments. The child reads standard input from `input` until it is
/// ready.
pub fn start_with(words: impl Iterator<Item = OsString>, input: Stdio) -> CommandResult {
    let cannot = |error: std::io::Error| {
        let text =
            format!("cannot go to the background: {}; try without --background", plain(&error));
        CommandFailure::new(FAILED, text)
    };
    let (reader, writer) = std::io::pipe().map_err(cannot)?;
    let mut command = Command::new(std::env::current_exe().map_err(cannot)?);
    // The first word decides which program it emulates, and that has already been handled.
    let mut child = command
        .arg0("blockhaul")
        .args(words)
        .stdin(input)
        .stdout(writer)
        .spawn()
        .map_err(cannot)?;
    // Only the child has the write end now.
    drop(command);
    let mut said = Vec::new();
    let mut byte = [0];
    let mut reader = reader.take(TEXT_MAX);
    while let Ok(1) = reader.read(&mut byte) {
        if byte[0] == READY {
            return match out::print(&said) {
                Ok(_) => Ok(0),
                Err(failure) => {
                    // After a failure there must be no server.
                    let _ = kill_process(Pid::from_child(&child), Signal::TERM);
                    child.wait().map_err(cannot)?;
                    Err(failure)
                }
            };
        }
        said.push(byte[0]);
    }
    // It ended before it was ready, and has reported why.
    let status = child.wait().map_err(cannot)?;
    Ok(super::command::exit_status(status))
}

/// The working directory of a process in the background.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WorkingDirectory {
    /// The one in which it was started: relative names that are used later keep their meaning.
    Kept,
    /// `/`, so that no file system is kept busy.
    Root,
}

/// The child's side.
pub struct BackgroundProcess {
    /// None: it is in the foreground.
    entered: Option<WorkingDirectory>,
}

impl BackgroundProcess {
    /// For a server that stays in the foreground.
    pub fn none() -> BackgroundProcess {
        BackgroundProcess { entered: None }
    }

    /// Leaves the terminal's session.
    pub fn enter(directory: WorkingDirectory) -> BackgroundProcess {
        // Fails only for the leader of a process group, which a new child is not.
        let _ = rustix::process::setsid();
        BackgroundProcess { entered: Some(directory) }
    }

    /// Prints `text`, signals that the server is ready, and detaches from the terminal. Standard
    /// error is kept if the server is verbose or it is a file; a terminal or a pipe would be kept
    /// busy, so messages go to the system's log instead.
    pub fn ready(&self, text: &str, verbose: bool) -> Result<(), CommandFailure> {
        let Some(directory) = self.entered else {
            return stdio::print(text.as_bytes());
        };
        let cannot = |error: std::io::Error| {
            CommandFailure::new(FAILED, format!("cannot go to the background: {}", plain(&error)))
        };
        let null = stdio::null().map_err(cannot)?;
        let mut message = text.as_bytes().to_vec();
        message.push(READY);
        stdio::print(&message)?;
        rustix::stdio::dup2_stdin(null.as_fd()).map_err(|error| cannot(error.into()))?;
        rustix::stdio::dup2_stdout(null.as_fd()).map_err(|error| cannot(error.into()))?;
        let is_file = rustix::fs::fstat(std::io::stderr())
            .is_ok_and(|data| FileType::from_raw_mode(data.st_mode) == FileType::RegularFile);
        if !verbose && !is_file {
            logger::use_syslog();
            rustix::stdio::dup2_stderr(null.as_fd()).map_err(|error| cannot(error.into()))?;
        }
        match directory {
            WorkingDirectory::Kept => Ok(()),
            WorkingDirectory::Root => std::env::set_current_dir("/").map_err(cannot),
        }
    }
}
