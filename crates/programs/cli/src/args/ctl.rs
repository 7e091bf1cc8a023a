//! Options that commands of `ctl` share, and their values.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use blockhaul_catalog::{DeviceSpec, percent_decode};
use blockhaul_control::{
    BitmapRef, DeviceDescription, ErrorPolicy, JobRef, LayerChange, Seconds, SnapshotFailurePolicy,
};
use clap::Args;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use serde::de::DeserializeOwned;

use super::value::{count, duration, size};
use crate::exit::{CommandFailure, plain};

/// A dirty bitmap of an export.
#[derive(Args, Debug)]
pub struct ExportBitmap {
    /// Name of the export; '' for the one without a name
    #[arg(value_name = "EXPORT")]
    export: String,
    /// Name of the bitmap
    #[arg(value_name = "NAME")]
    name: String,
}

/// A job.
#[derive(Args, Debug)]
pub struct JobNumber {
    /// Number of the job, as jobs shows it
    #[arg(value_name = "N", value_parser = count::<u64>(1, u64::MAX))]
    job: u64,
}

/// How the old contents of an export are saved.
#[derive(Debug, Args)]
pub struct SnapshotSetupArgs {
    /// Block size for saving old contents: a power of two, 4k to 16M
    #[arg(long, value_name = "SIZE", default_value = "64k", value_parser = size)]
    snapshot_block: u64,
    /// Directory for the file with old contents [default: TMPDIR of the server, or /var/tmp]
    #[arg(long, alias = "fleece", value_name = "DIR")]
    scratch: Option<PathBuf>,
    /// Maximum size of that file [default: no maximum]
    #[arg(long, alias = "fleece-max", value_name = "SIZE", value_parser = size)]
    scratch_max: Option<u64>,
    /// Time that a write of a client may wait until old contents are saved (0: no limit)
    #[arg(long, value_name = "TIME", default_value = "200ms", value_parser = duration)]
    guest_timeout: Duration,
    /// What happens if old contents cannot be saved, or not in that time
    ///
    /// break: the snapshot is lost, and clients go on. fail: the write of the client fails.
    #[arg(long, value_name = "break|fail", default_value = "break", value_parser = named::<SnapshotFailurePolicy>(["break", "fail"]))]
    on_guest_failure: SnapshotFailurePolicy,
    /// Time that requests in flight may take to complete before the snapshot begins
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = duration)]
    pub(crate) within: Duration,
}

/// How the data of a job is copied.
#[derive(Args, Debug)]
pub struct JobCopyArgs {
    /// Maximum rate in bytes per second; job-rate changes it
    #[arg(long, value_name = "RATE")]
    rate: Option<String>,
    /// Connections to the target
    #[arg(short = 'C', long, value_name = "N", value_parser = count::<u16>(1, 1024))]
    connections: Option<u16>,
    /// Requests in flight on each connection
    #[arg(short = 'R', long, value_name = "N", value_parser = count::<u32>(1, 65536))]
    requests: Option<u32>,
    /// Size of a request
    #[arg(long, value_name = "SIZE")]
    request_size: Option<String>,
    /// The target reads as zeroes: holes need not be zeroed
    #[arg(long, alias = "target-is-zero")]
    destination_is_zero: bool,
}

/// How a job is controlled.
#[derive(Args, Debug)]
pub struct JobControlArgs {
    /// What the job does when a read of the export fails
    ///
    /// report: it fails. stop: it pauses, and repeats the request when it is resumed. enospc: stop
    /// if there is no space, else report. ignore: it repeats the request until it succeeds.
    #[arg(long, value_name = "POLICY", default_value = "report",
          value_parser = named::<ErrorPolicy>(ErrorPolicy::NAMES))]
    pub(crate) on_source_error: ErrorPolicy,
    /// What the job does when a write to the target fails; as --on-source-error
    #[arg(long, value_name = "POLICY", default_value = "report",
          value_parser = named::<ErrorPolicy>(ErrorPolicy::NAMES))]
    pub(crate) on_target_error: ErrorPolicy,
    /// Wait for job-finalize before the job completes
    ///
    /// A backup keeps its snapshot, and a mirror its clients, until then.
    #[arg(long)]
    pub(crate) no_auto_finalize: bool,
}

