//! The device of a file in a snapshot.

use std::sync::Arc;

use blockhaul_block::{
    BASE_ALLOCATION, Can, Device, Error, Facts, Kind, Op, Outcome, PendingRequest, Reply, Request,
    RequestFlags,
};
use blockhaul_catalog::{HandleOpener, OpenFuture};
use blockhaul_io::Reservation;

use crate::ahead::ReadAhead;
use crate::cache::CachedBlob;
use crate::content::FilePart;
use crate::loads::BlobLoads;
use crate::snapshot::Snapshot;

/// Preferred length of the requests of a copy: several blobs, so that neighbours are fetched together.
const REQUEST: u32 = 4 << 20;
/// Bytes of blobs that a request waits for at a time, unless one blob has more.
const GROUP: u64 = 16 << 20;
/// Bytes that are read ahead of a sequential reader, and their share of the cache.
const AHEAD: u64 = 8 << 20;
const AHEAD_SHARE: u64 = 4;

/// A handle to a file in a snapshot, read-only.
#[derive(Clone)]
pub(crate) struct ResticDevice {
    facts: Arc<Facts>,
    loads: Arc<BlobLoads>,
    ahead: Arc<ReadAhead>,
}

impl ResticDevice {
    /// The device of a file in this snapshot.
    pub(crate) fn new(name: &str, snapshot: &Snapshot, loads: BlobLoads) -> ResticDevice {
        let mut facts = Facts::new(name, loads.content.size());
        facts.description = snapshot.shown();
        facts.version = Some(snapshot.id.to_string().into());
        facts.can = Can::MULTI_CONN | Can::EXTENTS;
        facts.contexts = vec![BASE_ALLOCATION.to_owned()];
        // For copies alone: clients of a server choose their own.
        facts.advertised = Some(facts.advertised_or_own());
        facts.block.preferred = REQUEST;
        let ahead = ReadAhead::new(AHEAD.min(loads.cache.limit() / AHEAD_SHARE));
        ResticDevice { facts: Arc::new(facts), loads: Arc::new(loads), ahead: Arc::new(ahead) }
    }

    /// Fetches what a sequential reader will read.
    fn read_ahead(&self, at: u64, end: u64) {
        let Some(range) = self.ahead.note(at..end) else { return };
        let mut missing = Vec::new();
        let parts = self.loads.content.parts(range);
        self.loads.cache.expect(parts.filter_map(|part| part.blob), &mut missing);
        self.loads.start(&missing);
    }

    fn read(&self, at: u64, end: u64, room: Reservation) -> PendingRequest {
        if self.loads.content.parts(at..end).all(|part| part.blob.is_none()) {
            return Ok(Reply::Hole).into();
        }
        let loads = self.loads.clone();
        let pending = PendingRequest::start(async move { read(&loads, at, room).await });
        // Behind the request itself.
        self.read_ahead(at, end);
        pending
    }
}

/// Reads a range that is not all zeroes.
async fn read(loads: &Arc<BlobLoads>, at: u64, room: Reservation) -> Outcome {
    let mut buf = room.into_buf();
    let end = at + buf.len() as u64;
    let mut next = at;
    while next < end {
        let parts = group(loads.content.parts(next..end));
        let mut missing = Vec::new();
        let blobs = loads.cache.request(parts.iter().filter_map(|part| part.blob), &mut missing);
        loads.start(&missing);
        let mut blobs = blobs.into_iter();
        for part in parts {
            let until = part.end.min(end);
            // Both are inside of a buffer in memory.
            let place = (next - at) as usize..(until - at) as usize;
            let room = buf.get_mut(place).ok_or_else(Error::misfit)?;
            match part.blob.and_then(|_| blobs.next()) {
                None => room.fill(0),
                Some(blob) => {
                    let bytes = loaded(blob).await?;
                    let from = (next - part.at) as usize;
                    let bytes = bytes.get(from..from + room.len()).ok_or_else(Error::misfit)?;
                    room.copy_from_slice(bytes);
                }
            }
            next = until;
        }
    }
    Ok(Reply::Data(buf.into()))
}

async fn loaded(blob: CachedBlob) -> blockhaul_block::Result<crate::cache::BlobBytes> {
    match blob {
        CachedBlob::Loaded(bytes) => Ok(bytes),
        CachedBlob::Loading(ticket) => ticket.await.unwrap_or_else(|lost| {
            Err(Error::new(Kind::Io, "a blob could not be fetched").because(lost))
        }),
    }
}

/// The first parts, whose blobs have at most [`GROUP`] bytes; at least one.
fn group(parts: impl Iterator<Item = FilePart>) -> Vec<FilePart> {
    let mut bytes = 0_u64;
    let fits = |part: &FilePart| {
        let is_first = bytes == 0;
        if part.blob.is_some() {
            bytes += part.end - part.at;
        }
        is_first || bytes <= GROUP
    };
    parts.take_while(fits).collect()
}

impl Device for ResticDevice {
    fn facts(&self) -> Arc<Facts> {
        self.facts.clone()
    }

    fn submit(&self, request: Request) -> PendingRequest {
        let Request { op, at, len, flags } = request;
        let Some(end) = at.checked_add(len).filter(|end| *end <= self.facts.size) else {
            return Error::new(Kind::Invalid, "beyond the end").into();
        };
        match op {
            Op::Read(room) => self.read(at, end, room),
            Op::Extents(contexts) => {
                let mut extents = self.loads.content.extents(at..end);
                if flags.contains(RequestFlags::ONE_EXTENT) {
                    extents.first_only();
                }
                let lists = contexts.iter().map(|_| extents.clone()).collect();
                Ok(Reply::Extents(lists)).into()
            }
            Op::Cache => Error::new(Kind::Unsupported, "snapshots have no such request").into(),
            Op::Write(_) | Op::Zero | Op::Trim | Op::Flush => {
                Error::new(Kind::ReadOnly, "a snapshot is read-only").into()
            }
        }
    }
}

/// More handles: they share the blobs in memory.
impl HandleOpener for ResticDevice {
    fn another(&self) -> OpenFuture<Arc<dyn Device>> {
        let device: Arc<dyn Device> = Arc::new(self.clone());
        Box::pin(std::future::ready(Ok(device)))
    }
}
