//! Locks of byte ranges that belong to an open file description (fcntl(2), F_OFD_SETLK): a safe crate
//! has none but those of a whole process.
#![expect(unsafe_code, reason = "fcntl with a structure in memory")]

use std::io;
use std::os::fd::{AsFd, AsRawFd as _};

/// Takes a shared lock of the byte at `at`, which may lie behind the end, for the description that
/// `file` belongs to; it must be open for reading. Never waits; `WouldBlock`: another description has
/// it for itself. Other errors: the file system has no locks.
pub fn lock_shared(file: impl AsFd, at: u64) -> io::Result<()> {
    call(file, libc::F_OFD_SETLK, libc::F_RDLCK, at).map(drop)
}

/// Gives up the lock of the byte at `at`.
pub fn unlock(file: impl AsFd, at: u64) -> io::Result<()> {
    call(file, libc::F_OFD_SETLK, libc::F_UNLCK, at).map(drop)
}

/// Whether another description has locked the byte at `at`, in whatever way.
pub fn locked_by_others(file: impl AsFd, at: u64) -> io::Result<bool> {
    let found = call(file, libc::F_OFD_GETLK, libc::F_WRLCK, at)?;
    Ok(found != libc::F_UNLCK)
}

/// The type of lock that the kernel leaves in the structure.
fn call(file: impl AsFd, command: i32, kind: i32, at: u64) -> io::Result<i32> {
    let wrong = |_| io::Error::from(io::ErrorKind::InvalidInput);
    // SAFETY: all zeroes is a valid value of this plain structure of numbers.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    lock.l_type = libc::c_short::try_from(kind).map_err(wrong)?;
    lock.l_whence = libc::c_short::try_from(libc::SEEK_SET).map_err(wrong)?;
    lock.l_start = libc::off_t::try_from(at).map_err(wrong)?;
    lock.l_len = 1;
    // SAFETY: the descriptor is borrowed for the call, and the structure lives as long.
    let result = unsafe { libc::fcntl(file.as_fd().as_raw_fd(), command, &raw mut lock) };
    if result == -1 {
        let error = io::Error::last_os_error();
        return Err(match error.raw_os_error() {
            Some(libc::EACCES | libc::EAGAIN) => io::ErrorKind::WouldBlock.into(),
            _ => error,
        });
    }
    Ok(i32::from(lock.l_type))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_lock_is_seen_by_other_descriptions_until_it_is_given_up() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let one = file.reopen().unwrap();
        let other = file.reopen().unwrap();
        assert!(!locked_by_others(&other, 201).unwrap());
        lock_shared(&one, 201).unwrap();
        assert!(locked_by_others(&other, 201).unwrap());
        assert!(!locked_by_others(&other, 200).unwrap());
        assert!(!locked_by_others(&one, 201).unwrap(), "its own lock is no other's");
        lock_shared(&other, 201).unwrap();
        unlock(&one, 201).unwrap();
        assert!(!locked_by_others(&other, 201).unwrap());
        assert!(locked_by_others(&one, 201).unwrap());
        drop(other);
        // A program that another test starts has a copy of the descriptor until it runs.
        let begun = std::time::Instant::now();
        while locked_by_others(&one, 201).unwrap() {
            assert!(begun.elapsed().as_secs() < 60, "closing gives it up");
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
    }
}
