//! The table of requests in flight, in memory that the front end keeps: a server that is started again
//! learns from it which requests the one before had taken and not given back ("Inflight I/O tracking"
//! in the specification of vhost-user, for split virtqueues).

use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use blockhaul_os::PeerMemory;
use rustix::fs::{MemfdFlags, SealFlags};
use vm_memory::{AtomicAccess, Bytes as _, VolatileMemory as _};

use crate::protocol;
use crate::ring::{QUEUES_MAX, SIZE_MAX};

/// Length of the part of a queue in bytes, before its descriptors.
const HEAD: usize = 16;
/// Length of the state of a descriptor in bytes.
const STATE: usize = 16;
/// Parts of queues begin at multiples of this, in bytes.
const ALIGN: usize = 64;
/// The version of this layout.
const VERSION: u16 = 1;

// Offsets in the part of a queue, and in the state of a descriptor.
const AT_VERSION: usize = 8;
const AT_SIZE: usize = 10;
const AT_LAST: usize = 12;
const AT_USED: usize = 14;
const STATE_IN_FLIGHT: usize = 0;
const STATE_NEXT: usize = 6;
const STATE_COUNTER: usize = 8;

/// Length of the part of a queue of this size, in bytes.
fn part(queue_size: u16) -> usize {
    (HEAD + STATE * usize::from(queue_size)).next_multiple_of(ALIGN)
}

/// The table of all queues.
pub(crate) struct InFlightTable {
    mapping: Arc<PeerMemory>,
    queues: u16,
    queue_size: u16,
}

/// Makes a file for a table.
///
/// # Errors
/// If there are too many queues, or no memory.
pub(crate) fn create(
    asked: &protocol::InFlightRegion,
) -> Result<(protocol::InFlightRegion, OwnedFd), String> {
    let len = needed(asked)?;
    let made = || {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = rustix::fs::memfd_create("blockhaul-requests", flags)?;
        rustix::fs::ftruncate(&file, len)?;
        rustix::fs::fcntl_add_seals(file.as_fd(), SealFlags::SHRINK | SealFlags::GROW)?;
        Ok(file)
    };
    let file = made().map_err(|error: rustix::io::Errno| error.to_string())?;
    Ok((protocol::InFlightRegion { len, offset: 0, ..*asked }, file))
}

fn needed(asked: &protocol::InFlightRegion) -> Result<u64, String> {
    let queues = asked.queues;
    let size = asked.queue_size;
    if queues == 0 || queues > QUEUES_MAX || size == 0 || size > SIZE_MAX {
        return Err(format!("a table of {queues} queues with {size} descriptors"));
    }
    Ok((part(size) * usize::from(queues)) as u64)
}

impl InFlightTable {
    /// Maps a table, which may be from an earlier server. `lost` becomes true when it has lost pages.
    ///
    /// # Errors
    /// If it is shorter than its queues need, or cannot be mapped.
    pub(crate) fn open(
        given: &protocol::InFlightRegion,
        fd: OwnedFd,
        lost: Arc<AtomicBool>,
    ) -> Result<InFlightTable, String> {
        let len = needed(given)?;
        if given.len < len {
            return Err(format!("a table of {} bytes, which needs {len}", given.len));
        }
        let size = usize::try_from(len).map_err(|_| "the table is too long".to_string())?;
        let mapping = PeerMemory::map(fd, given.offset, size, lost).map_err(|error| {
            format!("cannot map the table of requests: {}", blockhaul_io::plain(&error))
        })?;
        let queues = given.queues;
        let queue_size = given.queue_size;
        Ok(InFlightTable { mapping: Arc::new(mapping), queues, queue_size })
    }

    /// The part of a queue; none if the table has none for it.
    pub(crate) fn queue(&self, index: u16, size: u16) -> Option<InFlightEntries> {
        let fits = index < self.queues && size <= self.queue_size;
        let start = part(self.queue_size) * usize::from(index);
        fits.then(|| InFlightEntries { mapping: self.mapping.clone(), start, size, counter: 0 })
    }
}

/// The part of one queue.
pub(crate) struct InFlightEntries {
    mapping: Arc<PeerMemory>,
    start: usize,
    size: u16,
    /// Number of the next request.
    counter: u64,
}

impl InFlightEntries {
    fn load<T: AtomicAccess + Default>(&self, at: usize) -> T {
        let slice = self.mapping.region().as_volatile_slice();
        let loaded = slice.load(self.start + at, Ordering::Acquire);
        loaded.expect("inside the mapping, and aligned")
    }

    fn store<T: AtomicAccess>(&self, at: usize, value: T) {
        let slice = self.mapping.region().as_volatile_slice();
        let stored = slice.store(value, self.start + at, Ordering::Release);
        stored.expect("inside the mapping, and aligned");
    }

    fn state(&self, head: u16) -> usize {
        debug_assert!(head < self.size);
        HEAD + STATE * usize::from(head)
    }

    /// The device takes a chain.
    pub(crate) fn begin(&mut self, head: u16) {
        let state = self.state(head);
        self.store(state + STATE_COUNTER, self.counter);
        self.counter = self.counter.wrapping_add(1);
        self.store(state + STATE_IN_FLIGHT, 1_u8);
    }

