//! The server's side of the handshake.
//!
//! ```text
//! Handshake::new ── greeting
//!   loop: receive ── NeedMore        read more
//!                 ── Export          answer_export
//!                 ── List            answer_list
//!                 ── MetaContext     answer_contexts
//!                 ── StartTls        send, start TLS, tls_started
//!                 ── Abort           send, close
//!                 ── Transmission    send, serve
//! ```

use crate::option::{BlockSizes, Context, Infos, OptionError};
use crate::{ExportFlags, Headers, Replies, limits, magic};

mod machine;

pub use machine::Handshake;

/// What a server offers in every handshake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Config {
    /// Speak fixed newstyle. Without it only EXPORT_NAME is taken (for tests of old clients).
    pub fixed_newstyle: bool,
    /// Let clients do without the zeroes after the answer to EXPORT_NAME.
    pub no_zeroes: bool,
    /// Offer STRUCTURED_REPLY.
    pub structured: bool,
    /// Offer EXTENDED_HEADERS. Who offers it takes payloads of BLOCK_STATUS too
    /// ([`crate::request::Filter`]), for [`ExportFlags::BLOCK_STATUS_PAYLOAD`] is then announced.
    pub extended: bool,
    /// Offer LIST_META_CONTEXT and SET_META_CONTEXT.
    pub meta_contexts: bool,
    /// TLS.
    pub tls: Tls,
    /// Options that a client may send; [`limits::OPTIONS_PER_EXPORT`] more for each that was listed.
    pub options: u32,
    /// Queries in one option about contexts; at most [`limits::QUERIES`].
    pub queries: usize,
    /// Bytes of an export's name; at most [`limits::STRING`].
    pub name: usize,
}

impl Default for Config {
    /// All of it but TLS, within the usual limits.
    fn default() -> Config {
        Config {
            fixed_newstyle: true,
            no_zeroes: true,
            structured: true,
            extended: true,
            meta_contexts: true,
            tls: Tls::Off,
            options: limits::OPTIONS,
            queries: limits::QUERIES,
            name: limits::STRING,
        }
    }
}

/// The mode of a server with respect to TLS ("Server-side requirements").
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Tls {
    /// NOTLS: STARTTLS is refused.
    #[default]
    Off,
    /// SELECTIVETLS: a client may start it; the caller may refuse exports with
    /// [`OptionError::TlsRequired`] until it does.
    Offered,
    /// FORCEDTLS: nothing else is answered before it.
    Required,
}

/// What happened, and what the caller must do.
#[derive(Debug, PartialEq, Eq)]
pub enum Event {
    /// The next message is `bytes` long at least, counted from the first byte that was not
    /// consumed. A buffer of [`Handshake::MAX_MESSAGE`] bytes always suffices.
    NeedMore {
        /// Bytes that must be there before the next call is of use.
        bytes: usize,
    },
    /// The client asks about an export, or chooses it; answer with [`Handshake::answer_export`].
    Export {
        /// The export's name; empty for the default one.
        name: String,
        /// Items of information it asks for (handled by the handshake).
        wants: Infos,
        /// Whether transmission follows when the answer is yes.
        go: bool,
    },
    /// The client asks for the exports; answer with [`Handshake::answer_list`].
    List,
    /// The client asks which contexts an export has, or selects some; answer with
    /// [`Handshake::answer_contexts`].
    MetaContext {
        /// The export's name; empty for the default one.
        export: String,
        /// What to look for; none means all when it lists, and none when it selects. A query of an
        /// unknown namespace is to be ignored.
        queries: Vec<String>,
        /// Whether the contexts are selected for the session, not only listed.
        set: bool,
    },
    /// Send what is in `out`, start TLS, then call [`Handshake::tls_started`].
    StartTls,
    /// Send what is in `out`, if the client still listens, and close.
    Abort,
    /// Send what is in `out`; requests follow.
    Transmission(Box<Negotiated>),
}

/// What the client and this server agreed on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Negotiated {
    /// The export, by the name that the client gave.
    pub export: String,
    /// The form of requests.
    pub headers: Headers,
    /// The form of replies.
    pub replies: Replies,
    /// The contexts that BLOCK_STATUS tells about; empty: it is refused.
    pub contexts: Vec<Context>,
    /// Flags as they were sent to the client; what is not among them may be refused.
    pub flags: ExportFlags,
    /// Whether the client asked for the block sizes in GO and was told them, and so must obey them.
    pub obeys_block_sizes: bool,
    /// Whether TLS is in use.
    pub tls: bool,
}

/// What a server knows of an export.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct ExportInfo {
    /// Its size in bytes.
    pub size: u64,
    /// What it offers. HAS_FLAGS is added; SEND_DF, SEND_FAST_ZERO and BLOCK_STATUS_PAYLOAD are
    /// corrected for what was negotiated.
    pub flags: ExportFlags,
    /// Its block sizes, within the document's rules; `None` if it has no wishes.
    pub block_sizes: Option<BlockSizes>,
    /// Refuse clients that do not ask for the block sizes.
    pub require_block_sizes: bool,
    /// The canonical name, if it may differ from the one that was asked for.
    pub name: Option<String>,
    /// Text for people.
    pub description: Option<String>,
}

/// A refusal of what a client asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// Why, for programs.
    pub error: OptionError,
    /// Why, for people; cut to the protocol's bound.
    pub text: String,
}

impl Refusal {
    /// A refusal with a text.
    pub fn new(error: OptionError, text: impl Into<String>) -> Refusal {
        Refusal { error, text: text.into() }
    }
}

/// The greeting of an oldstyle server: the whole handshake. Transmission follows at once, with
/// compact headers and simple replies.
pub fn oldstyle(size: u64, flags: ExportFlags, out: &mut Vec<u8>) {
    let flags = flags | ExportFlags::HAS_FLAGS;
    out.extend_from_slice(&magic::INIT_PASSWD.to_be_bytes());
    out.extend_from_slice(&magic::CLISERV.to_be_bytes());
    out.extend_from_slice(&size.to_be_bytes());
    // The upper half is where newstyle has its handshake flags; an oldstyle server sets none.
    out.extend_from_slice(&u32::from(plain_flags(flags).bits()).to_be_bytes());
    out.extend_from_slice(&[0; magic::RESERVED_ZEROES]);
}

/// The flags that need no negotiation, without contradictions.
fn plain_flags(flags: ExportFlags) -> ExportFlags {
    let negotiated =
        ExportFlags::SEND_DF | ExportFlags::BLOCK_STATUS_PAYLOAD | ExportFlags::SEND_RESIZE;
    let flags = flags.without(negotiated);
    match flags.contains(ExportFlags::SEND_WRITE_ZEROES) {
        true => flags,
        false => flags.without(ExportFlags::SEND_FAST_ZERO),
    }
}
