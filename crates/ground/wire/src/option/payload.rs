//! Payloads of options and of their replies, and the strings in them.

use super::{InfoKind, InfoSet};
use crate::bytes::ByteReader;
use crate::text::printable;
use crate::{ExportFlags, ProtocolError, limits};

// nbd: string.form
/// A string of the protocol: UTF-8 without NUL, at most [`limits::STRING`] bytes ("Conventions").
pub(crate) fn string<'a>(what: &'static str, bytes: &'a [u8]) -> Result<&'a str, ProtocolError> {
    if bytes.len() > limits::STRING {
        let len = bytes.len() as u64;
        let max = limits::STRING as u64;
        return Err(ProtocolError::TooLong { what, len, max });
    }
    match str::from_utf8(bytes) {
        Ok(text) if text.contains('\0') => {
            Err(ProtocolError::Malformed { what, why: "it holds a NUL" })
        }
        Ok(text) => Ok(text),
        Err(_) => Err(ProtocolError::Malformed { what, why: "it is not UTF-8" }),
    }
}

/// Checks a string to be sent.
///
/// # Errors
/// [`ProtocolError::TooLong`] and [`ProtocolError::Malformed`], as for a received string.
pub fn check_string(what: &'static str, text: &str) -> Result<(), ProtocolError> {
    string(what, text.as_bytes()).map(|_| ())
}

// nbd: meta.query-form
/// Checks a query for contexts to be sent: a namespace, a colon, and more or nothing.
///
/// # Errors
/// As for [`check_string`]; a query without a namespace.
pub fn check_query(query: &str) -> Result<(), ProtocolError> {
    check_string("context query", query)?;
    match query.find(':') {
        None | Some(0) => Err(ProtocolError::Malformed {
            what: "context query",
            why: "it has no namespace, as in base:allocation",
        }),
        Some(_) => Ok(()),
    }
}

#[expect(
    clippy::cast_possible_truncation,
    reason = "checked against limits::STRING where it came in"
)]
fn push_counted(text: &str, out: &mut Vec<u8>) {
    out.extend_from_slice(&(text.len() as u32).to_be_bytes());
    out.extend_from_slice(text.as_bytes());
}

/// The payload of INFO and GO.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct InfoRequest {
    /// The export, empty for the default one.
    pub name: String,
    /// Requested items; unknown ones are omitted.
    pub wants: InfoSet,
}

impl InfoRequest {
    /// Parses a complete payload.
    ///
    /// # Errors
    /// The server replies to each with [`super::OptionError::Invalid`].
    pub fn parse(payload: &[u8]) -> Result<InfoRequest, ProtocolError> {
        let bad = |why| ProtocolError::Malformed { what: "request for information", why };
        let mut reader = ByteReader::new(payload);
        // nbd: info.name-length
        let name = reader.counted().ok_or(bad("the name is longer than the option"))?;
        let name = string("export name", name)?.to_owned();
        let count = reader.u16().ok_or(bad("no number of items"))?;
        if reader.rest().len() != usize::from(count) * 2 {
            return Err(bad("the number of items differs from the list"));
        }
        let mut wants = InfoSet::default();
        while let Some(kind) = reader.u16() {
            match InfoKind::from_wire(kind) {
                InfoKind::Name => wants.name = true,
                InfoKind::Description => wants.description = true,
                InfoKind::BlockSize => wants.block_size = true,
                // nbd: info.unknown-request
                InfoKind::Export | InfoKind::Other(_) => {}
            }
        }
        Ok(InfoRequest { name, wants })
    }

    // nbd: info.no-item-twice
    /// Appends the payload to `out`. The name must pass [`check_string`].
    pub fn emit(&self, out: &mut Vec<u8>) {
        push_counted(&self.name, out);
        // libnbd's order, so that captures of its sessions compare to the byte.
        let wants = [
            (self.wants.block_size, InfoKind::BlockSize),
            (self.wants.name, InfoKind::Name),
            (self.wants.description, InfoKind::Description),
        ];
        let kinds = || wants.iter().filter(|(wanted, _)| *wanted).map(|(_, kind)| kind);
        #[expect(clippy::cast_possible_truncation, reason = "there are few kinds")]
        let count = kinds().count() as u16;
        out.extend_from_slice(&count.to_be_bytes());
        for kind in kinds() {
            // nbd: info.text-length
            out.extend_from_slice(&kind.to_wire().to_be_bytes());
        }
    }
}

