//! Outcomes of requests as NBD replies.

use blockhaul_block::{Error, Extents, Kind, Reply};
use blockhaul_io::{Data, Reservation, SendQueue};
use blockhaul_wire::reply::{ErrorChunk, HoleChunk, ReplyEncoder};
use blockhaul_wire::request::{CommandCode, RequestHeader};
use blockhaul_wire::status::{StatusChunk, StatusExtent, StatusLimits};
use blockhaul_wire::{CommandFlags, Errno, ReplyFlags, ReplyForm};

/// What a reply is made from: the request's header, and for block status the requested IDs.
pub(crate) struct ReplyContext {
    pub(crate) header: RequestHeader,
    /// Bytes of the effect; differs from the header's length if that is a payload's.
    pub(crate) len: u64,
    pub(crate) ids: Vec<u32>,
    /// Size of the export in bytes.
    pub(crate) size: u64,
    /// Maximum length of an extent in a reply.
    pub(crate) longest: u64,
    /// Reservation for a long list of extents, none for other requests.
    pub(crate) room: Option<Reservation>,
}

// nbd: transmission.cookie, extended.cookie
/// Queues the reply to a request; returns the error if the reply is one.
pub(crate) fn reply(
    out: &mut SendQueue,
    replies: ReplyForm,
    asked: &mut ReplyContext,
    outcome: Result<Reply, Error>,
    max_extents: usize,
) -> Result<(), Error> {
    let header = asked.header;
    let answer = ReplyEncoder { replies, cookie: header.cookie, offset: header.offset };
    let result = match outcome {
        Ok(Reply::Done) => {
            out.head(&answer.success());
            Ok(())
        }
        Ok(Reply::Data(data)) => read(out, &answer, asked, data),
        Ok(Reply::Hole) => hole(out, &answer, asked),
        Ok(Reply::Extents(lists)) => extents(out, &answer, asked, &lists, max_extents),
        Err(error) => Err(error),
    };
    result.inspect_err(|error| failure(out, &answer, errno(error, &header), &error.text()))
}

// nbd: structured.error-text
/// Queues an error.
pub(crate) fn failure(out: &mut SendQueue, answer: &ReplyEncoder, error: Errno, text: &str) {
    let mut bytes = Vec::new();
    answer.error(&ErrorChunk { error, text: text.as_bytes(), at: None }, &mut bytes);
    out.head(&bytes);
}

// nbd: structured.done-only-when-sure, chunk.data-inside, chunk.no-overlap, read.late-error
// nbd: read.chunks, read.chunk-nonempty, read.chunk-inside, read.complete, read.done-on-content
// nbd: read.finish-chunk, read.df-one-chunk
fn read(
    out: &mut SendQueue,
    answer: &ReplyEncoder,
    asked: &ReplyContext,
    data: Data,
) -> Result<(), Error> {
    let len = u32::try_from(data.len()).map_err(misfit)?;
    let head = answer.data(ReplyFlags::DONE, asked.header.offset, len).map_err(misfit)?;
    out.head(&head);
    out.data(data);
    Ok(())
}

// nbd: chunk.hole-inside, chunk.hole-no-overlap, read.df-no-hole
/// A read of zeroes: one small chunk if the client supports it, else zeroes.
fn hole(out: &mut SendQueue, answer: &ReplyEncoder, asked: &ReplyContext) -> Result<(), Error> {
    let len = u32::try_from(asked.len).map_err(misfit)?;
    if let Some(hole) = answer.hole(ReplyFlags::DONE, HoleChunk { at: asked.header.offset, len }) {
        out.head(&hole);
        return Ok(());
    }
    let head = answer.data(ReplyFlags::DONE, asked.header.offset, len).map_err(misfit)?;
    out.head(&head);
    let mut left = len as usize;
    while left > 0 {
        let part = left.min(Data::ZEROES_MAX);
        out.data(Data::zeroes(part));
        left -= part;
    }
    Ok(())
}

/// Shorter lists are sent together with other heads.
const SHORT: usize = 4096;

// nbd: meta.one-chunk-each, block-status.chunks
fn extents(
    out: &mut SendQueue,
    answer: &ReplyEncoder,
    asked: &mut ReplyContext,
    lists: &[Extents],
    max_extents: usize,
) -> Result<(), Error> {
    let one = asked.header.flags.contains(CommandFlags::REQ_ONE);
    // nbd: status.one-chunk-each
    if lists.is_empty() || lists.len() != asked.ids.len() {
        return Err(Error::new(Kind::Io, "the device did not reply to each context"));
    }
    let room = asked.room.take();
    let wanted = StatusLimits { length: asked.len, one, max_extents };
    // The last one may exceed the requested range, within the device.
    let end = asked.header.offset.saturating_add(asked.len);
    let rest = asked.size.saturating_sub(end);
    let mut bytes = Vec::new();
    for (index, (list, id)) in lists.iter().zip(&asked.ids).enumerate() {
        // nbd: structured.done-last
        let last = index + 1 == lists.len();
        // nbd: reply-flags.done
        let flags = if last { ReplyFlags::DONE } else { ReplyFlags::NONE };
        let beyond = if list.total() == asked.len { list.beyond().min(rest) } else { 0 };
        let count = list.len();
        let runs = list.runs().iter().enumerate().map(|(index, run)| StatusExtent {
            len: if index + 1 == count {
                run.len.max((run.len + beyond).min(asked.longest))
            } else {
                run.len
            },
            // nbd: extended.status-high-bits
            flags: run.state,
        });
        let chunk = StatusChunk { flags, context: *id, wanted };
        blockhaul_wire::status::emit(answer, chunk, runs, &mut bytes).map_err(misfit)?;
    }
    match room {
        Some(room) if bytes.len() > SHORT && bytes.len() <= room.len() => {
            let mut buf = room.into_buf();
            buf[..bytes.len()].copy_from_slice(&bytes);
            buf.truncate(bytes.len());
            out.data(buf.into());
        }
        _ => out.head(&bytes),
    }
    Ok(())
}

fn misfit(error: impl std::error::Error + Send + Sync + 'static) -> Error {
    Error::new(Kind::Io, "the result does not fit into a reply").because(error)
}

// nbd: error.nonzero, write.error, cache.error, zeroes.error, errors.eoverflow, errors.enotsup
/// The number for a failed request. The document allows ENOTSUP only for FAST_ZERO and EOVERFLOW
/// only with DF ("Error values").
fn errno(error: &Error, header: &RequestHeader) -> Errno {
    let fast = header.command == CommandCode::WriteZeroes
        && header.flags.contains(CommandFlags::FAST_ZERO);
    match error.kind() {
        // nbd: zeroes.slow
        Kind::Unsupported if !fast => Errno::Inval,
        // nbd: read.df-overflow
        Kind::TooLarge if !header.flags.contains(CommandFlags::DF) => Errno::Inval,
        kind => Errno::from_wire(kind.number()).unwrap_or(Errno::Io),
    }
}
