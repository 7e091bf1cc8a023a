//! What was measured: raw runs and their summaries. `result.json` is a `ScenarioReport`.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::machine::MachineFacts;
pub use crate::metric::Metric;
use crate::plan::{PlanStep, ScenarioPlan};
use crate::stats::SampleSummary;
use crate::usage::Usage;
use blockhaul_measure::shell_line;

/// Version of the layout of `result.json`; one more when a reader of the old one would go wrong.
pub const FORMAT: u32 = 2;

/// Whether a column or a program is of this project: its label says so. All others are peers.
pub fn is_ours(label: &str) -> bool {
    label.contains("blockhaul")
}

/// A scenario's results with all that is needed to judge and repeat them.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ScenarioReport {
    /// `FORMAT` of the program that wrote it.
    pub format: u32,
    /// Name of the scenario.
    pub name: String,
    /// Heading.
    pub title: String,
    /// Text for readers.
    pub description: String,
    /// Whether it was run in full size.
    pub full: bool,
    /// Whether the scenario has one size only, which is neither full nor reduced.
    #[serde(default)]
    pub one_size: bool,
    /// Whether it was stopped before the end.
    pub interrupted: bool,
    /// When it was started, UTC.
    pub started: String,
    /// Machine and system.
    pub machine: MachineFacts,
    /// Processes that wanted to run in the last minute before the end.
    pub load_after: f64,
    /// Commit that the tree was at, with a + if files were changed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub commit: Option<String>,
    /// What programs say about their version.
    pub programs: BTreeMap<String, String>,
    /// How it was run.
    pub settings: RunSettings,
    /// Labels of the columns.
    pub columns: Vec<String>,
    /// The column that others are compared with.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reference: Option<usize>,
    /// What curves are drawn over.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub curve: Option<String>,
    /// What is shown besides the base.
    #[serde(default)]
    pub show: Vec<Metric>,
    /// Unit of the rate, where there is one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rate_unit: Option<String>,
    /// The rows.
    pub rows: Vec<ReportRow>,
    /// What was done before the first run.
    pub setup: Vec<String>,
    /// Cells, row by row.
    pub cells: Vec<CellReport>,
    /// Median share of the machine's processors that others used during the runs, in percent; none if several
    /// cells were run at the same time.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub noise_percent: Option<f64>,
    /// Runs in the order of time: every run of a new report, the failed ones of a report from a file.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub runs: Vec<CellRun>,
}

/// How a scenario was run.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct RunSettings {
    /// Counted runs of each cell.
    pub runs: u32,
    /// Rounds before them.
    pub warmup: u32,
    /// Cells that were run at the same time.
    #[serde(default = "one")]
    pub together: u32,
    /// Time for one command, in seconds.
    pub timeout_s: f64,
    /// Whether caches were dropped before each run.
    pub drop_caches: bool,
    /// Seed of the order.
    pub seed: u64,
}

fn one() -> u32 {
    1
}

/// A row's heading.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ReportRow {
    /// Heading.
    pub label: String,
    /// Variables of the case and the matrix.
    pub variables: BTreeMap<String, String>,
    /// Why its result was not checked.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub unchecked: Option<String>,
    /// Where it is on the axis of curves.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub curve_at: Option<f64>,
    /// How much one run does, in the unit of the rate times seconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub amount: Option<f64>,
}

/// A row in a column.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct CellReport {
    /// Index of the row.
    pub row: usize,
    /// Index of the column.
    pub column: usize,
    /// Why it was not run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub skipped: Option<String>,
    /// Steps before each run.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub prepare: Vec<String>,
    /// Servers around it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub servers: Vec<String>,
    /// What was timed.
    pub command: String,
    /// Steps after each run.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub check: Vec<String>,
    /// Counted successful runs.
    pub good: usize,
    /// Counted runs that failed.
    pub failed: usize,
    /// Wall time of the command in seconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub wall_s: Option<SampleSummary>,
    /// Processor time of the command in seconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub own_cpu_s: Option<SampleSummary>,
    /// Processor time of the command and all servers in seconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub total_cpu_s: Option<SampleSummary>,
    /// Peak memory of the command in bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub own_peak_bytes: Option<SampleSummary>,
    /// Peak memory of the command and all servers in bytes; the peaks need not fall together.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub total_peak_bytes: Option<SampleSummary>,
    /// Wall time divided by that of the reference column in the same round.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ratio: Option<SampleSummary>,
    /// What else is shown.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub more: BTreeMap<Metric, SampleSummary>,
}

