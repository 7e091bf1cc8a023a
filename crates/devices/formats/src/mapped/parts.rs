//! What the requests of a handle work with.

use std::sync::Arc;

use blockhaul_block::Device;
use blockhaul_io::Pool;

use super::image::MappedImage;

/// What requests work with.
pub(super) struct MappedParts {
    pub(super) image: Arc<MappedImage>,
    pub(super) files: Vec<Arc<dyn Device>>,
    pub(super) backing: Option<Arc<dyn Device>>,
    /// Memory for pieces of requests that are in several places.
    pub(super) pieces: Pool,
    /// Memory for compressed data.
    pub(super) packed: Pool,
}
