//! Captures what a plugin prints on standard output.

use std::fs::File;
use std::io::{self, Read as _, Write as _};
use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd};
use std::sync::Mutex;

/// One at a time: standard output belongs to the process.
static ONE: Mutex<()> = Mutex::new(());

/// Runs `print` with standard output redirected to a pipe that is read to its end.
pub(crate) fn stdout<R>(print: impl FnOnce() -> R) -> io::Result<String> {
    let _one = ONE.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    io::stdout().flush()?;
    let (mut reader, writer) = io::pipe()?;
    // SAFETY: duplicates a descriptor, or fails.
    let before = unsafe { libc::fcntl(1, libc::F_DUPFD_CLOEXEC, 3) };
    if before < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: fresh from the kernel, and exclusively ours.
    let before = File::from(unsafe { OwnedFd::from_raw_fd(before) });
    // A plugin may print more than a pipe holds.
    let collected = std::thread::Builder::new().name("collect".into()).spawn(move || {
        let mut text = Vec::new();
        reader.read_to_end(&mut text).map(|_| text)
    })?;
    // SAFETY: makes descriptor 1 a duplicate of an open one.
    let redirected = unsafe { libc::dup2(writer.as_raw_fd(), 1) };
    drop(writer);
    if redirected >= 0 {
        print();
        // SAFETY: null flushes all of C's streams, which is always allowed.
        unsafe { libc::fflush(std::ptr::null_mut()) };
    }
    // SAFETY: restores the old descriptor; this closes the last write end of the pipe.
    unsafe { libc::dup2(before.as_raw_fd(), 1) };
    let text = collected.join().map_err(|_| io::Error::other("the reader panicked"))??;
    if redirected < 0 {
        return Err(io::Error::other("cannot redirect standard output"));
    }
    Ok(String::from_utf8_lossy(&text).into_owned())
}
