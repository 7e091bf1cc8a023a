//! Descriptors that this process was started with.
#![expect(unsafe_code, reason = "raw descriptors")]

use std::os::fd::{BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::sync::Mutex;

use rustix::io::{FdFlags, fcntl_getfd, fcntl_setfd};

/// Takes ownership of a descriptor that this process got from its parent, by number: a listening
/// socket (sd_listen_fds(3)), a pipe for progress. 0 to 2 belong to the standard library. `None` if
/// there is no such descriptor, or it was already taken.
pub fn inherited(number: RawFd) -> Option<OwnedFd> {
    static TAKING: Mutex<()> = Mutex::new(());
    // A panic cannot leave the state under this lock inconsistent.
    let _one_at_a_time = TAKING.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    if number <= 2 {
        return None;
    }
    // SAFETY: not -1 (checked just above). The number is only passed to fcntl, which reports a
    // closed descriptor as an error and accesses no memory of ours.
    let fd = unsafe { BorrowedFd::borrow_raw(number) };
    let flags = fcntl_getfd(fd).ok()?;
    if flags.contains(FdFlags::CLOEXEC) {
        return None;
    }
    fcntl_setfd(fd, flags | FdFlags::CLOEXEC).ok()?;
    // SAFETY: the descriptor is open (fcntl succeeded) and has no owner in this process: whatever
    // this program opens itself (the standard library, rustix as it is called here, io_uring) is
    // close-on-exec, and this one was not, so it came from outside through exec. It is
    // close-on-exec from here on, and there is one caller at a time, so it is returned once.
    Some(unsafe { OwnedFd::from_raw_fd(number) })
}
