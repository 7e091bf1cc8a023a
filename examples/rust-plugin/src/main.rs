//! `slow-memory SOCKET DEVICE [LAYER…]`: a separate server with a plugin compiled in.

use std::ffi::OsStr;
use std::path::Path;
use std::process::ExitCode;

use blockhaul_catalog::{DeviceSpec, Intent, Registry};
use blockhaul_io::{Listener, Runtime};
use blockhaul_server::{Server, ServerConfig};

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [socket, device, layers @ ..] = &args[..] else {
        eprintln!("usage: slow-memory SOCKET slow-memory:SIZE[?delay=TIME] [LAYER...]");
        return ExitCode::from(2);
    };
    match serve(socket, device, layers) {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            eprintln!("slow-memory: {why}");
            ExitCode::FAILURE
        }
    }
}

fn serve(socket: &str, device: &str, layers: &[String]) -> Result<(), Box<dyn std::error::Error>> {
    let registry = Registry {
        backends: blockhaul_examples::all(),
        layers: blockhaul_layers::all(),
        ..Registry::default()
    };
    let spec = DeviceSpec::parse(OsStr::new(device))?;
    let layers =
        layers.iter().map(|text| registry.layer(text)).collect::<blockhaul_block::Result<_>>()?;
    let runtime = Runtime::start(&blockhaul_io::RuntimeConfig::default())?;
    let opened = runtime.block_on(async move || registry.open(&spec, layers, Intent::WRITE).await);
    let server = Server::new(ServerConfig::new(opened?.shared("")));
    let path = Path::new(socket).to_path_buf();
    let bound = runtime.block_on(move || async move {
        let listener = Listener::bind_unix(&path)?;
        server.listen(listener).await;
        std::io::Result::Ok(())
    });
    bound.map_err(|error| format!("cannot listen on {socket}: {error}").into())
}
