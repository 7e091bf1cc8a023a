//! The bounded buffer pool. Waiting for it limits the memory of requests.
//!
//! Two steps: [`Pool::reserve`] waits until `len` bytes are free and returns a
//! [`Reservation`](crate::Reservation), a promise of memory;
//! [`Reservation::into_buf`](crate::Reservation::into_buf) then never waits. Bytes are counted, not
//! requests, in power-of-two classes. Blocks are reused last-in-first-out, because a recently used
//! block is still in the cache. A pool may have a parent: [`Pool::share`] gives a connection a
//! share that limits what it can pin, while the parent limits all together.
//!
//! A reservation may also be *late*: it counts in a separate pool until its data arrives, and only
//! then takes memory with [`Reservation::claim`](crate::Reservation::claim). Data still on a long
//! path needs no memory here.
//!
//! Rule for callers: never wait for a reservation while holding one of the same pool (deadlock). A
//! request reserves its maximum at once, and layers that need scratch memory have their own small
//! pool.

use std::collections::VecDeque;
use std::fmt;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard};

use super::alignment::ALIGN;
use super::block::AlignedBlock;
use crate::sync::{Completer, Ticket, ticket};

/// Classes are ALIGN << 0 … ALIGN << 20 (4 GiB): more than any request.
const CLASSES: usize = 21;

/// Flag in [`PoolInner::waiters`]: there are watchers.
const WATCHED: usize = 1 << (usize::BITS - 1);

/// A bounded pool of aligned buffers. Cloning shares it; usable from every thread.
#[derive(Clone)]
pub struct Pool(Arc<PoolInner>);

struct PoolInner {
    limit: u64,
    parent: Option<Pool>,
    /// Every request is counted here when it begins and when it ends, without the lock.
    reserved: AtomicU64,
    peak: AtomicU64,
    /// The number of entries in `PoolState::waiting`, and [`WATCHED`] while `PoolState::watching` is not
    /// empty. A waiter writes this and then reads `reserved`; a release writes `reserved` and then
    /// reads this: one of them sees the other.
    waiters: AtomicUsize,
    state: Mutex<PoolState>,
}

#[derive(Default)]
struct PoolState {
    /// Idle blocks by class. Only the outermost pool has any.
    idle: Vec<Vec<AlignedBlock>>,
    idle_bytes: u64,
    /// Bytes of blocks in use. Less than `reserved` while reservations have no block yet.
    lent: u64,
    waiting: VecDeque<(u64, Completer<PoolCharge>)>,
    /// Tasks that wait until less is reserved.
    watching: VecDeque<Watcher>,
}

/// A task that waits until `cost` more bytes leave at most `level` reserved.
struct Watcher {
    cost: u64,
    level: u64,
    completer: Completer<()>,
}

/// The request is larger than the whole pool: waiting would never end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct TooLarge {
    /// Requested bytes, rounded up to a class.
    pub asked: u64,
    /// Size of the pool in bytes.
    pub limit: u64,
}

impl fmt::Display for TooLarge {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a buffer of {} bytes exceeds the pool of {} bytes", self.asked, self.limit)
    }
}

impl std::error::Error for TooLarge {}

impl Pool {
    /// A pool with at most `limit` bytes reserved at a time.
    pub fn new(limit: u64) -> Pool {
        let state =
            PoolState { idle: (0..CLASSES).map(|_| Vec::new()).collect(), ..PoolState::default() };
        Pool::with(limit, None, state)
    }

    /// A share of this pool with its own limit of `limit` bytes; its reservations count in both.
    pub fn share(&self, limit: u64) -> Pool {
        let limit = limit.min(self.0.limit);
        Pool::with(limit, Some(self.clone()), PoolState::default())
    }

    fn with(limit: u64, parent: Option<Pool>, state: PoolState) -> Pool {
        Pool(Arc::new(PoolInner {
            limit,
            parent,
            reserved: AtomicU64::new(0),
            peak: AtomicU64::new(0),
            waiters: AtomicUsize::new(0),
            state: Mutex::new(state),
        }))
    }

    /// Bytes that a reservation of `len` bytes counts for.
    pub fn cost(len: usize) -> u64 {
        (ALIGN << class(len)) as u64
    }

    /// Maximum number of bytes reserved at a time.
    pub fn limit(&self) -> u64 {
        self.0.limit
    }

    /// Bytes reserved now.
    pub fn reserved(&self) -> u64 {
        self.0.reserved.load(SeqCst)
    }

