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

/// Says something on standard error: lines, of which nothing but their ends acts on a terminal
/// ([`one_line`]).
pub fn error(text: &str) {
    raw_error(&lines(text));
}

/// Says something on standard error as it is: what has colours or an escaping of its own.
pub fn raw_error(text: &str) {
    // If nobody reads it, there is nowhere else to say so.
    let _ = std::io::stderr().lock().write_all(text.as_bytes());
}

/// Text from outside in one line: names, paths, arguments, messages and fields of headers must not look
/// like a line of their own, or change a terminal. Control characters but for tabs, and the marks that
/// turn the direction of writing, are escaped as in Rust; newlines at the end are left out.
pub fn one_line(text: &str) -> String {
    word(text.trim_end_matches('\n'))
}

/// The same of a part of a line.
pub fn word(text: &str) -> String {
    escaped(text, |character| character == '\t')
}

/// Text of several lines, each as [`one_line`] has it.
pub fn lines(text: &str) -> String {
    escaped(text, |character| matches!(character, '\t' | '\n'))
}

fn escaped(text: &str, stays: impl Fn(char) -> bool) -> String {
    let mut line = String::with_capacity(text.len());
    for character in text.chars() {
        match blockhaul_wire::unprintable(character) && !stays(character) {
            true => line.extend(character.escape_default()),
            false => line.push(character),
        }
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_others_have_said_stays_on_its_line() {
        let text = "a\nb\tc\u{1b}[31m\u{9b}é\u{202e}\u{61c}\n";
        assert_eq!(one_line(text), "a\\nb\tc\\u{1b}[31m\\u{9b}é\\u{202e}\\u{61c}");
        assert_eq!(lines(text), "a\nb\tc\\u{1b}[31m\\u{9b}é\\u{202e}\\u{61c}\n");
    }
}
