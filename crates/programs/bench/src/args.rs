//! The command line of `blockhaul bench`.

use std::path::PathBuf;

use clap::{Args as ClapArgs, Subcommand, ValueEnum};

use crate::device::DeviceArgs;
use crate::helper::Helper;
use crate::load::LoadArgs;
use crate::manual;
use crate::vars::{Value, Vars};

/// Options of `blockhaul bench`.
#[derive(Debug, ClapArgs)]
#[command(args_conflicts_with_subcommands = true, infer_long_args = true, after_long_help = manual::BENCH)]
pub struct Args {
    /// What to do, if it is not to run scenario files.
    #[command(subcommand)]
    pub action: Option<Action>,

    /// Scenario files to run
    #[arg(value_name = "SCENARIO.toml", required = true)]
    pub files: Vec<PathBuf>,

    #[command(flatten)]
    #[allow(missing_docs)]
    pub options: Options,
}

impl Args {
    /// Whether scenarios are run, and nothing says which program `{blockhaul}` stands for.
    pub fn lacks_program(&self) -> bool {
        let options = match &self.action {
            None => &self.options,
            Some(Action::Run { options, .. }) => &**options,
            Some(_) => return false,
        };
        options.blockhaul.is_none()
    }
}

/// What `blockhaul bench` does.
#[derive(Debug, Subcommand)]
pub enum Action {
    /// Run scenarios that are built in
    #[command(after_long_help = manual::RUN)]
    Run {
        /// Their names; see bench list
        #[arg(value_name = "NAME", required = true)]
        names: Vec<String>,

        #[command(flatten)]
        #[allow(missing_docs)]
        options: Box<Options>,
    },
    /// Measure what a device is capable of, and recommend settings
    ///
    /// Reads from it with many combinations of request size, requests in flight and connections, one
    /// request at a time for latency, asks for extents, and prints the settings to use with
    /// blockhaul copy. It ends within the time that it was given. Nothing is written without
    /// --write.
    #[command(after_long_help = manual::DEVICE)]
    Device(DeviceArgs),
    /// Keep an NBD server busy, and tell how many requests it answers and how long they take
    ///
    /// The same requests for the same --seed and --count, so that servers can be compared. This
    /// program needs less processor time than servers do, so that they are what is measured. Reads,
    /// unless --write or --mix is given; these overwrite what the device holds. Exit status 1 if a
    /// request was refused or a connection was lost.
    #[command(after_long_help = manual::LOAD)]
    Load(LoadArgs),
    /// List the scenarios that are built in
    #[command(after_long_help = manual::LIST)]
    List,
    /// Show what changed between two results, and fail if something became slower
    ///
    /// Wall times are compared as ratios to the reference column of the same run, so that results
    /// of different days and machines can be compared. Exit status 1 if a ratio became worse by
    /// more than the threshold, or a cell fails that went well; 2 if they cannot be compared. Where
    /// the label of a column says blockhaul, only such columns count: the others are peers.
    #[command(after_long_help = manual::COMPARE)]
    Compare {
        /// The older result: a folder with result.json, or one of such folders
        #[arg(value_name = "A")]
        old: PathBuf,

        /// The newer result
        #[arg(value_name = "B")]
        new: PathBuf,

        /// How much worse a ratio may be, in percent
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
        helper: Helper,
    },
    /// Write a result's tables and page again, from its result.json
    #[command(after_long_help = manual::RENDER)]
    Render {
        /// Folder with result.json
        #[arg(value_name = "DIR")]
        dir: PathBuf,
    },
}

/// How scenarios are run.
#[derive(Debug, ClapArgs)]
pub struct Options {
    /// Full size; without it a reduced one, which takes some minutes at most
    #[arg(long, conflicts_with = "quick")]
    pub full: bool,

    /// Reduced size; the default
    #[arg(long)]
    pub quick: bool,

    /// Runs of every cell that count
    #[arg(short = 'n', long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub runs: Option<u32>,

