//! The state machine: its state, and how it processes received bytes.

use std::borrow::Cow;

use super::event::{ReadRange, ReceiveResult, TransmissionEvent};
use super::reply_state::{ReplyState, violation};
use super::table::CookieTable;
use crate::reply::{self, ChunkKind, ErrorChunk, HoleChunk, ReplyChunk, ReplyHeader};
use crate::status::{ExtentForm, StatusPayload};
use crate::{
    CommandCode, CommandFlags, Errno, HeaderBytes, ProtocolError, ReplyForm, RequestForm, request,
};

/// The client's side of one connection in transmission. `T` comes with each request, and leaves
/// with its result.
#[derive(Debug)]
pub struct Transmission<T> {
    headers: RequestForm,
    replies: ReplyForm,
    in_flight: CookieTable<ReplyState<T>>,
    state: TransmissionState,
}

/// The next bytes of the server.
#[derive(Debug)]
enum TransmissionState {
    /// A head.
    Head,
    /// The rest of contents that are needed as a whole, which begin with `bytes`.
    Contents { chunk: ReplyChunk, bytes: Vec<u8> },
    /// Bytes of a read, possibly 0, and then the end of a message, which may be the `last` one of
    /// its reply.
    Payload { range: ReadRange, last: bool },
}

impl<T> Transmission<T> {
    /// A connection with these forms of messages, and with no requests in flight.
    pub const fn new(headers: RequestForm, replies: ReplyForm) -> Transmission<T> {
        Transmission {
            headers,
            replies,
            in_flight: CookieTable::new(),
            state: TransmissionState::Head,
        }
    }

    /// Begins a request: returns its cookie and its head; its payload follows the head. `contexts`
    /// are those of BLOCK_STATUS whose status is the result. The cookie of `header` is replaced,
    /// and the flag PAYLOAD_LEN of WRITE is set as extended headers need it.
    ///
    /// # Errors
    /// [`ProtocolError::TooLong`] as [`request::RequestHeader::encode`]; [`ProtocolError::Caller`] with 2^32 requests
    /// in flight. `with` comes back.
    pub fn begin(
        &mut self,
        mut header: request::RequestHeader,
        contexts: Vec<u32>,
        with: T,
    ) -> Result<(u64, HeaderBytes), (T, ProtocolError)> {
        let Some(cookie) = self.in_flight.next_cookie() else {
            return Err((with, ProtocolError::Caller { what: "too many requests in flight" }));
        };
        header.cookie = cookie;
        // nbd: extended.compact-no-flag, extended.write-flag
        if header.command == CommandCode::Write && self.headers == RequestForm::Extended {
            header.flags |= CommandFlags::PAYLOAD_LEN;
        }
        match header.encode(self.headers) {
            Ok(encoded) => {
                self.in_flight.insert(cookie, ReplyState::new(header, contexts, with));
                Ok((cookie, encoded))
            }
            Err(error) => Err((with, error)),
        }
    }

    /// Removes a request that was not sent.
    pub fn withdraw(&mut self, cookie: u64) -> Option<T> {
        self.in_flight.remove(cookie).map(|state| state.with)
    }

    /// Removes all requests, in no particular order: the connection has ended.
    pub fn drain(&mut self) -> impl Iterator<Item = T> + use<T> {
        self.in_flight.drain().map(|state| state.with)
    }

    // nbd: disc.zero
    /// The disconnect request.
    ///
    /// # Errors
    /// As [`request::RequestHeader::encode`].
    pub fn disconnect(&self) -> Result<HeaderBytes, ProtocolError> {
        let (flags, command) = (CommandFlags::NONE, CommandCode::Disconnect);
        request::RequestHeader { flags, command, cookie: 0, offset: 0, length: 0 }
            .encode(self.headers)
    }

    /// Number of requests in flight.
    pub fn in_flight(&self) -> usize {
        self.in_flight.len()
    }

    /// The value that came with a request in flight.
    pub fn get_mut(&mut self, cookie: u64) -> Option<&mut T> {
        self.in_flight.get_mut(cookie).map(|state| &mut state.with)
    }

    /// Whether no message has begun, as far as its bytes were consumed.
    pub const fn is_between_messages(&self) -> bool {
        matches!(self.state, TransmissionState::Head)
    }

    /// Tells that `len` bytes of the last [`TransmissionEvent::Payload`] were taken from the stream.
    pub const fn took(&mut self, len: u64) {
        if let TransmissionState::Payload { range, .. } = &mut self.state {
            range.at = range.at.saturating_add(len);
            range.len = range.len.saturating_sub(len);
        }
    }

    /// Processes received bytes, from the first one that was not consumed before. Bytes after
    /// those that caused the event are not consumed.
    ///
    /// # Errors
    /// The server violates the protocol: the connection must be closed.
    pub fn receive(&mut self, input: &[u8]) -> Result<ReceiveResult<T>, ProtocolError> {
        let mut used = 0;
        let mut messages = 0;
        loop {
            let rest = &input[used..];
            let event = match &mut self.state {
                TransmissionState::Head => {
                    let Some((head, len)) = self.head(rest)? else {
                        return Ok(ReceiveResult {
                            used,
                            messages,
                            event: TransmissionEvent::NeedMore,
                        });
                    };
                    used += len;
                    messages += 1;
                    self.message(head)?
                }
                TransmissionState::Contents { chunk, bytes } => {
                    let chunk = *chunk;
                    let missing = contents_len(&chunk) - bytes.len();
                    let Some((here, _)) = rest.split_at_checked(missing) else {
                        bytes.extend_from_slice(rest);
                        let event = TransmissionEvent::Contents(missing - rest.len());
                        return Ok(ReceiveResult { used: input.len(), messages, event });
                    };
                    used += missing;
                    let whole = if bytes.is_empty() {
                        Cow::Borrowed(here)
                    } else {
                        bytes.extend_from_slice(here);
                        Cow::Owned(std::mem::take(bytes))
                    };
                    self.contents(&chunk, whole)?
                }
                TransmissionState::Payload { range, .. } if range.len > 0 => {
                    Some(TransmissionEvent::Payload(*range))
                }
                TransmissionState::Payload { range, last } => {
                    let (cookie, last) = (range.cookie, *last);
                    self.end_message(cookie, last)
                }
            };
            if let Some(event) = event {
                return Ok(ReceiveResult { used, messages, event });
            }
        }
    }

