//! The device that is separate for each client: `info:`.

use std::ffi::OsStr;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use blockhaul_block::{Can, Device, DeviceExt};
use blockhaul_catalog::{DeviceSpec, ExportClient, Exports, Intent, Registry, Visit};
use blockhaul_io::{Runtime, RuntimeConfig};

async fn exports(spec: &str) -> blockhaul_block::Result<Arc<dyn Exports>> {
    let registry = Registry { backends: crate::backends(), ..Registry::default() };
    let spec = DeviceSpec::parse(OsStr::new(spec))?;
    Ok(registry.exports(&spec, &[], Intent::WRITE).await?.expect("a device for each client"))
}

async fn visit(exports: &Arc<dyn Exports>) -> Arc<dyn Visit> {
    exports.admit(ExportClient::default()).await.unwrap()
}

fn run<T: Send + 'static, F: Future<Output = T> + 'static>(
    job: impl FnOnce() -> F + Send + 'static,
) -> T {
    Runtime::start(&RuntimeConfig { workers: 1, ..RuntimeConfig::default() }).unwrap().block_on(job)
}

async fn bytes(device: &Arc<dyn Device>) -> Vec<u8> {
    match device.facts().size as usize {
        0 => Vec::new(),
        size => device.read(0, size).await.unwrap().bytes().to_vec(),
    }
}

/// A time in the format of `info:`.
async fn time(device: &Arc<dyn Device>) -> Duration {
    let told = bytes(device).await;
    assert_eq!(told.len(), 12);
    let seconds = u64::from_be_bytes(told[..8].try_into().unwrap());
    Duration::new(seconds, u32::from_be_bytes(told[8..].try_into().unwrap()) * 1000)
}

#[test]
fn a_client_learns_about_itself() {
    run(|| async {
        let names = exports("info:").await.unwrap();
        for name in ["", "a", "/", "テスト", "\n", &"x".repeat(4096)] {
            let device = visit(&names).await.open(name, false).await.unwrap().unwrap().device;
            assert_eq!(bytes(&device).await, name.as_bytes());
            assert!(!device.facts().can.intersects(Can::CHANGES));
        }
        let names = exports("info:Base64exportname").await.unwrap();
        let device = visit(&names).await.open("aGVsbG8=", false).await.unwrap().unwrap().device;
        assert_eq!(bytes(&device).await, b"hello");
        assert!(visit(&names).await.open("xyz", false).await.is_err());

        let clock = exports("info:time").await.unwrap();
        let clock = visit(&clock).await.open("", false).await.unwrap().unwrap().device;
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap();
        assert!(time(&clock).await.abs_diff(now) < Duration::from_secs(60));
        let part = clock.read(3, 5).await.unwrap();
        assert_eq!(part.bytes(), &bytes(&clock).await[3..8]);
        assert!(!clock.facts().can.contains(Can::MULTI_CONN));

        let uptime = exports("info:uptime").await.unwrap();
        let uptime = visit(&uptime).await.open("", false).await.unwrap().unwrap().device;
        blockhaul_io::sleep(Duration::from_millis(20)).await;
        let connected = exports("info:conntime").await.unwrap();
        let connected = visit(&connected).await.open("", false).await.unwrap().unwrap().device;
        let first = time(&connected).await;
        let second = time(&connected).await;
        assert!(first <= second && second < time(&uptime).await);
        let error = exports("info:what").await.err().unwrap();
        assert!(error.to_string().contains("known are exportname"), "{error}");
    });
}
