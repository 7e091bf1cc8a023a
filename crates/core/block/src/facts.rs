//! What is true of a device: data, not ability traits.

use std::sync::Arc;

use bitflags::bitflags;

/// The context that every device with extents has: which ranges are holes and which read as zeroes
/// (NBD's document, "Metadata contexts").
pub const BASE_ALLOCATION: &str = "base:allocation";

/// What tells a file from all others: its device and inode numbers; for a block device its own number
/// and 0.
pub type FileId = (u64, u64);

/// What is true of a device, found out when it was opened.
#[derive(Debug, Clone)]
pub struct Facts {
    /// For messages: what the user typed, shortened, without secrets.
    pub name: Arc<str>,
    /// For people: what the device holds; may be empty.
    pub description: String,
    /// Size in bytes, at most 2^63 - 1.
    pub size: u64,
    /// Limits on offsets and lengths.
    pub block: BlockSizes,
    /// Bytes at the end that no request reaches, because the size is no multiple of the minimum block of
    /// what `emulate` supplies smaller ones for.
    pub unreachable: u32,
    /// What servers tell their clients instead of `block`, because a layer says so.
    pub told: Option<BlockSizes>,
    /// Abilities.
    pub can: Can,
    /// Abilities among `can` that `emulate` supplies.
    pub emulated: Can,
    /// Abilities among `can` that servers do not tell their clients of, because a layer hides them;
    /// callers in this program may use them.
    pub withheld: Can,
    /// Seeking costs time.
    pub rotational: bool,
    /// The whole device reads as zeroes, because it was just made so.
    pub zeroed: bool,
    /// Payloads of writes that are parked in the kernel ([`blockhaul_io::Parked`]) are moved on without a copy:
    /// callers that do not look at the bytes should park them.
    pub takes_parked: bool,
    /// Reads take the memory of their room when their answer arrives ([`blockhaul_io::Reservation::claim`]), so that late
    /// room is enough for them.
    pub claims_room: bool,
    /// The storage behind the device keeps sentence 11 of the contract by itself, whichever handles
    /// requests come by: a caller with several handles need not compare their flushes ([`crate::Flushes`]).
    pub flush_failures_stay: bool,
    /// Bytes of requests that are worth keeping in flight for one client; none: the caller's own
    /// choice.
    pub in_flight: Option<u64>,
    /// Granularity in bytes in which storage is allocated and freed; a power of two, at least 1.
    pub allocation_unit: u32,
    /// The local files and block devices that hold the device's bytes, or parts of them.
    pub files: Vec<FileId>,
    /// Names of the contexts that extents can be asked for; at most [`Contexts::MAX`].
    pub contexts: Vec<String>,
}

impl Facts {
    /// The facts of a writable device in memory: everything else is a change to these.
    pub fn new(name: impl Into<Arc<str>>, size: u64) -> Facts {
        Facts {
            name: name.into(),
            description: String::new(),
            size,
            block: BlockSizes::default(),
            unreachable: 0,
            told: None,
            can: Can::WRITE,
            emulated: Can::empty(),
            withheld: Can::empty(),
            rotational: false,
            zeroed: false,
            takes_parked: false,
            claims_room: false,
            flush_failures_stay: false,
            in_flight: None,
            allocation_unit: 4096,
            files: Vec::new(),
            contexts: Vec::new(),
        }
    }

    /// All contexts of the device.
    pub fn all_contexts(&self) -> Contexts {
        (0..self.contexts.len()).fold(Contexts::empty(), Contexts::with)
    }

    /// The block sizes that clients hear: those that somebody has said, or else the device's own,
    /// without a bound where its bound is the usual one.
    pub fn told_or_own(&self) -> BlockSizes {
        self.told.unwrap_or_else(|| {
            let unbounded = self.block.maximum >= BlockSizes::default().maximum;
            let maximum = if unbounded { u32::MAX } else { self.block.maximum };
            BlockSizes { maximum, ..self.block }
        })
    }

    /// Has clients hear that requests of whole blocks of this many bytes need no extra work, unless
    /// such a block is longer than a request may be. `block` is a power of two, at least 512.
    pub fn prefer(&mut self, block: u32) {
        let told = self.told_or_own();
        if told.maximum >= block {
            self.told = Some(BlockSizes { preferred: told.preferred.max(block), ..told });
        }
    }

