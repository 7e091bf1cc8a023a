//! `blockhaul bench device`: what a source or target is capable of, and the settings to use.
//!
//! - `probe`: the measurements. `schedule`: what of them is tried in the time that there is. `findings`:
//!   what came of them, and what they recommend. `report`: the same as text and JSON.

mod findings;
mod probe;
mod report;
mod schedule;

use std::ffi::OsString;
use std::time::Duration;

use blockhaul_catalog::Intent;
use blockhaul_io::{IoEngine, Runtime, RuntimeConfig};
use clap::Args as ClapArgs;

use crate::error::{MeasureError, Result};
use crate::{DeviceContext, parse_time};

use findings::Findings;

/// Options of `blockhaul bench device`.
#[derive(Debug, ClapArgs)]
pub struct DeviceArgs {
    /// Device to measure (see blockhaul help devices)
    #[arg(value_name = "DEVICE")]
    device: OsString,

    /// Maximum time of all measurements
    ///
    /// Settings for which a slow device would need more time are not measured.
    #[arg(long, value_name = "TIME", default_value = "20s",
          value_parser = |text: &str| parse_time(text, TIME_MIN))]
    time: Duration,

    /// Measure writing as well
    ///
    /// What was read from the first 64 MiB is written back: holes there become data. No other
    /// program may write to the device meanwhile.
    #[arg(long)]
    write: bool,

    /// Maximum connections to try [default: 8]
    ///
    /// The default is 1 if a server behind HTTP or SSH does not report multi-conn.
    #[arg(long, value_name = "N", value_parser = crate::count::<u16>(1, 64))]
    max_connections: Option<u16>,

    /// Maximum requests in flight on a connection to try
    #[arg(long, value_name = "N", default_value = "64",
          value_parser = crate::count::<u32>(1, 1024))]
    max_requests: u32,

    /// Print JSON
    #[arg(long)]
    json: bool,

    /// How to perform I/O: uring, threads or auto
    #[arg(long, value_name = "NAME", default_value = "auto")]
    engine: IoEngine,
}

/// Shortest time that gives each of the points a moment.
const TIME_MIN: &str = "1s";

impl DeviceArgs {
    /// Measures, and returns what is to be printed.
    pub fn run(&self, devices: &DeviceContext<'_>) -> Result<String> {
        let failed = |error: blockhaul_block::Error| MeasureError::new(error.to_string());
        let spec =
            (devices.spec)(&self.device).map_err(|error| MeasureError::usage(error.to_string()))?;
        let intent = if self.write { Intent::WRITE } else { Intent::READ };
        let registry = devices.registry.clone();
        registry.target(&spec, intent).map_err(|error| MeasureError::usage(error.to_string()))?;
        let runtime = Runtime::start(&RuntimeConfig { workers: 0, engine: self.engine }).map_err(
            |error| {
                MeasureError::new(format!("cannot start workers: {}", blockhaul_io::plain(&error)))
            },
        )?;
        let limits = probe::ProbeLimits {
            time: self.time,
            write: self.write,
            connections: self.max_connections.map(usize::from),
            requests: self.max_requests as usize,
        };
        let name = spec.to_string();
        let (found, open) = runtime.block_on(move || async move {
            match registry.open(&spec, Vec::new(), intent).await {
                Ok(stack) => (probe::measure(&stack, &limits).await.map_err(failed), Some(stack)),
                Err(error) => (Err(MeasureError::opening(error.to_string())), None),
            }
        });
        // Not on a worker: the server of `[ CMD ]` is awaited here.
        drop(open);
        let findings = Findings { device: name, ..found? };
        if self.json { report::json(&findings) } else { Ok(report::text(&findings)) }
    }
}

#[cfg(test)]
mod tests {
    use blockhaul_catalog::{DeviceSpec, Registry};
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        args: DeviceArgs,
    }

    fn registry() -> Registry {
        let mut backends = blockhaul_backends::all();
        backends.extend(blockhaul_client::all(blockhaul_client::ConnectOptions::default()));
        Registry {
            backends,
            path: blockhaul_backends::PATH_SCHEME,
            command: "command",
            ..Registry::default()
        }
    }

    fn run(words: &[&str]) -> Result<String> {
        let all = ["device"].iter().chain(words);
        let cli =
            Cli::try_parse_from(all).map_err(|error| MeasureError::usage(error.to_string()))?;
        let devices = DeviceContext { registry: registry(), spec: &|word| DeviceSpec::parse(word) };
        cli.args.run(&devices)
    }

    #[test]
    fn a_file_is_measured_written_back_and_advice_given() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("disk.raw");
        let bytes: Vec<u8> = (0..3_000_017_u32).map(|at| (at % 251) as u8).collect();
        std::fs::write(&path, &bytes).unwrap();
        let name = path.display().to_string();
        let limits = ["--max-connections", "2", "--max-requests", "4", "--write", "--json"];
        // Where it stands still for half of the time, the other half does.
        let words = [name.as_str(), "--time", "6s"];
        let text = run(&[&words[..], &limits].concat()).unwrap();
        let value: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!(value["device"], name.as_str());
        assert_eq!(value["size"], 3_000_017);
        for part in ["reading", "writing"] {
            assert!(value[part].as_array().unwrap().len() >= 6, "{text}");
            assert!(value[part][0]["bytes_per_second"].as_f64().unwrap() > 0.0, "{text}");
        }
        assert!(value["read_latency"]["median_us"].as_f64().unwrap() > 0.0, "{text}");
        assert!(value["flush_latency"]["count"].as_u64().unwrap() > 0, "{text}");
        let advice = value["reading_advice"]["command"].as_str().unwrap();
        assert!(advice.starts_with("blockhaul copy "), "{advice}");
        assert!(!advice.contains("--connections"), "a file has none: {advice}");
        // On a busy machine there may be no time for them.
        let defaults = &value["reading_advice"]["defaults"]["bytes_per_second"];
        assert!(defaults.as_f64().is_none_or(|speed| speed > 0.0), "{text}");
        assert_eq!(std::fs::read(&path).unwrap(), bytes, "what was written back differs");
    }

    #[test]
    fn without_consent_nothing_is_written() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("disk.raw");
        std::fs::write(&path, vec![1; 100_000]).unwrap();
        let before = path.metadata().unwrap().modified().unwrap();
        let name = path.display().to_string();
        let text = run(&[&name, "--time", "1s", "--max-connections", "1"]).unwrap();
        assert!(text.contains("For reading: ") && text.contains("1 thread, "), "{text}");
        assert!(!text.contains("Writing") && text.contains("Reading"), "{text}");
        assert_eq!(path.metadata().unwrap().modified().unwrap(), before);
    }

    #[test]
    fn that_only_zeroes_were_read_is_said() {
        let text = run(&["memory:4M", "--time", "1s"]).unwrap();
        assert!(
            text.contains("reports only zeroes") && text.contains("minimum block 1,"),
            "{text}"
        );
        let text = run(&["pattern:4M", "--time", "1s"]).unwrap();
        assert!(text.contains("4194304 bytes of data"), "{text}");
    }

    #[test]
    fn what_cannot_be_measured_is_an_error() {
        assert!(run(&["/no/such/device"]).is_err());
        assert!(run(&["memory:0"]).unwrap_err().to_string().contains("empty"));
        assert!(run(&["zero:1M", "--write"]).is_err());
        assert!(run(&["zero:1M", "--time", "1ms"]).is_err());
    }
}
