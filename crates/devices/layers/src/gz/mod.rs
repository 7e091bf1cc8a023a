//! `gz`: random access to the contents of a gzip file.
//!
//! - `inflate`: the decoder. Copies of it, made while the file is read once, are the index.

mod inflate;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use blockhaul_block::{Device, Error, Kind, Reply, Request, Result};
use blockhaul_catalog::{Layer, LayerBase, LayerKind, OpenFuture, ParamKind, ParamValues};
use blockhaul_io::{Data, Reservation};

use crate::declared::{param_or, usage};
use crate::packed::{PackedContent, PackedFile, PackedIndex, PackedPart, UnpackedDevice};
use crate::per_disk::PerDisk;
use crate::scratch::ScratchMemory;
pub use inflate::Inflater;

/// The layer `gz`.
pub static GZ: LayerKind = LayerKind {
    name: "gz",
    summary: "decompresses a gzip file, with random access",
    manual: "The device below is a gzip file of one or more members, and may be followed by zeroes; its content is served read-only. The \
file is read once when it is first opened: this determines the length of the content, checks \
it, and makes an index of places from which decompression can start, without a copy of the \
content. Sequential reads continue where the last one ended; others start at the previous \
place in the index.

Half of `gz-memory` is for the index, half for content that was decompressed last; the larger \
the content, the greater the distance between places (16 MiB hold 180 of them). All \
connections share both. One thread at a time decompresses: `xz` files of many blocks are \
faster.",
    example: r#"
blockhaul copy sample:16M - | gzip -1 > disk.raw.gz
blockhaul copy --verify --source-layer gz disk.raw.gz disk.raw
"#,
    needs_content: true,
    writes_below: false,
    transparent: false,
    params: &[param_or("gz-memory", ParamKind::Size, "16M", "Memory for index and content; at least 1M.")],
    changeable: &[],
    configure: |args| configure(args),
};

/// Length of a part of the contents in bytes.
const PART: u64 = 128 << 10;
/// Minimum distance of two index entries.
const APART: u64 = 1 << 20;
/// Bytes decoded at a time.
const STEP: u64 = 1 << 20;

fn configure(args: &ParamValues) -> Result<Arc<dyn Layer>> {
    let memory = args.size("gz-memory").unwrap_or(16 << 20);
    if memory < 1 << 20 {
        return Err(usage("gz: gz-memory must be at least 1M"));
    }
    Ok(Arc::new(Gz { memory, files: PerDisk::default() }))
}

struct Gz {
    memory: u64,
    files: PerDisk<PackedContent<GzIndex>>,
}

impl Layer for Gz {
    fn wrap(&self, _inner: Arc<dyn Device>) -> Result<Arc<dyn Device>> {
        Err(Error::new(Kind::Unsupported, "gz: the file must be opened with the layer"))
    }

    fn reads_image(&self) -> bool {
        true
    }

    fn open(self: Arc<Self>, below: LayerBase) -> OpenFuture<Arc<dyn Device>> {
        Box::pin(async move {
            let facts = below.device.facts();
            let inner = below.device.clone();
            let reader = PackedReader {
                packed: facts.size,
                scratch: ScratchMemory::for_device(&inner),
                inner,
            };
            let index = async {
                let index = GzIndex::make(&reader, self.memory / 2).await;
                index.map_err(|error| {
                    error.reworded(format!("gz: {}: {}", facts.name, error.text()))
                })
            };
            let most = usize::try_from(self.memory / 2 / PART).unwrap_or(usize::MAX);
            let content = PackedContent::open(&self.files, &below, most, index).await?;
            Ok(UnpackedDevice::over(&facts, GzHandle { content, reader }))
        })
    }
}

/// The places from which decoding can continue.
struct GzIndex {
    /// In order; the first is the start.
    places: Vec<Inflater>,
    /// Length of the contents in bytes.
    size: u64,
    /// The decoder as the last read left it.
    last: Mutex<Option<Cursor>>,
}

impl PackedIndex for GzIndex {
    const FILE: &'static str = "a gzip file";

    fn size(&self) -> u64 {
        self.size
    }

    fn part_at(&self, at: u64) -> Option<PackedPart> {
        let number = at / PART;
        let start = number * PART;
        (at < self.size).then(|| PackedPart { number, start, len: PART.min(self.size - start) })
    }
}

impl GzIndex {
    /// Reads the whole file.
    async fn make(reader: &PackedReader, memory: u64) -> Result<GzIndex> {
        let most = usize::try_from(memory / Inflater::COST).unwrap_or(usize::MAX).max(2);
        let mut places = vec![Inflater::new()];
        let mut apart = APART;
        let mut cursor = Cursor::at(&places[0]);
        loop {
            let last = places.last().map_or(0, |place| place.made);
            cursor = reader.step(cursor, last + apart).await?;
            cursor.content.clear();
            cursor.start = cursor.inflater.made;
            if cursor.inflater.taken == reader.packed {
                break;
            }
            if cursor.inflater.made >= last + apart {
                if places.len() >= most {
                    // Keep only every other one from now on.
                    let mut index = 0;
                    places.retain(|_| {
                        index += 1;
                        index % 2 == 1
                    });
                    apart *= 2;
                } else {
                    places.push(cursor.inflater.clone());
                }
            }
        }
        cursor.inflater.finish().map_err(damaged)?;
        Ok(GzIndex { places, size: cursor.inflater.made, last: Mutex::default() })
    }

