//! The driver of a simulated worker: it hands everything to the scheduler.

use std::io;
use std::os::fd::RawFd;

use super::world::{self, Armed, Event};
use crate::driver::{Done, Driver, FileOp, Interest, Sleep};

/// The driver of one worker, by its number across all machines.
pub(super) struct Simulated(pub(super) usize);

impl Driver for Simulated {
    fn arm(&mut self, fd: RawFd, interest: Interest, slot: usize) {
        world::with(|world| {
            let number = world.number();
            let armed = Armed { member: self.0, slot, fd, interest, scheduled: false };
            world.armed.insert(number, armed);
            world.by_slot.insert((self.0, slot), number);
        });
    }

    fn disarm(&mut self, slot: usize) {
        world::with(|world| {
            let Some(number) = world.by_slot.remove(&(self.0, slot)) else { return };
            world.armed.remove(&number);
            world.members[self.0].done.push(Done { slot, result: -libc::ECANCELED, op: None });
        });
    }

    fn start(&mut self, op: FileOp, slot: usize) {
        world::with(|world| {
            let delay = world.delay(world.faults.file_delay);
            world.after(delay, Event::File { member: self.0, slot, op });
        });
    }

    fn receives(&self) -> bool {
        false
    }

    fn cancel(&mut self, _slot: usize) {}

    fn turn(&mut self, _: Sleep, _: bool, done: &mut Vec<Done>) -> io::Result<()> {
        world::with(|world| done.append(&mut world.members[self.0].done));
        Ok(())
    }
}
