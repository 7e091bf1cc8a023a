//! What a simulation does to sends and receives.

use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::{AsFd, BorrowedFd};

use rustix::io::Errno;
use rustix::net::Shutdown;

use super::world;

/// Most bytes of a send or receive that is short.
const SHORT_MAX: u64 = 8192;

/// The bytes that a call on a socket may move: all of `total`, or fewer.
///
/// # Errors
/// `WouldBlock` if the call has to wait; `ConnectionReset` if the connection ends here.
fn allowed(socket: BorrowedFd<'_>, total: usize) -> io::Result<usize> {
    let decided = world::with(|world| {
        let current = world.current.unwrap_or(usize::MAX);
        world.touched = true;
        world.trace("move", current as u64, total as u64);
        if world.choose("cut", world.faults.cut) {
            return Err(Errno::CONNRESET);
        }
        if world.chance(world.faults.stall, 1000) {
            return Err(Errno::AGAIN);
        }
        if !world.chance(world.faults.short, 1000) {
            return Ok(total);
        }
        let most = world.below(SHORT_MAX) + 1;
        let part = world.below(most) + 1;
        Ok(total.min(usize::try_from(part).unwrap_or(total)))
    });
    match decided {
        None => Ok(total),
        Some(Err(errno)) => {
            if errno == Errno::CONNRESET {
                // Fails only if the connection has already ended.
                let _ = rustix::net::shutdown(socket, Shutdown::Both);
            }
            Err(errno.into())
        }
        Some(Ok(part)) => Ok(part),
    }
}

/// The part of `bufs` that a receive may fill.
pub(crate) fn receiving<'a>(
    socket: impl AsFd,
    bufs: &'a mut [IoSliceMut<'_>],
) -> io::Result<Vec<IoSliceMut<'a>>> {
    let total = bufs.iter().map(|buf| buf.len()).sum();
    let mut left = allowed(socket.as_fd(), total)?;
    let mut part = Vec::with_capacity(bufs.len());
    for buf in bufs {
        let len = buf.len().min(left);
        left -= len;
        part.push(IoSliceMut::new(&mut buf[..len]));
    }
    Ok(part)
}

/// The part of `bufs` that a send may take.
pub(crate) fn sending<'a>(
    socket: impl AsFd,
    bufs: &'a [IoSlice<'_>],
) -> io::Result<Vec<IoSlice<'a>>> {
    let total = bufs.iter().map(|buf| buf.len()).sum();
    let mut left = allowed(socket.as_fd(), total)?;
    let mut part = Vec::with_capacity(bufs.len());
    for buf in bufs {
        let len = buf.len().min(left);
        left -= len;
        part.push(IoSlice::new(&buf[..len]));
    }
    Ok(part)
}

/// The number of bytes of `len` that a splice from or to a socket may move.
pub(crate) fn splicing(socket: BorrowedFd<'_>, len: usize) -> io::Result<usize> {
    allowed(socket, len)
}
