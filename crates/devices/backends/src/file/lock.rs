//! One program writes to a file at a time: locks of bytes that belong to its open descriptions.
//!
//! The bytes are those of QEMU's image locking (its block/file-posix.c): each ability has a byte that
//! who uses it locks, 100 and up, and one that who lets no other have it locks, 200 and up. Writers here
//! let no other write, and do not tell that they write, so that QEMU's tools can still read the file.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::io::ErrorKind;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use blockhaul_block::{Error, Kind, Result};
use rustix::fs::{FileType, Stat};

/// Locked by who writes.
const WRITES: u64 = 101;
/// Locked by who lets no other write.
const LETS_NONE_WRITE: u64 = 201;
/// Locked by who lets no other change the size.
const LETS_NONE_RESIZE: u64 = 203;

/// Device and inode; of a block device its number.
type Key = (u64, u64);

/// What this process has locked, and how many devices need it: to the kernel two descriptions of one
/// process are as two programs, but here they may share a file.
static HELD: Mutex<Option<HashMap<Key, Held>>> = Mutex::new(None);

/// No lock is taken or looked at.
static DISABLED: AtomicBool = AtomicBool::new(false);

/// From here on files are opened without locks, as nbdkit opens them.
pub fn disable_locks() {
    DISABLED.store(true, Ordering::Relaxed);
}

struct Held {
    file: blockhaul_io::File,
    devices: usize,
}

/// Other programs that look at locks do not write to the file while it lives.
#[derive(Debug)]
pub(super) struct Lock(Key);

impl Lock {
    /// Locks a file that is open for reading and writing; `empties` if it is cut before it is written.
    /// An error if another program writes to it. None where there are no locks. Blocks.
    pub(super) fn take(
        file: &blockhaul_io::File,
        stat: &Stat,
        empties: bool,
    ) -> Result<Option<Lock>> {
        if DISABLED.load(Ordering::Relaxed) {
            return Ok(None);
        }
        let key = match FileType::from_raw_mode(stat.st_mode) {
            FileType::BlockDevice => (stat.st_rdev, 0),
            _ => (stat.st_dev, stat.st_ino),
        };
        let mut held = held();
        let entry = match held.get_or_insert_default().entry(key) {
            Entry::Occupied(mut entry) => {
                entry.get_mut().devices += 1;
                return Ok(Some(Lock(key)));
            }
            Entry::Vacant(entry) => entry,
        };
        match blockhaul_os::lock_shared(file, LETS_NONE_WRITE) {
            Ok(()) => {}
            Err(error) if error.kind() == ErrorKind::WouldBlock => return Err(in_use()),
            // Network file systems may have none.
            Err(error) => {
                log::debug!("the file is not locked: {error}");
                return Ok(None);
            }
        }
        // The lock comes first: of two that begin at a time one may be refused needlessly, but never
        // none.
        let by_others = |byte| blockhaul_os::locked_by_others(file, byte).unwrap_or(false);
        if by_others(WRITES)
            || by_others(LETS_NONE_WRITE)
            || (empties && by_others(LETS_NONE_RESIZE))
        {
            // Closing the file gives it up as well.
            let _ = blockhaul_os::unlock(file, LETS_NONE_WRITE);
            return Err(in_use());
        }
        entry.insert(Held { file: file.clone(), devices: 1 });
        Ok(Some(Lock(key)))
    }
}

impl Drop for Lock {
    fn drop(&mut self) {
        let mut held = held();
        let Some(Entry::Occupied(mut entry)) = held.as_mut().map(|held| held.entry(self.0)) else {
            return;
        };
        entry.get_mut().devices -= 1;
        if entry.get().devices == 0 {
            // By itself the kernel does it when the last user of the descriptor is gone, which may be a
            // request that it still has.
            let _ = blockhaul_os::unlock(&entry.get().file, LETS_NONE_WRITE);
            entry.remove();
        }
    }
}

fn held() -> MutexGuard<'static, Option<HashMap<Key, Held>>> {
    // What is in it cannot be half changed.
    HELD.lock().unwrap_or_else(PoisonError::into_inner)
}

fn in_use() -> Error {
    let text = "another program uses it and lets nobody write to it: choose another file, end that \
                program first, or write file:PATH?lock=off if the two keep apart";
    Error::new(Kind::Refused, text)
}
