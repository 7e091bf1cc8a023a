//! Queries which part of a file is in the page cache, without reading or triggering readahead.
#![expect(unsafe_code, reason = "system calls that no safe crate has")]

use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::File;

/// Whether cachestat(2) is available: Linux 6.5 and later, unless a sandbox refuses it.
static HAS_CACHESTAT: AtomicBool = AtomicBool::new(true);

/// System call number, the same on every architecture but Alpha.
const CACHESTAT: libc::c_long = 451;

/// As in the kernel's interface (linux/mman.h).
#[repr(C)]
struct CachestatRange {
    at: u64,
    len: u64,
}

/// As in the kernel's interface (linux/mman.h): pages.
#[repr(C)]
#[derive(Default)]
struct CachestatCounts {
    cached: u64,
    dirty: u64,
    writeback: u64,
    evicted: u64,
    recently_evicted: u64,
}

impl File {
    /// Bytes of the range `at..at + len` in the page cache, in whole pages; `None` if the kernel
    /// does not report it, for example for a file of another user.
    pub fn cached(&self, at: u64, len: u64) -> Option<u64> {
        if len == 0 {
            return Some(0);
        }
        let page = rustix::param::page_size() as u64;
        if HAS_CACHESTAT.load(Ordering::Relaxed) {
            match self.cachestat(at, len) {
                Ok(pages) => return Some(pages.saturating_mul(page)),
                // For a file of another user that we may not write.
                Err(error) if error.raw_os_error() == Some(libc::EPERM) => {}
                Err(error) => {
                    log::debug!("cachestat is not used any more: {}", crate::plain(&error));
                    HAS_CACHESTAT.store(false, Ordering::Relaxed);
                }
            }
        }
        self.mincore(at, len, page).ok().map(|pages| pages.saturating_mul(page))
    }

    fn cachestat(&self, at: u64, len: u64) -> io::Result<u64> {
        let range = CachestatRange { at, len };
        let mut counts = CachestatCounts::default();
        let fd = self.as_fd().as_raw_fd();
        let range = ptr::from_ref(&range);
        let told = ptr::from_mut(&mut counts);
        // SAFETY: both structures are laid out as the kernel's and live until the call returns; the
        // kernel writes only to the second.
        let done = unsafe { libc::syscall(CACHESTAT, fd, range, told, 0_u32) };
        if done == 0 { Ok(counts.cached) } else { Err(io::Error::last_os_error()) }
    }

    /// The same by mapping the range, for older kernels.
    fn mincore(&self, at: u64, len: u64, page: u64) -> io::Result<u64> {
        let start = at - at % page;
        let invalid = |_| io::Error::from(io::ErrorKind::InvalidInput);
        let len = usize::try_from(len + (at - start)).map_err(invalid)?;
        let offset = libc::off_t::try_from(start).map_err(invalid)?;
        let page = usize::try_from(page).map_err(invalid)?;
        let fd = self.as_fd().as_raw_fd();
        let shared = libc::MAP_SHARED;
        // SAFETY: a new mapping at an address of the kernel's choice; it is never read.
        let map = unsafe { libc::mmap(ptr::null_mut(), len, libc::PROT_READ, shared, fd, offset) };
        if map == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let mut pages = vec![0_u8; len.div_ceil(page)];
        // SAFETY: the range is the mapping made above, and there is a byte for each of its pages.
        let told = unsafe { libc::mincore(map, len, pages.as_mut_ptr()) };
        let result = if told == 0 { Ok(()) } else { Err(io::Error::last_os_error()) };
        // SAFETY: the mapping made above, which has no references.
        let unmapped = unsafe { libc::munmap(map, len) };
        debug_assert_eq!(unmapped, 0);
        result.map(|()| pages.iter().map(|page| u64::from(page & 1)).sum())
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;

    #[test]
    fn both_ways_count_what_was_written_and_not_what_was_never_there() {
        let mut file = tempfile::tempfile_in("/var/tmp").expect("a file on a disk");
        file.write_all(&[1; 100_000]).expect("room for it");
        file.set_len(1 << 20).expect("room for it");
        let file = File::new(file.into());
        let page = rustix::param::page_size() as u64;
        let written = 100_000_u64.next_multiple_of(page);
        for counted in [file.cachestat(0, 1 << 20), file.mincore(0, 1 << 20, page)] {
            match counted {
                Ok(pages) => assert_eq!(pages * page, written),
                Err(error) => assert_eq!(error.raw_os_error(), Some(libc::ENOSYS), "{error}"),
            }
        }
        assert_eq!(file.mincore(50_000, 10_000, page).expect("mapped") * page, {
            60_000_u64.next_multiple_of(page) - 50_000 / page * page
        });
        assert_eq!(file.cached(200_000, 5000), Some(0));
    }
}
