//! Opening a device: purpose and result.

use std::path::PathBuf;
use std::pin::Pin;
use std::sync::Arc;

use blockhaul_block::{Device, Result};

/// The purpose of opening a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Intent {
    /// It will be written.
    pub write: bool,
    /// It is the target of a copy of this many bytes: created or enlarged if possible.
    pub target_size: Option<u64>,
    /// The copy overwrites or zeroes all of this target: it need not be emptied first, if freeing
    /// and reallocating its blocks is slower. Without [`Facts::zeroed`] it was not emptied.
    ///
    /// [`Facts::zeroed`]: blockhaul_block::Facts::zeroed
    pub overwrites: bool,
    /// The copy may be shorter, and is written from the front: a target that can grow begins empty
    /// and is as long as what was written. Reads beyond that fail.
    pub grows: bool,
    /// It holds a structure that becomes longer as it is written (an image): a file keeps its
    /// contents, and writes beyond its end make it longer ([`Facts::grows_from`]).
    ///
    /// [`Facts::grows_from`]: blockhaul_block::Facts::grows_from
    pub extends: bool,
    /// It holds a disk image in a format, or is below one: no other device may write to it
    /// ([`crate::Claims`]).
    pub image: bool,
    /// Whether to bypass the page cache, for devices that have one.
    pub direct: DirectMode,
    /// It is the target of a copy: refuse storage that another device of this process uses
    /// ([`crate::Claims`]), and a block device that is in use, for example by a mounted file system
    /// (O_EXCL).
    pub exclusive: bool,
}

/// Whether to bypass the page cache (O_DIRECT).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum DirectMode {
    /// Use the page cache.
    #[default]
    Off,
    /// Bypass it if possible, except for reads of cached data.
    Auto,
    /// Bypass it; an error if that is not possible.
    On,
}

impl Intent {
    /// Read-only.
    pub const READ: Intent = Intent {
        write: false,
        target_size: None,
        overwrites: false,
        grows: false,
        extends: false,
        image: false,
        direct: DirectMode::Off,
        exclusive: false,
    };
    /// Read-only, as a disk image or a part of one.
    pub const READ_IMAGE: Intent = Intent { image: true, ..Intent::READ };
    /// Read-write.
    pub const WRITE: Intent = Intent { write: true, ..Intent::READ };

    /// The target of a copy that keeps the size of the device and the rest of its contents.
    pub const TARGET: Intent = Intent { exclusive: true, ..Intent::WRITE };

    /// The target of a copy of `size` bytes.
    pub fn target(size: u64) -> Intent {
        Intent { target_size: Some(size), ..Intent::TARGET }
    }

    /// The target of a copy of unknown length, at most `most` bytes.
    pub fn growing(most: u64) -> Intent {
        Intent { grows: true, ..Intent::target(most) }
    }

    /// The same, with or without overwriting the whole target.
    #[must_use]
    pub fn overwriting(self, overwrites: bool) -> Intent {
        Intent { overwrites, ..self }
    }

    /// The same for a further handle, or for storage that is opened again: it already exists, and
    /// keeps its contents.
    #[must_use]
    pub fn again(self) -> Intent {
        Intent { target_size: None, overwrites: false, grows: false, ..self }
    }

    /// The same, with this use of the page cache.
    #[must_use]
    pub fn direct(self, direct: DirectMode) -> Intent {
        Intent { direct, ..self }
    }
}

/// Whether a kind of storage makes the target of a copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TargetMaking {
    /// The target must exist, or exists once it is opened.
    Never,
    /// A target that does not exist is made; one that exists must be large enough.
    IfAbsent,
    /// A new target replaces one that exists.
    Always,
    /// Each copy makes a new version of the target, beside earlier ones. A copy of parts keeps the rest of the newest one.
    NewVersion,
}

/// The future of opening a device; runs on a worker.
pub type OpenFuture<T> = Pin<Box<dyn Future<Output = Result<T>>>>;

/// An open device, which can open more handles to the same storage.
pub struct OpenedDevice {
    /// The device.
    pub device: Arc<dyn Device>,
    /// Opens a further handle, for another lane. `None`: all lanes share the device.
    pub more: Option<Arc<dyn HandleOpener>>,
}

impl From<Arc<dyn Device>> for OpenedDevice {
    fn from(device: Arc<dyn Device>) -> OpenedDevice {
        OpenedDevice { device, more: None }
    }
}

/// What an open target still needs before its first request: to be resized or emptied. Until then
/// its contents are unchanged; a file created for the target is removed if this is dropped instead.
#[derive(Default)]
pub struct Preparation(Option<PreparationStep>);

type PreparationStep = Box<dyn FnOnce(Option<RecordFile>) -> OpenFuture<()> + Send>;

/// The file in which a target that exists only as a whole records its progress, so that a later copy continues it.
#[derive(Debug, Clone)]
pub struct RecordFile {
    /// The file: created by the first run, continued by later ones, and removed after success.
    pub path: PathBuf,
    /// Give up what an earlier run has recorded.
    pub restart: bool,
}

impl Preparation {
    /// Runs `step` to prepare the target. Dropping `step` without running it must undo the opening.
    pub fn new(step: impl FnOnce() -> OpenFuture<()> + Send + 'static) -> Preparation {
        Preparation(Some(Box::new(move |_| step())))
    }

    /// Runs `step` to prepare the target, which records its progress in the file that `step` gets. Dropping `step`
    /// without running it must undo the opening.
    pub fn with_record(
        step: impl FnOnce(Option<RecordFile>) -> OpenFuture<()> + Send + 'static,
    ) -> Preparation {
        Preparation(Some(Box::new(step)))
    }

    /// Prepares the target. Call it on a worker.
    ///
    /// # Errors
    /// If the target cannot be resized. Its contents are then unchanged.
    pub async fn run(self) -> Result<()> {
        self.run_with(None).await
    }

    /// Prepares the target, which records its progress in `record` if it exists only as a whole. Call it on a worker.
    ///
    /// # Errors
    /// Those of [`run`](Preparation::run), and if the record is that of another target.
    pub async fn run_with(self, record: Option<RecordFile>) -> Result<()> {
        match self.0 {
            Some(step) => step(record).await,
            None => Ok(()),
        }
    }
}

/// Opens further handles to storage that is already open.
pub trait HandleOpener: Send + Sync {
    /// A further handle; call it on the worker that will use it.
    fn another(&self) -> OpenFuture<Arc<dyn Device>>;
}
