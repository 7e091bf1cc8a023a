//! The driver of a simulated worker: it hands everything to the scheduler.

use std::io;
use std::os::fd::RawFd;

use super::workers::{self, DescriptorWait, SimulatedFileOp};
use super::world::SimulatedEvent;
use crate::driver::{Driver, FileOp, Interest, OpCompletion, SleepLimit};

/// The driver of one worker, by its number across all machines.
pub(super) struct SimulatedDriver(pub(super) usize);

impl Driver for SimulatedDriver {
    fn arm(&mut self, fd: RawFd, interest: Interest, slot: usize) {
        workers::with(|workers, world| {
            let number = world.number();
            let armed = DescriptorWait { member: self.0, slot, fd, interest, scheduled: false };
            workers.armed.insert(number, armed);
            world.touched = true;
            workers.by_slot.insert((self.0, slot), number);
        });
    }

    fn disarm(&mut self, slot: usize) {
        workers::with(|workers, _| {
            let Some(number) = workers.by_slot.remove(&(self.0, slot)) else { return };
            workers.armed.remove(&number);
            workers.all[self.0].done.push(OpCompletion {
                slot,
                result: -libc::ECANCELED,
                op: None,
            });
        });
    }

    fn start(&mut self, op: FileOp, slot: usize) {
        workers::with(|workers, world| {
            let delay = world.delay(world.faults.file_delay);
            let number = world.number();
            workers.files.insert(number, SimulatedFileOp { slot, op });
            world.after(delay, SimulatedEvent::File { member: self.0, number });
        });
    }

    fn receives(&self) -> bool {
        false
    }

    fn cancel(&mut self, _slot: usize) {}

    fn turn(&mut self, _: SleepLimit, _: bool, done: &mut Vec<OpCompletion>) -> io::Result<()> {
        workers::with(|workers, _| done.append(&mut workers.all[self.0].done));
        Ok(())
    }
}
