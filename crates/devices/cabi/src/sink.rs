//! Memory for reads whose data is not needed: as long as a plugin's longest read, one block mapped
//! repeatedly.

use std::ffi::c_void;
use std::io;
use std::ptr;

/// Size in bytes of the block that repeats.
const PIECE: usize = 1 << 20;

/// A range of addresses that can be written to and stores nothing useful.
pub(crate) struct DiscardMemory {
    base: *mut c_void,
    len: usize,
}

impl DiscardMemory {
    /// A sink of at least `len` bytes.
    pub(crate) fn new(len: usize) -> io::Result<DiscardMemory> {
        let len = len.next_multiple_of(PIECE);
        let own = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: a new mapping at an address of the system's choice.
        let base = unsafe { libc::mmap(ptr::null_mut(), len, libc::PROT_NONE, own, -1, 0) };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        // Unmapped as a whole from here on.
        let sink = DiscardMemory { base, len };
        // SAFETY: a name, and flags.
        let fd = unsafe { libc::memfd_create(c"blockhaul-sink".as_ptr(), libc::MFD_CLOEXEC) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        let mapped = sink.map(fd);
        // SAFETY: opened above, and used for the last time: mappings keep the memory.
        unsafe { libc::close(fd) };
        mapped.map(|()| sink)
    }

    fn map(&self, fd: i32) -> io::Result<()> {
        // SAFETY: an open descriptor. The length fits.
        if unsafe { libc::ftruncate(fd, PIECE as libc::off_t) } != 0 {
            return Err(io::Error::last_os_error());
        }
        for at in (0..self.len).step_by(PIECE) {
            let access = libc::PROT_READ | libc::PROT_WRITE;
            let fixed = libc::MAP_FIXED;
            // SAFETY: inside our own mapping, which is not in use yet.
            let place = unsafe {
                let place = self.base.byte_add(at);
                libc::mmap(place, PIECE, access, libc::MAP_SHARED | fixed, fd, 0)
            };
            if place == libc::MAP_FAILED {
                return Err(io::Error::last_os_error());
            }
        }
        Ok(())
    }

    /// Where to write.
    pub(crate) fn pointer(&self) -> *mut c_void {
        self.base
    }
}

impl Drop for DiscardMemory {
    fn drop(&mut self) {
        // SAFETY: a mapping of ours, used for the last time.
        unsafe { libc::munmap(self.base, self.len) };
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn all_of_it_can_be_written_to_and_is_the_same_memory() {
        let sink = DiscardMemory::new((5 << 20) + 1).unwrap();
        assert_eq!(sink.len, 6 << 20);
        let bytes = sink.pointer().cast::<u8>();
        // SAFETY: within the mapping, which has no other user; one access at a time.
        unsafe {
            for at in (0..sink.len).step_by(4096) {
                bytes.add(at).write_volatile(1);
            }
            bytes.add(123).write_volatile(7);
            assert_eq!(bytes.add((5 << 20) + 123).read_volatile(), 7);
        }
    }
}
