//! Requests of the transmission phase ("Request message"), 28 or 32 bytes, and the payload with
//! which BLOCK_STATUS selects contexts.

use crate::bytes::ByteReader;
use crate::{CommandFlags, HeaderBytes, ProtocolError, limits, magic};

/// The form of requests that was negotiated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum RequestForm {
    /// 28 bytes, lengths of 32 bits.
    #[default]
    Compact,
    /// 32 bytes, lengths of 64 bits (EXTENDED_HEADERS).
    Extended,
}

impl RequestForm {
    /// Bytes of a request header.
    // A header's size, not a container's length: it is never empty.
    #[allow(clippy::len_without_is_empty)]
    pub const fn len(self) -> usize {
        match self {
            RequestForm::Compact => 28,
            RequestForm::Extended => 32,
        }
    }
}

/// The kind of a request ("Request types").
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CommandCode {
    /// Read `length` bytes.
    Read,
    /// Write the payload.
    Write,
    /// End the connection after the requests in flight; has no reply.
    Disconnect,
    /// Make completed writes stable.
    Flush,
    /// Forget the contents of a range.
    Trim,
    /// Fetch a range into the server's cache.
    Cache,
    /// Write zeroes without sending them.
    WriteZeroes,
    /// Request extents of the selected contexts.
    BlockStatus,
    /// An unknown number; servers reply EINVAL.
    Other(u16),
}

impl CommandCode {
    // nbd: baseline.requests
    /// The command of a wire number.
    pub const fn from_wire(number: u16) -> CommandCode {
        match number {
            magic::CMD_READ => CommandCode::Read,
            magic::CMD_WRITE => CommandCode::Write,
            magic::CMD_DISC => CommandCode::Disconnect,
            magic::CMD_FLUSH => CommandCode::Flush,
            magic::CMD_TRIM => CommandCode::Trim,
            magic::CMD_CACHE => CommandCode::Cache,
            magic::CMD_WRITE_ZEROES => CommandCode::WriteZeroes,
            magic::CMD_BLOCK_STATUS => CommandCode::BlockStatus,
            other => CommandCode::Other(other),
        }
    }

    /// The wire number.
    pub const fn to_wire(self) -> u16 {
        match self {
            CommandCode::Read => magic::CMD_READ,
            CommandCode::Write => magic::CMD_WRITE,
            CommandCode::Disconnect => magic::CMD_DISC,
            CommandCode::Flush => magic::CMD_FLUSH,
            CommandCode::Trim => magic::CMD_TRIM,
            CommandCode::Cache => magic::CMD_CACHE,
            CommandCode::WriteZeroes => magic::CMD_WRITE_ZEROES,
            CommandCode::BlockStatus => magic::CMD_BLOCK_STATUS,
            CommandCode::Other(number) => number,
        }
    }
}

/// A request without its payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RequestHeader {
    /// Command flags; unknown bits are preserved, and servers reply to them with EINVAL.
    pub flags: CommandFlags,
    /// The command.
    pub command: CommandCode,
    /// The client's ID of the request, repeated in each reply.
    pub cookie: u64,
    /// Offset in the export, in bytes.
    pub offset: u64,
    /// Bytes of the effect, or of the payload when [`RequestHeader::payload_len`] is not 0.
    pub length: u64,
}

impl RequestHeader {
    // nbd: request.magic
    /// Parses a request at the start of `bytes`; `Ok(None)` when more bytes are needed.
    ///
    /// # Errors
    /// [`ProtocolError::Magic`] as soon as the first four bytes are wrong.
    pub fn parse(
        bytes: &[u8],
        headers: RequestForm,
    ) -> Result<Option<(RequestHeader, usize)>, ProtocolError> {
        let mut reader = ByteReader::new(bytes);
        let (due, what) = match headers {
            RequestForm::Compact => (magic::REQUEST, "request"),
            RequestForm::Extended => (magic::EXTENDED_REQUEST, "extended request"),
        };
        match reader.u32() {
            None => return Ok(None),
            Some(found) if found != due => {
                return Err(ProtocolError::Magic { what, found: found.into() });
            }
            Some(_) => {}
        }
        Ok(RequestHeader::fields(&mut reader, headers).map(|header| (header, headers.len())))
    }

    fn fields(reader: &mut ByteReader<'_>, headers: RequestForm) -> Option<RequestHeader> {
        Some(RequestHeader {
            flags: CommandFlags::from_bits(reader.u16()?),
            command: CommandCode::from_wire(reader.u16()?),
            cookie: reader.u64()?,
            offset: reader.u64()?,
            length: match headers {
                RequestForm::Compact => reader.u32()?.into(),
                RequestForm::Extended => reader.u64()?,
            },
        })
    }

