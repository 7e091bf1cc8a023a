//! Writes, zeroes and trims.

use std::sync::Arc;

use blockhaul_block::{
    Can, Device as _, Error, Kind, Outcome, Reply, Request, RequestFlags, Result,
};
use blockhaul_io::Data;

use super::CacheHandle;
use super::blocks::CacheBlockState;
use super::hold::CacheHold;
use super::options::CacheMode;

/// How often a write fetches the rest of its blocks: other tasks may make them absent again.
const TRIES: usize = 4;
/// Bytes of zeroes written at a time.
const ZEROES: u64 = Data::ZEROES_MAX as u64;

impl CacheHandle {
    pub(super) async fn write(
        self: &Arc<CacheHandle>,
        at: u64,
        data: Data,
        flags: RequestFlags,
    ) -> Outcome {
        let end = at + data.len() as u64;
        match self.store.mode {
            CacheMode::Writethrough => self.write_through(at, data, flags).await?,
            mode => {
                self.put(at, data).await?;
                if mode == CacheMode::Writeback && flags.contains(RequestFlags::FUA) {
                    self.carry_durably(at, end).await?;
                }
            }
        }
        self.make_room();
        Ok(Reply::Done)
    }

    /// Writes below, then to cached blocks and whole blocks.
    async fn write_through(
        self: &Arc<CacheHandle>,
        at: u64,
        data: Data,
        flags: RequestFlags,
    ) -> Result<()> {
        let store = &self.store;
        let end = at + data.len() as u64;
        let held = store.locks.lock_for(CacheHold::Write, at, end).await;
        let asked = Request::write(at, data.clone()).with(flags);
        let written = self.inner.submit(asked).await.map(drop);
        let stored = match &written {
            Ok(()) => self.copy_through(at, end, &data).await,
            Err(error) => Err(error.clone()),
        };
        drop(held);
        if let Err(error) = stored {
            // The cache may differ from the device below.
            log::debug!("cache: blocks are dropped after a write: {error}");
            let (first, last) = store.touched(at, end);
            let (start, stop) = store.bytes(first, last);
            let _alone = store.locks.lock_for(CacheHold::Alone, start, stop).await;
            store.drop_blocks(first, last).await;
        }
        written
    }

    /// Copies data that was written below to the file; the range is held.
    async fn copy_through(&self, at: u64, end: u64, data: &Data) -> Result<()> {
        let store = &self.store;
        let (first, last) = store.whole(at, end);
        let mut next = at;
        while next < end {
            let (state, to) = store.run(next, end);
            let mut from = next;
            let mut till = to;
            next = to;
            if !state.is_kept() {
                // Whole blocks are cached from now on, parts of others are not.
                let (start, stop) = store.bytes(first, last);
                (from, till) = (from.max(start), till.min(stop));
                let count = till.saturating_sub(from).div_ceil(store.block);
                if count == 0 || store.is_full_for(&store.blocks(), count) {
                    continue;
                }
            }
            store.write(from, data.slice((from - at) as usize, (till - from) as usize)).await?;
            let (from, till) = store.touched(from, till);
            store.blocks().set(from, till, CacheBlockState::Clean);
        }
        Ok(())
    }

    /// Writes to the cache; below, if there is no space.
    async fn put(self: &Arc<CacheHandle>, at: u64, data: Data) -> Result<()> {
        let store = &self.store;
        let end = at + data.len() as u64;
        let (first, last) = store.touched(at, end);
        let (whole, behind) = store.whole(at, end);
        for _ in 0..TRIES {
            let held = store.locks.lock_for(CacheHold::Write, at, end).await;
            let (parts, is_full) = {
                let blocks = store.blocks();
                let lacks = |block: u64| {
                    let is_part = !(whole..behind).contains(&block);
                    (is_part && blocks.get(block) == CacheBlockState::Absent).then_some(block)
                };
                let second = if last - 1 > first { lacks(last - 1) } else { None };
                let absent = blocks.absent(first, last);
                ([lacks(first), second], absent > 0 && store.is_full_for(&blocks, absent))
            };
            if is_full {
                break;
            }
            if parts == [None, None] {
                let written = store.write(at, data).await;
                if written.is_ok() {
                    store.blocks().set(first, last, CacheBlockState::Dirty);
                    return Ok(());
                }
                drop(held);
                self.restore_holes(first, last).await;
                return written;
            }
            drop(held);
            let mut brought = Ok(true);
            for part in parts.into_iter().flatten() {
                let (start, stop) = store.bytes(part, part + 1);
                // Another task may have fetched it.
                brought = brought.and(self.bring(start, stop, None).await);
            }
            // Perhaps only the part that is not written is unreadable.
            if brought.is_err() {
                break;
            }
        }
        self.put_around(at, data).await
    }

