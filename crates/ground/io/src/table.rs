//! Operations in flight: maps the driver's completions to futures.

use std::task::Waker;

use slab::Slab;

use crate::driver::{FileOp, OpCompletion};

/// State of one operation.
pub(crate) enum OpSlot {
    Waiting(Option<Waker>),
    Done(i32, Option<FileOp>),
    /// The future was dropped; the driver still owns the operation.
    Orphan,
}

/// All operations of one worker that its driver has.
#[derive(Default)]
pub(crate) struct OpTable {
    pub(crate) slots: Slab<OpSlot>,
    /// File operations among them: a worker waits for these before it ends.
    pub(crate) files_out: usize,
}

impl OpTable {
    /// Records a completion and returns the task to wake.
    pub(crate) fn complete(&mut self, done: OpCompletion) -> Option<Waker> {
        self.files_out -= usize::from(done.op.as_ref().is_some_and(FileOp::ends));
        let slot = self.slots.get_mut(done.slot)?;
        match slot {
            OpSlot::Waiting(waker) => {
                let waker = waker.take();
                *slot = OpSlot::Done(done.result, done.op);
                waker
            }
            OpSlot::Orphan => {
                self.slots.remove(done.slot);
                None
            }
            OpSlot::Done(..) => None,
        }
    }

    /// Fails all operations (EIO) after their driver failed, and returns the tasks to wake. The
    /// driver keeps whatever the kernel may still use.
    pub(crate) fn fail_all(&mut self) -> Vec<Waker> {
        self.files_out = 0;
        let mut woken = Vec::new();
        self.slots.retain(|_, slot| match slot {
            OpSlot::Waiting(waker) => {
                woken.extend(waker.take());
                *slot = OpSlot::Done(-libc::EIO, None);
                true
            }
            OpSlot::Done(..) => true,
            OpSlot::Orphan => false,
        });
        woken
    }
}