    /// Largest number of bytes reserved at a time so far.
    pub fn peak(&self) -> u64 {
        self.0.peak.load(SeqCst)
    }

    /// Frees idle memory until at most `most` bytes of it are left.
    pub fn keep_idle(&self, most: u64) {
        let mut surplus = Vec::new();
        self.root().lock().take_idle_beyond(most, &mut surplus);
        // Freed here, outside the lock.
        drop(surplus);
    }

    #[cfg(test)]
    pub(super) fn idle_bytes(&self) -> u64 {
        self.lock().idle_bytes
    }

    fn lock(&self) -> MutexGuard<'_, PoolState> {
        self.0.state.lock().expect("no panic happens under this lock")
    }

    fn hold(&self, cost: u64) -> PoolCharge {
        PoolCharge { pool: Some(self.clone()), cost }
    }

    /// Counts `cost` bytes if they are free here and in all parents, and no task waits for them.
    pub(super) fn charge_all_now(&self, cost: u64) -> bool {
        if !self.charge_now(cost) {
            return false;
        }
        match &self.0.parent {
            Some(parent) if !parent.charge_all_now(cost) => {
                self.release(cost);
                false
            }
            _ => true,
        }
    }

    /// The same on this pool's own account.
    fn charge_now(&self, cost: u64) -> bool {
        self.0.waiters.load(SeqCst) & !WATCHED == 0 && self.charge_within(cost)
    }

    /// Counts `cost` bytes on this pool's own account if they are within its limit.
    fn charge_within(&self, cost: u64) -> bool {
        let within = |reserved: u64| reserved.checked_add(cost).filter(|sum| *sum <= self.0.limit);
        match self.0.reserved.fetch_update(SeqCst, SeqCst, within) {
            Ok(before) => {
                self.note_peak(before + cost);
                true
            }
            Err(_) => false,
        }
    }

    /// Counts `cost` bytes, whatever the limit.
    pub(super) fn charge_beyond(&self, cost: u64) {
        let before = self.0.reserved.fetch_add(cost, SeqCst);
        self.note_peak(before + cost);
    }

    fn note_peak(&self, reserved: u64) {
        if reserved > self.0.peak.load(SeqCst) {
            self.0.peak.fetch_max(reserved, SeqCst);
        }
    }

    pub(super) async fn take(&self, cost: u64) -> Result<PoolCharge, TooLarge> {
        let too_large = TooLarge { asked: cost, limit: self.0.limit };
        if cost > self.0.limit {
            return Err(too_large);
        }
        if self.charge_now(cost) {
            return Ok(self.hold(cost));
        }
        let (completer, turn) = ticket();
        {
            let mut state = self.lock();
            state.waiting.push_back((cost, completer));
            self.note_waiters(&state);
        }
        // Memory may have become free before we were in the queue.
        self.admit();
        turn.await.map_err(|_| too_large)
    }

    /// Grants free memory to waiting tasks, in order.
    fn admit(&self) {
        let mut admitted = Vec::new();
        let mut woken = Vec::new();
        {
            let mut state = self.lock();
            while let Some((cost, completer)) = state.waiting.front() {
                let cost = *cost;
                if completer.is_abandoned() {
                    state.waiting.pop_front();
                } else if self.charge_within(cost) {
                    let completer = state.waiting.pop_front().map(|(_, completer)| completer);
                    admitted.push((completer, self.hold(cost)));
                } else {
                    break;
                }
            }
            self.take_watchers(&mut state, &mut woken);
            self.note_waiters(&state);
        }
        woken.into_iter().for_each(|completer| completer.complete(()));
        for (completer, hold) in admitted {
            // If the waiter has given up, this drops the hold, which releases the memory.
            if let Some(completer) = completer {
                completer.complete(hold);
            }
        }
    }

    /// Takes out the watchers that can proceed: in order, as many as fit together.
    fn take_watchers(&self, state: &mut PoolState, woken: &mut Vec<Completer<()>>) {
        let mut expected = self.reserved();
        while let Some(first) = state.watching.front() {
            let fits = expected.saturating_add(first.cost) <= first.level;
            if !fits && !first.completer.is_abandoned() {
                break;
            }
            let Some(watcher) = state.watching.pop_front() else { break };
            if fits && !watcher.completer.is_abandoned() {
                expected += watcher.cost;
                woken.push(watcher.completer);
            }
        }
    }

    fn note_waiters(&self, state: &PoolState) {
        let watched = if state.watching.is_empty() { 0 } else { WATCHED };
        self.0.waiters.store(state.waiting.len() | watched, SeqCst);
    }

    fn release(&self, cost: u64) {
        self.0.reserved.fetch_sub(cost, SeqCst);
        if self.0.waiters.load(SeqCst) > 0 {
            self.admit();
        }
    }

    pub(super) fn release_all(&self, cost: u64) {
        self.release(cost);
        if let Some(parent) = &self.0.parent {
            parent.release_all(cost);
        }
    }

    /// The pool that this is a share of.
    pub(super) fn parent(&self) -> Option<&Pool> {
        self.0.parent.as_ref()
    }

    /// Whether a buffer of `len` bytes would leave at most `level` bytes reserved, and no task
    /// waits for that ([`Pool::wait_below`]).
    pub fn is_below(&self, len: usize, level: u64) -> bool {
        let watched = self.0.waiters.load(SeqCst) & WATCHED != 0;
        !watched && self.reserved().saturating_add(Self::cost(len)) <= level
    }

    /// Waits until a buffer of `len` bytes would leave at most `level` bytes reserved, after all
    /// earlier waiters for the same. Reserves nothing: for callers that leave the rest of the pool
    /// to others.
    pub fn wait_below(&self, len: usize, level: u64) -> Ticket<()> {
        let cost = Self::cost(len);
        let (completer, turn) = ticket();
        {
            let mut state = self.lock();
            if state.watching.len() == state.watching.capacity() {
                // Drop abandoned watchers now, not when it is their turn.
                state.watching.retain(|watcher| !watcher.completer.is_abandoned());
            }
            state.watching.push_back(Watcher { cost, level, completer });
            self.note_waiters(&state);
        }
        // Memory may have become free before we were in the queue.
        self.admit();
        turn
    }

    fn root(&self) -> &Pool {
        self.0.parent.as_ref().map_or(self, Pool::root)
    }

    /// A block; idle ones of other sizes are freed if all memory would exceed the limit.
    pub(super) fn block(&self, class: usize) -> AlignedBlock {
        let root = self.root();
        let size = ALIGN << class;
        let mut surplus = Vec::new();
        let recycled = {
            let mut state = root.lock();
            let block = state.idle[class].pop();
            if block.is_some() {
                state.idle_bytes -= size as u64;
            }
            state.lent += size as u64;
            let most = root.0.limit.saturating_sub(state.lent);
            state.take_idle_beyond(most, &mut surplus);
            block
        };
        drop(surplus);
        recycled.unwrap_or_else(|| AlignedBlock::new(size))
    }

    /// Keeps an idle block while all memory, used and idle, is within the limit.
    pub(super) fn keep(&self, block: AlignedBlock) {
        let root = self.root();
        let size = block.size() as u64;
        let mut surplus = Vec::new();
        {
            let mut state = root.lock();
            let class = class(block.size());
            state.idle[class].push(block);
            state.idle_bytes += size;
            state.lent -= size;
            let most = root.0.limit.saturating_sub(state.lent);
            state.take_idle_beyond(most, &mut surplus);
        }
        drop(surplus);
    }
}

