//! The command line of `blockhaul bench`.

use std::path::PathBuf;

use clap::{Args as ClapArgs, Subcommand, ValueEnum};

use crate::helper::HelperCommand;
use crate::manual;
use crate::vars::{VariableValue, Vars};

/// Options of `blockhaul bench`.
#[derive(Debug, ClapArgs)]
#[command(args_conflicts_with_subcommands = true, infer_long_args = true, after_long_help = manual::BENCH)]
pub struct ScenarioArgs {
    /// What to do, other than running scenario files.
    #[command(subcommand)]
    pub action: Option<BenchCommand>,

    /// Scenario files to run
    #[arg(value_name = "SCENARIO.toml", required = true)]
    pub files: Vec<PathBuf>,

    #[command(flatten)]
    #[allow(missing_docs)]
    pub options: ScenarioOptions,
}

/// What `blockhaul bench` does.
#[derive(Debug, Subcommand)]
pub enum BenchCommand {
    /// Run built-in scenarios
    #[command(after_long_help = manual::RUN)]
    Run {
        /// Names of built-in scenarios (see blockhaul bench list)
        #[arg(value_name = "NAME", required = true)]
        names: Vec<String>,

        #[command(flatten)]
        #[allow(missing_docs)]
        options: Box<ScenarioOptions>,
    },
    /// List the built-in scenarios
    #[command(after_long_help = manual::LIST)]
    List,
    /// Show what changed between two results, and fail if a cell became slower
    ///
    /// Wall times are compared as ratios to the reference column of the same run, so that results
    /// of different days and machines can be compared. If the label of a column contains blockhaul,
    /// only such columns count: the others are other programs.
    #[command(after_long_help = manual::COMPARE)]
    Compare {
        /// The older result: a directory with result.json, or a directory of such directories
        #[arg(value_name = "A")]
        old: PathBuf,

        /// The newer result
        #[arg(value_name = "B")]
        new: PathBuf,

        /// Percentage by which a ratio may become worse
        #[arg(long, value_name = "PERCENT", default_value = "10", value_parser = percent)]
        threshold: f64,
    },
    /// Write the figures in README.md and docs/performance.md from the newest results
    #[command(hide = true)]
    Docs {
        /// Root of the source tree
        #[arg(value_name = "DIR", default_value = ".")]
        root: PathBuf,
    },
    /// A small program that scenarios need
    #[command(hide = true)]
    Helper {
        #[command(subcommand)]
        #[allow(missing_docs)]
        helper: HelperCommand,
    },
    /// Write the tables and the page of a result again, from its result.json
    #[command(after_long_help = manual::RENDER)]
    Render {
        /// Directory with result.json
        #[arg(value_name = "DIR")]
        dir: PathBuf,
    },
}

/// How scenarios are run.
#[derive(Debug, ClapArgs)]
pub struct ScenarioOptions {
    /// Full size [default: reduced size, a few minutes at most]
    #[arg(long, conflicts_with = "quick")]
    pub full: bool,

    /// Reduced size (the default)
    #[arg(long)]
    pub quick: bool,

    /// Measured runs of each cell [default: as the scenario says]
    #[arg(short = 'n', long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub runs: Option<u32>,

    /// Runs of each cell before the measured ones [default: as the scenario says]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(0..=1_000))]
    pub warmup: Option<u32>,

    /// Seed of the order of runs [default: a random one]
    #[arg(long, value_name = "N")]
    pub seed: Option<u64>,

    /// Run only rows whose label contains TEXT; may be repeated
    #[arg(long, value_name = "TEXT")]
    pub row: Vec<String>,

    /// Run only columns whose label contains TEXT; may be repeated
    #[arg(long, value_name = "TEXT")]
    pub column: Vec<String>,

    /// Set a variable of the scenario; may be repeated
    #[arg(long, value_name = "NAME=VALUE", value_parser = assignment)]
    pub set: Vec<(String, VariableValue)>,

    /// Drop the kernel's caches before each run (needs root) [default: as the scenario says]
    #[arg(long, value_name = "yes|no", value_parser = yes_or_no)]
    pub drop_caches: Option<bool>,

    /// Directory for files in memory [default: /dev/shm]
    ///
    /// A subdirectory is created there and removed on exit.
    #[arg(long, value_name = "DIR", help_heading = "Places")]
    pub scratch: Option<PathBuf>,

    /// Directory for files on a disk
    ///
    /// A subdirectory is created there and removed on exit.
    #[arg(long, value_name = "DIR", default_value = "/var/tmp", help_heading = "Places")]
    pub disk: PathBuf,

