//! A split virtqueue ("Split Virtqueues" in the VIRTIO specification, version 1.2, section 2.7).
//!
//! The driver lends the device chains of descriptors by their first number in the *available* ring,
//! and the device gives them back in the *used* ring. Numbers are little endian.

use std::fmt;
use std::sync::atomic::{Ordering, fence};

use vm_memory::{Bytes as _, GuestAddress, GuestMemoryBackend as _};

use crate::memory::{LOST, Memory};

/// Maximum number of queues; QEMU makes one for each processor of the guest.
pub(crate) const QUEUES_MAX: u16 = 64;
/// Maximum number of descriptors of a ring; QEMU's is the same.
pub(crate) const SIZE_MAX: u16 = 1024;

/// The device need not be notified (VIRTQ_USED_F_NO_NOTIFY).
const NO_KICK: u16 = 1;
/// The driver need not be notified (VIRTQ_AVAIL_F_NO_INTERRUPT).
const NO_CALL: u16 = 1;

/// Where the parts of a ring are for the guest.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RingLayout {
    pub(crate) size: u16,
    pub(crate) descriptors: GuestAddress,
    pub(crate) available: GuestAddress,
    pub(crate) used: GuestAddress,
    /// Notifications are wanted from a position on (VIRTIO_F_EVENT_IDX).
    pub(crate) event_idx: bool,
}

/// The ring cannot be used any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RingError {
    /// Its size is no power of two, or too large.
    Size(u16),
    /// A part is not in memory, or not aligned.
    Place,
    /// More is available than the ring has.
    Overrun,
    /// A descriptor that it does not have.
    Head(u16),
    /// The memory has lost pages.
    Lost,
}

impl fmt::Display for RingError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            RingError::Size(size) => write!(f, "a ring of {size} descriptors"),
            RingError::Place => f.write_str("a part of the ring is not in the guest's memory"),
            RingError::Overrun => f.write_str("more requests than the ring holds"),
            RingError::Head(head) => write!(f, "descriptor {head} is not in the ring"),
            RingError::Lost => f.write_str(LOST),
        }
    }
}

/// The device's end of a ring.
pub(crate) struct Ring {
    layout: RingLayout,
    /// Position of the next chain to take.
    next_available: u16,
    /// Position of the next chain to give back.
    next_used: u16,
    /// `next_used` when the driver was last asked whether to notify it.
    asked_at: u16,
}

impl Ring {
    /// A ring from position `base` on.
    pub(crate) fn new(layout: RingLayout, base: u16, memory: &Memory) -> Result<Ring, RingError> {
        let RingLayout { size, descriptors, available, used, .. } = layout;
        if !size.is_power_of_two() || size > SIZE_MAX {
            return Err(RingError::Size(size));
        }
        let count = usize::from(size);
        for (at, align, len) in
            [(descriptors, 16, 16 * count), (available, 2, 6 + 2 * count), (used, 4, 6 + 8 * count)]
        {
            if !at.0.is_multiple_of(align) || !memory.check_range(at, len) {
                return Err(RingError::Place);
            }
        }
        let mut ring = Ring { layout, next_available: base, next_used: 0, asked_at: 0 };
        ring.next_used = ring.used_index(memory)?;
        ring.asked_at = ring.next_used;
        Ok(ring)
    }

    /// Position of the next chain to take.
    pub(crate) fn next_available(&self) -> u16 {
        self.next_available
    }

    /// Continues with the chain at this position.
    pub(crate) fn set_next_available(&mut self, position: u16) {
        self.next_available = position;
    }

    /// Position of the next chain to give back.
    pub(crate) fn next_used(&self) -> u16 {
        self.next_used
    }

    /// What the driver sees as `next_used`.
    pub(crate) fn used_index(&self, memory: &Memory) -> Result<u16, RingError> {
        load(memory, self.layout.used, 2, Ordering::Acquire)
    }

