//! Common parts of layers that show the contents of a compressed file: parts of the contents,
//! decoded whole and cached.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use blockhaul_block::{
    BlockSizes, Can, Device, Error, Facts, Kind, Op, Pending, Reply, Request, Result,
};
use blockhaul_io::{Data, RangeLocks, Reservation};

/// The facts of read-only contents, over a file with these facts.
pub(crate) fn facts_of_content(file: &Facts, size: u64) -> Facts {
    let mut facts = Facts::new(file.name.clone(), size);
    facts.description.clone_from(&file.description);
    // All connections read the same, and nothing is ever written.
    facts.can = Can::MULTI_CONN;
    facts.block = BlockSizes::default();
    facts.rotational = file.rotational;
    facts.files.clone_from(&file.files);
    facts.allocation_unit = 1;
    facts
}

/// Cached parts by number; the least recently used ones are dropped first.
pub(crate) struct Kept {
    most: usize,
    /// The last used is last.
    parts: Mutex<Vec<(u64, Data)>>,
}

impl Kept {
    /// A cache of at most `most` parts, at least one.
    pub(crate) fn new(most: usize) -> Kept {
        Kept { most: most.max(1), parts: Mutex::default() }
    }

    /// Maximum number of cached parts.
    pub(crate) fn most(&self) -> usize {
        self.most
    }

    pub(crate) fn find(&self, number: u64) -> Option<Data> {
        let mut parts = self.parts();
        let place = parts.iter().position(|(other, _)| *other == number)?;
        parts[place..].rotate_left(1);
        parts.last().map(|(_, data)| data.clone())
    }

    pub(crate) fn keep(&self, number: u64, data: Data) {
        let mut parts = self.parts();
        parts.retain(|(other, _)| *other != number);
        if parts.len() >= self.most {
            parts.remove(0);
        }
        parts.push((number, data));
    }

    fn parts(&self) -> MutexGuard<'_, Vec<(u64, Data)>> {
        self.parts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A part of the contents: number, start, and length.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Part {
    pub(crate) number: u64,
    pub(crate) start: u64,
    pub(crate) len: u64,
}

impl Part {
    /// A range within a decoded part, if all of it is.
    pub(crate) fn slice(&self, at: u64, len: usize, data: &Data) -> Option<Data> {
        let inside = at >= self.start && at + len as u64 <= self.start + self.len;
        inside.then(|| data.slice((at - self.start) as usize, len))
    }
}

/// A handle to a compressed file.
pub(crate) trait Unpack: Send + Sync + 'static {
    /// Its kind, for error messages about writes: `a gzip file`.
    fn what(&self) -> &'static str;

    /// The cached parts.
    fn kept(&self) -> &Kept;

    /// The part that contains an offset.
    fn part_at(&self, at: u64) -> Option<Part>;

    /// Locks for active decoders: one task at a time per number ([`Unpack::decoder`]).
    fn decoders(&self) -> &Arc<RangeLocks>;

    /// The number of the decoder for a part.
    fn decoder(&self, part: Part) -> u64;

    /// Decodes a part, and caches it; has exclusive use of its decoder.
    async fn decode(&self, part: Part) -> Result<Data>;
}

/// A decoded part.
async fn decoded(file: &impl Unpack, part: Part) -> Result<Data> {
    if let Some(data) = file.kept().find(part.number) {
        return Ok(data);
    }
    let decoder = file.decoder(part);
    let _turn = file.decoders().lock(decoder, decoder + 1).await;
    // The previous holder may have decoded it.
    match file.kept().find(part.number) {
        Some(data) => Ok(data),
        None => file.decode(part).await,
    }
}

/// The contents of a compressed file, as a device.
pub(crate) struct Unpacked<F> {
    facts: Arc<Facts>,
    file: Arc<F>,
}

impl<F: Unpack> Unpacked<F> {
    /// The content, with these facts, of a file.
    pub(crate) fn over(facts: Facts, file: F) -> Arc<dyn Device> {
        Arc::new(Unpacked { facts: Arc::new(facts), file: Arc::new(file) })
    }
}

impl<F: Unpack> Device for Unpacked<F> {
    fn facts(&self) -> Arc<Facts> {
        self.facts.clone()
    }

    fn submit(&self, request: Request) -> Pending {
        submit(&self.file, request)
    }
}

/// Reads from a compressed file: at once if the range is in one cached part.
fn submit(file: &Arc<impl Unpack>, request: Request) -> Pending {
    let Op::Read(room) = request.op else {
        return Error::new(Kind::Invalid, format!("{} is read-only", file.what())).into();
    };
    let at = request.at;
    if let Some(part) = file.part_at(at)
        && let Some(data) = file.kept().find(part.number)
        && let Some(data) = part.slice(at, room.len(), &data)
    {
        return Pending::ready(Ok(Reply::Data(data)));
    }
    let file = file.clone();
    Pending::start(async move {
        let part_at = |at| file.part_at(at);
        let decoded = async |part| decoded(&*file, part).await;
        assemble(at, room, part_at, decoded).await.map(Reply::Data)
    })
}

/// A range, assembled from its parts.
async fn assemble(
    at: u64,
    room: Reservation,
    part_at: impl Fn(u64) -> Option<Part>,
    decoded: impl AsyncFn(Part) -> Result<Data>,
) -> Result<Data> {
    let none = || Error::new(Kind::Io, "the content ends before");
    let end = at + room.len() as u64;
    let first = part_at(at).ok_or_else(none)?;
    let data = decoded(first).await?;
    if let Some(data) = first.slice(at, room.len(), &data) {
        return Ok(data);
    }
    let mut buf = room.into_buf();
    let mut part = first;
    let mut data = data;
    let mut next = at;
    loop {
        let start = (next - part.start) as usize;
        let len = (end.min(part.start + part.len) - next) as usize;
        let place = (next - at) as usize;
        buf[place..place + len].copy_from_slice(&data.bytes()[start..start + len]);
        next += len as u64;
        if next >= end {
            return Ok(buf.into());
        }
        part = part_at(next).ok_or_else(none)?;
        data = decoded(part).await?;
    }
}
