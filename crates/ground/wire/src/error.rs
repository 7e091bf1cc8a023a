//! The error type of this crate: why a peer's message is not accepted.

use std::fmt;

use crate::option::{OptionCode, OptionError};
use crate::text::printable;

/// Why a message could not be parsed or made. After any of them except [`ProtocolError::Caller`] the
/// connection is out of sync and must be closed.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ProtocolError {
    /// The peer does not speak NBD: its first bytes, at most 16, were these.
    NotNbd {
        /// The bytes received instead of the server's greeting.
        found: Vec<u8>,
    },
    /// A message did not start with its magic number.
    Magic {
        /// The message that was expected.
        what: &'static str,
        /// The number received.
        found: u64,
    },
    /// A length exceeds the protocol's limits or [`crate::limits`].
    TooLong {
        /// What is too long.
        what: &'static str,
        /// Its length, in bytes unless `what` says otherwise.
        len: u64,
        /// The maximum.
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
        /// What was received, and where it was not allowed.
        what: String,
    },
    /// The server refused something that this session requires.
    Refused {
        /// The option.
        option: OptionCode,
        /// What was requested, with its object.
        what: String,
        /// The server's reply.
        reason: OptionError,
        /// The server's explanation, escaped for printing; may be empty.
        text: String,
    },
    /// The export that a client chose cannot be served, and the option that it used (EXPORT_NAME)
    /// has no error reply: the server must close the connection.
    CannotRefuse {
        /// Why.
        why: String,
    },
    /// The caller used this crate incorrectly; the peer is not at fault.
    Caller {
        /// What was called, and why it is not allowed.
        what: &'static str,
    },
}

impl fmt::Display for ProtocolError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ProtocolError::NotNbd { found } if found.is_empty() => {
                f.write_str("the connection was closed before a greeting came: the server refuses this client, or is no NBD server")
            }
            ProtocolError::NotNbd { found } => {
                write!(f, "not an NBD server: its greeting was \"{}\"", printable(found, 64))
            }
            ProtocolError::Magic { what, found } => {
                write!(f, "{what} has the wrong magic {found:#x}")
            }
            ProtocolError::TooLong { what, len, max } => {
                write!(f, "{what} is too long: {len}, at most {max} is taken")
            }
            ProtocolError::Malformed { what, why } => write!(f, "malformed {what}: {why}"),
            ProtocolError::Unexpected { what } => f.write_str(what),
            ProtocolError::Refused { what, reason, text, .. } => {
                match reason {
                    // Not because of what was asked first.
                    OptionError::TlsRequired => f.write_str("TLS is required by the server")?,
                    reason => write!(f, "the server refused {what}: {reason}")?,
                }
                if text.is_empty() { Ok(()) } else { write!(f, " (\"{text}\")") }
            }
            ProtocolError::CannotRefuse { why } => f.write_str(why),
            ProtocolError::Caller { what } => f.write_str(what),
        }
    }
}

impl std::error::Error for ProtocolError {}
