//! A request is data: it can be queued, logged, replayed and fuzzed.

use std::fmt;

use bitflags::bitflags;
use blockhaul_io::{Data, Reservation};

use crate::{ContextSet, Extents};

/// One request: an NBD request header without its cookie.
#[derive(Debug)]
pub struct Request {
    /// What to do, with its payload.
    pub op: Op,
    /// Offset in bytes.
    pub at: u64,
    /// Length in bytes of the effect; 0 only for a flush.
    pub len: u64,
    /// How to do it.
    pub flags: RequestFlags,
}

/// The operation of a request.
#[derive(Debug)]
pub enum Op {
    /// Read into memory that the caller has reserved: a reservation of the request's length.
    Read(Reservation),
    /// Write these bytes: as many as the request's length.
    Write(Data),
    /// Make the range read as zeroes.
    Zero,
    /// The range's contents are no longer needed.
    Trim,
    /// Make completed writes durable.
    Flush,
    /// The range will be read soon.
    Cache,
    /// Report the state of the range in these contexts.
    Extents(ContextSet),
}

bitflags! {
    /// How a request is to be done.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
    pub struct RequestFlags: u16 {
        /// Durable when complete. Write, zero, trim.
        const FUA = 1 << 0;
        /// Keep the range allocated. Zero.
        const NO_HOLE = 1 << 1;
        /// Fail rather than be as slow as writing. Zero.
        const FAST = 1 << 2;
        /// Answer with one extent per context. Extents.
        const ONE_EXTENT = 1 << 3;
        /// Store the data compressed, as far as it is whole units of [`Facts::compression`]. Write.
        /// The fence removes it before a device that cannot.
        ///
        /// [`Facts::compression`]: crate::Facts::compression
        const COMPRESS = 1 << 4;
    }
}

/// The operation without its payload.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[expect(missing_docs, reason = "same names as `Op`")]
pub enum OpKind {
    Read,
    Write,
    Zero,
    Trim,
    Flush,
    Cache,
    Extents,
}

impl OpKind {
    /// All kinds, in the order of their numbers.
    pub const ALL: [OpKind; 7] = [
        OpKind::Read,
        OpKind::Write,
        OpKind::Zero,
        OpKind::Trim,
        OpKind::Flush,
        OpKind::Cache,
        OpKind::Extents,
    ];

    /// The name in options, logs and messages.
    pub fn name(self) -> &'static str {
        match self {
            OpKind::Read => "read",
            OpKind::Write => "write",
            OpKind::Zero => "zero",
            OpKind::Trim => "trim",
            OpKind::Flush => "flush",
            OpKind::Cache => "cache",
            OpKind::Extents => "extents",
        }
    }

    /// Whether it can change the device's contents.
    pub fn changes(self) -> bool {
        matches!(self, OpKind::Write | OpKind::Zero | OpKind::Trim)
    }
}

impl fmt::Display for OpKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl Request {
    /// A read of `room.len()` bytes.
    pub fn read(at: u64, room: Reservation) -> Request {
        let len = room.len() as u64;
        Request { op: Op::Read(room), at, len, flags: RequestFlags::empty() }
    }

    /// A write of `data`.
    pub fn write(at: u64, data: Data) -> Request {
        let len = data.len() as u64;
        Request { op: Op::Write(data), at, len, flags: RequestFlags::empty() }
    }

    /// A zero request for `len` bytes.
    pub fn zero(at: u64, len: u64) -> Request {
        Request { op: Op::Zero, at, len, flags: RequestFlags::empty() }
    }

    /// A trim of `len` bytes.
    pub fn trim(at: u64, len: u64) -> Request {
        Request { op: Op::Trim, at, len, flags: RequestFlags::empty() }
    }

    /// A flush.
    pub fn flush() -> Request {
        Request { op: Op::Flush, at: 0, len: 0, flags: RequestFlags::empty() }
    }

    /// A hint that `len` bytes will be read.
    pub fn cache(at: u64, len: u64) -> Request {
        Request { op: Op::Cache, at, len, flags: RequestFlags::empty() }
    }

    /// A request for the extents of `len` bytes.
    pub fn extents(at: u64, len: u64, contexts: ContextSet) -> Request {
        Request { op: Op::Extents(contexts), at, len, flags: RequestFlags::empty() }
    }

    /// The same request with these flags added.
    #[must_use]
    pub fn with(mut self, flags: RequestFlags) -> Request {
        self.flags |= flags;
        self
    }

    /// The kind of its operation.
    pub fn kind(&self) -> OpKind {
        match self.op {
            Op::Read(_) => OpKind::Read,
            Op::Write(_) => OpKind::Write,
            Op::Zero => OpKind::Zero,
            Op::Trim => OpKind::Trim,
            Op::Flush => OpKind::Flush,
            Op::Cache => OpKind::Cache,
            Op::Extents(_) => OpKind::Extents,
        }
    }

    /// End of the range; `None` on overflow.
    pub fn end(&self) -> Option<u64> {
        self.at.checked_add(self.len)
    }
}

/// The result of a request.
#[derive(Debug, Clone)]
pub enum Reply {
    /// Done. Everything but reads and extents.
    Done,
    /// The bytes of a read.
    Data(Data),
    /// A read that found only zeroes.
    Hole,
    /// One list per requested context, in ascending order of context.
    Extents(Vec<Extents>),
}