/// One run of a cell.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct CellRun {
    /// Index of the row.
    pub row: usize,
    /// Index of the column.
    pub column: usize,
    /// Round, from 0; those for warming up come first.
    pub round: u32,
    /// Whether it was for warming up and does not count.
    pub warmup: bool,
    /// Why it failed.
    pub failure: Option<RunFailure>,
    /// Wall time of the command in seconds.
    pub wall_s: f64,
    /// What the command used.
    pub command: Usage,
    /// What servers used from when they were ready until the command had ended, by name.
    pub servers: Vec<(String, Usage)>,
    /// Processor time that everybody else on the machine used meanwhile, in seconds: kernel
    /// threads, and noise.
    pub others_cpu_s: f64,
}

/// Why a run failed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunFailure {
    /// `prepare`, `servers`, `command` or `check`.
    pub stage: String,
    /// One line.
    pub why: String,
    /// The last lines of stderr.
    pub stderr: String,
}

/// What can be shown of a cell.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum CellState<'a> {
    /// It was not run, for this reason.
    Skipped(&'a str),
    /// Nothing was measured before it was stopped.
    Missing,
    /// All runs failed: their number.
    Failed(usize),
    /// The summary of the good runs.
    Good(&'a SampleSummary),
}

impl CellReport {
    /// What can be shown of it.
    pub fn state(&self, metric: Metric) -> CellState<'_> {
        match (&self.skipped, metric.of(self)) {
            (Some(reason), _) => CellState::Skipped(reason),
            (None, Some(summary)) => CellState::Good(summary),
            (None, None) if self.failed > 0 => CellState::Failed(self.failed),
            (None, None) => CellState::Missing,
        }
    }
}

impl CellRun {
    /// Processor time of command and servers, in seconds.
    pub fn total_cpu_s(&self) -> f64 {
        self.command.cpu_s() + self.servers.iter().map(|(_, usage)| usage.cpu_s()).sum::<f64>()
    }

    /// Peaks of command and servers added up, in bytes.
    pub fn total_peak_bytes(&self) -> u64 {
        let servers = self.servers.iter().map(|(_, usage)| usage.peak_bytes);
        servers.fold(self.command.peak_bytes, u64::saturating_add)
    }

    /// Whether it is counted and successful.
    pub fn counts(&self) -> bool {
        !self.warmup && self.failure.is_none()
    }
}

impl ScenarioReport {
    /// What is shown of it, in order.
    pub fn metrics(&self) -> Vec<Metric> {
        let mut metrics = Metric::BASE.to_vec();
        metrics.extend(Metric::MORE.iter().filter(|metric| self.show.contains(metric)));
        metrics.retain(|metric| Metric::BASE.contains(metric) || self.has(*metric));
        if self.has_load_generator() {
            // The same program in all columns: its figures say nothing about them.
            metrics.retain(|metric| !matches!(metric, Metric::OwnCpu | Metric::OwnPeak));
        }
        if let Some(at) = metrics.iter().position(|metric| *metric == Metric::Rate) {
            metrics[..=at].rotate_right(1);
        }
        metrics
    }

    /// Whether the columns are servers: every row has the same command for all of them, and it
    /// makes requests for as long as it runs.
    pub fn has_load_generator(&self) -> bool {
        self.rate_unit.is_some()
            && (0..self.rows.len()).all(|row| {
                let mut ran = self.row(row).iter().filter(|cell| cell.skipped.is_none());
                let program = |cell: &CellReport| cell.command.split(' ').next().map(str::to_owned);
                let first = ran.clone().next().and_then(program);
                ran.all(|cell| !cell.servers.is_empty() && program(cell) == first)
            })
    }

    /// Whether a cell has a value: what could not be measured anywhere is no table.
    pub fn has(&self, metric: Metric) -> bool {
        self.cells.iter().any(|cell| metric.of(cell).is_some())
    }

    /// The cell of a row and a column.
    pub fn cell(&self, row: usize, column: usize) -> &CellReport {
        &self.cells[row * self.columns.len() + column]
    }

    /// The cells of a row.
    pub fn row(&self, row: usize) -> &[CellReport] {
        &self.cells[row * self.columns.len()..(row + 1) * self.columns.len()]
    }

    /// Whether there is a cell for every row and column, so that the others here cannot fail. For
    /// reports that were read from files.
    pub fn is_whole(&self) -> bool {
        let width = self.columns.len();
        let in_place = |(at, cell): (usize, &CellReport)| cell.row * width + cell.column == at;
        width > 0
            && self.cells.len() == self.rows.len() * width
            && self.cells.iter().all(|cell| cell.column < width && cell.row < self.rows.len())
            && self.cells.iter().enumerate().all(in_place)
            && self.reference.is_none_or(|reference| reference < width)
            && self.runs.iter().all(|run| run.row < self.rows.len() && run.column < width)
    }

    /// Failed runs that count.
    pub fn failures(&self) -> usize {
        self.cells.iter().map(|cell| cell.failed).fold(0, usize::saturating_add)
    }
}

