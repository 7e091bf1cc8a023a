//! What will be done: cells that can be run, with their steps and servers. `make` works it out from a
//! scenario, `needs` what of it this machine cannot run.

mod make;
mod needs;

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::metric::Metric;
use crate::vars::Vars;
use blockhaul_measure::shell_line;

/// What the person who starts it chose.
#[derive(Clone, Debug, Default)]
pub struct RunSelection {
    /// The full size rather than the quick one.
    pub full: bool,
    /// Runs of every cell, instead of the scenario's number.
    pub runs: Option<u32>,
    /// Rounds before those that count, instead of the scenario's number.
    pub warmup: Option<u32>,
    /// Seed of the order of runs, instead of the scenario's.
    pub seed: Option<u64>,
    /// Variables that go before all of the scenario's.
    pub set: Vars,
    /// Only rows whose label contains one of these texts.
    pub rows: Vec<String>,
    /// Only columns whose label contains one of these texts.
    pub columns: Vec<String>,
    /// Whether caches are dropped, instead of what the scenario says.
    pub drop_caches: Option<bool>,
}

/// Where things are on this machine.
#[derive(Clone, Debug)]
pub struct BenchPaths {
    /// Folder for files in memory.
    pub scratch: PathBuf,
    /// Folder for files on a disk.
    pub disk: PathBuf,
    /// Our own program, if there is one.
    pub blockhaul: Option<PathBuf>,
    /// Folders where programs are searched.
    pub search: Vec<PathBuf>,
}

/// What will be done.
#[derive(Clone, Debug)]
pub struct ScenarioPlan {
    /// Name of the scenario.
    pub name: String,
    /// Heading.
    pub title: String,
    /// Text for readers.
    pub description: String,
    /// Whether it is the full size.
    pub full: bool,
    /// Whether the scenario has no other size.
    pub one_size: bool,
    /// Rows, in the scenario's order.
    pub rows: Vec<PlanRow>,
    /// Labels of the columns.
    pub columns: Vec<String>,
    /// The column that others are compared with, if it takes part.
    pub reference: Option<usize>,
    /// Name of the variable that curves are drawn over.
    pub curve: Option<String>,
    /// What is shown besides the base.
    pub show: Vec<Metric>,
    /// Unit of the rate, where there is one.
    pub rate_unit: Option<String>,
    /// File systems to be mounted: those that a cell needs.
    pub mounts: Vec<MountPlan>,
    /// Cells, row by row; `rows.len() * columns.len()` of them.
    pub cells: Vec<PlanCell>,
    /// Images to be made.
    pub images: Vec<ImagePlan>,
    /// Steps before the first run.
    pub setup: Vec<PlanStep>,
    /// Counted runs of each cell.
    pub runs: u32,
    /// Rounds before them.
    pub warmup: u32,
    /// Cells that are run at the same time; at least 1.
    pub together: u32,
    /// Time for one command.
    pub timeout: Duration,
    /// Whether caches are dropped before each run.
    pub drop_caches: bool,
    /// Seed of the order of runs.
    pub seed: u64,
}

/// A row.
#[derive(Clone, Debug)]
pub struct PlanRow {
    /// Heading.
    pub label: String,
    /// Variables of the case and of the matrix.
    pub variables: BTreeMap<String, String>,
    /// Why its result is not checked.
    pub unchecked: Option<String>,
    /// Where it is on the axis of curves.
    pub curve_at: Option<f64>,
    /// How much one run does, in the unit of the rate times seconds.
    pub amount: Option<f64>,
}

/// A row in a column: what is run, or why it is not.
pub type PlanCell = std::result::Result<CellPlan, String>;

/// What one run of a cell consists of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CellPlan {
    /// File systems that it uses.
    pub mounts: Vec<String>,
    /// Steps before it.
    pub prepare: Vec<PlanStep>,
    /// Servers around it.
    pub servers: Vec<ServerPlan>,
    /// What is timed.
    pub command: Vec<String>,
    /// Steps after it.
    pub check: Vec<PlanStep>,
}

/// A server with all variables replaced.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServerPlan {
    /// Its name in the scenario.
    pub name: String,
    /// What is started.
    pub command: Vec<String>,
    /// When it is ready.
    pub ready: ReadyCondition,
}

