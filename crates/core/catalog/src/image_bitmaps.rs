//! Dirty bitmaps that a disk image stores beside the disk, for whoever keeps them right while the disk
//! is written.

use std::sync::{Arc, Mutex, PoisonError};

use crate::opening::OpenFuture;

/// A dirty bitmap that an image stores.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImageBitmap {
    /// The name.
    pub name: String,
    /// Bytes of the disk for each bit: a power of two.
    pub granularity: u64,
    /// Whether writes set its bits.
    pub enabled: bool,
    /// The dirty ranges, as offset and length in bytes, in order.
    pub dirty: Vec<(u64, u64)>,
}

/// The dirty bitmaps of an image.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ImageBitmaps {
    /// The bitmaps that can be used.
    pub consistent: Vec<ImageBitmap>,
    /// Names of bitmaps that may lack writes, and why.
    pub inconsistent: Vec<(String, String)>,
}

/// The bitmaps of an image that is open for writing. Whoever takes them sets their bits, and stores
/// them when nothing writes to the disk any more. Call its functions on a worker.
pub trait BitmapStore: Send + Sync {
    /// Checks whether the image can store one more bitmap.
    ///
    /// # Errors
    /// If the format or its version cannot, or the name or the granularity (bytes for each bit) is not possible.
    fn check(&self, name: &str, granularity: u64) -> OpenFuture<()>;

    /// Reads the bitmaps, and marks those that are consistent as in use, durably: they are
    /// inconsistent until [`BitmapStore::store`] has succeeded.
    ///
    /// # Errors
    /// Those of the device that holds the image, and of damaged tables.
    fn take(&self) -> OpenFuture<ImageBitmaps>;

    /// Stores these bitmaps in place of those of the image, durably. Of the inconsistent ones, those
    /// that are named stay in the image as they are.
    ///
    /// # Errors
    /// Those of the device that holds the image, and of bitmaps that it cannot store.
    fn store(&self, bitmaps: ImageBitmaps) -> OpenFuture<()>;
}

/// The place where the top device of a stack leaves its [`BitmapStore`], if it is an image with one. A
/// device that finds a slot in its registry relies on its user to keep the bitmaps right.
#[derive(Default)]
pub struct BitmapSlot(Mutex<Option<Arc<dyn BitmapStore>>>);

impl BitmapSlot {
    /// Leaves the bitmaps of the device that was opened.
    pub fn put(&self, store: Arc<dyn BitmapStore>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(store);
    }

    /// The bitmaps that the device has left; none afterwards.
    pub fn take(&self) -> Option<Arc<dyn BitmapStore>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}