    /// A chain is in the used ring, which the driver cannot see yet.
    pub(crate) fn giving_back(&self, head: u16) {
        let last: u16 = self.load(AT_LAST);
        self.store(self.state(head) + STATE_NEXT, last);
        self.store(AT_LAST, head);
    }

    /// The driver can see a chain. It may be used again only after this.
    pub(crate) fn given_back(&self, head: u16, used: u16) {
        self.store(self.state(head) + STATE_IN_FLIGHT, 0_u8);
        self.store(AT_USED, used);
    }

    /// What an earlier server had in flight, in the order in which it took it. `used`: the position
    /// that the driver sees.
    pub(crate) fn recover(&mut self, used: u16) -> Vec<u16> {
        if self.load::<u16>(AT_VERSION) != VERSION || self.load::<u16>(AT_SIZE) != self.size {
            self.clear(used);
            return Vec::new();
        }
        self.finish_last(used);
        let mut taken: Vec<(u64, u16)> = (0..self.size)
            .filter(|&head| self.load::<u8>(self.state(head) + STATE_IN_FLIGHT) != 0)
            .map(|head| (self.load(self.state(head) + STATE_COUNTER), head))
            .collect();
        taken.sort_unstable();
        self.counter = taken.last().map_or(0, |(counter, _)| counter.wrapping_add(1));
        taken.into_iter().map(|(_, head)| head).collect()
    }

    /// Chains that the driver has seen, but that are still marked.
    fn finish_last(&self, used: u16) {
        let recorded: u16 = self.load(AT_USED);
        let mut head: u16 = self.load(AT_LAST);
        for _ in 0..used.wrapping_sub(recorded).min(self.size) {
            if head >= self.size {
                break;
            }
            self.store(self.state(head) + STATE_IN_FLIGHT, 0_u8);
            head = self.load(self.state(head) + STATE_NEXT);
        }
        self.store(AT_USED, used);
    }

    fn clear(&mut self, used: u16) {
        for head in 0..self.size {
            self.store(self.state(head) + STATE_IN_FLIGHT, 0_u8);
        }
        self.store(AT_LAST, 0_u16);
        self.store(AT_USED, used);
        self.store(AT_SIZE, self.size);
        self.store(AT_VERSION, VERSION);
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    const ASKED: protocol::InFlightRegion =
        protocol::InFlightRegion { len: 0, offset: 0, queues: 2, queue_size: 8, payload: 20 };

    fn table() -> (InFlightTable, InFlightTable) {
        let (made, file) = create(&ASKED).unwrap();
        let again = file.try_clone().unwrap();
        let open = |file| InFlightTable::open(&made, file, Arc::default()).unwrap();
        (open(file), open(again))
    }

    #[test]
    fn what_was_taken_and_not_given_back_is_recovered_in_order() {
        let (before, after) = table();
        let mut entries = before.queue(1, 8).unwrap();
        assert!(entries.recover(65534).is_empty());
        for head in [5, 3, 0, 7] {
            entries.begin(head);
        }
        entries.giving_back(3);
        entries.given_back(3, 65535);
        // Killed after the driver has seen it, and before it was marked.
        entries.giving_back(0);
        let mut other = after.queue(1, 8).unwrap();
        assert_eq!(other.recover(0), [5, 7]);
        other.begin(3);
        assert_eq!(after.queue(1, 8).unwrap().recover(0), [5, 7, 3]);
        assert!(after.queue(0, 8).unwrap().recover(0).is_empty(), "another queue");
    }

    #[test]
    fn a_table_of_any_content_is_recovered_from() {
        let (made, file) = create(&ASKED).unwrap();
        let mut random = 1_u64;
        for _ in 0..500 {
            let bytes: Vec<u8> = (0..made.len)
                .map(|_| {
                    random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    random.to_le_bytes()[7]
                })
                .collect();
            rustix::io::pwrite(&file, &bytes, 0).unwrap();
            rustix::io::pwrite(&file, &VERSION.to_ne_bytes(), AT_VERSION as u64).unwrap();
            rustix::io::pwrite(&file, &8_u16.to_ne_bytes(), AT_SIZE as u64).unwrap();
            let table =
                InFlightTable::open(&made, file.try_clone().unwrap(), Arc::default()).unwrap();
            let heads = table.queue(0, 8).unwrap().recover(made.queues);
            assert!(heads.len() <= 8 && heads.iter().all(|&head| head < 8));
        }
    }

    #[test]
    fn impossible_tables_are_refused() {
        for (queues, queue_size) in [(0, 8), (u16::MAX, 8), (1, 0), (1, 2048)] {
            create(&protocol::InFlightRegion { queues, queue_size, ..ASKED }).unwrap_err();
        }
        let (made, file) = create(&ASKED).unwrap();
        let short = protocol::InFlightRegion { len: made.len - 1, ..made };
        let open = |table, file: &OwnedFd| {
            InFlightTable::open(table, file.try_clone().unwrap(), Arc::default())
        };
        assert!(open(&short, &file).is_err());
        let beyond = protocol::InFlightRegion { offset: 1 << 40, ..made };
        assert!(open(&beyond, &file).is_err());
        let table = open(&made, &file).unwrap();
        assert!(table.queue(2, 8).is_none() && table.queue(0, 16).is_none());
    }
}
