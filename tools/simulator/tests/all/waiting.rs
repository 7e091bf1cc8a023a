//! A session that waits takes no steps: neither for a request in flight, nor for memory.

use std::time::Duration;

use blockhaul_block::{DeviceExt, Request};
use blockhaul_catalog::{DeviceSpec, Intent, Registry, SharedDevice};
use blockhaul_client::ConnectOptions;
use blockhaul_io::simulation::{self, Faults, SimulationReport, SimulationSettings};
use blockhaul_io::{Data, Listener, Pool};
use blockhaul_server::{Limits, Offers, Server, ServerConfig, TlsPolicy};
use blockhaul_testkit::fault::{FaultDevice, FaultEffect, FaultRule};
use blockhaul_testkit::model::{CompletionOrder, Model, ModelDevice};

/// Time that the device takes for each request.
const SLOW: Duration = Duration::from_secs(30);
/// More steps than handshake, requests and replies take.
const STEPS: u64 = 20_000;

/// Requests of one client to a slow device, with these limits.
fn steps(limits: Limits, pool: u64) -> SimulationReport {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("server");
    let faults = Faults::default();
    let time = Duration::from_secs(86_400);
    let settings = SimulationSettings { seed: 1, faults, keep: None, time, steps: STEPS, log: 0 };
    let (output, report) = simulation::run(&settings, || async move {
        let model = ModelDevice::new(Model::new(8 << 20), CompletionOrder::Immediate);
        let device = FaultDevice::over(model, 1);
        device.add(FaultRule::new(FaultEffect::Delay(SLOW)));
        let exports = SharedDevice::new("", "", blockhaul_block::fence(device));
        let offers = Offers::default();
        let tls = TlsPolicy::Off;
        let pool = Pool::new(pool);
        let server = Server::new(ServerConfig { exports, limits, offers, pool, tls });
        drop(blockhaul_io::spawn(server.listen(Listener::bind_unix(&socket).unwrap())));
        let options = ConnectOptions { timeout: Duration::ZERO, ..ConnectOptions::default() };
        let registry = Registry { backends: blockhaul_client::all(options), ..Registry::default() };
        let uri = format!("nbd+unix:///?socket={}", socket.display());
        let spec = DeviceSpec::parse(uri.as_ref()).unwrap();
        let stack = registry.open(&spec, Vec::new(), Intent::WRITE).await.unwrap();
        let device = stack.device();
        let bytes = vec![7; 1 << 20];
        let writes: Vec<_> =
            (0..6).map(|n| device.submit(Request::write(n << 20, Data::copy_of(&bytes)))).collect();
        for write in writes {
            write.await.unwrap();
        }
        assert_eq!(device.read(5 << 20, 512).await.unwrap().bytes(), &bytes[..512]);
    });
    assert!(output.is_ok(), "{}", output.unwrap_err());
    report
}

#[test]
fn requests_that_wait_for_others_take_no_steps() {
    let report = steps(Limits { requests: 1, ..Limits::default() }, 64 << 20);
    assert!(report.time > SLOW * 6, "they waited: {:?}", report.time);
}

#[test]
fn requests_that_wait_for_memory_take_no_steps() {
    let report = steps(Limits { client_bytes: 2 << 20, ..Limits::default() }, 4 << 20);
    assert!(report.time > SLOW * 3, "they waited: {:?}", report.time);
}
