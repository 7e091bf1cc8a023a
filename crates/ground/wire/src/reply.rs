//! Replies of the transmission phase: simple replies, structured reply chunks and the chunks of
//! EXTENDED_HEADERS, and the contents of data, hole and error chunks. Extents are in
//! [`crate::status`].

use std::fmt;

use crate::bytes::ByteReader;
use crate::errno::{self, Errno};
use crate::text::{cut, error_text, printable};
use crate::{HeaderBytes, ProtocolError, ReplyFlags, limits, magic};

/// The form of replies that was negotiated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum ReplyForm {
    /// Simple replies only.
    #[default]
    Simple,
    /// Chunks of 20 bytes; simple replies are still allowed for commands other than READ.
    Structured,
    /// Chunks of 32 bytes for everything (EXTENDED_HEADERS).
    Extended,
}

/// The head of one reply message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ReplyHeader {
    /// A simple reply: the whole reply to a request. After a successful one to READ, the requested
    /// number of bytes follows, which only the requester knows.
    Simple {
        /// The cookie of the request.
        cookie: u64,
        /// The error; `None` is success.
        error: Option<Errno>,
    },
    /// One of the chunks of a reply.
    Chunk(ReplyChunk),
}

impl ReplyHeader {
    /// Parses the head of a reply at the start of `bytes`; `Ok(None)` when more bytes are needed.
    ///
    /// Checks the magic against what was negotiated, and the length against the kind of the chunk
    /// and [`limits`], so that a caller may allocate [`ReplyChunk::length`] bytes. The caller, who knows
    /// the requests, must check: cookies, offsets, a simple reply to READ after structured replies
    /// were negotiated, a kind of chunk that does not fit the command.
    ///
    /// # Errors
    /// The connection must be closed after each: the document requires it for unknown kinds of
    /// chunks that are not errors, and for inconsistent contents.
    pub fn parse(
        bytes: &[u8],
        replies: ReplyForm,
    ) -> Result<Option<(ReplyHeader, usize)>, ProtocolError> {
        let mut reader = ByteReader::new(bytes);
        let Some(found) = reader.u32() else { return Ok(None) };
        let header = match (found, replies) {
            (magic::SIMPLE_REPLY, ReplyForm::Simple | ReplyForm::Structured) => {
                return Ok(simple(&mut reader).map(|header| (header, SIMPLE_LEN)));
            }
            (magic::STRUCTURED_REPLY, ReplyForm::Structured) => chunk(&mut reader, false),
            (magic::EXTENDED_REPLY, ReplyForm::Extended) => chunk(&mut reader, true),
            (magic::SIMPLE_REPLY | magic::STRUCTURED_REPLY | magic::EXTENDED_REPLY, _) => {
                return Err(ProtocolError::Unexpected {
                    what: format!(
                        "a reply with magic {found:#x} came, with {replies:?} negotiated"
                    ),
                });
            }
            _ => return Err(ProtocolError::Magic { what: "reply", found: found.into() }),
        };
        match header {
            None => Ok(None),
            Some(chunk) => {
                chunk.check()?;
                Ok(Some((ReplyHeader::Chunk(chunk), chunk.header_len())))
            }
        }
    }

    /// The cookie of the request that is answered.
    pub const fn cookie(&self) -> u64 {
        match self {
            ReplyHeader::Simple { cookie, .. } => *cookie,
            ReplyHeader::Chunk(chunk) => chunk.cookie,
        }
    }

    /// The head as bytes.
    ///
    /// # Errors
    /// As [`ReplyChunk::encode`].
    pub fn encode(&self) -> Result<HeaderBytes, ProtocolError> {
        match self {
            ReplyHeader::Simple { cookie, error } => Ok(simple_bytes(*cookie, *error)),
            ReplyHeader::Chunk(chunk) => chunk.encode(),
        }
    }

    /// Appends the head to `out`.
    ///
    /// # Errors
    /// As [`ReplyChunk::encode`].
    pub fn emit(&self, out: &mut Vec<u8>) -> Result<(), ProtocolError> {
        out.extend_from_slice(&self.encode()?);
        Ok(())
    }
}

