//! What a kernel interface must do to carry a worker, and the operations it is given.

use std::io;
use std::os::fd::{OwnedFd, RawFd};
use std::sync::Arc;
use std::time::Duration;

use crate::memory::{Buf, Data};

/// What to wait for on a descriptor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Interest {
    /// Bytes or a connection to take, or the end of the stream.
    Readable,
    /// Room to send, or the outcome of a connect.
    Writable,
}

/// An operation on a file or a socket, owning all that the kernel touches until it completes.
pub(crate) enum FileOp {
    Read {
        file: Arc<OwnedFd>,
        buf: Buf,
        start: usize,
        at: u64,
        /// The file is read past the page cache.
        direct: bool,
    },
    Write {
        file: Arc<OwnedFd>,
        data: Data,
        start: usize,
        at: u64,
        /// The same of writing.
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
    /// Receives into `buf[start..end]`; may take for ever. Only where [`Driver::receives`].
    Recv {
        socket: Arc<OwnedFd>,
        buf: Vec<u8>,
        start: usize,
        end: usize,
    },
}

impl FileOp {
    /// Whether it completes without anybody else's doing: a worker waits for it before it ends.
    pub(crate) fn ends(&self) -> bool {
        !matches!(self, FileOp::Recv { .. })
    }
}

/// A completion: the system call's result (negative: error number) and, for file operations, the
/// operation with its buffer.
pub(crate) struct Done {
    pub(crate) slot: usize,
    pub(crate) result: i32,
    pub(crate) op: Option<FileOp>,
}

/// How long a turn may sleep.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Sleep {
    No,
    AtMost(Duration),
    Forever,
}

impl Sleep {
    /// The longest time, where there is one.
    pub(crate) fn most(self) -> Option<Duration> {
        match self {
            Sleep::No => Some(Duration::ZERO),
            Sleep::AtMost(time) => Some(time),
            Sleep::Forever => None,
        }
    }
}

/// One kernel interface, owned by one worker.
pub(crate) trait Driver {
    /// Completes `slot` once, when `fd` is ready for `interest` or has failed.
    fn arm(&mut self, fd: RawFd, interest: Interest, slot: usize);

    /// Gives up waiting; the slot still completes, soon, with any result.
    fn disarm(&mut self, slot: usize);

    /// Starts a file operation, at the latest with the next turn.
    fn start(&mut self, op: FileOp, slot: usize);

    /// Whether receiving is one operation here: it saves the system call between "there is something"
    /// and taking it.
    fn receives(&self) -> bool;

    /// Gives up an operation that was started; it still completes, soon, with any result.
    fn cancel(&mut self, slot: usize);

    /// Submits what was collected, sleeps until something completes, the worker's wakeup is signalled
    /// or the time is over, and appends what has completed. Looks before it sleeps, where that has paid
    /// and `may_look`.
    ///
    /// An error is none of an operation: the driver has failed. What has completed before is in `done`; its
    /// caller gives up the rest and drops the driver, which keeps for the kernel what it may still use.
    fn turn(&mut self, sleep: Sleep, may_look: bool, done: &mut Vec<Done>) -> io::Result<()>;
}
