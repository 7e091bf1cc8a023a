//! Measurements of one device and of one server: `blockhaul bench device` and `blockhaul bench load`.
//!
//! - [`DeviceArgs`]: the throughput and latency of a device, and settings for copies.
//! - [`LoadArgs`]: many requests to a server, their rate and latency.
//! - [`number`], [`shell_line`]: text of results; [`RandomGenerator`]: the numbers of a seed.

#![forbid(unsafe_code)]

mod device;
mod error;
mod load;
pub mod manual;
mod random;
mod text;

use std::ffi::OsStr;
use std::time::Duration;

use blockhaul_catalog::{DeviceSpec, Registry, parse_count, parse_duration};

pub use device::DeviceArgs;
pub use error::{MeasureError, Result};
pub use load::LoadArgs;
pub use random::RandomGenerator;
pub use text::{number, shell_line};

/// The devices of a program.
pub struct DeviceContext<'a> {
    /// All kinds of devices.
    pub registry: Registry,
    /// A word of the command line as a device.
    pub spec: &'a dyn Fn(&OsStr) -> blockhaul_block::Result<DeviceSpec>,
}

/// The longest time of a measurement: longer would be a mistake in the unit.
const TIME_MAX: Duration = Duration::from_secs(24 * 3600);

/// Numbers from `least` to `most`; [`u64::MAX`]: without a limit.
fn count<T: TryFrom<u64> + Clone + Send + Sync + 'static>(
    least: u64,
    most: u64,
) -> impl clap::builder::TypedValueParser<Value = T> {
    move |text: &str| parse_count(text, least, most).map_err(|error| error.text())
}

/// The time of a measurement, at least `least` and at most 24 hours.
fn parse_time(text: &str, least: &str) -> std::result::Result<Duration, String> {
    let parse = |text| parse_duration(text).map_err(|error| error.text().to_string());
    let time = parse(text)?;
    if (parse(least)?..=TIME_MAX).contains(&time) {
        Ok(time)
    } else {
        Err(format!("write a time from {least} to 24h"))
    }
}
