//! Images get another version of the format and late refcounts: QEMU finds no fault and the same
//! contents, also after a power cut.

use std::path::Path;

use blockhaul_block::Result;
use blockhaul_catalog::OpenContext;
use blockhaul_formats::qcow2::amend::{AmendOptions, amend};
use blockhaul_io::{Runtime, RuntimeConfig};
use blockhaul_testkit::rng;

use crate::common::{Qemu, registry, write};
use crate::power::{Growing, change_given, cut_at_each_change};

const MIB: u64 = 1 << 20;
const UPGRADE: AmendOptions = AmendOptions { upgrade: true, lazy_refcounts: None };

fn amended(path: &Path, change: AmendOptions) -> Result<()> {
    let runtime =
        Runtime::start(&RuntimeConfig { workers: 1, ..RuntimeConfig::default() }).unwrap();
    let description = format!("file:{}", path.display());
    runtime.block_on(move || async move {
        let registry = registry();
        amend(&OpenContext::new(&registry), &description, change).await
    })
}

/// An image of version 2 with a backing file of this name, a snapshot, and data in both.
fn make_old(qemu: &Qemu, base: &str) {
    write(&qemu.file(base), &vec![9; 1 << 20]);
    let options = format!("cluster_size=4k,compat=0.10,backing_file={base},backing_fmt=raw");
    qemu.create("top", &options, MIB);
    qemu.io("qcow2", "top", &["write -P 1 100k 300k".into()]);
    qemu.img(&["snapshot", "-c", "one", "top"]);
    qemu.io("qcow2", "top", &["write -P 2 200k 300k".into()]);
}

fn said(qemu: &Qemu, name: &str) -> String {
    let image = std::fs::read(qemu.file(name)).unwrap();
    let version = u32::from_be_bytes(image[4..8].try_into().unwrap());
    let flags = if version < 3 { 0 } else { image[87] };
    format!("version {version}, flags {flags}")
}

#[test]
fn old_images_become_new_ones_with_names_and_snapshots() {
    let Some(qemu) = Qemu::find() else { return };
    // The second name has no room in the first sector.
    for base in ["base".to_string(), format!("{}base", "./".repeat(200))] {
        make_old(&qemu, &base);
        let disk = qemu.raw("top");
        amended(&qemu.file("top"), UPGRADE).unwrap();
        assert_eq!(said(&qemu, "top"), "version 3, flags 0");
        qemu.check("top", &base);
        assert!(qemu.raw("top") == disk, "{base}");
        let lazy = |on| AmendOptions { lazy_refcounts: Some(on), ..UPGRADE };
        amended(&qemu.file("top"), lazy(true)).unwrap();
        assert_eq!(said(&qemu, "top"), "version 3, flags 1");
        amended(&qemu.file("top"), lazy(false)).unwrap();
        assert_eq!(said(&qemu, "top"), "version 3, flags 0");
        // Only version 3 has snapshots of another size.
        qemu.img(&["resize", "top", "2M"]);
        qemu.img(&["snapshot", "-a", "one", "top"]);
        qemu.check("top", &base);
        assert_eq!(qemu.raw("top").len(), 1 << 20, "{base}");
    }
}

#[test]
fn what_version_2_cannot_say_is_refused() {
    let Some(qemu) = Qemu::find() else { return };
    let refused = |change, wanted: &str| {
        let before = std::fs::read(qemu.file("top")).unwrap();
        let error = amended(&qemu.file("top"), change).unwrap_err().to_string();
        assert!(error.contains(wanted), "{error}");
        assert!(std::fs::read(qemu.file("top")).unwrap() == before, "{wanted}: it has changed");
    };
    make_old(&qemu, "base");
    refused(AmendOptions { upgrade: false, lazy_refcounts: Some(true) }, "make it version 3");
    amended(&qemu.file("top"), AmendOptions { upgrade: false, lazy_refcounts: Some(false) })
        .unwrap();
    assert_eq!(said(&qemu, "top"), "version 2, flags 0");
    // A name that does not fit behind the other one.
    write(&qemu.file("base"), &vec![9; 1 << 20]);
    let long = format!("{}base", "./".repeat(190));
    let options = format!("cluster_size=512,compat=0.10,backing_file={long},backing_fmt=raw");
    qemu.create("top", &options, MIB);
    refused(UPGRADE, "no room");
    qemu.create("top", "compat=1.1", MIB);
    let mut bytes = std::fs::read(qemu.file("top")).unwrap();
    bytes[79] |= 1;
    write(&qemu.file("top"), &bytes);
    refused(AmendOptions { upgrade: false, lazy_refcounts: Some(true) }, "marked as dirty");
}

#[test]
fn a_power_cut_leaves_the_same_disk_in_either_version() {
    let Some(qemu) = Qemu::find() else { return };
    let seed = rng::seed();
    eprintln!("BLOCKHAUL_SEED={seed}");
    for base in ["base".to_string(), format!("{}base", "./".repeat(200))] {
        make_old(&qemu, &base);
        let image = std::fs::read(qemu.file("top")).unwrap();
        let disk = qemu.raw("top");
        qemu.img(&["convert", "-l", "one", "-O", "raw", "top", "old"]);
        let snapshot = std::fs::read(qemu.file("old")).unwrap();
        let cuts = cut_at_each_change(
            &Growing { image: &image, grows: true },
            &base,
            seed,
            |device| {
                change_given(device, move |registry| async move {
                    let change = AmendOptions { lazy_refcounts: Some(true), ..UPGRADE };
                    amend(&OpenContext::new(&registry), "given:", change).await.is_ok()
                })
            },
            |left, label| {
                write(&qemu.file("left"), left);
                assert_eq!(qemu.faults("left").0, 0, "{label}");
                assert!(qemu.raw("left") == disk, "{label}");
                qemu.img(&["convert", "-l", "one", "-O", "raw", "left", "old"]);
                assert!(std::fs::read(qemu.file("old")).unwrap() == snapshot, "{label}");
            },
        );
        assert!(cuts > 3, "{base}: {cuts} cuts");
    }
}