    /// Parses a head, with the offset of data.
    fn head(&self, input: &[u8]) -> Result<Option<(MessageHead, usize)>, ProtocolError> {
        let Some((header, len)) = ReplyHeader::parse(input, self.replies)? else { return Ok(None) };
        let Some(state) = self.in_flight.get(header.cookie()) else {
            return Err(violation("a reply to a request that is not in flight"));
        };
        let chunk = match header {
            ReplyHeader::Simple { cookie, error } => {
                return Ok(Some((MessageHead::Simple(cookie, error), len)));
            }
            ReplyHeader::Chunk(chunk) => chunk,
        };
        state.check(&chunk)?;
        if chunk.kind != ChunkKind::OffsetData {
            return Ok(Some((MessageHead::Chunk(chunk), len)));
        }
        let at = reply::data_at(&input[len..]);
        Ok(at.map(|at| (MessageHead::Data(chunk, at), len + reply::DATA_PREFIX_LEN)))
    }

    /// A head has arrived.
    fn message(
        &mut self,
        head: MessageHead,
    ) -> Result<Option<TransmissionEvent<T>>, ProtocolError> {
        let chunk = match head {
            MessageHead::Simple(cookie, error) => return self.simple(cookie, error),
            MessageHead::Chunk(chunk) | MessageHead::Data(chunk, _) => chunk,
        };
        let state = self.state_of(chunk.cookie)?;
        state.count();
        match head {
            MessageHead::Data(_, at) => {
                let len = chunk.length.saturating_sub(reply::DATA_PREFIX_LEN as u64);
                let at = state.data(at, len)?;
                let range = ReadRange { cookie: chunk.cookie, at, len };
                self.state = TransmissionState::Payload { range, last: chunk.is_done() };
                Ok(None)
            }
            _ if chunk.kind == ChunkKind::None => {
                Ok(self.end_message(chunk.cookie, chunk.is_done()))
            }
            _ => {
                self.state = TransmissionState::Contents { chunk, bytes: Vec::new() };
                Ok(None)
            }
        }
    }

    fn simple(
        &mut self,
        cookie: u64,
        error: Option<Errno>,
    ) -> Result<Option<TransmissionEvent<T>>, ProtocolError> {
        let replies = self.replies;
        let state = self.state_of(cookie)?;
        if let Some(error) = error {
            state.fail(error);
            return Ok(self.end_message(cookie, true));
        }
        match state.request.command {
            CommandCode::BlockStatus => Err(violation("a simple reply to block status")),
            // nbd: structured.simple-read-refused
            CommandCode::Read if replies != ReplyForm::Simple => {
                Err(violation("a simple reply to a read, with structured replies on"))
            }
            CommandCode::Read => {
                let range = ReadRange { cookie, at: 0, len: state.all_data() };
                self.state = TransmissionState::Payload { range, last: true };
                Ok(None)
            }
            _ => Ok(self.end_message(cookie, true)),
        }
    }

    /// Contents that are needed as a whole have arrived.
    fn contents(
        &mut self,
        chunk: &ReplyChunk,
        bytes: Cow<'_, [u8]>,
    ) -> Result<Option<TransmissionEvent<T>>, ProtocolError> {
        let cookie = chunk.cookie;
        let last = chunk.is_done();
        let state = self.state_of(cookie)?;
        if chunk.kind == ChunkKind::OffsetHole {
            let hole = HoleChunk::parse(&bytes)?;
            let len = hole.len.into();
            let at = state.hole(hole.at, len)?;
            // The message ends after the event.
            let range = ReadRange { cookie, at: at + len, len: 0 };
            self.state = TransmissionState::Payload { range, last };
            return Ok(Some(TransmissionEvent::Hole(ReadRange { cookie, at, len })));
        }
        match ExtentForm::of(chunk.kind) {
            Some(form) => state.status(StatusPayload::parse(form, bytes.into_owned())?)?,
            None => state.failure(&ErrorChunk::parse(chunk.kind, &bytes)?),
        }
        Ok(self.end_message(cookie, last))
    }

    /// A message has ended; `last`: its reply has ended, too.
    fn end_message(&mut self, cookie: u64, last: bool) -> Option<TransmissionEvent<T>> {
        self.state = TransmissionState::Head;
        let state = if last { self.in_flight.remove(cookie) } else { None };
        let (request, result) = state?.finish();
        Some(TransmissionEvent::End { cookie, request, result })
    }

    fn state_of(&mut self, cookie: u64) -> Result<&mut ReplyState<T>, ProtocolError> {
        let state = self.in_flight.get_mut(cookie);
        state.ok_or_else(|| violation("a reply to a request that is not in flight"))
    }
}

/// The head of a message.
enum MessageHead {
    Simple(u64, Option<Errno>),
    Chunk(ReplyChunk),
    /// A chunk of data, and its offset in the export.
    Data(ReplyChunk, u64),
}

/// Length of contents that are needed as a whole: the codec limits it for every kind.
fn contents_len(chunk: &ReplyChunk) -> usize {
    usize::try_from(chunk.length).unwrap_or(usize::MAX)
}