    /// The last place not after an offset of the contents.
    fn before(&self, at: u64) -> &Inflater {
        let behind = self.places.partition_point(|place| place.made <= at);
        // The first one is at the start.
        &self.places[behind.saturating_sub(1)]
    }

    fn last(&self) -> MutexGuard<'_, Option<Cursor>> {
        self.last.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn damaged(why: String) -> Error {
    Error::new(Kind::Invalid, why)
}

/// A decoder with its buffers.
struct Cursor {
    inflater: Inflater,
    /// A piece of the file, and its offset.
    input: Option<(u64, Data)>,
    /// Decoded bytes that were not passed on yet, and their offset.
    content: Vec<u8>,
    start: u64,
}

impl Cursor {
    fn at(place: &Inflater) -> Cursor {
        let start = place.made;
        Cursor { inflater: place.clone(), input: None, content: Vec::new(), start }
    }
}

/// Reads the file for a decoder.
struct PackedReader {
    inner: Arc<dyn Device>,
    packed: u64,
    scratch: ScratchMemory,
}

impl PackedReader {
    /// Continues decoding up to `until` or the end of a piece of the file; at most some KiB
    /// further.
    async fn step(&self, cursor: Cursor, until: u64) -> Result<Cursor> {
        let mut cursor = cursor;
        let taken = cursor.inflater.taken;
        let (at, data) = match cursor.input.take() {
            Some((at, data)) if taken < at + data.len() as u64 => (at, data),
            // Release the old piece's memory first.
            _ => (taken, self.piece(taken).await?),
        };
        let work = move || {
            let done = {
                let input = &data.bytes()[(taken - at) as usize..];
                cursor.inflater.step(input, until, &mut cursor.content)
            };
            done.map(|()| {
                cursor.input = Some((at, data));
                cursor
            })
        };
        let done = blockhaul_io::offload(work).await;
        done.map_err(|lost| Error::new(Kind::Io, "cannot decode").because(lost))?.map_err(damaged)
    }

    /// A piece of the file, in separate memory, as the decoder keeps it.
    async fn piece(&self, at: u64) -> Result<Data> {
        let len = self.scratch.piece().min(self.packed.saturating_sub(at));
        if len == 0 {
            return Ok(Data::zeroes(0));
        }
        let room = Reservation::unpooled(len as usize);
        match self.inner.submit(Request::read(at, room)).await? {
            Reply::Data(data) => Ok(data),
            Reply::Hole => Ok(Reservation::unpooled(len as usize).into_buf().into()),
            _ => Err(Error::misfit()),
        }
    }
}

/// A handle.
struct GzHandle {
    content: Arc<PackedContent<GzIndex>>,
    reader: PackedReader,
}

impl PackedFile for GzHandle {
    type Index = GzIndex;

    fn content(&self) -> &PackedContent<GzIndex> {
        &self.content
    }

    /// One for all: it continues where the last read ended.
    fn decoder(&self, _part: PackedPart) -> u64 {
        0
    }

    async fn decode(&self, part: PackedPart) -> Result<Data> {
        let content = &self.content;
        let place = content.index.before(part.start);
        let last = content.index.last().take();
        let on = last.filter(|last| last.start <= part.start && last.inflater.made >= place.made);
        let mut cursor = on.unwrap_or_else(|| Cursor::at(place));
        // Parts decoded on the way are cached, too, as far as there is space.
        let keep_from = part.number.saturating_sub(content.kept.most() as u64 / 2);
        loop {
            if let Some(data) = self.hand_on(&mut cursor, part.number, keep_from) {
                *content.index.last() = Some(cursor);
                return Ok(data);
            }
            if cursor.inflater.taken == self.reader.packed {
                return Err(Error::new(Kind::Io, "the gzip file has changed since it was opened"));
            }
            let until = (part.start + part.len).min(cursor.inflater.made + STEP);
            cursor = self.reader.step(cursor, until).await?;
        }
    }
}

impl GzHandle {
    /// Caches the parts that a decoder has available; returns the requested one.
    fn hand_on(&self, cursor: &mut Cursor, wanted: u64, keep_from: u64) -> Option<Data> {
        let content = &self.content;
        let mut used = 0;
        let mut found = None;
        while found.is_none() {
            let at = cursor.start + used as u64;
            let left = cursor.content.len() - used;
            let Some(part) = content.index.part_at(at) else { break };
            if part.start < at || part.number < keep_from {
                // Incomplete, or not worth its memory.
                let skipped = ((part.start + part.len - at) as usize).min(left);
                used += skipped;
                if skipped == 0 || skipped == left {
                    break;
                }
                continue;
            }
            if (left as u64) < part.len {
                break;
            }
            let mut buf = Reservation::unpooled(part.len as usize).into_buf();
            buf.copy_from_slice(&cursor.content[used..used + part.len as usize]);
            used += part.len as usize;
            let data = Data::from(buf);
            content.kept.keep(part.number, data.clone());
            if part.number == wanted {
                found = Some(data);
            }
        }
        cursor.content.drain(..used);
        cursor.start += used as u64;
        found
    }
}
