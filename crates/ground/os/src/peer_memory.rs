//! Mappings of files that other processes have, too, and may make shorter.
//!
//! An access to a page that is not in the file any more raises SIGBUS, which ends a process by default.
//! Here only the mapping is lost: a handler puts zeroes in its place, and its owner is notified by a
//! flag. A SIGBUS elsewhere has the effect that it has without the handler.
#![expect(unsafe_code, reason = "a handler of a signal, and the mappings that it replaces")]

use std::ffi::{c_int, c_void};
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use rustix::fs::SealFlags;
use vm_memory::{FileOffset, MmapRegion};

/// The file system of huge pages (statfs(2)).
const HUGETLBFS: u32 = 0x9584_58f6;

/// A part of a file, mapped for reading and writing.
pub struct PeerMemory {
    // Dropped before the mapping.
    _guard: MappingGuard,
    region: MmapRegion<()>,
}

impl PeerMemory {
    /// Maps `len` bytes of a file from `offset` on. `lost` becomes true when pages of it are missing
    /// at an access, before that access sees zeroes; from then on the memory is none of the file.
    ///
    /// A file that can be sealed cannot be made shorter from here on.
    ///
    /// # Errors
    /// The file is shorter, the part is not one of whole huge pages of a file that consists of these,
    /// or the system refuses the mapping.
    pub fn map(
        file: OwnedFd,
        offset: u64,
        len: usize,
        lost: Arc<AtomicBool>,
    ) -> io::Result<PeerMemory> {
        install()?;
        // Most files cannot be sealed. Before the length is looked at.
        let _ = rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK);
        let held = rustix::fs::fstat(&file)?.st_size;
        let end = offset.checked_add(len as u64);
        if end.is_none_or(|end| u64::try_from(held).map_or(true, |held| end > held)) {
            let text = format!("the file has {held} bytes");
            return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
        }
        let page = page_of(&file)?;
        if page > rustix::param::page_size() && !len.is_multiple_of(page) {
            let text = format!("{len} bytes are not whole pages of {page} bytes");
            return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
        }
        let part = FileOffset::new(File::from(file), offset);
        let region = MmapRegion::from_file(part, len).map_err(io::Error::other)?;
        let guard =
            MappingGuard::new(MappingRange { start: region.as_ptr() as usize, len, page }, lost);
        Ok(PeerMemory { _guard: guard, region })
    }

    /// The mapping.
    pub fn region(&self) -> &MmapRegion<()> {
        &self.region
    }
}

/// Size of the pages of a file in bytes.
fn page_of(file: &OwnedFd) -> io::Result<usize> {
    let about = rustix::fs::fstatfs(file)?;
    // A magic number has 32 bits, whatever type the system uses for it.
    let is_huge = about.f_type as u32 == HUGETLBFS;
    let page = if is_huge { usize::try_from(about.f_bsize).ok() } else { None };
    Ok(page.unwrap_or(0).max(rustix::param::page_size()))
}

/// Addresses of a mapping.
#[derive(Clone, Copy)]
struct MappingRange {
    start: usize,
    /// Not 0.
    len: usize,
    /// Size of its pages.
    page: usize,
}

/// Where the handler finds a mapping. Written under [`REGISTER`] alone.
struct MappingSlot {
    /// Odd while the rest changes.
    version: AtomicUsize,
    start: AtomicUsize,
    /// 0: the slot is free.
    len: AtomicUsize,
    page: AtomicUsize,
    /// What the guard of the mapping holds.
    lost: AtomicPtr<AtomicBool>,
}

const SLOTS: usize = 64;

/// A part of the list of all slots, which grows and is never freed.
struct SlotChunk {
    slots: [MappingSlot; SLOTS],
    next: AtomicPtr<SlotChunk>,
}

impl SlotChunk {
    const fn new() -> SlotChunk {
        let next = AtomicPtr::new(ptr::null_mut());
        SlotChunk { slots: [const { MappingSlot::free() }; SLOTS], next }
    }

