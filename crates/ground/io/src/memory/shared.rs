//! Memory that another process maps, too: a device in a process of its own fills the buffers of
//! replies in place.
#![expect(unsafe_code, reason = "a mapping of a file in memory")]

use std::collections::BTreeSet;
use std::fmt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard};

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use super::alignment::ALIGN;
use crate::fifo_lock::FifoLock;
use crate::sync::Notify;

/// Memory in a file that other processes may map: parts of it become buffers.
///
/// The file cannot be resized, so that no process can take away pages that another one uses. Other
/// processes may change the bytes at any time; code that reads them must accept any bytes.
#[derive(Clone)]
pub struct SharedMemory(Arc<Area>);

struct Area {
    file: OwnedFd,
    start: NonNull<u8>,
    size: usize,
    /// Free parts by class: offsets of parts of `ALIGN << class` bytes, aligned to their size.
    free: Mutex<Vec<BTreeSet<usize>>>,
    freed: Notify,
    /// Those that wait for a part wait in order, so that a large one gets its turn.
    turn: Arc<FifoLock>,
    /// How many wait for a part.
    waiters: AtomicUsize,
}

// SAFETY: the mapping has no thread affinity, and its parts are lent to one owner at a time.
unsafe impl Send for Area {}
// SAFETY: as above; everything else in it is protected by locks.
unsafe impl Sync for Area {}

impl Drop for Area {
    fn drop(&mut self) {
        // SAFETY: mapped in `new` with this size; no part is left, as each has a reference to this.
        // It cannot fail: the range is exactly one mapping.
        let _ = unsafe { munmap(self.start.as_ptr().cast(), self.size) };
    }
}

impl SharedMemory {
    /// Memory of `size` bytes, a power of two of at least [`ALIGN`]. Pages are allocated when they
    /// are first used.
    ///
    /// # Errors
    /// Those of the system: no file or no mapping of that size, and an invalid size.
    pub fn new(name: &str, size: usize) -> io::Result<SharedMemory> {
        if !size.is_power_of_two() || size < ALIGN {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let file = memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        ftruncate(&file, size as u64)?;
        fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address that the kernel chooses touches nothing that exists,
        // and the seals keep its pages there.
        let start =
            unsafe { mmap(std::ptr::null_mut(), size, access, MapFlags::SHARED, &file, 0)? };
        let start = NonNull::new(start.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        let mut free = vec![BTreeSet::new(); class_of(size) + 1];
        free[class_of(size)].insert(0);
        Ok(SharedMemory(Arc::new(Area {
            file,
            start,
            size,
            free: Mutex::new(free),
            freed: Notify::default(),
            turn: Arc::default(),
            waiters: AtomicUsize::new(0),
        })))
    }

    /// The file, to be mapped by another process.
    pub fn file(&self) -> BorrowedFd<'_> {
        self.0.file.as_fd()
    }

    /// Size of all of it in bytes.
    pub fn size(&self) -> usize {
        self.0.size
    }

    /// A part of at least `len` bytes, if one is free and nobody waits for one. Its content is
    /// arbitrary earlier data or zeroes.
    pub fn try_take(&self, len: usize) -> Option<SharedPart> {
        if self.0.waiters.load(SeqCst) > 0 {
            return None;
        }
        self.carve(len)
    }

    fn carve(&self, len: usize) -> Option<SharedPart> {
        let class = class_of(len);
        let mut free = self.0.lock();
        let larger = (class..free.len()).find(|&class| !free[class].is_empty())?;
        // The lowest: so that the same pages are used again.
        let at = free[larger].pop_first()?;
        for half in (class..larger).rev() {
            free[half].insert(at + (ALIGN << half));
        }
        drop(free);
        Some(SharedPart { area: self.0.clone(), at, size: ALIGN << class })
    }

    /// Waits for a part of at least `len` bytes, first come first served. `None`: it would be larger
    /// than all of the memory.
    pub async fn take(&self, len: usize) -> Option<SharedPart> {
        if ALIGN << class_of(len) > self.0.size {
            return None;
        }
        let _waiter = Waiter::new(&self.0.waiters);
        let _turn = self.0.turn.lock().await;
        loop {
            let freed = self.0.freed.listen();
            if let Some(part) = self.carve(len) {
                return Some(part);
            }
            // Lost only with the memory, which this holds.
            let _ = freed.await;
        }
    }
}

/// One that waits for a part.
struct Waiter<'a>(&'a AtomicUsize);

impl Waiter<'_> {
    fn new(waiters: &AtomicUsize) -> Waiter<'_> {
        waiters.fetch_add(1, SeqCst);
        Waiter(waiters)
    }
}

impl Drop for Waiter<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, SeqCst);
    }
}

impl Area {
    fn lock(&self) -> MutexGuard<'_, Vec<BTreeSet<usize>>> {
        self.free.lock().expect("no panic under this lock")
    }
}

/// A part of [`SharedMemory`], given back when dropped.
pub struct SharedPart {
    area: Arc<Area>,
    at: usize,
    size: usize,
}

impl SharedPart {
    /// Where it begins in the memory, in bytes; a multiple of [`ALIGN`].
    pub fn at(&self) -> u64 {
        self.at as u64
    }

    /// Its size in bytes: a power of two, at least [`ALIGN`].
    pub fn size(&self) -> usize {
        self.size
    }

