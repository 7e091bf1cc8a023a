//! An open image: what a format found, and the tables in memory.

use std::sync::Arc;

use super::map::{Map, Unpack};
use super::pages::Pages;
use crate::block_cache::BlockCache;

/// An open image, which all handles share.
pub(crate) struct Image {
    /// The scheme.
    pub(crate) format: &'static str,
    /// Size of the disk in bytes.
    pub(crate) size: u64,
    /// Granularity of the map in bytes, a power of two.
    pub(crate) unit: u64,
    /// Length in bytes of each file.
    pub(crate) lens: Vec<u64>,
    pub(crate) map: Box<dyn Map>,
    /// Present if there are compressed blocks.
    pub(crate) unpack: Option<Arc<dyn Unpack>>,
    pub(super) unpacked: BlockCache,
    pub(super) pages: Pages,
}

/// What a format says about an image.
pub(crate) struct Found {
    pub(crate) size: u64,
    pub(crate) unit: u64,
    pub(crate) map: Box<dyn Map>,
    pub(crate) unpack: Option<Arc<dyn Unpack>>,
}

impl Image {
    pub(super) fn new(format: &'static str, found: Found, lens: Vec<u64>, memory: u64) -> Image {
        let Found { size, unit, map, unpack } = found;
        let pages = Pages::new(format, lens.clone(), memory);
        Image { format, size, unit, lens, map, unpack, unpacked: BlockCache::new(unit), pages }
    }
}
