//! Options of `mount`.

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::time::Duration;

use blockhaul_fuse::PageCacheMode;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{Args, Parser};

use super::engine::EngineArgs;
use super::format::PartitionArgs;
use super::log::LogArgs;
use super::value::{count, duration, memory};

/// Options of `blockhaul mount`.
#[derive(Debug, Args)]
#[command(
    infer_long_args = true,
    override_usage = "blockhaul mount [OPTIONS] DEVICE TARGET\n       \
                      blockhaul mount [OPTIONS] --export NAME=DEVICE… TARGET"
)]
pub struct MountArgs {
    /// Device to show (see blockhaul help devices)
    ///
    /// With dir:PATH, the regular files that are in a directory at that moment, each under its name.
    #[arg(value_name = "DEVICE")]
    pub device: OsString,

    /// An existing directory or regular file
    ///
    /// In a directory, the device is the file disk, and info.json has its properties. A file is
    /// covered by the device as long as that is mounted. If all devices are given with --export,
    /// TARGET is the only argument.
    #[arg(value_name = "TARGET", required_unless_present = "export")]
    pub target: Option<PathBuf>,

    /// Name of the file of DEVICE, or a further device; may be repeated
    ///
    /// NAME names the file of DEVICE, instead of disk. NAME=DEVICE shows a further device as
    /// TARGET/NAME; DEVICE is then not needed. NAME=[ DEVICE OPTION… ], as separate words, gives the
    /// device its own --layer, --partition and --readonly. In NAME=, %XX is a byte.
    #[arg(short, long, value_name = "NAME | NAME=DEVICE | NAME=[ DEVICE OPTION… ]")]
    pub export: Vec<OsString>,

    /// Allow writing
    #[arg(short, long, alias = "read-write")]
    pub writable: bool,

    /// Put a layer over the device (see blockhaul help layers)
    ///
    /// May be repeated; the last layer is the outermost. With --layer cow, writes go to a temporary
    /// file, and the device does not change. With several devices, the layer is put over each of
    /// them.
    #[arg(long, value_name = "NAME[?key=value&…]")]
    pub layer: Vec<String>,

    #[command(flatten)]
    pub partition: PartitionArgs,

    /// Mount the file system on the device (as root)
    ///
    /// TARGET, a directory, then shows the files of the file system. A loop device connects both;
    /// mount(8) finds the type. On exit the file system is unmounted first.
    #[arg(long)]
    pub filesystem: bool,

    /// Options for mounting the file system, as for mount -o
    #[arg(long, value_name = "OPTIONS", requires = "filesystem")]
    pub filesystem_options: Option<String>,

    /// What the page cache keeps: none, open or keep
    ///
    /// none: every read and write goes to the device. open: the cache is emptied when the file is
    /// opened, so that changes by others show up then. keep: nobody else changes the device.
    #[arg(long, value_name = "MODE", default_value = "open", value_parser = cache())]
    pub cache: PageCacheMode,

    /// Let other users read the file
    ///
    /// With --writable, the owner can give them write permission with chmod(1), for example for a virtual
    /// machine that runs as another user. For users other than root, this option needs the line
    /// user_allow_other in /etc/fuse.conf.
    #[arg(long)]
    pub allow_other: bool,

    /// Return when mounted, and continue in the background
    ///
    /// Messages then go to standard error if that is a file, else to syslog.
    #[arg(long, conflicts_with = "run")]
    pub background: bool,

    /// Write the process ID to this file when mounted
    #[arg(short = 'P', long = "pidfile", alias = "pid-file", value_name = "FILE")]
    pub pid_file: Option<PathBuf>,

    /// Run this shell command while mounted, then unmount and exit with its status
    ///
    /// The command gets the variables $disk, the path of the file (of the first, if there are several;
    /// with --filesystem: of the loop device), and $target, the path of TARGET.
    #[arg(long, value_name = "CMD")]
    pub run: Option<String>,

    /// Drop a connection if no byte has moved for this long (0: never)
    ///
    /// This applies while a reply is pending. The read or write then fails, unless --layer retry
    /// repeats it.
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = duration)]
    pub timeout: Duration,

    /// Print more detail
    #[arg(short, long)]
    pub verbose: bool,

    #[command(flatten)]
    pub log: LogArgs,

    /// Threads that serve requests (0: one per core)
    #[arg(long, value_name = "N", default_value = "0", help_heading = "Tuning",
          value_parser = count::<u16>(0, 1024))]
    pub workers: u16,

    /// Memory for requests in flight
    #[arg(long, value_name = "SIZE", default_value = "128M", help_heading = "Tuning",
          value_parser = memory)]
    pub memory: u64,

    #[command(flatten)]
    pub engine: EngineArgs,

    /// Set by a process that starts itself again to go to the background.
    #[arg(long, hide = true)]
    pub in_background: bool,
}

impl MountArgs {
    /// The device, if one stands before the target, and the target.
    pub fn places(&self) -> (Option<&OsStr>, &Path) {
        match &self.target {
            Some(target) => (Some(&self.device), target),
            None => (None, Path::new(&self.device)),
        }
    }
}

/// What stands in the brackets of `--export NAME=[ … ]`.
#[derive(Debug, Parser)]
#[command(infer_long_args = true, no_binary_name = true, disable_help_flag = true)]
pub struct MountExport {
    /// Device to show (see blockhaul help devices)
    #[arg(value_name = "DEVICE")]
    pub device: OsString,

    /// Refuse writes, even with --writable
    #[arg(short, long, alias = "read-only")]
    pub readonly: bool,

    /// Put a layer over the device (see blockhaul help layers)
    ///
    /// May be repeated; the last layer is the outermost.
    #[arg(long, value_name = "NAME[?key=value&…]")]
    pub layer: Vec<String>,

    #[command(flatten)]
    pub partition: PartitionArgs,
}

fn cache() -> impl TypedValueParser<Value = PageCacheMode> {
    PossibleValuesParser::new(["none", "open", "keep"]).map(|name| match &*name {
        "none" => PageCacheMode::None,
        "keep" => PageCacheMode::Keep,
        _ => PageCacheMode::Open,
    })
}

pub(super) const EXAMPLES: &str = "\
EXAMPLES
  Show an export of a server as the file /mnt/disk, and unmount it:
      blockhaul mount --background nbd://server/vm1 /mnt
      umount /mnt
  Copy a file out of the second partition of an image, as root:
      blockhaul mount --partition 2 --filesystem disk.raw /mnt --run 'cp /mnt/etc/hostname .'
  Show two disks of a virtual machine, and all images in a directory:
      blockhaul mount --export system=vm.raw --export data=nbd://server/data /mnt
      blockhaul mount dir:/var/lib/images /mnt
  Try changes without changing the image:
      blockhaul mount -w --layer cow disk.raw /mnt
";