    /// Copies the first bytes to `out`, which is at most as long as the part.
    ///
    /// # Panics
    /// `out` is longer.
    pub fn copy_to(&self, out: &mut [u8]) {
        assert!(out.len() <= self.size, "{} bytes of {}", out.len(), self.size);
        let len = out.len();
        // SAFETY: the part is initialised memory of at least this size that nobody else in this
        // process has; `out` is elsewhere. Another process may change it meanwhile: any bytes do.
        unsafe { self.start().copy_to_nonoverlapping(NonNull::from(out).cast(), len) }
    }

    /// Copies `bytes` to the start of the part, which is at least as long.
    ///
    /// # Panics
    /// The part is shorter.
    pub fn fill(&mut self, bytes: &[u8]) {
        assert!(bytes.len() <= self.size, "{} bytes into {}", bytes.len(), self.size);
        // SAFETY: as in `copy_to`, and `&mut self` makes the access unique in this process.
        unsafe { self.start().copy_from_nonoverlapping(NonNull::from(bytes).cast(), bytes.len()) }
    }

    pub(super) fn start(&self) -> NonNull<u8> {
        // SAFETY: the part is inside the mapping.
        unsafe { self.area.start.add(self.at) }
    }
}

impl Drop for SharedPart {
    fn drop(&mut self) {
        let mut at = self.at;
        let mut class = class_of(self.size);
        let mut free = self.area.lock();
        while class + 1 < free.len() && free[class].remove(&(at ^ (ALIGN << class))) {
            at &= !(ALIGN << class);
            class += 1;
        }
        free[class].insert(at);
        drop(free);
        self.area.freed.notify();
    }
}

impl fmt::Debug for SharedPart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SharedPart({} bytes at {})", self.size, self.at)
    }
}

/// The class of parts for `len` bytes.
fn class_of(len: usize) -> usize {
    len.div_ceil(ALIGN).max(1).next_power_of_two().trailing_zeros() as usize
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::pin::pin;
    use std::task::{Context, Poll, Waker};

    use super::*;
    use crate::{Buf, Pool, Reservation};

    #[test]
    fn parts_do_not_overlap_and_join_again() {
        let memory = SharedMemory::new("test", 16 * ALIGN).unwrap();
        let parts: Vec<_> = (0..16).map(|_| memory.try_take(1).unwrap()).collect();
        let mut starts: Vec<_> = parts.iter().map(SharedPart::at).collect();
        starts.sort_unstable();
        starts.dedup();
        assert_eq!(starts.len(), 16);
        assert!(memory.try_take(1).is_none());
        drop(parts);
        let whole = memory.try_take(16 * ALIGN).unwrap();
        assert_eq!((whole.at(), whole.size()), (0, 16 * ALIGN));
        assert!(SharedMemory::new("test", 3 * ALIGN).is_err());
    }

    #[test]
    fn who_waits_gets_a_part_in_order() {
        let memory = SharedMemory::new("test", 4 * ALIGN).unwrap();
        let mut cx = Context::from_waker(Waker::noop());
        let held = [memory.try_take(ALIGN).unwrap(), memory.try_take(ALIGN).unwrap()];
        let mut large = Box::pin(memory.take(4 * ALIGN));
        let mut small = pin!(memory.take(ALIGN));
        assert!(large.as_mut().poll(&mut cx).is_pending());
        assert!(small.as_mut().poll(&mut cx).is_pending(), "the large one is first");
        drop(held);
        assert!(memory.try_take(1).is_none(), "others wait");
        let Poll::Ready(Some(part)) = large.as_mut().poll(&mut cx) else { panic!("it is free") };
        assert!(small.as_mut().poll(&mut cx).is_pending());
        drop((part, large));
        assert!(matches!(small.poll(&mut cx), Poll::Ready(Some(_))));
        assert!(matches!(pin!(memory.take(5 * ALIGN)).poll(&mut cx), Poll::Ready(None)));
    }

    #[test]
    fn a_buffer_of_shared_memory_is_the_file_and_counts_in_its_pool() {
        let memory = SharedMemory::new("test", 4 * ALIGN).unwrap();
        let pool = Pool::new(8 << 10);
        drop(memory.try_take(ALIGN).unwrap());
        let part = memory.try_take(5000).unwrap();
        let at = part.at();
        let mut buf: Buf = pool.try_reserve(5000).unwrap().into_shared(part).unwrap();
        buf.copy_from_slice(&[7; 5000]);
        let mut seen = [0; 5000];
        rustix::io::pread(memory.file(), &mut seen[..], at).unwrap();
        assert_eq!((seen, pool.reserved(), pool.idle_bytes()), ([7; 5000], 8 << 10, 0));
        drop(buf);
        assert_eq!((pool.reserved(), pool.idle_bytes()), (0, 0));
        assert!(memory.try_take(4 * ALIGN).is_some());
        let small = memory.try_take(1).unwrap();
        assert!(Reservation::unpooled(5000).into_shared(small).is_err(), "it does not fit");
    }

    #[test]
    fn no_process_can_take_pages_away() {
        let memory = SharedMemory::new("test", 4 * ALIGN).unwrap();
        assert!(ftruncate(memory.file(), 0).is_err());
    }
}
