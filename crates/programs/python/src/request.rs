//! Requests of Python, carried out on a worker: long ones in parts.

use std::collections::VecDeque;
use std::sync::Arc;

use blockhaul_block::{
    ContextSet, Device, DeviceExt as _, Error, Extents, Facts, Kind, PendingRequest, Reply,
    Request, RequestFlags, Result,
};
use blockhaul_io::{Data, Pool};

use crate::memory::room;

/// Bytes of a part of a long read or write, unless the device accepts less.
const PART: u64 = 8 << 20;
/// Parts of one request in flight.
const PARTS: usize = 4;

/// A request.
pub(crate) enum PythonRequest {
    /// Read `len` bytes at `at`.
    Read { at: u64, len: u64 },
    /// Write parts at `at`.
    Write { at: u64, parts: Vec<Data>, flags: RequestFlags },
    /// Zero `len` bytes at `at`.
    Zero { at: u64, len: u64, flags: RequestFlags },
    /// Trim `len` bytes at `at`.
    Trim { at: u64, len: u64, flags: RequestFlags },
    /// Flush.
    Flush,
    /// Announce that `len` bytes at `at` will be read.
    Cache { at: u64, len: u64 },
    /// Report extents.
    Extents { at: u64, len: u64, contexts: ContextSet, flags: RequestFlags },
}

impl PythonRequest {
    /// Whether it may change the device's contents.
    pub(crate) fn changes(&self) -> bool {
        matches!(
            self,
            PythonRequest::Write { .. } | PythonRequest::Zero { .. } | PythonRequest::Trim { .. }
        )
    }

    /// The same as one request of a device; `None` for reads and writes, which have a payload.
    pub(crate) fn without_payload(&self) -> Option<Request> {
        match *self {
            PythonRequest::Read { .. } | PythonRequest::Write { .. } => None,
            PythonRequest::Zero { at, len, flags } => Some(Request::zero(at, len).with(flags)),
            PythonRequest::Trim { at, len, flags } => Some(Request::trim(at, len).with(flags)),
            PythonRequest::Flush => Some(Request::flush()),
            PythonRequest::Cache { at, len } => Some(Request::cache(at, len)),
            PythonRequest::Extents { at, len, contexts, flags } => {
                Some(Request::extents(at, len, contexts).with(flags))
            }
        }
    }
}

/// A part of what was read.
pub(crate) enum ReadPart {
    /// Bytes.
    Data(Data),
    /// Bytes, from a connection of an event loop.
    Bytes(Vec<u8>),
    /// As many zeroes.
    Zeroes(usize),
}

impl ReadPart {
    /// The bytes, if it has some.
    pub(crate) fn bytes(&self) -> Option<&[u8]> {
        match self {
            ReadPart::Data(data) => Some(data.bytes()),
            ReadPart::Bytes(bytes) => Some(bytes),
            ReadPart::Zeroes(_) => None,
        }
    }

    pub(crate) fn len(&self) -> usize {
        match self {
            ReadPart::Data(data) => data.len(),
            ReadPart::Bytes(bytes) => bytes.len(),
            ReadPart::Zeroes(len) => *len,
        }
    }
}

/// Extents of one context: its name, and lengths with states.
pub(crate) type ContextExtents = (String, Vec<(u64, u64)>);

/// A result.
pub(crate) enum PythonReply {
    /// Done.
    Done,
    /// What was read, in order.
    Read(Vec<ReadPart>),
    /// Extents by context.
    Extents(Vec<ContextExtents>),
}

/// The length of parts of a write.
pub(crate) fn part_of(device: &dyn Device) -> usize {
    let facts = device.facts();
    let maximum = u64::from(facts.block.maximum).min(PART);
    let minimum = u64::from(facts.block.minimum).max(1);
    usize::try_from((maximum - maximum % minimum).max(1)).unwrap_or(1)
}

