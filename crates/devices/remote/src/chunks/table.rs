//! The versions of the chunks of an open disk, and the chunks that are in memory.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use blockhaul_block::{Error, Extents, HOLE, Result, ZERO};
use tokio::sync::RwLock;

use crate::chunks::buffer::ChunkBuffer;
use crate::chunks::layout::{ChunkVersion, PAGE, chunk_name};

/// A buffer with its lock: it is held for reading while the chunk is read or sent, else for writing.
pub(crate) type SharedBuffer = Arc<RwLock<ChunkBuffer>>;

/// The chunks of an open disk.
pub(crate) struct ChunkTable {
    writer: u64,
    versions: Vec<ChunkVersion>,
    slots: HashMap<u64, ChunkSlot>,
    /// Chunks whose bytes in memory are newer than their objects.
    dirty: BTreeSet<u64>,
    changed_pages: BTreeSet<u64>,
    /// The number of the latest object of this writer, and of the latest one that an index may name.
    sequence: u64,
    indexed: u64,
    /// Objects that the durable index names, and this table does not.
    superseded: Vec<String>,
    /// Counts uses of buffers.
    clock: u64,
    /// Whether objects may be left that no index names.
    pub(crate) is_littered: bool,
    /// Why the disk cannot be used any more.
    pub(crate) failed: Option<Error>,
}

struct ChunkSlot {
    buffer: SharedBuffer,
    used: u64,
    /// Whether it has bytes, and nobody evicts it yet.
    is_candidate: bool,
}

/// The changes of an index since the last one.
pub(crate) struct IndexChange {
    /// Pages that differ; empty ones have no entries but holes.
    pub(crate) pages: Vec<(u64, Vec<ChunkVersion>)>,
    /// Objects that the new index does not name.
    pub(crate) superseded: Vec<String>,
}

impl ChunkTable {
    /// Chunks with these versions, for the writer of this number.
    pub(crate) fn new(writer: u64, versions: Vec<ChunkVersion>) -> ChunkTable {
        ChunkTable {
            writer,
            versions,
            slots: HashMap::new(),
            dirty: BTreeSet::new(),
            changed_pages: BTreeSet::new(),
            sequence: 0,
            indexed: 0,
            superseded: Vec::new(),
            clock: 0,
            is_littered: false,
            failed: None,
        }
    }

    /// The version of a chunk.
    pub(crate) fn version(&self, chunk: u64) -> ChunkVersion {
        self.versions.get(at(chunk)).copied().unwrap_or_default()
    }

    /// The buffer of a chunk, if it has one.
    pub(crate) fn buffer(&mut self, chunk: u64) -> Option<SharedBuffer> {
        self.clock += 1;
        let slot = self.slots.get_mut(&chunk)?;
        slot.used = self.clock;
        Some(slot.buffer.clone())
    }

    /// The buffer of a chunk, which is made if there is none.
    pub(crate) fn buffer_or_new(&mut self, chunk: u64) -> SharedBuffer {
        self.clock += 1;
        let fresh = || ChunkSlot { buffer: SharedBuffer::default(), used: 0, is_candidate: false };
        let slot = self.slots.entry(chunk).or_insert_with(fresh);
        slot.used = self.clock;
        slot.buffer.clone()
    }

    /// Whether the buffer of a chunk may be evicted from now on.
    pub(crate) fn set_candidate(&mut self, chunk: u64, is_candidate: bool) {
        if let Some(slot) = self.slots.get_mut(&chunk) {
            slot.is_candidate = is_candidate;
        }
    }

    /// The buffer that was not used for the longest time. Nobody else evicts it.
    pub(crate) fn victim(&mut self) -> Option<(u64, SharedBuffer)> {
        let candidates = self.slots.iter_mut().filter(|(_, slot)| slot.is_candidate);
        let (chunk, slot) = candidates.min_by_key(|(_, slot)| slot.used)?;
        slot.is_candidate = false;
        Some((*chunk, slot.buffer.clone()))
    }

    /// Forgets an empty buffer that nobody but the caller uses.
    pub(crate) fn tidy(&mut self, chunk: u64, buffer: SharedBuffer) {
        drop(buffer);
        let is_unused = |slot: &ChunkSlot| {
            Arc::strong_count(&slot.buffer) == 1
                && slot.buffer.try_read().is_ok_and(|buffer| buffer.is_empty())
        };
        if self.slots.get(&chunk).is_some_and(is_unused) {
            self.slots.remove(&chunk);
        }
    }

    /// Whether the bytes of a chunk in memory are newer than its object.
    pub(crate) fn is_dirty(&self, chunk: u64) -> bool {
        self.dirty.contains(&chunk)
    }

    /// Notes that the bytes in memory are newer.
    pub(crate) fn set_dirty(&mut self, chunk: u64) {
        self.dirty.insert(chunk);
    }

    /// The chunks whose bytes in memory are newer, with their buffers.
    pub(crate) fn dirty_buffers(&self) -> Vec<(u64, SharedBuffer)> {
        let buffer = |chunk: &u64| Some((*chunk, self.slots.get(chunk)?.buffer.clone()));
        self.dirty.iter().filter_map(buffer).collect()
    }

    /// The version of an object that is about to be written.
    ///
    /// # Errors
    /// Those of [`ChunkVersion::of`].
    pub(crate) fn next_version(&mut self) -> Result<ChunkVersion> {
        let version = ChunkVersion::of(self.writer, self.sequence + 1)?;
        self.sequence += 1;
        Ok(version)
    }

    /// Changes the version of a chunk, whose bytes in memory are as old as that. Returns an object that no index names.
    pub(crate) fn set_version(&mut self, chunk: u64, version: ChunkVersion) -> Option<String> {
        self.dirty.remove(&chunk);
        let earlier = std::mem::replace(&mut self.versions[at(chunk)], version);
        if earlier == version {
            return None;
        }
        self.changed_pages.insert(chunk / PAGE);
        if earlier == ChunkVersion::HOLE {
            return None;
        }
        let name = chunk_name(chunk, earlier);
        if earlier.writer() == self.writer && earlier.sequence() > self.indexed {
            return Some(name);
        }
        self.superseded.push(name);
        None
    }

    /// The changes for the next index, which names the versions of this moment.
    pub(crate) fn index_change(&mut self) -> IndexChange {
        self.indexed = self.sequence;
        let entries = |page: &u64| {
            let begin = at(page * PAGE);
            let end = (begin + at(PAGE)).min(self.versions.len());
            (*page, self.versions[begin..end].to_vec())
        };
        let pages = self.changed_pages.iter().map(entries).collect();
        self.changed_pages.clear();
        IndexChange { pages, superseded: std::mem::take(&mut self.superseded) }
    }

    /// The states of a range, for chunks of `chunk` bytes.
    pub(crate) fn extents(&self, begin: u64, end: u64, chunk: u64) -> Extents {
        let mut extents = Extents::new();
        let mut next = begin;
        while next < end {
            let number = next / chunk;
            let until = ((number + 1) * chunk).min(end);
            let is_hole =
                self.version(number) == ChunkVersion::HOLE && !self.dirty.contains(&number);
            extents.push(until - next, if is_hole { HOLE | ZERO } else { 0 });
            next = until;
        }
        extents
    }
}

/// The place of a chunk: there are at most 2^24.
fn at(chunk: u64) -> usize {
    usize::try_from(chunk).unwrap_or(usize::MAX)
}
