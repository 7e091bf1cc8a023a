//! Tests of image formats, next to QEMU's tools.
#![allow(clippy::unwrap_used, reason = "a test that fails")]

mod amends;
mod any;
mod backing_changes;
mod bitmap_changes;
mod chains;
mod checks;
mod common;
mod compressed;
mod conformance;
mod creates;
mod differencing;
mod equality;
mod esx;
mod hostile;
mod mutations;
mod odd;
mod parts;
mod power;
mod reader_faults;
mod readers;
mod resizes;
mod snapshot_changes;
mod streams;
mod vmdk_streams;
mod writes;
