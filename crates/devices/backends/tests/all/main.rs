//! Tests of storages.
#![allow(clippy::unwrap_used, reason = "a test that fails")]

mod conformance;
mod descriptions;
mod locks;
mod nested;

use std::sync::Arc;

use blockhaul_catalog::Backend;

/// Every storage.
fn backends() -> Vec<Arc<dyn Backend>> {
    let mut backends = blockhaul_backends::all();
    backends.extend(blockhaul_nbdkit_devices::devices::all());
    backends
}
