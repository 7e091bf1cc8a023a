//! Workers in virtual time on one thread, for tests that find the same fault again by its seed.
//!
//! [`run`] replaces clock, driver and threads of the calling thread. A *machine* is a group of
//! workers that can lose power: [`SimulatedMachine::kill`] drops its tasks, whatever they wait for. Sockets
//! are real ones of the kernel; the seed decides when they are reported as ready, how many bytes
//! a call moves, and which connections end. File operations and blocking calls run on this thread,
//! each as a whole, when the time that the seed gave them has passed. If nothing is ready, the clock
//! moves to the next event: a run waits for nothing.
//!
//! The order of tasks of one worker stays that of the other drivers: first come, first served.
//! Everything else has an order of its own for each seed: workers, completions, blocking calls.
//!
//! What a program takes from elsewhere (threads of its own, the system's clock, random numbers,
//! the order of a hash map) is not simulated; a run that depends on it has another
//! [`SimulationReport::trace`] next time.

mod dialling;
mod driver;
mod life;
mod mortal;
mod report;
mod scheduler;
mod settings;
mod sockets;
mod workers;
mod world;

pub(crate) use self::dialling::dialling;
pub(crate) use self::mortal::mortal;
pub use self::report::SimulationReport;
pub use self::scheduler::{SimulatedMachine, SimulationError, run};
pub use self::settings::{Faults, SimulationSettings};
pub(crate) use self::sockets::{receiving, sending, splicing};
pub use self::world::{choose, note, random, set_faults};
pub(crate) use self::world::{note_panic, now, take_job, touch};