/// [`ScenarioReport::noise_percent`] of these runs.
pub fn noise_percent(settings: &RunSettings, cores: usize, runs: &[CellRun]) -> Option<f64> {
    if settings.together > 1 {
        return None;
    }
    let share = |run: &CellRun| 100.0 * run.others_cpu_s / (run.wall_s * cores.max(1) as f64);
    let shares: Vec<f64> =
        runs.iter().filter(|run| run.counts() && run.wall_s > 0.0).map(share).collect();
    SampleSummary::of(&shares).map(|summary| summary.median)
}

/// Cells of a plan with the summaries of their runs.
pub fn summarize(plan: &ScenarioPlan, runs: &[CellRun]) -> Vec<CellReport> {
    let width = plan.columns.len();
    let mut cells = Vec::with_capacity(plan.cells.len());
    for (at, body) in plan.cells.iter().enumerate() {
        let row = at / width;
        let column = at % width;
        let mine: Vec<&CellRun> =
            runs.iter().filter(|run| run.row == row && run.column == column).collect();
        let good: Vec<&CellRun> = mine.iter().copied().filter(|run| run.counts()).collect();
        let of = |value: &dyn Fn(&CellRun) -> f64| {
            SampleSummary::of(&good.iter().map(|run| value(run)).collect::<Vec<f64>>())
        };
        let mut cell = CellReport { row, column, good: good.len(), ..CellReport::default() };
        match body {
            Err(reason) => cell.skipped = Some(reason.clone()),
            Ok(body) => {
                let lines = |acts: &[PlanStep]| acts.iter().map(PlanStep::to_string).collect();
                cell.prepare = lines(&body.prepare);
                cell.check = lines(&body.check);
                cell.servers = body.servers.iter().map(|s| shell_line(&s.command)).collect();
                cell.command = shell_line(&body.command);
            }
        }
        cell.failed = mine.iter().filter(|run| !run.warmup && run.failure.is_some()).count();
        cell.wall_s = of(&|run| run.wall_s);
        cell.own_cpu_s = of(&|run| run.command.cpu_s());
        cell.total_cpu_s = of(&CellRun::total_cpu_s);
        cell.own_peak_bytes = of(&|run| run.command.peak_bytes as f64);
        cell.total_peak_bytes = of(&|run| run.total_peak_bytes() as f64);
        for metric in &plan.show {
            let warm = mine.iter().filter(|run| run.warmup && run.failure.is_none());
            let runs: Vec<&CellRun> =
                if metric.is_of_warmup() { warm.copied().collect() } else { good.clone() };
            let values = runs.iter().filter_map(|run| metric.value(run, plan.rows[row].amount));
            if let Some(summary) = SampleSummary::of(&values.collect::<Vec<f64>>()) {
                cell.more.insert(*metric, summary);
            }
        }
        if let Some(reference) = plan.reference {
            // Rounds are close in time: what disturbs one run of a round disturbs the others, too.
            let ratios: Vec<f64> = good
                .iter()
                .filter_map(|run| {
                    let other = runs.iter().find(|other| {
                        (other.row, other.column, other.round) == (row, reference, run.round)
                    })?;
                    (other.counts() && other.wall_s > 0.0).then(|| run.wall_s / other.wall_s)
                })
                .collect();
            cell.ratio = SampleSummary::of(&ratios);
        }
        cells.push(cell);
    }
    cells
}

/// The time now as `2026-11-20T22:05:56Z`.
pub fn now_utc() -> String {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    utc(since.map_or(0, |since| since.as_secs()))
}

/// Seconds since 1970 as a date and a time.
fn utc(seconds: u64) -> String {
    let days = seconds / 86_400;
    let rest = seconds % 86_400;
    // Days of years that start in March, so that the leap day comes last.
    let shifted = days + 719_468;
    let era = shifted / 146_097;
    let day = shifted % 146_097;
    let year = (day - day / 1_460 + day / 36_524 - day / 146_096) / 365;
    let day_of_year = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month + 2) / 5 + 1;
    let (month, next) = if month < 10 { (month + 3, 0) } else { (month - 9, 1) };
    format!(
        "{:04}-{month:02}-{day:02}T{:02}:{:02}:{:02}Z",
        era * 400 + year + next,
        rest / 3600,
        rest / 60 % 60,
        rest % 60
    )
}