    /// All parts, from this one on.
    fn all(&'static self) -> impl Iterator<Item = &'static SlotChunk> {
        std::iter::successors(Some(self), |slots| {
            // SAFETY: null, or a part that is complete and never freed.
            unsafe { slots.next.load(Ordering::SeqCst).as_ref() }
        })
    }
}

static ALL: SlotChunk = SlotChunk::new();
static REGISTER: Mutex<()> = Mutex::new(());

impl MappingSlot {
    const fn free() -> MappingSlot {
        MappingSlot {
            version: AtomicUsize::new(0),
            start: AtomicUsize::new(0),
            len: AtomicUsize::new(0),
            page: AtomicUsize::new(0),
            lost: AtomicPtr::new(ptr::null_mut()),
        }
    }

    fn set(&self, range: MappingRange, lost: *mut AtomicBool) {
        self.version.fetch_add(1, Ordering::SeqCst);
        self.start.store(range.start, Ordering::SeqCst);
        self.len.store(range.len, Ordering::SeqCst);
        self.page.store(range.page, Ordering::SeqCst);
        self.lost.store(lost, Ordering::SeqCst);
        self.version.fetch_add(1, Ordering::SeqCst);
    }

    /// The mapping, if this address is in it. A slot that changes is of another one: whoever uses an
    /// address has its mapping.
    fn find(&self, address: usize) -> Option<(MappingRange, *mut AtomicBool)> {
        let version = self.version.load(Ordering::SeqCst);
        let range = MappingRange {
            start: self.start.load(Ordering::SeqCst),
            len: self.len.load(Ordering::SeqCst),
            page: self.page.load(Ordering::SeqCst),
        };
        let lost = self.lost.load(Ordering::SeqCst);
        let is_stable = version.is_multiple_of(2) && version == self.version.load(Ordering::SeqCst);
        // Accesses end at the end of the last page.
        let len = range.len.checked_next_multiple_of(range.page.max(1))?;
        let is_inside = address.checked_sub(range.start).is_some_and(|at| at < len);
        (is_stable && is_inside).then_some((range, lost))
    }
}

/// The handler knows a mapping, until this is dropped.
struct MappingGuard {
    slot: &'static MappingSlot,
    /// The handler has a pointer to it.
    _lost: Arc<AtomicBool>,
}

impl MappingGuard {
    fn new(range: MappingRange, lost: Arc<AtomicBool>) -> MappingGuard {
        let _register = REGISTER.lock().expect("no panic under this lock");
        let free = |slots: &'static SlotChunk| {
            slots.slots.iter().find(|slot| slot.len.load(Ordering::SeqCst) == 0)
        };
        let slot = ALL.all().find_map(free).unwrap_or_else(|| {
            let more: &'static SlotChunk = Box::leak(Box::new(SlotChunk::new()));
            let last = ALL.all().last().unwrap_or(&ALL);
            last.next.store(ptr::from_ref(more).cast_mut(), Ordering::SeqCst);
            &more.slots[0]
        });
        slot.set(range, Arc::as_ptr(&lost).cast_mut());
        MappingGuard { slot, _lost: lost }
    }
}

impl Drop for MappingGuard {
    fn drop(&mut self) {
        let _register = REGISTER.lock().expect("no panic under this lock");
        self.slot.set(MappingRange { start: 0, len: 0, page: 0 }, ptr::null_mut());
    }
}

/// What SIGBUS did before; null before the handler is installed.
static BEFORE: AtomicPtr<libc::sigaction> = AtomicPtr::new(ptr::null_mut());

type Handler = extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void);

