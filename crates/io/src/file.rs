//! Files and block devices as targets of owned operations.

use std::io::{self, IoSliceMut};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use rustix::io::ReadWriteFlags;

use crate::buf::{Buf, Data};
use crate::driver::FileOp;
use crate::op::file_op;

/// An open file; cloning shares the descriptor. Operations go to the current worker's driver.
#[derive(Clone, Debug)]
pub struct File(Arc<OwnedFd>);

/// Ways to change what is allocated (fallocate(2)).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Allocate {
    /// Free the range: it reads as zeroes and occupies no space.
    PunchHole,
    /// Zero the range and keep it allocated.
    ZeroRange,
    /// Allocate what is not; contents stay.
    Reserve,
}

impl File {
    /// Takes over an open descriptor.
    pub fn new(fd: OwnedFd) -> File {
        File(Arc::new(fd))
    }

    /// Reads into `buf` at byte offset `at`; returns the number of bytes, 0 at the end of the file.
    pub async fn read_at(&self, buf: Buf, start: usize, at: u64) -> (io::Result<usize>, Buf) {
        let op = FileOp::Read { file: self.0.clone(), buf, start, at };
        match file_op(op).await {
            (result, FileOp::Read { buf, .. }) => (result, buf),
            _ => unreachable!("drivers give back the operation they were given"),
        }
    }

    /// Fills `buf` from byte offset `at` on; `UnexpectedEof` where the file ends before.
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

    /// Writes all of `data` at byte offset `at`.
    pub async fn write_all_at(&self, data: Data, at: u64) -> io::Result<()> {
        let mut written = 0;
        while written < data.len() {
            let op = FileOp::Write {
                file: self.0.clone(),
                data: data.clone(),
                start: written,
                at: at + written as u64,
            };
            match file_op(op).await.0 {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(bytes) => written += bytes,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Makes completed writes durable (fdatasync).
    pub async fn sync(&self) -> io::Result<()> {
        file_op(FileOp::Sync { file: self.0.clone(), data_only: true }).await.0.map(drop)
    }

    /// Changes the allocation of a range; the file's size stays.
    pub async fn allocate(&self, how: Allocate, at: u64, len: u64) -> io::Result<()> {
        let mode = match how {
            Allocate::PunchHole => libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE,
            Allocate::ZeroRange => libc::FALLOC_FL_ZERO_RANGE | libc::FALLOC_FL_KEEP_SIZE,
            Allocate::Reserve => libc::FALLOC_FL_KEEP_SIZE,
        };
        let op = FileOp::Allocate { file: self.0.clone(), mode, at, len };
        file_op(op).await.0.map(drop)
    }

    /// Reads what is in memory already, without waiting for a disk: `WouldBlock` when it is not,
    /// `Unsupported` where the file system cannot tell (tmpfs: always in memory).
    pub fn try_read_at(&self, buf: &mut [u8], at: u64) -> io::Result<usize> {
        let mut slices = [IoSliceMut::new(buf)];
        Ok(rustix::io::preadv2(&self.0, &mut slices, at, ReadWriteFlags::NOWAIT)?)
    }

    /// Reads on the calling thread, waiting for the disk where needed.
    pub fn read_now(&self, buf: &mut [u8], at: u64) -> io::Result<usize> {
        Ok(rustix::io::pread(&self.0, buf, at)?)
    }

    /// Writes on the calling thread, waiting where needed.
    pub fn write_now(&self, buf: &[u8], at: u64) -> io::Result<usize> {
        Ok(rustix::io::pwrite(&self.0, buf, at)?)
    }
}

impl AsFd for File {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
