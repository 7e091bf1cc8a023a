//! Standard output and error. A reader that has gone away is not a failure; nothing here panics.

use std::io::{ErrorKind, Write as _};

use crate::exit::{FAILED, Failure};

/// What a command prints in the end: kept back until it is known to succeed, within a bound.
#[derive(Debug, Default)]
pub struct Output {
    bytes: Vec<u8>,
    gone: bool,
}

impl Output {
    /// Bytes that are kept back: more than any output that people read. What is longer leaves early.
    const KEPT: usize = 64 << 20;

    /// Appends text.
    pub fn text(&mut self, text: &str) -> Result<(), Failure> {
        self.bytes.extend_from_slice(text.as_bytes());
        if self.bytes.len() >= Self::KEPT { self.leave() } else { Ok(()) }
    }

    /// Whether the reader has gone away, so that the rest need not be made.
    pub fn is_gone(&self) -> bool {
        self.gone
    }

    /// Prints what is left.
    pub fn finish(mut self) -> Result<(), Failure> {
        self.leave()
    }

    fn leave(&mut self) -> Result<(), Failure> {
        let bytes = std::mem::take(&mut self.bytes);
        self.gone = self.gone || !print(&bytes)?;
        Ok(())
    }
}

/// Prints; false if nobody reads any more.
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

/// Says something on standard error.
pub fn error(text: &str) {
    // If nobody reads it, there is nowhere else to say so.
    let _ = std::io::stderr().lock().write_all(text.as_bytes());
}
