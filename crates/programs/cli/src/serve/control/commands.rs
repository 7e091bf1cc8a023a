//! The commands of `blockhaul ctl`: the arguments of each, its requests, and what the server does for a request.

use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use blockhaul_control::{
    BackupRequest, BackupTarget, ControlRequest, CopyMode, JobRef, MirrorRequest, Refusal, Seconds,
    SnapshotRequest, SyncMode,
};
use clap::{Args, Subcommand};
use serde_json::{Value, json};

use super::exports;
use super::operations::Operations;
use crate::args::ctl::{
    ExportBitmap, JobControlArgs, JobCopyArgs, JobNumber, SnapshotSetupArgs, device, layer_change,
    named, named_device,
};
use crate::args::value::{count, duration, setting, size};
use crate::exit::CommandFailure;

/// Options of `blockhaul ctl`.
#[derive(Debug, Args)]
#[command(infer_long_args = true)]
pub struct Ctl {
    /// Socket of the server, as given to serve --control
    #[arg(value_name = "SOCKET")]
    pub socket: PathBuf,

    /// What to do.
    #[command(subcommand)]
    pub command: CtlCommand,

    /// Print the reply of the server as JSON, one object per line
    #[arg(long, global = true)]
    pub json: bool,

    /// Show counters of jobs that are complete
    #[arg(short, long, global = true)]
    pub verbose: bool,

    /// Time to wait for a reply (0: no limit)
    #[arg(long, global = true, value_name = "TIME", default_value = "60s", value_parser = duration)]
    pub timeout: Duration,
}

