//! The facts of a device: data, not ability traits.

use std::sync::Arc;

use bitflags::bitflags;

/// The context of every device with extents: which ranges are holes and which read as zeroes (NBD's
/// document, "Metadata contexts").
pub const BASE_ALLOCATION: &str = "base:allocation";
/// The beginning of the metadata contexts of dirty bitmaps, as QEMU names them; the name of the bitmap follows.
pub const BITMAP_CONTEXT: &str = "qemu:dirty-bitmap:";

/// Identifies a file: its device and inode numbers; for a block device its own number and 0.
pub type FileId = (u64, u64);

/// The facts of a device, determined when it was opened.
#[derive(Debug, Clone)]
pub struct Facts {
    /// For messages: what the user typed, shortened, without secrets.
    pub name: Arc<str>,
    /// For users: what the device contains; may be empty.
    pub description: String,
    /// Size in bytes, at most 2^63 - 1.
    pub size: u64,
    /// For a device that becomes longer as it is written: its length in bytes when it was opened.
    /// `size` is then the most that it can have, and what was never written reads as zeroes.
    pub grows_from: Option<u64>,
    /// Limits on offsets and lengths.
    pub block: BlockSizes,
    /// Length of the partial block at the end, if the size is not a multiple of the minimum block
    /// and `emulate` supplies smaller ones. The device may refuse requests for it.
    pub tail: u32,
    /// Block sizes that servers advertise instead of `block`, as set by a plugin or a layer.
    pub advertised: Option<BlockSizes>,
    /// Abilities.
    pub can: Can,
    /// Abilities among `can` that are emulated.
    pub emulated: Can,
    /// Abilities among `can` that servers do not advertise, because a layer hides them; callers in
    /// this program may use them.
    pub withheld: Can,
    /// Seeking costs time.
    pub rotational: bool,
    /// The whole device reads as zeroes, because it was just created that way.
    pub zeroed: bool,
    /// A second handle at the same time does more harm than good: its connection passes a program, such as an
    /// HTTP server, that may start a server for each connection, and nothing promises that both show one device.
    /// Callers use one, unless their user names a number.
    pub one_handle: bool,
    /// Written data is lost when the program ends that opened the device, whatever is flushed.
    pub temporary: bool,
    /// What was written exists only after a flush: an object of a store that is uploaded. A caller flushes once, after
    /// its last write.
    pub flush_publishes: bool,
    /// What no flush has covered is lost when the program ends, as it is in memory of the program. A caller flushes after
    /// its last write, and its work has failed if the flush fails.
    pub loses_unflushed: bool,
    /// Payloads of writes that are parked in the kernel ([`blockhaul_io::ParkedPayload`]) are moved on
    /// without a copy: callers that do not inspect the bytes should park them.
    pub takes_parked: bool,
    /// Reads take their memory when the reply arrives ([`blockhaul_io::Reservation::claim`]), so
    /// that late reservations suffice.
    pub claims_room: bool,
    /// The storage behind the device implements sentence 11 of the contract itself, across all its
    /// handles: a caller with several handles need not compare their flushes ([`crate::Flushes`]).
    pub flush_failures_stay: bool,
    /// Bytes of requests worth keeping in flight for one client; none: the caller chooses.
    pub in_flight: Option<u64>,
    /// Granularity in bytes in which storage is allocated and freed; a power of two, at least 1.
    pub allocation_unit: u32,
    /// A write of a part of a block of this many bytes rewrites the block: two handles must not do
    /// that to the same block at a time. A power of two, at least 1.
    pub rewrite_unit: u32,
    /// Whether written data is stored compressed.
    pub compression: Compression,
    /// Names the contents, where the storage has names for contents that never change, such as an entity tag or the
    /// identifier of a snapshot: a device with the same description and another version has other contents.
    pub version: Option<Arc<str>>,
    /// The local files and block devices that contain the device's bytes, or parts of them. An object in an object
    /// store has a number, too, which is a digest of its address.
    pub files: Vec<FileId>,
    /// Names of the contexts available for extents; at most [`ContextSet::MAX`].
    // nbd: meta.name
    pub contexts: Vec<String>,
}

