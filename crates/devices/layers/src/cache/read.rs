//! Reads, hints and extents.

use std::sync::Arc;

use blockhaul_block::{
    Device as _, Error, Extents, HOLE, Kind, Outcome, PendingRequest, Reply, Request, RequestFlags,
    Result, ZERO,
};
use blockhaul_io::{Buf, Data, Reservation, Task};

use super::blocks::CacheBlockState;
use super::hold::CacheHold;
use super::store::{CacheStore, RangeState};
use super::{CacheHandle, is_full};

/// Bytes fetched at a time for a hint.
const HINT: u64 = 4 << 20;
/// Maximum bytes fetched for one hint.
const HINT_MAX: u64 = 4 << 30;
/// Maximum number of extents requests to the device below for one reply.
const ASKED_MAX: usize = 64;

impl CacheHandle {
    pub(super) fn submit_read(
        self: &Arc<CacheHandle>,
        at: u64,
        room: Reservation,
    ) -> PendingRequest {
        let end = at + room.len() as u64;
        match self.store.view(at, end) {
            RangeState::Kept(vanished) => {
                let mut buf = room.into_buf();
                let read = self.store.read_now(at, &mut buf);
                if read == buf.len() && self.store.vanished() == vanished {
                    return PendingRequest::ready(Ok(Reply::Data(buf.into())));
                }
                let handle = self.clone();
                PendingRequest::start(async move { handle.read(at, buf).await })
            }
            RangeState::Zero => PendingRequest::ready(Ok(Reply::Hole)),
            RangeState::Absent if !self.store.on_read.now() => {
                self.inner.submit(Request::read(at, room))
            }
            _ => {
                let handle = self.clone();
                PendingRequest::start(async move { handle.read(at, room.into_buf()).await })
            }
        }
    }

    async fn read(self: &Arc<CacheHandle>, at: u64, buf: Buf) -> Outcome {
        let store = &self.store;
        let end = at + buf.len() as u64;
        let mut buf = buf;
        let mut next = at;
        while next < end {
            let (state, to) = store.run(next, end);
            let part = (next - at) as usize..(to - at) as usize;
            match state {
                CacheBlockState::Zero => buf[part].fill(0),
                CacheBlockState::Clean | CacheBlockState::Dirty => {
                    let _stays = store.locks.lock_for(CacheHold::Stay, next, to).await;
                    if !store.keeps(next, to) {
                        continue;
                    }
                    if part == (0..buf.len()) {
                        return Ok(Reply::Data(store.read(at, buf).await?.into()));
                    }
                    let mut from = next;
                    for piece in buf[part].chunks_mut(self.scratch.piece() as usize) {
                        let room = self.scratch.room(piece.len() as u64).await?;
                        piece.copy_from_slice(&store.read(from, room.into_buf()).await?);
                        from += piece.len() as u64;
                    }
                }
                CacheBlockState::Absent if !store.on_read.now() => {
                    self.scratch.fill(&self.inner, next, &mut buf[part]).await?;
                }
                CacheBlockState::Absent => {
                    let out = &mut buf[part.clone()];
                    match self.bring(next, to, Some(out)).await {
                        Ok(true) => {}
                        Ok(false) => continue,
                        // Another part of the blocks may be unreadable.
                        Err(_) => {
                            self.scratch.fill(&self.inner, next, &mut buf[part]).await?;
                        }
                    }
                }
            }
            next = to;
        }
        Ok(Reply::Data(buf.into()))
    }

    /// Fetches the absent blocks of a range into the cache, and its bytes into `out`. False: they
    /// are not absent any more, and `out` is unchanged. If there is no space, only the bytes are
    /// fetched.
    pub(super) async fn bring(
        self: &Arc<CacheHandle>,
        at: u64,
        end: u64,
        out: Option<&mut [u8]>,
    ) -> Result<bool> {
        let store = &self.store;
        let (first, last) = store.touched(at, end);
        let (start, stop) = store.bytes(first, last);
        let alone = store.locks.lock_for(CacheHold::Alone, start, stop).await;
        let is_full = {
            let blocks = store.blocks();
            if blocks.run(first, last) != (CacheBlockState::Absent, last) {
                return Ok(false);
            }
            store.is_full_for(&blocks, last - first)
        };
        if is_full {
            drop(alone);
            self.make_room_now();
            if let Some(out) = out {
                self.scratch.fill(&self.inner, at, out).await?;
            }
            return Ok(true);
        }
        let brought = self.fetch(at, start, stop, out).await;
        match brought {
            Ok(true) => store.blocks().set(first, last, CacheBlockState::Clean),
            // Whatever is in the file must not stay there.
            _ => store.drop_blocks(first, last).await,
        }
        drop(alone);
        self.make_room();
        brought.map(|_| true)
    }

