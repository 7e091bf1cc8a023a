//! Options of the commands that read whole devices: `compare`, `verify` and `checksum`.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;

use super::engine::Engine;
use super::value::{algorithm, duration};

/// Options of `blockhaul compare`.
#[derive(Debug, Args)]
#[command(infer_long_args = true)]
pub struct Compare {
    /// The one; see DEVICES
    #[arg(value_name = "A")]
    pub one: OsString,

    /// The other
    #[arg(value_name = "B")]
    pub other: OsString,

    /// Different sizes are a difference, too, and then nothing is read. Where space is allocated is not
    /// compared
    #[arg(short, long)]
    pub strict: bool,

    /// Tell by the exit status only
    #[arg(short, long)]
    pub quiet: bool,

    #[command(flatten)]
    pub reading: Reading,
}

/// Options of `blockhaul verify`.
#[derive(Debug, Args)]
#[command(infer_long_args = true)]
pub struct Verify {
    /// What to check; see DEVICES
    #[arg(value_name = "DEVICE")]
    pub device: OsString,

    /// What copy --manifest wrote
    #[arg(value_name = "MANIFEST")]
    pub manifest: PathBuf,

    #[command(flatten)]
    pub reading: Reading,
}

/// Options of `blockhaul checksum`.
#[derive(Debug, Args)]
#[command(infer_long_args = true)]
pub struct Checksum {
    /// What to read; see DEVICES
    #[arg(value_name = "DEVICE")]
    pub device: OsString,

    /// The digest: blake3 (as b3sum), sha256 (as sha256sum) or blksum (as the program of that name)
    #[arg(long, value_name = "NAME", default_value = "blake3", value_parser = algorithm)]
    pub digest: blockhaul_engine::Algorithm,

    #[command(flatten)]
    pub reading: Reading,
}

/// How whole devices are read.
#[derive(Debug, Args)]
pub struct Reading {
    /// Connections to each device
    #[arg(short = 'C', long, value_name = "N", default_value = "4",
          value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub connections: u16,

    /// Do not ask where holes are
    #[arg(long)]
    pub no_extents: bool,

    /// How often a failed request is repeated, and a lost connection made again; 0 for never
    #[arg(long, value_name = "N", default_value = "5",
          value_parser = clap::value_parser!(u32).range(0..=1000))]
    pub retries: u32,

    /// Give up on a connection after this time without a byte while requests are in flight; 0 for
    /// never
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = duration)]
    pub timeout: Duration,

    /// Say what is going on
    #[arg(short, long)]
    pub verbose: bool,

    #[command(flatten)]
    pub engine: Engine,
}

pub(super) const COMPARE_EXAMPLES: &str = "\
EXAMPLES
  See whether a copy is one:
      blockhaul compare nbd://old/disk nbd://new/disk
";

pub(super) const VERIFY_EXAMPLES: &str = "\
EXAMPLES
  Keep digests of a backup, and check it a year later:
      blockhaul copy --manifest disk.manifest nbd://server/disk disk.raw
      blockhaul verify disk.raw disk.manifest
";

pub(super) const CHECKSUM_EXAMPLES: &str = "\
EXAMPLES
  The digest that b3sum prints for the same bytes in a file:
      blockhaul checksum nbd://server/disk
  The digest that blksum prints, which passes over holes:
      blockhaul checksum --digest blksum disk.raw
";