impl ExportBitmap {
    pub(crate) fn request(&self) -> BitmapRef {
        BitmapRef { export: self.export.clone(), name: self.name.clone() }
    }
}

impl JobNumber {
    pub(crate) fn request(&self) -> JobRef {
        JobRef { job: self.job }
    }
}

impl SnapshotSetupArgs {
    pub(crate) fn request(&self) -> Result<blockhaul_control::SnapshotOptions, CommandFailure> {
        Ok(blockhaul_control::SnapshotOptions {
            block: self.snapshot_block,
            max: self.scratch_max,
            directory: self.scratch.as_deref().map(absolute).transpose()?,
            guest_timeout: Seconds(self.guest_timeout),
            on_failure: self.on_guest_failure,
        })
    }
}

impl JobCopyArgs {
    pub(crate) fn request(&self, verify: bool) -> blockhaul_control::CopyOptions {
        let values = [
            ("rate", self.rate.clone()),
            ("connections", self.connections.map(|count| count.to_string())),
            ("requests", self.requests.map(|count| count.to_string())),
            ("request-size", self.request_size.clone()),
        ];
        let flags = [("verify", verify), ("destination-is-zero", self.destination_is_zero)];
        let values =
            values.into_iter().filter_map(|(name, value)| Some(format!("--{name}={}", value?)));
        let flags = flags.into_iter().filter(|(_, given)| *given);
        let flags = flags.map(|(name, _)| format!("--{name}"));
        blockhaul_control::CopyOptions(values.chain(flags).collect())
    }
}

/// Accepts the names of a type of the protocol.
pub(crate) fn named<T>(names: impl Into<PossibleValuesParser>) -> impl TypedValueParser<Value = T>
where
    T: DeserializeOwned + Clone + Send + Sync + 'static,
{
    names.into().try_map(|name| serde_json::from_value(name.into()))
}

pub(crate) fn layer_change(export: &str, layer: &str, within: Duration) -> LayerChange {
    LayerChange { export: export.into(), layer: layer.into(), seconds: Seconds(within) }
}

/// An absolute path, for the server, which has another working directory.
fn absolute(path: &Path) -> Result<String, CommandFailure> {
    let absolute = std::path::absolute(path)
        .map_err(|error| CommandFailure::usage(format!("{}: {}", path.display(), plain(&error))))?;
    let text = absolute.into_os_string().into_string();
    text.map_err(|_| CommandFailure::usage(format!("{}: the path is not UTF-8", path.display())))
}

/// A device, for the server.
pub(crate) fn device(device: &OsStr) -> Result<DeviceDescription, CommandFailure> {
    Ok(DeviceDescription::Text(match DeviceSpec::parse(device)? {
        DeviceSpec::Path(path) => absolute(&path)?,
        spec => spec.to_string(),
    }))
}

/// The name and the device of `NAME=DEVICE`, for the server.
pub(crate) fn named_device(export: &OsStr) -> Result<(String, DeviceDescription), CommandFailure> {
    let split = export.to_str().and_then(|text| text.split_once('='));
    let Some((name, text)) = split.filter(|(_, device)| !device.is_empty()) else {
        return Err(CommandFailure::usage("give a name and a device: NAME=DEVICE"));
    };
    Ok((percent_decode(name)?, device(OsStr::new(text))?))
}

pub(super) const EXAMPLES: &str = "\
EXAMPLES
  Start a server with a control socket, list its clients, disconnect the third:
      blockhaul serve --control /run/disks.ctl --export a=a.raw --layer 'rate?rate=10M'
      blockhaul ctl /run/disks.ctl clients
      blockhaul ctl /run/disks.ctl disconnect 3
  Raise a rate limit:
      blockhaul ctl /run/disks.ctl set a rate rate=100M
  Add a disk, add and remove a layer while clients are connected, remove the disk:
      blockhaul ctl /run/disks.ctl export-add b=b.raw
      blockhaul ctl /run/disks.ctl layer-add b 'delay?read=5ms'
      blockhaul ctl /run/disks.ctl layer-remove b delay
      blockhaul ctl /run/disks.ctl export-remove b
  Back up a disk in use, and wait for the end of the job:
      blockhaul ctl /run/disks.ctl backup a backup.raw --verify --wait
  Let the clients finish, then exit:
      blockhaul ctl /run/disks.ctl drain --wait
";