/// Carries out a request.
pub(crate) async fn carry_out(
    device: Arc<dyn Device>,
    pool: Pool,
    asked: PythonRequest,
) -> Result<PythonReply> {
    match asked {
        PythonRequest::Read { at, len } => {
            read(&*device, &pool, at, len).await.map(PythonReply::Read)
        }
        PythonRequest::Write { at, parts, flags } => write(&*device, at, parts, flags).await,
        PythonRequest::Zero { at, len, flags } => {
            done(device.submit(Request::zero(at, len).with(flags))).await
        }
        PythonRequest::Trim { at, len, flags } => {
            done(device.submit(Request::trim(at, len).with(flags))).await
        }
        PythonRequest::Flush => done(device.submit(Request::flush())).await,
        PythonRequest::Cache { at, len } => done(device.submit(Request::cache(at, len))).await,
        PythonRequest::Extents { at, len, contexts, flags } => {
            extents(&*device, at, len, contexts, flags).await.map(PythonReply::Extents)
        }
    }
}

async fn done(pending: PendingRequest) -> Result<PythonReply> {
    match pending.await? {
        Reply::Done => Ok(PythonReply::Done),
        _ => Err(Error::misfit()),
    }
}

async fn read(device: &dyn Device, pool: &Pool, at: u64, len: u64) -> Result<Vec<ReadPart>> {
    let part = part_of(device) as u64;
    let end = at.checked_add(len).ok_or_else(beyond)?;
    let mut parts = Vec::new();
    let mut flying = VecDeque::new();
    let mut next = at;
    while next < end || !flying.is_empty() {
        if next < end && flying.len() < PARTS {
            let len = usize::try_from(part.min(end - next)).map_err(|_| beyond())?;
            flying.push_back((len, device.submit(Request::read(next, room(pool, len)))));
            next += len as u64;
            continue;
        }
        let Some((len, pending)) = flying.pop_front() else { break };
        parts.push(match pending.await? {
            Reply::Data(data) if data.len() == len => {
                data.load().map_err(|error| Error::system("cannot read", error))?;
                ReadPart::Data(data)
            }
            Reply::Hole => ReadPart::Zeroes(len),
            _ => return Err(Error::misfit()),
        });
    }
    Ok(parts)
}

async fn write(
    device: &dyn Device,
    at: u64,
    parts: Vec<Data>,
    flags: RequestFlags,
) -> Result<PythonReply> {
    let mut parts = parts.into_iter();
    let mut flying = VecDeque::new();
    let mut next = at;
    let mut failed = None;
    loop {
        let may_start = failed.is_none() && flying.len() < PARTS;
        if let Some(part) = may_start.then(|| parts.next()).flatten() {
            let len = part.len() as u64;
            flying.push_back(device.submit(Request::write(next, part).with(flags)));
            next = next.checked_add(len).ok_or_else(beyond)?;
            continue;
        }
        let Some(pending) = flying.pop_front() else { break };
        // Writes in flight are awaited also after an error.
        let outcome = done(pending).await;
        failed = failed.or(outcome.err());
    }
    failed.map_or(Ok(PythonReply::Done), Err)
}

async fn extents(
    device: &dyn Device,
    at: u64,
    len: u64,
    contexts: ContextSet,
    flags: RequestFlags,
) -> Result<Vec<ContextExtents>> {
    let facts = device.facts();
    let lists = if flags.is_empty() {
        device.extents(at, len, contexts).await?
    } else {
        match device.submit(Request::extents(at, len, contexts).with(flags)).await? {
            Reply::Extents(lists) if lists.len() == contexts.count() => lists,
            _ => return Err(Error::misfit()),
        }
    };
    Ok(named(&facts, contexts, &lists))
}

/// Lists of extents with the names of their contexts.
pub(crate) fn named(facts: &Facts, contexts: ContextSet, lists: &[Extents]) -> Vec<ContextExtents> {
    let runs = |list: &Extents| list.runs().iter().map(|run| (run.len, run.state)).collect();
    let named = contexts.iter().zip(lists);
    named.map(|(index, list)| (facts.contexts[index].clone(), runs(list))).collect()
}

fn beyond() -> Error {
    Error::new(Kind::Invalid, "the range is longer than any device")
}