    /// Directory to search for programs before PATH; may be repeated
    #[arg(long, value_name = "DIR", help_heading = "Places")]
    pub path: Vec<PathBuf>,

    /// The blockhaul program to measure [default: the one that was started, or the one in PATH]
    #[arg(long, value_name = "FILE", help_heading = "Places")]
    pub blockhaul: Option<PathBuf>,

    /// Keep the scratch directories and their files
    #[arg(long, help_heading = "Places")]
    pub keep: bool,

    /// Directory for results [default: bench/results if it exists; otherwise no files are written]
    ///
    /// DATE-LABEL/SCENARIO is created in it.
    #[arg(long, value_name = "DIR", help_heading = "Output")]
    pub out: Option<PathBuf>,

    /// Do not write files
    #[arg(long, help_heading = "Output")]
    pub no_save: bool,

    /// Name of this machine in results [default: its cores and processor family]
    #[arg(long, value_name = "TEXT", value_parser = label, help_heading = "Output")]
    pub label: Option<String>,

    /// Commit of the program, for results [default: that of the tree in the current directory]
    #[arg(long, value_name = "TEXT", help_heading = "Output")]
    pub commit: Option<String>,

    /// Format of the output
    #[arg(long, value_name = "FORMAT", value_enum, default_value_t, help_heading = "Output")]
    pub format: OutputFormat,

    /// Do not show progress
    #[arg(short, long, help_heading = "Output")]
    pub quiet: bool,

    /// Print what would be run, without running it
    #[arg(long, help_heading = "Output")]
    pub dry_run: bool,
}

/// Format of the output.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum OutputFormat {
    /// Tables for a terminal
    #[default]
    Text,
    /// Tables for Markdown
    Markdown,
    /// A line for each run
    Csv,
    /// Everything
    Json,
}

impl ScenarioOptions {
    /// The variables that were replaced.
    pub fn variables(&self) -> Vars {
        self.set.iter().cloned().collect()
    }
}

fn assignment(text: &str) -> Result<(String, VariableValue), String> {
    match text.split_once('=') {
        Some((name, value)) if !name.is_empty() => {
            Ok((name.to_owned(), VariableValue::Text(value.to_owned())))
        }
        _ => Err("write NAME=VALUE".to_owned()),
    }
}

fn yes_or_no(text: &str) -> Result<bool, String> {
    match text {
        "yes" => Ok(true),
        "no" => Ok(false),
        _ => Err("write yes or no".to_owned()),
    }
}

fn percent(text: &str) -> Result<f64, String> {
    match text.trim_end_matches('%').parse::<f64>() {
        Ok(value) if value.is_finite() && value >= 0.0 => Ok(value),
        _ => Err("write a number of percent, for instance 10".to_owned()),
    }
}

/// It becomes a part of a folder's name.
fn label(text: &str) -> Result<String, String> {
    let good = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    if !text.is_empty() && text.chars().all(good) && !text.starts_with('.') {
        Ok(text.to_owned())
    } else {
        Err("write letters, digits, - _ and . only".to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Debug, Parser)]
    struct Outer {
        #[command(flatten)]
        args: ScenarioArgs,
    }

    fn parse(line: &str) -> Result<ScenarioArgs, String> {
        let words = ["bench"].into_iter().chain(line.split_whitespace());
        Outer::try_parse_from(words).map(|outer| outer.args).map_err(|e| e.to_string())
    }

    #[test]
    fn files_and_actions() {
        let args = parse("a.toml b.toml --full -n 3 --set a=b=c").unwrap();
        assert_eq!((args.files.len(), args.options.full, args.options.runs), (2, true, Some(3)));
        assert_eq!(args.options.variables()["a"], VariableValue::Text("b=c".into()));
        let args = parse("run copy --quick --drop-caches no").unwrap();
        let Some(BenchCommand::Run { names, options }) = args.action else { panic!("{args:?}") };
        assert_eq!((names, options.drop_caches), (vec!["copy".to_owned()], Some(false)));
        let args = parse("compare a b --threshold 5%").unwrap();
        let Some(BenchCommand::Compare { threshold, .. }) = args.action else { panic!("{args:?}") };
        assert_eq!(threshold, 5.0);
        assert!(parse("list").unwrap().action.is_some());
    }

    #[test]
    fn wrong_lines_are_refused() {
        for line in ["", "run", "a.toml --runs 0", "a.toml --set x", "run copy --label a/b"] {
            assert!(parse(line).is_err(), "{line}");
        }
        assert!(parse("compare a b --threshold -1").is_err());
    }
}
