//! Disks in images get another size: QEMU finds no fault and the same contents, and a power cut
//! leaves the old disk or the new one.

use std::path::Path;
use std::sync::{Arc, Mutex};

use blockhaul_block::{Device, Result};
use blockhaul_catalog::{NamePolicy, OpenContext};
use blockhaul_formats::qcow2::resize::{NewSize, resize};
use blockhaul_io::{Runtime, RuntimeConfig};
use blockhaul_testkit::rng::{self, Rng};

use crate::common::{Qemu, read_all, registry, write};
use crate::power::{Growing, change_given, cut_at_each_change};

const MIB: u64 = 1 << 20;

/// Resizes the image in a file.
fn resized(path: &Path, size: NewSize, shrink: bool) -> Result<u64> {
    let runtime =
        Runtime::start(&RuntimeConfig { workers: 1, ..RuntimeConfig::default() }).unwrap();
    let description = format!("file:{}", path.display());
    let head = std::fs::read(path).unwrap();
    let old = u64::from_be_bytes(head[24..32].try_into().unwrap());
    runtime.block_on(move || async move {
        let registry = registry();
        let context = OpenContext::new(&registry).with_names(NamePolicy::Allow);
        let reports = Mutex::new(Vec::new());
        let count = |done, total| reports.lock().unwrap().push((done, total));
        let new = resize(&context, &description, size, shrink, &count).await?;
        let reports = reports.into_inner().unwrap();
        let total = new.abs_diff(old);
        assert_eq!(reports.last(), Some(&(total, total)));
        assert!(reports.is_sorted() && reports.iter().all(|one| one.1 == total), "{reports:?}");
        Ok(new)
    })
}

const OPTIONS: [&str; 7] = [
    "cluster_size=64k",
    "cluster_size=4k,refcount_bits=64",
    "cluster_size=512,compat=0.10",
    "cluster_size=512,refcount_bits=64",
    "cluster_size=16k,extended_l2=on,backing_file=base,backing_fmt=raw",
    "cluster_size=4k,backing_file=base,backing_fmt=raw",
    "cluster_size=4k,compat=0.10,backing_file=base,backing_fmt=raw",
];

/// Random sizes, one after the other, with writes of QEMU between them.
#[test]
fn the_disk_has_the_new_size_and_its_contents() {
    let Some(qemu) = Qemu::find() else { return };
    let seed = rng::seed();
    eprintln!("BLOCKHAUL_SEED={seed}");
    for (number, options) in OPTIONS.into_iter().enumerate() {
        let mut rng = Rng::new(seed.wrapping_add(number as u64));
        let mut base = vec![0; 9 << 20];
        rng.fill(&mut base);
        write(&qemu.file("base"), &base);
        qemu.create("top", options, 4 * MIB);
        let has_snapshot = number % 2 == 1 && !options.contains("compat=0.10");
        for round in 0..8 {
            let old = qemu.raw("top");
            let at = rng.below(old.len() as u64 / 512) * 512;
            let len = (rng.between(1, 500) * 512).min(old.len() as u64 - at);
            qemu.io("qcow2", "top", &[format!("write -P {} {at} {len}", round + 1)]);
            if round == 2 && has_snapshot {
                qemu.img(&["snapshot", "-c", "one", "top"]);
            }
            let mut wanted = qemu.raw("top");
            let most = *rng.pick(&[2 * MIB, 8 * MIB, 80 * MIB]);
            let size = rng.between(1, most / 512) * 512;
            let label = format!("{options}, seed {seed}, round {round}: {at}+{len}, then {size}");
            wanted.resize(size as usize, 0);
            let found = resized(&qemu.file("top"), NewSize::To(size), true);
            assert_eq!(found.unwrap_or_else(|error| panic!("{label}: {error}")), size);
            qemu.check("top", &label);
            assert!(qemu.raw("top") == wanted, "{label}");
            let spec = qemu.spec("top", "names=allow");
            assert!(read_all(&spec).unwrap() == wanted, "{label}: read by us");
        }
        if has_snapshot {
            qemu.img(&["convert", "-l", "one", "-O", "raw", "top", "one.raw"]);
            qemu.img(&["snapshot", "-d", "one", "top"]);
            qemu.check("top", options);
        }
    }
}