    /// Reads whole blocks into the file, and the requested bytes, from `at` on, into `out`; several
    /// pieces at once. False: the file system is full.
    async fn fetch(
        self: &Arc<CacheHandle>,
        at: u64,
        start: u64,
        stop: u64,
        out: Option<&mut [u8]>,
    ) -> Result<bool> {
        let mut out = out;
        let piece = self.scratch.piece();
        let starts = (start..stop).step_by(piece as usize);
        let pieces: Vec<(u64, Task<Result<Option<Data>>>)> = starts
            .map(|from| {
                let handle = self.clone();
                let len = piece.min(stop - from);
                let read = async move { handle.scratch.read(&handle.inner, from, len).await };
                (from, blockhaul_io::start(read))
            })
            .collect();
        let mut is_stored = true;
        let mut failed = None;
        for (from, task) in pieces {
            match task.await {
                Ok(data) if failed.is_none() => {
                    if let Some(out) = out.as_deref_mut() {
                        copy_part(at, out, from, piece.min(stop - from), data.as_ref());
                    }
                    // Holes are already holes in the file.
                    let Some(data) = data.filter(|_| is_stored) else { continue };
                    match self.store.write(from, data).await {
                        Ok(()) => {}
                        Err(error) if is_full(&error) => is_stored = false,
                        Err(error) => failed = Some(error),
                    }
                }
                Ok(_) => {}
                Err(error) => failed = failed.or(Some(error)),
            }
        }
        match failed {
            None => Ok(is_stored),
            Some(error) => Err(error),
        }
    }

    /// Fetches what is absent.
    pub(super) async fn cache(self: &Arc<CacheHandle>, at: u64, len: u64) -> Outcome {
        // A hint need not be carried out completely.
        let end = at + len.min(HINT_MAX);
        let mut next = at;
        while next < end {
            let (state, to) = self.store.run(next, end);
            let to = if state == CacheBlockState::Absent { to.min(next + HINT) } else { to };
            if state == CacheBlockState::Absent {
                let (first, last) = self.store.touched(next, to);
                if self.store.is_full_for(&self.store.blocks(), last - first) {
                    self.make_room_now();
                    break;
                }
                // Another task may have fetched it, or filled the cache.
                let _ = self.bring(next, to, None).await?;
                // The device below may complete at once.
                blockhaul_io::yield_now().await;
            }
            next = to;
        }
        Ok(Reply::Done)
    }

    pub(super) async fn extents(&self, at: u64, end: u64, one: bool) -> Result<Extents> {
        let mut extents = Extents::new();
        let mut next = at;
        for _ in 0..if one { 1 } else { ASKED_MAX } {
            if next >= end {
                break;
            }
            let (state, to) = self.store.run(next, end);
            match (state, self.base) {
                (CacheBlockState::Zero, _) => extents.push(to - next, HOLE | ZERO),
                (CacheBlockState::Dirty, _) | (_, None) => extents.push(to - next, 0),
                // Clean data is the same as below.
                (CacheBlockState::Clean | CacheBlockState::Absent, Some(base)) => {
                    let asked = Request::extents(next, to - next, base);
                    let asked = if one { asked.with(RequestFlags::ONE_EXTENT) } else { asked };
                    let Reply::Extents(lists) = self.inner.submit(asked).await? else {
                        return Err(Error::misfit());
                    };
                    let list = lists.first().ok_or_else(Error::misfit)?;
                    list.runs().iter().for_each(|run| extents.push(run.len, run.state));
                    if list.total() < to - next {
                        break;
                    }
                }
            }
            next = to;
        }
        if extents.is_empty() {
            return Err(Error::new(Kind::Io, "the device returned no extents"));
        }
        if one {
            extents.first_only();
        }
        Ok(extents)
    }
}

impl CacheStore {
    /// Whether all of a range is in the file; marks it as used now.
    fn keeps(&self, at: u64, end: u64) -> bool {
        matches!(self.view(at, end), RangeState::Kept(_))
    }
}

/// Copies the overlap of `data` (`len` bytes from `from` on) with the range that begins at `at`; no
/// data: zeroes.
fn copy_part(at: u64, out: &mut [u8], from: u64, len: u64, data: Option<&Data>) {
    let start = at.max(from);
    let stop = (at + out.len() as u64).min(from + len);
    if start >= stop {
        return;
    }
    let part = &mut out[(start - at) as usize..(stop - at) as usize];
    match data {
        Some(data) => {
            part.copy_from_slice(&data.bytes()[(start - from) as usize..(stop - from) as usize]);
        }
        None => part.fill(0),
    }
}