    /// Rounds before those that count
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(0..=1_000))]
    pub warmup: Option<u32>,

    /// Seed of the order of runs; without it, another order each time
    #[arg(long, value_name = "N")]
    pub seed: Option<u64>,

    /// Only rows whose label contains TEXT; may be repeated
    #[arg(long, value_name = "TEXT")]
    pub row: Vec<String>,

    /// Only columns whose label contains TEXT; may be repeated
    #[arg(long, value_name = "TEXT")]
    pub column: Vec<String>,

    /// Replace a variable of the scenario; may be repeated
    #[arg(long, value_name = "NAME=VALUE", value_parser = assignment)]
    pub set: Vec<(String, Value)>,

    /// Whether the kernel's caches are dropped before each run (needs root), instead of what the
    /// scenario says
    #[arg(long, value_name = "yes|no", value_parser = yes_or_no)]
    pub drop_caches: Option<bool>,

    /// Folder for files in memory; one of its own is made there and removed in the end
    #[arg(long, value_name = "DIR", help_heading = "Places")]
    pub scratch: Option<PathBuf>,

    /// Folder for files on a disk; one of its own is made there and removed in the end
    #[arg(long, value_name = "DIR", default_value = "/var/tmp", help_heading = "Places")]
    pub disk: PathBuf,

    /// Folder where programs are searched before PATH; may be repeated
    #[arg(long, value_name = "DIR", help_heading = "Places")]
    pub path: Vec<PathBuf>,

    /// Our own program; by default the blockhaul that was started, or the one in PATH
    #[arg(long, value_name = "FILE", help_heading = "Places")]
    pub blockhaul: Option<PathBuf>,

    /// Leave the scratch folders and what is in them
    #[arg(long, help_heading = "Places")]
    pub keep: bool,

    /// Folder for results; DATE-LABEL/SCENARIO is made in it [default: bench/results where that
    /// exists; elsewhere nothing is written]
    #[arg(long, value_name = "DIR", help_heading = "Output")]
    pub out: Option<PathBuf>,

    /// Write no files
    #[arg(long, help_heading = "Output")]
    pub no_save: bool,

    /// What this machine is called in results, instead of its cores and processor family
    #[arg(long, value_name = "TEXT", value_parser = label, help_heading = "Output")]
    pub label: Option<String>,

    /// Commit that was built, for results; by default that of the tree in the current folder
    #[arg(long, value_name = "TEXT", help_heading = "Output")]
    pub commit: Option<String>,

    /// What is printed in the end
    #[arg(long, value_name = "FORMAT", value_enum, default_value_t, help_heading = "Output")]
    pub format: Format,

    /// Show no progress
    #[arg(short, long, help_heading = "Output")]
    pub quiet: bool,

    /// Print what would be run, and run nothing
    #[arg(long, help_heading = "Output")]
    pub dry_run: bool,
}

/// What is printed in the end.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// Tables for a terminal
    #[default]
    Text,
    /// Tables for Markdown
    Markdown,
    /// One line a run
    Csv,
    /// Everything
    Json,
}

impl Options {
    /// The variables that were replaced.
    pub fn variables(&self) -> Vars {
        self.set.iter().cloned().collect()
    }
}

fn assignment(text: &str) -> Result<(String, Value), String> {
    match text.split_once('=') {
        Some((name, value)) if !name.is_empty() => {
            Ok((name.to_owned(), Value::Text(value.to_owned())))
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
        args: Args,
    }

    fn parse(line: &str) -> Result<Args, String> {
        let words = ["bench"].into_iter().chain(line.split_whitespace());
        Outer::try_parse_from(words).map(|outer| outer.args).map_err(|e| e.to_string())
    }

    #[test]
    fn files_and_actions() {
        let args = parse("a.toml b.toml --full -n 3 --set a=b=c").unwrap();
        assert_eq!((args.files.len(), args.options.full, args.options.runs), (2, true, Some(3)));
        assert_eq!(args.options.variables()["a"], Value::Text("b=c".into()));
        let args = parse("run copy --quick --drop-caches no").unwrap();
        let Some(Action::Run { names, options }) = args.action else { panic!("{args:?}") };
        assert_eq!((names, options.drop_caches), (vec!["copy".to_owned()], Some(false)));
        let args = parse("compare a b --threshold 5%").unwrap();
        let Some(Action::Compare { threshold, .. }) = args.action else { panic!("{args:?}") };
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
