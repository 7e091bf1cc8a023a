//! Block status: the extents of one context in one chunk, in the 32-bit form and in the 64-bit form
//! of EXTENDED_HEADERS.

use crate::bytes::ByteReader;
use crate::reply::{ChunkKind, ReplyEncoder};
use crate::{ProtocolError, ReplyFlags, ReplyForm, limits};

/// Name of the context that the protocol document defines.
pub const BASE_ALLOCATION: &str = "base:allocation";
/// `NBD_STATE_HOLE` of [`BASE_ALLOCATION`]: not allocated.
pub const STATE_HOLE: u64 = 1;
/// `NBD_STATE_ZERO` of [`BASE_ALLOCATION`]: reads as zeroes.
pub const STATE_ZERO: u64 = 2;

/// A run of bytes with one status.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct StatusExtent {
    /// Bytes; not 0 on the wire.
    pub len: u64,
    /// Status flags; their meaning depends on the context.
    pub flags: u64,
}

/// The limits that a request sets for its reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct StatusLimits {
    /// Length of the requested range in bytes.
    pub length: u64,
    /// Whether only one extent, within `length`, is allowed (REQ_ONE).
    pub one: bool,
    /// Maximum number of extents in the reply; [`limits::EXTENTS`] limits it in any case.
    pub max_extents: usize,
}

impl StatusLimits {
    /// As many extents as the protocol allows for `length` bytes.
    pub const fn new(length: u64) -> StatusLimits {
        StatusLimits { length, one: false, max_extents: limits::EXTENTS }
    }
}

/// A chunk of block status, to be encoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StatusChunk {
    /// The flags of the chunk.
    pub flags: ReplyFlags,
    /// Number of the context.
    pub context: u32,
    /// The limits of the request.
    pub wanted: StatusLimits,
}

/// The result of an encoder.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct EncodedExtents {
    /// Number of extents in the chunk.
    pub extents: usize,
    /// Bytes that they cover from the request's offset on; may be more than requested.
    pub covered: u64,
}

/// Appends a complete chunk of block status to `out`: its head, the context and the extents. The
/// form is that of the reply.
///
/// `extents` are consecutive from the request's offset on. Adjacent ones with the same flags are
/// joined, those of length 0 are skipped, and the iterator is read no further than the reply may
/// reach: the last extent is the first that reaches the end of the requested range, and may extend
/// beyond it (with REQ_ONE it is cut there). In the 32-bit form an extent above 4 GiB is split.
///
/// # Errors
/// [`ProtocolError::Caller`], with `out` unchanged: simple replies; no extents (the protocol requires at
/// least one); flags that do not fit the 32-bit form.
pub fn emit(
    answer: &ReplyEncoder,
    chunk: StatusChunk,
    extents: impl IntoIterator<Item = StatusExtent>,
    out: &mut Vec<u8>,
) -> Result<EncodedExtents, ProtocolError> {
    let StatusChunk { flags, context, wanted } = chunk;
    let form = match answer.replies {
        ReplyForm::Simple => {
            // nbd: meta.structured
            return Err(ProtocolError::Caller { what: "block status needs structured replies" });
        }
        // nbd: extended.status-only
        ReplyForm::Structured => ExtentForm::Bits32,
        // nbd: extended.status-always
        ReplyForm::Extended => ExtentForm::Bits64,
    };
    let start = out.len();
    let head = |length| answer.chunk(flags, form.kind(), length).encode();
    out.extend_from_slice(&head(0)?);
    let payload = out.len();
    let result = emit_payload(form, context, wanted, extents, out)
        .and_then(|encoded| Ok((encoded, head((out.len() - payload) as u64)?)));
    match result {
        Ok((encoded, head)) => {
            out[start..payload].copy_from_slice(&head);
            Ok(encoded)
        }
        Err(error) => {
            out.truncate(start);
            Err(error)
        }
    }
}

