//! Requests in flight, and the outcomes of their replies.

use blockhaul_block::{Error, Extent, Extents, Facts, Kind, OpKind, Outcome, Reply};
use blockhaul_io::{Buf, Data, Reservation};
use blockhaul_wire::status::{STATE_HOLE, STATE_ZERO, StatusPayload};
use blockhaul_wire::transmission::{ReadRange, ReplyError};

/// The facts of a request in flight on which its outcome depends.
pub(crate) struct RequestFacts {
    pub(crate) kind: OpKind,
    pub(crate) at: u64,
    pub(crate) len: u64,
    /// Only the first extent of each list.
    pub(crate) one: bool,
    /// The ID of `base:allocation`, if it was selected.
    pub(crate) allocation: Option<u32>,
}

impl RequestFacts {
    /// The outcome of a complete reply. The bytes of a read are elsewhere.
    pub(crate) fn outcome(&self, result: Result<Vec<StatusPayload>, ReplyError>) -> Outcome {
        let lists = result.map_err(|error| server_error(&error))?;
        if self.kind != OpKind::Extents {
            return Ok(Reply::Done);
        }
        Ok(Reply::Extents(lists.iter().map(|list| self.extents(list)).collect()))
    }

    fn extents(&self, list: &StatusPayload) -> Extents {
        let status = list.status();
        // nbd: base.unknown-flags
        let is_allocation = self.allocation == Some(status.context());
        let known = if is_allocation { STATE_HOLE | STATE_ZERO } else { u64::MAX };
        let runs = status.extents().map(|run| Extent { len: run.len, state: run.flags & known });
        let mut extents: Extents = runs.collect();
        // The last extent may exceed the requested range.
        extents.truncate(self.len);
        if self.one {
            extents.first_only();
        }
        extents
    }

    /// Whether it is a read or a write.
    pub(crate) fn is_payload(&self) -> bool {
        matches!(self.kind, OpKind::Read | OpKind::Write)
    }

    /// An error of this request, with its place on the device.
    pub(crate) fn locate(&self, error: Error, facts: &Facts) -> Error {
        error.during(self.kind, self.at, self.len).on(&facts.name)
    }
}

/// The memory of a read in progress.
pub(crate) struct ReadMemory {
    /// Length of the request in bytes.
    len: u64,
    /// Until the first byte arrives.
    room: Option<Reservation>,
    buf: Option<Buf>,
    /// All data at once, in memory or parked.
    whole: Option<Data>,
    /// Ranges of zeroes, relative to the request.
    holes: Vec<(u64, u64)>,
}

impl ReadMemory {
    /// `room` is for all of the `len` bytes.
    pub(crate) fn new(room: Reservation, len: u64) -> ReadMemory {
        ReadMemory { len, room: Some(room), buf: None, whole: None, holes: Vec::new() }
    }

    /// The reservation, if this payload is the whole reply.
    pub(crate) fn take_room(&mut self, payload: ReadRange) -> Option<Reservation> {
        let is_whole = payload.len == self.len && self.holes.is_empty();
        if is_whole { self.room.take() } else { None }
    }

    /// Whether the first data to arrive would take the reservation.
    pub(crate) fn has_room(&self) -> bool {
        self.room.is_some()
    }

    /// Whether the buffer is filled piece by piece.
    pub(crate) fn is_partial(&self) -> bool {
        self.buf.is_some()
    }

    /// Whether the memory is with the task that receives the payload.
    pub(crate) fn is_lent(&self) -> bool {
        self.room.is_none() && self.buf.is_none() && self.whole.is_none()
    }

    pub(crate) fn fill_whole(&mut self, data: Data) {
        self.whole = Some(data);
    }

    /// Takes the buffer to fill it; return it with [`ReadMemory::put_buf`]. `None` if the whole reply has already
    /// arrived at once.
    pub(crate) fn take_buf(&mut self) -> Option<Buf> {
        self.buf.take().or_else(|| self.room.take().map(Reservation::into_buf))
    }

    pub(crate) fn put_buf(&mut self, buf: Buf) {
        self.buf = Some(buf);
    }

    pub(crate) fn add_hole(&mut self, hole: ReadRange) {
        self.holes.push((hole.at, hole.len));
    }

    /// The reply: all of it has arrived.
    pub(crate) fn finish(&mut self) -> Reply {
        if let Some(data) = self.whole.take() {
            return Reply::Data(data);
        }
        let Some(mut buf) = self.buf.take() else { return Reply::Hole };
        for &(start, part) in &self.holes {
            // Inside the buffer, which has the request's length.
            buf[start as usize..(start + part) as usize].fill(0);
        }
        Reply::Data(buf.into())
    }
}

// nbd: errors.unknown
fn server_error(error: &ReplyError) -> Error {
    let kind = match error {
        ReplyError::Server { error, .. } => Kind::from_number(error.known().to_wire()),
        ReplyError::Incomplete | ReplyError::NoContext => Kind::Io,
    };
    Error::new(kind, error.to_string())
}

/// The server violated the protocol: later data cannot be trusted.
pub(crate) fn violation(what: &str) -> Error {
    // The storage has not failed: no remedy for storage that fails.
    Error::new(Kind::Io, format!("the server broke the protocol: {what}")).complete()
}

pub(crate) fn wrong(error: &blockhaul_wire::ProtocolError) -> Error {
    violation(&error.to_string())
}