/// Bytes of a simple reply's head.
pub const SIMPLE_LEN: usize = 16;
/// Bytes of a structured reply chunk's head.
pub const STRUCTURED_LEN: usize = 20;
/// Bytes of an extended reply chunk's head.
pub const EXTENDED_LEN: usize = 32;
/// Bytes before the data of an OFFSET_DATA chunk: its offset in the export.
pub const DATA_PREFIX_LEN: usize = 8;

/// The head of a chunk. With an `offset` it has 32 bytes, without one 20.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ReplyChunk {
    /// Reply flags; ignore unknown ones.
    pub flags: ReplyFlags,
    /// The contents of the payload.
    pub kind: ChunkKind,
    /// The cookie of the request.
    pub cookie: u64,
    /// With extended headers the offset of the request (not of the chunk's data).
    pub offset: Option<u64>,
    /// Bytes of payload after the head.
    pub length: u64,
}

impl ReplyChunk {
    /// Whether this is the last chunk of its reply.
    pub const fn is_done(&self) -> bool {
        self.flags.contains(ReplyFlags::DONE)
    }

    /// Bytes of this head.
    pub const fn header_len(&self) -> usize {
        match self.offset {
            Some(_) => EXTENDED_LEN,
            None => STRUCTURED_LEN,
        }
    }

    /// The head as bytes.
    ///
    /// # Errors
    /// [`ProtocolError::TooLong`] when the length does not fit the 32 bits of a structured chunk.
    pub fn encode(&self) -> Result<HeaderBytes, ProtocolError> {
        if self.offset.is_none() && self.length > u64::from(u32::MAX) {
            return Err(ProtocolError::TooLong {
                what: "payload of a structured reply chunk",
                len: self.length,
                max: u32::MAX.into(),
            });
        }
        Ok(self.bytes())
    }

    /// The head as bytes, for a length that is known to fit.
    fn bytes(&self) -> HeaderBytes {
        let start = |magic: u32| {
            HeaderBytes::new()
                .u32(magic)
                .u16(self.flags.bits())
                .u16(self.kind.to_wire())
                .u64(self.cookie)
        };
        match self.offset {
            Some(offset) => start(magic::EXTENDED_REPLY).u64(offset).u64(self.length),
            None => {
                #[expect(clippy::cast_possible_truncation, reason = "known to fit")]
                let length = self.length as u32;
                start(magic::STRUCTURED_REPLY).u32(length)
            }
        }
    }

    // nbd: extended.status-form-checked
    /// Checks the length against the kind ("Structured reply types") and our limits.
    fn check(&self) -> Result<(), ProtocolError> {
        let length = self.length;
        let bad = |why| Err(ProtocolError::Malformed { what: "reply chunk", why });
        let (ok, why, max) = match self.kind {
            ChunkKind::None if !self.is_done() => {
                return bad("an empty chunk that is not the last");
            }
            ChunkKind::None => (length == 0, "an empty chunk with a payload", 0),
            ChunkKind::OffsetData => {
                let max = u64::from(limits::PAYLOAD_HARD) + DATA_PREFIX_LEN as u64;
                // nbd: chunk.data-length
                (length > DATA_PREFIX_LEN as u64, "a chunk of data without data", max)
            }
            ChunkKind::OffsetHole => (length == 12, "a hole whose length is not 12", 12),
            ChunkKind::BlockStatus => {
                // nbd: status.length
                let ok = length >= 12 && length % 8 == 4;
                (ok, "block status with a broken list", 4 + 8 * limits::EXTENTS as u64)
            }
            ChunkKind::BlockStatusExt => {
                // nbd: extended.status-length
                let ok = length >= 24 && length % 16 == 8;
                (ok, "extended block status with a broken list", 8 + 16 * limits::EXTENTS as u64)
            }
            ChunkKind::ErrorOffset => {
                (length >= 14, "an error with an offset, too short", limits::ERROR_PAYLOAD.into())
            }
            ChunkKind::Error => (length >= 6, "an error, too short", limits::ERROR_PAYLOAD.into()),
            ChunkKind::Other(_) if self.kind.is_error() => {
                (length >= 6, "an unknown error, too short", limits::ERROR_PAYLOAD.into())
            }
            // nbd: chunk.unknown
            ChunkKind::Other(_) => return bad("an unknown kind of chunk"),
        };
        if !ok {
            return bad(why);
        }
        if length > max {
            return Err(ProtocolError::TooLong {
                what: "payload of a reply chunk",
                len: length,
                max,
            });
        }
        match (self.kind, self.offset) {
            (ChunkKind::BlockStatus, Some(_)) => {
                bad("block status of 32 bits in an extended reply")
            }
            (ChunkKind::BlockStatusExt, None) => {
                bad("block status of 64 bits in a structured reply")
            }
            _ => Ok(()),
        }
    }
}

