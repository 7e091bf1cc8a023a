//! Many connections that say nothing, to see what each costs a server.

use std::time::Duration;

use blockhaul_catalog::DeviceSpec;
use blockhaul_io::{IoEngine, Runtime, RuntimeConfig};

use blockhaul_measure::{MeasureError, Result};

/// Opens connections to a server and keeps them open for a while once they are all there.
pub fn keep(uri: &str, connections: u32, time: Duration) -> Result<()> {
    let failed =
        |error: &dyn std::fmt::Display| MeasureError::new(format!("cannot connect: {error}"));
    let runtime = Runtime::start(&RuntimeConfig { workers: 1, engine: IoEngine::Auto })
        .map_err(|error| failed(&error))?;
    let spec =
        DeviceSpec::parse(uri.as_ref()).map_err(|error| MeasureError::usage(error.to_string()))?;
    let open = runtime.block_on(move || async move {
        let registry = blockhaul_catalog::Registry {
            backends: blockhaul_client::all(blockhaul_client::ConnectOptions::default()),
            path: "file",
            command: "command",
            ..blockhaul_catalog::Registry::default()
        };
        let mut open = Vec::new();
        for _ in 0..connections {
            open.push(registry.open(&spec, Vec::new(), blockhaul_catalog::Intent::READ).await?);
        }
        blockhaul_io::sleep(time).await;
        Ok::<_, blockhaul_block::Error>(open)
    });
    open.map(drop).map_err(|error| failed(&error))
}
