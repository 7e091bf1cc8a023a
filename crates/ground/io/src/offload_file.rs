//! Copies between two files by the kernel, on the calling thread.
#![expect(unsafe_code, reason = "ioctls that no safe crate has")]

use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _};

use rustix::fs::{copy_file_range, fstatfs};
use rustix::io::Errno;

use crate::File;

/// Network file systems whose servers can copy, by their number in statfs(2): NFS, CIFS and SMB 2.
const REMOTE: [u64; 3] = [0x6969, 0xff53_4d42, 0xfe53_4d42];

impl File {
    /// Shares the range `from..from + len` of `source` with this file at offset `at`
    /// (FICLONERANGE). Waits if necessary. Refused if the file system cannot, or if the range is
    /// not a multiple of its block size and does not end at the end of the source.
    ///
    /// # Errors
    /// Those of ioctl_ficlonerange(2).
    pub fn reflink_now(&self, at: u64, source: &File, from: u64, len: u64) -> io::Result<()> {
        let source = source.as_fd().as_raw_fd();
        let range = libc::file_clone_range {
            src_fd: source.into(),
            src_offset: from,
            src_length: len,
            dest_offset: at,
        };
        loop {
            // SAFETY: the kernel reads the structure, which lives until the call returns, and both
            // descriptors are open for as long as the two files are borrowed.
            let done = unsafe { libc::ioctl(self.as_fd().as_raw_fd(), libc::FICLONERANGE, &range) };
            if done == 0 {
                return Ok(());
            }
            let error = io::Error::last_os_error();
            if error.kind() != io::ErrorKind::Interrupted {
                return Err(error);
            }
        }
    }

    /// Copies up to `len` bytes of `source` at `from` to this file at offset `at`
    /// (copy_file_range). Waits if necessary. Returns the bytes copied; fewer if the source ends
    /// before that.
    ///
    /// # Errors
    /// Those of copy_file_range(2). A part may be copied.
    pub fn copy_range_now(&self, at: u64, source: &File, from: u64, len: u64) -> io::Result<u64> {
        let mut from = from;
        let mut at = at;
        let mut copied = 0;
        while copied < len {
            let left = usize::try_from(len - copied).unwrap_or(usize::MAX);
            match copy_file_range(source, Some(&mut from), self, Some(&mut at), left) {
                Ok(0) => break,
                Ok(bytes) => copied += bytes as u64,
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(copied)
    }

    /// Discards a range of whole sectors of a block device (BLKDISCARD): what it reads as
    /// afterwards depends on the device. Waits if necessary.
    ///
    /// # Errors
    /// Those of the ioctl; `ENOTTY` if the file is no block device.
    pub fn discard_now(&self, at: u64, len: u64) -> io::Result<()> {
        /// As in the kernel's interface (linux/fs.h): _IO(0x12, 119). MIPS, PowerPC and SPARC have
        /// another number, and refuse this one (ENOTTY).
        const BLKDISCARD: libc::Ioctl = 0x1277;
        let range = [at, len];
        loop {
            // SAFETY: the kernel reads two numbers, which live until the call returns.
            let done = unsafe { libc::ioctl(self.as_fd().as_raw_fd(), BLKDISCARD, &range) };
            if done == 0 {
                return Ok(());
            }
            let error = io::Error::last_os_error();
            if error.kind() != io::ErrorKind::Interrupted {
                return Err(error);
            }
        }
    }

    /// Whether the file is on a server that can copy by itself.
    pub fn is_remote(&self) -> bool {
        fstatfs(self).is_ok_and(|stat| {
            REMOTE.contains(&(u64::try_from(stat.f_type).unwrap_or(0) & 0xffff_ffff))
        })
    }
}
