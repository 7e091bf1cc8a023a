//! Requests of any offset and length on devices with a minimum block above one byte: partial blocks
//! are read, changed and written back.
//!
//! While a partial block is rewritten, no other change may reach the rest of that block. Range
//! locks ensure that, but only then: changes of whole blocks, nearly all of the client's writes,
//! take no lock.
#![expect(
    clippy::cast_possible_truncation,
    reason = "lengths of payloads and of blocks have 32 bits, and parts of them are shorter"
)]

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use blockhaul_io::{Buf, Data, Notify, Pool, RangeLocks, Reservation};

use crate::{
    BlockSizes, Device, Error, Facts, FileRange, Hints, Kind, LeaseAccess, Op, PendingRequest,
    Reply, Request, RequestFlags, Result,
};

/// Requests with partial blocks that may hold scratch memory at a time. Waiting for it is safe: its
/// holders wait only for the device below.
const SCRATCH_REQUESTS: u64 = 4;

pub(super) struct Align {
    shared: Arc<AlignmentState>,
    facts: Arc<Facts>,
}

struct AlignmentState {
    inner: Arc<dyn Device>,
    size: u64,
    minimum: u64,
    /// Maximum request of the device, a multiple of the minimum.
    maximum: u64,
    scratch: Pool,
    /// Ranges being changed, while any change is of partial blocks.
    locks: Arc<RangeLocks>,
    changes: Arc<Changes>,
}

/// Changes in progress: in the low half those of whole blocks without a lock, in the high half
/// those of partial blocks.
#[derive(Default)]
struct Changes {
    counts: AtomicU64,
    /// Signals the end of the last change without a lock.
    unlocked: Notify,
}

/// One change of partial blocks, in [`Changes::counts`].
const PARTIAL: u64 = 1 << 32;

/// A change of whole blocks without a lock, until it is dropped.
struct WholeBlockChange(Arc<Changes>);

/// A change of partial blocks, until it is dropped: all others take locks.
struct PartialBlockChange<'a>(&'a Changes);

impl Changes {
    /// Begins a change of whole blocks, unless one of partial blocks is in progress.
    fn whole(self: &Arc<Self>) -> Option<WholeBlockChange> {
        if self.counts.fetch_add(1, Ordering::SeqCst) < PARTIAL {
            return Some(WholeBlockChange(self.clone()));
        }
        self.end_whole();
        None
    }

    /// Begins a change of partial blocks, and waits until every other change holds a lock.
    async fn partial(&self) -> PartialBlockChange<'_> {
        self.counts.fetch_add(PARTIAL, Ordering::SeqCst);
        let partial = PartialBlockChange(self);
        loop {
            let unlocked = self.unlocked.listen();
            if self.counts.load(Ordering::SeqCst).is_multiple_of(PARTIAL) {
                return partial;
            }
            let _ = unlocked.await;
        }
    }

    fn end_whole(&self) {
        let before = self.counts.fetch_sub(1, Ordering::SeqCst);
        if before % PARTIAL == 1 && before > PARTIAL {
            self.unlocked.notify();
        }
    }
}

impl Drop for WholeBlockChange {
    fn drop(&mut self) {
        self.0.end_whole();
    }
}

impl Drop for PartialBlockChange<'_> {
    fn drop(&mut self) {
        self.0.counts.fetch_sub(PARTIAL, Ordering::SeqCst);
    }
}

impl Align {
    pub(super) fn new(inner: Arc<dyn Device>) -> Align {
        let below = inner.facts();
        // No late reservations: reads of partial blocks take their buffer before the data arrives.
        let kept = Hints::ZEROED
            | Hints::TAKES_PARKED
            | Hints::FLUSH_FAILURES_STAY
            | Hints::IN_FLIGHT
            | Hints::EXTENTS;
        let mut facts = Facts::over(&below).keeping(&below, kept);
        let block = facts.block;
        let minimum = u64::from(block.minimum);
        let maximum = (block.maximum - block.maximum % block.minimum).max(block.minimum);
        facts.tail = (facts.size % minimum) as u32;
        facts.rewrite_unit = facts.rewrite_unit.max(block.minimum);
        facts.block = BlockSizes {
            minimum: 1,
            preferred: block.preferred.max(block.minimum).min(maximum),
            maximum,
        };
        let scratch = Pool::new(Pool::cost(maximum as usize) * SCRATCH_REQUESTS);
        let maximum = u64::from(maximum);
        let locks = Arc::default();
        let changes = Arc::default();
        let size = facts.size;
        let shared = AlignmentState { inner, size, minimum, maximum, scratch, locks, changes };
        Align { shared: Arc::new(shared), facts: Arc::new(facts) }
    }