/// The contents of a chunk ("Structured reply types").
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ChunkKind {
    /// None: the end of a reply.
    None,
    /// An offset in the export and data from there on.
    OffsetData,
    /// An offset and a length of zeroes.
    OffsetHole,
    /// Extents of a context in 32 bits.
    BlockStatus,
    /// Extents of a context in 64 bits (EXTENDED_HEADERS).
    BlockStatusExt,
    /// An error, and an optional text.
    Error,
    /// An error, an optional text, and its offset.
    ErrorOffset,
    /// An unknown kind; an error if bit 15 is set.
    Other(u16),
}

impl ChunkKind {
    /// The kind of a wire number.
    pub const fn from_wire(number: u16) -> ChunkKind {
        match number {
            magic::REPLY_NONE => ChunkKind::None,
            magic::REPLY_OFFSET_DATA => ChunkKind::OffsetData,
            magic::REPLY_OFFSET_HOLE => ChunkKind::OffsetHole,
            magic::REPLY_BLOCK_STATUS => ChunkKind::BlockStatus,
            magic::REPLY_BLOCK_STATUS_EXT => ChunkKind::BlockStatusExt,
            magic::REPLY_ERROR => ChunkKind::Error,
            magic::REPLY_ERROR_OFFSET => ChunkKind::ErrorOffset,
            other => ChunkKind::Other(other),
        }
    }

    /// The wire number.
    pub const fn to_wire(self) -> u16 {
        match self {
            ChunkKind::None => magic::REPLY_NONE,
            ChunkKind::OffsetData => magic::REPLY_OFFSET_DATA,
            ChunkKind::OffsetHole => magic::REPLY_OFFSET_HOLE,
            ChunkKind::BlockStatus => magic::REPLY_BLOCK_STATUS,
            ChunkKind::BlockStatusExt => magic::REPLY_BLOCK_STATUS_EXT,
            ChunkKind::Error => magic::REPLY_ERROR,
            ChunkKind::ErrorOffset => magic::REPLY_ERROR_OFFSET,
            ChunkKind::Other(number) => number,
        }
    }

    /// Whether the chunk makes its reply a failure; unknown error kinds count.
    pub const fn is_error(self) -> bool {
        self.to_wire() & magic::REPLY_ERROR_BIT != 0
    }
}

/// The request that is being answered, and the form of its reply: makes every message that a server
/// sends in transmission.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ReplyEncoder {
    /// The form that was negotiated.
    pub replies: ReplyForm,
    /// The cookie of the request.
    pub cookie: u64,
    /// The offset of the request.
    pub offset: u64,
}

impl ReplyEncoder {
    // nbd: structured.needs-negotiation, extended.all-replies
    /// The head of a chunk with `length` bytes of payload; not for [`ReplyForm::Simple`].
    pub const fn chunk(&self, flags: ReplyFlags, kind: ChunkKind, length: u64) -> ReplyChunk {
        let offset = match self.replies {
            // nbd: extended.offset
            ReplyForm::Extended => Some(self.offset),
            ReplyForm::Simple | ReplyForm::Structured => None,
        };
        ReplyChunk { flags, kind, cookie: self.cookie, offset, length }
    }

    // nbd: simple.only-without-payload, extended.no-simple
    /// A whole successful reply without payload: a simple reply, or an empty last chunk if simple
    /// replies are not allowed. With [`ReplyForm::Structured`] it is not for READ; see
    /// [`ReplyEncoder::done`].
    pub fn success(&self) -> HeaderBytes {
        match self.replies {
            ReplyForm::Simple | ReplyForm::Structured => simple_bytes(self.cookie, None),
            ReplyForm::Extended => self.none(),
        }
    }

