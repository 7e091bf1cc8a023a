//! Targets outside of the crate `wire`: files that describe copies and backups, control of a server, TLS
//! records, and devices in formats of others.

use std::ffi::OsStr;
use std::io::Write as _;
use std::os::fd::AsRawFd as _;
use std::sync::OnceLock;

use blockhaul_catalog::{Intent, Spec};
use blockhaul_engine::Manifest;
use blockhaul_io::{Config, Runtime};

/// A target's name and function.
pub type Target = (&'static str, fn(&[u8]));

/// All targets. Corpus files are in `fuzz/corpus/NAME`.
pub const TARGETS: &[Target] = &[
    ("journal", blockhaul_engine::fuzz::journal),
    ("manifest", manifest),
    ("job_file", blockhaul::fuzz::job_file),
    ("metrics_request", blockhaul::fuzz::metrics_request),
    ("control_request", blockhaul::fuzz::control_request),
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

/// nbdkit's language for data. Words that start programs or read files are left out.
fn data(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    if !text.contains(['<', '\0']) {
        look(&format!("data:data={}", text.replace('%', "%25").replace('&', "%26")), &[]);
    }
}

/// A file with these contents, at least `len` bytes long, under a layer.
fn device(data: &[u8], layer: &str, len: u64) {
    let Ok(mut file) = tempfile::tempfile_in("/dev/shm") else { return };
    if file.write_all(data).is_err() || (data.len() as u64) < len && file.set_len(len).is_err() {
        return;
    }
    look(&format!("file:/proc/self/fd/{}", file.as_raw_fd()), &[layer]);
}

/// Opens a device, and reads its start, its end and its extents. Errors are expected.
fn look(device: &str, layers: &[&str]) {
    static RUNTIME: OnceLock<Runtime> = OnceLock::new();
    let runtime = RUNTIME.get_or_init(|| {
        Runtime::start(&Config { workers: 1, ..Config::default() }).expect("a worker can start")
    });
    let device = device.to_string();
    let layers: Vec<String> = layers.iter().map(|layer| layer.to_string()).collect();
    runtime.block_on(move || async move {
        let registry = blockhaul::library::serving_registry();
        let Ok(spec) = Spec::parse(OsStr::new(&device)) else { return };
        let Ok(layers) = layers.iter().map(|layer| registry.layer(layer)).collect() else { return };
        if let Ok(stack) = registry.open(&spec, layers, Intent::READ).await {
            let _ = blockhaul_testkit::mutate::look(&**stack.device()).await;
        }
    });
}