impl Facts {
    /// The facts of a writable device in memory, as a base for others.
    pub fn new(name: impl Into<Arc<str>>, size: u64) -> Facts {
        Facts {
            name: name.into(),
            description: String::new(),
            size,
            grows_from: None,
            block: BlockSizes::default(),
            tail: 0,
            advertised: None,
            can: Can::WRITE,
            emulated: Can::empty(),
            withheld: Can::empty(),
            rotational: false,
            zeroed: false,
            one_handle: false,
            temporary: false,
            flush_publishes: false,
            loses_unflushed: false,
            takes_parked: false,
            claims_room: false,
            flush_failures_stay: false,
            in_flight: None,
            allocation_unit: 4096,
            rewrite_unit: 1,
            compression: Compression::None,
            version: None,
            files: Vec::new(),
            contexts: Vec::new(),
        }
    }

    /// The facts of a layer over a device with these facts, for layers that change, store or
    /// relocate data.
    ///
    /// Inherits abilities, sizes and identity, but no promises about memory, about the path of
    /// requests or about all content ([`Hints`]): a layer that forgets to keep a hint is slower,
    /// and never loses data. It keeps those that it honours with [`Facts::keeping`].
    pub fn over(below: &Facts) -> Facts {
        Facts {
            grows_from: None,
            can: below.can - Can::EXTENTS,
            emulated: below.emulated - Can::EXTENTS,
            withheld: below.withheld - Can::EXTENTS,
            zeroed: false,
            takes_parked: false,
            claims_room: false,
            flush_failures_stay: false,
            in_flight: None,
            compression: Compression::None,
            contexts: Vec::new(),
            ..below.clone()
        }
    }

    /// The facts of a layer over a device with these facts, for layers that pass each request on
    /// unchanged: same offsets, same payload, same memory. It may refuse, delay, count and record
    /// requests, and hide abilities.
    pub fn same(below: &Facts) -> Facts {
        below.clone()
    }

    /// The same with these hints of the device below.
    #[must_use]
    pub fn keeping(mut self, below: &Facts, hints: Hints) -> Facts {
        if hints.contains(Hints::ZEROED) {
            self.zeroed = below.zeroed;
        }
        if hints.contains(Hints::TAKES_PARKED) {
            self.takes_parked = below.takes_parked;
        }
        if hints.contains(Hints::CLAIMS_ROOM) {
            self.claims_room = below.claims_room;
        }
        if hints.contains(Hints::FLUSH_FAILURES_STAY) {
            self.flush_failures_stay = below.flush_failures_stay;
        }
        if hints.contains(Hints::IN_FLIGHT) {
            self.in_flight = below.in_flight;
        }
        if hints.contains(Hints::EXTENTS) {
            self.can |= below.can & Can::EXTENTS;
            self.emulated |= below.emulated & Can::EXTENTS;
            self.withheld |= below.withheld & Can::EXTENTS;
            self.contexts.clone_from(&below.contexts);
        }
        self
    }

    /// All contexts of the device.
    pub fn all_contexts(&self) -> ContextSet {
        (0..self.contexts.len()).fold(ContextSet::empty(), ContextSet::with)
    }

    /// The block sizes that servers advertise: [`Facts::advertised`], or else the device's own,
    /// without a maximum if that is the default.
    pub fn advertised_or_own(&self) -> BlockSizes {
        self.advertised.unwrap_or_else(|| {
            let unbounded = self.block.maximum >= BlockSizes::default().maximum;
            let maximum = if unbounded { u32::MAX } else { self.block.maximum };
            BlockSizes { maximum, ..self.block }
        })
    }

    /// Makes servers advertise `block` as the preferred block size, unless it exceeds the maximum
    /// request. `block` is a power of two, at least 512.
    pub fn prefer(&mut self, block: u32) {
        let sizes = self.advertised_or_own();
        if sizes.maximum >= block {
            self.advertised = Some(BlockSizes { preferred: sizes.preferred.max(block), ..sizes });
        }
    }

    /// The context of this name.
    pub fn context(&self, name: &str) -> Option<ContextSet> {
        let index = self.contexts.iter().position(|context| context == name)?;
        Some(ContextSet::empty().with(index))
    }
}

