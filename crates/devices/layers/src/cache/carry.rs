//! Writes back to the device below, and evicts blocks.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use blockhaul_block::{Can, Device as _, Outcome, Reply, Request, Result};
use blockhaul_io::{Data, Task};

use super::CacheHandle;
use super::blocks::CacheBlockState;
use super::hold::CacheHold;

/// Maximum number of runs of blocks being written back at a time, equal to the number of pieces of
/// scratch memory.
const DEPTH: usize = 8;
/// Maximum bytes per zero request to the device below.
const ZERO_MAX: u64 = 1 << 30;

impl CacheHandle {
    /// Writes everything back, in order of offset, and flushes the device below.
    pub(super) async fn flush(self: &Arc<CacheHandle>) -> Outcome {
        let store = &self.store;
        let mut flights = CarryTasks::default();
        let mut next = 0;
        while flights.is_well() {
            let Some((first, last, state)) = store.blocks().next_behind(next, u64::MAX) else {
                break;
            };
            next = last.min(first.saturating_add(self.unit(state)));
            flights.launch(self.clone().carry(first, next)).await;
        }
        flights.land().await?;
        self.flush_below().await
    }

    /// Makes a range durable.
    pub(super) async fn carry_durably(self: &Arc<CacheHandle>, at: u64, end: u64) -> Result<()> {
        let (first, last) = self.store.touched(at, end);
        self.clone().carry(first, last).await?;
        // Another task may have written back a part of it, without a flush.
        self.flush_below().await.map(drop)
    }

    async fn flush_below(&self) -> Outcome {
        if self.inner.facts().can.contains(Can::FLUSH) {
            self.inner.submit(Request::flush()).await
        } else {
            Ok(Reply::Done)
        }
    }

    /// Maximum blocks written back in one piece.
    fn unit(&self, state: CacheBlockState) -> u64 {
        let bytes = match state {
            // One request of any length: the device below works on ranges.
            CacheBlockState::Zero if !self.inner.facts().emulated.contains(Can::ZERO) => u64::MAX,
            CacheBlockState::Zero => ZERO_MAX,
            _ => self.scratch.piece(),
        };
        (bytes / self.store.block).max(1)
    }

    /// Writes back a range of blocks; afterwards the device below lacks only what was written
    /// since.
    async fn carry(self: Arc<CacheHandle>, first: u64, last: u64) -> Result<()> {
        let store = &self.store;
        let mut next = first;
        loop {
            let found = store.blocks().next_behind(next, last);
            let Some((from, to, state)) = found else { return Ok(()) };
            let (at, end) = store.bytes(from, to);
            // Blocks that become absent must have no other holder.
            let hold =
                if state == CacheBlockState::Zero { CacheHold::Alone } else { CacheHold::Carry };
            let _held = store.locks.lock_for(hold, at, end).await;
            {
                let mut blocks = store.blocks();
                if blocks.run(from, to) != (state, to) {
                    continue;
                }
                blocks.begin_carry(from, to);
            }
            if state == CacheBlockState::Zero {
                self.inner.submit(Request::zero(at, end - at)).await?;
            } else {
                self.carry_bytes(at, end).await?;
            }
            store.blocks().end_carry(from, to);
            next = to;
        }
    }

    async fn carry_bytes(&self, at: u64, end: u64) -> Result<()> {
        let mut next = at;
        while next < end {
            let len = self.scratch.piece().min(end - next);
            let room = self.scratch.room(len).await?;
            let data = Data::from(self.store.read(next, room.into_buf()).await?);
            self.inner.submit(Request::write(next, data)).await?;
            next += len;
        }
        Ok(())
    }

    /// Evicts blocks if the cache exceeds its limit.
    pub(super) fn make_room(self: &Arc<CacheHandle>) {
        if let Some(bound) = &self.store.bound {
            self.make_room_above(bound.high);
        }
    }

    /// Evicts blocks because there is no space for the current request.
    pub(super) fn make_room_now(self: &Arc<CacheHandle>) {
        if let Some(bound) = &self.store.bound {
            self.make_room_above(bound.low);
        }
    }

    fn make_room_above(self: &Arc<CacheHandle>, limit: u64) {
        let store = &self.store;
        if store.blocks().kept() <= limit || store.making_room.swap(true, Ordering::AcqRel) {
            return;
        }
        let handle = self.clone();
        let spawned = self.worker.spawn_last(move || async move {
            handle.drop_oldest().await;
            handle.store.making_room.store(false, Ordering::Release);
        });
        if !spawned {
            store.making_room.store(false, Ordering::Release);
        }
    }

    async fn drop_oldest(self: &Arc<CacheHandle>) {
        let store = &self.store;
        let Some(bound) = &store.bound else { return };
        loop {
            let (kept, oldest) = {
                let blocks = store.blocks();
                let surplus = blocks.kept().saturating_sub(bound.low);
                (blocks.kept(), blocks.oldest(surplus))
            };
            let mut flights = CarryTasks::default();
            let unit = self.unit(CacheBlockState::Dirty);
            for (first, last) in oldest {
                let mut next = first;
                while next < last && flights.is_well() {
                    let to = last.min(next + unit);
                    flights.launch(self.clone().evict(next, to)).await;
                    next = to;
                }
            }
            if let Err(error) = flights.land().await {
                log::warn!("cache: cannot evict blocks: {error}");
                return;
            }
            let now = store.blocks().kept();
            // Blocks in use stay; their users call this again.
            if now <= bound.low || now >= kept {
                return;
            }
        }
    }

    /// Drops blocks, once they are written back; those that are in use stay.
    async fn evict(self: Arc<CacheHandle>, first: u64, last: u64) -> Result<()> {
        self.clone().carry(first, last).await?;
        let store = &self.store;
        let mut next = first;
        while next < last {
            let (at, end) = store.bytes(next, next + 1);
            let alone = store.locks.try_lock_for(CacheHold::Alone, at, end);
            if alone.is_some() && store.blocks().get(next) == CacheBlockState::Clean {
                store.drop_blocks(next, next + 1).await;
            }
            next += 1;
        }
        Ok(())
    }
}

/// Work in several pieces, in order, some of them at a time; after a failure no more are started.
#[derive(Default)]
struct CarryTasks {
    out: VecDeque<Task<Result<()>>>,
    failed: Option<blockhaul_block::Error>,
}

impl CarryTasks {
    fn is_well(&self) -> bool {
        self.failed.is_none()
    }

    async fn launch(&mut self, work: impl Future<Output = Result<()>> + 'static) {
        if self.out.len() >= DEPTH {
            self.await_first().await;
        }
        self.out.push_back(blockhaul_io::start(work));
    }

    async fn await_first(&mut self) {
        if let Some(first) = self.out.pop_front()
            && let Err(error) = first.await
        {
            self.failed.get_or_insert(error);
        }
    }

    async fn land(mut self) -> Result<()> {
        while !self.out.is_empty() {
            self.await_first().await;
        }
        self.failed.map_or(Ok(()), Err)
    }
}
