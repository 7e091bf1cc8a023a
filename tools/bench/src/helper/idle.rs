//! Many connections that say nothing, to see what each costs a server.

use std::time::Duration;

use blockhaul_catalog::Spec;
use blockhaul_io::{Config, Engine, Runtime};

use blockhaul_measure::{Error, Result};

/// Opens connections to a server and keeps them open for a while once they are all there.
pub fn keep(uri: &str, connections: u32, time: Duration) -> Result<()> {
    let failed = |error: &dyn std::fmt::Display| Error::new(format!("cannot connect: {error}"));
    let runtime = Runtime::start(&Config { workers: 1, engine: Engine::Auto })
        .map_err(|error| failed(&error))?;
    let spec = Spec::parse(uri.as_ref()).map_err(|error| Error::usage(error.to_string()))?;
    let open = runtime.block_on(move || async move {
        let registry = blockhaul_catalog::Registry {
            backends: blockhaul_client::all(blockhaul_client::Options::default()),
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