/// The payload of LIST_META_CONTEXT and SET_META_CONTEXT.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct MetaRequest {
    /// The export, empty for the default one.
    pub export: String,
    /// The queries; none lists all contexts, or selects none.
    pub queries: Vec<String>,
}

impl MetaRequest {
    /// Parses a complete payload.
    ///
    /// # Errors
    /// The server replies to [`ProtocolError::TooLong`] of the list of queries with
    /// [`super::OptionError::TooBig`], to anything else with [`super::OptionError::Invalid`].
    pub fn parse(payload: &[u8]) -> Result<MetaRequest, ProtocolError> {
        let bad = |why| ProtocolError::Malformed { what: "request for contexts", why };
        let mut reader = ByteReader::new(payload);
        let export = reader.counted().ok_or(bad("the name is longer than the option"))?;
        let export = string("export name", export)?.to_owned();
        let count = reader.u32().ok_or(bad("no number of queries"))?;
        // Each query has at least its length field; an impossible count is not a long list.
        if u64::from(count) * 4 > reader.rest().len() as u64 {
            return Err(bad("the number of queries differs from the list"));
        }
        if count as usize > limits::QUERIES {
            let len = count.into();
            let max = limits::QUERIES as u64;
            return Err(ProtocolError::TooLong { what: QUERIES, len, max });
        }
        let mut queries = Vec::with_capacity(count as usize);
        for _ in 0..count {
            let query = reader.counted().ok_or(bad("a query is longer than the option"))?;
            queries.push(string("context query", query)?.to_owned());
        }
        if !reader.rest().is_empty() {
            return Err(bad("bytes are left over"));
        }
        Ok(MetaRequest { export, queries })
    }

    /// Appends the payload to `out`. Name and queries must pass [`check_string`].
    pub fn emit(&self, out: &mut Vec<u8>) {
        push_counted(&self.export, out);
        #[expect(clippy::cast_possible_truncation, reason = "bounded by limits::QUERIES")]
        let queries = self.queries.len() as u32;
        out.extend_from_slice(&queries.to_be_bytes());
        for query in &self.queries {
            push_counted(query, out);
        }
    }
}

/// The name of a list of queries in [`ProtocolError::TooLong`].
pub(crate) const QUERIES: &str = "list of context queries";

/// The payload of `NBD_REP_SERVER`: one export of a list.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Default)]
pub struct ListEntry {
    /// The export's name.
    pub name: String,
    /// A text for users; may be empty.
    pub description: String,
}

impl ListEntry {
    /// Parses a complete payload. The description is made printable.
    ///
    /// # Errors
    /// A name longer than the payload or that is not a valid string of the protocol.
    pub fn parse(payload: &[u8]) -> Result<ListEntry, ProtocolError> {
        let bad = |why| ProtocolError::Malformed { what: "export in a list", why };
        let mut reader = ByteReader::new(payload);
        let name = reader.counted().ok_or(bad("the name is longer than the reply"))?;
        let name = string("export name", name)?.to_owned();
        Ok(ListEntry { name, description: description(reader.rest()) })
    }

    // nbd: server-reply.name-length
    /// Appends the payload to `out`. Both strings must pass [`check_string`].
    pub fn emit(&self, out: &mut Vec<u8>) {
        push_counted(&self.name, out);
        out.extend_from_slice(self.description.as_bytes());
    }
}

/// A description for users: unchanged if it is a string of the protocol without control characters,
/// else escaped and cut.
pub(crate) fn description(bytes: &[u8]) -> String {
    match string("description", bytes) {
        Ok(text) if !text.chars().any(char::is_control) => text.to_owned(),
        _ => printable(bytes, limits::STRING),
    }
}

/// A context: the payload of `NBD_REP_META_CONTEXT`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct MetaContext {
    /// Its number in block status chunks; 0 and meaningless in lists.
    pub id: u32,
    /// Its name, including the namespace.
    pub name: String,
}

impl MetaContext {
    /// Parses a complete payload.
    ///
    /// # Errors
    /// A payload without an ID, a name that is not a valid string of the protocol.
    pub fn parse(payload: &[u8]) -> Result<MetaContext, ProtocolError> {
        let mut reader = ByteReader::new(payload);
        let id = reader
            .u32()
            .ok_or(ProtocolError::Malformed { what: "context", why: "it has no number" })?;
        Ok(MetaContext { id, name: string("context name", reader.rest())?.to_owned() })
    }

