//! Reservations: promises of memory of a pool, until a buffer is made of it.

use std::fmt;
use std::sync::Arc;

use super::alignment::ALIGN;
use super::block::AlignedBlock;
use super::buf::Buf;
use super::charge::{BufferCharge, InUse, KeptCharge};
use super::pool::{Pool, PoolCharge, TooLarge, class};
use super::route_counters::RouteCounters;
use super::shared::SharedPart;

impl Pool {
    /// Room for `len` bytes if it is free now and nobody waits for it.
    pub fn try_reserve(&self, len: usize) -> Option<Reservation> {
        let cost = Self::cost(len);
        self.charge_all_now(cost).then(|| Reservation::of(self, cost, len))
    }

    /// Waits for room for `len` bytes, first come first served.
    ///
    /// # Errors
    /// [`TooLarge`] if the pool is smaller than that.
    pub async fn reserve(&self, len: usize) -> Result<Reservation, TooLarge> {
        if let Some(room) = self.try_reserve(len) {
            return Ok(room);
        }
        let cost = Self::cost(len);
        let mut held = Vec::new();
        let mut level = Some(self);
        while let Some(pool) = level {
            held.push(pool.take(cost).await?);
            level = pool.parent();
        }
        held.iter_mut().for_each(PoolCharge::forget);
        Ok(Reservation::of(self, cost, len))
    }

    /// Waits for late room for `len` bytes: it counts in this pool until its memory is claimed from
    /// `memory`, which must be another pool.
    ///
    /// # Errors
    /// [`TooLarge`] if one of the pools is smaller than that.
    pub async fn reserve_late(&self, len: usize, memory: &Pool) -> Result<Reservation, TooLarge> {
        let asked = Self::cost(len);
        if asked > memory.limit() {
            return Err(TooLarge { asked, limit: memory.limit() });
        }
        let mut room = self.reserve(len).await?;
        room.memory = Some(memory.clone());
        Ok(room)
    }
}

/// A promise of memory for a buffer of `len` bytes; given back when dropped.
pub struct Reservation {
    /// `None` for memory outside of pools.
    pool: Option<Pool>,
    cost: u64,
    len: usize,
    /// Whoever reserved it does not mean to look at the bytes.
    park: bool,
    /// Counts what becomes of the bytes.
    counters: Option<Arc<RouteCounters>>,
    /// Where its memory comes from once its bytes arrive, if it is late.
    memory: Option<Pool>,
    /// Gives the charge back in place of this reservation, if it is kept for a repetition.
    kept: Option<InUse>,
}

impl Reservation {
    /// Memory outside of any pool: for tests and for small fixed needs.
    pub fn unpooled(len: usize) -> Reservation {
        Reservation {
            pool: None,
            cost: 0,
            len,
            park: false,
            counters: None,
            memory: None,
            kept: None,
        }
    }

    /// One that is charged already.
    fn of(pool: &Pool, cost: u64, len: usize) -> Reservation {
        let mut room = Reservation::unpooled(len);
        (room.pool, room.cost) = (Some(pool.clone()), cost);
        room
    }

    /// The same room, which may also be filled with bytes that stay in the kernel
    /// ([`ParkedPayload`](crate::ParkedPayload)): the caller will most likely not look at them.
    #[must_use]
    pub fn parkable(mut self) -> Reservation {
        self.park = true;
        self
    }

    /// The same room, to be filled with bytes in memory: a layer looks at them.
    #[must_use]
    pub fn in_memory(mut self) -> Reservation {
        self.park = false;
        self
    }

    /// Keeps what is reserved beyond the end of the request, for whoever may have to repeat it: a repetition
    /// that had to wait for memory could wait for requests that wait for it.
    pub fn keep(&mut self) -> KeptReservation {
        if self.kept.is_none()
            && let Some(pool) = &self.pool
        {
            self.kept = Some(KeptCharge::in_use(pool.clone(), self.cost));
        }
        let pool = self.pool.clone();
        let memory = self.memory.clone();
        let kept = self.kept.as_ref().map(InUse::charge);
        KeptReservation { pool, memory, cost: self.cost, len: self.len, park: self.park, kept }
    }

    /// Whether the bytes may stay in the kernel.
    pub(crate) fn may_park(&self) -> bool {
        self.park
    }