    fn is_aligned(&self, request: &Request) -> bool {
        let shared = &self.shared;
        let len = shared.up(request.at.saturating_add(request.len)).saturating_sub(request.at);
        request.at.is_multiple_of(shared.minimum) && request.len == len
    }
}

impl Device for Align {
    fn facts(&self) -> Arc<Facts> {
        self.facts.clone()
    }

    fn submit(&self, request: Request) -> PendingRequest {
        let is_of_tail = self.facts.tail > 0 && request.end() == Some(self.facts.size);
        let pending = self.submit_blocks(request);
        if !is_of_tail {
            return pending;
        }
        let tail = self.facts.tail;
        let minimum = self.shared.minimum;
        PendingRequest::finishing(async move {
            pending.await.map_err(|error| {
                if error.kind() != Kind::Invalid {
                    return error;
                }
                let text = format!(
                    "the last {tail} bytes cannot be reached: the size is no multiple of the device's \
                     block of {minimum} bytes"
                );
                Error::new(Kind::Invalid, text).because(error)
            })
        })
    }

    fn file_at(&self, at: u64, len: u64, access: LeaseAccess) -> Option<FileRange> {
        self.shared.inner.file_at(at, len, access)
    }
}

impl Align {
    fn submit_blocks(&self, request: Request) -> PendingRequest {
        let aligned = self.is_aligned(&request);
        if aligned && !request.kind().changes() {
            return self.shared.inner.submit(request);
        }
        let shared = self.shared.clone();
        if aligned && let Some(whole) = shared.changes.whole() {
            return match shared.inner.submit(request).now() {
                Ok(outcome) => outcome.into(),
                // A task: rewrites of partial blocks wait for its end, even if the caller does not
                // poll.
                Err(pending) => PendingRequest::start(async move {
                    let outcome = pending.await;
                    drop(whole);
                    outcome
                }),
            };
        }
        PendingRequest::start(async move { shared.unaligned(request, aligned).await })
    }
}

impl AlignmentState {
    /// The end of the block before a place: a multiple of the minimum, or the end of the device.
    fn up(&self, at: u64) -> u64 {
        at.checked_next_multiple_of(self.minimum).unwrap_or(u64::MAX).min(self.size.max(at))
    }

    async fn unaligned(&self, request: Request, aligned: bool) -> Result<Reply> {
        let Request { op, at, len, flags } = request;
        let start = at - at % self.minimum;
        let end = self.up(at + len);
        match op {
            Op::Read(room) => self.read(at, room, start, end - start).await,
            Op::Extents(contexts) => {
                let wide = Request::extents(start, end - start, contexts).with(flags);
                self.extents(at, len, wide).await
            }
            Op::Cache => self.inner.submit(Request::cache(start, end - start)).await,
            Op::Flush => self.inner.submit(Request::flush()).await,
            op => {
                let request = Request { op, at, len, flags };
                if aligned {
                    let _lock = self.locks.lock(start, end).await;
                    return self.inner.submit(request).await;
                }
                let _partial = self.changes.partial().await;
                let _lock = self.locks.lock(start, end).await;
                self.change(request).await
            }
        }
    }

