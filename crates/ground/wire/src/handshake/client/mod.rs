//! The client's side of the handshake, one option at a time.
//!
//! ```text
//! ClientHandshake::new
//!   receive ── Greeted          then any number of options, one after the other:
//!     list, info, ...           append the option's bytes
//!     receive ── NeedMore       read more
//!             ── the result, or Refused
//!   go, export_name
//!     receive ── Transmission
//! ```
//!
//! [`super::negotiation`] sends the usual sequence of options.

use super::GreetingForm;
use crate::option::{BlockSizeInfo, ListEntry, MetaContext, OptionCode, OptionError};
use crate::{ExportFlags, ReplyForm, RequestForm};

mod machine;

pub use machine::ClientHandshake;

/// What happened.
#[derive(Debug, PartialEq, Eq)]
pub enum ClientHandshakeEvent {
    /// The next message is at least `bytes` long, counted from the first byte that was not
    /// consumed. A buffer of [`ClientHandshake::MAX_MESSAGE`] bytes always suffices.
    NeedMore {
        /// Number of bytes required for the next call.
        bytes: usize,
    },
    /// A newstyle server has greeted; options may be sent. With [`GreetingForm::Newstyle`] only
    /// [`ClientHandshake::export_name`].
    Greeted(GreetingForm),
    /// STRUCTURED_REPLY or EXTENDED_HEADERS was accepted.
    Accepted(OptionCode),
    /// STARTTLS was accepted: start TLS, then call [`ClientHandshake::tls_started`].
    StartTls,
    /// The exports of the server.
    Listed(Vec<ListEntry>),
    /// Facts of an export.
    Info(Box<ExportInfo>),
    /// The contexts that LIST_META_CONTEXT found or SET_META_CONTEXT selected.
    Contexts(Vec<MetaContext>),
    /// The server refused an option; the next may be sent. After [`OptionError::Shutdown`] that
    /// must be [`ClientHandshake::abort`].
    Refused {
        /// The option.
        option: OptionCode,
        /// Why, for programs.
        reason: OptionError,
        /// Why, for users: escaped for printing, may be empty.
        text: String,
    },
    /// The server has acknowledged [`ClientHandshake::abort`]: close the connection.
    Aborted,
    /// Requests may be sent. From an oldstyle server this is the first event.
    Transmission(Box<ClientHandshakeResult>),
}

/// Facts of an export.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExportInfo {
    /// Size in bytes.
    pub size: u64,
    /// Its flags, without those that contradict the session (DF without structured replies, ...).
    pub flags: ExportFlags,
    /// Its block sizes. Sizes that violate the protocol are ignored, as peers do.
    pub block_sizes: Option<BlockSizeInfo>,
    /// The canonical name, if the server sent it.
    pub name: Option<String>,
    /// A text for users, if the server sent it: without control characters.
    pub description: Option<String>,
}

/// The result of the negotiation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClientHandshakeResult {
    /// The protocol of the server's greeting.
    pub protocol: GreetingForm,
    /// Whether TLS is in use.
    pub tls: bool,
    /// The requested name of the export; empty with oldstyle, which has no names.
    pub export: String,
    /// The form of requests.
    pub headers: RequestForm,
    /// The form of replies.
    pub replies: ReplyForm,
    /// The contexts for BLOCK_STATUS; empty: it must not be sent.
    pub contexts: Vec<MetaContext>,
    /// Size, flags, block sizes and names.
    pub info: ExportInfo,
}
