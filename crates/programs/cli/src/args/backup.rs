//! Options of the commands for backups in a directory: `pull`, `restore` and `chain`.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::{Args, Subcommand};

use super::engine::EngineArgs;

/// Options of `blockhaul pull`.
#[derive(Debug, Args)]
#[command(infer_long_args = true)]
pub struct PullArgs {
    /// File that lists the disks; see JOB FILES
    #[arg(value_name = "JOB.toml")]
    pub job: PathBuf,

    /// Name of the new point [default: the checkpoint, or else the time in UTC]
    ///
    /// It applies to all disks, and takes precedence over the file. The same is true for --checkpoint,
    /// --bitmap and --parent.
    #[arg(long, value_name = "NAME")]
    pub point: Option<String>,

    /// Name of the bitmap that begins at this point in time [default: the name of the point]
    #[arg(long, value_name = "NAME")]
    pub checkpoint: Option<String>,

    /// Bitmap with what has changed: a name in QEMU, or a metadata context
    #[arg(long, value_name = "NAME|CONTEXT")]
    pub bitmap: Option<String>,

    /// Checkpoint at which that bitmap began [default: the name of the bitmap]
    ///
    /// It must be the checkpoint of the newest point of each store.
    #[arg(long, value_name = "NAME")]
    pub parent: Option<String>,

    /// Copy all of each disk, with or without a bitmap
    #[arg(long)]
    pub full: bool,

    /// Discard a pull that was interrupted, and begin again
    ///
    /// By default, the same command resumes it.
    #[arg(long)]
    pub restart: bool,

    /// Print the result as JSON
    #[arg(long)]
    pub json: bool,

    #[command(flatten)]
    pub reporting: ProgressOptions,
}

/// Options about what a command prints while it runs.
#[derive(Debug, Args)]
pub struct ProgressOptions {
    /// Show progress: a bar, lines on descriptor FD, or JSON
    ///
    /// As for blockhaul copy.
    #[arg(short, long, value_name = "FD|json", num_args = 0..=1, require_equals = true,
          default_missing_value = "bar")]
    pub progress: Option<crate::progress::ProgressStyle>,

    /// Do not show a progress bar
    #[arg(long, conflicts_with = "progress")]
    pub no_progress: bool,

    /// Print more detail
    #[arg(short, long)]
    pub verbose: bool,
}

/// Options of `blockhaul restore`.
#[derive(Debug, Args)]
#[command(infer_long_args = true)]
pub struct RestoreArgs {
    /// Directory of the backups of a disk
    #[arg(value_name = "DIR")]
    pub dir: PathBuf,

    /// Where to write the disk (see blockhaul help devices)
    #[arg(value_name = "TARGET")]
    pub target: OsString,

    /// Name of the point [default: the newest]
    #[arg(long, value_name = "NAME")]
    pub point: Option<String>,

    /// Do not check the digests of the backup first
    ///
    /// The check reads all files of the point once.
    #[arg(long)]
    pub no_check: bool,

    /// Flush the target, then read both sides again and compare them
    #[arg(long)]
    pub verify: bool,

    /// Record progress in FILE, so that an interrupted restore can be resumed
    #[arg(long, value_name = "FILE")]
    pub journal: Option<PathBuf>,

    /// Print the result as JSON
    #[arg(long)]
    pub json: bool,

    #[command(flatten)]
    pub reporting: ProgressOptions,
}

/// Options of `blockhaul chain`.
#[derive(Debug, Args)]
#[command(infer_long_args = true)]
pub struct ChainArgs {
    /// What to do.
    #[command(subcommand)]
    pub command: ChainCommand,
}

/// Options of the commands that read the files of a store.
#[derive(Debug, Args)]
pub struct ChainReporting {
    /// Print the result as JSON
    #[arg(long)]
    pub json: bool,

    #[command(flatten)]
    pub reporting: ProgressOptions,

    #[command(flatten)]
    pub engine: EngineArgs,
}