/// Appends the payload of a chunk of block status, without its head; otherwise like [`emit`].
///
/// # Errors
/// Like [`emit`], but `out` may have been extended.
pub fn emit_payload(
    form: ExtentForm,
    context: u32,
    wanted: StatusLimits,
    extents: impl IntoIterator<Item = StatusExtent>,
    out: &mut Vec<u8>,
) -> Result<EncodedExtents, ProtocolError> {
    out.extend_from_slice(&context.to_be_bytes());
    let count_at = out.len();
    if form == ExtentForm::Bits64 {
        out.extend_from_slice(&[0; 4]);
    }
    // nbd: sizes.other-constraints, command-flags.req-one, status.req-one, status.at-most
    // nbd: block-status.req-one
    let most = if wanted.one { 1 } else { wanted.max_extents.clamp(1, limits::EXTENTS) };
    let encoded = EncodedExtents { extents: 0, covered: 0 };
    let mut writer = ExtentWriter { form, wanted, most, encoded, out };
    // The extent being joined; it is written when the next one differs.
    let mut open: Option<StatusExtent> = None;
    // nbd: status.nonzero, extended.status-nonzero
    let mut extents = extents.into_iter().filter(|extent| extent.len != 0);
    loop {
        let reach = writer.encoded.covered.saturating_add(open.map_or(0, |extent| extent.len));
        let enough = reach >= wanted.length && reach > 0;
        let next = if enough { None } else { extents.next() };
        match (open, next) {
            (Some(before), Some(next)) if before.flags == next.flags => {
                // An export has at most 2^64-1 bytes; more is cut.
                open = Some(StatusExtent { len: before.len.saturating_add(next.len), ..before });
            }
            (None, Some(next)) => open = Some(next),
            (None, None) => break,
            (Some(extent), next) => {
                writer.close(extent)?;
                open = next;
                if writer.encoded.extents >= most {
                    break;
                }
            }
        }
    }
    let encoded = writer.encoded;
    if encoded.extents == 0 {
        // nbd: block-status.at-least-one
        return Err(ProtocolError::Caller { what: "block status needs at least one extent" });
    }
    if form == ExtentForm::Bits64 {
        #[expect(clippy::cast_possible_truncation, reason = "bounded by limits::EXTENTS")]
        let count = encoded.extents as u32;
        // nbd: extended.status-count
        out[count_at..count_at + 4].copy_from_slice(&count.to_be_bytes());
    }
    Ok(encoded)
}

/// Writes joined extents.
struct ExtentWriter<'a> {
    form: ExtentForm,
    wanted: StatusLimits,
    /// Maximum number of descriptors.
    most: usize,
    encoded: EncodedExtents,
    out: &'a mut Vec<u8>,
}

impl ExtentWriter<'_> {
    /// Writes one joined extent, in several descriptors if the 32-bit form requires it.
    fn close(&mut self, extent: StatusExtent) -> Result<(), ProtocolError> {
        let ExtentWriter { form, wanted, most, encoded, out } = self;
        let mut left = extent.len.min(u64::MAX - encoded.covered);
        if wanted.one {
            // REQ_ONE for zero bytes is undefined; an extent has at least one byte.
            left = left.min(wanted.length.max(1));
        }
        while left != 0 && encoded.extents < *most {
            let len = match form {
                ExtentForm::Bits32 => {
                    let flags = u32::try_from(extent.flags).map_err(|_| ProtocolError::Caller {
                        // nbd: meta.fits-flags
                        what: "status flags above 32 bits need extended headers",
                    })?;
                    let len = u32::try_from(left).unwrap_or(SPLIT_32);
                    out.extend_from_slice(&len.to_be_bytes());
                    out.extend_from_slice(&flags.to_be_bytes());
                    u64::from(len)
                }
                ExtentForm::Bits64 => {
                    out.extend_from_slice(&left.to_be_bytes());
                    out.extend_from_slice(&extent.flags.to_be_bytes());
                    left
                }
            };
            left -= len;
            encoded.covered += len;
            encoded.extents += 1;
            // nbd: status.last-may-exceed
            // Only the last extent may exceed the requested range.
            if encoded.covered >= wanted.length {
                break;
            }
        }
        Ok(())
    }
}

/// Where the 32-bit form splits a long extent: the largest length that is a multiple of every
/// minimum block size that the protocol allows (64 KiB).
const SPLIT_32: u32 = u32::MAX - 0xffff;

/// The form of extents on the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ExtentForm {
    /// `NBD_REPLY_TYPE_BLOCK_STATUS`: lengths and flags of 32 bits.
    Bits32,
    /// `NBD_REPLY_TYPE_BLOCK_STATUS_EXT`: a count, and lengths and flags of 64 bits.
    Bits64,
}

impl ExtentForm {
    /// The form of a kind of chunk, `None` if it has no block status.
    pub const fn of(kind: ChunkKind) -> Option<ExtentForm> {
        match kind {
            ChunkKind::BlockStatus => Some(ExtentForm::Bits32),
            ChunkKind::BlockStatusExt => Some(ExtentForm::Bits64),
            _ => None,
        }
    }