    /// Reads the blocks around a range, in pieces up to the device's maximum, and copies the range
    /// out: a slow consumer must not hold scratch memory that all requests share.
    async fn read(&self, at: u64, room: Reservation, start: u64, len: u64) -> Result<Reply> {
        let mut buf = room.into_buf();
        let end = at + buf.len() as u64;
        let mut all_zero = true;
        let mut piece = start;
        while piece < start + len {
            let piece_len = self.maximum.min(start + len - piece);
            let wide = self.scratch(piece_len).await?;
            let reply = self.inner.submit(Request::read(piece, wide)).await?;
            let from = piece.max(at);
            let to = (piece + piece_len).min(end);
            let part = &mut buf[(from - at) as usize..(to - at) as usize];
            match reply {
                Reply::Data(data) => {
                    all_zero = false;
                    let skip = (from - piece) as usize;
                    part.copy_from_slice(&data.bytes()[skip..skip + part.len()]);
                }
                _ => part.fill(0),
            }
            piece += piece_len;
        }
        Ok(if all_zero { Reply::Hole } else { Reply::Data(buf.into()) })
    }

    /// The part from `at` on, of `len` bytes, of the extents that `wide` asks for.
    async fn extents(&self, at: u64, len: u64, wide: Request) -> Result<Reply> {
        let start = wide.at;
        let Reply::Extents(mut lists) = self.inner.submit(wide).await? else {
            return Err(Error::misfit());
        };
        for list in &mut lists {
            list.skip(at - start);
            list.truncate(len);
        }
        Ok(Reply::Extents(lists))
    }

    /// A write, zero or trim with partial blocks at its ends; the range is locked.
    async fn change(&self, request: Request) -> Result<Reply> {
        let Request { op, at, len, flags } = request;
        let end = at + len;
        let inner_start = self.up(at);
        let inner_end = if end == self.size { end } else { end - end % self.minimum };
        let data = match op {
            // Trim need not clear partial blocks.
            Op::Trim if inner_start >= inner_end => return Ok(Reply::Done),
            Op::Trim => {
                let inside = Request::trim(inner_start, inner_end - inner_start).with(flags);
                return self.inner.submit(inside).await;
            }
            Op::Write(data) => Some(data),
            _ => None,
        };
        if flags.contains(RequestFlags::FAST) {
            let text = "zeroing part of a block is no faster than writing";
            return Err(Error::new(Kind::Unsupported, text));
        }
        let fua = flags & RequestFlags::FUA;
        if inner_start > inner_end {
            // Within one block.
            return self.rewrite(at, len, data, fua).await;
        }
        let part = |from: u64, to: u64| {
            data.as_ref().map(|data| data.slice((from - at) as usize, (to - from) as usize))
        };
        if at < inner_start {
            self.rewrite(at, inner_start - at, part(at, inner_start), fua).await?;
        }
        if inner_start < inner_end {
            let middle = match part(inner_start, inner_end) {
                Some(data) => Request::write(inner_start, data).with(fua),
                None => Request::zero(inner_start, inner_end - inner_start).with(flags),
            };
            self.inner.submit(middle).await?;
        }
        if inner_end < end {
            self.rewrite(inner_end, end - inner_end, part(inner_end, end), fua).await?;
        }
        Ok(Reply::Done)
    }

    /// Changes part of one block: `data`, or zeroes.
    async fn rewrite(
        &self,
        at: u64,
        len: u64,
        data: Option<Data>,
        fua: RequestFlags,
    ) -> Result<Reply> {
        if let Some(data) = &data {
            data.load()
                .map_err(|error| Error::system("cannot read what is to be written", error))?;
        }
        let start = at - at % self.minimum;
        let wide = self.up(at + len) - start;
        let room = self.scratch(wide).await?;
        let mut buf: Buf = match self.inner.submit(Request::read(start, room)).await? {
            Reply::Data(old) => match old.try_into_buf() {
                Ok(buf) => buf,
                Err(old) => {
                    let mut buf = Buf::unpooled(old.len());
                    buf.copy_from_slice(old.bytes());
                    buf
                }
            },
            // A hole; one block.
            _ => Buf::unpooled(wide as usize),
        };
        let skip = (at - start) as usize;
        let part = &mut buf[skip..skip + len as usize];
        match data {
            Some(data) => part.copy_from_slice(data.bytes()),
            None => part.fill(0),
        }
        self.inner.submit(Request::write(start, buf.into()).with(fua)).await
    }

    async fn scratch(&self, len: u64) -> Result<Reservation> {
        let room = self.scratch.reserve(len as usize).await;
        room.map_err(|error| Error::new(Kind::NoMemory, "no scratch memory").because(error))
    }
}
