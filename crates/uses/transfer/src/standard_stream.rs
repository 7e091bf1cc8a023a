//! Standard input and output as sides of a copy.

use std::os::fd::AsFd;

use rustix::fs::{FileType, OFlags};

/// Whether data may arrive later: a pipe or a socket.
pub fn is_stream(fd: impl AsFd) -> bool {
    rustix::fs::fstat(fd).is_ok_and(|data| {
        matches!(FileType::from_raw_mode(data.st_mode), FileType::Fifo | FileType::Socket)
    })
}

/// Whether a read would return nothing: a pipe whose writers have ended, a file at its end, or
/// `/dev/null`. Other devices may have data.
pub fn has_no_data(fd: impl AsFd) -> bool {
    match rustix::io::ioctl_fionread(&fd) {
        Ok(bytes) => bytes == 0,
        Err(_) => is_null(fd),
    }
}

/// Whether this replaces a standard stream that was closed when the program began. Rust then opens
/// `/dev/null` for reading and writing; a user who redirects from there opens it only for reading.
pub fn is_put_in_place(fd: impl AsFd) -> bool {
    let fd = fd.as_fd();
    let mode = rustix::fs::fcntl_getfl(fd).map(|flags| flags & OFlags::RWMODE);
    is_null(fd) && mode == Ok(OFlags::RDWR)
}

/// Whether this is `/dev/null`.
fn is_null(fd: impl AsFd) -> bool {
    const NULL: (u32, u32) = (1, 3);
    let device = rustix::fs::fstat(fd).map(|data| data.st_rdev);
    device.is_ok_and(|id| (rustix::fs::major(id), rustix::fs::minor(id)) == NULL)
}

/// Whether output there goes anywhere.
pub fn is_heard(fd: impl AsFd) -> bool {
    let fd = fd.as_fd();
    let mode = rustix::fs::fcntl_getfl(fd).map(|flags| flags & OFlags::RWMODE);
    !is_put_in_place(fd) && mode.is_ok_and(|mode| mode != OFlags::RDONLY)
}

/// Whether a character device accepts writes, unlike /dev/full: tried with no bytes. Other files
/// are not tried.
///
/// # Errors
/// That of the write.
pub fn takes_writes(fd: impl AsFd) -> std::io::Result<()> {
    let kind = FileType::from_raw_mode(rustix::fs::fstat(&fd)?.st_mode);
    if kind == FileType::CharacterDevice {
        rustix::io::write(fd, &[])?;
    }
    Ok(())
}