    /// Bytes before the extents.
    const fn prefix_len(self) -> usize {
        match self {
            ExtentForm::Bits32 => 4,
            ExtentForm::Bits64 => 8,
        }
    }

    /// The kind of chunk with this form.
    pub const fn kind(self) -> ChunkKind {
        match self {
            ExtentForm::Bits32 => ChunkKind::BlockStatus,
            ExtentForm::Bits64 => ChunkKind::BlockStatusExt,
        }
    }
}

/// The checked payload of a chunk of block status.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StatusView<'a> {
    form: ExtentForm,
    context: u32,
    descriptors: &'a [u8],
}

impl<'a> StatusView<'a> {
    /// Parses a complete payload.
    ///
    /// # Errors
    /// A payload that ends inside a descriptor or has none, a count that differs from the list, an
    /// extent of length 0, extents that together exceed 64 bits.
    pub fn parse(form: ExtentForm, payload: &'a [u8]) -> Result<StatusView<'a>, ProtocolError> {
        let bad = |why| ProtocolError::Malformed { what: "block status", why };
        let mut reader = ByteReader::new(payload);
        let context = reader.u32().ok_or(bad("it is shorter than its context"))?;
        let (count, size) = match form {
            ExtentForm::Bits32 => (None, 8),
            ExtentForm::Bits64 => {
                (Some(reader.u32().ok_or(bad("it is shorter than its count"))?), 16)
            }
        };
        let descriptors = reader.rest();
        let held = descriptors.len() / size;
        if !descriptors.len().is_multiple_of(size) {
            return Err(bad("it ends inside an extent"));
        }
        if held == 0 {
            return Err(bad("it has no extent"));
        }
        if held > limits::EXTENTS {
            let len = held as u64;
            let max = limits::EXTENTS as u64;
            return Err(ProtocolError::TooLong { what: "list of extents", len, max });
        }
        if count.is_some_and(|count| u64::from(count) != held as u64) {
            return Err(bad("its count differs from its list"));
        }
        let status = StatusView { form, context, descriptors };
        let mut sum = 0u64;
        for extent in status.extents() {
            if extent.len == 0 {
                return Err(bad("an extent of length 0"));
            }
            sum = sum.checked_add(extent.len).ok_or(bad("its extents go beyond 64 bits"))?;
        }
        Ok(status)
    }

    /// The context of these extents, as numbered by SET_META_CONTEXT.
    pub const fn context(&self) -> u32 {
        self.context
    }

    /// Number of extents, at least 1.
    // It is never empty, so it has no is_empty.
    #[allow(clippy::len_without_is_empty)]
    pub const fn len(&self) -> usize {
        self.descriptors.len()
            / match self.form {
                ExtentForm::Bits32 => 8,
                ExtentForm::Bits64 => 16,
            }
    }

    /// The extents in order, the first at the request's offset. Adjacent ones may have the same
    /// flags, and the last may exceed the requested range.
    pub fn extents(&self) -> impl Iterator<Item = StatusExtent> + use<'a> {
        let form = self.form;
        let mut reader = ByteReader::new(self.descriptors);
        std::iter::from_fn(move || match form {
            ExtentForm::Bits32 => {
                Some(StatusExtent { len: reader.u32()?.into(), flags: reader.u32()?.into() })
            }
            ExtentForm::Bits64 => Some(StatusExtent { len: reader.u64()?, flags: reader.u64()? }),
        })
    }
}

/// The checked payload of a chunk of block status, which owns its bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StatusPayload {
    form: ExtentForm,
    context: u32,
    payload: Vec<u8>,
}

impl StatusPayload {
    /// Parses a complete payload.
    ///
    /// # Errors
    /// As [`StatusView::parse`].
    pub fn parse(form: ExtentForm, payload: Vec<u8>) -> Result<StatusPayload, ProtocolError> {
        let context = StatusView::parse(form, &payload)?.context;
        Ok(StatusPayload { form, context, payload })
    }

    /// The contents.
    pub fn status(&self) -> StatusView<'_> {
        let StatusPayload { form, context, .. } = *self;
        // Was checked to be longer.
        let descriptors = self.payload.get(form.prefix_len()..).unwrap_or_default();
        StatusView { form, context, descriptors }
    }
}
