//! The copy engine against model devices: exact contents under every option, faults, cancels, and
//! servers that show each connection another disk.

mod compare;
mod connections;
mod contents;
mod course;
mod refused;

use std::sync::Arc;

use blockhaul_block::{Device, Result};
use blockhaul_catalog::Stack;
use blockhaul_engine::{CopyError, CopyProgress, CopySummary, EngineOptions, copy};
use blockhaul_io::{IoEngine, Pool, Runtime, RuntimeConfig};
use blockhaul_testkit::model::{CompletionOrder, Model, ModelDevice};
use blockhaul_testkit::rng::Rng;

fn runtime(engine: IoEngine) -> Runtime {
    Runtime::start(&RuntimeConfig { workers: 2, engine }).unwrap()
}

/// Runs an asynchronous check on a worker.
fn on_worker<F: Future<Output = ()> + 'static>(check: impl FnOnce() -> F + Send + 'static) {
    runtime(IoEngine::Auto).block_on(check);
}

/// Disk-like content: runs of data, of zeroes that are allocated, and of holes.
fn content(rng: &mut Rng, size: usize) -> Vec<u8> {
    rng.disk(size, 300_000, 50)
}

fn source_of(bytes: &[u8], holes: bool) -> Arc<ModelDevice> {
    let mut model = Model::new(bytes.len() as u64).with_content(bytes.to_vec());
    if holes {
        model = model.with_holes();
    }
    ModelDevice::new(model, CompletionOrder::Immediate)
}

/// A target full of something else.
fn dirty(size: usize) -> Arc<ModelDevice> {
    let model = Model::new(size as u64).with_content(vec![0xa5; size]);
    ModelDevice::new(model, CompletionOrder::Immediate)
}

fn stack(device: Arc<dyn Device>) -> Stack {
    Stack::over(device)
}

async fn run(
    source: &Stack,
    target: &Stack,
    options: &EngineOptions,
) -> Result<CopySummary, CopyError> {
    let pool = Pool::new(64 << 20);
    let result = copy(source, target, options, &pool, &Arc::new(CopyProgress::new())).await;
    assert_eq!(pool.reserved(), 0, "all buffers are back");
    result
}
