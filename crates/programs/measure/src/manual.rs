//! The text after the options in the help and the man page of `blockhaul bench device` and `bench load`.

/// Behind those of `bench device`.
pub const DEVICE: &str = "\
EXAMPLES
  Measure a disk of a server for a minute, over 16 connections at most:
      blockhaul bench device nbd://server/disk --time 60s --max-connections 16
  Measure a file without the page cache, that is, the speed of its file system:
      blockhaul bench device 'file:disk.raw?direct=on'
  Measure writing as well, with a server that is started for the measurement:
      blockhaul bench device --write [ blockhaul serve memory:1G ]
  Measure a generated disk:
      blockhaul bench device sample:64M --time 10s

EXIT STATUS
  0       success
  1       a request failed
  2       the command line is invalid
  3       the device cannot be opened
";

/// Behind those of `bench load`.
pub const LOAD: &str = "\
EXAMPLES
  Send random reads of 4 KiB for ten seconds, over 8 connections with 64 requests on each:
      blockhaul bench load nbd://server/disk --time 10s
  Send the same 100,000 requests to two servers:
      blockhaul bench load nbd://a/disk --count 100000 --seed 1
      blockhaul bench load nbd://b/disk --count 100000 --seed 1
  Send writes, which overwrite the data of the disk:
      blockhaul bench load --write --size 64k --requests 16 [ blockhaul serve memory:1G ]
  Measure our own server:
      blockhaul bench load --time 1s [ blockhaul serve sample:64M ]

EXIT STATUS
  0       all requests were answered
  1       a request was refused, or a connection was lost
  2       the command line is invalid
  3       the server cannot be reached, has no such export, or the export is
          read-only
";
