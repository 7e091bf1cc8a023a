//! What the kernel does between two files by itself, on the calling thread.
#![expect(unsafe_code, reason = "ioctls that no safe crate has")]

use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _};

use rustix::fs::{copy_file_range, fstatfs};
use rustix::io::Errno;

use crate::File;

/// File systems over a network whose servers copy by themselves, by the number in statfs(2): NFS, CIFS
/// and SMB 2.
const REMOTE: [u64; 3] = [0x6969, 0xff53_4d42, 0xfe53_4d42];

impl File {
    /// Lets this file share what `source` holds at `from..from + len`, at offset `at` (FICLONERANGE).
    /// Waits where it must. Refused where the file system cannot, or for what is no multiple of its
    /// blocks and does not end where the source does.
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

    /// Copies up to `len` bytes of `source` at `from` to this file at offset `at` (copy_file_range).
    /// Waits where it must. Gives the bytes copied; fewer where the source ends before.
    pub fn copy_range_now(&self, at: u64, source: &File, from: u64, len: u64) -> io::Result<u64> {
        let (mut from, mut at, mut copied) = (from, at, 0);
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

    /// Tells a block device that it may forget a range of whole sectors (BLKDISCARD): what it reads as
    /// then is up to the device. Waits where it must.
    pub fn discard_now(&self, at: u64, len: u64) -> io::Result<()> {
        /// Of the kernel's interface (linux/fs.h): _IO(0x12, 119). Another number on MIPS, PowerPC
        /// and SPARC, where this one is refused (ENOTTY).
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

    /// Whether the file lies on a server that can copy within itself.
    pub fn is_remote(&self) -> bool {
        fstatfs(self).is_ok_and(|stat| {
            REMOTE.contains(&(u64::try_from(stat.f_type).unwrap_or(0) & 0xffff_ffff))
        })
    }
}
