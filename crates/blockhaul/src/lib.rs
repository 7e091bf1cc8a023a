//! Serve, copy, compare and back up disk images over NBD (Network Block Device).
//!
//! ```
//! use blockhaul::copy::{CopyRequest, Endpoint};
//! use blockhaul::runtime::{Pool, Runtime, RuntimeConfig};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let source = Endpoint::Device("sample:16M".parse()?);
//! let target = Endpoint::Device("memory:16M".parse()?);
//! let mut request = CopyRequest::new(source, target);
//! request.options.flush = true;
//! let runtime = Runtime::start(&RuntimeConfig::default())?;
//! let report = runtime.block_on(async move || {
//!     let copy = request.open(&blockhaul::device_registry()).await?;
//!     let pool = Pool::new(copy.memory());
//!     copy.run(pool).await
//! })?;
//! println!("{}", report.text);
//! # Ok(())
//! # }
//! ```
//! A device is a file, a block device, an image in a format, an NBD export, generated data, or your own
//! implementation of [`device::Device`]. Where a device is described by a text, the text is that of the
//! command line: `disk.raw`, `qcow2:vm.qcow2`, `nbd://host/export`, `nbd+unix:///?socket=PATH`, `memory:1G`.
//!
//! # Uses
//! | use | module | example |
//! |---|---|---|
//! | implement a device, and serve it | [`device`], [`server`] | `examples/device.rs` |
//! | copy, with progress and cancellation | [`copy`] | `examples/copy.rs` |
//! | compare two devices | [`compare`] | `examples/compare.rs` |
//! | back up a disk that clients use, with increments | [`jobs`] | `examples/backup.rs` |
//!
//! All of them run on the workers of a [`runtime`].
//!
//! # What this crate is not
//! - Not the command `blockhaul`: it parses no command lines, prints nothing, handles no signals and has no
//!   exit statuses. Messages about what happens meanwhile go to the crate `log`.
//! - Not a general asynchronous runtime, and not for one: futures of this crate run on the workers of
//!   [`runtime::Runtime`] only. A program with another runtime calls [`runtime::WorkerHandle::spawn`] and awaits the
//!   ticket, which any executor can poll.
//! - Not portable: it needs Linux.
//! - Not stable: before version 1.0 a release may change every interface.
//!
//! # Units
//! Offsets, lengths and sizes are bytes, as `u64`. Rates are bytes per second, and 0 means no limit. Times are
//! [`Duration`](std::time::Duration); where zero means no limit, the item says so. Offsets need no alignment:
//! requests that do not fit the blocks of a device are emulated.
//!
//! # Threads
//! [`Runtime::start`](runtime::Runtime::start) starts one worker, a thread, for each processor. A task stays on
//! its worker, so its future need not be `Send`; hence functions that send work to a worker take a closure that
//! makes the future: `runtime.block_on(async move || …)`. A future or a task must not block its worker
//! ([`runtime::offload`] runs code that blocks). Functions whose documentation says "on a worker" panic on
//! other threads. Servers, jobs, progress and controls are shared by all threads.
//!
//! A panic in a task ends this task only. A program that only serves or copies calls
//! [`runtime::abort_on_panic`], because data that requests share may be half changed.
//!
//! # Cancellation
//! A request that has started is completed: dropping its future neither cancels it nor loses a write. For an
//! orderly end there are methods: [`copy::CopyControl::cancel`], [`jobs::Job::cancel`],
//! [`jobs::Jobs::end_service`] and [`server::Server::stop`] submit nothing more, and wait for what is in flight.
//! A cancelled copy or job ends with an error. [`copy::CopyControl::target_state`] has the state of its target.
//! Dropping the runtime waits for file operations in flight, and drops all tasks.
//!
//! # Errors
//! Errors are data, and their text is one line for users: [`device::Error`] has a kind that says what the caller
//! can do, the device and the request; [`copy::TransferError`] has a kind, the step and the side of a copy, and a
//! remedy; [`jobs::JobError`] has a kind and a remedy. A flush that has failed fails again until the storage is
//! opened again, because the system may have lost the data that it was to save.
//!
//! # Features
//! - `formats`, on by default: images in a format of their own, such as `qcow2:` and `vmdk:`.
//! - `luks`: the layer `luks`, for encrypted disks.
//! - `remote`: files of web servers and objects of stores, such as `https:` and `s3:`.
//! - `restic`: `restic:`, files in backups of restic.
//! - `vddk`: `vddk:`, disks of VMware through its library, which is loaded at run time.

#![deny(missing_docs)]

#[doc(inline)]
pub use blockhaul_registry::device_registry;

