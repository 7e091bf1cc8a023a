//! Targets outside of the crate `wire`: files that describe copies and backups, control of a server, TLS
//! records, and devices in formats of others.

use std::ffi::OsStr;
use std::sync::OnceLock;

use blockhaul_block::{Request, Result};
use blockhaul_catalog::{DeviceSpec, Intent, LayerBase, Registry};
use blockhaul_engine::Manifest;
use blockhaul_io::{Data, Runtime, RuntimeConfig};
use blockhaul_registry::device_registry;
use blockhaul_testkit::mutate::look;

/// A target's name and function.
pub type Target = (&'static str, fn(&[u8]));

/// All targets. Corpus files are in `fuzz/corpus/NAME`.
pub const TARGETS: &[Target] = &[
    ("journal", blockhaul_engine::fuzz::journal),
    ("manifest", manifest),
    ("job_file", blockhaul_cli::fuzz::job_file),
    ("metrics_request", blockhaul_metrics::fuzz::metrics_request),
    ("control_request", blockhaul_cli::fuzz::control_request),
    ("tls_records", blockhaul_tls::fuzz::records),
    ("data", data),
    ("gz", |data| device(data, "gz", 0)),
    ("xz", |data| device(data, "xz", 0)),
    ("tar", |data| device(data, "tar?tar-entry=disk", 0)),
    ("partition", |data| device(data, "partition?partition=1", 1 << 20)),
    ("logical_partition", |data| device(data, "partition?partition=5", 1 << 20)),
    // Few iterations: a mutated header may ask for seconds of them.
    ("luks", |data| device(data, "luks?passphrase=s&max-iterations=20000", 4 << 20)),
];

/// A manifest that is read is printed as it was.
fn manifest(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    let Ok(manifest) = text.parse::<Manifest>() else { return };
    assert_eq!(manifest.to_string().parse::<Manifest>().ok(), Some(manifest));
}

/// The language for data. Words that read files are left out.
fn data(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    if text.contains(['<', '\0']) {
        return;
    }
    let device = format!("data:data={}", text.replace('%', "%25").replace('&', "%26"));
    on_a_worker(async move |registry| {
        let spec = DeviceSpec::parse(OsStr::new(&device))?;
        let stack = registry.open(&spec, Vec::new(), Intent::READ).await?;
        look(&**stack.device()).await
    });
}

/// Memory with these contents, of at least `len` bytes, under a layer.
fn device(data: &[u8], layer: &'static str, len: u64) {
    let data = Data::copy_of(data);
    on_a_worker(async move |registry| {
        let device = blockhaul_backends::memory(len.max(data.len() as u64));
        device.submit(Request::write(0, data)).await?;
        let below = LayerBase { device, intent: Intent::READ, reopen: None, export: None };
        let device = registry.layer(layer)?.open(below).await?;
        look(&*device).await
    });
}

/// Opens a device on a worker, and reads it. Errors are expected.
fn on_a_worker(opens: impl AsyncFnOnce(&Registry) -> Result<()> + Send + 'static) {
    static RUNTIME: OnceLock<Runtime> = OnceLock::new();
    static REGISTRY: OnceLock<Registry> = OnceLock::new();
    let runtime = RUNTIME.get_or_init(|| {
        Runtime::start(&RuntimeConfig { workers: 1, ..RuntimeConfig::default() })
            .expect("a worker can start")
    });
    runtime.block_on(move || async move {
        let _ = opens(REGISTRY.get_or_init(device_registry)).await;
    });
}
