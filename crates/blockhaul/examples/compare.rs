//! `compare DEVICE DEVICE`: whether two devices have the same contents.

use std::error::Error;
use std::sync::Arc;

use blockhaul::compare::{ComparisonResult, EngineOptions, compare};
use blockhaul::device::{DeviceSpec, Intent};
use blockhaul::runtime::{self, Pool, Runtime};

fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [one, other] = &args[..] else { return Err("usage: compare DEVICE DEVICE".into()) };
    let (one, other): (DeviceSpec, DeviceSpec) = (one.parse()?, other.parse()?);
    let runtime = Runtime::start(&runtime::RuntimeConfig::default())?;
    let found = runtime.block_on(async move || {
        let registry = blockhaul::device_registry();
        let one = registry.open(&one, Vec::new(), Intent::READ).await?;
        let other = registry.open(&other, Vec::new(), Intent::READ).await?;
        let options = EngineOptions::default();
        let pool = Pool::new(options.memory());
        compare(&one, &other, &options, &pool, &Arc::default()).await
    })?;
    match found {
        ComparisonResult { differs_at: Some(at), .. } => println!("different from offset {at} on"),
        // The longer device has only zeroes behind the end of the shorter one.
        ComparisonResult { sizes: (one, other), .. } => {
            println!("identical: {one} and {other} bytes")
        }
    }
    Ok(())
}
