//! What users type after a scheme, right and wrong.

use std::ffi::OsStr;

use blockhaul_block::{Can, DeviceExt, Kind};
use blockhaul_catalog::{DeviceSpec, Intent, Registry, Stack};
use blockhaul_io::{Runtime, RuntimeConfig};

pub fn open(spec: impl AsRef<OsStr>, intent: Intent) -> blockhaul_block::Result<Stack> {
    let spec = DeviceSpec::parse(spec.as_ref())?;
    let runtime =
        Runtime::start(&RuntimeConfig { workers: 1, ..RuntimeConfig::default() }).unwrap();
    runtime.block_on(move || async move {
        let registry = Registry {
            backends: crate::backends(),
            path: blockhaul_backends::PATH_SCHEME,
            ..Registry::default()
        };
        registry.open(&spec, Vec::new(), intent).await
    })
}

#[test]
fn sizes_are_those_that_were_typed() {
    let cases = [
        ("memory:1M", Intent::WRITE, 1 << 20),
        ("memory:0", Intent::WRITE, 0),
        ("memory:", Intent::target(77), 77),
        ("memory:1M", Intent::target(77), 1 << 20),
        ("null:", Intent::WRITE, 0),
        ("null:", Intent::target(1 << 40), 1 << 40),
        ("null:3s", Intent::READ, 1536),
        ("zero:1GiB", Intent::READ, 1 << 30),
        ("pattern:7", Intent::WRITE, 7),
        ("sample:9223372036854775807?data=0.5&seed=9", Intent::READ, i64::MAX as u64),
        ("data:1 2 3", Intent::READ, 3),
        ("data:1 2 3?size=1k", Intent::READ, 1024),
    ];
    for (spec, intent, size) in cases {
        let stack = open(spec, intent).unwrap();
        assert_eq!(stack.device().facts().size, size, "{spec}");
        assert_eq!(&*stack.device().facts().name, spec.split('?').next().unwrap());
    }
}

#[test]
fn computed_devices_are_read_only_and_no_copy_targets() {
    for spec in ["zero:1M", "pattern:1M", "sample:1M"] {
        let can = open(spec, Intent::WRITE).unwrap().device().facts().can;
        assert!(!can.intersects(Can::CHANGES), "{spec}");
        let error = open(spec, Intent::target(1 << 20)).err().unwrap();
        assert_eq!(error.kind(), Kind::ReadOnly);
        assert!(error.to_string().contains("copy to a file"), "{error}");
    }
}

#[test]
fn mistakes_are_told() {
    let cases = [
        ("memory:", "memory:SIZE"),
        ("memory:1X", "memory:1X: \"1X\" is not a size"),
        ("memory:8E", "2^63 - 1"),
        ("zero:", "zero:1G"),
        ("pattern:-1", "not a size"),
        ("sample:", "sample:SIZE"),
        ("sample:1M?data=200%", "0% to 100%"),
        ("sample:1M?size=3", "known are data, seed"),
        ("null:x", "not a size"),
        ("data:1 zebra", "data: at character 3"),
        ("file:x?direct=maybe", "not on or off"),
        ("memory:1M?direct=on", "takes none"),
    ];
    for (spec, part) in cases {
        let error = open(spec, Intent::WRITE).err().unwrap();
        assert_eq!(error.kind(), Kind::Usage, "{spec}");
        assert!(error.to_string().contains(part), "{spec}: {error}");
    }
}

#[test]
fn long_names_are_cut() {
    let spec = "data:1111111111 1111111111 1111111111 1111111111 1111111111 1111111111 1111111111 \
                1111111111 1111111111 1111111111";
    let error = open(spec, Intent::READ).err().unwrap();
    assert!(error.to_string().contains("not a byte"));
    let spec = "data:1 # é a comment that goes on and on, far beyond what a message about a device \
                should begin with, in every line";
    let name = open(spec, Intent::READ).unwrap().device().facts().name.clone();
    assert_eq!((name.chars().count(), name.ends_with("...")), (103, true));
}

#[test]
fn literal_data_can_be_overwritten() {
    let runtime =
        Runtime::start(&RuntimeConfig { workers: 1, ..RuntimeConfig::default() }).unwrap();
    let stack = open("data:\"hello\" @510 0x55 0xaa", Intent::WRITE).unwrap();
    runtime.block_on(move || async move {
        let device = stack.device();
        assert!(!device.facts().zeroed);
        assert_eq!(device.read(0, 5).await.unwrap().bytes(), b"hello");
        assert_eq!(device.read(510, 2).await.unwrap().bytes(), [0x55, 0xaa]);
        device.write(0, blockhaul_io::Data::copy_of(b"J")).await.unwrap();
        assert_eq!(device.read(0, 5).await.unwrap().bytes(), b"Jello");
    });
}