impl PoolState {
    /// Takes out idle blocks, the largest first, until at most `most` bytes of them are left.
    fn take_idle_beyond(&mut self, most: u64, out: &mut Vec<AlignedBlock>) {
        while self.idle_bytes > most {
            let largest = (0..CLASSES).rev().find(|&class| !self.idle[class].is_empty());
            let Some(class) = largest else { break };
            let block = self.idle[class].remove(0);
            self.idle_bytes -= block.size() as u64;
            out.push(block);
        }
    }
}

impl fmt::Debug for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Pool({} of {} bytes)", self.reserved(), self.0.limit)
    }
}

/// A charge on one pool's own account, without its parents; released on drop.
pub(super) struct PoolCharge {
    pool: Option<Pool>,
    cost: u64,
}

impl PoolCharge {
    /// The charge now belongs to a `Reservation`.
    pub(super) fn forget(&mut self) {
        self.pool = None;
    }
}

impl Drop for PoolCharge {
    fn drop(&mut self) {
        if let Some(pool) = self.pool.take() {
            pool.release(self.cost);
        }
    }
}

/// The class of blocks for `len` bytes.
pub(super) fn class(len: usize) -> usize {
    let pages = len.div_ceil(ALIGN).max(1);
    let class = pages.next_power_of_two().trailing_zeros() as usize;
    assert!(class < CLASSES, "a buffer of {len} bytes");
    class
}
