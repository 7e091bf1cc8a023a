//! What the caller of a simulation gets to know.

use std::time::Duration;

/// What happened in a simulation.
#[derive(Debug, Clone, Default)]
pub struct SimulationReport {
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
