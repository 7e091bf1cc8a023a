//! Events for the driver of a connection, and the outcomes of requests.

use std::fmt;

use crate::Errno;
use crate::status::StatusPayload;

/// The result of [`super::Transmission::receive`].
#[derive(Debug, PartialEq, Eq)]
pub struct ReceiveResult<T> {
    /// Bytes of the input that were consumed.
    pub used: usize,
    /// Messages whose heads are among these bytes.
    pub messages: u64,
    /// The event after these bytes.
    pub event: TransmissionEvent<T>,
}

/// An event that a driver must handle. `T` comes with each request.
#[derive(Debug, PartialEq, Eq)]
pub enum TransmissionEvent<T> {
    /// The head of a message is not complete.
    NeedMore,
    /// This number of bytes is missing to the contents of a message: extents or an error. A driver
    /// may receive them into memory of their own.
    Contents(usize),
    /// Bytes of a read come next in the stream. The event is repeated with the rest until
    /// [`super::Transmission::took`] has been told about all of them.
    Payload(ReadRange),
    /// Bytes of a read are zeroes, and do not come.
    Hole(ReadRange),
    /// A request has its whole reply, and is not in flight any more.
    End {
        /// The cookie of the request.
        cookie: u64,
        /// The value that came with the request.
        request: T,
        /// The block status of each context that was asked for, in that order; empty for other
        /// commands.
        result: Result<Vec<StatusPayload>, ReplyError>,
    },
}

/// A range of a read in flight. It is not empty, and inside the request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReadRange {
    /// The cookie of the request.
    pub cookie: u64,
    /// Offset in the request in bytes.
    pub at: u64,
    /// Length in bytes.
    pub len: u64,
}

/// A reply that ends its request without success. The connection remains usable.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ReplyError {
    /// The server reports an error.
    Server {
        /// The error.
        error: Errno,
        /// The server's explanation, escaped for printing; may be empty.
        text: String,
        /// Offset of the error in the export in bytes, if the server names one.
        at: Option<u64>,
    },
    /// Bytes of a read did not come, or came more than once.
    Incomplete,
    /// A context of a block status request is missing.
    NoContext,
}

impl fmt::Display for ReplyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ReplyError::Server { error, text, at } => {
                write!(f, "the server answers {error}")?;
                match (text.trim(), at) {
                    ("", None) => Ok(()),
                    ("", Some(at)) => write!(f, " (at offset {at})"),
                    (text, None) => write!(f, " ({text})"),
                    (_, Some(at)) => write!(f, " ({} at offset {at})", text.trim_start()),
                }
            }
            ReplyError::Incomplete => {
                f.write_str("the server left out bytes of a read, or sent some twice")
            }
            ReplyError::NoContext => f.write_str("the server left out a metadata context"),
        }
    }
}

impl std::error::Error for ReplyError {}
