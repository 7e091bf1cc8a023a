//! Standard output and error. A closed pipe is not a failure; nothing here panics.

use std::io::{ErrorKind, Write as _};

use crate::exit::{FAILED, Failure};

pub use blockhaul_transfer::{lines, one_line, one_word};

/// The output of a command: held back until the command succeeds, within a limit.
#[derive(Debug, Default)]
pub struct Output {
    bytes: Vec<u8>,
    gone: bool,
}

impl Output {
    /// Maximum bytes held back: more than any output for users. Longer output is printed early.
    const KEPT: usize = 64 << 20;

    /// Appends text.
    pub fn text(&mut self, text: &str) -> Result<(), Failure> {
        self.bytes.extend_from_slice(text.as_bytes());
        if self.bytes.len() >= Self::KEPT { self.leave() } else { Ok(()) }
    }

    /// Prints what there is so far.
    pub fn now(&mut self) -> Result<(), Failure> {
        if self.bytes.is_empty() { Ok(()) } else { self.leave() }
    }

    /// Whether the reader has closed the pipe, so that the rest is not needed.
    pub fn is_gone(&self) -> bool {
        self.gone
    }

    /// Prints the rest.
    pub fn finish(mut self) -> Result<(), Failure> {
        self.leave()
    }

    fn leave(&mut self) -> Result<(), Failure> {
        let bytes = std::mem::take(&mut self.bytes);
        self.gone = self.gone || !print(&bytes)?;
        Ok(())
    }
}

/// Prints; false if the reader has closed the pipe.
pub fn print(bytes: &[u8]) -> Result<bool, Failure> {
    let mut out = std::io::stdout().lock();
    match out.write_all(bytes).and_then(|()| out.flush()) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(false),
        Err(error) => {
            let text = format!("cannot write to standard output: {}", crate::exit::plain(&error));
            Err(Failure::new(FAILED, text))
        }
    }
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