    /// The context of this name.
    pub fn context(&self, name: &str) -> Option<Contexts> {
        let index = self.contexts.iter().position(|context| context == name)?;
        Some(Contexts::empty().with(index))
    }
}

/// Limits on offsets and lengths, in bytes (NBD's document, "Block size constraints").
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockSizes {
    /// Offsets and lengths are multiples of this; a power of two, 1 to 65536. A size that is no
    /// multiple leaves a tail that cannot be reached.
    pub minimum: u32,
    /// Requests of multiples of this, so aligned, need no extra work; a power of two, at least 512.
    pub preferred: u32,
    /// Longest read or write in bytes.
    pub maximum: u32,
}

impl BlockSizes {
    /// Sizes that a plugin or script says; none where they are no sizes. The bounds are nbdkit's for
    /// plugins: `maximum` is a multiple of `minimum`, or all ones, for no bound.
    pub fn told(minimum: u32, preferred: u32, maximum: u32) -> Option<BlockSizes> {
        let fine = (1..=65536).contains(&minimum)
            && minimum.is_power_of_two()
            && (512..=32 << 20).contains(&preferred)
            && preferred.is_power_of_two()
            && minimum <= preferred
            && (maximum == u32::MAX || maximum.is_multiple_of(minimum) && maximum >= preferred);
        fine.then_some(BlockSizes { minimum, preferred, maximum })
    }
}

impl Default for BlockSizes {
    /// Bytes, pages, and the 64 MiB that the most generous servers take at once.
    fn default() -> BlockSizes {
        BlockSizes { minimum: 1, preferred: 4096, maximum: 64 << 20 }
    }
}

bitflags! {
    /// Abilities. Reading is always there.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash)]
    pub struct Can: u16 {
        /// Write.
        const WRITE = 1 << 0;
        /// Flush means something.
        const FLUSH = 1 << 1;
        /// `Flags::FUA` on everything that changes.
        const FUA = 1 << 2;
        /// Trim.
        const TRIM = 1 << 3;
        /// Zero without a payload.
        const ZERO = 1 << 4;
        /// `Flags::FAST` is understood: zeroing is fast, or fails at once.
        const FAST_ZERO = 1 << 5;
        /// Cache.
        const CACHE = 1 << 6;
        /// Extents.
        const EXTENTS = 1 << 7;
        /// A flush on one handle covers completed writes of all handles on the same storage.
        const MULTI_CONN = 1 << 8;
    }
}

impl Can {
    /// Everything that needs writing to make sense.
    pub const CHANGES: Can =
        Can::WRITE.union(Can::FUA).union(Can::TRIM).union(Can::ZERO).union(Can::FAST_ZERO);
}

/// A set of contexts, by their index in [`Facts::contexts`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash)]
pub struct Contexts(u64);

impl Contexts {
    /// Most contexts of one device: more than any peer offers, and a set is one word.
    pub const MAX: usize = 64;

    /// No context.
    pub const fn empty() -> Contexts {
        Contexts(0)
    }

    /// The context at index 0: `base:allocation` on devices that have it.
    pub const fn first() -> Contexts {
        Contexts(1)
    }

    /// This set and the context at `index`; indexes from [`Contexts::MAX`] on are left out.
    #[must_use]
    pub const fn with(self, index: usize) -> Contexts {
        if index < Self::MAX { Contexts(self.0 | 1 << index) } else { self }
    }

    /// Whether the context at `index` is in it.
    pub const fn contains(self, index: usize) -> bool {
        index < Self::MAX && self.0 & (1 << index) != 0
    }

    /// How many contexts are in it.
    pub const fn count(self) -> usize {
        self.0.count_ones() as usize
    }

    /// Whether there is none.
    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// Whether all of `other` are in it.
    pub const fn includes(self, other: Contexts) -> bool {
        other.0 & !self.0 == 0
    }

    /// The indexes, ascending.
    pub fn iter(self) -> impl Iterator<Item = usize> {
        (0..Self::MAX).filter(move |&index| self.contains(index))
    }
}
