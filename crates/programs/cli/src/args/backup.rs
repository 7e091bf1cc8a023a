//! Options of the commands for backups in a directory: `pull`, `restore` and `chain`.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use blockhaul_backups::{KeepCount, KeepDuration, RetentionPolicy};
use clap::{Args, Subcommand};

use super::engine::EngineArgs;
use super::log::LogArgs;

/// Options of `blockhaul pull`.
#[derive(Debug, Args)]
#[command(infer_long_args = true)]
pub struct PullArgs {
    /// File that lists the disks; see JOB FILES
    #[arg(value_name = "JOB.toml", required_unless_present_any = ["libvirt", "qmp"], conflicts_with = "machine")]
    pub job: Option<PathBuf>,

    #[command(flatten)]
    pub machine: MachineArgs,

    /// Name of the new point [default: the checkpoint, or else the time in UTC]
    ///
    /// It applies to all disks, and takes precedence over the file. The same is true for --checkpoint,
    /// --bitmap and --parent.
    #[arg(long, value_name = "NAME")]
    pub point: Option<String>,

    /// Name of the bitmap that begins at this point in time [default: the name of the point]
    #[arg(long, value_name = "NAME", conflicts_with = "machine")]
    pub checkpoint: Option<String>,

    /// Bitmap with what has changed: a name in QEMU, or a metadata context
    #[arg(long, value_name = "NAME|CONTEXT", conflicts_with = "machine")]
    pub bitmap: Option<String>,

    /// Checkpoint at which that bitmap began [default: the name of the bitmap]
    ///
    /// It must be the checkpoint of the newest point of each store.
    #[arg(long, value_name = "NAME", conflicts_with = "machine")]
    pub parent: Option<String>,

    /// Copy all of each disk, with or without a bitmap
    #[arg(long)]
    pub full: bool,

    /// Discard a pull that was interrupted, and begin again
    ///
    /// By default, the same command resumes it.
    #[arg(long, conflicts_with = "machine")]
    pub restart: bool,

    /// Show what would be copied, and change nothing
    ///
    /// The sources are opened for reading, and their bitmaps are read. Of a machine, the disks and their
    /// checkpoints are looked at: no point in time begins, and the bytes that have changed are not counted.
    #[arg(long)]
    pub dry_run: bool,

    #[command(flatten)]
    pub result: ResultArgs,

    #[command(flatten)]
    pub reporting: ProgressOptions,
}

/// A virtual machine whose moment `pull` begins and ends itself.
#[derive(Debug, Args)]
pub struct MachineArgs {
    /// Back up this domain of libvirt, from its checkpoint to the end of its backup
    ///
    /// virsh makes the point in time of all disks, with a checkpoint for the next increment. The file systems
    /// of the guest are frozen for that moment, if its agent answers. An increment is pulled where the
    /// newest point of the store of a disk has a checkpoint, else a full backup. Leftovers of a killed run are
    /// removed.
    #[arg(
        long,
        value_name = "DOMAIN",
        group = "machine",
        requires = "store",
        help_heading = "Virtual machines"
    )]
    pub libvirt: Option<String>,

    /// Back up the machine of this monitor of QEMU, in the same way
    ///
    /// Also disks of qemu-storage-daemon. The socket must be free. Guests are not frozen.
    #[arg(
        long,
        value_name = "SOCKET",
        group = "machine",
        requires = "store",
        help_heading = "Virtual machines"
    )]
    pub qmp: Option<PathBuf>,

    /// Directory with a store for each disk of the machine; created if it is absent
    #[arg(long, value_name = "DIR", requires = "machine", help_heading = "Virtual machines")]
    pub store: Option<PathBuf>,

    /// Back up only this disk: a target of libvirt, a device or node of QEMU; may be repeated
    #[arg(long, value_name = "NAME", requires = "machine", help_heading = "Virtual machines")]
    pub disk: Vec<String>,

    /// Directory of the machine for what it overwrites meanwhile
    #[arg(long, value_name = "DIR", default_value = "/var/tmp", help_heading = "Virtual machines")]
    pub scratch: PathBuf,

    /// URI of libvirt [default: that of virsh]
    #[arg(long, value_name = "URI", requires = "libvirt", help_heading = "Virtual machines")]
    pub connect: Option<String>,

    /// Do not freeze the file systems of the guest
    #[arg(long, requires = "libvirt", help_heading = "Virtual machines")]
    pub no_freeze: bool,
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

    #[command(flatten)]
    pub log: LogArgs,
}

