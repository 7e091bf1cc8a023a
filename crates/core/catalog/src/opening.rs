//! Opening: what for, and what comes of it.

use std::pin::Pin;
use std::sync::Arc;

use blockhaul_block::{Device, Result};

/// What a device is opened for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Intent {
    /// It will be written.
    pub write: bool,
    /// It is the target of a copy of this many bytes: made, or made larger, where it can be.
    pub target_size: Option<u64>,
    /// All that this target holds will be written over or zeroed: it need not be emptied first, where
    /// giving its blocks back and getting others is slower. Without [`Facts::zeroed`] it was not.
    ///
    /// [`Facts::zeroed`]: blockhaul_block::Facts::zeroed
    pub overwrites: bool,
    /// The copy may be shorter, and is written from the front: what can grow begins empty and is as
    /// long as what was written. Reads behind that are not answered.
    pub grows: bool,
    /// Whether data goes past the page cache, for devices that have one.
    pub direct: Direct,
    /// A block device that something else uses, such as a mounted file system, is refused (O_EXCL).
    pub exclusive: bool,
}

/// Whether data goes past the page cache (O_DIRECT).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Direct {
    /// Through the page cache.
    #[default]
    Off,
    /// Past it where that can be done, but for reads of what is there.
    Auto,
    /// Past it, or the device is not opened.
    On,
}

impl Intent {
    /// To be read.
    pub const READ: Intent = Intent {
        write: false,
        target_size: None,
        overwrites: false,
        grows: false,
        direct: Direct::Off,
        exclusive: false,
    };
    /// To be read and written.
    pub const WRITE: Intent = Intent { write: true, ..Intent::READ };

    /// To be the target of a copy that keeps the size of the device and what else it holds.
    pub const TARGET: Intent = Intent { exclusive: true, ..Intent::WRITE };

    /// To be the target of a copy of `size` bytes.
    pub fn target(size: u64) -> Intent {
        Intent { target_size: Some(size), ..Intent::TARGET }
    }

    /// To be the target of a copy of unknown length, of at most `most` bytes.
    pub fn growing(most: u64) -> Intent {
        Intent { grows: true, ..Intent::target(most) }
    }

    /// The same, of a target that is written over as a whole, or not.
    #[must_use]
    pub fn overwriting(self, overwrites: bool) -> Intent {
        Intent { overwrites, ..self }
    }

    /// The same, with data going past the page cache or not.
    #[must_use]
    pub fn direct(self, direct: Direct) -> Intent {
        Intent { direct, ..self }
    }
}

/// A device that is being opened; runs on a worker.
pub type Opening<T> = Pin<Box<dyn Future<Output = Result<T>>>>;

/// An open device and the way to more handles on the same storage.
pub struct Opened {
    /// The device.
    pub device: Arc<dyn Device>,
    /// Opens a further handle, for another lane. `None`: all lanes share the device.
    pub more: Option<Arc<dyn Another>>,
}

impl From<Arc<dyn Device>> for Opened {
    fn from(device: Arc<dyn Device>) -> Opened {
        Opened { device, more: None }
    }
}

/// What an open target still needs before its first request: to be resized or emptied. Until then its
/// content is as it was; a file that was created for the target is removed if this is dropped instead.
#[derive(Default)]
pub struct Preparation(Option<Box<dyn FnOnce() -> Opening<()> + Send>>);

impl Preparation {
    /// Runs `step` when the target is prepared. `step` owns what undoes the opening when it is dropped.
    pub fn new(step: impl FnOnce() -> Opening<()> + Send + 'static) -> Preparation {
        Preparation(Some(Box::new(step)))
    }

    /// Prepares the target. Call it on a worker.
    ///
    /// # Errors
    /// Where the target cannot be resized. Then it holds what it held before.
    pub async fn run(self) -> Result<()> {
        match self.0 {
            Some(step) => step().await,
            None => Ok(()),
        }
    }
}

/// Opens further handles on storage that is open already.
pub trait Another: Send + Sync {
    /// A further handle; to be called on the worker that will use it.
    fn another(&self) -> Opening<Arc<dyn Device>>;
}
