//! The state of the reply to one request, and the contents of its chunks.

use blockhaul_block::{Error, Extent, Extents, Kind, Outcome, Reply};
use blockhaul_io::{Buf, Data, Reservation};
use blockhaul_wire::reply::{ChunkKind, Failure, Hole};
use blockhaul_wire::status::{Form, STATE_HOLE, STATE_ZERO, Status};

/// Maximum number of chunks in one reply: one for every 512 bytes of the longest read, and as many
/// again. Limits the list that a server can make us keep.
pub(crate) const CHUNKS_MAX: u32 = 128 << 10;

/// A request in flight and its reply so far.
pub(crate) struct Expected {
    pub(crate) at: u64,
    pub(crate) len: u64,
    pub(crate) want: Want,
    /// The first error in the reply.
    pub(crate) error: Option<Error>,
    /// Number of chunks so far.
    pub(crate) chunks: u32,
}

/// The expected kind of reply.
pub(crate) enum Want {
    /// Nothing but success.
    Done,
    /// Bytes.
    Read(Reading),
    /// One list for each of these context ids, in this order.
    Extents {
        lists: Vec<(u32, Option<Extents>)>,
        /// Only the first extent of each list.
        one: bool,
        /// The ID of `base:allocation`, if it was selected.
        allocation: Option<u32>,
    },
}

/// A read in progress.
pub(crate) struct Reading {
    /// Until the first byte arrives.
    room: Option<Reservation>,
    buf: Option<Buf>,
    /// All data at once, in memory or parked.
    whole: Option<Data>,
    /// Ranges covered by chunks, relative to the request, in order of arrival.
    covered: Vec<(u64, u64)>,
    holes: Vec<(u64, u64)>,
}

impl Reading {
    pub(crate) fn new(room: Reservation) -> Reading {
        Reading { room: Some(room), buf: None, whole: None, covered: Vec::new(), holes: Vec::new() }
    }

    /// The reservation, if no data has arrived yet: for a payload that is the whole reply.
    pub(crate) fn take_room(&mut self) -> Option<Reservation> {
        self.room.take()
    }

    /// Whether no data has arrived yet.
    pub(crate) fn is_untouched(&self) -> bool {
        self.room.is_some() && self.covered.is_empty()
    }

    /// Whether the first data to arrive would take the reservation.
    pub(crate) fn has_room(&self) -> bool {
        self.room.is_some()
    }

    pub(crate) fn filled_whole(&mut self, data: Data) {
        self.covered.push((0, data.len() as u64));
        self.whole = Some(data);
    }

    /// Takes the buffer to fill it; return it with [`Reading::filled`]. `None` if the whole reply
    /// has already arrived at once.
    pub(crate) fn take_buf(&mut self) -> Option<Buf> {
        self.buf.take().or_else(|| self.room.take().map(Reservation::into_buf))
    }

    pub(crate) fn filled(&mut self, buf: Buf, start: u64, len: u64) {
        self.buf = Some(buf);
        self.covered.push((start, len));
    }
}

impl Expected {
    pub(crate) fn new(at: u64, len: u64, want: Want) -> Expected {
        Expected { at, len, want, error: None, chunks: 0 }
    }

    /// The position of a chunk's bytes in the request, if they are inside.
    pub(crate) fn place(&self, at: u64, len: u64) -> Option<u64> {
        let start = at.checked_sub(self.at)?;
        let end = start.checked_add(len)?;
        (end <= self.len && len > 0).then_some(start)
    }

    /// Whether it is a read whose buffer is filled piece by piece.
    pub(crate) fn is_partial(&self) -> bool {
        matches!(&self.want, Want::Read(reading) if reading.buf.is_some())
    }

    /// Records a hole.
    pub(crate) fn hole(&mut self, hole: Hole) -> Result<(), &'static str> {
        let len = u64::from(hole.len);
        let start = self.place(hole.at, len).ok_or("a hole outside of the request")?;
        let Want::Read(reading) = &mut self.want else {
            return Err("a hole in reply to another command than read");
        };
        reading.covered.push((start, len));
        reading.holes.push((start, len));
        Ok(())
    }

    /// The outcome when the reply is complete.
    pub(crate) fn finish(self) -> Outcome {
        if let Some(error) = self.error {
            return Err(error);
        }
        match self.want {
            Want::Done => Ok(Reply::Done),
            Want::Read(reading) => reading.finish(self.len),
            Want::Extents { lists, .. } => {
                let lists: Option<Vec<_>> = lists.into_iter().map(|(_, list)| list).collect();
                let missing = || Error::new(Kind::Io, "the server left out a metadata context");
                Ok(Reply::Extents(lists.ok_or_else(missing)?))
            }
        }
    }
}