/// The commands of `blockhaul chain`.
#[derive(Debug, Subcommand)]
pub enum ChainCommand {
    /// List the points of a disk
    List {
        /// Directory of the backups of a disk
        #[arg(value_name = "DIR")]
        dir: PathBuf,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Check that all files of the points are there and undamaged
    ///
    /// Read all files, and compare them with their digests. The exit status is 8 if any is damaged.
    Check {
        /// Directory of the backups of a disk
        #[arg(value_name = "DIR")]
        dir: PathBuf,
        /// Check only what this point needs
        #[arg(long, value_name = "NAME")]
        point: Option<String>,
        #[command(flatten)]
        reporting: ChainReporting,
    },
    /// Fold the oldest increment into the full backup below it
    ///
    /// The oldest point no longer exists then; all others are unchanged. The files are checked first. A
    /// merge that was interrupted is completed by the next merge or prune, and all points but the
    /// oldest one can be read meanwhile.
    Merge {
        /// Directory of the backups of a disk
        #[arg(value_name = "DIR")]
        dir: PathBuf,
        /// Do not check the digests of the files first
        ///
        /// The merged full backup has no digest then.
        #[arg(long)]
        no_check: bool,
        #[command(flatten)]
        reporting: ChainReporting,
    },
    /// Remove what an interrupted pull has left
    ///
    /// For a pull that cannot be resumed, because its source is gone. The points stay. What
    /// discard-source has removed from the source is lost then: the bitmaps of that pull and of the next
    /// one together must record it, or the next one must be a full backup.
    Abandon {
        /// Directory of the backups of a disk
        #[arg(value_name = "DIR")]
        dir: PathBuf,
    },
    /// Remove the oldest points
    ///
    /// Points that newer ones need are merged; the files are checked first. A full backup that no newer
    /// point needs is removed.
    Prune {
        /// Directory of the backups of a disk
        #[arg(value_name = "DIR")]
        dir: PathBuf,
        /// Number of points to keep
        #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
        keep: u32,
        /// Do not check the digests of the files first
        ///
        /// A merged full backup has no digest then.
        #[arg(long)]
        no_check: bool,
        #[command(flatten)]
        reporting: ChainReporting,
    },
}

/// The help behind the options of `pull`.
pub const PULL_HELP: &str = "\
EXAMPLES
  Back up all disks of a machine that libvirt or QEMU exports, in full; later, what has changed:
      blockhaul pull vm1.toml --point monday
      blockhaul pull vm1.toml --bitmap monday --point tuesday
  Restore a disk, or serve it as it was:
      blockhaul restore vm1/vda /dev/vg/new --point monday
      blockhaul serve --readonly 'backup:vm1/vda?point=monday'

JOB FILES
  The file is TOML. Each [[disk]] has these keys; [defaults] apply to each disk that does not set the
  key itself:
  source      a device, in the notation of the command line
  store       directory of the backups of this disk; created by the first pull
  name        for messages [default: its number]
  bitmap      bitmap of the source with what has changed: a name in QEMU, or a metadata context. Without
              one, the backup is a full one
  parent      checkpoint at which the bitmap began [default: the name of the bitmap]
  point       name of the new point [default: the checkpoint, or else the time in UTC]
  checkpoint  name of the bitmap that begins at this point in time [default: the name of the point]
  mode        auto; full: copy all of the disk; increment: fail rather than copy all of it
              [default: auto]
  digests     false: write no digests of the files, which saves reading them once more [default: true]
  and options of copy by their long names, for example discard-source, verify, retries. Keys before the
  first table apply to all disks together, as in files of copy --job.
      [defaults]
      bitmap = \"monday\"
      point = \"tuesday\"
      discard-source = true
      [[disk]]
      name = \"vda\"
      source = \"nbd+unix:///vda?socket=/run/vm1.nbd\"
      store = \"vm1/vda\"
  A disk is copied in full if its store has no point, or the source has no such bitmap; the result says
  why. A bitmap that began at another point than the newest one of the store is refused.
";

pub(super) const RESTORE_EXAMPLES: &str = "\
EXAMPLES
  Restore the newest point, and compare it with the backup:
      blockhaul restore --verify vm1/vda disk.raw
  Restore another one to a server:
      blockhaul restore vm1/vda nbd://server/vda --point monday
";
