//! The text after the options in the help and the man page of `blockhaul bench` and its commands.

/// Behind those of `bench` itself.
pub const BENCH: &str = "\
EXAMPLES
  List the built-in scenarios, and run one of them in reduced size:
      blockhaul bench list
      blockhaul bench run copy
  Run some rows of your own scenario, 20 times each; first show what would be run:
      blockhaul bench my.toml --dry-run
      blockhaul bench my.toml --row qcow2 -n 20
  Measure the speed of a disk, and the request rate of a server:
      blockhaul bench device nbd://server/disk
      blockhaul bench load nbd://server/disk --time 10s

EXIT STATUS
  0       all runs succeeded
  1       a run failed, or its result was wrong
  2       the command line or a scenario is invalid
  130     stopped by Ctrl-C; earlier measurements are kept
";

/// Behind those of `bench run`.
pub const RUN: &str = "\
EXAMPLES
  Run a scenario in reduced size, and in full size with ten runs of each cell:
      blockhaul bench run copy
      blockhaul bench run copy --full -n 10
  Run some rows and columns, without writing results:
      blockhaul bench run copy --row qcow2 --column blockhaul --no-save
  Use programs in another directory:
      blockhaul bench run server --path /opt/qemu/bin

EXIT STATUS
  0       all runs succeeded
  1       a run failed, or its result was wrong
  2       the command line is invalid, or there is no scenario of this name
  130     stopped by Ctrl-C; earlier measurements are kept
";

/// Behind those of `bench list`.
pub const LIST: &str = "\
EXAMPLES
  List the names for bench run:
      blockhaul bench list

EXIT STATUS
  0       success
  2       the command line is invalid
";

/// Behind those of `bench compare`.
pub const COMPARE: &str = "\
EXAMPLES
  Compare the results of two days:
      blockhaul bench compare bench/results/2026-05-01-here bench/results/2026-06-01-here
  Compare one scenario, and fail only if a cell became worse by more than 20 %:
      blockhaul bench compare old/copy new/copy --threshold 20

EXIT STATUS
  0       no cell became worse by more than the threshold
  1       a cell became worse, or a run failed that succeeded before
  2       the results cannot be read or compared, or the command line is invalid
";

/// Behind those of `bench render`.
pub const RENDER: &str = "\
EXAMPLES
  Write the tables and the page of a result as this version does:
      blockhaul bench render bench/results/2026-06-01-here/copy

EXIT STATUS
  0       success
  1       the result cannot be read, or a file cannot be written
  2       the command line is invalid
";