impl Metric {
    /// Heading, with the unit.
    pub fn title(self, report: &ScenarioReport) -> String {
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

    /// The summary of a cell.
    pub fn of(self, cell: &CellReport) -> Option<&SampleSummary> {
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
    pub fn value(self, run: &CellRun, amount: Option<f64>) -> Option<f64> {
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::{BenchPaths, RunSelection};
    use crate::scenario::Scenario;

    fn run(column: usize, round: u32, wall_s: f64) -> CellRun {
        CellRun {
            row: 0,
            column,
            round,
            warmup: round == 0,
            failure: None,
            wall_s,
            command: Usage { user_s: 1.0, system_s: 0.5, peak_bytes: 100, ..Usage::default() },
            servers: vec![("s".into(), Usage { user_s: 2.0, peak_bytes: 11, ..Usage::default() })],
            others_cpu_s: 0.0,
        }
    }

    fn plan(text: &str) -> ScenarioPlan {
        let scenario = Scenario::parse("t", text).unwrap();
        let places = BenchPaths {
            scratch: "/".into(),
            disk: "/".into(),
            blockhaul: None,
            search: vec!["/bin".into()],
        };
        ScenarioPlan::new("t", &scenario, &RunSelection::default(), &places, 1).unwrap()
    }

    #[test]
    fn ratios_are_taken_within_rounds_and_warmups_do_not_count() {
        let text = "title = 't'\nwarmup = 1\n
            [[environment]]\nlabel = 'a'\ncommand = 'true'\n
            [[environment]]\nlabel = 'b'\ncommand = 'true'\n
            [[case]]\nlabel = 'c'\nunchecked = 'x'";
        let plan = plan(text);
        let mut runs = vec![run(0, 0, 99.0), run(1, 0, 99.0)];
        runs.extend([run(0, 1, 1.0), run(1, 1, 2.0), run(1, 2, 8.0), run(0, 2, 2.0)]);
        runs.extend([run(0, 3, 1.0), run(1, 3, 3.0), run(1, 4, 3.0), run(0, 4, 1.0)]);
        let why = RunFailure { stage: "check".into(), why: "wrong".into(), stderr: String::new() };
        runs[9].failure = Some(why);
        let cells = summarize(&plan, &runs);
        assert_eq!((cells[0].good, cells[0].failed, cells[1].good), (3, 1, 4));
        let ratio = cells[1].ratio.unwrap();
        assert_eq!((ratio.count, ratio.median, ratio.min, ratio.max), (3, 3.0, 2.0, 4.0));
        assert_eq!(cells[0].ratio.unwrap().max, 1.0);
        assert_eq!(cells[1].total_cpu_s.unwrap().median, 3.5);
        assert_eq!(cells[1].own_cpu_s.unwrap().median, 1.5);
        assert_eq!(cells[1].total_peak_bytes.unwrap().median, 111.0);
    }

    #[test]
    fn rates_by_the_time_of_servers_and_calls_counted_while_warming_up() {
        let text =
            "title = 't'\nwarmup = 1\nshow = ['servers-rate', 'servers-cpu', 'servers-calls']\n
            rate = { amount = 3000, unit = 'k/s', divide = 1000 }\n
            [[environment]]\nlabel = 'a'\ncommand = 'true'\n
            [[case]]\nlabel = 'c'\nunchecked = 'x'";
        let plan = plan(text);
        let mut runs = vec![run(0, 0, 9.0), run(0, 1, 1.0), run(0, 2, 1.0)];
        runs[0].servers[0].1.calls = Some(77);
        runs[0].servers[0].1.user_s = 50.0;
        let cells = summarize(&plan, &runs);
        let median = |metric: Metric| metric.of(&cells[0]).map(|summary| summary.median);
        assert_eq!(median(Metric::ServersCpu), Some(2.0));
        assert_eq!(median(Metric::ServersRate), Some(1.5));
        assert_eq!(median(Metric::ServersCalls), Some(77.0));
        runs[0].servers[0].1.calls = None;
        assert_eq!(Metric::ServersCalls.of(&summarize(&plan, &runs)[0]), None);
    }

    #[test]
    fn what_was_measured_nowhere_is_no_table() {
        let mut report = crate::table::tests::report(&["a"], &[("row", &[&[1.0]])]);
        report.show = vec![Metric::ServersCalls, Metric::ServersCpu];
        assert_eq!(report.metrics(), Metric::BASE);
        let summary = SampleSummary::of(&[3.0]).unwrap();
        report.cells[0].more.insert(Metric::ServersCpu, summary);
        assert_eq!(report.metrics()[Metric::BASE.len()..], [Metric::ServersCpu]);
    }

    #[test]
    fn dates_are_right() {
        assert_eq!(utc(0), "1970-01-01T00:00:00Z");
        assert_eq!(utc(951_782_399), "2000-02-28T23:59:59Z");
        assert_eq!(utc(951_782_400), "2000-02-29T00:00:00Z");
        assert_eq!(utc(1_795_212_356), "2026-11-20T22:05:56Z");
        assert_eq!(utc(4_107_542_400), "2100-03-01T00:00:00Z");
    }
}
