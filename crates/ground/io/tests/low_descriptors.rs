//! Descriptors with small numbers are left to devices and plugins. Apart from the other tests, which open
//! files, too.
#![allow(clippy::unwrap_used)]

use std::fs::File;
use std::os::fd::AsRawFd as _;

use blockhaul_io::{Runtime, RuntimeConfig};

#[test]
fn workers_leave_small_numbers_free() {
    let before = File::open("/dev/null").unwrap().as_raw_fd();
    let runtime =
        Runtime::start(&RuntimeConfig { workers: 16, ..RuntimeConfig::default() }).unwrap();
    let opened = runtime.block_on(|| async { File::open("/dev/null").unwrap().as_raw_fd() });
    assert_eq!(opened, before);
}
