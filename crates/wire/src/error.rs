//! The one error type of this crate: what a peer did that its message cannot be taken.

use std::fmt;

use crate::limits;

/// Why a message could not be taken or made. After any of them but [`Error::Caller`] the connection
/// is out of step and can only be closed.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Error {
    /// The peer does not speak NBD: its first bytes, at most 16, were these.
    NotNbd {
        /// What came instead of the server's greeting.
        found: Vec<u8>,
    },
    /// A message did not start with its magic number.
    Magic {
        /// The message that was due.
        what: &'static str,
        /// The number that came.
        found: u64,
    },
    /// A length goes beyond what the protocol or [`crate::limits`] allow.
    TooLong {
        /// What is too long.
        what: &'static str,
        /// Its length, in bytes unless `what` says otherwise.
        len: u64,
        /// The longest that is taken.
        max: u64,
    },
    /// A message contradicts itself or the protocol.
    Malformed {
        /// The message.
        what: &'static str,
        /// What is wrong with it.
        why: &'static str,
    },
    /// The other side sent a message that is not allowed at this point.
    Unexpected {
        /// What came, and where it was not allowed.
        what: String,
    },
    /// The server refused what this session cannot do without.
    Refused {
        /// What was asked for, with its object.
        what: String,
        /// The server's answer.
        reason: crate::option::OptionError,
        /// The server's explanation, escaped for printing; may be empty.
        text: String,
    },
    /// The export that a client chose cannot be served, and the option it used (EXPORT_NAME) has no
    /// way to say so: the server's side must close the connection.
    CannotRefuse {
        /// Why.
        why: String,
    },
    /// The caller used this crate out of order; the peer did nothing wrong.
    Caller {
        /// What was called, and why it cannot be.
        what: &'static str,
    },
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::NotNbd { found } if found.is_empty() => {
                f.write_str("not an NBD server: the connection was closed before a greeting came")
            }
            Error::NotNbd { found } => {
                write!(f, "not an NBD server: its greeting was \"{}\"", printable(found, 64))
            }
            Error::Magic { what, found } => write!(f, "{what} has the wrong magic {found:#x}"),
            Error::TooLong { what, len, max } => {
                write!(f, "{what} is too long: {len}, at most {max} is taken")
            }
            Error::Malformed { what, why } => write!(f, "malformed {what}: {why}"),
            Error::Unexpected { what } => f.write_str(what),
            Error::Refused { what, reason, text } => {
                write!(f, "the server refused {what}: {reason}")?;
                if text.is_empty() { Ok(()) } else { write!(f, " (\"{text}\")") }
            }
            Error::CannotRefuse { why } => f.write_str(why),
            Error::Caller { what } => f.write_str(what),
        }
    }
}

impl std::error::Error for Error {}

/// Text of a peer made fit for printing: at most `max` bytes, control characters and what is not
/// UTF-8 escaped. A cut is marked by `...`.
pub fn printable(text: &[u8], max: usize) -> String {
    let mut out = String::new();
    // Escapes only lengthen the text, so more than `max` bytes of it can never be shown. A character
    // takes at most four bytes; the slack keeps the cut from splitting the last one.
    let seen = &text[..text.len().min(max.saturating_add(4))];
    for chunk in seen.utf8_chunks() {
        for c in chunk.valid().chars() {
            let start = out.len();
            // Escaped: control characters (C0, C1, DEL), and the marks that turn the direction of
            // writing, which could make a terminal show something else than was sent.
            let turns = matches!(c, '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
            if c.is_control() || turns || c == '\\' || c == '"' {
                out.extend(c.escape_default());
            } else {
                out.push(c);
            }
            if out.len() > max {
                out.truncate(start);
                out.push_str("...");
                return out;
            }
        }
        for byte in chunk.invalid() {
            if out.len() + 4 > max {
                out.push_str("...");
                return out;
            }
            out.push_str(&format!("\\x{byte:02x}"));
        }
    }
    if seen.len() < text.len() {
        out.push_str("...");
    }
    out
}

/// A server's or client's error text for printing, bounded by [`limits::ERROR_TEXT`].
pub(crate) fn error_text(text: &[u8]) -> String {
    printable(text, limits::ERROR_TEXT)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_cannot_drive_a_terminal() {
        assert_eq!(printable(b"\x1b[2Jhi\n\xff\"", 100), "\\u{1b}[2Jhi\\n\\xff\\\"");
        assert_eq!(printable("a\u{202e}b\u{9b}é".as_bytes(), 100), "a\\u{202e}b\\u{9b}é");
    }

    #[test]
    fn text_is_cut_between_characters() {
        assert_eq!(printable("ééé".as_bytes(), 5), "éé...");
        assert_eq!(printable("ééé".as_bytes(), 6), "ééé");
        assert_eq!(printable(&[b'a'; 100], 10), "aaaaaaaaaa...");
        assert_eq!(printable(&[0xff; 100], 9), "\\xff\\xff...");
        for max in 0..40 {
            let shown = printable("\u{1b}é\u{10348}\\\"aé\u{10348}".as_bytes(), max);
            assert!(shown.len() <= max + 3, "{max}: {shown}");
        }
    }
}