    /// The request as bytes.
    ///
    /// # Errors
    /// [`ProtocolError::TooLong`] when the length does not fit the 32 bits of a compact header.
    pub fn encode(&self, headers: RequestForm) -> Result<HeaderBytes, ProtocolError> {
        let start = |magic: u32| {
            HeaderBytes::new()
                .u32(magic)
                .u16(self.flags.bits())
                .u16(self.command.to_wire())
                .u64(self.cookie)
                .u64(self.offset)
        };
        match headers {
            RequestForm::Compact => match u32::try_from(self.length) {
                Ok(length) => Ok(start(magic::REQUEST).u32(length)),
                Err(_) => Err(ProtocolError::TooLong {
                    what: "length of a request without extended headers",
                    len: self.length,
                    max: u32::MAX.into(),
                }),
            },
            RequestForm::Extended => Ok(start(magic::EXTENDED_REQUEST).u64(self.length)),
        }
    }

    /// Appends the request to `out`.
    ///
    /// # Errors
    /// As [`RequestHeader::encode`].
    pub fn emit(&self, headers: RequestForm, out: &mut Vec<u8>) -> Result<(), ProtocolError> {
        out.extend_from_slice(&self.encode(headers)?);
        Ok(())
    }

    /// Bytes of payload after the header: the data of WRITE, and with extended headers the payload
    /// of any command with [`CommandFlags::PAYLOAD_LEN`]. A WRITE without that flag has its payload
    /// all the same (a client's error that QEMU accepts, too).
    pub const fn payload_len(&self, headers: RequestForm) -> u64 {
        let flagged = self.flags.contains(CommandFlags::PAYLOAD_LEN);
        match (self.command, headers) {
            (CommandCode::Write, _) => self.length,
            (_, RequestForm::Extended) if flagged => self.length,
            _ => 0,
        }
    }

    /// The first byte after the range, or `None` if that overflows 64 bits.
    pub const fn end(&self) -> Option<u64> {
        self.offset.checked_add(self.length)
    }
}

/// The payload of a BLOCK_STATUS request: the range's length, and the requested contexts
/// (EXTENDED_HEADERS, `NBD_FLAG_BLOCK_STATUS_PAYLOAD`).
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct StatusFilter {
    /// Length of the requested range, from the request's offset on.
    pub length: u64,
    /// Requested contexts, each once, at least one.
    pub contexts: Vec<u32>,
}

impl StatusFilter {
    /// Maximum payload to read; a server skips longer ones and replies EINVAL.
    pub const MAX_LEN: usize = 8 + 4 * limits::CONTEXTS;

    /// Parses a complete payload. `negotiated` returns whether a context was negotiated.
    ///
    /// # Errors
    /// The server replies to each with EINVAL and keeps the connection: wrong length, no context, a
    /// duplicate context or one that was not negotiated.
    pub fn parse(
        payload: &[u8],
        negotiated: impl Fn(u32) -> bool,
    ) -> Result<StatusFilter, ProtocolError> {
        let bad = |why| ProtocolError::Malformed { what: "payload of a block status request", why };
        if payload.len() > StatusFilter::MAX_LEN {
            return Err(bad("more contexts than can be negotiated"));
        }
        let mut reader = ByteReader::new(payload);
        let length = reader.u64().ok_or(bad("shorter than its length field"))?;
        let mut contexts = Vec::with_capacity(reader.rest().len() / 4);
        while !reader.rest().is_empty() {
            let id = reader.u32().ok_or(bad("ends inside a context"))?;
            if contexts.contains(&id) {
                return Err(bad("a context twice"));
            }
            if !negotiated(id) {
                return Err(bad("a context that was not negotiated"));
            }
            contexts.push(id);
        }
        if contexts.is_empty() {
            return Err(bad("no context"));
        }
        Ok(StatusFilter { length, contexts })
    }

    // nbd: extended.filter-length
    /// Appends the payload to `out`; its length is the request's, with
    /// [`CommandFlags::PAYLOAD_LEN`] set.
    pub fn emit(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.length.to_be_bytes());
        for id in &self.contexts {
            out.extend_from_slice(&id.to_be_bytes());
        }
    }

    /// Bytes that [`StatusFilter::emit`] appends.
    pub const fn payload_len(&self) -> u64 {
        8 + 4 * self.contexts.len() as u64
    }
}
