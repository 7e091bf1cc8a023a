//! The memory of the guest, in regions that the front end passes as files.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::sync::{Arc, RwLock};

use blockhaul_io::{Notify, plain};
use blockhaul_os::PeerMemory;
use vm_memory::bitmap::BS;
use vm_memory::guest_memory::Result as AccessResult;
use vm_memory::{
    Address as _, GuestAddress, GuestMemoryRegion, GuestMemoryRegionBytes, GuestRegionCollection,
    GuestUsize, MemoryRegionAddress, VolatileMemory as _, VolatileSlice,
};

use crate::protocol::Region;

/// The memory of the guest as it is at a moment.
pub(crate) type Memory = GuestRegionCollection<GuestRegion>;

/// Maximum number of regions. QEMU has up to 512 slots of memory.
pub(crate) const REGIONS_MAX: usize = 512;

/// Why a session ends whose memory has lost pages.
pub(crate) const LOST: &str =
    "the front end has made the memory that it shares shorter: its pages are lost";

/// A region of the guest's memory, which the front end may make shorter.
pub(crate) struct GuestRegion {
    memory: PeerMemory,
    start: GuestAddress,
}

impl GuestMemoryRegion for GuestRegion {
    type B = ();

    fn len(&self) -> GuestUsize {
        self.memory.region().size() as u64
    }

    fn start_addr(&self) -> GuestAddress {
        self.start
    }

    fn bitmap(&self) -> BS<'_, ()> {}

    fn get_slice(
        &self,
        offset: MemoryRegionAddress,
        count: usize,
    ) -> AccessResult<VolatileSlice<'_>> {
        let offset = usize::try_from(offset.raw_value()).unwrap_or(usize::MAX);
        Ok(self.memory.region().get_slice(offset, count)?)
    }
}

impl GuestMemoryRegionBytes for GuestRegion {}

/// The memory of the guest as it is now, for all queues, and whether pages of it, or of the table of
/// requests, are lost: then accesses see zeroes, and nothing of it counts any more.
#[derive(Default)]
pub(crate) struct GuestSpace {
    now: RwLock<Arc<Memory>>,
    lost: Arc<AtomicBool>,
    noticed: Notify,
}

impl GuestSpace {
    pub(crate) fn now(&self) -> Arc<Memory> {
        self.now.read().expect("no panic under this lock").clone()
    }

    fn set(&self, memory: Memory) {
        *self.now.write().expect("no panic under this lock") = Arc::new(memory);
    }

    /// Becomes true when pages are lost.
    pub(crate) fn lost(&self) -> Arc<AtomicBool> {
        self.lost.clone()
    }

    /// Whether pages are lost: of what was read before, nothing counts.
    pub(crate) fn is_lost(&self) -> bool {
        fence(Ordering::SeqCst);
        self.lost.load(Ordering::SeqCst)
    }

    /// Ends the session, because pages are lost.
    pub(crate) fn end(&self) {
        self.noticed.notify();
    }

    /// Waits for [`GuestSpace::end`].
    pub(crate) async fn ended(&self) {
        loop {
            let noticed = self.noticed.listen();
            if self.is_lost() {
                return;
            }
            // It is completed, as this holds the other end.
            let _ = noticed.await;
        }
    }
}

/// The regions, which only the session of the front end changes.
#[derive(Default)]
pub(crate) struct Regions {
    mapped: Vec<(Region, Arc<GuestRegion>)>,
    space: Arc<GuestSpace>,
}

impl Regions {
    /// What they make up together.
    pub(crate) fn space(&self) -> &Arc<GuestSpace> {
        &self.space
    }

    /// Replaces all regions.
    ///
    /// # Errors
    /// If one cannot be mapped, or two overlap; then nothing changes.
    pub(crate) fn replace(&mut self, regions: &[Region], fds: Vec<OwnedFd>) -> Result<(), String> {
        if regions.len() != fds.len() {
            return Err(format!("{} descriptors for {} regions", fds.len(), regions.len()));
        }
        let mapped = regions.iter().zip(fds).map(|(region, fd)| self.map(*region, fd));
        let mapped = mapped.collect::<Result<Vec<_>, _>>()?;
        self.change(mapped)
    }

    /// Adds a region.
    ///
    /// # Errors
    /// As for [`Regions::replace`], and if there are too many.
    pub(crate) fn add(&mut self, region: Region, fd: OwnedFd) -> Result<(), String> {
        if self.mapped.len() >= REGIONS_MAX {
            return Err(format!("more than {REGIONS_MAX} memory regions"));
        }
        let mut mapped = self.mapped.clone();
        mapped.push(self.map(region, fd)?);
        self.change(mapped)
    }

