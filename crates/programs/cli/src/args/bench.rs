//! Options of `blockhaul bench`.

use std::ffi::OsString;

use blockhaul_measure::{DeviceArgs, LoadArgs, manual};
use clap::{Args, Subcommand};

const BENCH: &str = "\
EXAMPLES
  Measure the speed of a disk, and the request rate of a server:
      blockhaul bench device nbd://server/disk
      blockhaul bench load nbd://server/disk --time 10s
  List the built-in scenarios, which compare programs, and run one of them (blockhaul-bench --help):
      blockhaul bench list
      blockhaul bench run copy

EXIT STATUS
  0       success
  1       a request or a run failed, or a result was wrong
  2       the command line is invalid, or blockhaul-bench is not installed
  3       the device cannot be opened
";

/// Options of `blockhaul bench`.
#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true, infer_long_args = true, after_long_help = BENCH)]
pub struct BenchArgs {
    /// The command, if it is one of this program.
    #[command(subcommand)]
    pub action: Option<BenchAction>,

    /// Arguments of the program blockhaul-bench
    #[arg(
        value_name = "ARG",
        trailing_var_arg = true,
        allow_hyphen_values = true,
        required = true
    )]
    pub words: Vec<OsString>,
}

/// A command of `blockhaul bench`.
#[derive(Debug, Subcommand)]
#[command(disable_help_subcommand = true)]
pub enum BenchAction {
    /// Measure the speed of a device, and recommend settings
    ///
    /// Measure the throughput of reads for many combinations of request size, requests in flight and
    /// connections, the latency of single requests and of queries for extents, and print the settings
    /// to use with blockhaul copy. Nothing is written without --write.
    #[command(after_long_help = manual::DEVICE)]
    Device(DeviceArgs),
    /// Send many requests to an NBD server, and report their rate and latency
    ///
    /// The same --seed and --count give the same requests, so that servers can be compared. This
    /// program needs less processor time than servers do, so that the server is the limit. Requests
    /// are reads unless --write or --mix is given; these overwrite the data of the device.
    #[command(after_long_help = manual::LOAD)]
    Load(LoadArgs),
}
