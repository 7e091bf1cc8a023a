//! Operations in flight: the table that joins futures to what the driver completes.

use std::task::Waker;

use slab::Slab;

use crate::driver::{Done, FileOp};

/// State of one operation.
pub(crate) enum Slot {
    Waiting(Option<Waker>),
    Done(i32, Option<FileOp>),
    /// The future is gone; the driver still owns the operation.
    Orphan,
}

/// All operations of one worker that were given to its driver.
#[derive(Default)]
pub(crate) struct Table {
    pub(crate) slots: Slab<Slot>,
    /// File operations among them: a worker does not end before these have.
    pub(crate) files_out: usize,
}

impl Table {
    /// Records a completion and says whom to wake.
    pub(crate) fn complete(&mut self, done: Done) -> Option<Waker> {
        self.files_out -= usize::from(done.op.as_ref().is_some_and(FileOp::ends));
        let slot = self.slots.get_mut(done.slot)?;
        match slot {
            Slot::Waiting(waker) => {
                let waker = waker.take();
                *slot = Slot::Done(done.result, done.op);
                waker
            }
            Slot::Orphan => {
                self.slots.remove(done.slot);
                None
            }
            Slot::Done(..) => None,
        }
    }

    /// Fails all operations (EIO), because their driver has failed, and says whom to wake. Whatever the
    /// kernel may still use of them stays with the driver.
    pub(crate) fn fail_all(&mut self) -> Vec<Waker> {
        self.files_out = 0;
        let mut woken = Vec::new();
        self.slots.retain(|_, slot| match slot {
            Slot::Waiting(waker) => {
                woken.extend(waker.take());
                *slot = Slot::Done(-libc::EIO, None);
                true
            }
            Slot::Done(..) => true,
            Slot::Orphan => false,
        });
        woken
    }
}
