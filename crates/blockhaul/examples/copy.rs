//! `copy SOURCE TARGET [SECONDS]`: a copy that shows its progress, and is cancelled after this time.

use std::error::Error;
use std::time::Duration;

use blockhaul::copy::{CopyRequest, Endpoint};
use blockhaul::runtime::{self, Pool, Runtime};

fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [source, target, seconds @ ..] = &args[..] else {
        return Err("usage: copy SOURCE TARGET [SECONDS]".into());
    };
    let seconds = seconds.first().map_or(Ok(f64::MAX), |text| text.parse())?;
    let mut request =
        CopyRequest::new(Endpoint::Device(source.parse()?), Endpoint::Device(target.parse()?));
    request.options.verify = true;
    let runtime = Runtime::start(&runtime::RuntimeConfig::default())?;
    let report = runtime.block_on(async move || {
        let copy = request.open(&blockhaul::device_registry()).await?;
        let control = copy.control();
        let watching = runtime::spawn(async move {
            let begun = runtime::now();
            loop {
                runtime::sleep(Duration::from_millis(100)).await;
                let now = control.progress().snapshot();
                eprintln!("{} of {} bytes", now.done(), now.total);
                if runtime::elapsed(begun).as_secs_f64() >= seconds {
                    control.cancel();
                }
            }
        });
        let pool = Pool::new(copy.memory());
        let report = copy.run(pool).await;
        watching.cancel();
        report
    })?;
    println!("{}", report.text);
    Ok(())
}