    /// The same room, whose payload is counted in `counters` where it does not just go through memory.
    #[must_use]
    pub fn counted(mut self, counters: &Arc<RouteCounters>) -> Reservation {
        self.counters = Some(counters.clone());
        self
    }

    pub(crate) fn counters(&self) -> Option<&RouteCounters> {
        self.counters.as_deref()
    }

    /// Bytes that the buffer will have.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the buffer will be empty.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The same room with its memory, now that its bytes arrive: waits for it where the room is late.
    /// Who receives several answers in turn must not wait while one of them is there in part
    /// ([`claim_now`](Reservation::claim_now)).
    pub async fn claim(mut self) -> Reservation {
        let Some(memory) = self.memory.take() else { return self };
        match memory.reserve(self.len).await {
            Ok(mut room) => {
                (room.park, room.counters) = (self.park, self.counters.take());
                room
            }
            // Not possible: it was asked before. Then without waiting.
            Err(_) => {
                self.memory = Some(memory);
                self.claim_now()
            }
        }
    }

    /// As [`claim`](Reservation::claim), but never waits: the memory is used beyond the limit of its pool.
    #[must_use]
    pub fn claim_now(mut self) -> Reservation {
        let Some(memory) = self.memory.take() else { return self };
        let mut level = Some(&memory);
        while let Some(pool) = level {
            pool.charge_beyond(self.cost);
            level = pool.parent();
        }
        let mut room = Reservation::of(&memory, self.cost, self.len);
        (room.park, room.counters) = (self.park, self.counters.take());
        room
    }

    /// The buffer, without waiting. Its content is arbitrary earlier data or zeroes.
    pub fn into_buf(self) -> Buf {
        let mut room = self.claim_now();
        let pool = room.pool.take();
        let cost = room.cost;
        let counters = room.counters.take();
        let block = match &pool {
            None => AlignedBlock::new(room.len.max(1).next_multiple_of(ALIGN)),
            Some(pool) => pool.block(class(room.len)),
        };
        Buf::new(block, room.len, BufferCharge { pool, cost, counters, kept: room.kept.take() })
    }

    /// A buffer in memory shared with another process, which counts in this room's pool like any
    /// other. Its content is that of the part.
    ///
    /// # Errors
    /// The part is smaller than the room: both come back.
    pub fn into_shared(self, part: SharedPart) -> Result<Buf, (Reservation, SharedPart)> {
        if part.size() < self.len {
            return Err((self, part));
        }
        let mut room = self.claim_now();
        let pool = room.pool.take();
        let cost = room.cost;
        let counters = room.counters.take();
        let charge = BufferCharge { pool, cost, counters, kept: room.kept.take() };
        Ok(Buf::new(AlignedBlock::of_shared(part), room.len, charge))
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        if let Some(pool) = self.pool.take()
            && self.kept.is_none()
        {
            pool.release_all(self.cost);
        }
    }
}

impl fmt::Debug for Reservation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Reservation({} bytes)", self.len)
    }
}

/// Memory that stays reserved for a request that may be repeated ([`Reservation::keep`]).
pub struct KeptReservation {
    pool: Option<Pool>,
    memory: Option<Pool>,
    cost: u64,
    len: usize,
    park: bool,
    kept: Option<Arc<KeptCharge>>,
}

impl KeptReservation {
    /// The same reservation again, after the request that had it has ended. It waits only where a buffer of
    /// that request is still in use, because the kernel or a peer is not done with it.
    ///
    /// # Errors
    /// [`TooLarge`] if the pool is smaller than the reservation.
    pub async fn again(&self) -> Result<Reservation, TooLarge> {
        let free = self.kept.as_ref().and_then(KeptCharge::take);
        let mut room = match (&self.pool, free) {
            (Some(pool), Some(kept)) => {
                let mut room = Reservation::of(pool, self.cost, self.len);
                room.kept = Some(kept);
                room
            }
            (Some(pool), None) => pool.reserve(self.len).await?,
            (None, _) => Reservation::unpooled(self.len),
        };
        (room.park, room.memory) = (self.park, self.memory.clone());
        Ok(room)
    }
}

