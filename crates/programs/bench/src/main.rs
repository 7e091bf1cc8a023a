//! The program `blockhaul-bench`: what `blockhaul bench` starts for all but `bench device`.

use std::ffi::{OsStr, OsString};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use blockhaul_bench::args::Action;
use blockhaul_bench::{Args, Devices};
use blockhaul_catalog::{Registry, brackets};
use clap::Parser as _;

/// Measure devices and servers, and compare programs
///
/// Run scenarios: blockhaul and the programs in common use do the same work, in turn, and the
/// results are checked. Print medians and ratios, and keep the raw measurements.
#[derive(Debug, clap::Parser)]
#[command(
    name = "blockhaul-bench",
    bin_name = "blockhaul bench",
    version,
    infer_long_args = true,
    disable_help_subcommand = true
)]
struct Cli {
    #[command(flatten)]
    args: Args,
}

fn main() -> ExitCode {
    let words: Vec<OsString> = std::env::args_os().collect();
    let (words, groups) = match brackets::take(words) {
        Ok(taken) => taken,
        Err(text) => return failed(&text),
    };
    let cli = match Cli::try_parse_from(words) {
        Ok(cli) => cli,
        Err(error) if error.use_stderr() => {
            eprint!("{}", brackets::readable(&error.render().to_string()));
            return ExitCode::from(2);
        }
        Err(help) => help.exit(),
    };
    let blockhaul = blockhaul();
    if matches!(cli.args.action, Some(Action::Device(_))) {
        return failed(&become_blockhaul(&blockhaul));
    }
    // The word `blockhaul` in brackets is not this program.
    blockhaul_client::set_program(blockhaul);
    // Load needs no more of a device than where its server is.
    let registry = Registry::default();
    let spec = |word: &OsStr| groups.spec(word);
    blockhaul_bench::main(cli.args, &Devices { registry, spec: &spec })
}

/// The program `blockhaul`: the one beside this program, or else the one on the search path.
fn blockhaul() -> PathBuf {
    let beside = std::env::current_exe().map(|this| this.with_file_name("blockhaul"));
    beside.ok().filter(|path| path.is_file()).unwrap_or(PathBuf::from("blockhaul"))
}

/// Becomes `blockhaul bench device`, which opens every kind of device; returns only where it cannot.
fn become_blockhaul(program: &Path) -> String {
    let error = Command::new(program).arg("bench").args(std::env::args_os().skip(1)).exec();
    format!("cannot start {}: {error}", program.display())
}

fn failed(text: &str) -> ExitCode {
    eprintln!("blockhaul: bench: {text}");
    ExitCode::from(2)
}