    /// An empty last chunk, which ends any reply in chunks. `None` with simple replies, which have
    /// no equivalent.
    pub fn done(&self) -> Option<HeaderBytes> {
        match self.replies {
            ReplyForm::Simple => None,
            ReplyForm::Structured | ReplyForm::Extended => Some(self.none()),
        }
    }

    // nbd: transmission.simple-only, structured.payload, structured.read, read.reply-form
    // nbd: read.simple, extended.read-form
    /// What precedes `len` bytes of data in a reply to READ: the head and, with chunks, the data's
    /// offset `at` in the export. A simple reply contains all requested data, and has no flags.
    ///
    /// # Errors
    /// [`ProtocolError::TooLong`] if a structured chunk cannot hold that much data.
    pub fn data(&self, flags: ReplyFlags, at: u64, len: u32) -> Result<HeaderBytes, ProtocolError> {
        if self.replies == ReplyForm::Simple {
            return Ok(simple_bytes(self.cookie, None));
        }
        let length = u64::from(len) + DATA_PREFIX_LEN as u64;
        Ok(self.chunk(flags, ChunkKind::OffsetData, length).encode()?.u64(at))
    }

    /// A complete chunk for a range of zeroes. `None` with simple replies, which have no
    /// equivalent.
    pub fn hole(&self, flags: ReplyFlags, hole: HoleChunk) -> Option<HeaderBytes> {
        if self.replies == ReplyForm::Simple {
            return None;
        }
        // nbd: chunk.hole-length
        let head = self.chunk(flags, ChunkKind::OffsetHole, 12).bytes();
        Some(head.u64(hole.at).u32(hole.len))
    }

    // nbd: structured.no-simple-read, read.error-chunk
    /// Appends a complete failed reply: a simple reply, or a last chunk with the text and the
    /// offset of the error, if there is one.
    pub fn error(&self, failure: &ErrorChunk<'_>, out: &mut Vec<u8>) {
        if self.replies == ReplyForm::Simple {
            // nbd: read.simple-error
            out.extend_from_slice(&simple_bytes(self.cookie, Some(failure.error)));
            return;
        }
        let kind = match failure.at {
            None => ChunkKind::Error,
            Some(_) => ChunkKind::ErrorOffset,
        };
        out.extend_from_slice(
            &self.chunk(ReplyFlags::DONE, kind, failure.payload_len() as u64).bytes(),
        );
        failure.emit(out);
    }

    // nbd: reply-flags.done-none, reply-flags.no-others, chunk.none-length, chunk.none-done
    fn none(&self) -> HeaderBytes {
        self.chunk(ReplyFlags::DONE, ChunkKind::None, 0).bytes()
    }
}

/// The offset of an OFFSET_DATA chunk's data in the export, from the first [`DATA_PREFIX_LEN`]
/// bytes of its payload; `None` if there are fewer.
pub fn data_at(payload: &[u8]) -> Option<u64> {
    ByteReader::new(payload).u64()
}

/// The contents of an OFFSET_HOLE chunk: a range of zeroes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct HoleChunk {
    /// Offset in the export, in bytes.
    pub at: u64,
    /// Length in bytes, not 0.
    pub len: u32,
}

impl HoleChunk {
    /// Parses a complete payload.
    ///
    /// # Errors
    /// A payload that is not 12 bytes long, and a hole of length 0.
    pub fn parse(payload: &[u8]) -> Result<HoleChunk, ProtocolError> {
        let bad = |why| ProtocolError::Malformed { what: "hole in a reply", why };
        let mut reader = ByteReader::new(payload);
        match (reader.u64(), reader.u32(), reader.rest()) {
            // nbd: chunk.hole-nonzero
            (Some(at), Some(len), []) if len != 0 => Ok(HoleChunk { at, len }),
            (Some(_), Some(_), []) => Err(bad("it has no length")),
            _ => Err(bad("its payload is not 12 bytes long")),
        }
    }
}

