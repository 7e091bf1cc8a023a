//! Devices and helpers of these tests.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use blockhaul_block::{Device, DeviceExt as _, Facts, PendingRequest, Request};
use blockhaul_catalog::Stack;
use blockhaul_io::{Runtime, RuntimeConfig};
use blockhaul_snapshot::{PointOptions, Snapshot};
use blockhaul_testkit::rng::Rng;

pub const BLOCK: u64 = 64 << 10;

/// Runs a test on a worker.
pub fn on_worker<F: Future<Output = ()> + 'static>(test: impl FnOnce() -> F + Send + 'static) {
    let runtime =
        Runtime::start(&RuntimeConfig { workers: 2, ..RuntimeConfig::default() }).unwrap();
    runtime.block_on(test);
}

/// A snapshot of a device that begins now, and the device for its writers.
pub async fn begun(
    device: &Arc<dyn Device>,
    options: &PointOptions,
) -> (Snapshot, Arc<dyn Device>) {
    let snapshot = Snapshot::new(device.facts().size, options).unwrap();
    let stack = Stack::over(device.clone()).with_layer(snapshot.layer()).await.unwrap();
    (snapshot, stack.device().clone())
}

pub async fn read(device: &Arc<dyn Device>, at: u64, len: usize) -> Vec<u8> {
    device.read(at, len).await.unwrap().bytes().to_vec()
}

pub async fn write(device: &Arc<dyn Device>, at: u64, bytes: &[u8]) {
    device.write(at, blockhaul_io::Data::copy_of(bytes)).await.unwrap();
}

/// A device whose requests take a random time, so that their order varies with the seed.
pub struct Slow {
    pub inner: Arc<dyn Device>,
    pub rng: Mutex<Rng>,
}

impl Device for Slow {
    fn facts(&self) -> Arc<Facts> {
        self.inner.facts()
    }

    fn submit(&self, request: Request) -> PendingRequest {
        let inner = self.inner.clone();
        let [before, after] = [0, 1].map(|_| self.rng.lock().unwrap().below(6));
        PendingRequest::start(async move {
            wait(before).await;
            let outcome = inner.submit(request).await;
            wait(after).await;
            outcome
        })
    }
}

async fn wait(turns: u64) {
    match turns {
        5 => blockhaul_io::sleep(Duration::from_micros(50)).await,
        turns => {
            for _ in 0..turns {
                blockhaul_io::yield_now().await;
            }
        }
    }
}
