//! The numbers of options, option replies, errors and kinds of information.

use std::fmt;

use crate::magic;

/// An option ("Option types").
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum OptionCode {
    /// Choose an export and start transmission, without an error reply.
    ExportName,
    /// End the session.
    Abort,
    /// List the exports.
    List,
    /// Continue with TLS.
    StartTls,
    /// Query an export.
    Info,
    /// Query an export and start transmission.
    Go,
    /// Use structured replies.
    StructuredReply,
    /// List the contexts of an export.
    ListMetaContext,
    /// Select contexts of an export.
    SetMetaContext,
    /// Use extended headers.
    ExtendedHeaders,
    /// An unknown number; servers reply [`OptionError::Unsupported`].
    Other(u32),
}

impl OptionCode {
    /// The option of a wire number.
    pub const fn from_wire(number: u32) -> OptionCode {
        match number {
            magic::OPT_EXPORT_NAME => OptionCode::ExportName,
            magic::OPT_ABORT => OptionCode::Abort,
            magic::OPT_LIST => OptionCode::List,
            magic::OPT_STARTTLS => OptionCode::StartTls,
            magic::OPT_INFO => OptionCode::Info,
            magic::OPT_GO => OptionCode::Go,
            magic::OPT_STRUCTURED_REPLY => OptionCode::StructuredReply,
            magic::OPT_LIST_META_CONTEXT => OptionCode::ListMetaContext,
            magic::OPT_SET_META_CONTEXT => OptionCode::SetMetaContext,
            magic::OPT_EXTENDED_HEADERS => OptionCode::ExtendedHeaders,
            other => OptionCode::Other(other),
        }
    }

    /// The wire number.
    pub const fn to_wire(self) -> u32 {
        match self {
            OptionCode::ExportName => magic::OPT_EXPORT_NAME,
            OptionCode::Abort => magic::OPT_ABORT,
            OptionCode::List => magic::OPT_LIST,
            OptionCode::StartTls => magic::OPT_STARTTLS,
            OptionCode::Info => magic::OPT_INFO,
            OptionCode::Go => magic::OPT_GO,
            OptionCode::StructuredReply => magic::OPT_STRUCTURED_REPLY,
            OptionCode::ListMetaContext => magic::OPT_LIST_META_CONTEXT,
            OptionCode::SetMetaContext => magic::OPT_SET_META_CONTEXT,
            OptionCode::ExtendedHeaders => magic::OPT_EXTENDED_HEADERS,
            OptionCode::Other(number) => number,
        }
    }
}

impl fmt::Display for OptionCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            OptionCode::ExportName => "EXPORT_NAME",
            OptionCode::Abort => "ABORT",
            OptionCode::List => "LIST",
            OptionCode::StartTls => "STARTTLS",
            OptionCode::Info => "INFO",
            OptionCode::Go => "GO",
            OptionCode::StructuredReply => "STRUCTURED_REPLY",
            OptionCode::ListMetaContext => "LIST_META_CONTEXT",
            OptionCode::SetMetaContext => "SET_META_CONTEXT",
            OptionCode::ExtendedHeaders => "EXTENDED_HEADERS",
            OptionCode::Other(number) => return write!(f, "option {number}"),
        })
    }
}

/// Why an option was refused ("Option reply types", those with bit 31).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum OptionError {
    /// `NBD_REP_ERR_UNSUP`: not known to the server.
    Unsupported,
    /// `NBD_REP_ERR_POLICY`: known and forbidden.
    Policy,
    /// `NBD_REP_ERR_INVALID`: malformed, or not allowed now.
    Invalid,
    /// `NBD_REP_ERR_PLATFORM`: not possible on the server's platform.
    Platform,
    /// `NBD_REP_ERR_TLS_REQD`: TLS first.
    TlsRequired,
    /// `NBD_REP_ERR_UNKNOWN`: no such export.
    Unknown,
    /// `NBD_REP_ERR_SHUTDOWN`: the server is stopping.
    Shutdown,
    /// `NBD_REP_ERR_BLOCK_SIZE_REQD`: the client must request block sizes.
    BlockSizeRequired,
    /// `NBD_REP_ERR_TOO_BIG`: the request or its reply is too large.
    TooBig,
    /// `NBD_REP_ERR_EXT_HEADER_REQD`: extended headers first, or already in use.
    ExtendedHeadersRequired,
    /// An unknown error, with bit 31.
    Other(u32),
}

