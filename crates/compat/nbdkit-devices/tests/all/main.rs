//! Devices with nbdkit's names, compared with its plugins.
#![allow(clippy::unwrap_used, reason = "a test that fails")]

mod clients;
mod data_peer;
mod partitioning;
mod sparse_random;

use std::sync::Arc;

use blockhaul_catalog::Backend;

/// Every storage.
fn backends() -> Vec<Arc<dyn Backend>> {
    let mut backends = blockhaul_backends::all();
    backends.extend(blockhaul_nbdkit_devices::devices::all());
    backends
}