/// Which written data a device stores compressed. The number is the unit in bytes, a power of two:
/// whole, aligned units are compressed, and the last one of the device, which may be short.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Compression {
    /// None.
    #[default]
    None,
    /// That of writes with [`RequestFlags::COMPRESS`](crate::RequestFlags::COMPRESS).
    Asked(u32),
    /// That of all writes.
    All(u32),
}

impl Compression {
    /// The unit in bytes, if the device can compress.
    pub fn unit(self) -> Option<u32> {
        match self {
            Compression::None => None,
            Compression::Asked(unit) | Compression::All(unit) => Some(unit),
        }
    }
}

/// Limits on offsets and lengths, in bytes (NBD's document, "Block size constraints").
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockSizes {
    /// Offsets and lengths are multiples of this; a power of two, 1 to 65536. If the size is not a
    /// multiple, a request that ends at the end of the device has another length.
    pub minimum: u32,
    /// Aligned requests of multiples of this need no extra work; a power of two, at least 512.
    pub preferred: u32,
    /// Longest read or write in bytes.
    pub maximum: u32,
}

impl BlockSizes {
    /// Sizes that a plugin or script declares; none if they are invalid. The rules are nbdkit's for
    /// plugins: `maximum` is a multiple of `minimum`, or all ones, for no maximum.
    pub fn declared(minimum: u32, preferred: u32, maximum: u32) -> Option<BlockSizes> {
        let fine = (1..=65536).contains(&minimum)
            && minimum.is_power_of_two()
            && (512..=32 << 20).contains(&preferred)
            && preferred.is_power_of_two()
            && minimum <= preferred
            && (maximum == u32::MAX || maximum.is_multiple_of(minimum) && maximum >= preferred);
        fine.then_some(BlockSizes { minimum, preferred, maximum })
    }

    /// Whether a range of a device of `size` bytes complies with the minimum: the partial block at
    /// the end is reached by one shorter request (the proposal for NBD of 2025-05-31).
    pub fn fits(self, at: u64, len: u64, size: u64) -> bool {
        let minimum = u64::from(self.minimum.max(1));
        let whole = len.is_multiple_of(minimum) || at.checked_add(len) == Some(size);
        at.is_multiple_of(minimum) && whole
    }

    /// The same with a minimum that divides `size`. Clients cannot use others: libnbd refuses
    /// requests for the partial block at the end, and QEMU 10.0 aborts.
    #[must_use]
    pub fn dividing(self, size: u64) -> BlockSizes {
        let largest = if size == 0 { self.minimum } else { 1 << size.trailing_zeros().min(16) };
        BlockSizes { minimum: self.minimum.min(largest), ..self }
    }

    /// The sizes to enforce for a plugin that reports these for `size` bytes. To clients of a server
    /// they are only advertised, as in nbdkit: their requests reach the plugin unchanged, unless the
    /// advertised minimum is [smaller](BlockSizes::dividing). Requests of this program comply with
    /// them.
    #[must_use]
    pub fn enforced(self, served: bool, size: u64) -> BlockSizes {
        let usual = BlockSizes::default();
        if served && self.dividing(size) == self {
            BlockSizes { preferred: self.preferred, ..usual }
        } else {
            BlockSizes { maximum: self.maximum.min(usual.maximum).max(self.preferred), ..self }
        }
    }
}

impl Default for BlockSizes {
    /// Bytes, pages, and 64 MiB, the largest maximum among servers.
    fn default() -> BlockSizes {
        BlockSizes { minimum: 1, preferred: 4096, maximum: 64 << 20 }
    }
}

bitflags! {
    /// Abilities. Reading is always possible.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash)]
    pub struct Can: u16 {
        /// Write.
        const WRITE = 1 << 0;
        /// Flush makes a difference.
        const FLUSH = 1 << 1;
        /// `RequestFlags::FUA` on all requests that change data.
        const FUA = 1 << 2;
        /// Trim.
        const TRIM = 1 << 3;
        /// Zero without a payload.
        const ZERO = 1 << 4;
        /// `RequestFlags::FAST` is supported: zeroing is fast, or fails at once.
        const FAST_ZERO = 1 << 5;
        /// Cache.
        const CACHE = 1 << 6;
        /// Extents, in each context of [`Facts::contexts`]: [`BASE_ALLOCATION`] has the holes and zeroes.
        const EXTENTS = 1 << 7;
        /// A flush on one handle covers completed writes of all handles on the same storage.
        const MULTI_CONN = 1 << 8;
    }
}