    /// Appends the payload to `out`. The name must pass [`check_string`].
    pub fn emit(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.id.to_be_bytes());
        out.extend_from_slice(self.name.as_bytes());
    }
}

/// Block sizes of an export ("Size constraints"), all in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BlockSizeInfo {
    /// Smallest unit and alignment of requests: a power of 2, at most 64 KiB.
    pub minimum: u32,
    /// Smallest efficient unit: a power of 2, at least 512 and the minimum.
    pub preferred: u32,
    /// Maximum payload: at least the preferred size; `u32::MAX` means that there is no fixed limit.
    pub maximum: u32,
}

impl BlockSizeInfo {
    /// The sizes to assume for servers that report none.
    pub const DEFAULT: BlockSizeInfo =
        BlockSizeInfo { minimum: 1, preferred: 4096, maximum: limits::PAYLOAD };

    // nbd: sizes.minimum, sizes.preferred, sizes.maximum
    /// Whether the sizes are within the document's rules.
    pub const fn is_valid(&self) -> bool {
        self.minimum.is_power_of_two()
            && self.minimum <= 1 << 16
            && self.preferred.is_power_of_two()
            && self.preferred >= self.minimum
            && self.preferred >= 512
            && self.maximum >= self.preferred
    }
}

/// One item of information: the payload of `NBD_REP_INFO`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum InfoItem {
    /// Size in bytes, and flags.
    Export {
        /// Size of the export in bytes.
        size: u64,
        /// Its flags.
        flags: ExportFlags,
    },
    /// The canonical name.
    Name(String),
    /// A text for users.
    Description(String),
    /// The block sizes, as they were sent: possibly invalid.
    BlockSize(BlockSizeInfo),
    /// An unknown item, to be ignored.
    Other(u16),
}

impl InfoItem {
    /// Parses a complete payload. A description is made printable.
    ///
    /// # Errors
    /// An item of the wrong length, a name that is not a valid string of the protocol.
    pub fn parse(payload: &[u8]) -> Result<InfoItem, ProtocolError> {
        let bad = |why| ProtocolError::Malformed { what: "information about an export", why };
        let mut reader = ByteReader::new(payload);
        let kind = reader.u16().ok_or(bad("it has no type"))?;
        let info = match InfoKind::from_wire(kind) {
            InfoKind::Export => {
                let size = reader.u64().ok_or(bad("size and flags are too short"))?;
                let flags = reader.u16().ok_or(bad("size and flags are too short"))?;
                InfoItem::Export { size, flags: ExportFlags::from_bits(flags) }
            }
            InfoKind::Name => {
                return Ok(InfoItem::Name(string("export name", reader.rest())?.to_owned()));
            }
            InfoKind::Description => return Ok(InfoItem::Description(description(reader.rest()))),
            InfoKind::BlockSize => {
                let mut size = || reader.u32().ok_or(bad("block sizes are too short"));
                let minimum = size()?;
                let preferred = size()?;
                let maximum = size()?;
                InfoItem::BlockSize(BlockSizeInfo { minimum, preferred, maximum })
            }
            InfoKind::Other(kind) => return Ok(InfoItem::Other(kind)),
        };
        if reader.rest().is_empty() { Ok(info) } else { Err(bad("bytes are left over")) }
    }

    /// Appends the payload to `out`. Strings must pass [`check_string`].
    pub fn emit(&self, out: &mut Vec<u8>) {
        let kind = match self {
            InfoItem::Export { .. } => InfoKind::Export,
            InfoItem::Name(_) => InfoKind::Name,
            InfoItem::Description(_) => InfoKind::Description,
            InfoItem::BlockSize(_) => InfoKind::BlockSize,
            InfoItem::Other(kind) => InfoKind::Other(*kind),
        };
        out.extend_from_slice(&kind.to_wire().to_be_bytes());
        match self {
            InfoItem::Export { size, flags } => {
                // nbd: info.export-length
                out.extend_from_slice(&size.to_be_bytes());
                out.extend_from_slice(&flags.bits().to_be_bytes());
            }
            InfoItem::Name(text) | InfoItem::Description(text) => {
                out.extend_from_slice(text.as_bytes())
            }
            InfoItem::BlockSize(sizes) => {
                // nbd: info.sizes-length
                for size in [sizes.minimum, sizes.preferred, sizes.maximum] {
                    out.extend_from_slice(&size.to_be_bytes());
                }
            }
            InfoItem::Other(_) => {}
        }
    }
}
