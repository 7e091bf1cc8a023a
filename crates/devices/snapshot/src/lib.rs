//! A point in time of a disk that stays in use: the old contents of what is about to be overwritten
//! are saved first (copy-before-write), and a read-only view shows the disk as it was.
//!
//! - `point`: what of the point in time is where, and how it is saved.
//! - `live`: the layer that all who write to the disk must use from that moment on.
//! - `view`: the disk as it was.
//! - `bitmap`: which blocks were written since a moment.
//! - `changes`: the same for a copy that follows the disk.
//!
//! Reads of the live disk, and writes to a block that is saved already, are passed on unchanged. The
//! first write to a block waits until its old contents are saved. A reader of the view never delays
//! a writer: it reads the live disk without a lock, and uses what was saved instead if a block was
//! overwritten meanwhile.

mod bitmap;
mod changes;
mod live;
mod point;
mod remaining;
mod view;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use blockhaul_block::{Device, Error, Kind, Result};
use blockhaul_catalog::Layer;

pub use crate::bitmap::{
    BITMAPS_MAX, DIRTY, DirtyBitmap, GRANULARITY_MAX, GRANULARITY_MIN, tracking,
};
pub use crate::changes::{ChangeTracker, CopyLock};
use crate::live::LiveLayer;
use crate::point::PointState;
pub use crate::remaining::PersistentDirtyMap;
use crate::view::SnapshotView;

/// Smallest block in bytes.
pub const BLOCK_MIN: u64 = 4096;
/// Largest block in bytes.
pub const BLOCK_MAX: u64 = 16 << 20;

/// How a point in time is kept.
#[derive(Debug, Clone)]
pub struct PointOptions {
    /// Bytes that are saved at a time: a power of two from [`BLOCK_MIN`] to [`BLOCK_MAX`].
    pub block: u64,
    /// Directory for the file with the saved contents, which has no name; none: that of TMPDIR,
    /// else /var/tmp.
    pub directory: Option<PathBuf>,
    /// Bytes that may be saved at a time.
    pub max: u64,
    /// Time that a write may wait until the old contents are saved; zero: no limit.
    pub guest_timeout: Duration,
    /// What happens if they cannot be saved, or not in time.
    pub on_failure: OnFailure,
}

impl Default for PointOptions {
    fn default() -> PointOptions {
        PointOptions {
            block: 64 << 10,
            directory: None,
            max: u64::MAX,
            guest_timeout: Duration::from_millis(200),
            on_failure: OnFailure::BreakSnapshot,
        }
    }
}

/// What fails if old contents cannot be saved.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnFailure {
    /// The point in time: its view fails from then on, and writes to the disk are not delayed.
    BreakSnapshot,
    /// The write to the disk. The point in time stays.
    FailWrite,
}

/// Whether readers of a view can release parts of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ViewTrim {
    /// The view is read-only.
    Refused,
    /// Trim frees what was saved of a range that the reader does not need any more, and later
    /// contents of it are not saved; to read it is an error then. The view says that it can be
    /// written, because only such devices trim, but refuses writes.
    Releases,
}

/// What a point in time has cost so far.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SnapshotStats {
    /// Bytes that were saved.
    pub saved: u64,
    /// Bytes that are kept now.
    pub kept: u64,
    /// Number of writes that waited.
    pub waits: u64,
    /// The longest of these waits.
    pub longest_wait: Duration,
    /// Why the point in time is lost, if it is.
    pub broken: Option<String>,
}

/// A point in time. It begins when the [`layer`](Snapshot::layer) is put over a disk with no write
/// in flight.
#[derive(Clone)]
pub struct Snapshot(Arc<PointState>);

impl Snapshot {
    /// For a disk of `size` bytes; creates the file for saved contents.
    ///
    /// # Errors
    /// [`Kind::Usage`] if an option is out of range; a file system error.
    pub fn new(size: u64, options: &PointOptions) -> Result<Snapshot> {
        let block = options.block;
        if !block.is_power_of_two() || !(BLOCK_MIN..=BLOCK_MAX).contains(&block) {
            let text = "the block size of a snapshot must be a power of two from 4k to 16M";
            return Err(Error::new(Kind::Usage, text));
        }
        Ok(Snapshot(Arc::new(PointState::new(size, options)?)))
    }

    /// The layer that saves old contents before they are overwritten. All handles that write to the
    /// disk must be under it.
    pub fn layer(&self) -> Arc<dyn Layer> {
        Arc::new(LiveLayer(self.0.clone()))
    }

    /// The disk as it was. None before the layer was put over a disk. `bitmaps`, of the same disk,
    /// are shown as metadata contexts.
    pub fn view(&self, bitmaps: Vec<Arc<DirtyBitmap>>, trim: ViewTrim) -> Option<Arc<dyn Device>> {
        SnapshotView::of(&self.0, bitmaps, trim).map(|view| Arc::new(view) as Arc<dyn Device>)
    }

    /// Whether both are the same point in time.
    pub fn is_same(&self, other: &Snapshot) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// What it has cost so far.
    pub fn stats(&self) -> SnapshotStats {
        self.0.stats()
    }

    /// Whether it is lost, or has ended: its view fails from then on.
    pub fn is_lost(&self) -> bool {
        self.0.is_broken()
    }

    /// What is not as it was any more, in whole blocks: offset and length in bytes, in order.
    pub fn changed(&self) -> Vec<(u64, u64)> {
        self.0.changed()
    }

    /// Ends it: nothing is saved any more, and the view fails.
    pub fn end(&self) {
        self.0.break_off(Error::new(Kind::ShuttingDown, "the snapshot has ended"));
    }
}