impl Can {
    /// Everything that is meaningless without writing.
    pub const CHANGES: Can =
        Can::WRITE.union(Can::FUA).union(Can::TRIM).union(Can::ZERO).union(Can::FAST_ZERO);
}

bitflags! {
    /// Facts that promise something about memory, about the path of requests or about all content,
    /// so that callers save work. A layer keeps one only if it honours it ([`Facts::keeping`]).
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub struct Hints: u8 {
        /// [`Facts::zeroed`]: for layers through which zeroes read as zeroes.
        const ZEROED = 1 << 0;
        /// [`Facts::takes_parked`]: for layers that do not inspect written data.
        const TAKES_PARKED = 1 << 1;
        /// [`Facts::claims_room`]: for layers that pass on the reservation of each read, or claim
        /// it themselves when the data arrives.
        const CLAIMS_ROOM = 1 << 2;
        /// [`Facts::flush_failures_stay`]: for layers whose flush and FUA requests are those of the
        /// device below.
        const FLUSH_FAILURES_STAY = 1 << 3;
        /// [`Facts::in_flight`].
        const IN_FLIGHT = 1 << 4;
        /// [`Can::EXTENTS`] and [`Facts::contexts`]: for layers that support all of them.
        const EXTENTS = 1 << 5;
    }
}

/// A set of contexts, by their index in [`Facts::contexts`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash)]
pub struct ContextSet(u64);

impl ContextSet {
    /// Maximum number of contexts of one device: more than any peer offers, and a set is one word.
    pub const MAX: usize = 64;

    /// No context.
    pub const fn empty() -> ContextSet {
        ContextSet(0)
    }

    /// The context at index 0: `base:allocation` on devices that have it.
    pub const fn first() -> ContextSet {
        ContextSet(1)
    }

    /// This set and the context at `index`; ignores indexes from [`ContextSet::MAX`] on.
    #[must_use]
    pub const fn with(self, index: usize) -> ContextSet {
        if index < Self::MAX { ContextSet(self.0 | 1 << index) } else { self }
    }

    /// Whether the context at `index` is in it.
    pub const fn contains(self, index: usize) -> bool {
        index < Self::MAX && self.0 & (1 << index) != 0
    }

    /// Number of contexts.
    pub const fn count(self) -> usize {
        self.0.count_ones() as usize
    }

    /// Whether the set is empty.
    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// Whether all of `other` are in it.
    pub const fn includes(self, other: ContextSet) -> bool {
        other.0 & !self.0 == 0
    }

    /// The indexes, ascending.
    pub fn iter(self) -> impl Iterator<Item = usize> {
        (0..Self::MAX).filter(move |&index| self.contains(index))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_partial_block_at_the_end_is_part_of_no_other_request() {
        let block = BlockSizes { minimum: 4096, ..BlockSizes::default() };
        for (at, len, fits) in [
            (0, 4096, true),
            (0, 5000, true),
            (4096, 904, true),
            (0, 4999, false),
            (4096, 903, false),
            (4097, 903, false),
            (u64::MAX - 4095, 904, false),
        ] {
            assert_eq!(block.fits(at, len, 5000), fits, "{len} at {at}");
        }
    }

    #[test]
    fn an_advertised_minimum_divides_the_size() {
        let block = BlockSizes { minimum: 4096, ..BlockSizes::default() };
        for (size, minimum) in
            [(0, 4096), (1 << 20, 4096), ((1 << 20) + 512, 512), (1_049_276, 4), (4097, 1)]
        {
            assert_eq!(block.dividing(size).minimum, minimum, "{size}");
            let free = block.enforced(true, size).minimum == 1;
            assert_eq!((free, block.enforced(false, size)), (minimum == 4096, block), "{size}");
        }
    }
}