/// When a server is ready.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ReadyCondition {
    /// This Unix socket listens.
    Socket(PathBuf),
    /// This port of the loopback address accepts.
    Port(u16),
    /// This file exists.
    Exists(PathBuf),
}

/// A file system with all variables replaced.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MountPlan {
    /// Its name in the scenario.
    pub name: String,
    /// Its type, which is also the end of the name of the program that makes it.
    pub kind: String,
    /// Its size in bytes.
    pub size: u64,
    /// The file that holds it.
    pub image: PathBuf,
    /// Where it is mounted.
    pub folder: PathBuf,
}

/// An image with all variables replaced. Lengths are in bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImagePlan {
    /// The file.
    pub path: PathBuf,
    /// Its size.
    pub size: u64,
    /// How much of it is data.
    pub data: u64,
    /// Length of a run of data.
    pub run: u64,
    /// Seed of the content.
    pub seed: u64,
}

/// A step with all variables replaced.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PlanStep {
    /// Runs a command; it must exit with status 0.
    Run(Vec<String>),
    /// Makes an empty file of this size.
    Fresh(PathBuf, u64),
    /// Puts wrong bytes into the first file where the second has data.
    Overwrite(PathBuf, PathBuf),
    /// Removes a file.
    Remove(PathBuf),
    /// Makes the kernel forget what it caches of a file.
    Evict(PathBuf),
    /// Compares the second file with the first.
    Compare(PathBuf, PathBuf),
}

impl fmt::Display for PlanStep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            PlanStep::Run(words) => f.write_str(&shell_line(words)),
            PlanStep::Fresh(path, size) => {
                write!(f, "(fresh file {}, {size} bytes)", path.display())
            }
            PlanStep::Overwrite(path, like) => {
                write!(f, "(wrong bytes into {} where {} has data)", path.display(), like.display())
            }
            PlanStep::Remove(path) => write!(f, "(remove {})", path.display()),
            PlanStep::Evict(path) => write!(f, "(out of the cache: {})", path.display()),
            PlanStep::Compare(expected, found) => {
                write!(f, "(compare {} with {})", found.display(), expected.display())
            }
        }
    }
}

impl ScenarioPlan {
    /// The cell of a row and a column.
    pub fn cell(&self, row: usize, column: usize) -> &PlanCell {
        &self.cells[row * self.columns.len() + column]
    }
}

impl CellPlan {
    /// All commands that it runs.
    pub fn commands(&self) -> impl Iterator<Item = &Vec<String>> {
        let servers = self.servers.iter().map(|server| &server.command);
        let steps = commands_of(&self.prepare).chain(commands_of(&self.check));
        servers.chain([&self.command]).chain(steps)
    }
}

impl BenchPaths {
    /// Finds a program: a name along the search path, anything with a slash as it is.
    pub fn find(&self, program: &str) -> Option<PathBuf> {
        use std::os::unix::fs::PermissionsExt as _;
        let runs = |path: &Path| {
            path.metadata().is_ok_and(|m| m.is_file() && m.permissions().mode() & 0o111 != 0)
        };
        if program.contains('/') {
            return Some(PathBuf::from(program)).filter(|path| runs(path));
        }
        self.search.iter().map(|dir| dir.join(program)).find(|path| runs(path))
    }
}

/// The commands among steps.
fn commands_of(acts: &[PlanStep]) -> impl Iterator<Item = &Vec<String>> {
    acts.iter().filter_map(|act| match act {
        PlanStep::Run(words) => Some(words),
        _ => None,
    })
}

/// The last part of a path, for messages that must not contain full paths.
pub fn base_name(program: &str) -> &str {
    program.rsplit('/').next().unwrap_or(program)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_can_be_pasted_into_a_shell() {
        let words = ["nbdcopy", "nbd+unix:///?socket=x", "a b", "it's", ""].map(str::to_owned);
        assert_eq!(shell_line(&words), "nbdcopy nbd+unix:///?socket=x 'a b' 'it'\\''s' ''");
        let line = ["/bin/sh", "-c", "echo $x"].map(str::to_owned);
        assert_eq!(shell_line(&line), "echo $x");
    }
}