impl Reading {
    fn finish(mut self, len: u64) -> Outcome {
        covers(&mut self.covered, len)?;
        if let Some(data) = self.whole {
            return Ok(Reply::Data(data));
        }
        let Some(mut buf) = self.buf else { return Ok(Reply::Hole) };
        for (start, part) in self.holes {
            // Inside the buffer, which has the request's length: checked when it was recorded.
            buf[start as usize..(start + part) as usize].fill(0);
        }
        Ok(Reply::Data(buf.into()))
    }
}

// nbd: chunk.overlap-refused
/// Checks that the ranges of a reply are the whole request, each byte once: bytes that arrive twice may differ.
pub(crate) fn covers(covered: &mut [(u64, u64)], len: u64) -> Result<(), Error> {
    covered.sort_unstable();
    let mut reached = 0;
    let in_order = covered.iter().all(|&(start, part)| {
        let follows = start == reached;
        reached += part;
        follows
    });
    // nbd: read.incomplete-refused
    if in_order && reached == len {
        Ok(())
    } else {
        let text = "the server left out bytes of a read, or sent some twice";
        Err(Error::new(Kind::Io, text))
    }
}

/// Chunks with a small payload: holes, errors, extents.
pub(crate) fn small_chunk(
    kind: ChunkKind,
    payload: &[u8],
    expected: &mut Expected,
) -> Result<(), Error> {
    // nbd: error.unknown
    if kind.is_error() {
        let failure = Failure::parse(kind, payload).map_err(|error| wrong(&error))?;
        let text = match failure.at {
            Some(at) => format!("{} at offset {at}", failure.text()),
            None => failure.text(),
        };
        expected.error.get_or_insert_with(|| server_error(failure.error, text.trim()));
        return Ok(());
    }
    if kind == ChunkKind::OffsetHole {
        let hole = Hole::parse(payload).map_err(|error| wrong(&error))?;
        return expected.hole(hole).map_err(violation);
    }
    let Some(form) = Form::of(kind) else {
        // nbd: chunk.unknown
        return Err(violation("an unknown kind of chunk"));
    };
    let status = Status::parse(form, payload).map_err(|error| wrong(&error))?;
    let len = expected.len;
    let Want::Extents { lists, one, allocation } = &mut expected.want else {
        return Err(violation("extents in reply to another command than block status"));
    };
    let wanted = lists.iter_mut().find(|list| list.0 == status.context());
    // Ignore a context that was negotiated, but not requested here.
    if let Some((_, list)) = wanted {
        // nbd: base.unknown-flags
        let known =
            if *allocation == Some(status.context()) { STATE_HOLE | STATE_ZERO } else { u64::MAX };
        let runs = status.extents().map(|run| Extent { len: run.len, state: run.flags & known });
        let mut extents: Extents = runs.collect();
        // The last extent may exceed the requested range.
        extents.truncate(len);
        if *one {
            extents.first_only();
        }
        *list = Some(extents);
    }
    Ok(())
}

// nbd: errors.unknown
pub(crate) fn server_error(errno: blockhaul_wire::Errno, text: &str) -> Error {
    let kind = Kind::from_number(errno.known().to_wire());
    let text = if text.is_empty() {
        format!("the server answers {errno}")
    } else {
        format!("the server answers {errno} ({text})")
    };
    Error::new(kind, text)
}

// nbd: error.inconsistent
/// The server violated the protocol: later data cannot be trusted.
pub(crate) fn violation(what: &'static str) -> Error {
    Error::new(Kind::Io, format!("the server broke the protocol: {what}"))
}

pub(crate) fn wrong(error: &blockhaul_wire::Error) -> Error {
    Error::new(Kind::Io, format!("the server broke the protocol: {error}"))
}

pub(crate) fn cut_off() -> Error {
    Error::new(Kind::Disconnected, "the server closed the connection in the middle of a reply")
}
