//! What is shown of a run.

use serde::{Deserialize, Serialize};

/// What is shown in a table or a chart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Metric {
    /// Wall time of the command.
    Wall,
    /// Amount of the row per second of wall time.
    Rate,
    /// Processor time of the command.
    OwnCpu,
    /// Processor time of the command and all servers.
    TotalCpu,
    /// Peak memory of the command.
    OwnPeak,
    /// Peak memory of the command and all servers.
    TotalPeak,
    /// Peak memory of the servers.
    ServersPeak,
    /// Threads of the command at once, at most, as far as seen.
    OwnThreads,
    /// Threads of the servers.
    ServersThreads,
    /// System calls of the command and the servers that read or write, as far as the kernel counts
    /// them.
    Calls,
    /// Bytes that those calls moved.
    Bytes,
    /// Processor time of the servers.
    ServersCpu,
    /// Amount of the row per second of processor time of the servers.
    ServersRate,
    /// System calls of the servers, all of them, counted in the rounds for warming up.
    ServersCalls,
}

impl Metric {
    /// Those of every scenario, in the order they are shown.
    pub const BASE: [Metric; 5] =
        [Metric::Wall, Metric::TotalCpu, Metric::OwnCpu, Metric::OwnPeak, Metric::TotalPeak];

    /// Those that are shown where a scenario asks for them.
    pub const MORE: [Metric; 9] = [
        Metric::Rate,
        Metric::ServersRate,
        Metric::ServersCpu,
        Metric::ServersCalls,
        Metric::ServersPeak,
        Metric::OwnThreads,
        Metric::ServersThreads,
        Metric::Calls,
        Metric::Bytes,
    ];

    /// What a unit of the heading is in units of the summary.
    pub fn unit(self) -> f64 {
        match self {
            Metric::OwnPeak | Metric::TotalPeak | Metric::ServersPeak | Metric::Bytes => {
                1_048_576.0
            }
            Metric::Calls | Metric::ServersCalls => 1000.0,
            _ => 1.0,
        }
    }

    /// Whether more is better.
    pub fn more_is_better(self) -> bool {
        matches!(self, Metric::Rate | Metric::ServersRate)
    }

    /// Whether it is measured in the rounds for warming up, because measuring it costs time.
    pub fn is_of_warmup(self) -> bool {
        self == Metric::ServersCalls
    }
}
