//! Ensures that only one program at a time writes to a file: byte locks of open file descriptions.
//! Within a program, claims do that ([`blockhaul_catalog::Claims`]).
//!
//! The bytes are those of QEMU's image locking (its block/file-posix.c): for each permission, its
//! users lock a byte from 100 up, and those that deny it to others lock a byte from 200 up. Writers
//! here deny writing, but do not lock the byte for writing, so that QEMU's tools can still read the
//! file.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::io::ErrorKind;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use blockhaul_block::{Error, Kind, Result};
use rustix::fs::{FileType, Stat};

/// Locked by writers.
const WRITES: u64 = 101;
/// Locked by programs that allow no other writer.
const LETS_NONE_WRITE: u64 = 201;
/// Locked by programs that allow no resize.
const LETS_NONE_RESIZE: u64 = 203;

/// How often, and at which interval, a file that is in use is tried again: for a second. A program that was
/// killed has its locks until the kernel has ended the last of its requests, which may be after its end.
/// A device of this program that was closed has its claim until its last request has ended.
const TRIES: u32 = if cfg!(test) { 1 } else { 40 };
const TRY_AGAIN: Duration = Duration::from_millis(25);

/// Device and inode; for a block device its number.
type Key = (u64, u64);

/// What this process has locked, and how many devices need it: the kernel treats two descriptions
/// of one process like two programs, but here they may share a file.
static HELD: Mutex<Option<HashMap<Key, LockedFile>>> = Mutex::new(None);

/// No lock is taken or checked.
static DISABLED: AtomicBool = AtomicBool::new(false);

/// Disables locks for files opened later, as nbdkit opens them.
pub fn disable_locks() {
    DISABLED.store(true, Ordering::Relaxed);
}

struct LockedFile {
    file: blockhaul_io::File,
    devices: usize,
}

/// While it lives, other programs that check locks do not write to the file.
#[derive(Debug)]
pub(super) struct FileLock(Key);

/// Whether locks are disabled for all files.
pub(super) fn locks_are_disabled() -> bool {
    DISABLED.load(Ordering::Relaxed)
}

/// Calls `take` until it does not fail with [`Kind::InUse`], for a second. Blocks.
pub(super) fn try_for_a_second<T>(mut take: impl FnMut() -> Result<T>) -> Result<T> {
    for _ in 0..TRIES {
        match take() {
            Err(error) if error.kind() == Kind::InUse => std::thread::sleep(TRY_AGAIN),
            done => return done,
        }
    }
    take()
}

impl FileLock {
    /// Locks a file that is open for reading and writing; `empties` if it is truncated before it is
    /// written. An error if another program writes to it. None if locks are not available.
    pub(super) fn take(
        file: &blockhaul_io::File,
        stat: &Stat,
        empties: bool,
    ) -> Result<Option<FileLock>> {
        let key = match FileType::from_raw_mode(stat.st_mode) {
            FileType::BlockDevice => (stat.st_rdev, 0),
            _ => (stat.st_dev, stat.st_ino),
        };
        let mut held = held();
        let entry = match held.get_or_insert_default().entry(key) {
            Entry::Occupied(mut entry) => {
                entry.get_mut().devices += 1;
                return Ok(Some(FileLock(key)));
            }
            Entry::Vacant(entry) => entry,
        };
        match blockhaul_os::lock_shared(file, LETS_NONE_WRITE) {
            Ok(()) => {}
            Err(error) if error.kind() == ErrorKind::WouldBlock => return Err(in_use()),
            // Network file systems may not support locks.
            Err(error) => {
                log::debug!("the file is not locked: {}", blockhaul_io::plain(&error));
                return Ok(None);
            }
        }
        // Lock first, then check: of two programs that start together one may be refused
        // needlessly, but they never both succeed.
        let by_others = |byte| blockhaul_os::locked_by_others(file, byte).unwrap_or(false);
        if by_others(WRITES)
            || by_others(LETS_NONE_WRITE)
            || (empties && by_others(LETS_NONE_RESIZE))
        {
            // Closing the file releases it as well.
            let _ = blockhaul_os::unlock(file, LETS_NONE_WRITE);
            return Err(in_use());
        }
        entry.insert(LockedFile { file: file.clone(), devices: 1 });
        Ok(Some(FileLock(key)))
    }
}

impl Drop for FileLock {
    fn drop(&mut self) {
        let mut held = held();
        let Some(Entry::Occupied(mut entry)) = held.as_mut().map(|held| held.entry(self.0)) else {
            return;
        };
        entry.get_mut().devices -= 1;
        if entry.get().devices == 0 {
            // The kernel does it by itself only when the last user of the descriptor is gone, which
            // may be a request in flight.
            let _ = blockhaul_os::unlock(&entry.get().file, LETS_NONE_WRITE);
            entry.remove();
        }
    }
}

fn held() -> MutexGuard<'static, Option<HashMap<Key, LockedFile>>> {
    // Its state cannot be inconsistent.
    HELD.lock().unwrap_or_else(PoisonError::into_inner)
}

fn in_use() -> Error {
    Error::new(Kind::InUse, "another program has locked it against writing").with_remedy(
        "choose another file, open it read-only, end that program first, or use file:PATH?lock=off if both may \
         write to it",
    )
}