impl ProgressOptions {
    /// Starts the log of the command.
    pub fn start_log(&self) {
        self.log.start(self.verbose);
    }
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

    /// Show what would be read and written, and change nothing
    ///
    /// The digests are not checked, and the target is opened for reading, if it exists.
    #[arg(long)]
    pub dry_run: bool,

    #[command(flatten)]
    pub result: ResultArgs,

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

/// How the commands that read the files of a store do that.
#[derive(Debug, Args)]
pub struct ChainReporting {
    #[command(flatten)]
    pub reporting: ProgressOptions,

    #[command(flatten)]
    pub engine: EngineArgs,
}

/// How a command about backups tells programs and monitoring its result.
#[derive(Debug, Args)]
pub struct ResultArgs {
    /// Print the result as JSON, also after a failure: with error and exit_status
    #[arg(long)]
    pub json: bool,

    /// Publish metrics for Prometheus: localhost:PORT, unix:PATH or textfile:PATH
    ///
    /// As for blockhaul copy; also if the command fails before it begins. The metrics have the exit status,
    /// the time of the end, and the number and age of the points of each store. May be given twice.
    #[arg(long, value_name = "ADDR")]
    pub metrics: Vec<blockhaul_metrics::Destination>,
}

/// Which points of a store are kept: those that one of the rules keeps.
#[derive(Debug, Args)]
#[group(id = "rules", required = true, multiple = true)]
pub struct RetentionArgs {
    /// Keep the last N points
    #[arg(long, alias = "keep", value_name = "N")]
    pub keep_last: Option<KeepCount>,

    /// Keep the newest point of each of the last N days that have one
    ///
    /// Days are those of the time zone of this machine, or of TZ. While there are fewer than N, the oldest
    /// point is kept, too. N may be unlimited. The same is true for weeks, which begin on Monday, months and
    /// years.
    #[arg(long, value_name = "N")]
    pub keep_daily: Option<KeepCount>,

    /// Keep the newest point of each of the last N weeks that have one
    #[arg(long, value_name = "N")]
    pub keep_weekly: Option<KeepCount>,

    /// Keep the newest point of each of the last N months that have one
    #[arg(long, value_name = "N")]
    pub keep_monthly: Option<KeepCount>,

    /// Keep the newest point of each of the last N years that have one
    #[arg(long, value_name = "N")]
    pub keep_yearly: Option<KeepCount>,

    /// Keep all points of this time before the newest one, for example 7d, 2w, 6m or 1y6m
    ///
    /// y is a year, m a month, w a week, d a day, h an hour.
    #[arg(long, value_name = "DURATION")]
    pub keep_within: Option<KeepDuration>,
}

impl RetentionArgs {
    /// The policy of these rules.
    pub fn policy(&self) -> RetentionPolicy {
        RetentionPolicy {
            last: self.keep_last.unwrap_or_default(),
            daily: self.keep_daily.unwrap_or_default(),
            weekly: self.keep_weekly.unwrap_or_default(),
            monthly: self.keep_monthly.unwrap_or_default(),
            yearly: self.keep_yearly.unwrap_or_default(),
            within: self.keep_within,
        }
    }
}

/// The commands of `blockhaul chain`.
#[derive(Debug, Subcommand)]
pub enum ChainCommand {
    /// List the points of a disk
    List {
        /// Directory of the backups of a disk
        #[arg(value_name = "DIR")]
        dir: PathBuf,
        #[command(flatten)]
        result: ResultArgs,
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
        result: ResultArgs,
        #[command(flatten)]
        reporting: ChainReporting,
    },
    /// Merge the oldest increment into the full backup below it
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
        /// Show what would be merged, and change nothing
        #[arg(long)]
        dry_run: bool,
        #[command(flatten)]
        result: ResultArgs,
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
        #[command(flatten)]
        result: ResultArgs,
    },
    /// Remove old points, by rules about which are kept
    ///
    /// A point is kept if one of the rules keeps it. The rules are those of restic forget. What newer points
    /// need is merged into the next one that is kept; the files are checked first. The newest point is kept
    /// in any case.
    #[command(after_help = PRUNE_EXAMPLES)]
    Prune {
        /// Directory of the backups of a disk
        #[arg(value_name = "DIR")]
        dir: PathBuf,
        #[command(flatten)]
        keep: RetentionArgs,
        /// Do not check the digests of the files first
        ///
        /// A merged full backup has no digest then.
        #[arg(long)]
        no_check: bool,
        /// Show which points would go, and why the others stay; change nothing
        #[arg(long)]
        dry_run: bool,
        #[command(flatten)]
        result: ResultArgs,
        #[command(flatten)]
        reporting: ChainReporting,
    },
}