/// Installs the handler, once.
fn install() -> io::Result<()> {
    let _register = REGISTER.lock().expect("no panic under this lock");
    if !BEFORE.load(Ordering::SeqCst).is_null() {
        return Ok(());
    }
    // SAFETY: all zeroes is an action without flags and with an empty mask.
    let [mut before, mut action]: [libc::sigaction; 2] = unsafe { std::mem::zeroed() };
    let handler: Handler = bus_error;
    action.sa_sigaction = handler as usize;
    action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
    // SAFETY: reads the action into a structure of ours.
    if unsafe { libc::sigaction(libc::SIGBUS, ptr::null(), &raw mut before) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // The handler may read it at any time.
    BEFORE.store(Box::leak(Box::new(before)), Ordering::SeqCst);
    // SAFETY: the handler calls async-signal-safe functions only, and what it reads is there.
    if unsafe { libc::sigaction(libc::SIGBUS, &raw const action, ptr::null_mut()) } != 0 {
        BEFORE.store(ptr::null_mut(), Ordering::SeqCst);
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// The handler. Only mmap(2), sigaction(2), raise(3) and plain memory, and no lock.
extern "C" fn bus_error(signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    // SAFETY: the kernel passes a structure that lives as long as this call, with an address if the
    // signal is from an access. The place of errno belongs to this thread.
    unsafe {
        let errno = *libc::__errno_location();
        let is_access = (*info).si_code > 0;
        if !is_access || !replace((*info).si_addr() as usize) {
            proceed(signal, info, context, is_access);
        }
        *libc::__errno_location() = errno;
    }
}

/// Puts zeroes in the place of the mapping with this address, if it is a known one. The access is then
/// repeated.
fn replace(address: usize) -> bool {
    let slots = ALL.all().flat_map(|slots| &slots.slots);
    let mut found = slots.filter_map(|slot| slot.find(address));
    let Some((MappingRange { start, len, page }, lost)) = found.next() else { return false };
    // SAFETY: the guard holds it, and is dropped after the mapping's last user, which this is one of.
    unsafe { (*lost).store(true, Ordering::SeqCst) };
    // Where memory must not be promised beyond what there is, one page at a time.
    place(start, len) || place(address - address % page, page)
}

/// Replaces what is mapped in this range, which is in one mapping.
fn place(start: usize, len: usize) -> bool {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED | libc::MAP_NORESERVE;
    let access = libc::PROT_READ | libc::PROT_WRITE;
    let at = ptr::without_provenance_mut(start);
    // SAFETY: the range belongs to a mapping of `PeerMemory`, whose memory is volatile: other processes
    // may change it at any time, also to zeroes. It is unmapped as before.
    unsafe { libc::mmap(at, len, access, flags, -1, 0) != libc::MAP_FAILED }
}

/// Does what SIGBUS did before.
///
/// # Safety
/// Call it in the handler, with its arguments.
unsafe fn proceed(
    signal: c_int,
    info: *mut libc::siginfo_t,
    context: *mut c_void,
    is_access: bool,
) {
    // SAFETY: filled before the handler was installed, and never freed.
    let before = unsafe { &*BEFORE.load(Ordering::SeqCst) };
    match before.sa_sigaction {
        libc::SIG_IGN if !is_access => return,
        // When this returns, the access is repeated, and has the default effect.
        libc::SIG_DFL | libc::SIG_IGN => set_default(signal),
        // SAFETY: the flag says which type the function has.
        handler => unsafe {
            if before.sa_flags & libc::SA_SIGINFO != 0 {
                std::mem::transmute::<usize, Handler>(handler)(signal, info, context);
            } else {
                std::mem::transmute::<usize, extern "C" fn(c_int)>(handler)(signal);
            }
        },
    }
    // One that a process has sent does not come again by itself.
    if !is_access && is_default(signal) {
        // SAFETY: it is delivered when the handler returns.
        unsafe { libc::raise(signal) };
    }
}

fn set_default(signal: c_int) {
    // SAFETY: all zeroes is the default action, without flags.
    unsafe {
        let action: libc::sigaction = std::mem::zeroed();
        libc::sigaction(signal, &raw const action, ptr::null_mut());
    }
}

fn is_default(signal: c_int) -> bool {
    // SAFETY: reads the action into a structure of ours.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        libc::sigaction(signal, ptr::null(), &raw mut action) == 0
            && action.sa_sigaction == libc::SIG_DFL
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::os::unix::process::ExitStatusExt as _;
    use std::process::Command;

    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
    use vm_memory::{Bytes as _, VolatileMemory as _};

    use super::*;

    const LEN: usize = 64 << 10;

    fn file(flags: MemfdFlags) -> OwnedFd {
        let file = memfd_create("test", MemfdFlags::CLOEXEC | flags).unwrap();
        ftruncate(&file, LEN as u64).unwrap();
        file
    }

    fn mapped(file: &OwnedFd) -> (PeerMemory, Arc<AtomicBool>) {
        let lost = Arc::new(AtomicBool::new(false));
        (PeerMemory::map(file.try_clone().unwrap(), 0, LEN, lost.clone()).unwrap(), lost)
    }

    #[test]
    fn a_mapping_that_loses_its_pages_is_lost_alone() {
        // More than one part of the list.
        let all: Vec<_> = (0..2 * SLOTS + 3)
            .map(|_| {
                let file = file(MemfdFlags::empty());
                let (memory, lost) = mapped(&file);
                (file, memory, lost)
            })
            .collect();
        for (index, (file, memory, lost)) in all.iter().enumerate() {
            let bytes = memory.region().as_volatile_slice();
            bytes.write_obj(7_u64, LEN - 8).unwrap();
            if index % 2 == 1 {
                ftruncate(file, 4096).unwrap();
                assert!(!lost.load(Ordering::SeqCst));
                assert_eq!(bytes.read_obj::<u64>(LEN - 8).unwrap(), 0);
                bytes.write_obj(8_u64, 0).unwrap();
            }
            assert_eq!(lost.load(Ordering::SeqCst), index % 2 == 1, "{index}");
        }
        for (index, (_, memory, lost)) in all.iter().enumerate() {
            let bytes = memory.region().as_volatile_slice();
            let held = if index % 2 == 1 { 0 } else { 7 };
            assert_eq!(bytes.read_obj::<u64>(LEN - 8).unwrap(), held);
            assert_eq!(lost.load(Ordering::SeqCst), index % 2 == 1, "{index}");
        }
    }

    #[test]
    fn a_file_that_can_be_sealed_keeps_its_pages() {
        let file = file(MemfdFlags::ALLOW_SEALING);
        let (memory, lost) = mapped(&file);
        ftruncate(&file, 0).unwrap_err();
        memory.region().as_volatile_slice().write_obj(7_u64, LEN - 8).unwrap();
        assert!(!lost.load(Ordering::SeqCst));
    }

    #[test]
    fn a_part_beyond_the_file_is_refused() {
        let file = file(MemfdFlags::empty());
        for (offset, len) in [(4096, LEN), (u64::MAX, LEN), (0, LEN + 1)] {
            let map = PeerMemory::map(file.try_clone().unwrap(), offset, len, Arc::default());
            assert!(map.is_err(), "{len} bytes at {offset}");
        }
    }

    /// In a process of its own: by name, with an access of its own kind.
    fn ends_with(test: &str) -> Option<i32> {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", &format!("peer_memory::tests::{test}")]);
        command.env("BLOCKHAUL_BUS_ERROR", "1").output().unwrap().status.signal()
    }

    fn is_child() -> bool {
        std::env::var_os("BLOCKHAUL_BUS_ERROR").is_some()
    }

    #[test]
    fn an_access_to_another_mapping_ends_the_process() {
        if !is_child() {
            let test = "an_access_to_another_mapping_ends_the_process";
            return assert_eq!(ends_with(test), Some(libc::SIGBUS));
        }
        let one = file(MemfdFlags::empty());
        let _known = mapped(&one);
        let other = file(MemfdFlags::empty());
        let part = FileOffset::new(File::from(other.try_clone().unwrap()), 0);
        let unknown = MmapRegion::<()>::from_file(part, LEN).unwrap();
        ftruncate(&other, 0).unwrap();
        let _ = unknown.as_volatile_slice().read_obj::<u8>(0);
    }

    #[test]
    fn a_mapping_that_was_dropped_is_not_known_any_more() {
        if !is_child() {
            let test = "a_mapping_that_was_dropped_is_not_known_any_more";
            return assert_eq!(ends_with(test), Some(libc::SIGBUS));
        }
        let other = file(MemfdFlags::empty());
        let (known, lost) = mapped(&other);
        let at = known.region().as_ptr();
        drop(known);
        assert_eq!(Arc::strong_count(&lost), 1);
        // In the same place, by somebody else.
        // SAFETY: nothing is mapped there since the drop, in a process with this thread alone.
        let placed = unsafe {
            let fd = std::os::fd::AsRawFd::as_raw_fd(&other);
            let flags = libc::MAP_SHARED | libc::MAP_FIXED;
            libc::mmap(at.cast(), LEN, libc::PROT_READ, flags, fd, 0)
        };
        assert_eq!(placed, at.cast());
        ftruncate(&other, 0).unwrap();
        // SAFETY: the mapping above.
        let _ = unsafe { at.read_volatile() };
    }

    #[test]
    fn a_signal_from_a_process_ends_it() {
        if !is_child() {
            return assert_eq!(ends_with("a_signal_from_a_process_ends_it"), Some(libc::SIGBUS));
        }
        let one = file(MemfdFlags::empty());
        let _known = mapped(&one);
        // SAFETY: a signal to this thread.
        unsafe { libc::raise(libc::SIGBUS) };
    }
}