    /// Removes a region. Requests in flight keep it until they end.
    ///
    /// # Errors
    /// If it is not there.
    pub(crate) fn remove(&mut self, region: Region) -> Result<(), String> {
        let same = |other: &Region| {
            (other.guest, other.len, other.user) == (region.guest, region.len, region.user)
        };
        let Some(index) = self.mapped.iter().position(|(other, _)| same(other)) else {
            return Err("a memory region that is not there".into());
        };
        let mut mapped = self.mapped.clone();
        mapped.remove(index);
        self.change(mapped)
    }

    /// Maps a region.
    fn map(&self, region: Region, fd: OwnedFd) -> Result<(Region, Arc<GuestRegion>), String> {
        let Region { guest, len, user, offset } = region;
        let size = usize::try_from(len).map_err(|_| format!("a memory region of {len} bytes"))?;
        let fits = |start: u64| start.checked_add(len).is_some();
        if size == 0 || !fits(guest) || !fits(user) || !fits(offset) {
            return Err(format!("a memory region of {len} bytes at {guest:#x}"));
        }
        let memory = PeerMemory::map(fd, offset, size, self.space.lost()).map_err(|error| {
            format!("cannot map {len} bytes of the guest's memory: {}", plain(&error))
        })?;
        Ok((region, Arc::new(GuestRegion { memory, start: GuestAddress(guest) })))
    }

    fn change(&mut self, mut mapped: Vec<(Region, Arc<GuestRegion>)>) -> Result<(), String> {
        mapped.sort_by_key(|(region, _)| region.guest);
        let memory = if mapped.is_empty() {
            Memory::new()
        } else {
            let regions = mapped.iter().map(|(_, mapped)| mapped.clone()).collect();
            Memory::from_arc_regions(regions).map_err(|error| error.to_string())?
        };
        self.mapped = mapped;
        self.space.set(memory);
        Ok(())
    }

    /// The guest's address of an address in the front end.
    pub(crate) fn to_guest(&self, user: u64) -> Option<GuestAddress> {
        self.mapped.iter().find_map(|(region, _)| {
            let at = user.checked_sub(region.user).filter(|&at| at < region.len)?;
            region.guest.checked_add(at).map(GuestAddress)
        })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
pub(crate) mod tests {
    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
    use vm_memory::Bytes as _;

    use super::*;

    pub(crate) fn file(len: u64) -> OwnedFd {
        let file = memfd_create("test", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&file, len).unwrap();
        file
    }

    fn region(guest: u64, len: u64) -> Region {
        Region { guest, len, user: guest + 0x7000_0000, offset: 0 }
    }

    #[test]
    fn regions_are_found_by_both_addresses() {
        let mut regions = Regions::default();
        let both = [region(0x10_0000, 0x2000), region(0, 0x1000)];
        regions.replace(&both, vec![file(0x2000), file(0x1000)]).unwrap();
        assert_eq!(regions.to_guest(0x7010_1fff), Some(GuestAddress(0x10_1fff)));
        assert_eq!(regions.to_guest(0x7010_2000), None);
        assert_eq!(regions.to_guest(0), None);
        let before = regions.space().now();
        before.write_obj(7_u32, GuestAddress(0x10_0000)).unwrap();
        regions.remove(region(0x10_0000, 0x2000)).unwrap();
        assert!(regions.space().now().read_obj::<u32>(GuestAddress(0x10_0000)).is_err());
        assert_eq!(before.read_obj::<u32>(GuestAddress(0x10_0000)).unwrap(), 7, "it is kept");
        regions.remove(region(0x10_0000, 0x2000)).unwrap_err();
    }

    #[test]
    fn impossible_regions_are_refused_and_change_nothing() {
        let mut regions = Regions::default();
        regions.replace(&[region(0, 0x1000)], vec![file(0x1000)]).unwrap();
        for (bad, size) in [
            (region(0x800, 0x1000), 0x1000),
            (region(0x1000, 0), 0x1000),
            (Region { guest: u64::MAX, ..region(0, 0x1000) }, 0x1000),
            (Region { user: u64::MAX, ..region(0x1000, 0x1000) }, 0x1000),
            (Region { offset: u64::MAX, ..region(0x1000, 0x1000) }, 0x1000),
            (region(0x1000, u64::MAX - 0x1000), 0x1000),
            (region(0x1000, 0x1001), 0x1000),
            (Region { offset: 0x1000, ..region(0x1000, 0x1000) }, 0x1000),
        ] {
            assert!(regions.add(bad, file(size)).is_err(), "{bad:?}");
        }
        regions.replace(&[region(0, 0x1000)], Vec::new()).unwrap_err();
        assert_eq!(regions.to_guest(0x7000_0000), Some(GuestAddress(0)));
        regions.add(region(0x1000, 0x1000), file(0x1000)).unwrap();
    }
}
