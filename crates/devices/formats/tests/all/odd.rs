//! Images over a device with blocks of its own and further handles, as an NBD export may be.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use blockhaul_block::{BlockSizes, Device, Facts, PendingRequest, Request};
use blockhaul_catalog::{
    Backend, BackendTarget, DeviceSpec, HandleOpener, Intent, OpenFuture, OpenedDevice, Registry,
};
use blockhaul_io::{Runtime, RuntimeConfig};
use blockhaul_testkit::conform::{self, ConformOptions, Subject};

use crate::common::{Qemu, content, registry};

/// `odd:PATH`: a file whose requests are multiples of 512 bytes, and at most 8192.
struct Odd {
    handles: Arc<AtomicUsize>,
}

struct OddDevice {
    inner: Arc<dyn Device>,
    facts: Arc<Facts>,
}

impl Device for OddDevice {
    fn facts(&self) -> Arc<Facts> {
        self.facts.clone()
    }

    fn submit(&self, request: Request) -> PendingRequest {
        assert!(request.at.is_multiple_of(512) && request.len.is_multiple_of(512));
        self.inner.submit(request)
    }
}

#[derive(Clone)]
struct More {
    target: BackendTarget,
    handles: Arc<AtomicUsize>,
}

impl HandleOpener for More {
    fn another(&self) -> OpenFuture<Arc<dyn Device>> {
        let this = self.clone();
        Box::pin(async move {
            this.handles.fetch_add(1, Ordering::Relaxed);
            let path = this.target.text()?.to_string();
            let inner = this.target.context.open(&path, Intent::READ).await?.device;
            let mut facts = Facts::clone(&inner.facts());
            facts.block = BlockSizes { minimum: 512, preferred: 512, maximum: 8192 };
            Ok(Arc::new(OddDevice { inner, facts: Arc::new(facts) }) as Arc<dyn Device>)
        })
    }
}

impl Backend for Odd {
    fn schemes(&self) -> &'static [&'static str] {
        &["odd"]
    }

    fn operand(&self) -> &'static str {
        "PATH"
    }

    fn summary(&self) -> &'static str {
        "for tests"
    }

    fn open(&self, target: BackendTarget) -> OpenFuture<OpenedDevice> {
        let more = More { target, handles: self.handles.clone() };
        Box::pin(async move {
            let device = more.another().await?;
            Ok(OpenedDevice { device, more: Some(Arc::new(more)) })
        })
    }
}

fn with_odd(handles: &Arc<AtomicUsize>) -> Registry {
    let mut registry = registry();
    registry.backends.push(Arc::new(Odd { handles: handles.clone() }));
    registry
}

/// An image with compressed clusters that are longer than a request, a backing image and a base;
/// lengths are whole blocks. The descriptions of both directions.
fn prepare(qemu: &Qemu) -> [String; 2] {
    qemu.create("base", "cluster_size=64k", 2 << 20);
    qemu.io("qcow2", "base", &["write -P 1 0 900k".into()]);
    qemu.create("top", "cluster_size=64k,compression_type=zstd", 2 << 20);
    let noise: Vec<u8> = (0..300_000_u32).map(|n| (n.wrapping_mul(n) >> 7) as u8 & 0x7f).collect();
    crate::common::write(&qemu.file("noise"), &noise);
    qemu.io(
        "qcow2",
        "top",
        &["write -c -s noise 256k 256k".into(), "write -s noise 1000k 500k".into()],
    );
    for name in ["base", "top"] {
        let file = std::fs::File::options().append(true).open(qemu.file(name)).unwrap();
        file.set_len(file.metadata().unwrap().len().next_multiple_of(512)).unwrap();
    }
    let [base, top] = ["base", "top"].map(|name| qemu.file(name).display().to_string());
    let image = format!("qcow2:odd:{top}?backing=qcow2:odd:{base}");
    let view = format!("as-qcow2:odd:{top}?zstd=1");
    [image, view]
}

#[test]
fn all_handles_read_the_same_through_their_own_handles() {
    let Some(qemu) = Qemu::find() else { return };
    let [image, view] = prepare(&qemu);
    let handles = Arc::new(AtomicUsize::new(0));
    let runtime =
        Runtime::start(&RuntimeConfig { workers: 2, ..RuntimeConfig::default() }).unwrap();
    for (spec, files) in [(image, 2), (view, 1)] {
        let handles = handles.clone();
        runtime.block_on(move || async move {
            handles.store(0, Ordering::Relaxed);
            let word = DeviceSpec::parse(spec.as_ref()).unwrap();
            let stack = with_odd(&handles).open(&word, Vec::new(), Intent::READ).await.unwrap();
            assert_eq!(stack.device().facts().block.maximum, 8192, "{spec}");
            let first = content(stack.device()).await.unwrap();
            assert_eq!(handles.load(Ordering::Relaxed), files, "{spec}");
            let other = stack.another().await.unwrap();
            assert_eq!(handles.load(Ordering::Relaxed), 2 * files, "{spec}");
            assert!(content(&other).await.unwrap() == first, "{spec}");
        });
    }
}

#[test]
fn images_over_devices_with_blocks_keep_the_contract() {
    let Some(qemu) = Qemu::find() else { return };
    for spec in prepare(&qemu) {
        let name = spec.clone();
        conform::check(&name, ConformOptions::default(), move || {
            let spec = spec.clone();
            async move {
                let word = DeviceSpec::parse(spec.as_ref()).unwrap();
                let registry = with_odd(&Arc::default());
                registry.open(&word, Vec::new(), Intent::READ).await.map(Subject::from)
            }
        });
    }
}
