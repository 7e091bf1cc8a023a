//! Disk images in a format of their own, as devices over any device: `qcow2:DEVICE`,
//! `vhdx:DEVICE` and others, and devices as images: `as-qcow2:DEVICE`.
//!
//! One folder or file per format. What an image says is checked before it is used: offsets, lengths
//! and counts come from whoever could write the image. Formats that are only read are maps from the
//! disk to places in files; `mapped` answers requests for all of them.
#![cfg_attr(not(test), warn(clippy::disallowed_methods))]
#![cfg_attr(not(test), warn(clippy::missing_errors_doc))]
#![cfg_attr(not(test), warn(clippy::cast_possible_truncation, clippy::cast_sign_loss))]
#![cfg_attr(not(test), warn(clippy::cast_possible_wrap, clippy::cast_lossless))]

mod any;
mod assembly;
mod bits;
mod block_cache;
mod block_plan;
mod bytes;
mod crc32c;
mod extents;
mod image_view;
mod inflate;
mod mapped;
mod named;
mod ova;
mod pack;
pub mod qcow2;
pub mod raw;
mod storage;
mod vdi;
mod vhd;
mod vhdx;
mod vmdk;
mod windows;

use std::sync::Arc;

pub use any::{AnyImage, HELD, held};
pub use ova::{OvaBackend, OvaDisks};
pub use qcow2::Qcow2Backend;
pub use qcow2::stream::AsQcow2;
pub use vdi::VdiBackend;
pub use vhd::VhdBackend;
pub use vhdx::VhdxBackend;
pub use vmdk::{AsVmdk, VmdkBackend};

/// Every format of this crate, for a [`blockhaul_catalog::Registry`].
pub fn all() -> Vec<Arc<dyn blockhaul_catalog::Backend>> {
    vec![
        Arc::new(Qcow2Backend),
        Arc::new(AsQcow2),
        Arc::new(VmdkBackend),
        Arc::new(AsVmdk),
        Arc::new(VhdxBackend),
        Arc::new(VhdBackend),
        Arc::new(VdiBackend),
        Arc::new(OvaBackend),
        Arc::new(AnyImage),
    ]
}
