//! Options of the commands that read whole devices: `compare`, `verify` and `checksum`.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;

use super::backup::ProgressOptions;
use super::engine::EngineArgs;
use super::format::ImageFormatArgs;
use super::value::{algorithm, count, duration, rate};

/// Options of `blockhaul compare`.
#[derive(Debug, Args)]
#[command(infer_long_args = true)]
pub struct CompareArgs {
    /// First device (see blockhaul help devices)
    #[arg(value_name = "A")]
    pub one: OsString,

    /// Second device (see blockhaul help devices)
    #[arg(value_name = "B")]
    pub other: OsString,

    /// Treat different sizes as a difference
    ///
    /// If the sizes differ, nothing is read. The allocation of space is not compared.
    #[arg(short, long)]
    pub strict: bool,

    /// Print nothing; report the result by the exit status only
    #[arg(short, long)]
    pub quiet: bool,

    /// Print the result as JSON
    #[arg(long)]
    pub json: bool,

    #[command(flatten)]
    pub reading: ReadArgs,
}

/// Options of `blockhaul check`.
#[derive(Debug, Args)]
#[command(infer_long_args = true)]
pub struct CheckArgs {
    /// Path of a qcow2 image, or the device that holds it (see blockhaul help devices)
    #[arg(value_name = "IMAGE")]
    pub image: OsString,

    /// Repair the image: leaks, or all: refcounts, flags, and the marks of a dirty or corrupt image
    ///
    /// Leaks are repaired only if nothing else is wrong. What cannot be repaired is reported as
    /// before: restore such an image.
    #[arg(long, value_name = "WHAT")]
    pub repair: Option<RepairArg>,

    /// Print the result as JSON
    #[arg(long)]
    pub json: bool,
}

/// What `blockhaul check` repairs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum RepairArg {
    /// Clusters that are lost
    Leaks,
    /// All that can be repaired
    All,
}

/// Options of `blockhaul verify`.
#[derive(Debug, Args)]
#[command(infer_long_args = true)]
pub struct VerifyArgs {
    /// Device to check (see blockhaul help devices)
    #[arg(value_name = "DEVICE")]
    pub device: OsString,

    /// Manifest written by copy --manifest
    #[arg(value_name = "MANIFEST")]
    pub manifest: PathBuf,

    #[command(flatten)]
    pub result: super::ResultArgs,

    #[command(flatten)]
    pub reading: ReadArgs,
}

/// Options of `blockhaul checksum`.
#[derive(Debug, Args)]
#[command(infer_long_args = true)]
pub struct ChecksumArgs {
    /// Device to read (see blockhaul help devices)
    #[arg(value_name = "DEVICE")]
    pub device: OsString,

    /// Digest to compute: blake3, sha256 or blksum
    ///
    /// The output is that of b3sum, sha256sum or blksum.
    #[arg(long, value_name = "NAME", default_value = "blake3", value_parser = algorithm)]
    pub digest: blockhaul_engine::DigestAlgorithm,

    /// Print the result as JSON
    #[arg(long)]
    pub json: bool,

    #[command(flatten)]
    pub reading: ReadArgs,
}

/// How whole devices are read.
#[derive(Debug, Args)]
pub struct ReadArgs {
    #[command(flatten)]
    pub image: ImageFormatArgs,

    /// Connections to each device
    #[arg(short = 'C', long, value_name = "N", default_value = "4",
          value_parser = count::<u16>(1, 1024))]
    pub connections: u16,

    /// Do not ask for extents (data and holes)
    #[arg(long)]
    pub no_extents: bool,

    /// How often to retry a request or reconnect (0: never)
    #[arg(long, value_name = "N", default_value = "5",
          value_parser = count::<u32>(0, 1000))]
    pub retries: u32,

    /// Drop a connection if no byte has moved for this long (0: never)
    ///
    /// This applies while requests are in flight.
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = duration)]
    pub timeout: Duration,

    /// Limit the bytes read per second from each device (0: no limit) [default: 0]
    #[arg(long, value_name = "RATE", value_parser = rate)]
    pub rate: Option<u64>,

    #[command(flatten)]
    pub reporting: ProgressOptions,

    #[command(flatten)]
    pub engine: EngineArgs,
}

pub(super) const COMPARE_EXAMPLES: &str = "\
EXAMPLES
  Check a copy:
      blockhaul compare nbd://old/disk nbd://new/disk
";

pub(super) const VERIFY_EXAMPLES: &str = "\
EXAMPLES
  Write digests of a backup, and check it later:
      blockhaul copy --manifest disk.manifest nbd://server/disk disk.raw
      blockhaul verify disk.raw disk.manifest
";

pub(super) const CHECKSUM_EXAMPLES: &str = "\
EXAMPLES
  Print the digest that b3sum prints for the same bytes in a file:
      blockhaul checksum nbd://server/disk
  Print the digest that blksum prints, which skips holes:
      blockhaul checksum --digest blksum disk.raw
";
