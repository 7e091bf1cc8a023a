//! Images whose first bytes tell their format.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use blockhaul_catalog::{
    Backend, BackendTarget, DeviceSpec, Intent, OpenFuture, OpenedDevice, Registry,
};
use blockhaul_io::{Runtime, RuntimeConfig};

use crate::common::{Qemu, content, error, open, read_all, registry};

#[test]
fn the_first_bytes_choose_the_device() {
    let Some(qemu) = Qemu::find() else { return };
    for format in ["qcow2", "vmdk", "vhdx", "vpc", "vdi", "raw"] {
        let _ = std::fs::remove_file(qemu.file("image"));
        qemu.img(&["create", "-q", "-f", format, "image", "4M"]);
        qemu.io(format, "image", &["write -P 7 1m 64k".into()]);
        let _ = std::fs::remove_file(qemu.file("raw"));
        qemu.img(&["convert", "-f", format, "-O", "raw", "image", "raw"]);
        let wanted = std::fs::read(qemu.file("raw")).unwrap();
        let path = qemu.file("image").display().to_string();
        assert!(read_all(&format!("image:{path}?names=allow")).unwrap() == wanted, "{format}");
        let slow = format!("image:split:{path}?names=allow");
        if format != "vmdk" {
            assert!(read_all(&slow).unwrap() == wanted, "{format}, over another device");
        }
    }
    let path = qemu.file("raw").display().to_string();
    std::fs::write(qemu.file("raw"), b"QF").unwrap();
    assert_eq!(read_all(&format!("image:{path}")).unwrap(), b"QF", "shorter than a header");
    std::fs::write(qemu.file("raw"), b"").unwrap();
    assert_eq!(read_all(&format!("image:{path}")).unwrap(), b"");
    assert!(error("image:").contains("requires a device"));
}

fn on_a_worker<T: Send + 'static, F: Future<Output = T> + 'static>(
    work: impl FnOnce() -> F + Send + 'static,
) -> T {
    let runtime =
        Runtime::start(&RuntimeConfig { workers: 1, ..RuntimeConfig::default() }).unwrap();
    runtime.block_on(work)
}

/// Opens its device no more than once.
struct Once(AtomicUsize);

impl Backend for Once {
    fn schemes(&self) -> &'static [&'static str] {
        &["once"]
    }

    fn operand(&self) -> &'static str {
        "PATH"
    }

    fn summary(&self) -> &'static str {
        "a file that is opened once"
    }

    fn open(&self, target: BackendTarget) -> OpenFuture<OpenedDevice> {
        let count = self.0.fetch_add(1, Ordering::Relaxed);
        Box::pin(async move {
            assert_eq!(count, 0, "it is opened again");
            target.context.open(target.text()?, target.intent).await
        })
    }
}

#[test]
fn a_device_is_opened_once_and_only_read() {
    let Some(qemu) = Qemu::find() else { return };
    qemu.img(&["create", "-q", "-f", "qcow2", "image", "4M"]);
    qemu.io("qcow2", "image", &["write -P 7 1m 64k".into()]);
    let wanted = qemu.raw("image");
    let path = qemu.file("image").display().to_string();
    let text = format!("image:once:{path}");
    let found = on_a_worker(move || async move {
        let mut all: Registry = registry();
        all.backends.push(Arc::new(Once(AtomicUsize::new(0))));
        let spec = DeviceSpec::parse(text.as_ref()).unwrap();
        let stack = all.open(&spec, Vec::new(), Intent::READ).await.unwrap();
        content(stack.device()).await.unwrap()
    });
    assert!(found == wanted);
    let place = format!("image:{path}");
    let said = on_a_worker(move || async move {
        open(&place, Intent::WRITE).await.err().map(|error| error.to_string())
    });
    assert!(said.unwrap().contains("only reads"));
}
