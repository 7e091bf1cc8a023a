//! Serves a disk in memory, and copies a file to it.

use std::error::Error;
use std::time::Duration;

use blockhaul::copy::{CopyRequest, Endpoint};
use blockhaul::device::{Intent, Spec};
use blockhaul::runtime::{Config, Listener, Pool, Runtime, spawn};
use blockhaul::server::{self, Server};

fn main() -> Result<(), Box<dyn Error + Send + Sync>> {
    let folder = std::env::temp_dir().join(format!("outside-{}", std::process::id()));
    std::fs::create_dir(&folder)?;
    let (file, socket) = (folder.join("file"), folder.join("socket"));
    std::fs::write(&file, vec![1; 1 << 20])?;
    let listener = Listener::bind_unix(&socket)?;
    let uri: Spec = format!("nbd+unix:///?socket={}", socket.display()).parse()?;
    let runtime = Runtime::start(&Config::default())?;
    let copied = runtime.block_on(async move || {
        let registry = blockhaul::device_registry();
        let disk = registry.open(&"memory:1M".parse()?, Vec::new(), Intent::WRITE).await?;
        let server = Server::new(server::Config::new(disk.shared("")));
        drop(spawn(server.clone().listen(listener)));
        let client = registry.open(&uri, Vec::new(), Intent::WRITE).await?;
        let source = Endpoint::Device(Spec::Path(file));
        let mut request = CopyRequest::new(source, Endpoint::Open(uri, client));
        request.options.verify = true;
        let copy = request.open(&registry).await?;
        let pool = Pool::new(copy.memory());
        let report = copy.run(pool).await?;
        server.stop(Duration::from_secs(1)).await;
        Ok::<_, Box<dyn Error + Send + Sync>>(report.verified)
    })?;
    println!("copied {copied} bytes");
    Ok(std::fs::remove_dir_all(folder)?)
}
