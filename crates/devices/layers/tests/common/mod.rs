//! Helpers for tests of layers.
#![allow(dead_code, clippy::unwrap_used)]

use std::sync::Arc;

use blockhaul_block::{Can, ContextSet, Device, DeviceExt, Error, Result};
use blockhaul_catalog::{Backend, Layer, LayerBase, LayerKind, Registry};
use blockhaul_io::{Data, Runtime, RuntimeConfig};
use blockhaul_testkit::model::{CompletionOrder, Model, ModelDevice};

/// Runs a check on a worker.
pub fn on_workers<F>(check: impl FnOnce() -> F + Send + 'static)
where
    F: Future<Output = ()> + 'static,
{
    let runtime =
        Runtime::start(&RuntimeConfig { workers: 2, ..RuntimeConfig::default() }).unwrap();
    runtime.block_on(check);
}

/// Every layer, those with nbdkit's names, too: all fulfil the same contract.
pub fn kinds() -> Vec<&'static LayerKind> {
    let mut kinds = blockhaul_layers::all();
    kinds.extend(blockhaul_nbdkit_devices::layers::all());
    kinds.sort_unstable_by_key(|kind| kind.name);
    kinds
}

/// Every storage.
pub fn backends() -> Vec<Arc<dyn Backend>> {
    let mut backends = blockhaul_backends::all();
    backends.extend(blockhaul_nbdkit_devices::devices::all());
    backends
}

/// The layer of this description.
pub fn layer(text: &str) -> Result<Arc<dyn Layer>> {
    Registry { layers: kinds(), ..Registry::default() }.layer(text)
}

/// A disk that is opened for each client; without `multi_conn` it promises nothing about its connections.
pub fn disk_of_clients(size: u64, multi_conn: bool) -> Arc<dyn Device> {
    let mut facts = Model::all_facts(size);
    facts.can.set(Can::MULTI_CONN, multi_conn);
    ModelDevice::new(Model::with_facts(facts), CompletionOrder::Immediate)
}

/// The layer over such a disk, as a client gets it that opens the export of this name.
pub async fn opened(layer: &Arc<dyn Layer>, disk: &Arc<dyn Device>, name: &str) -> Arc<dyn Device> {
    let below = LayerBase { export: Some(name.to_string()), ..LayerBase::alone(disk.clone()) };
    layer.clone().open(below).await.unwrap()
}

/// A device under layers, the last one outermost, each over the emulated device below, behind the
/// fence: like a stack.
pub fn stacked(device: Arc<dyn Device>, texts: &[&str]) -> Result<Arc<dyn Device>> {
    let mut device = device;
    for text in texts {
        device = layer(text)?.wrap(blockhaul_block::emulate::emulate(device))?;
    }
    Ok(blockhaul_block::fence(blockhaul_block::emulate::emulate(device)))
}

/// Why a description, or putting it over 1 MiB of memory, is refused.
pub fn refused(text: &str) -> Error {
    stacked(blockhaul_backends::memory(1 << 20), &[text]).err().expect("it should be refused")
}

/// The runs of a range in the first context: length and state.
pub async fn runs(device: &Arc<dyn Device>, at: u64, len: u64) -> Vec<(u64, u64)> {
    let mut all = blockhaul_block::Extents::new();
    while all.total() < len {
        let from = at + all.total();
        let lists = device.extents(from, len - all.total(), ContextSet::first()).await.unwrap();
        lists[0].runs().iter().for_each(|run| all.push(run.len, run.state));
    }
    all.runs().iter().map(|run| (run.len, run.state)).collect()
}

/// Writes bytes.
pub async fn write(device: &Arc<dyn Device>, at: u64, bytes: &[u8]) {
    device.write(at, Data::copy_of(bytes)).await.unwrap();
}

/// Reads bytes.
pub async fn read(device: &Arc<dyn Device>, at: u64, len: usize) -> Vec<u8> {
    device.read(at, len).await.unwrap().bytes().to_vec()
}
