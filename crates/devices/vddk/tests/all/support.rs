//! A folder with the simulated library, its settings and disks.

use std::ffi::OsStr;
use std::path::PathBuf;

use blockhaul_block::Result;
use blockhaul_catalog::{DeviceSpec, Intent, Registry, Stack};
use blockhaul_io::{Runtime, RuntimeConfig};
use blockhaul_testkit::tools::until_ok;

/// A folder with a library, and disks.
pub struct Lab(tempfile::TempDir);

impl Lab {
    /// With these settings, one a line.
    pub fn new(settings: &str) -> Lab {
        let lab = Lab(tempfile::tempdir().unwrap());
        std::fs::create_dir(lab.path("lib64")).unwrap();
        std::fs::copy(simulator(), lab.library()).unwrap();
        lab.set(settings);
        lab
    }

    /// Changes the settings, for the next time that the library starts.
    pub fn set(&self, settings: &str) {
        let folder = self.0.path().display();
        let text = format!("disks={folder}\ncounters={folder}/counters\n{settings}\n");
        std::fs::write(self.path("simulator.conf"), text).unwrap();
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    pub fn library(&self) -> PathBuf {
        self.path("lib64/libvixDiskLib.so.8")
    }

    /// A disk of zeroes, without allocated blocks.
    pub fn zeroes(&self, name: &str, size: u64) {
        std::fs::File::create(self.path(name)).unwrap().set_len(size).unwrap();
    }

    /// A computed disk.
    pub fn pattern(&self, name: &str, text: &str) {
        std::fs::write(self.path(name), format!("vddk-simulator-pattern {text}")).unwrap();
    }

    /// The description of a disk.
    pub fn spec(&self, name: &str, more: &str) -> String {
        let folder = self.0.path().display();
        format!("vddk:[store] machine/{name}?libdir={folder}&isolate=off{more}")
    }

    /// The counters, once the library has ended.
    pub fn counters(&self) -> serde_json::Value {
        until_ok("the library ends", || {
            let text = std::fs::read(self.path("counters")).unwrap_or_default();
            let counters: serde_json::Value = serde_json::from_slice(&text).unwrap_or_default();
            if counters["functions"]["Exit"]["calls"] == 1 { Ok(counters) } else { Err(counters) }
        })
    }

    /// Number of calls of a function.
    pub fn calls(&self, function: &str) -> u64 {
        self.counters()["functions"][function]["calls"].as_u64().unwrap_or(0)
    }

    /// Nothing is open or left, and nothing was used wrongly.
    pub fn assert_clean(&self) {
        let counters = self.counters();
        assert_eq!(counters["misuse"], 0, "{counters}");
        for left in ["handles", "connections", "unfreed", "in-flight"] {
            assert_eq!(counters[left], 0, "{counters}");
        }
    }
}

/// The shared object, which is built with the tests.
fn simulator() -> PathBuf {
    let program = std::env::current_exe().unwrap();
    program.with_file_name("libvddk_simulator.so")
}

/// Opens a device.
pub async fn open(spec: &str, intent: Intent) -> Result<Stack> {
    let registry = Registry { backends: blockhaul_vddk::all(), ..Registry::default() };
    registry.open(&DeviceSpec::parse(OsStr::new(spec))?, Vec::new(), intent).await
}

/// Runs on a worker.
pub fn run<T: Send + 'static, F: Future<Output = T> + 'static>(
    work: impl FnOnce() -> F + Send + 'static,
) -> T {
    let runtime =
        Runtime::start(&RuntimeConfig { workers: 2, ..RuntimeConfig::default() }).unwrap();
    runtime.block_on(work)
}
