//! A server of our own on a Unix socket, for tests of the client.
#![allow(dead_code, clippy::unwrap_used, reason = "each test uses a part")]

use std::ffi::OsStr;
use std::sync::Arc;
use std::time::Duration;

use block::{Device, Intent, Registry, Spec, Stack};
use io::Listener;
use server::{Config, Export, Limits, Offers, Server};
use testkit::tools::Scratch;

/// A server that stops when this is dropped, on a worker.
pub struct Serving {
    pub server: Arc<Server>,
    scratch: Scratch,
}

/// Serves a device from this worker on, with nothing supplied that it lacks: the client side must.
pub fn serve(device: Arc<dyn Device>, offers: Offers, limits: Limits, pool: u64) -> Serving {
    let scratch = Scratch::new().unwrap();
    let device = block::fence(device);
    let export = Export { name: String::new(), description: String::new(), device };
    let pool = io::Pool::new(pool);
    let server = Server::new(Config { exports: vec![export], limits, offers, pool });
    let listener = Listener::bind_unix(&scratch.socket("server")).unwrap();
    drop(io::spawn(server.clone().listen(listener)));
    Serving { server, scratch }
}

impl Serving {
    /// Opens the default export by its URI, as programs do.
    pub async fn open(&self, options: client::Options) -> block::Result<Stack> {
        open(&format!("nbd+unix:///?socket={}", self.scratch.socket("server").display()), options)
            .await
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        let server = self.server.clone();
        drop(io::spawn(async move { server.stop(Duration::from_secs(1)).await }));
    }
}

/// Opens a URI.
pub async fn open(uri: &str, options: client::Options) -> block::Result<Stack> {
    let registry = Registry {
        backends: client::all(options),
        path: backends::PATH_SCHEME,
        ..Registry::default()
    };
    registry.open(&Spec::parse(OsStr::new(uri))?, Vec::new(), Intent::WRITE).await
}

/// Opens a device that is no connection.
pub async fn open_local(spec: &str) -> block::Result<Arc<dyn Device>> {
    let registry =
        Registry { backends: backends::all(), path: backends::PATH_SCHEME, ..Registry::default() };
    let stack = registry.open(&Spec::parse(OsStr::new(spec))?, Vec::new(), Intent::WRITE).await?;
    Ok(stack.device().clone())
}
