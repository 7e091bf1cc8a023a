//! The workers of a simulation, and what they wait for.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::os::fd::RawFd;
use std::rc::Rc;

use super::world::{self, SimulatedWorld};
use crate::context::Worker;
use crate::driver::{FileOp, Interest, OpCompletion};

thread_local! {
    static WORKERS: RefCell<Option<SimulatedWorkers>> = const { RefCell::new(None) };
}

/// The workers of all machines.
#[derive(Default)]
pub(super) struct SimulatedWorkers {
    /// By the number of the worker's `WorkerRecord`.
    pub(super) all: Vec<SimulatedWorker>,
    /// Waits for descriptors, by their number.
    pub(super) armed: BTreeMap<u64, DescriptorWait>,
    /// Numbers of waits, by worker and slot.
    pub(super) by_slot: BTreeMap<(usize, usize), u64>,
    /// File operations that were not carried out yet, by their number.
    pub(super) files: BTreeMap<u64, SimulatedFileOp>,
}

/// A worker.
pub(super) struct SimulatedWorker {
    pub(super) worker: Rc<Worker>,
    /// Completions for its next step.
    pub(super) done: Vec<OpCompletion>,
}

/// A task's wait for a descriptor.
pub(super) struct DescriptorWait {
    pub(super) member: usize,
    pub(super) slot: usize,
    pub(super) fd: RawFd,
    pub(super) interest: Interest,
    /// It was found ready, and the event is in the queue.
    pub(super) scheduled: bool,
}

/// A file operation.
pub(super) struct SimulatedFileOp {
    pub(super) slot: usize,
    pub(super) op: FileOp,
}

/// Runs `f` with the workers and the state of the simulation of this thread, if there is one. `f`
/// runs no foreign code.
pub(super) fn with<R>(
    f: impl FnOnce(&mut SimulatedWorkers, &mut SimulatedWorld) -> R,
) -> Option<R> {
    let found = WORKERS.try_with(|workers| {
        let mut workers = workers.borrow_mut();
        let workers = workers.as_mut()?;
        world::with(|world| f(workers, world))
    });
    found.ok().flatten()
}

/// Makes `workers` those of the simulation of this thread; returns the ones before.
pub(super) fn replace(workers: Option<SimulatedWorkers>) -> Option<SimulatedWorkers> {
    WORKERS.with(|current| current.replace(workers))
}
