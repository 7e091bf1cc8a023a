//! Requests that may be repeated.

use blockhaul_block::{ContextSet, Error, Kind, Op, Request, RequestFlags, Result};
use blockhaul_io::{Data, KeptReservation};

use crate::declared::usage;

/// What is needed to repeat a request.
pub struct RepeatableRequest {
    what: RepeatableOperation,
    at: u64,
    len: u64,
    flags: RequestFlags,
}

enum RepeatableOperation {
    Read(KeptReservation),
    Write(Data),
    Zero,
    Trim,
    Flush,
    Cache,
    Extents(ContextSet),
}

impl RepeatableRequest {
    /// Remembers a request.
    pub fn of(request: &mut Request) -> RepeatableRequest {
        let what = match &mut request.op {
            Op::Read(room) => RepeatableOperation::Read(room.keep()),
            Op::Write(data) => RepeatableOperation::Write(data.clone()),
            Op::Zero => RepeatableOperation::Zero,
            Op::Trim => RepeatableOperation::Trim,
            Op::Flush => RepeatableOperation::Flush,
            Op::Cache => RepeatableOperation::Cache,
            Op::Extents(contexts) => RepeatableOperation::Extents(*contexts),
        };
        RepeatableRequest { what, at: request.at, len: request.len, flags: request.flags }
    }

    /// The request once more; the first one must have completed.
    ///
    /// # Errors
    /// [`Kind::NoMemory`] if a read gets no memory.
    pub async fn request(&self) -> Result<Request> {
        let op = match &self.what {
            RepeatableOperation::Read(kept) => {
                let room = kept.again().await;
                Op::Read(room.map_err(|error| {
                    Error::new(Kind::NoMemory, "no memory to retry").because(error)
                })?)
            }
            RepeatableOperation::Write(data) => Op::Write(data.clone()),
            RepeatableOperation::Zero => Op::Zero,
            RepeatableOperation::Trim => Op::Trim,
            RepeatableOperation::Flush => Op::Flush,
            RepeatableOperation::Cache => Op::Cache,
            RepeatableOperation::Extents(contexts) => Op::Extents(*contexts),
        };
        Ok(Request { op, at: self.at, len: self.len, flags: self.flags })
    }
}

/// Errors that may be worth a retry, with the names that users type.
const CLASSES: [(&str, Kind); 5] = [
    ("disconnected", Kind::Disconnected),
    ("timeout", Kind::TimedOut),
    ("shutdown", Kind::ShuttingDown),
    ("io", Kind::Io),
    ("memory", Kind::NoMemory),
];

/// The names of [`CLASSES`], as the default of a parameter.
pub(crate) const ALL_CLASSES: &str = "disconnected,timeout,shutdown,io,memory";

/// Parses a list of kinds of errors.
pub(crate) fn classes(owner: &str, text: &str) -> Result<Vec<Kind>> {
    let words = text.split(',').filter(|word| !word.is_empty());
    let kinds = words.map(|word| {
        let found = CLASSES.iter().find(|row| row.0 == word);
        found.map(|row| row.1).ok_or_else(|| {
            usage(format!("{owner}: unknown kind of error {word:?}; known are {ALL_CLASSES}"))
        })
    });
    kinds.collect()
}
