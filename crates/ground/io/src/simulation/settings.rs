//! What the caller of a simulation decides.

use std::time::Duration;

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
pub struct SimulationSettings {
    /// Determines everything that is random.
    pub seed: u64,
    /// What may go wrong at first; [`set_faults`](super::set_faults) changes it.
    pub faults: Faults,
    /// The faults that happen, by their number in [`SimulationReport::chosen`](super::SimulationReport::chosen);
    /// `None`: all.
    pub keep: Option<Vec<u64>>,
    /// Virtual time after which the run counts as stuck.
    pub time: Duration,
    /// Steps after which the run counts as stuck.
    pub steps: u64,
    /// Number of last events to keep as text; 0: none.
    pub log: usize,
}
