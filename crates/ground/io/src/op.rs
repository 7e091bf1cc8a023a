//! Futures of driver operations. The crate documentation has the contract on dropping them.

use std::io;
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::pin::Pin;
use std::task::{Context, Poll};

use crate::context::{try_with_worker, with_worker};
use crate::driver::{FileOp, Interest};
use crate::table::OpSlot;

/// One operation of the driver.
pub(crate) struct DriverOp {
    slot: usize,
    dropped: DropAction,
    over: bool,
}

/// How to handle an operation whose future is dropped.
enum DropAction {
    Disarm,
    Cancel,
    Finish,
}

impl Future for DriverOp {
    type Output = (i32, Option<FileOp>);

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let slot = self.slot;
        let done = with_worker(|worker| {
            let mut table = worker.ops.borrow_mut();
            match table.slots.get_mut(slot) {
                Some(OpSlot::Waiting(waker)) => {
                    if !waker.as_ref().is_some_and(|waker| waker.will_wake(cx.waker())) {
                        *waker = Some(cx.waker().clone());
                    }
                    None
                }
                Some(OpSlot::Done(..)) => match table.slots.remove(slot) {
                    OpSlot::Done(result, op) => Some((result, op)),
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

impl Drop for DriverOp {
    fn drop(&mut self) {
        if self.over {
            return;
        }
        try_with_worker(|worker| {
            let mut table = worker.ops.borrow_mut();
            match table.slots.get_mut(self.slot) {
                Some(OpSlot::Done(..)) => drop(table.slots.remove(self.slot)),
                Some(slot) => {
                    *slot = OpSlot::Orphan;
                    drop(table);
                    let mut driver = worker.driver.borrow_mut();
                    match self.dropped {
                        DropAction::Disarm => driver.disarm(self.slot),
                        DropAction::Cancel => driver.cancel(self.slot),
                        DropAction::Finish => {}
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
pub(crate) fn start(op: FileOp) -> DriverOp {
    let dropped = if op.ends() { DropAction::Finish } else { DropAction::Cancel };
    let slot = with_worker(|worker| {
        let mut table = worker.ops.borrow_mut();
        table.files_out += usize::from(op.ends());
        let slot = table.slots.insert(OpSlot::Waiting(None));
        drop(table);
        worker.driver.borrow_mut().start(op, slot);
        slot
    });
    DriverOp { slot, dropped, over: false }
}

/// Waits until `fd` is ready for `interest`, or has an error, which the next system call returns.
///
/// # Errors
/// If the driver cannot wait for the descriptor.
pub async fn ready(fd: impl AsFd, interest: Interest) -> io::Result<()> {
    let raw: RawFd = fd.as_fd().as_raw_fd();
    let slot = with_worker(|worker| {
        let slot = worker.ops.borrow_mut().slots.insert(OpSlot::Waiting(None));
        worker.driver.borrow_mut().arm(raw, interest, slot);
        slot
    });
    let _ahead = (interest == Interest::Writable).then(WriteWait::begin);
    let (result, _) = DriverOp { slot, dropped: DropAction::Disarm, over: false }.await;
    outcome(result).map(drop)
}

/// A task waits for a writable socket, until this is dropped.
struct WriteWait;

impl WriteWait {
    fn begin() -> WriteWait {
        with_worker(|worker| worker.ahead.update(|count| count + 1));
        WriteWait
    }
}

impl Drop for WriteWait {
    fn drop(&mut self) {
        try_with_worker(|worker| worker.ahead.update(|count| count - 1));
    }
}

fn outcome(result: i32) -> io::Result<usize> {
    usize::try_from(result).map_err(|_| io::Error::from_raw_os_error(-result))
}