    /// Writes the cached part to the cache, and the rest below.
    async fn put_around(self: &Arc<CacheHandle>, at: u64, data: Data) -> Result<()> {
        self.make_room_now();
        let store = &self.store;
        let end = at + data.len() as u64;
        let mut next = at;
        while next < end {
            let (state, to) = store.run(next, end);
            let _held = store.locks.lock_for(CacheHold::Write, next, to).await;
            let (now, till) = store.run(next, to);
            if till != to || (now == CacheBlockState::Absent) != (state == CacheBlockState::Absent)
            {
                continue;
            }
            let part = data.slice((next - at) as usize, (to - next) as usize);
            if state == CacheBlockState::Absent {
                self.inner.submit(Request::write(next, part)).await?;
            } else {
                store.write(next, part).await?;
                let (first, last) = store.touched(next, to);
                store.blocks().set(first, last, CacheBlockState::Dirty);
            }
            next = to;
        }
        Ok(())
    }

    /// After a failed write to the file: makes absent or zero blocks holes again.
    async fn restore_holes(&self, first: u64, last: u64) {
        let store = &self.store;
        let (start, stop) = store.bytes(first, last);
        let _alone = store.locks.lock_for(CacheHold::Alone, start, stop).await;
        let mut next = first;
        while next < last {
            let (state, to) = store.blocks().run(next, last);
            match state {
                CacheBlockState::Absent => store.drop_blocks(next, to).await,
                CacheBlockState::Zero => {
                    let (at, end) = store.bytes(next, to);
                    // If even this fails, the range is zero already: nothing was written there.
                    let _ = store.make_hole(at, end - at).await;
                }
                // Parts of it may have been written.
                CacheBlockState::Clean | CacheBlockState::Dirty => {
                    store.blocks().set(next, to, CacheBlockState::Dirty)
                }
            }
            next = to;
        }
    }

    pub(super) async fn zero(
        self: &Arc<CacheHandle>,
        at: u64,
        len: u64,
        flags: RequestFlags,
    ) -> Outcome {
        let store = &self.store;
        let end = at + len;
        let below = flags.contains(RequestFlags::NO_HOLE) || store.mode == CacheMode::Writethrough;
        // Nothing is written below: the zeroes are data of the cache.
        let stays = flags.contains(RequestFlags::NO_HOLE) && store.mode == CacheMode::Unsafe;
        let (first, last) = store.whole(at, end);
        if flags.contains(RequestFlags::FAST) {
            let can = self.inner.facts().can.contains(Can::FAST_ZERO);
            if first == last || stays || (below && !can) {
                return Err(Error::new(
                    Kind::Unsupported,
                    "zeroing is not faster than writing here",
                ));
            }
        }
        if store.mode == CacheMode::Writethrough {
            let (first, last) = store.touched(at, end);
            let (start, stop) = store.bytes(first, last);
            let _alone = store.locks.lock_for(CacheHold::Alone, start, stop).await;
            let zeroed = self.inner.submit(Request::zero(at, len).with(flags)).await;
            store.drop_blocks(first, last).await;
            return zeroed;
        }
        let (start, stop) =
            if first < last && !stays { store.bytes(first, last) } else { (end, end) };
        // First of all: a refused request (FAST) must not have changed anything.
        if start < stop {
            let _alone = store.locks.lock_for(CacheHold::Alone, start, stop).await;
            if below {
                let flags = flags & (RequestFlags::NO_HOLE | RequestFlags::FAST);
                self.inner.submit(Request::zero(start, stop - start).with(flags)).await?;
                store.drop_blocks(first, last).await;
            } else {
                store.make_hole(start, stop - start).await?;
                store.blocks().set(first, last, CacheBlockState::Zero);
            }
        }
        self.zero_parts(at, start).await?;
        self.zero_parts(stop, end).await?;
        if store.mode == CacheMode::Writeback && flags.contains(RequestFlags::FUA) {
            self.carry_durably(at, end).await?;
        }
        self.make_room();
        Ok(Reply::Done)
    }

    /// Zeroes parts of blocks; those that already read as zeroes do not change.
    async fn zero_parts(self: &Arc<CacheHandle>, at: u64, end: u64) -> Result<()> {
        let mut next = at;
        while next < end {
            let (state, to) = self.store.run(next, end.min(next + ZEROES));
            if state != CacheBlockState::Zero {
                self.put(next, Data::zeroes((to - next) as usize)).await?;
            }
            next = to;
        }
        Ok(())
    }

    /// Drops whole blocks here and trims them below; parts of others do not change.
    pub(super) async fn trim(&self, at: u64, len: u64, flags: RequestFlags) -> Outcome {
        let store = &self.store;
        let (first, last) = store.whole(at, at + len);
        if first == last {
            return Ok(Reply::Done);
        }
        let (start, stop) = store.bytes(first, last);
        let _alone = store.locks.lock_for(CacheHold::Alone, start, stop).await;
        store.drop_blocks(first, last).await;
        let flags = if store.mode == CacheMode::Unsafe { RequestFlags::empty() } else { flags };
        self.inner.submit(Request::trim(start, stop - start).with(flags)).await
    }
}
