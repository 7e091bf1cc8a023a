//! The interface between a worker and its driver: a kernel interface and its operations.

use std::io;
use std::os::fd::{OwnedFd, RawFd};
use std::sync::Arc;
use std::time::Duration;

use crate::memory::{Buf, Data};

/// What to wait for on a descriptor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Interest {
    /// Data, a connection to accept, or the end of the stream.
    Readable,
    /// Buffer space to send, or the result of a connect.
    Writable,
}

/// An operation on a file or a socket; it owns all memory that the kernel uses until it completes.
pub(crate) enum FileOp {
    Read {
        file: Arc<OwnedFd>,
        buf: Buf,
        start: usize,
        at: u64,
        /// The file is read with direct I/O.
        direct: bool,
    },
    Write {
        file: Arc<OwnedFd>,
        data: Data,
        start: usize,
        at: u64,
        /// The file is written with direct I/O.
        direct: bool,
    },
    Sync {
        file: Arc<OwnedFd>,
        data_only: bool,
    },
    Allocate {
        file: Arc<OwnedFd>,
        mode: i32,
        at: u64,
        len: u64,
    },
    /// Receives into `buf[start..end]`; may never complete. Only if [`Driver::receives`].
    Recv {
        socket: Arc<OwnedFd>,
        buf: Vec<u8>,
        start: usize,
        end: usize,
    },
}

impl FileOp {
    /// Whether it completes without a peer's action: a worker waits for it before it ends.
    pub(crate) fn ends(&self) -> bool {
        !matches!(self, FileOp::Recv { .. })
    }
}

/// A completion: the system call's result (negative: error number) and, for file operations, the
/// operation with its buffer.
pub(crate) struct OpCompletion {
    pub(crate) slot: usize,
    pub(crate) result: i32,
    pub(crate) op: Option<FileOp>,
}

/// How long a turn may sleep.
#[derive(Debug, Clone, Copy)]
pub(crate) enum SleepLimit {
    No,
    AtMost(Duration),
    Forever,
}

impl SleepLimit {
    /// The maximum time, if there is one.
    pub(crate) fn most(self) -> Option<Duration> {
        match self {
            SleepLimit::No => Some(Duration::ZERO),
            SleepLimit::AtMost(time) => Some(time),
            SleepLimit::Forever => None,
        }
    }
}

/// One kernel interface, owned by one worker.
pub(crate) trait Driver {
    /// Completes `slot` once, when `fd` is ready for `interest` or has failed.
    fn arm(&mut self, fd: RawFd, interest: Interest, slot: usize);

    /// Stops waiting; the slot still completes soon, with any result.
    fn disarm(&mut self, slot: usize);

    /// Starts a file operation, at the latest on the next turn.
    fn start(&mut self, op: FileOp, slot: usize);

    /// Whether this driver can receive in one operation, which saves a system call between
    /// readiness and the data.
    fn receives(&self) -> bool;

    /// Cancels an operation; it still completes soon, with any result.
    fn cancel(&mut self, slot: usize);

    /// Submits the collected operations, sleeps until one completes, the worker is woken or the
    /// time is over, and appends the completions. Spins before it sleeps, if that has paid and
    /// `may_look`.
    ///
    /// An error does not belong to an operation: the driver has failed. Earlier completions are in
    /// `done`; the caller fails the other operations and drops the driver, which keeps the memory
    /// that the kernel may still use.
    fn turn(
        &mut self,
        sleep: SleepLimit,
        may_look: bool,
        done: &mut Vec<OpCompletion>,
    ) -> io::Result<()>;
}