/// The commands of `blockhaul ctl`.
#[derive(Debug, Subcommand)]
pub enum CtlCommand {
    /// List the clients
    ///
    /// For each client: address, export, TLS identity, requests in flight, bytes, requests and age.
    Clients,
    /// List the exports, with their layers and the parameters of these
    Exports,
    /// Disconnect a client
    ///
    /// No more requests of the client are read; its requests in progress are answered. If repeated,
    /// the connection is closed at once.
    Disconnect {
        /// Number of the client, as clients shows it
        #[arg(value_name = "N", value_parser = count::<u64>(0, u64::MAX))]
        number: u64,
    },
    /// Change parameters of a layer
    ///
    /// The change applies to new requests and to those that wait in the layer.
    Set {
        /// Name of the export; '' for the one without a name
        #[arg(value_name = "EXPORT")]
        export: String,
        /// Name of the layer; NAME:N for the nth of this name, counted from the device
        #[arg(value_name = "LAYER")]
        layer: String,
        /// Parameter and new value; exports lists the parameters
        #[arg(value_name = "NAME=VALUE", required = true, value_parser = setting)]
        setting: Vec<(String, String)>,
    },
    /// Add an export, for clients that connect from now on
    ExportAdd {
        /// Name, and device in the notation of serve
        ///
        /// A relative path is relative to the current directory, not to that of the server.
        #[arg(value_name = "NAME=DEVICE")]
        export: OsString,
        /// Serve read-only
        #[arg(short, long)]
        readonly: bool,
        /// Description of the export, shown to clients
        #[arg(long, value_name = "TEXT", default_value = "", hide_default_value = true)]
        description: String,
        /// Put a layer over the device, below those of all exports; may be repeated
        #[arg(long, value_name = "LAYER")]
        layer: Vec<String>,
    },
    /// Remove an export, and close its device
    ExportRemove {
        /// Name of the export; '' for the one without a name
        #[arg(value_name = "EXPORT")]
        export: String,
        /// Remove the export even if clients use it
        ///
        /// Further requests of these clients fail with ESHUTDOWN.
        #[arg(long)]
        force: bool,
    },
    /// Put a layer over an export in use
    ///
    /// The new layer is the outermost, next to the clients.
    LayerAdd {
        /// Name of the export; '' for the one without a name
        #[arg(value_name = "EXPORT")]
        export: String,
        /// Layer to add: rate, delay, log, stats, readonly, cache and others
        ///
        /// The layer must show the same disk.
        #[arg(value_name = "LAYER")]
        layer: String,
        /// Time that requests in flight may take to complete
        ///
        /// After that the layers stay as they are.
        #[arg(long, value_name = "TIME", default_value = "30s", value_parser = duration)]
        within: Duration,
    },
    /// Remove a layer from an export in use
    LayerRemove {
        /// Name of the export; '' for the one without a name
        #[arg(value_name = "EXPORT")]
        export: String,
        /// Name of the layer; NAME:N for the nth of this name, counted from the device
        #[arg(value_name = "LAYER")]
        layer: String,
        /// Time that requests in flight may take to complete
        ///
        /// After that the layers stay as they are.
        #[arg(long, value_name = "TIME", default_value = "30s", value_parser = duration)]
        within: Duration,
    },
    /// Serve an export as it is at this moment, read-only, as another export
    ///
    /// Clients of the export go on. Before they overwrite something, its old contents are saved.
    /// The snapshot ends when its export is removed.
    SnapshotAdd {
        /// Name of the export; '' for the one without a name
        #[arg(value_name = "EXPORT")]
        export: String,
        /// Name of the export that shows the snapshot
        #[arg(value_name = "NAME")]
        name: String,
        /// Accept trim requests, as those of copy --discard-source
        ///
        /// They free old contents that the reader does not need any more. The export is then not
        /// announced as read-only, but refuses writes.
        #[arg(long)]
        discard: bool,
        /// Show this dirty bitmap of the export, as it was then
        ///
        /// Readers see it as the metadata context qemu:dirty-bitmap:NAME. The bitmap itself goes on:
        /// remove it when the backup is complete.
        #[arg(long, value_name = "NAME")]
        bitmap: Option<String>,
        /// Add a dirty bitmap that begins with the snapshot, for the next one
        #[arg(long, value_name = "NAME")]
        start_bitmap: Option<String>,
        /// How old contents are saved.
        #[command(flatten)]
        snapshot: SnapshotSetupArgs,
    },
    /// Copy an export as it is at this moment, while clients use it
    ///
    /// The job is complete when the target is flushed and, with --verify, compared. Before clients
    /// overwrite something that is not copied yet, its old contents are saved.
    Backup {
        /// Name of the export; '' for the one without a name
        #[arg(value_name = "EXPORT")]
        export: String,
        /// Target in the notation of copy
        ///
        /// A relative path is relative to the current directory, not to that of the server.
        #[arg(value_name = "TARGET")]
        target: OsString,
        /// Back up another export to another target at the same moment; may be repeated
        ///
        /// Each disk is a job. If one fails, the others end, too, and no bitmap is cleared. Options
        /// apply to all disks, --rate to their sum.
        #[arg(long, value_names = ["EXPORT", "TARGET"], num_args = 2)]
        with: Vec<OsString>,
        /// Compare the target with the snapshot before the job is complete
        #[arg(long)]
        verify: bool,
        /// How it is copied.
        #[command(flatten)]
        copying: JobCopyArgs,
        /// Copy only what this dirty bitmap of the export shows, onto an earlier backup
        ///
        /// The bitmap is clean from the moment of the backup on; if the job fails, what was dirty
        /// is dirty again.
        #[arg(long, value_name = "NAME")]
        bitmap: Option<String>,
        /// Add a dirty bitmap that begins with this backup, for later ones
        #[arg(long, value_name = "NAME", conflicts_with = "bitmap")]
        start_bitmap: Option<String>,
        /// How old contents are saved.
        #[command(flatten)]
        snapshot: SnapshotSetupArgs,
        /// How the job is controlled.
        #[command(flatten)]
        job: JobControlArgs,
        /// Wait until the job has ended
        #[arg(long)]
        wait: bool,
    },
    /// Copy an export in use to a target that follows it, and move the clients there
    ///
    /// After a full copy, what clients have written meanwhile is copied in rounds. The job is ready
    /// when the rest can be copied within a second, and follows the export until job-complete or
    /// job-cancel. Layers of the export cannot be changed while the job runs.
    Mirror {
        /// Name of the export; '' for the one without a name
        #[arg(value_name = "EXPORT")]
        export: String,
        /// Target in the notation of copy
        ///
        /// A relative path is relative to the current directory, not to that of the server. A block
        /// device or NBD export keeps its size if it is larger than the disk; a file or qcow2 image
        /// gets the size of the disk, and what it held is lost.
        #[arg(value_name = "TARGET")]
        target: OsString,
        /// How it is copied.
        #[command(flatten)]
        copying: JobCopyArgs,
        /// Time that requests in flight may take to complete when the job begins
        #[arg(long, value_name = "TIME", default_value = "30s", value_parser = duration)]
        within: Duration,
        /// Copy only what this dirty bitmap shows, and later changes, onto an earlier copy
        ///
        /// The bitmap is clean from then on; if the job fails, what was dirty is dirty again.
        #[arg(long, value_name = "NAME")]
        bitmap: Option<String>,
        /// What is copied before changes are (none: the target has the contents of now)
        #[arg(long, value_name = "SYNC", value_parser = named::<SyncMode>(["full", "none"]),
              conflicts_with = "bitmap")]
        sync: Option<SyncMode>,
        /// When the target has what clients write
        ///
        /// background: soon after the write. write-blocking: before it completes, once everything
        /// was copied: the job becomes ready however fast clients write, but their writes are as
        /// slow as the target. job-copy-mode changes it.
        #[arg(long, value_name = "MODE", default_value = "background",
              value_parser = named::<CopyMode>(CopyMode::NAMES))]
        copy_mode: CopyMode,
        /// How the job is controlled.
        #[command(flatten)]
        job: JobControlArgs,
        /// Wait until the job is ready
        #[arg(long)]
        wait: bool,
    },
    /// Track what clients write from now on, in a dirty bitmap
    ///
    /// Clients that connect later see it as the metadata context qemu:dirty-bitmap:NAME. It is lost
    /// when the server ends, except with serve --bitmaps.
    BitmapAdd {
        /// Name of the export; '' for the one without a name
        #[arg(value_name = "EXPORT")]
        export: String,
        /// Name of the bitmap
        #[arg(value_name = "NAME")]
        name: String,
        /// Bytes per bit: a power of two, 512 to 64M
        #[arg(long, value_name = "SIZE", default_value = "64k", value_parser = size)]
        granularity: u64,
        /// Time that requests in flight may take to complete
        #[arg(long, value_name = "TIME", default_value = "30s", value_parser = duration)]
        within: Duration,
    },
    /// Remove a dirty bitmap
    BitmapRemove(ExportBitmap),
    /// Make a dirty bitmap clean
    BitmapClear(ExportBitmap),
    /// Mark writes in a dirty bitmap again
    BitmapEnable(ExportBitmap),
    /// Mark no more writes in a dirty bitmap
    ///
    /// It keeps what it shows.
    BitmapDisable(ExportBitmap),
    /// Merge other bitmaps into a bitmap
    BitmapMerge {
        /// Name of the export; '' for the one without a name
        #[arg(value_name = "EXPORT")]
        export: String,
        /// Name of the bitmap that changes
        #[arg(value_name = "NAME")]
        name: String,
        /// Names of the others
        #[arg(value_name = "FROM", required = true)]
        from: Vec<String>,
    },
    /// List the jobs, with their progress
    Jobs,
    /// Start no more requests of a job until it is resumed
    JobPause(JobNumber),
    /// Continue a paused job, or a job of an earlier server
    ///
    /// A job of an earlier server needs serve --job-state. A mirror copies what is missing, and goes
    /// on. The moment of a backup is lost with its server: --new-moment is needed. The other disks
    /// of a group are resumed, too.
    JobResume {
        /// Number of the job, as jobs shows it
        #[arg(value_name = "N", value_parser = count::<u64>(1, u64::MAX))]
        job: u64,
        /// Complete an interrupted backup with the disk as it is now
        ///
        /// What is missing and what clients have changed since is copied.
        #[arg(long)]
        new_moment: bool,
    },
    /// End a job that waits for it (--no-auto-finalize)
    JobFinalize(JobNumber),
    /// End a job, also an interrupted one; what it has copied stays on its target
    JobCancel(JobNumber),
    /// End a mirror: its target becomes the device of the export
    ///
    /// The requests of clients wait while the last changes are copied and the target is flushed, and
    /// continue on the target. Nobody is disconnected. If clients write so fast that they would have
    /// to wait longer than --within, the job goes on until they write less, or is cancelled. If the
    /// target does not answer in that time or fails, clients continue on the old device.
    JobComplete {
        /// Number of the job, as jobs shows it
        #[arg(value_name = "N", value_parser = count::<u64>(1, u64::MAX))]
        job: u64,
        /// Time that clients may have to wait
        #[arg(long, value_name = "TIME", default_value = "1s", value_parser = duration)]
        within: Duration,
        /// Leave the clients where they are: the target is the disk of that moment
        #[arg(long)]
        stay: bool,
        /// Wait until the job has ended
        #[arg(long)]
        wait: bool,
    },
    /// Change the maximum rate of a job
    JobRate {
        /// Number of the job, as jobs shows it
        #[arg(value_name = "N", value_parser = count::<u64>(1, u64::MAX))]
        job: u64,
        /// Bytes per second (0: no limit)
        #[arg(value_name = "RATE", value_parser = size)]
        rate: u64,
    },
    /// Switch a mirror between write-blocking and background copying
    JobCopyMode {
        /// Number of the job, as jobs shows it
        #[arg(value_name = "N", value_parser = count::<u64>(1, u64::MAX))]
        job: u64,
        /// background: soon after the write; write-blocking: before it completes
        #[arg(value_name = "MODE", value_parser = named::<CopyMode>(CopyMode::NAMES))]
        copy_mode: CopyMode,
    },
    /// Wait until a job has ended
    ///
    /// Exits with the status of the job.
    JobWait {
        /// Number of the job, as jobs shows it
        #[arg(value_name = "N", value_parser = count::<u64>(1, u64::MAX))]
        job: u64,
        /// Wait until a mirror is ready to complete
        #[arg(long)]
        ready: bool,
    },
    /// Read certificates, keys, revocations, pre-shared keys and the file of --config again
    ///
    /// Same as SIGHUP. Connected clients stay connected. If something is wrong, nothing changes.
    Reload,
    /// Print metrics, in the format of serve --metrics
    Metrics,
    /// Accept no more clients, and exit when the last one has left
    Drain {
        /// Wait until the server has exited
        #[arg(long)]
        wait: bool,
    },
    /// Exit as after SIGTERM
    ///
    /// Requests in progress are finished and answered.
    Stop {
        /// Wait until the server has exited
        #[arg(long)]
        wait: bool,
    },
}

