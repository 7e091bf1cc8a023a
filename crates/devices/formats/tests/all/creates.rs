//! New images, as targets: in order for QEMU's tools, and with the contents that were written.

use blockhaul_catalog::{DeviceSpec, Intent};
use blockhaul_io::{Runtime, RuntimeConfig};
use blockhaul_testkit::rng::{self, Rng};

use crate::common::{Qemu, registry, write};
use crate::writes::play;

/// Creates an image of `size` bytes and writes to it; what the disk then contains.
fn create(spec: &str, size: u64, seed: u64) -> blockhaul_block::Result<Vec<u8>> {
    let runtime =
        Runtime::start(&RuntimeConfig { workers: 2, ..RuntimeConfig::default() }).unwrap();
    let spec = DeviceSpec::parse(spec.as_ref()).unwrap();
    runtime.block_on(move || async move {
        let opened = registry().open_target(&spec, Vec::new(), Intent::target(size)).await?;
        let (stack, preparation) = opened;
        preparation.run().await?;
        let size = stack.device().facts().size as usize;
        let mut model = vec![0; size];
        if !stack.device().facts().zeroed {
            model = crate::common::content(stack.device()).await?;
        }
        play(stack.device(), &mut Rng::new(seed), &mut model, 20, 64 << 10).await;
        Ok(model)
    })
}

#[test]
fn new_images_are_in_order() {
    let Some(qemu) = Qemu::find() else { return };
    let seed = rng::seed();
    eprintln!("BLOCKHAUL_SEED={seed}");
    let base: Vec<u8> = (0..1_000_000_u32).map(|n| (n % 251) as u8).collect();
    write(&qemu.file("base"), &base);
    qemu.img(&["convert", "-O", "qcow2", "base", "base.qcow2"]);
    let base = qemu.file("base");
    let image = qemu.file("base.qcow2");
    let base = base.display();
    let image = image.display();
    let data = qemu.file("data");
    for options in [
        "cluster=64k".to_string(),
        "cluster=512".to_string(),
        "cluster=2M".to_string(),
        "subclusters=on".to_string(),
        format!("backing={base}"),
        format!("backing=qcow2:{image}&subclusters=on&cluster=16k"),
        format!("data-file={}&cluster=4k", data.display()),
    ] {
        for size in [1, 65_536, 3_000_001] {
            // What was there before is gone.
            write(&qemu.file("new"), &[1; 200_000]);
            let label = format!("{options}, {size} bytes, seed {seed}");
            let model = create(&qemu.spec("new", &options), size, seed);
            let model = model.unwrap_or_else(|error| panic!("{label}: {error}"));
            assert_eq!(model.len() as u64, size.next_multiple_of(512), "{label}");
            qemu.check("new", &label);
            assert!(qemu.raw("new") == model, "{label}");
        }
    }
}

#[test]
fn what_is_refused_leaves_the_target_as_it_was() {
    let Some(qemu) = Qemu::find() else { return };
    write(&qemu.file("new"), b"precious");
    write(&qemu.file("base"), &[0; 65536]);
    let base = qemu.file("base");
    let new = qemu.file("new");
    let base = base.display();
    let new = new.display();
    for (options, size, wanted) in [
        ("cluster=3k".to_string(), 1 << 20, "power of two"),
        ("subclusters=on&cluster=4k".into(), 1 << 20, "16k"),
        ("cluster=512".into(), 1 << 50, "cluster=64k"),
        ("backing=/nonexistent/base".into(), 1 << 20, "/nonexistent/base"),
        ("backing=memory:1M".into(), 1 << 20, "cannot be named"),
        (format!("backing={base}&data-file=/nonexistent/x"), 1 << 20, "no backing file"),
        (format!("backing={new}"), 1 << 20, "would replace"),
        ("snapshot=one".into(), 1 << 20, "snapshot"),
    ] {
        let error = create(&qemu.spec("new", &options), size, 1).unwrap_err().to_string();
        assert!(error.contains(wanted), "{options}: {error}");
        assert_eq!(std::fs::read(qemu.file("new")).unwrap(), b"precious", "{options}");
    }
}

#[test]
fn an_image_can_be_in_an_image() {
    let Some(qemu) = Qemu::find() else { return };
    let seed = rng::seed();
    eprintln!("BLOCKHAUL_SEED={seed}");
    let inner = format!("qcow2:qcow2:{}", qemu.file("outer").display());
    let model = create(&inner, 2 << 20, seed).unwrap();
    qemu.check("outer", "the outer image");
    assert!(crate::common::read_all(&inner).unwrap() == model);
}