/// Devices: the trait, requests and replies, and opening devices by their descriptions.
///
/// A device is its facts and one method. To implement one, return [`Facts`](device::Facts) that list its
/// abilities, and complete each [`Request`](device::Request) with a [`Reply`](device::Reply) or an
/// [`Error`](device::Error): at once ([`PendingRequest::ready`](device::PendingRequest::ready)), by a task
/// ([`PendingRequest::start`](device::PendingRequest::start)), or from any thread
/// ([`PendingRequest::completer`](device::PendingRequest::completer)).
/// [`Stack::over`](device::Stack::over) checks requests before they reach the device, and emulates abilities that
/// it lacks.
///
/// To use a device, open it by its description with
/// [`Registry::open`](device::Registry::open), and call the methods of [`DeviceExt`](device::DeviceExt) on
/// [`Stack::device`](device::Stack::device).
pub mod device {
    #[doc(inline)]
    pub use blockhaul_block::{
        BASE_ALLOCATION, BlockSizes, Can, ContextSet, Device, DeviceExt, Error, Extent, Extents,
        Facts, FileRange, HOLE, Hints, Kind, LeaseAccess, Op, OpKind, Outcome, PendingRequest,
        Reply, Request, RequestFlags, Result, ZERO,
    };
    #[doc(inline)]
    pub use blockhaul_catalog::{
        ConnectionSettings, DeviceSpec, DirectMode, Intent, Registry, Stack,
    };
    #[doc(inline)]
    pub use blockhaul_io::{Buf, Completer, Data, Reservation};
}

/// NBD servers.
///
/// A [`Server`](server::Server) serves [`Exports`](server::Exports): one device
/// ([`Stack::shared`](device::Stack::shared)), several named ones ([`NamedStorages`](server::NamedStorages)), or a
/// table of exports with jobs ([`ExportTable`](jobs::ExportTable)). It listens on any number of
/// [listeners](runtime::Listener), serves clients on all workers, and limits the memory of each client.
pub mod server {
    #[doc(inline)]
    pub use blockhaul_catalog::{Exports, NamedStorage, NamedStorages, SharedDevice};
    #[doc(inline)]
    pub use blockhaul_server::{
        ConnectedClient, DisconnectResult, Limits, Offers, Server, ServerConfig, ServerTotals,
        TlsPolicy,
    };
    #[doc(inline)]
    pub use blockhaul_tls::{TlsAcceptor, TlsCredentials};
}

/// Copies of one disk to another.
///
/// A [`CopyRequest`](copy::CopyRequest) is plain data: two sides and
/// [options](copy::TransferOptions). [`CopyRequest::open`](copy::CopyRequest::open) opens both sides and refuses
/// what does not fit; the target is unchanged until [`OpenCopy::run`](copy::OpenCopy::run).
/// [`CopyControl`](copy::CopyControl) pauses, limits and cancels the copy, and has its
/// [progress](copy::CopyProgress).
pub mod copy {
    #[doc(inline)]
    pub use blockhaul_engine::{
        CopyProgress, CopySummary, DigestAlgorithm, MultiConn, ProgressSnapshot, RateLimit,
        RateSchedule, Side,
    };
    #[doc(inline)]
    pub use blockhaul_transfer::{
        CopyControl, CopyEnd, CopyReport, CopyRequest, Endpoint, OpenCopy, OptionConflict,
        TargetState, TransferError, TransferErrorKind, TransferOptions, TransferStep,
    };
}

/// Comparisons of two devices.
///
/// [`compare`](compare::compare()) reads two open devices over several connections, leaves out what both report
/// as zero, and returns the offset of the first difference.
pub mod compare {
    #[doc(inline)]
    pub use blockhaul_engine::{ComparisonResult, CopyError, EngineOptions, compare};
}

/// Backup jobs of disks that clients use.
///
/// An [`ExportTable`](jobs::ExportTable) opens devices, and serves them under names.
/// [`Jobs::backup`](jobs::Jobs::backup) begins a point in time of an export and copies it, while clients go on
/// writing: old contents are saved before they are overwritten. A dirty bitmap that begins with a backup
/// ([`SnapshotConfig::with_new_bitmap`](jobs::SnapshotConfig::with_new_bitmap)) marks what clients write from then
/// on, and the next backup copies only that
/// ([`SnapshotConfig::from_bitmap`](jobs::SnapshotConfig::from_bitmap)). Bitmaps outlive the server if
/// [`ExportTableConfig::bitmap_files`](jobs::ExportTableConfig::bitmap_files) is set.
///
/// End a server with jobs by [`Jobs::end_service`](jobs::Jobs::end_service), which cancels jobs, stops the server,
/// and keeps bitmaps.
pub mod jobs {
    #[doc(inline)]
    pub use blockhaul_jobs::{
        BackupConfig, BackupDisk, BackupSource, BitmapFiles, ErrorPolicy, ExportConfig,
        ExportTable, ExportTableConfig, Job, JobError, JobSettings, JobStatus, JobTarget, Jobs,
        NewBitmap, OpenExport, SnapshotConfig,
    };
    #[doc(inline)]
    pub use blockhaul_snapshot::{OnFailure, PointOptions, ViewTrim};
}

/// Workers, tasks, timers, listeners and memory.
///
/// Everything of this crate that waits runs on the workers of a [`Runtime`](runtime::Runtime). A
/// [`Pool`](runtime::Pool) bounds the memory of requests.
pub mod runtime {
    #[doc(inline)]
    pub use blockhaul_io::{
        IoEngine, Listener, LostCompletion, Pool, Runtime, RuntimeConfig, Task, Ticket,
        TimeoutError, WorkerHandle, abort_on_panic, elapsed, now, offload, sleep, spawn, timeout,
    };
}
