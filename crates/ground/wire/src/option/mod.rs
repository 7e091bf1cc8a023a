//! Options of the fixed newstyle handshake and their replies: their heads here, the numbers of all
//! kinds in `code.rs`, their payloads in `payload.rs`. [`crate::handshake`] checks their order.

use crate::bytes::ByteReader;
use crate::text::cut;
use crate::{HeaderBytes, ProtocolError, magic};

mod code;
mod payload;

pub use code::{InfoKind, OptionCode, OptionError, ReplyCode};
pub use payload::{
    BlockSizeInfo, InfoItem, InfoRequest, ListEntry, MetaContext, MetaRequest, check_query,
    check_string,
};
pub(crate) use payload::{QUERIES, string};

/// The items of information that INFO or GO request. Size and flags are always sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub struct InfoSet {
    /// The canonical name.
    pub name: bool,
    /// The description.
    pub description: bool,
    /// The block sizes. A client that requests them in GO must obey them.
    pub block_size: bool,
}

impl InfoSet {
    /// All items.
    pub const ALL: InfoSet = InfoSet { name: true, description: true, block_size: true };
    /// Only the block sizes.
    pub const BLOCK_SIZE: InfoSet = InfoSet { name: false, description: false, block_size: true };
}

/// The head of an option: magic, code, length of the payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct OptionHeader {
    /// The option.
    pub code: OptionCode,
    /// Bytes of payload after the head.
    pub length: u32,
}

impl OptionHeader {
    /// Bytes of the head.
    pub const LEN: usize = 16;

    /// Parses a head at the start of `bytes`; `Ok(None)` when more bytes are needed.
    ///
    /// # Errors
    /// [`ProtocolError::Magic`].
    pub fn parse(bytes: &[u8]) -> Result<Option<OptionHeader>, ProtocolError> {
        let mut reader = ByteReader::new(bytes);
        match reader.u64() {
            None => return Ok(None),
            Some(magic::IHAVEOPT) => {}
            Some(found) => return Err(ProtocolError::Magic { what: "option", found }),
        }
        let (Some(code), Some(length)) = (reader.u32(), reader.u32()) else { return Ok(None) };
        Ok(Some(OptionHeader { code: OptionCode::from_wire(code), length }))
    }

    /// The head as bytes.
    pub fn encode(&self) -> HeaderBytes {
        HeaderBytes::new().u64(magic::IHAVEOPT).u32(self.code.to_wire()).u32(self.length)
    }
}

/// The head of a reply to an option: magic, the option's code, type, length of the payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct OptionReplyHeader {
    /// The option that it replies to.
    pub option: OptionCode,
    /// The type of the reply.
    pub code: ReplyCode,
    /// Bytes of payload after the head.
    pub length: u32,
}

impl OptionReplyHeader {
    /// Bytes of the head.
    pub const LEN: usize = 20;

    /// Parses a head at the start of `bytes`; `Ok(None)` when more bytes are needed.
    ///
    /// # Errors
    /// [`ProtocolError::Magic`].
    pub fn parse(bytes: &[u8]) -> Result<Option<OptionReplyHeader>, ProtocolError> {
        let mut reader = ByteReader::new(bytes);
        match reader.u64() {
            None => return Ok(None),
            Some(magic::OPTION_REPLY) => {}
            Some(found) => return Err(ProtocolError::Magic { what: "reply to an option", found }),
        }
        let (Some(option), Some(code), Some(length)) = (reader.u32(), reader.u32(), reader.u32())
        else {
            return Ok(None);
        };
        let option = OptionCode::from_wire(option);
        let code = ReplyCode::from_wire(code);
        Ok(Some(OptionReplyHeader { option, code, length }))
    }

    /// The head as bytes.
    pub fn encode(&self) -> HeaderBytes {
        HeaderBytes::new()
            .u64(magic::OPTION_REPLY)
            .u32(self.option.to_wire())
            .u32(self.code.to_wire())
            .u32(self.length)
    }
}

/// Appends a whole option.
#[expect(clippy::cast_possible_truncation, reason = "options are far shorter than 4 GiB")]
pub(crate) fn emit_option(code: OptionCode, payload: &[u8], out: &mut Vec<u8>) {
    let length = payload.len() as u32;
    out.extend_from_slice(&OptionHeader { code, length }.encode());
    out.extend_from_slice(payload);
}

/// Appends a complete reply to an option. This crate limits the payloads that it puts in them.
#[expect(clippy::cast_possible_truncation, reason = "replies are far shorter than 4 GiB")]
pub(crate) fn emit_reply(option: OptionCode, code: ReplyCode, payload: &[u8], out: &mut Vec<u8>) {
    let length = payload.len() as u32;
    out.extend_from_slice(&OptionReplyHeader { option, code, length }.encode());
    out.extend_from_slice(payload);
}

/// Appends a refusal with its text, cut to the protocol's maximum.
pub(crate) fn emit_error(option: OptionCode, error: OptionError, text: &str, out: &mut Vec<u8>) {
    emit_reply(option, ReplyCode::Error(error), cut(text.as_bytes()), out);
}
