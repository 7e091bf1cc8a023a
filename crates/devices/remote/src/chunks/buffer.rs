//! The bytes of a chunk in memory, and the number of chunks that may have bytes there.

use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use tokio::sync::Notify;

use crate::part_buffer::WrittenRanges;

/// The number of chunks in memory.
pub(crate) struct BufferRoom {
    most: usize,
    used: Mutex<usize>,
    /// Somebody may find room now, or a chunk that can leave.
    pub(crate) changed: Notify,
}

impl BufferRoom {
    /// Room for at most this number of chunks.
    pub(crate) fn new(most: usize) -> Arc<BufferRoom> {
        Arc::new(BufferRoom { most, used: Mutex::new(0), changed: Notify::new() })
    }

    /// Room for a chunk, if there is some.
    pub(crate) fn take(self: &Arc<BufferRoom>) -> Option<RoomPermit> {
        let mut used = self.used.lock().unwrap_or_else(PoisonError::into_inner);
        if *used >= self.most {
            return None;
        }
        *used += 1;
        Some(RoomPermit(self.clone()))
    }
}

/// Room for the bytes of a chunk.
pub(crate) struct RoomPermit(Arc<BufferRoom>);

impl Drop for RoomPermit {
    fn drop(&mut self) {
        *self.0.used.lock().unwrap_or_else(PoisonError::into_inner) -= 1;
        self.0.changed.notify_waiters();
    }
}

/// The bytes of a chunk. Bytes that were not written count only once the buffer is filled.
#[derive(Default)]
pub(crate) struct ChunkBuffer(Option<ChunkBytes>);

struct ChunkBytes {
    bytes: Arc<Vec<u8>>,
    written: WrittenRanges,
    _room: RoomPermit,
}

/// Memory that a request shares with its buffer.
struct SharedBytes(Arc<Vec<u8>>);

impl AsRef<[u8]> for SharedBytes {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

impl ChunkBuffer {
    /// Whether there are no bytes.
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_none()
    }

    /// Takes memory for `len` bytes, unless there is some.
    pub(crate) fn begin(&mut self, len: usize, room: RoomPermit) {
        let fresh = || ChunkBytes {
            bytes: Arc::new(vec![0; len]),
            written: WrittenRanges::default(),
            _room: room,
        };
        self.0.get_or_insert_with(fresh);
    }

    /// Writes bytes, or zeroes, into memory that was taken.
    pub(crate) fn put(&mut self, begin: usize, end: usize, bytes: Option<&[u8]>) {
        let Some(held) = &mut self.0 else { return };
        let place = &mut Arc::make_mut(&mut held.bytes)[begin..end];
        match bytes {
            Some(bytes) => place.copy_from_slice(bytes),
            None => place.fill(0),
        }
        held.written.add(begin, end);
    }

    /// Whether all bytes of a range are there.
    pub(crate) fn has(&self, begin: usize, end: usize) -> bool {
        self.0.as_ref().is_some_and(|held| held.written.contains(begin, end))
    }

    /// Copies a range that is [there](ChunkBuffer::has).
    pub(crate) fn copy(&self, begin: usize, buf: &mut [u8]) {
        if let Some(held) = &self.0 {
            buf.copy_from_slice(&held.bytes[begin..begin + buf.len()]);
        }
    }

    /// Takes the rest of the bytes from `base`, the whole chunk as it was before.
    pub(crate) fn fill(&mut self, mut base: Vec<u8>) {
        let Some(held) = &mut self.0 else { return };
        for (begin, end) in held.written.iter() {
            base[begin..end].copy_from_slice(&held.bytes[begin..end]);
        }
        held.written.add(0, base.len());
        held.bytes = Arc::new(base);
    }

    /// All bytes, without a copy.
    pub(crate) fn bytes(&self) -> Bytes {
        let shared = |held: &ChunkBytes| Bytes::from_owner(SharedBytes(held.bytes.clone()));
        self.0.as_ref().map(shared).unwrap_or_default()
    }

    /// Gives the memory back.
    pub(crate) fn clear(&mut self) {
        self.0 = None;
    }
}