impl CtlCommand {
    /// The requests for the server, one after the other.
    pub fn requests(&self) -> Result<Vec<ControlRequest>, CommandFailure> {
        use ControlRequest as R;
        Ok(vec![match self {
            CtlCommand::Clients => R::Clients,
            CtlCommand::Exports => R::Exports,
            &CtlCommand::Disconnect { number } => R::Disconnect { number },
            CtlCommand::Set { export, layer, setting } => {
                let set = |(name, value): &(String, String)| R::Set {
                    export: export.clone(),
                    layer: layer.clone(),
                    name: name.clone(),
                    value: value.clone(),
                };
                return Ok(setting.iter().map(set).collect());
            }
            CtlCommand::ExportAdd { export, readonly, description, layer } => {
                let (name, device) = named_device(export)?;
                let (description, layers) = (description.clone(), layer.clone());
                R::ExportAdd { name, device, description, readonly: *readonly, layers }
            }
            CtlCommand::ExportRemove { export, force } => {
                R::ExportRemove { name: export.clone(), force: *force }
            }
            CtlCommand::LayerAdd { export, layer, within } => {
                R::LayerAdd(layer_change(export, layer, *within))
            }
            CtlCommand::LayerRemove { export, layer, within } => {
                R::LayerRemove(layer_change(export, layer, *within))
            }
            CtlCommand::SnapshotAdd { export, name, discard, bitmap, start_bitmap, snapshot } => {
                R::SnapshotAdd(SnapshotRequest {
                    export: export.clone(),
                    name: name.clone(),
                    discard: *discard,
                    bitmap: bitmap.clone(),
                    start_bitmap: start_bitmap.clone(),
                    snapshot: snapshot.request()?,
                    seconds: Seconds(snapshot.within),
                })
            }
            CtlCommand::BitmapAdd { export, name, granularity, within } => {
                let (export, name, seconds) = (export.clone(), name.clone(), Seconds(*within));
                R::BitmapAdd { export, name, granularity: *granularity, seconds }
            }
            CtlCommand::BitmapRemove(bitmap) => R::BitmapRemove(bitmap.request()),
            CtlCommand::BitmapClear(bitmap) => R::BitmapClear(bitmap.request()),
            CtlCommand::BitmapEnable(bitmap) => R::BitmapEnable(bitmap.request()),
            CtlCommand::BitmapDisable(bitmap) => R::BitmapDisable(bitmap.request()),
            CtlCommand::BitmapMerge { export, name, from } => {
                R::BitmapMerge { export: export.clone(), name: name.clone(), from: from.clone() }
            }
            CtlCommand::Backup {
                export,
                target,
                with,
                verify,
                copying,
                bitmap,
                start_bitmap,
                snapshot,
                job,
                ..
            } => {
                let others = with.chunks_exact(2).map(|pair| {
                    let export = pair[0].to_string_lossy().into_owned();
                    Ok(BackupTarget { export, target: device(&pair[1])? })
                });
                R::Backup(BackupRequest {
                    export: export.clone(),
                    target: device(target)?,
                    with: others.collect::<Result<_, CommandFailure>>()?,
                    options: copying.request(*verify),
                    bitmap: bitmap.clone(),
                    start_bitmap: start_bitmap.clone(),
                    snapshot: snapshot.request()?,
                    seconds: Seconds(snapshot.within),
                    on_source_error: Some(job.on_source_error),
                    on_target_error: Some(job.on_target_error),
                    finalize_by_hand: job.no_auto_finalize,
                })
            }
            CtlCommand::Mirror {
                export,
                target,
                copying,
                within,
                bitmap,
                sync,
                copy_mode,
                job,
                ..
            } => R::Mirror(MirrorRequest {
                export: export.clone(),
                target: device(target)?,
                options: copying.request(false),
                seconds: Seconds(*within),
                bitmap: bitmap.clone(),
                sync: *sync,
                copy_mode: Some(*copy_mode),
                on_source_error: Some(job.on_source_error),
                on_target_error: Some(job.on_target_error),
                finalize_by_hand: job.no_auto_finalize,
            }),
            CtlCommand::Jobs => R::Jobs,
            CtlCommand::JobPause(job) => R::JobPause(job.request()),
            &CtlCommand::JobResume { job, new_moment } => R::JobResume { job, new_moment },
            CtlCommand::JobFinalize(job) => R::JobFinalize(job.request()),
            CtlCommand::JobCancel(job) => R::JobCancel(job.request()),
            &CtlCommand::JobComplete { job, within, stay, .. } => {
                R::JobComplete { job, seconds: Seconds(within), switch: !stay }
            }
            &CtlCommand::JobRate { job, rate } => R::JobRate { job, rate },
            &CtlCommand::JobCopyMode { job, copy_mode } => R::JobCopyMode { job, copy_mode },
            &CtlCommand::JobWait { job, ready } => R::JobWait { job, ready },
            CtlCommand::Reload => R::Reload,
            CtlCommand::Metrics => R::Metrics,
            CtlCommand::Drain { .. } => R::Drain,
            CtlCommand::Stop { .. } => R::Stop,
        }])
    }
}

