//! Workers in virtual time on one thread, for tests that find the same fault again by its seed.
//!
//! [`run`] replaces clock, driver and threads of the calling thread. A *machine* is a group of
//! workers that can lose power: [`Machine::kill`] drops its tasks, whatever they wait for. Sockets
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
//! [`Report::trace`] next time.

mod driver;
mod mortal;
mod scheduler;
mod sockets;
mod world;

use std::time::Duration;

use self::driver::Simulated;
pub(crate) use self::mortal::mortal;
pub use self::scheduler::{Machine, Stuck, run};
pub(crate) use self::sockets::{dialling, receiving, sending, splicing};
pub use self::world::{choose, note, random, set_faults};
pub(crate) use self::world::{note_panic, now, take_job};

/// What may go wrong, and how often. [`Faults::default`]: nothing.
#[derive(Debug, Clone, Copy, Default)]
pub struct Faults {
    /// Sends and receives of a thousand that move a part of the bytes.
    pub short: u64,
    /// Sends and receives of a thousand that have to wait, even if the socket is ready.
    pub stall: u64,
    /// Maximum delay of a ready socket.
    pub socket_delay: Duration,
    /// Maximum duration of a file operation or a blocking call.
    pub file_delay: Duration,
    /// Sends and receives of 100,000 that end the connection.
    pub cut: u64,
    /// Connections of a thousand that are refused.
    pub refuse: u64,
}

/// How to run a simulation.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Determines everything that is random.
    pub seed: u64,
    /// What may go wrong at first; [`set_faults`] changes it.
    pub faults: Faults,
    /// The faults that happen, by their number in [`Report::chosen`]; `None`: all.
    pub keep: Option<Vec<u64>>,
    /// Virtual time after which the run counts as stuck.
    pub time: Duration,
    /// Steps after which the run counts as stuck.
    pub steps: u64,
    /// Number of last events to keep as text; 0: none.
    pub log: usize,
}

/// What happened in a simulation.
#[derive(Debug, Clone, Default)]
pub struct Report {
    /// A digest of all events: the same seed gives the same one.
    pub trace: u64,
    /// Number of steps.
    pub steps: u64,
    /// Virtual time that has passed.
    pub time: Duration,
    /// The faults that happened: number and name.
    pub chosen: Vec<(u64, &'static str)>,
    /// Messages of tasks that panicked.
    pub panics: Vec<String>,
    /// The last events, each with its time.
    pub log: Vec<String>,
}
