//! The contract of devices, over images of all kinds.

use blockhaul_catalog::Intent;
use blockhaul_testkit::conform::{self, Content, Options, Subject};

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
    let content = Content::oracle(move |at| raw[at as usize]);
    let spec = qemu.spec("top", "names=allow");
    conform::check(options, Options::default().content(content), move || {
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