impl ChainCommand {
    /// The directory, and how the result is told.
    pub fn place(&self) -> (&Path, &ResultArgs) {
        match self {
            ChainCommand::List { dir, result }
            | ChainCommand::Check { dir, result, .. }
            | ChainCommand::Merge { dir, result, .. }
            | ChainCommand::Abandon { dir, result }
            | ChainCommand::Prune { dir, result, .. } => (dir, result),
        }
    }
}

const PRUNE_EXAMPLES: &str = "\
EXAMPLES
  Keep a week of days, a month of weeks and a year of months; first only show what that means:
      blockhaul chain prune vm1/vda --keep-daily 7 --keep-weekly 4 --keep-monthly 12 --dry-run
      blockhaul chain prune vm1/vda --keep-daily 7 --keep-weekly 4 --keep-monthly 12
";

/// The help behind the options of `pull`.
pub const PULL_HELP: &str = "\
EXAMPLES
  Back up all disks of a domain of libvirt; each time but the first only what has changed:
      blockhaul pull --libvirt vm1 --store /var/lib/blockhaul/vm1
  Back up all disks of a machine that libvirt or QEMU exports, in full; later, what has changed:
      blockhaul pull vm1.toml --point monday
      blockhaul pull vm1.toml --bitmap monday --point tuesday
  Restore a disk, or serve it as it was:
      blockhaul restore vm1/vda /dev/vg/new --point monday
      blockhaul serve --readonly 'backup:vm1/vda?point=monday'

JOB FILES
  The file is TOML. Each [[disk]] has these keys; [defaults] apply to each disk
  that does not set the key itself:
  source      a device, in the notation of the command line
  store       directory of the backups of this disk; the first pull creates it.
              Or restic:REPO#DIRECTORY, for snapshots of restic (docs/restic.md)
  name        for messages [default: its number]
  bitmap      bitmap of the source with what has changed: a name in QEMU, or a
              metadata context. Without one, the backup is a full one
  parent      checkpoint at which the bitmap began
              [default: the name of the bitmap]
  point       name of the new point
              [default: the checkpoint, or else the time in UTC]
  checkpoint  name of the bitmap that begins at this point in time
              [default: the name of the point]
  mode        auto; full: copy all of the disk; increment: fail rather than
              copy all of it [default: auto]
  digests     false: write no digests of the files, which saves reading them
              once more [default: true]
  files       list of small files that are kept beside the disk; only with
              restic:REPO#DIRECTORY
  and options of copy by their long names, for example discard-source, verify,
  retries. Keys before the first table apply to all disks together, as in files
  of copy --job: rate, parallel, metrics and others.
      [defaults]
      bitmap = \"monday\"
      point = \"tuesday\"
      discard-source = true
      [[disk]]
      name = \"vda\"
      source = \"nbd+unix:///vda?socket=/run/vm1.nbd\"
      store = \"vm1/vda\"
  A disk is copied in full if its store has no point, or the source has no such
  bitmap; the result says why. A bitmap that began at another point than the
  newest one of the store is refused.
";

pub(super) const RESTORE_EXAMPLES: &str = "\
EXAMPLES
  Restore the newest point, and compare it with the backup:
      blockhaul restore --verify vm1/vda disk.raw
  Restore another one to a server:
      blockhaul restore vm1/vda nbd://server/vda --point monday
";
