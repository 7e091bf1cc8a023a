//! Files and block devices as targets of owned operations.

use std::io::{self, IoSliceMut};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use rustix::fs::{OFlags, fcntl_getfl};
use rustix::io::ReadWriteFlags;

use crate::driver::FileOp;
use crate::memory::{Buf, Data};
use crate::op::{self, DriverOp, file_op};

/// Longest buffered write, in bytes, that is best done on the worker itself: passing it on costs
/// more, and the kernel throttles larger amounts when the disk is behind.
pub const WRITE_NOW_MAX: usize = 128 << 10;

/// An open file; cloning shares the descriptor. Operations go to the current worker's driver.
#[derive(Clone, Debug)]
pub struct File {
    fd: Arc<OwnedFd>,
    /// Opened for direct I/O.
    direct: bool,
}

/// Ways to change what is allocated (fallocate(2)).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FallocateMode {
    /// Free the range: it reads as zeroes and occupies no space.
    PunchHole,
    /// Zero the range and keep it allocated.
    ZeroRange,
    /// Allocate the holes; contents stay.
    Reserve,
}

impl std::fmt::Display for FallocateMode {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            FallocateMode::PunchHole => "holes",
            FallocateMode::ZeroRange => "ranges marked as zero",
            FallocateMode::Reserve => "the allocation of holes",
        })
    }
}

/// A read in progress ([`File::start_read`]). Dropping it does not stop it.
#[must_use = "what was read comes with its outcome"]
pub struct FileRead(DriverOp);

impl Future for FileRead {
    type Output = (io::Result<usize>, Buf);

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let Poll::Ready(over) = Pin::new(&mut self.0).poll(cx) else { return Poll::Pending };
        Poll::Ready(read(op::finished(over)))
    }
}

/// The buffer of a completed read; an empty one if it was lost with the driver.
fn read((result, op): (io::Result<usize>, Option<FileOp>)) -> (io::Result<usize>, Buf) {
    match op {
        Some(FileOp::Read { buf, .. }) => (result, buf),
        None => (result, Buf::unpooled(0)),
        Some(_) => unreachable!("drivers give back the operation they were given"),
    }
}

/// A write in progress ([`File::start_write`]). Dropping it does not stop it.
#[must_use = "what was written comes with its outcome"]
pub struct FileWrite(DriverOp);

impl Future for FileWrite {
    type Output = io::Result<usize>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let Poll::Ready(over) = Pin::new(&mut self.0).poll(cx) else { return Poll::Pending };
        Poll::Ready(op::finished(over).0)
    }
}

impl File {
    /// Takes ownership of an open descriptor.
    pub fn new(fd: OwnedFd) -> File {
        let direct = fcntl_getfl(&fd).is_ok_and(|flags| flags.contains(OFlags::DIRECT));
        File { fd: Arc::new(fd), direct }
    }

    /// Reads into `buf` at byte offset `at`; returns the number of bytes, 0 at the end of the file.
    pub async fn read_at(&self, buf: Buf, start: usize, at: u64) -> (io::Result<usize>, Buf) {
        self.start_read(buf, start, at).await
    }

    /// The same; the read is started when this returns, at the latest on the driver's next turn.
    pub fn start_read(&self, buf: Buf, start: usize, at: u64) -> FileRead {
        FileRead(op::start(FileOp::Read {
            file: self.fd.clone(),
            buf,
            start,
            at,
            direct: self.direct,
        }))
    }

    /// Fills `buf` from byte offset `at` on; `UnexpectedEof` if the file ends before that.
    pub async fn read_exact_at(&self, mut buf: Buf, at: u64) -> (io::Result<()>, Buf) {
        let mut filled = 0;
        while filled < buf.len() {
            let (result, same) = self.read_at(buf, filled, at + filled as u64).await;
            buf = same;
            match result {
                Ok(0) => return (Err(io::ErrorKind::UnexpectedEof.into()), buf),
                Ok(bytes) => filled += bytes,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return (Err(error), buf),
            }
        }
        (Ok(()), buf)
    }

    /// Writes `data` from its byte `start` on at byte offset `at`; returns the number of bytes. The
    /// write is started when this returns, at the latest on the driver's next turn. Load a payload
    /// that may be parked first ([`Data::load`]).
    pub fn start_write(&self, data: Data, start: usize, at: u64) -> FileWrite {
        FileWrite(op::start(FileOp::Write {
            file: self.fd.clone(),
            data,
            start,
            at,
            direct: self.direct,
        }))
    }