    /// Takes the first descriptor of the next chain; none if there is none.
    pub(crate) fn take(&mut self, memory: &Memory) -> Result<Option<u16>, RingError> {
        let RingLayout { size, available, .. } = self.layout;
        let waiting = load(memory, available, 2, Ordering::Acquire)?;
        match waiting.wrapping_sub(self.next_available) {
            0 => return Ok(None),
            count if count > size => return Err(RingError::Overrun),
            _ => {}
        }
        let slot = u64::from(self.next_available % size);
        let head = load(memory, available, 4 + 2 * slot, Ordering::Relaxed)?;
        if head >= size {
            return Err(RingError::Head(head));
        }
        self.next_available = self.next_available.wrapping_add(1);
        Ok(Some(head))
    }

    /// Gives a chain back, in which the device has written `written` bytes. The driver sees it after
    /// [`Ring::publish`].
    pub(crate) fn give_back(
        &mut self,
        memory: &Memory,
        head: u16,
        written: u32,
    ) -> Result<(), RingError> {
        let RingLayout { size, used, .. } = self.layout;
        let slot = u64::from(self.next_used % size);
        let at = used.0.checked_add(4 + 8 * slot).ok_or(RingError::Place)?;
        let element = u64::from(head) | u64::from(written) << 32;
        memory.write_obj(element.to_le_bytes(), GuestAddress(at)).map_err(|_| RingError::Place)?;
        self.next_used = self.next_used.wrapping_add(1);
        Ok(())
    }

    /// Lets the driver see what was given back.
    pub(crate) fn publish(&self, memory: &Memory) -> Result<(), RingError> {
        store(memory, self.layout.used, 2, self.next_used)
    }

    /// Whether the driver wants a notification about what was published since this was asked last.
    pub(crate) fn must_call(&mut self, memory: &Memory) -> Result<bool, RingError> {
        let RingLayout { size, available, event_idx, .. } = self.layout;
        let before = self.asked_at;
        let now = self.next_used;
        self.asked_at = now;
        if before == now {
            return Ok(false);
        }
        // The driver writes what it wants, and then looks for used chains.
        fence(Ordering::SeqCst);
        if !event_idx {
            let flags = load(memory, available, 0, Ordering::Relaxed)?;
            return Ok(flags & NO_CALL == 0);
        }
        let wanted = load(memory, available, 4 + 2 * u64::from(size), Ordering::Relaxed)?;
        let behind = now.wrapping_sub(wanted).wrapping_sub(1);
        Ok(behind < now.wrapping_sub(before))
    }

    /// Asks the driver for a notification about the next chain. Returns whether there is one already.
    pub(crate) fn want_kick(&self, memory: &Memory) -> Result<bool, RingError> {
        let RingLayout { size, available, used, event_idx, .. } = self.layout;
        if event_idx {
            store(memory, used, 4 + 8 * u64::from(size), self.next_available)?;
        } else {
            store(memory, used, 0, 0)?;
        }
        // The driver makes a chain available, and then reads what we want.
        fence(Ordering::SeqCst);
        Ok(load(memory, available, 2, Ordering::Acquire)? != self.next_available)
    }

    /// Tells the driver that no notification is needed for now.
    pub(crate) fn want_no_kick(&self, memory: &Memory) -> Result<(), RingError> {
        if self.layout.event_idx {
            // The position that was asked for is passed already.
            Ok(())
        } else {
            store(memory, self.layout.used, 0, NO_KICK)
        }
    }
}

fn load(memory: &Memory, at: GuestAddress, offset: u64, order: Ordering) -> Result<u16, RingError> {
    let at = at.0.checked_add(offset).ok_or(RingError::Place)?;
    let value: u16 = memory.load(GuestAddress(at), order).map_err(|_| RingError::Place)?;
    Ok(u16::from_le(value))
}

fn store(memory: &Memory, at: GuestAddress, offset: u64, value: u16) -> Result<(), RingError> {
    let at = at.0.checked_add(offset).ok_or(RingError::Place)?;
    let stored = memory.store(value.to_le(), GuestAddress(at), Ordering::Release);
    stored.map_err(|_| RingError::Place)
}
