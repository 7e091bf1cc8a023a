//! Disks of HTTP servers, with the faults of servers in the wild.
#![allow(clippy::unwrap_used, reason = "a test that fails")]
#![allow(missing_docs)]

mod chunks;
mod dav;
mod dav_server;
mod http_server;
mod oci;
mod page_blobs;
mod random;
mod reads;
mod registry_server;
mod server;
mod streams;
mod tls;

use std::time::Duration;

use blockhaul_block::{Reply, Request, Result};
use blockhaul_catalog::{DeviceSpec, Intent, Registry, Stack};
use blockhaul_io::Reservation;
use blockhaul_remote::RemoteOptions;

use http_server::HttpRequest;
use server::{Fault, ObjectServer, ServedObject};

pub const SIZE: usize = 300_000;

/// The bytes of the object of this number.
pub fn content(number: u64, size: usize) -> Vec<u8> {
    (0..size as u64).map(|at| (at.wrapping_mul(number * 2 + 1) >> 3) as u8 ^ at as u8).collect()
}

pub fn object() -> ServedObject {
    ServedObject::new(content(1, SIZE))
}

pub async fn open_within(spec: &str, timeout: Duration) -> Result<Stack> {
    let options = RemoteOptions { connect_timeout: Duration::from_secs(10), timeout };
    let registry = Registry { backends: blockhaul_remote::all(options), ..Registry::default() };
    registry.open(&DeviceSpec::parse(spec.as_ref())?, Vec::new(), Intent::READ).await
}

pub async fn open(spec: &str) -> Result<Stack> {
    open_within(spec, Duration::from_secs(10)).await
}

pub async fn read(stack: &Stack, at: u64, len: usize) -> Result<Vec<u8>> {
    let request = Request::read(at, Reservation::unpooled(len));
    match stack.device().submit(request).await? {
        Reply::Data(data) => Ok(data.bytes().to_vec()),
        other => panic!("{other:?}"),
    }
}

pub fn on_a_worker<T: Send + 'static, F: Future<Output = T> + 'static>(
    work: impl FnOnce() -> F + Send + 'static,
) -> T {
    blockhaul_io::Runtime::start(&blockhaul_io::RuntimeConfig::default()).unwrap().block_on(work)
}

/// Whether a request is not the one that finds out the size.
pub fn is_data(request: &HttpRequest) -> bool {
    request.field("range") != Some("bytes=0-0")
}

/// A server whose first requests for data have these faults.
pub fn faulty(object: ServedObject, faults: &[Fault]) -> ObjectServer {
    let faults = std::sync::Mutex::new(faults.to_vec());
    ObjectServer::start(object, move |_, request, _| {
        let mut faults = faults.lock().unwrap();
        if is_data(request) && !faults.is_empty() { faults.remove(0) } else { Fault::None }
    })
}

/// Reads all of the object in a few requests at a time.
pub async fn read_all(stack: &Stack) -> Result<Vec<u8>> {
    let size = stack.device().facts().size;
    let mut pending = Vec::new();
    for at in (0..size).step_by(70_000) {
        let len = 70_000.min(size - at);
        let room = Reservation::unpooled(len as usize);
        pending.push(stack.device().submit(Request::read(at, room)));
    }
    let mut bytes = Vec::new();
    for request in pending {
        match request.await? {
            Reply::Data(data) => bytes.extend_from_slice(data.bytes()),
            other => panic!("{other:?}"),
        }
    }
    Ok(bytes)
}

/// All bytes of the object at this place.
pub fn all_of(url: String) -> Result<Vec<u8>> {
    on_a_worker(move || async move { read_all(&open(&url).await?).await })
}

/// The error of opening or reading.
#[track_caller]
pub fn refused(url: String) -> blockhaul_block::Error {
    let error = all_of(url).unwrap_err();
    let said = error.to_string();
    assert!(!said.contains('\n') && said.len() < 2000, "{said}");
    assert!(error.is_complete(), "no remedy: {said}");
    error
}
