//! The text after the options in the help and the man page of `blockhaul bench` and its commands.

/// Behind those of `bench` itself.
pub const BENCH: &str = "\
EXAMPLES
  What is built in, and one of them in its reduced size:
      blockhaul bench list
      blockhaul bench run copy
  A scenario of your own, some of its rows, 20 runs of each; first what would be run:
      blockhaul bench my.toml --dry-run
      blockhaul bench my.toml --row qcow2 -n 20
  What a disk is capable of, and how many requests a server answers:
      blockhaul bench device nbd://server/disk
      blockhaul bench load nbd://server/disk --time 10s

EXIT STATUS
  0       all runs went well
  1       a run failed, or its result was wrong
  2       the command line or a scenario cannot be understood
  130     stopped by Ctrl-C; what was measured until then is kept
";

/// Behind those of `bench run`.
pub const RUN: &str = "\
EXAMPLES
  In the reduced size, and in the full one with ten runs of each cell:
      blockhaul bench run copy
      blockhaul bench run copy --full -n 10
  Only some rows and columns, without files of results:
      blockhaul bench run copy --row qcow2 --column blockhaul --no-save
  With programs of another place:
      blockhaul bench run server --path /opt/qemu/bin

EXIT STATUS
  0       all runs went well
  1       a run failed, or its result was wrong
  2       the command line cannot be understood, or there is no scenario of this name
  130     stopped by Ctrl-C; what was measured until then is kept
";

/// Behind those of `bench device`.
pub const DEVICE: &str = "\
EXAMPLES
  A disk of a server, in a minute, over 16 connections at most:
      blockhaul bench device nbd://server/disk --time 60s --max-connections 16
  A file past the page cache; what its file system is capable of, not the memory:
      blockhaul bench device 'file:disk.raw?direct=on'
  Writing, too, to a disk of a server that lives as long as this:
      blockhaul bench device --write [ blockhaul serve memory:1G ]
  Try it:
      blockhaul bench device sample:64M --time 2s

EXIT STATUS
  0       it was measured
  1       a request failed
  2       the command line cannot be understood
  3       the device cannot be opened
";

/// Behind those of `bench load`.
pub const LOAD: &str = "\
EXAMPLES
  Random reads of 4 KiB for ten seconds, 8 connections with 64 requests on each:
      blockhaul bench load nbd://server/disk --time 10s
  The same 100,000 requests for two servers:
      blockhaul bench load nbd://a/disk --count 100000 --seed 1
      blockhaul bench load nbd://b/disk --count 100000 --seed 1
  Writes, which overwrite what the disk holds:
      blockhaul bench load --write --size 64k --requests 16 [ blockhaul serve memory:1G ]
  Try it:
      blockhaul bench load --time 1s [ blockhaul serve sample:64M ]

EXIT STATUS
  0       all requests were answered
  1       a request was refused, or a connection was lost
  2       the command line cannot be understood
  3       the server cannot be reached, has no such export, or not for writing
";

/// Behind those of `bench list`.
pub const LIST: &str = "\
EXAMPLES
  The names that bench run takes:
      blockhaul bench list

EXIT STATUS
  0       they were printed
  2       the command line cannot be understood
";

/// Behind those of `bench compare`.
pub const COMPARE: &str = "\
EXAMPLES
  Of two days, on the same machine or not:
      blockhaul bench compare bench/results/2026-05-01-here bench/results/2026-06-01-here
  One scenario; only what became worse by more than 20 %:
      blockhaul bench compare old/copy new/copy --threshold 20

EXIT STATUS
  0       nothing became worse by more than the threshold
  1       something became worse, or fails that went well
  2       the results cannot be read or compared, or the command line cannot be understood
";

/// Behind those of `bench render`.
pub const RENDER: &str = "\
EXAMPLES
  The tables and the page of a result, as this version makes them:
      blockhaul bench render bench/results/2026-06-01-here/copy

EXIT STATUS
  0       they were written
  1       the result cannot be read, or a file cannot be written
  2       the command line cannot be understood
";
