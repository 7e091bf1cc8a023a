//! An open image: what a format found, and the tables in memory.

use std::sync::Arc;

use super::map::{BlockMap, BlockUnpacker};
use super::pages::TablePages;
use crate::block_cache::BlockCache;

/// An open image, which all handles share.
pub(crate) struct MappedImage {
    /// The scheme.
    pub(crate) format: &'static str,
    /// Size of the disk in bytes.
    pub(crate) size: u64,
    /// Granularity of the map in bytes, a power of two.
    pub(crate) unit: u64,
    /// Logical sector size in bytes, if the image tells it.
    pub(super) sector: Option<u32>,
    /// Length in bytes of each file.
    pub(crate) lens: Vec<u64>,
    pub(crate) map: Box<dyn BlockMap>,
    /// Present if there are compressed blocks.
    pub(crate) unpack: Option<Arc<dyn BlockUnpacker>>,
    pub(super) unpacked: BlockCache,
    pub(super) pages: TablePages,
}

/// What a format says about an image.
pub(crate) struct MappedFormat {
    pub(crate) size: u64,
    pub(crate) unit: u64,
    /// Logical sector size of the disk in bytes, a power of two from 512 to 4096, if the image tells it.
    pub(crate) sector: Option<u32>,
    pub(crate) map: Box<dyn BlockMap>,
    pub(crate) unpack: Option<Arc<dyn BlockUnpacker>>,
}

impl MappedImage {
    pub(super) fn new(
        format: &'static str,
        found: MappedFormat,
        lens: Vec<u64>,
        memory: u64,
    ) -> MappedImage {
        let MappedFormat { size, unit, sector, map, unpack } = found;
        let pages = TablePages::new(format, lens.clone(), memory);
        let unpacked = BlockCache::new(unit);
        MappedImage { format, size, unit, sector, lens, map, unpack, unpacked, pages }
    }
}
