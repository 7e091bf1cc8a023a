//! Standard output and error. A closed pipe is not a failure; nothing here panics.

use std::io::{self, ErrorKind, Write};
use std::os::fd::AsFd as _;

use crate::exit::{CommandFailure, FAILED};

pub use blockhaul_transfer::{lines, one_line, one_word};

/// The output of a command: held back until the command succeeds, within a limit.
#[derive(Debug, Default)]
pub struct CommandOutput {
    bytes: Vec<u8>,
}

impl CommandOutput {
    /// Maximum bytes held back: more than any output for users. Longer output is printed early.
    const KEPT: usize = 64 << 20;

    /// Appends text.
    pub fn text(&mut self, text: &str) -> Result<(), CommandFailure> {
        is_open(self.write_all(text.as_bytes())).map(drop)
    }

    /// Prints the rest.
    pub fn finish(mut self) -> Result<(), CommandFailure> {
        is_open(self.leave()).map(drop)
    }

    fn leave(&mut self) -> io::Result<()> {
        print_bytes(&std::mem::take(&mut self.bytes))
    }
}

impl Write for CommandOutput {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.bytes.extend_from_slice(bytes);
        if self.bytes.len() >= Self::KEPT {
            self.leave()?;
        }
        Ok(bytes.len())
    }

    /// Prints the bytes so far.
    fn flush(&mut self) -> io::Result<()> {
        if self.bytes.is_empty() { Ok(()) } else { self.leave() }
    }
}

/// Prints; false if the reader has closed the pipe.
pub fn print(bytes: &[u8]) -> Result<bool, CommandFailure> {
    is_open(print_bytes(bytes))
}

fn print_bytes(bytes: &[u8]) -> io::Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(bytes).and_then(|()| out.flush())
}

/// Whether the reader still reads what was printed.
fn is_open(printed: io::Result<()>) -> Result<bool, CommandFailure> {
    match printed {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(false),
        Err(error) => Err(failed(&error)),
    }
}

/// Prints the result of a command, as JSON or as text.
pub fn result(
    as_json: bool,
    value: &serde_json::Value,
    text: &str,
) -> Result<bool, CommandFailure> {
    print(if as_json { format!("{value:#}\n") } else { text.to_string() }.as_bytes())
}

/// Refuses a standard output that was closed when the program began, where `what` would be printed.
pub fn check_open(what: &str) -> Result<(), CommandFailure> {
    if blockhaul_transfer::is_heard(io::stdout().as_fd()) {
        return Ok(());
    }
    let text = format!("standard output, where {what} would be printed, is closed");
    Err(CommandFailure::usage(text))
}

/// The failure of standard output.
pub fn failed(error: &io::Error) -> CommandFailure {
    let text = format!("cannot write to standard output: {}", crate::exit::plain(error));
    CommandFailure::new(FAILED, text)
}

/// Prints lines on standard error, of which only the newlines affect a terminal ([`one_line`]).
pub fn error(text: &str) {
    raw_error(&lines(text));
}

/// Prints on standard error unchanged: text with colours or its own escaping.
pub fn raw_error(text: &str) {
    // If that fails, there is no other place to report it.
    let _ = std::io::stderr().lock().write_all(text.as_bytes());
}
