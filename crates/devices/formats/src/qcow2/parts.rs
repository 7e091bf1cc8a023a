//! What the requests of a handle work with.

use std::sync::Arc;

use blockhaul_block::{ContextSet, Device, Error, Kind, Result};
use blockhaul_io::{Pool, WorkerHandle};

use super::image::ImageMetadata;
use super::write::ImageWriter;
use crate::extents::base_of;

/// The context of QEMU that counts the images between the top and the one that has the bytes.
// nbd: meta.namespace
pub(super) const ALLOCATION_DEPTH: &str = "qemu:allocation-depth";
/// Index of the first bitmap among the contexts.
pub(super) const FIRST_BITMAP: usize = 2;

/// What requests work with.
pub(super) struct ImageParts {
    pub(super) image: Arc<ImageMetadata>,
    /// The device with the image file.
    pub(super) file: Arc<dyn Device>,
    /// The device with the guest's data: the image file, or the external data file.
    pub(super) data: Arc<dyn Device>,
    pub(super) is_external: bool,
    pub(super) backing: Option<BackingImage>,
    /// Memory for pieces of requests that are in several places.
    pub(super) pieces: Pool,
    /// Memory for compressed data.
    pub(super) packed: Pool,
    /// The worker on which the handle was made.
    pub(super) worker: WorkerHandle,
}

impl ImageParts {
    /// Length in bytes of the file with the guest's data.
    pub(super) fn data_len(&self) -> u64 {
        self.image.layout_now().data_len()
    }

    /// The state for writing.
    ///
    /// # Errors
    /// If the image is open for reading only.
    pub(super) fn writer(&self) -> Result<&ImageWriter> {
        let none = || Error::new(Kind::ReadOnly, "the image is open for reading only");
        self.image.writer.as_ref().ok_or_else(none)
    }
}

/// What is under an image.
pub(super) struct BackingImage {
    pub(super) device: Arc<dyn Device>,
    /// Its size in bytes.
    pub(super) size: u64,
    /// The context that counts images, if it is one.
    pub(super) depth: Option<ContextSet>,
    pub(super) base: ContextSet,
    /// Its bitmaps that the image above shows.
    pub(super) bitmaps: Vec<ContextSet>,
}

impl BackingImage {
    pub(super) fn new(device: Arc<dyn Device>, is_image: bool) -> BackingImage {
        let facts = device.facts();
        let depth = facts.context(ALLOCATION_DEPTH).filter(|_| is_image);
        let base = base_of(&facts);
        BackingImage { size: facts.size, depth, base, device, bitmaps: Vec::new() }
    }
}
