//! The layer keeps the contract of devices.

use std::ffi::OsStr;

use blockhaul_catalog::{DeviceSpec, Intent, Registry, Stack};
use blockhaul_snapshot::{PointOptions, Snapshot};
use blockhaul_testkit::conform::{self, InitialContent};

async fn open() -> blockhaul_block::Result<Stack> {
    let registry = Registry { backends: blockhaul_backends::all(), ..Registry::default() };
    let memory = DeviceSpec::parse(OsStr::new("memory:2M"))?;
    let stack = registry.open(&memory, Vec::new(), Intent::WRITE).await?;
    let options = PointOptions { block: 4096, ..PointOptions::default() };
    let snapshot = Snapshot::new(stack.device().facts().size, &options)?;
    stack.with_layer(snapshot.layer()).await
}

#[test]
fn a_disk_with_a_snapshot_is_a_disk() {
    let options =
        conform::ConformOptions { rounds: 3, steps: 100, ..conform::ConformOptions::default() };
    let report =
        conform::run("snapshot over memory", options.content(InitialContent::Zeroes), open);
    let failures: Vec<_> = report.failures().collect();
    assert!(failures.is_empty(), "{failures:?}");
}
