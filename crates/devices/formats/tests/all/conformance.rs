//! The contract of devices, over images of all kinds.

use std::sync::atomic::{AtomicUsize, Ordering};

use blockhaul_catalog::Intent;
use blockhaul_testkit::conform::{self, ConformOptions, InitialContent, Subject};

use crate::common::{Qemu, open, write};

fn check(options: &str) {
    let Some(qemu) = Qemu::find() else { return };
    let size = (2 << 20) + 512;
    let noise: Vec<_> = (0..200_003_u32).map(|n| (n % 251 * n % 17) as u8 + 1).collect();
    write(&qemu.file("noise"), &noise);
    std::fs::File::create(qemu.file("base")).unwrap().set_len(1 << 20).unwrap();
    qemu.io("raw", "base", &["write -s noise 100k 700k".into()]);
    qemu.create("top", &format!("{options},backing_file=base,backing_fmt=raw"), size);
    qemu.io(
        "qcow2",
        "top",
        &[
            "write -c -s noise 512k 128k".into(),
            "write -s noise 0 150k".into(),
            "write -s noise 1m 300k".into(),
            "write -z 300k 100k".into(),
        ],
    );
    let raw = qemu.raw("top");
    let content = InitialContent::oracle(move |at| raw[at as usize]);
    let spec = qemu.spec("top", "names=allow");
    conform::check(options, ConformOptions::default().content(content), move || {
        let spec = spec.clone();
        async move { open(&spec, Intent::READ).await.map(Subject::from) }
    });
}

#[test]
fn images_keep_the_contract() {
    check("cluster_size=64k");
}

#[test]
fn images_with_small_clusters_keep_the_contract() {
    check("cluster_size=512,compression_type=zstd");
}

#[test]
fn images_with_subclusters_keep_the_contract() {
    check("cluster_size=16k,extended_l2=on");
}

/// The same of images that are written: each check gets one of its own.
fn check_written(options: &str) {
    let Some(qemu) = Qemu::find() else { return };
    let size = (3 << 20) + 512;
    std::fs::File::create(qemu.file("base")).unwrap().set_len(1 << 20).unwrap();
    qemu.io("raw", "base", &["write -P 7 100k 700k".into()]);
    qemu.create("top", options, size);
    qemu.io("qcow2", "top", &["write -P 3 0 150k".into(), "write -P 4 1m 300k".into()]);
    let content = qemu.raw("top");
    let top = qemu.file("top");
    let content = InitialContent::oracle(move |at| content[at as usize]);
    let number = AtomicUsize::new(0);
    conform::check(options, ConformOptions::default().content(content), move || {
        let own = top.with_extension(number.fetch_add(1, Ordering::Relaxed).to_string());
        std::fs::copy(&top, &own).unwrap();
        let spec = format!("qcow2:{}?names=allow", own.display());
        async move { open(&spec, Intent::WRITE).await.map(Subject::from) }
    });
    for file in std::fs::read_dir(qemu.scratch.path()).unwrap() {
        let name = file.unwrap().file_name().into_string().unwrap();
        if name.starts_with("top.") {
            qemu.check(&name, options);
        }
    }
}

#[test]
fn written_images_keep_the_contract() {
    check_written("cluster_size=64k");
}

#[test]
fn written_images_with_small_clusters_and_a_backing_file_keep_the_contract() {
    check_written("cluster_size=4k,backing_file=base,backing_fmt=raw");
}

#[test]
fn written_images_with_subclusters_keep_the_contract() {
    check_written("cluster_size=32k,extended_l2=on,backing_file=base,backing_fmt=raw");
}

#[test]
fn written_images_of_version_2_keep_the_contract() {
    check_written("compat=0.10");
}
