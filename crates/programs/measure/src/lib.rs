//! Measurements of one device and of one server: `blockhaul bench device` and `blockhaul bench load`.
//!
//! - [`DeviceArgs`]: the throughput and latency of a device, and settings for copies.
//! - [`LoadArgs`]: many requests to a server, their rate and latency.
//! - [`number`], [`shell_line`]: text of results; [`Random`]: the numbers of a seed.

#![forbid(unsafe_code)]

mod device;
mod error;
mod load;
pub mod manual;
mod random;
mod text;

use std::ffi::OsStr;

use blockhaul_catalog::{Registry, Spec};

pub use device::DeviceArgs;
pub use error::{Error, Result};
pub use load::LoadArgs;
pub use random::Random;
pub use text::{number, shell_line};

/// The devices of a program.
pub struct Devices<'a> {
    /// All kinds of devices.
    pub registry: Registry,
    /// A word of the command line as a device.
    pub spec: &'a dyn Fn(&OsStr) -> blockhaul_block::Result<Spec>,
}
