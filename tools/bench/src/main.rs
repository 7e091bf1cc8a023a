//! The program `blockhaul-bench`: what `blockhaul bench` starts for all but `bench device` and `bench load`.

use std::process::ExitCode;

use blockhaul_bench::ScenarioArgs;
use clap::Parser as _;

/// Compare programs
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
    args: ScenarioArgs,
}

fn main() -> ExitCode {
    match Cli::try_parse() {
        Ok(cli) => blockhaul_bench::main(cli.args),
        Err(error) => error.exit(),
    }
}
