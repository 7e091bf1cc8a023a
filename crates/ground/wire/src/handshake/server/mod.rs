//! The server's side of the handshake.
//!
//! ```text
//! ServerHandshake::new ── greeting
//!   loop: receive ── NeedMore        read more
//!                 ── Export          answer_export
//!                 ── List            answer_list
//!                 ── MetaContext     answer_contexts
//!                 ── StartTls        send, start TLS, tls_started
//!                 ── Abort           send, close
//!                 ── Transmission    send, serve
//! ```

use crate::option::{BlockSizeInfo, InfoSet, MetaContext, OptionError};
use crate::{ExportFlags, ReplyForm, RequestForm, limits, magic};

mod machine;

pub use machine::ServerHandshake;

/// What a server offers in every handshake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HandshakeConfig {
    /// Offer fixed newstyle. Without it only EXPORT_NAME is accepted (for tests of old clients).
    pub fixed_newstyle: bool,
    /// Let clients omit the zeroes after the reply to EXPORT_NAME.
    pub no_zeroes: bool,
    /// Offer STRUCTURED_REPLY.
    pub structured: bool,
    /// Offer EXTENDED_HEADERS. The server must then also accept payloads of BLOCK_STATUS
    /// ([`crate::request::StatusFilter`]), as [`ExportFlags::BLOCK_STATUS_PAYLOAD`] is announced.
    pub extended: bool,
    /// Offer LIST_META_CONTEXT and SET_META_CONTEXT.
    pub meta_contexts: bool,
    /// TLS.
    pub tls: TlsRequirement,
    /// Maximum number of options; [`limits::OPTIONS_PER_EXPORT`] more for each listed export.
    pub options: u32,
    /// Queries in one option about contexts; at most [`limits::QUERIES`].
    pub queries: usize,
    /// Bytes of an export's name; at most [`limits::STRING`].
    pub name: usize,
}

impl Default for HandshakeConfig {
    /// Everything but TLS, within the usual limits.
    fn default() -> HandshakeConfig {
        HandshakeConfig {
            fixed_newstyle: true,
            no_zeroes: true,
            structured: true,
            extended: true,
            meta_contexts: true,
            tls: TlsRequirement::Off,
            options: limits::OPTIONS,
            queries: limits::QUERIES,
            name: limits::STRING,
        }
    }
}

/// The TLS mode of a server ("Server-side requirements").
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum TlsRequirement {
    /// NOTLS: STARTTLS is refused.
    #[default]
    Off,
    /// SELECTIVETLS: a client may start it; the caller may refuse exports with
    /// [`OptionError::TlsRequired`] until it does.
    Offered,
    /// FORCEDTLS: nothing else is accepted before it.
    Required,
}

/// An event, and what the caller must do.
#[derive(Debug, PartialEq, Eq)]
pub enum ServerHandshakeEvent {
    /// The next message is at least `bytes` long, counted from the first byte that was not
    /// consumed. A buffer of [`ServerHandshake::MAX_MESSAGE`] bytes always suffices.
    NeedMore {
        /// Number of bytes required for the next call.
        bytes: usize,
    },
    /// The client queries or chooses an export; answer with [`ServerHandshake::answer_export`].
    Export {
        /// The export's name; empty for the default one.
        name: String,
        /// Requested items of information (handled by the handshake).
        wants: InfoSet,
        /// Whether transmission follows on success.
        go: bool,
    },
    /// The client lists the exports; answer with [`ServerHandshake::answer_list`].
    List,
    /// The client lists or selects contexts of an export; answer with
    /// [`ServerHandshake::answer_contexts`].
    MetaContext {
        /// The export's name; empty for the default one.
        export: String,
        /// The queries; none means all when listing, and none when selecting. Ignore a query of an
        /// unknown namespace.
        queries: Vec<String>,
        /// Whether the contexts are selected for the session, not only listed.
        set: bool,
    },
    /// Send `out`, start TLS, then call [`ServerHandshake::tls_started`].
    StartTls,
    /// Send `out`, if the client still receives, and close.
    Abort,
    /// Send `out`; requests follow.
    Transmission(Box<ServerHandshakeResult>),
}

/// The result of the negotiation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServerHandshakeResult {
    /// The export, by the name that the client sent.
    pub export: String,
    /// The form of requests.
    pub headers: RequestForm,
    /// The form of replies.
    pub replies: ReplyForm,
    /// The contexts for BLOCK_STATUS; empty: it is refused.
    pub contexts: Vec<MetaContext>,
    /// Flags as sent to the client; requests that need others may be refused.
    pub flags: ExportFlags,
    /// Whether the client requested and received the block sizes in GO, and so must obey them.
    pub obeys_block_sizes: bool,
    /// Whether TLS is in use.
    pub tls: bool,
}

/// The server's information about an export.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct ExportReply {
    /// Its size in bytes.
    pub size: u64,
    /// Its flags. HAS_FLAGS is added; SEND_DF, SEND_FAST_ZERO and BLOCK_STATUS_PAYLOAD are adjusted
    /// to what was negotiated.
    pub flags: ExportFlags,
    /// Its block sizes, within the document's rules; `None` if it has no preference.
    pub block_sizes: Option<BlockSizeInfo>,
    /// Refuse clients that do not request the block sizes.
    pub require_block_sizes: bool,
    /// The canonical name, if it may differ from the requested one.
    pub name: Option<String>,
    /// A text for users.
    pub description: Option<String>,
}

/// A refusal of a client's request.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct OptionRefusal {
    /// Why, for programs.
    pub error: OptionError,
    /// Why, for users; cut to the protocol's maximum.
    pub text: String,
}

impl OptionRefusal {
    /// A refusal with a text.
    pub fn new(error: OptionError, text: impl Into<String>) -> OptionRefusal {
        OptionRefusal { error, text: text.into() }
    }
}

/// The greeting of an oldstyle server, which is the whole handshake. Transmission follows at once,
/// with compact headers and simple replies.
pub fn oldstyle(size: u64, flags: ExportFlags, out: &mut Vec<u8>) {
    let flags = flags | ExportFlags::HAS_FLAGS;
    out.extend_from_slice(&magic::INIT_PASSWD.to_be_bytes());
    out.extend_from_slice(&magic::CLISERV.to_be_bytes());
    out.extend_from_slice(&size.to_be_bytes());
    // nbd: handshake.oldstyle-flags
    // In newstyle, the upper half has the handshake flags; an oldstyle server sets none.
    out.extend_from_slice(&u32::from(plain_flags(flags).bits()).to_be_bytes());
    out.extend_from_slice(&[0; magic::RESERVED_ZEROES]);
}

// nbd: flags.fast-zero-clear
/// The flags that need no negotiation, without contradictions.
fn plain_flags(flags: ExportFlags) -> ExportFlags {
    let negotiated =
        ExportFlags::SEND_DF | ExportFlags::BLOCK_STATUS_PAYLOAD | ExportFlags::SEND_RESIZE;
    let flags = flags.without(negotiated);
    if flags.contains(ExportFlags::SEND_WRITE_ZEROES) {
        flags
    } else {
        flags.without(ExportFlags::SEND_FAST_ZERO)
    }
}