impl Operations {
    /// Carries out a request: here, so that the reply is sent before the operations that it starts
    /// continue; reading of files on a thread that may block. No reply: the end of the connection is
    /// one.
    pub(super) async fn answer(
        self: Arc<Self>,
        request: ControlRequest,
    ) -> Result<Option<Value>, Refusal> {
        use ControlRequest as R;
        let reply = match request {
            R::Clients => json!({ "clients": self.clients() }),
            R::Exports => json!({ "exports": self.exports() }),
            R::Disconnect { number } => self.disconnect(number)?,
            R::Set { export, layer, name, value } => self.set(&export, &layer, &name, &value)?,
            R::ExportAdd { name, device, description, readonly, layers } => {
                let one = exports::described(&name, device, &description, readonly, layers)?;
                self.add_export(&name, one).await?
            }
            R::ExportRemove { name, force } => self.remove_export(&name, force).await?,
            R::LayerAdd(change) => self.add_layer(change).await?,
            R::LayerRemove(change) => self.remove_layer(change).await?,
            R::SnapshotAdd(request) => self.add_snapshot(request).await?,
            R::BitmapAdd { export, name, granularity, seconds } => {
                self.add_bitmap(&export, &name, granularity, seconds).await?
            }
            R::BitmapRemove(bitmap) => self.remove_bitmap(bitmap).await?,
            R::BitmapClear(bitmap) => self.clear_bitmap(&bitmap)?,
            R::BitmapEnable(bitmap) => self.enable_bitmap(&bitmap, true)?,
            R::BitmapDisable(bitmap) => self.enable_bitmap(&bitmap, false)?,
            R::BitmapMerge { export, name, from } => self.merge_bitmaps(&export, &name, &from)?,
            R::Backup(request) => self.begin_backup(request).await?,
            R::Mirror(request) => self.begin_mirror(request).await?,
            R::Jobs => self.list_jobs(),
            R::JobPause(JobRef { job }) => self.pause_job(job)?,
            R::JobResume { job, new_moment } => self.resume_job(job, new_moment).await?,
            R::JobComplete { job, seconds, switch } => self.complete_job(job, seconds, switch)?,
            R::JobFinalize(JobRef { job }) => self.finalize_job(job)?,
            R::JobCancel(JobRef { job }) => self.cancel_job(job).await?,
            R::JobRate { job, rate } => self.limit_job(job, rate)?,
            R::JobCopyMode { job, copy_mode } => self.set_copy_mode(job, copy_mode)?,
            R::JobWait { job, ready } => self.wait_for_job(job, ready).await?,
            R::Reload => {
                let done = self.reload().await.map_err(Refusal::failed)?;
                json!({ "done": done })
            }
            R::Metrics => self.metrics(),
            R::Drain => self.drain(),
            R::Stop => self.stop(),
            R::Wait => return Ok(None),
        };
        Ok(Some(reply))
    }
}
