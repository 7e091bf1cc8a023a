//! Room of a pool: a promise of memory, until a buffer is made of it.

use std::fmt;
use std::sync::Arc;

use super::{Pool, TooLarge, class};
use crate::buf::{ALIGN, Block, Buf};
use crate::tally::Tally;

/// Room for a buffer of `len` bytes, reserved in a pool; given back when dropped.
pub struct Room {
    /// `None` for memory outside of pools.
    pool: Option<Pool>,
    cost: u64,
    len: usize,
    /// Whoever reserved it does not mean to look at the bytes.
    park: bool,
    /// Counts what becomes of the bytes.
    tally: Option<Arc<Tally>>,
    /// Where its memory comes from once its bytes arrive, if it is late.
    pub(super) memory: Option<Pool>,
}

impl Room {
    /// Room outside of any pool: for tests and for small fixed needs.
    pub fn unpooled(len: usize) -> Room {
        Room { pool: None, cost: 0, len, park: false, tally: None, memory: None }
    }

    /// Room that is charged already.
    pub(super) fn of(pool: &Pool, cost: u64, len: usize) -> Room {
        let mut room = Room::unpooled(len);
        (room.pool, room.cost) = (Some(pool.clone()), cost);
        room
    }

    /// The same room, which may also be filled with bytes that stay in the kernel
    /// ([`Parked`](crate::Parked)): the caller will most likely not look at them.
    #[must_use]
    pub fn parkable(mut self) -> Room {
        self.park = true;
        self
    }

    /// The same room, to be filled with bytes in memory: a layer looks at them.
    #[must_use]
    pub fn in_memory(mut self) -> Room {
        self.park = false;
        self
    }

    /// The way to room of the same kind again, for whoever repeats a request.
    pub fn like(&self) -> Wish {
        let (pool, memory) = (self.pool.clone(), self.memory.clone());
        Wish { pool, memory, len: self.len, park: self.park }
    }

    /// Whether the bytes may stay in the kernel.
    pub(crate) fn may_park(&self) -> bool {
        self.park
    }

    /// The same room, whose payload is counted in `tally` where it does not just go through memory.
    #[must_use]
    pub fn tallied(mut self, tally: &Arc<Tally>) -> Room {
        self.tally = Some(tally.clone());
        self
    }

    pub(crate) fn tally(&self) -> Option<&Tally> {
        self.tally.as_deref()
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
    /// ([`claim_now`](Room::claim_now)).
    pub async fn claim(mut self) -> Room {
        let Some(memory) = self.memory.take() else { return self };
        match memory.reserve(self.len).await {
            Ok(mut room) => {
                (room.park, room.tally) = (self.park, self.tally.take());
                room
            }
            // Not possible: it was asked before. Then without waiting.
            Err(_) => {
                self.memory = Some(memory);
                self.claim_now()
            }
        }
    }

    /// As [`claim`](Room::claim), but never waits: the memory is used beyond the limit of its pool.
    #[must_use]
    pub fn claim_now(mut self) -> Room {
        let Some(memory) = self.memory.take() else { return self };
        let mut level = Some(&memory);
        while let Some(pool) = level {
            pool.charge_beyond(self.cost);
            level = pool.0.parent.as_ref();
        }
        let mut room = Room::of(&memory, self.cost, self.len);
        (room.park, room.tally) = (self.park, self.tally.take());
        room
    }

    /// The buffer, without waiting. Its content is arbitrary earlier data or zeroes.
    pub fn into_buf(self) -> Buf {
        let mut room = self.claim_now();
        let (pool, cost, tally) = (room.pool.take(), room.cost, room.tally.take());
        let block = match &pool {
            None => Block::new(room.len.max(1).next_multiple_of(ALIGN)),
            Some(pool) => pool.block(class(room.len)),
        };
        Buf::new(block, room.len, Charge { pool, cost, tally })
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        if let Some(pool) = self.pool.take() {
            pool.release_all(self.cost);
        }
    }
}

impl fmt::Debug for Room {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Room({} bytes)", self.len)
    }
}

/// Room of a kind that was had before.
#[derive(Debug, Clone)]
pub struct Wish {
    pool: Option<Pool>,
    memory: Option<Pool>,
    len: usize,
    park: bool,
}

impl Wish {
    /// Waits for such room, in the pool that the first came from; not while holding room of it.
    pub async fn room(&self) -> Result<Room, TooLarge> {
        let mut room = match &self.pool {
            None => Room::unpooled(self.len),
            Some(pool) => pool.reserve(self.len).await?,
        };
        (room.park, room.memory) = (self.park, self.memory.clone());
        Ok(room)
    }
}

/// What a buffer owes to its pool, and who counts what becomes of it.
pub(crate) struct Charge {
    pool: Option<Pool>,
    cost: u64,
    tally: Option<Arc<Tally>>,
}

impl Charge {
    pub(crate) fn none() -> Charge {
        Charge { pool: None, cost: 0, tally: None }
    }

    pub(crate) fn tally(&self) -> Option<&Tally> {
        self.tally.as_deref()
    }

    pub(crate) fn give_back(&mut self, block: Block) {
        if let Some(pool) = self.pool.take() {
            pool.keep(block);
            pool.release_all(self.cost);
        }
    }
}