impl fmt::Debug for KeptReservation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "KeptReservation({} bytes)", self.len)
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;
    use std::task::{Context, Poll, Waker};

    use super::*;
    use crate::Ticket;

    #[test]
    fn costs_are_powers_of_two_pages() {
        assert_eq!(Pool::cost(0), 4096);
        assert_eq!(Pool::cost(4096), 4096);
        assert_eq!(Pool::cost(4097), 8192);
        assert_eq!(Pool::cost(300 << 10), 512 << 10);
    }

    #[test]
    fn room_is_bounded_and_comes_back() {
        let pool = Pool::new(16 << 10);
        let first = pool.try_reserve(8 << 10).unwrap();
        let second = pool.try_reserve(8 << 10).unwrap().into_buf();
        assert!(pool.try_reserve(1).is_none());
        drop(first);
        drop(second);
        assert_eq!((pool.reserved(), pool.peak()), (0, 16 << 10));
    }

    #[test]
    fn idle_memory_makes_room_for_blocks_of_another_size() {
        let pool = Pool::new(16 << 10);
        let take = |len| pool.try_reserve(len).unwrap().into_buf();
        let small: Vec<_> = (0..4).map(|_| take(4 << 10)).collect();
        drop(small);
        assert_eq!(pool.idle_bytes(), 16 << 10);
        let large = take(8 << 10);
        assert_eq!(pool.idle_bytes(), 8 << 10);
        drop((large, take(4 << 10)));
        assert_eq!(pool.idle_bytes(), 16 << 10, "what fits is kept");
    }

    #[test]
    fn waiters_are_served_in_order_and_may_give_up() {
        let pool = Pool::new(8 << 10);
        let mut cx = Context::from_waker(Waker::noop());
        let held = pool.try_reserve(8 << 10).unwrap();
        let mut large = Box::pin(pool.reserve(8 << 10));
        let mut small = pin!(pool.reserve(4 << 10));
        assert!(large.as_mut().poll(&mut cx).is_pending());
        assert!(small.as_mut().poll(&mut cx).is_pending());
        drop(held);
        // The large one stands first and was admitted, but its owner has lost interest.
        assert!(small.as_mut().poll(&mut cx).is_pending());
        drop(large);
        let Poll::Ready(Ok(room)) = small.as_mut().poll(&mut cx) else { panic!("not admitted") };
        assert_eq!(pool.reserved(), 4 << 10);
        drop(room);
        assert_eq!(pool.reserved(), 0);
    }

    #[test]
    fn a_share_bounds_its_owner_and_counts_in_the_whole() {
        let pool = Pool::new(16 << 10);
        let share = pool.share(8 << 10);
        let mine = share.try_reserve(8 << 10).unwrap();
        assert!(share.try_reserve(1).is_none());
        assert_eq!(pool.reserved(), 8 << 10);
        let rest = pool.try_reserve(8 << 10).unwrap();
        let buf = mine.into_buf();
        drop(buf);
        assert_eq!((share.reserved(), pool.reserved()), (0, 8 << 10));
        let other = pool.share(16 << 10);
        assert!(other.try_reserve(16 << 10).is_none());
        assert_eq!(other.reserved(), 0);
        drop(rest);
    }

    #[test]
    fn what_is_kept_for_a_repetition_is_there_at_once() {
        let pool = Pool::new(8 << 10);
        let mut cx = Context::from_waker(Waker::noop());
        let mut room = pool.try_reserve(5000).unwrap().parkable();
        let kept = room.keep();
        let mut other = pin!(pool.reserve(1));
        assert!(other.as_mut().poll(&mut cx).is_pending(), "the pool is used up");
        drop(room.into_buf());
        assert!(other.as_mut().poll(&mut cx).is_pending(), "the memory is kept");
        let Poll::Ready(Ok(again)) = pin!(kept.again()).poll(&mut cx) else { panic!("it is kept") };
        assert_eq!((again.len(), again.may_park(), pool.reserved()), (5000, true, 8 << 10));
        {
            let mut third = pin!(kept.again());
            assert!(third.as_mut().poll(&mut cx).is_pending(), "the second is still in use");
        }
        let buf = again.into_buf();
        drop(kept);
        assert!(other.as_mut().poll(&mut cx).is_pending(), "the answer is still in use");
        drop(buf);
        assert!(other.as_mut().poll(&mut cx).is_ready());
        let mut room = pool.try_reserve(8 << 10).unwrap();
        let outer = room.keep();
        let inner = room.keep();
        drop(room);
        for kept in [&inner, &outer] {
            let Poll::Ready(Ok(again)) = pin!(kept.again()).poll(&mut cx) else {
                panic!("it is kept twice, and not in use")
            };
            drop(again.into_buf());
        }
        drop((outer, inner));
        assert_eq!(pool.reserved(), 0);
        let kept = Reservation::unpooled(7).keep();
        let Poll::Ready(Ok(room)) = pin!(kept.again()).poll(&mut cx) else {
            panic!("memory outside of pools is there")
        };
        assert_eq!(room.len(), 7);
    }

    #[test]
    fn late_room_has_its_memory_when_it_is_claimed() {
        let asked = Pool::new(32 << 10);
        let memory = Pool::new(8 << 10);
        let mut cx = Context::from_waker(Waker::noop());
        let mut late = || {
            let room = pin!(asked.reserve_late(8 << 10, &memory)).poll(&mut cx);
            let Poll::Ready(Ok(room)) = room else { panic!("there is room") };
            room
        };
        let [first, second, third, mut fourth] = [late(), late(), late().parkable(), late()];
        assert_eq!((asked.reserved(), memory.reserved()), (32 << 10, 0));
        let Poll::Ready(first) = pin!(first.claim()).poll(&mut cx) else { panic!("it is free") };
        assert_eq!((asked.reserved(), memory.reserved()), (24 << 10, 8 << 10));
        let mut third = pin!(third.claim());
        assert!(third.as_mut().poll(&mut cx).is_pending(), "the memory is used up");
        // Who cannot wait goes beyond.
        let buf = second.into_buf();
        assert_eq!((asked.reserved(), memory.reserved()), (16 << 10, 16 << 10));
        drop(buf);
        drop(first);
        let Poll::Ready(third) = third.poll(&mut cx) else { panic!("it is free again") };
        assert!(third.may_park());
        let kept = fourth.keep();
        drop((third, fourth.claim_now()));
        assert_eq!((asked.reserved(), memory.reserved(), memory.peak()), (8 << 10, 0, 16 << 10));
        let again = pin!(kept.again()).poll(&mut cx);
        assert_eq!((asked.reserved(), memory.reserved()), (8 << 10, 0), "late again");
        drop((again, kept));
        assert_eq!((asked.reserved(), memory.reserved()), (0, 0));
        let beyond = pin!(asked.reserve_late(9 << 10, &memory)).poll(&mut cx);
        assert!(matches!(beyond, Poll::Ready(Err(_))), "the memory would never be there");
    }

    #[test]
    fn who_leaves_a_part_to_others_goes_on_in_order_when_less_is_in_use() {
        let pool = Pool::new(64 << 10);
        let mut cx = Context::from_waker(Waker::noop());
        assert!(pool.is_below(8 << 10, 32 << 10), "nothing is in use");
        let rooms: Vec<_> = (0..4).map(|_| pool.try_reserve(8 << 10).unwrap()).collect();
        let mut waits: Vec<_> =
            [16 << 10, 8 << 10, 8 << 10].map(|len| pool.wait_below(len, 32 << 10)).into();
        let mut ready = |wait: &mut Ticket<()>| pin!(wait).poll(&mut cx).is_ready();
        assert!(waits.iter_mut().all(|wait| !ready(wait)));
        // Others are not kept from what is left to them.
        let others = pool.try_reserve(8 << 10).expect("there is memory above the level");
        drop(others);
        let mut rooms = rooms.into_iter();
        drop(rooms.next());
        assert!(
            waits.iter_mut().all(|wait| !ready(wait)),
            "a smaller one does not go before a larger one"
        );
        drop(rooms.next());
        assert_eq!(waits.iter_mut().map(&mut ready).collect::<Vec<_>>(), [true, false, false]);
        assert!(!pool.is_below(0, 32 << 10), "others wait");
        // Whoever gave up keeps nobody.
        drop(waits.remove(1));
        let first = pool.try_reserve(16 << 10).unwrap();
        drop(rooms.next());
        assert!(ready(&mut waits[1]));
        drop((first, rooms));
        assert!(pool.is_below(8 << 10, 32 << 10), "nobody waits any more");
    }

    #[test]
    fn asking_for_more_than_there_is_fails_at_once() {
        let pool = Pool::new(8 << 10);
        let mut cx = Context::from_waker(Waker::noop());
        let asked = pin!(pool.reserve(9 << 10)).poll(&mut cx);
        let Poll::Ready(Err(error)) = asked else { panic!("should fail") };
        assert_eq!(error, TooLarge { asked: 16 << 10, limit: 8 << 10 });
    }
}
