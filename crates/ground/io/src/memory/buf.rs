//! [`Buf`]: memory with one owner, aligned.
#![expect(unsafe_code, reason = "memory of a block, handed out as byte slices")]

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::AtomicBool;

use super::alignment::ALIGN;
use super::block::AlignedBlock;
use super::charge::BufferCharge;
use super::route_counters::RouteCounters;

/// Unique, aligned, owned bytes from a [`Pool`](crate::Pool), returned to it on drop.
pub struct Buf {
    /// `None` only while the buffer is being dropped.
    block: Option<AlignedBlock>,
    len: usize,
    charge: BufferCharge,
    /// A peer may still be reading the pages.
    pub(super) retired: AtomicBool,
}

impl Buf {
    pub(crate) fn new(block: AlignedBlock, len: usize, charge: BufferCharge) -> Buf {
        assert!(len <= block.size());
        Buf { block: Some(block), len, charge, retired: AtomicBool::new(false) }
    }

    /// A zero-filled buffer outside any pool: for tests and for small fixed needs.
    pub fn unpooled(len: usize) -> Buf {
        let size = len.max(1).next_multiple_of(ALIGN);
        Buf::new(AlignedBlock::new(size), len, BufferCharge::none())
    }

    /// Shortens the buffer to `len` bytes; no change if it is not longer.
    pub fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
    }

    /// The counters that the memory was reserved with.
    pub fn counters(&self) -> Option<&RouteCounters> {
        self.charge.counters()
    }

    pub(crate) fn block(&self) -> &AlignedBlock {
        self.block.as_ref().expect("present until drop")
    }
}

impl Deref for Buf {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: the block is initialised, at least `len` long, and borrowed with `self`.
        unsafe { std::slice::from_raw_parts(self.block().start(), self.len) }
    }
}

impl DerefMut for Buf {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`, and `&mut self` makes the access unique.
        unsafe { std::slice::from_raw_parts_mut(self.block().start(), self.len) }
    }
}

impl Drop for Buf {
    fn drop(&mut self) {
        if let Some(mut block) = self.block.take() {
            if *self.retired.get_mut() && !block.exchange_pages() {
                // Never used again; its replacement keeps the pool's size.
                let size = block.size();
                std::mem::forget(std::mem::replace(&mut block, AlignedBlock::new(size)));
            }
            self.charge.give_back(block);
        }
    }
}

impl fmt::Debug for Buf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Buf({} bytes)", self.len)
    }
}
