//! The client's side of the handshake, one option at a time.
//!
//! ```text
//! Handshake::new
//!   receive ── Greeted          then any number of options, one after the other:
//!     list, info, ...           append the option's bytes
//!     receive ── NeedMore       read more
//!             ── the result, or Refused
//!   go, export_name
//!     receive ── Transmission
//! ```
//!
//! [`super::negotiation`] runs the usual order of options by itself.

use super::Protocol;
use crate::option::{BlockSizes, Context, ListEntry, OptionCode, OptionError};
use crate::{ExportFlags, Headers, Replies};

mod machine;

pub use machine::Handshake;

/// What happened.
#[derive(Debug, PartialEq, Eq)]
pub enum Event {
    /// The next message is `bytes` long at least, counted from the first byte that was not
    /// consumed. A buffer of [`Handshake::MAX_MESSAGE`] bytes always suffices.
    NeedMore {
        /// Bytes that must be there before the next call is of use.
        bytes: usize,
    },
    /// A newstyle server has greeted; options may be sent. With [`Protocol::Newstyle`] only
    /// [`Handshake::export_name`].
    Greeted(Protocol),
    /// STRUCTURED_REPLY or EXTENDED_HEADERS was accepted.
    Accepted(OptionCode),
    /// STARTTLS was accepted: start TLS, then call [`Handshake::tls_started`].
    StartTls,
    /// The exports of the server.
    Listed(Vec<ListEntry>),
    /// Facts of an export.
    Info(Box<ExportInfo>),
    /// The contexts that LIST_META_CONTEXT found or SET_META_CONTEXT selected.
    Contexts(Vec<Context>),
    /// The server refused an option; the next may be sent. After [`OptionError::Shutdown`] that must
    /// be [`Handshake::abort`].
    Refused {
        /// The option.
        option: OptionCode,
        /// Why, for programs.
        reason: OptionError,
        /// Why, for people: escaped for printing, may be empty.
        text: String,
    },
    /// The server took note of [`Handshake::abort`]: close.
    Aborted,
    /// Requests may be sent. From an oldstyle server this is the first event.
    Transmission(Box<Negotiated>),
}

/// Facts of an export.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExportInfo {
    /// Size in bytes.
    pub size: u64,
    /// What it offers, less what contradicts the session (DF without structured replies, ...).
    pub flags: ExportFlags,
    /// Its block sizes. Sizes that break the protocol's rules are ignored, as peers do.
    pub block_sizes: Option<BlockSizes>,
    /// The canonical name, if the server told it.
    pub name: Option<String>,
    /// Text for people, if the server told it: without control characters.
    pub description: Option<String>,
}

/// What the server and this client agreed on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Negotiated {
    /// How the server greeted.
    pub protocol: Protocol,
    /// Whether TLS is in use.
    pub tls: bool,
    /// The export's name as it was asked for; empty with oldstyle, which has no names.
    pub export: String,
    /// The form of requests.
    pub headers: Headers,
    /// The form of replies.
    pub replies: Replies,
    /// The contexts that BLOCK_STATUS tells about; empty: it must not be sent.
    pub contexts: Vec<Context>,
    /// Size, flags, block sizes and names.
    pub info: ExportInfo,
}
