//! What has come of the reply to one request, and what its chunks say.

use blockhaul_block::{Error, Extents, Kind, Outcome, Reply};
use blockhaul_io::{Buf, Data, Reservation};
use blockhaul_wire::reply::{ChunkKind, Failure, Hole};
use blockhaul_wire::status::{Form, Status};

/// A request in flight and what its reply has brought so far.
pub(crate) struct Expected {
    pub(crate) at: u64,
    pub(crate) len: u64,
    pub(crate) want: Want,
    /// The first error that the reply told.
    pub(crate) error: Option<Error>,
    /// Chunks so far.
    pub(crate) chunks: u32,
}

/// What kind of answer is expected.
pub(crate) enum Want {
    /// Nothing but success.
    Done,
    /// Bytes.
    Read(Reading),
    /// One list for each of these context ids, in this order.
    Extents {
        lists: Vec<(u32, Option<Extents>)>,
        /// Of each list the first extent only.
        one: bool,
    },
}

/// A read that is being answered.
pub(crate) struct Reading {
    /// Until the first byte comes.
    room: Option<Reservation>,
    buf: Option<Buf>,
    /// All of it at once, in memory or parked.
    whole: Option<Data>,
    /// Ranges that chunks covered, relative to the request, in order of arrival.
    covered: Vec<(u64, u64)>,
    holes: Vec<(u64, u64)>,
}

impl Reading {
    pub(crate) fn new(room: Reservation) -> Reading {
        Reading { room: Some(room), buf: None, whole: None, covered: Vec::new(), holes: Vec::new() }
    }

    /// The room, when nothing has come yet: for a payload that is all of the answer.
    pub(crate) fn take_room(&mut self) -> Option<Reservation> {
        self.room.take()
    }

    /// Whether nothing has come yet.
    pub(crate) fn is_untouched(&self) -> bool {
        self.room.is_some() && self.covered.is_empty()
    }

    /// Whether the first data to come would take the room.
    pub(crate) fn has_room(&self) -> bool {
        self.room.is_some()
    }

    pub(crate) fn filled_whole(&mut self, data: Data) {
        self.covered.push((0, data.len() as u64));
        self.whole = Some(data);
    }

    /// Takes the buffer out to be filled; give it back with [`Reading::filled`]. `None` when all of the
    /// answer has come at once before.
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

    /// The place of a chunk's bytes in the request, if they lie inside.
    pub(crate) fn place(&self, at: u64, len: u64) -> Option<u64> {
        let start = at.checked_sub(self.at)?;
        let end = start.checked_add(len)?;
        (end <= self.len && len > 0).then_some(start)
    }

    /// Whether it is a read with a buffer that is filled piece by piece.
    pub(crate) fn is_partial(&self) -> bool {
        matches!(&self.want, Want::Read(reading) if reading.buf.is_some())
    }

    /// Notes a hole.
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
        self.covered.sort_unstable();
        let mut reached = 0;
        // Each byte exactly once: what came twice may differ, and which one counts nobody knows.
        let in_order = self.covered.iter().all(|&(start, part)| {
            let follows = start == reached;
            reached += part;
            follows
        });
        if !in_order || reached != len {
            let text = "the server left out bytes of a read, or sent some twice";
            return Err(Error::new(Kind::Io, text));
        }
        if let Some(data) = self.whole {
            return Ok(Reply::Data(data));
        }
        let Some(mut buf) = self.buf else { return Ok(Reply::Hole) };
        for (start, part) in self.holes {
            // Inside the buffer, which has the request's length: checked when it was noted.
            buf[start as usize..(start + part) as usize].fill(0);
        }
        Ok(Reply::Data(buf.into()))
    }
}

/// Chunks whose payload is small: holes, errors, extents.
pub(crate) fn small_chunk(
    kind: ChunkKind,
    payload: &[u8],
    expected: &mut Expected,
) -> Result<(), Error> {
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
        return Err(violation("an unknown kind of chunk"));
    };
    let status = Status::parse(form, payload).map_err(|error| wrong(&error))?;
    let len = expected.len;
    let Want::Extents { lists, one } = &mut expected.want else {
        return Err(violation("extents in reply to another command than block status"));
    };
    let wanted = lists.iter_mut().find(|list| list.0 == status.context());
    // A context that nobody asked for here was negotiated for somebody else: ignored.
    if let Some((_, list)) = wanted {
        let runs = status.extents();
        let mut extents: Extents =
            runs.map(|run| blockhaul_block::Extent { len: run.len, state: run.flags }).collect();
        // The last extent may reach beyond what was asked for.
        extents.truncate(len);
        if *one {
            extents.first_only();
        }
        *list = Some(extents);
    }
    Ok(())
}

pub(crate) fn server_error(errno: blockhaul_wire::Errno, text: &str) -> Error {
    let kind = Kind::from_number(errno.known().to_wire());
    let text = match text.is_empty() {
        true => format!("the server answers {errno}"),
        false => format!("the server answers {errno} ({text})"),
    };
    Error::new(kind, text)
}

/// The server broke the protocol: nothing that comes after can be trusted.
pub(crate) fn violation(what: &'static str) -> Error {
    Error::new(Kind::Io, format!("the server broke the protocol: {what}"))
}

pub(crate) fn wrong(error: &blockhaul_wire::Error) -> Error {
    Error::new(Kind::Io, format!("the server broke the protocol: {error}"))
}
