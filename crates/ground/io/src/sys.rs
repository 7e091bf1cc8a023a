//! System calls and descriptors that the safe crates do not cover, each with its reason.
#![expect(unsafe_code, reason = "raw descriptors")]

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};

use rustix::event::{EventfdFlags, eventfd};
use rustix::pipe::{IoSliceRaw, SpliceFlags, vmsplice};

/// Descriptors below this number are not used by the workers themselves.
const LOW_DESCRIPTORS: RawFd = 32;

/// Occupies the free descriptors below [`LOW_DESCRIPTORS`] until it is dropped: they stay free for
/// what devices and plugins open. A plugin may name one in a script of a shell, and dash knows only
/// those below 10.
pub(crate) fn occupy_low_descriptors() -> Vec<OwnedFd> {
    let Ok(first) = eventfd(0, EventfdFlags::CLOEXEC) else { return Vec::new() };
    let next = || rustix::io::fcntl_dupfd_cloexec(&first, 3).ok();
    // Where there are few descriptors, none is kept free.
    let enough = rustix::process::getrlimit(rustix::process::Resource::Nofile)
        .current
        .is_none_or(|most| most >= 256);
    let mut occupied = Vec::new();
    while enough && let Some(fd) = next().filter(|fd| fd.as_raw_fd() < LOW_DESCRIPTORS) {
        occupied.push(fd);
    }
    occupied.push(first);
    occupied
}

/// Wakes a worker that sleeps in its driver.
pub(crate) struct Wakeup(OwnedFd);

impl Wakeup {
    pub(crate) fn new() -> io::Result<Wakeup> {
        Ok(Wakeup(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?))
    }

    /// Makes the worker's driver return from its sleep.
    pub(crate) fn wake(&self) {
        // Fails only if the counter is full: then a wakeup is already pending.
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }

    /// Clears all wakeups so far.
    pub(crate) fn clear(&self) {
        // Fails only if there was none.
        let _ = rustix::io::read(&self.0, &mut [0u8; 8]);
    }
}

impl AsFd for Wakeup {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl AsRawFd for Wakeup {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

/// A descriptor by its number, for calls that only pass it to the kernel.
pub(crate) fn borrow<'fd>(fd: RawFd) -> BorrowedFd<'fd> {
    assert!(fd >= 0, "descriptor {fd}");
    // SAFETY: not -1 (asserted). The number is only passed to epoll_ctl, which reports a closed or
    // foreign descriptor as an error and accesses no memory of ours.
    unsafe { BorrowedFd::borrow_raw(fd) }
}

/// Puts the pages of `bytes` into a pipe by reference, as many as it takes (vmsplice(2)). A reader
/// of the pipe, at any end of a connection, reads their contents at that time.
pub(crate) fn lend_pages(pipe: BorrowedFd<'_>, bytes: &[u8]) -> rustix::io::Result<usize> {
    let slices = [IoSliceRaw::from_slice(bytes)];
    // SAFETY: the write end of a pipe only reads the memory, during the call and later through its
    // own references to the pages, which outlive our mapping. Pages are not given away (no GIFT).
    unsafe { vmsplice(pipe, &slices, SpliceFlags::NONBLOCK) }
}
