//! Common parts of layers that show the contents of a compressed file: parts of the contents,
//! decoded whole and cached.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use blockhaul_block::{
    BlockSizes, Can, Device, Error, Facts, Kind, Op, PendingRequest, Reply, Request, Result,
};
use blockhaul_catalog::LayerBase;
use blockhaul_io::{Data, RangeLocks, Reservation};

use crate::per_disk::PerDisk;

/// The facts of read-only contents, over a file with these facts.
fn facts_of_content(file: &Facts, size: u64) -> Facts {
    let mut facts = Facts::new(file.name.clone(), size);
    facts.description.clone_from(&file.description);
    // All connections read the same, and nothing is ever written.
    facts.can = Can::MULTI_CONN;
    facts.block = BlockSizes::default();
    facts.rotational = file.rotational;
    facts.one_handle = file.one_handle;
    facts.files.clone_from(&file.files);
    facts.allocation_unit = 1;
    facts
}

/// Cached parts by number; the least recently used ones are dropped first.
pub(crate) struct PartCache {
    most: usize,
    /// The last used is last.
    parts: Mutex<Vec<(u64, Data)>>,
}

impl PartCache {
    /// A cache of at most `most` parts, at least one.
    pub(crate) fn new(most: usize) -> PartCache {
        PartCache { most: most.max(1), parts: Mutex::default() }
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
pub(crate) struct PackedPart {
    pub(crate) number: u64,
    pub(crate) start: u64,
    pub(crate) len: u64,
}

impl PackedPart {
    /// A range within a decoded part, if all of it is.
    pub(crate) fn slice(&self, at: u64, len: usize, data: &Data) -> Option<Data> {
        let inside = at >= self.start && at + len as u64 <= self.start + self.len;
        inside.then(|| data.slice((at - self.start) as usize, len))
    }
}

/// What is known of a compressed file.
pub(crate) trait PackedIndex: Send + Sync + 'static {
    /// The kind of file, for error messages about writes: `a gzip file`.
    const FILE: &'static str;

    /// Length of the contents in bytes.
    fn size(&self) -> u64;

    /// The part that contains an offset.
    fn part_at(&self, at: u64) -> Option<PackedPart>;
}

/// The state of a file, shared by all handles.
pub(crate) struct PackedContent<I> {
    pub(crate) index: I,
    pub(crate) kept: PartCache,
    /// Length of the file in bytes.
    packed: u64,
    /// Locks for active decoders: one task at a time per number ([`PackedFile::decoder`]).
    decoders: Arc<RangeLocks>,
}

impl<I: PackedIndex> PackedContent<I> {
    /// The state that another handle has, or one with a new index, and a cache of at most `most` parts.
    ///
    /// # Errors
    /// Those of `index`.
    pub(crate) async fn open(
        files: &PerDisk<PackedContent<I>>,
        below: &LayerBase,
        most: usize,
        index: impl Future<Output = Result<I>>,
    ) -> Result<Arc<PackedContent<I>>> {
        let packed = below.device.facts().size;
        if let Some(known) = files.known(below).filter(|content| content.packed == packed) {
            return Ok(known);
        }
        let content = PackedContent {
            index: index.await?,
            kept: PartCache::new(most),
            packed,
            decoders: Arc::default(),
        };
        files.get(below, || Ok(content))
    }
}

/// A handle to a compressed file.
pub(crate) trait PackedFile: Send + Sync + 'static {
    /// The index of its files.
    type Index: PackedIndex;

    /// What all handles share.
    fn content(&self) -> &PackedContent<Self::Index>;

    /// The number of the decoder for a part.
    fn decoder(&self, part: PackedPart) -> u64;

    /// Decodes a part, and caches it; has exclusive use of its decoder.
    async fn decode(&self, part: PackedPart) -> Result<Data>;
}

/// A decoded part.
async fn decoded(file: &impl PackedFile, part: PackedPart) -> Result<Data> {
    let PackedContent { kept, decoders, .. } = file.content();
    if let Some(data) = kept.find(part.number) {
        return Ok(data);
    }
    let decoder = file.decoder(part);
    let _turn = decoders.lock(decoder, decoder + 1).await;
    // The previous holder may have decoded it.
    match kept.find(part.number) {
        Some(data) => Ok(data),
        None => file.decode(part).await,
    }
}

/// The contents of a compressed file, as a device.
pub(crate) struct UnpackedDevice<F> {
    facts: Arc<Facts>,
    file: Arc<F>,
}

impl<F: PackedFile> UnpackedDevice<F> {
    /// The content of a file, which has these facts.
    pub(crate) fn over(facts: &Facts, file: F) -> Arc<dyn Device> {
        let facts = facts_of_content(facts, file.content().index.size());
        Arc::new(UnpackedDevice { facts: Arc::new(facts), file: Arc::new(file) })
    }
}

impl<F: PackedFile> Device for UnpackedDevice<F> {
    fn facts(&self) -> Arc<Facts> {
        self.facts.clone()
    }

    fn submit(&self, request: Request) -> PendingRequest {
        submit(&self.file, request)
    }
}

/// Reads from a compressed file: at once if the range is in one cached part.
fn submit<F: PackedFile>(file: &Arc<F>, request: Request) -> PendingRequest {
    let Op::Read(room) = request.op else {
        return Error::new(Kind::Invalid, format!("{} is read-only", F::Index::FILE)).into();
    };
    let at = request.at;
    if let Some(part) = file.content().index.part_at(at)
        && let Some(data) = file.content().kept.find(part.number)
        && let Some(data) = part.slice(at, room.len(), &data)
    {
        return PendingRequest::ready(Ok(Reply::Data(data)));
    }
    let file = file.clone();
    PendingRequest::start(async move {
        let part_at = |at| file.content().index.part_at(at);
        let decoded = async |part| decoded(&*file, part).await;
        assemble(at, room, part_at, decoded).await.map(Reply::Data)
    })
}

/// A range, assembled from its parts.
async fn assemble(
    at: u64,
    room: Reservation,
    part_at: impl Fn(u64) -> Option<PackedPart>,
    decoded: impl AsyncFn(PackedPart) -> Result<Data>,
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