/// The contents of an error chunk.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct ErrorChunk<'a> {
    /// The error.
    pub error: Errno,
    /// The server's explanation as it was sent, UTF-8 if the server is correct; may be empty. Show
    /// it with [`ErrorChunk::text`].
    pub text: &'a [u8],
    /// Offset of the error in the export in bytes, if the chunk has it.
    pub at: Option<u64>,
}

impl<'a> ErrorChunk<'a> {
    /// An error without a text or an offset.
    pub const fn new(error: Errno) -> ErrorChunk<'static> {
        ErrorChunk { error, text: &[], at: None }
    }

    /// Parses the complete payload of an error chunk. Unknown error kinds begin like known ones;
    /// what follows their text is ignored.
    ///
    /// # Errors
    /// A text longer than the payload, the error 0, extra bytes.
    pub fn parse(kind: ChunkKind, payload: &'a [u8]) -> Result<ErrorChunk<'a>, ProtocolError> {
        let bad = |why| ProtocolError::Malformed { what: "error in a reply", why };
        let mut reader = ByteReader::new(payload);
        let short = bad("its payload is too short");
        let (Some(number), Some(text_len)) = (reader.u32(), reader.u16()) else {
            return Err(short);
        };
        let text =
            reader.take(text_len.into()).ok_or(bad("its text is longer than its payload"))?;
        // nbd: error-offset.nonzero
        let error = Errno::from_wire(number).ok_or(bad("its error number is 0"))?;
        let at = match kind {
            ChunkKind::ErrorOffset => Some(reader.u64().ok_or(short)?),
            _ => None,
        };
        let known = matches!(kind, ChunkKind::Error | ChunkKind::ErrorOffset);
        if known && !reader.rest().is_empty() {
            return Err(bad("bytes are left over"));
        }
        Ok(ErrorChunk { error, text, at })
    }

    /// Appends the payload of an error chunk: of [`ChunkKind::ErrorOffset`] if there is an offset,
    /// else of [`ChunkKind::Error`]. The text is cut to [`limits::STRING`] bytes.
    pub fn emit(&self, out: &mut Vec<u8>) {
        // nbd: error.message-length
        let text = cut(self.text);
        out.extend_from_slice(&self.error.to_wire().to_be_bytes());
        #[expect(clippy::cast_possible_truncation, reason = "cut to limits::STRING")]
        let length = text.len() as u16;
        out.extend_from_slice(&length.to_be_bytes());
        out.extend_from_slice(text);
        if let Some(at) = self.at {
            out.extend_from_slice(&at.to_be_bytes());
        }
    }

    // nbd: error.length, error-offset.length
    fn payload_len(&self) -> usize {
        6 + cut(self.text).len() + if self.at.is_some() { 8 } else { 0 }
    }

    /// The server's explanation, escaped and cut for printing; may be empty.
    pub fn text(&self) -> String {
        error_text(self.text)
    }
}

impl fmt::Debug for ErrorChunk<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ErrorChunk")
            .field("error", &self.error)
            .field("text", &printable(self.text, limits::ERROR_TEXT))
            .field("at", &self.at)
            .finish()
    }
}

fn simple(reader: &mut ByteReader<'_>) -> Option<ReplyHeader> {
    let error = Errno::from_wire(reader.u32()?);
    Some(ReplyHeader::Simple { cookie: reader.u64()?, error })
}

fn simple_bytes(cookie: u64, error: Option<Errno>) -> HeaderBytes {
    HeaderBytes::new().u32(magic::SIMPLE_REPLY).u32(errno::to_wire(error)).u64(cookie)
}

fn chunk(reader: &mut ByteReader<'_>, extended: bool) -> Option<ReplyChunk> {
    // nbd: reply-flags.unknown
    let flags = ReplyFlags::from_bits(reader.u16()?);
    let kind = ChunkKind::from_wire(reader.u16()?);
    let cookie = reader.u64()?;
    let (offset, length) =
        if extended { (Some(reader.u64()?), reader.u64()?) } else { (None, reader.u32()?.into()) };
    Some(ReplyChunk { flags, kind, cookie, offset, length })
}
