//! Futures of driver operations. The crate documentation has the contract on dropping them.

use std::io;
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::pin::Pin;
use std::task::{Context, Poll};

use crate::context::{try_with_worker, with_worker};
use crate::driver::{FileOp, Interest};
use crate::table::Slot;

/// One operation of the driver.
pub(crate) struct Op {
    slot: usize,
    dropped: Dropped,
    over: bool,
}

/// How to handle an operation whose future is dropped.
enum Dropped {
    Disarm,
    Cancel,
    Finish,
}

impl Future for Op {
    type Output = (i32, Option<FileOp>);

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let slot = self.slot;
        let done = with_worker(|worker| {
            let mut table = worker.ops.borrow_mut();
            match table.slots.get_mut(slot) {
                Some(Slot::Waiting(waker)) => {
                    if !waker.as_ref().is_some_and(|waker| waker.will_wake(cx.waker())) {
                        *waker = Some(cx.waker().clone());
                    }
                    None
                }
                Some(Slot::Done(..)) => match table.slots.remove(slot) {
                    Slot::Done(result, op) => Some((result, op)),
                    _ => unreachable!("matched just above"),
                },
                _ => unreachable!("an operation is polled after its end"),
            }
        });
        match done {
            None => Poll::Pending,
            Some(output) => {
                self.over = true;
                Poll::Ready(output)
            }
        }
    }
}

impl Drop for Op {
    fn drop(&mut self) {
        if self.over {
            return;
        }
        try_with_worker(|worker| {
            let mut table = worker.ops.borrow_mut();
            match table.slots.get_mut(self.slot) {
                Some(Slot::Done(..)) => drop(table.slots.remove(self.slot)),
                Some(slot) => {
                    *slot = Slot::Orphan;
                    drop(table);
                    let mut driver = worker.driver.borrow_mut();
                    match self.dropped {
                        Dropped::Disarm => driver.disarm(self.slot),
                        Dropped::Cancel => driver.cancel(self.slot),
                        Dropped::Finish => {}
                    }
                }
                None => {}
            }
        });
    }
}

/// Runs one operation; it starts now, at the latest on the driver's next turn.
pub(crate) fn file_op(op: FileOp) -> impl Future<Output = (io::Result<usize>, Option<FileOp>)> {
    let op = start(op);
    async move { finished(op.await) }
}

/// The result of a completed [`file_op`]. `None` for the operation: its driver failed, and the
/// kernel may still use its memory.
pub(crate) fn finished((result, op): (i32, Option<FileOp>)) -> (io::Result<usize>, Option<FileOp>) {
    (outcome(result), op)
}

/// Starts one operation.
pub(crate) fn start(op: FileOp) -> Op {
    let dropped = if op.ends() { Dropped::Finish } else { Dropped::Cancel };
    let slot = with_worker(|worker| {
        let mut table = worker.ops.borrow_mut();
        table.files_out += usize::from(op.ends());
        let slot = table.slots.insert(Slot::Waiting(None));
        drop(table);
        worker.driver.borrow_mut().start(op, slot);
        slot
    });
    Op { slot, dropped, over: false }
}

/// Waits until `fd` is ready for `interest`, or has an error, which the next system call returns.
///
/// # Errors
/// If the driver cannot wait for the descriptor.
pub async fn ready(fd: impl AsFd, interest: Interest) -> io::Result<()> {
    let raw: RawFd = fd.as_fd().as_raw_fd();
    let slot = with_worker(|worker| {
        let slot = worker.ops.borrow_mut().slots.insert(Slot::Waiting(None));
        worker.driver.borrow_mut().arm(raw, interest, slot);
        slot
    });
    let _ahead = (interest == Interest::Writable).then(Ahead::begin);
    let (result, _) = Op { slot, dropped: Dropped::Disarm, over: false }.await;
    outcome(result).map(drop)
}

/// A task waits for a writable socket, until this is dropped.
struct Ahead;

impl Ahead {
    fn begin() -> Ahead {
        with_worker(|worker| worker.ahead.update(|count| count + 1));
        Ahead
    }
}

impl Drop for Ahead {
    fn drop(&mut self) {
        try_with_worker(|worker| worker.ahead.update(|count| count - 1));
    }
}

fn outcome(result: i32) -> io::Result<usize> {
    usize::try_from(result).map_err(|_| io::Error::from_raw_os_error(-result))
}