/// The L1 table of a large disk of small clusters needs several refcount blocks of its own.
#[test]
fn a_small_image_becomes_a_very_large_one() {
    let Some(qemu) = Qemu::find() else { return };
    for (options, size) in [
        ("cluster_size=512", 100 << 30),
        ("cluster_size=512,refcount_bits=1", 60 << 30),
        ("cluster_size=4k", 7 << 40),
        ("cluster_size=64k", 1 << 50),
    ] {
        qemu.create("top", options, MIB);
        qemu.io("qcow2", "top", &["write -P 5 0 1M".into()]);
        assert_eq!(resized(&qemu.file("top"), NewSize::To(size), false).unwrap(), size);
        qemu.check("top", options);
        let end = size - 512;
        qemu.io("qcow2", "top", &["read -P 5 0 1M".into(), format!("write -P 7 {end} 512")]);
        qemu.check("top", options);
        assert_eq!(resized(&qemu.file("top"), NewSize::To(MIB), true).unwrap(), MIB);
        qemu.check("top", options);
        assert_eq!(qemu.raw("top"), vec![5; 1 << 20], "{options}");
    }
    let error = resized(&qemu.file("top"), NewSize::To(1 << 60), false).unwrap_err();
    assert!(error.to_string().contains("copy it to an image with larger ones"), "{error}");
}

#[test]
fn images_that_would_be_wrong_are_refused_and_unchanged() {
    let Some(qemu) = Qemu::find() else { return };
    let refused = |wanted: &str| {
        let before = std::fs::read(qemu.file("top")).unwrap();
        let error = resized(&qemu.file("top"), NewSize::By(MIB), false).unwrap_err().to_string();
        assert!(error.contains(wanted), "{error}");
        assert!(std::fs::read(qemu.file("top")).unwrap() == before, "{wanted}: it has changed");
    };
    qemu.create("top", "compat=0.10", MIB);
    qemu.img(&["snapshot", "-c", "one", "top"]);
    refused("snapshot \"one\" has no size of its own");
    qemu.create("top", "compat=1.1", MIB);
    qemu.img(&["bitmap", "--add", "--disable", "top", "daily"]);
    refused("\"daily\"");
    qemu.create("top", "data_file=data", MIB);
    refused("external data file");
    qemu.create("top", "compat=1.1", MIB);
    let error = resized(&qemu.file("top"), NewSize::Less(MIB / 2), false).unwrap_err().to_string();
    assert!(error.contains("--shrink"), "{error}");
    for wrong in [NewSize::Less(2 * MIB), NewSize::By(u64::MAX), NewSize::To(u64::MAX)] {
        assert!(resized(&qemu.file("top"), wrong, true).is_err(), "{wrong:?}");
    }
    let mut bytes = std::fs::read(qemu.file("top")).unwrap();
    bytes[79] |= 1;
    write(&qemu.file("top"), &bytes);
    refused("marked as dirty");
}

/// Resizes the image in a device; whether that has succeeded.
fn resize_given(device: Arc<dyn Device>, size: u64) -> bool {
    change_given(device, move |registry| async move {
        let context = OpenContext::new(&registry).with_names(NamePolicy::Allow);
        resize(&context, "given:", NewSize::To(size), true, &|_, _| ()).await.is_ok()
    })
}

#[test]
fn a_power_cut_leaves_the_old_disk_or_the_new_one() {
    let Some(qemu) = Qemu::find() else { return };
    let seed = rng::seed();
    eprintln!("BLOCKHAUL_SEED={seed}");
    for (options, grows) in
        [("cluster_size=4k", true), ("cluster_size=512", false), ("cluster_size=4k", false)]
    {
        for size in [(MIB / 2 - 512), (40 * MIB)] {
            qemu.create("top", options, 2 * MIB);
            qemu.io("qcow2", "top", &["write -P 3 100k 1800k".into()]);
            let image = std::fs::read(qemu.file("top")).unwrap();
            let old = qemu.raw("top");
            let mut new = old.clone();
            new.resize(size as usize, 0);
            let cuts = cut_at_each_change(
                &Growing { image: &image, grows },
                &format!("{options}, {grows}, {size}"),
                seed,
                |device| resize_given(device, size),
                |left, label| {
                    write(&qemu.file("left"), left);
                    assert_eq!(qemu.faults("left").0, 0, "{label}");
                    let found = qemu.raw("left");
                    assert!(found == old || found == new, "{label}: {} bytes", found.len());
                },
            );
            assert!(cuts > 5, "{options}: {cuts} cuts");
        }
    }
}
