//! The kernel's FUSE device.
#![expect(unsafe_code, reason = "an ioctl that the safe crates do not cover")]

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use rustix::fs::{Mode, OFlags};

/// The device.
const DEVICE: &str = "/dev/fuse";

/// FUSE_DEV_IOC_CLONE: reads a descriptor's number, of 4 bytes.
const CLONE: libc::c_ulong = 0x8004_e500;

/// Opens the FUSE device, for one connection to the kernel. Reads do not block.
pub fn open_fuse() -> io::Result<OwnedFd> {
    let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NONBLOCK;
    Ok(rustix::fs::open(DEVICE, flags, Mode::empty())?)
}

/// A further descriptor of the mounted connection `session`, with requests of its own: the reply to
/// a request goes to the descriptor that it was read from. Reads do not block.
pub fn clone_fuse(session: impl AsFd) -> io::Result<OwnedFd> {
    let fresh = open_fuse()?;
    let number = session.as_fd().as_raw_fd().cast_unsigned();
    // SAFETY: the kernel reads four bytes from the pointer during the call, and `number` lives
    // longer. A descriptor that is no connection is an error.
    let done = unsafe { libc::ioctl(fresh.as_raw_fd(), CLONE as _, &raw const number) };
    if done == 0 { Ok(fresh) } else { Err(io::Error::last_os_error()) }
}
