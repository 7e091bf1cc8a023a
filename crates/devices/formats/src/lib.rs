//! Disk images in a format of their own, as devices over any device: `qcow2:DEVICE`, and devices
//! as images: `as-qcow2:DEVICE`.
//!
//! One folder per format. What an image says is checked before it is used: offsets, lengths and
//! counts come from whoever could write the image.
#![cfg_attr(not(test), warn(clippy::disallowed_methods))]
#![cfg_attr(not(test), warn(clippy::cast_possible_truncation, clippy::cast_sign_loss))]
#![cfg_attr(not(test), warn(clippy::cast_possible_wrap, clippy::cast_lossless))]

pub mod qcow2;

use std::sync::Arc;

pub use qcow2::Qcow2;
pub use qcow2::stream::AsQcow2;

/// Every format of this crate, for a [`blockhaul_catalog::Registry`].
pub fn all() -> Vec<Arc<dyn blockhaul_catalog::Backend>> {
    vec![Arc::new(Qcow2), Arc::new(AsQcow2)]
}
