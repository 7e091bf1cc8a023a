//! What is shown of a run: its name, its unit, and how it comes from the raw figures.

use serde::{Deserialize, Serialize};

use crate::result::{Cell, Report, Run};
use crate::stats::Summary;
use crate::usage::Usage;

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

    /// Heading, with the unit.
    pub fn title(self, report: &Report) -> String {
        match self {
            Metric::Wall => "Wall time, seconds",
            Metric::Rate => return report.rate_unit.clone().unwrap_or_default(),
            Metric::OwnCpu => "Processor time of the command, seconds",
            Metric::TotalCpu => "Processor time of command and servers, seconds",
            Metric::OwnPeak => "Peak memory of the command, MiB",
            Metric::TotalPeak => "Peak memory of command and servers, MiB",
            Metric::ServersPeak => "Peak memory of the servers, MiB",
            Metric::OwnThreads => "Threads of the command",
            Metric::ServersThreads => "Threads of the servers",
            Metric::Calls => "Calls of read, write, sendfile and splice, thousands",
            Metric::Bytes => "Bytes moved by those calls, MiB",
            Metric::ServersCpu => "Processor time of the servers, seconds",
            Metric::ServersRate => {
                let unit = report.rate_unit.clone().unwrap_or_default();
                return format!("{unit}, by the processor time of the servers");
            }
            Metric::ServersCalls => "System calls of the servers, thousands",
        }
        .to_owned()
    }

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

    /// The summary of a cell.
    pub fn of(self, cell: &Cell) -> Option<&Summary> {
        match self {
            Metric::Wall => cell.wall_s.as_ref(),
            Metric::OwnCpu => cell.own_cpu_s.as_ref(),
            Metric::TotalCpu => cell.total_cpu_s.as_ref(),
            Metric::OwnPeak => cell.own_peak_bytes.as_ref(),
            Metric::TotalPeak => cell.total_peak_bytes.as_ref(),
            _ => cell.more.get(&self),
        }
    }

    /// The value of a run; None where it has none. `amount` is that of its row.
    pub fn value(self, run: &Run, amount: Option<f64>) -> Option<f64> {
        let servers = |value: fn(&Usage) -> u64| {
            let sum: u64 = run.servers.iter().map(|(_, usage)| value(usage)).sum();
            (!run.servers.is_empty()).then_some(sum as f64)
        };
        let all = |value: fn(&Usage) -> Option<u64>| {
            let usages = run.servers.iter().map(|(_, usage)| usage).chain([&run.command]);
            Some(usages.map(value).sum::<Option<u64>>()? as f64)
        };
        let servers_cpu_s = (!run.servers.is_empty())
            .then(|| run.servers.iter().map(|(_, usage)| usage.cpu_s()).sum::<f64>());
        match self {
            Metric::Wall => Some(run.wall_s),
            Metric::Rate => amount.filter(|_| run.wall_s > 0.0).map(|amount| amount / run.wall_s),
            Metric::OwnCpu => Some(run.command.cpu_s()),
            Metric::TotalCpu => Some(run.total_cpu_s()),
            Metric::OwnPeak => Some(run.command.peak_bytes as f64),
            Metric::TotalPeak => Some(run.total_peak_bytes() as f64),
            Metric::ServersPeak => servers(|usage| usage.peak_bytes),
            Metric::OwnThreads => Some(run.command.threads as f64),
            Metric::ServersThreads => servers(|usage| usage.threads),
            Metric::Calls => all(|usage| usage.io.map(|io| io.reads + io.writes)),
            Metric::Bytes => all(|usage| usage.io.map(|io| io.read_bytes + io.written_bytes)),
            Metric::ServersCpu => servers_cpu_s,
            Metric::ServersRate => match (amount, servers_cpu_s) {
                (Some(amount), Some(cpu)) if amount > 0.0 && cpu > 0.0 => Some(amount / cpu),
                _ => None,
            },
            Metric::ServersCalls => {
                let counts = run.servers.iter().map(|(_, usage)| usage.calls);
                counts
                    .sum::<Option<u64>>()
                    .filter(|_| !run.servers.is_empty())
                    .map(|sum| sum as f64)
            }
        }
    }
}