    /// Writes all of `data` at byte offset `at`; loads it first if it may be parked.
    ///
    /// # Errors
    /// Those of pwrite(2), and of loading a parked payload. A part may be written.
    pub async fn write_all_at(&self, data: Data, at: u64) -> io::Result<()> {
        self.write_rest_at(data, 0, at).await
    }

    /// Writes `data` from its byte `written` on; its first byte belongs at byte offset `at`.
    ///
    /// # Errors
    /// Those of pwrite(2), and of loading a parked payload; `WriteZero` if the kernel takes no byte. A part may be
    /// written.
    pub async fn write_rest_at(&self, data: Data, mut written: usize, at: u64) -> io::Result<()> {
        while written < data.len() {
            match self.start_write(data.clone(), written, at + written as u64).await {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(bytes) => written += bytes,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Makes completed writes durable (fdatasync).
    ///
    /// # Errors
    /// Those of fdatasync(2): what was written before may be lost, also if a later call succeeds.
    pub async fn sync(&self) -> io::Result<()> {
        file_op(FileOp::Sync { file: self.fd.clone(), data_only: true }).await.0.map(drop)
    }

    /// Changes the allocation of a range; the file's size stays.
    ///
    /// # Errors
    /// Those of fallocate(2): `Unsupported` if the file system cannot do it.
    pub async fn allocate(&self, how: FallocateMode, at: u64, len: u64) -> io::Result<()> {
        let mode = match how {
            FallocateMode::PunchHole => libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE,
            FallocateMode::ZeroRange => libc::FALLOC_FL_ZERO_RANGE | libc::FALLOC_FL_KEEP_SIZE,
            FallocateMode::Reserve => libc::FALLOC_FL_KEEP_SIZE,
        };
        let op = FileOp::Allocate { file: self.fd.clone(), mode, at, len };
        file_op(op).await.0.map(drop)
    }

    /// Reads from memory only, without waiting for a disk: `WouldBlock` if the data is not in
    /// memory, `Unsupported` if the file system cannot tell (tmpfs: always in memory).
    ///
    /// # Errors
    /// Those above, and those of preadv2(2).
    pub fn try_read_at(&self, buf: &mut [u8], at: u64) -> io::Result<usize> {
        let mut slices = [IoSliceMut::new(buf)];
        Ok(rustix::io::preadv2(&self.fd, &mut slices, at, ReadWriteFlags::NOWAIT)?)
    }

    /// Reads on the calling thread, waiting for the disk if necessary.
    ///
    /// # Errors
    /// Those of pread(2).
    pub fn read_now(&self, buf: &mut [u8], at: u64) -> io::Result<usize> {
        Ok(rustix::io::pread(&self.fd, buf, at)?)
    }

    /// Writes on the calling thread, waiting if necessary.
    ///
    /// # Errors
    /// Those of pwrite(2).
    pub fn write_now(&self, buf: &[u8], at: u64) -> io::Result<usize> {
        Ok(rustix::io::pwrite(&self.fd, buf, at)?)
    }

    /// Writes all of `data`, which is not parked, through the page cache: up to
    /// [`WRITE_NOW_MAX`] bytes on the calling thread.
    ///
    /// # Errors
    /// Those of pwrite(2). A part may be written.
    pub async fn write_buffered_at(&self, data: Data, at: u64) -> io::Result<()> {
        if data.len() <= WRITE_NOW_MAX {
            self.write_all_now(data.bytes(), at)
        } else {
            self.write_all_at(data, at).await
        }
    }

    /// Writes all of `buf` on the calling thread, waiting if necessary.
    ///
    /// # Errors
    /// `WriteZero` if the file takes no more. A part may have been written.
    pub fn write_all_now(&self, buf: &[u8], at: u64) -> io::Result<()> {
        let mut written = 0;
        while written < buf.len() {
            match self.write_now(&buf[written..], at + written as u64) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(bytes) => written += bytes,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

/// Makes the creation or removal of the name `path` durable: syncs its directory. Blocks.
///
/// # Errors
/// Those of opening the directory and of fsync(2).
pub fn sync_folder(path: &Path) -> io::Result<()> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    std::fs::File::open(folder.unwrap_or(Path::new(".")))?.sync_all()
}

impl AsFd for File {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}
