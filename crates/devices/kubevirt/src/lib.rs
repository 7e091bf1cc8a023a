//! Disks of virtual machines that KubeVirt exports for backups in pull mode (its enhancement 25), read-only.
//!
//! ```text
//! GET URL/map?offset=N&page_size=N    what the disk has, in pages: the size of the disk is where it ends
//! GET URL/data?offset=N&length=N      bytes
//! x-kubevirt-export-token: TOKEN      in each request
//! ```
//!
//! - `backend`: the kind of storage `kubevirt:URL`. `map`: the pages of the map as runs.
//! - `export`: requests to the server, a few at a time. `device`: the device.
//!
//! In an incremental backup the map says which parts have changed: [`DIRTY`] is the context for that.
#![cfg_attr(not(test), warn(clippy::disallowed_methods))]
#![cfg_attr(not(test), warn(clippy::missing_errors_doc))]
#![cfg_attr(not(test), warn(clippy::cast_possible_truncation, clippy::cast_sign_loss))]
#![cfg_attr(not(test), warn(clippy::cast_possible_wrap, clippy::cast_lossless))]

mod backend;
mod device;
mod export;
mod map;

use std::sync::Arc;
use std::time::Duration;

pub use backend::KubeVirt;

/// The context of an incremental backup: state 1 is what has changed since its checkpoint. A full backup does
/// not have it.
pub const DIRTY: &str = "kubevirt:dirty";

/// Time limits of connections.
#[derive(Debug, Clone, Copy)]
pub struct KubeVirtOptions {
    /// For dialling and the handshake of TLS; zero: none.
    pub connect_timeout: Duration,
    /// For an answer to begin, and for each 256 KiB of it; zero: none.
    pub timeout: Duration,
}

/// The kinds of storage of this crate.
pub fn all(options: KubeVirtOptions) -> Vec<Arc<dyn blockhaul_catalog::Backend>> {
    vec![Arc::new(KubeVirt::new(options))]
}