impl OptionError {
    /// The error of a wire number; `None` if its bit 31 is clear.
    pub const fn from_wire(number: u32) -> Option<OptionError> {
        if number & magic::REP_ERROR_BIT == 0 {
            return None;
        }
        Some(match number {
            magic::REP_ERR_UNSUP => OptionError::Unsupported,
            magic::REP_ERR_POLICY => OptionError::Policy,
            magic::REP_ERR_INVALID => OptionError::Invalid,
            magic::REP_ERR_PLATFORM => OptionError::Platform,
            magic::REP_ERR_TLS_REQD => OptionError::TlsRequired,
            magic::REP_ERR_UNKNOWN => OptionError::Unknown,
            magic::REP_ERR_SHUTDOWN => OptionError::Shutdown,
            magic::REP_ERR_BLOCK_SIZE_REQD => OptionError::BlockSizeRequired,
            magic::REP_ERR_TOO_BIG => OptionError::TooBig,
            magic::REP_ERR_EXT_HEADER_REQD => OptionError::ExtendedHeadersRequired,
            other => OptionError::Other(other),
        })
    }

    /// The wire number.
    pub const fn to_wire(self) -> u32 {
        match self {
            OptionError::Unsupported => magic::REP_ERR_UNSUP,
            OptionError::Policy => magic::REP_ERR_POLICY,
            OptionError::Invalid => magic::REP_ERR_INVALID,
            OptionError::Platform => magic::REP_ERR_PLATFORM,
            OptionError::TlsRequired => magic::REP_ERR_TLS_REQD,
            OptionError::Unknown => magic::REP_ERR_UNKNOWN,
            OptionError::Shutdown => magic::REP_ERR_SHUTDOWN,
            OptionError::BlockSizeRequired => magic::REP_ERR_BLOCK_SIZE_REQD,
            OptionError::TooBig => magic::REP_ERR_TOO_BIG,
            OptionError::ExtendedHeadersRequired => magic::REP_ERR_EXT_HEADER_REQD,
            OptionError::Other(number) => number,
        }
    }
}

impl fmt::Display for OptionError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            OptionError::Unsupported => "not supported",
            OptionError::Policy => "forbidden by its policy",
            OptionError::Invalid => "invalid request",
            OptionError::Platform => "not possible on its platform",
            OptionError::TlsRequired => "TLS is required",
            OptionError::Unknown => "no such export",
            OptionError::Shutdown => "it is shutting down",
            OptionError::BlockSizeRequired => "block sizes must be asked for",
            OptionError::TooBig => "too big",
            OptionError::ExtendedHeadersRequired => "extended headers are required",
            OptionError::Other(number) => {
                return write!(f, "unknown error {}", number & !magic::REP_ERROR_BIT);
            }
        })
    }
}

/// The type of a reply to an option.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ReplyCode {
    /// The last reply: done.
    Ack,
    /// One export of a list.
    Server,
    /// One item of information.
    Info,
    /// One context.
    MetaContext,
    /// The last reply: refused.
    Error(OptionError),
    /// An unknown type.
    Other(u32),
}

impl ReplyCode {
    /// The type of a wire number.
    pub const fn from_wire(number: u32) -> ReplyCode {
        match number {
            magic::REP_ACK => ReplyCode::Ack,
            magic::REP_SERVER => ReplyCode::Server,
            magic::REP_INFO => ReplyCode::Info,
            magic::REP_META_CONTEXT => ReplyCode::MetaContext,
            other => match OptionError::from_wire(other) {
                Some(error) => ReplyCode::Error(error),
                None => ReplyCode::Other(other),
            },
        }
    }

    /// The wire number.
    pub const fn to_wire(self) -> u32 {
        match self {
            ReplyCode::Ack => magic::REP_ACK,
            ReplyCode::Server => magic::REP_SERVER,
            ReplyCode::Info => magic::REP_INFO,
            ReplyCode::MetaContext => magic::REP_META_CONTEXT,
            ReplyCode::Error(error) => error.to_wire(),
            ReplyCode::Other(number) => number,
        }
    }
}

/// An item of information ("NBD_REP_INFO").
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum InfoKind {
    /// Size and flags; always sent.
    Export,
    /// The canonical name.
    Name,
    /// The description.
    Description,
    /// The block sizes.
    BlockSize,
    /// An unknown item, to be ignored.
    Other(u16),
}

impl InfoKind {
    /// The item of a wire number.
    pub const fn from_wire(number: u16) -> InfoKind {
        match number {
            magic::INFO_EXPORT => InfoKind::Export,
            magic::INFO_NAME => InfoKind::Name,
            magic::INFO_DESCRIPTION => InfoKind::Description,
            magic::INFO_BLOCK_SIZE => InfoKind::BlockSize,
            other => InfoKind::Other(other),
        }
    }

    /// The wire number.
    pub const fn to_wire(self) -> u16 {
        match self {
            InfoKind::Export => magic::INFO_EXPORT,
            InfoKind::Name => magic::INFO_NAME,
            InfoKind::Description => magic::INFO_DESCRIPTION,
            InfoKind::BlockSize => magic::INFO_BLOCK_SIZE,
            InfoKind::Other(number) => number,
        }
    }
}
