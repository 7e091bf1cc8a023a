//! Our check of images, next to QEMU's.

use std::path::Path;

use blockhaul_catalog::Intent;
use blockhaul_formats::qcow2::check::{ImageCheckReport, Repair, check};
use blockhaul_io::{Runtime, RuntimeConfig};
use blockhaul_testkit::rng::{self, Rng};

use crate::common::{Qemu, open, write};

pub fn checked(path: &Path, repair: Repair) -> ImageCheckReport {
    let runtime =
        Runtime::start(&RuntimeConfig { workers: 1, ..RuntimeConfig::default() }).unwrap();
    let spec = format!("file:{}", path.display());
    runtime.block_on(move || async move {
        let intent = if repair == Repair::Nothing { Intent::READ } else { Intent::WRITE };
        let stack = open(&spec, intent).await.unwrap();
        check(stack.device(), repair).await.unwrap()
    })
}

/// An image with snapshots, a bitmap, compressed clusters and subclusters.
fn image(qemu: &Qemu, options: &str) -> Vec<u8> {
    qemu.create("top", options, 4 << 20);
    let noise: Vec<u8> = (0..200_003_u32).map(|n| (n % 251 * n % 17) as u8 + 1).collect();
    write(&qemu.file("noise"), &noise);
    let first = "write -P 1 0 4k";
    let fill =
        [first, "write -c -s noise 64k 256k", "write -s noise 600k 150k", "write -P 3 2m 300k"];
    qemu.io("qcow2", "top", &fill.map(String::from));
    qemu.img(&["snapshot", "-c", "one", "top"]);
    qemu.io("qcow2", "top", &["write -P 9 2m 100k".into()]);
    if !options.contains("compat=0.10") {
        qemu.img(&["bitmap", "--add", "top", "changes"]);
    }
    std::fs::read(qemu.file("top")).unwrap()
}

const OPTIONS: [&str; 5] = [
    "cluster_size=64k",
    "cluster_size=4k,refcount_bits=32",
    "cluster_size=512,compat=0.10",
    "cluster_size=16k,extended_l2=on,refcount_bits=64",
    "cluster_size=32k,lazy_refcounts=on,refcount_bits=8",
];

#[test]
fn a_good_image_has_no_faults() {
    let Some(qemu) = Qemu::find() else { return };
    for options in OPTIONS {
        image(&qemu, options);
        let report = checked(&qemu.file("top"), Repair::Nothing);
        assert_eq!((report.corruptions, report.leaks), (0, 0), "{options}: {:?}", report.faults);
        let text = qemu.img(&["check", "--output=json", "top"]);
        let theirs: serde_json::Value = serde_json::from_str(&text).unwrap();
        let number = |name: &str| theirs[name].as_u64().unwrap_or(0);
        assert_eq!(report.clusters, number("total-clusters"), "{options}");
        assert_eq!(report.allocated, number("allocated-clusters"), "{options}");
        assert_eq!(report.compressed, number("compressed-clusters"), "{options}");
        assert_eq!(report.image_end, number("image-end-offset"), "{options}");
    }
}

/// Changed refcounts and flags, anywhere in the tables.
#[test]
fn faults_are_found_where_qemu_finds_them_and_repaired() {
    let Some(qemu) = Qemu::find() else { return };
    let seed = rng::seed();
    eprintln!("BLOCKHAUL_SEED={seed}");
    let rounds = if std::env::var_os("BLOCKHAUL_LONG").is_some() { 200 } else { 12 };
    for options in OPTIONS {
        let good = image(&qemu, options);
        let table = u64::from_be_bytes(good[48..56].try_into().unwrap()) as usize;
        let block = u64::from_be_bytes(good[table..table + 8].try_into().unwrap()) as usize;
        let l1 = u64::from_be_bytes(good[40..48].try_into().unwrap()) as usize;
        let entry = u64::from_be_bytes(good[l1..l1 + 8].try_into().unwrap());
        let l2 = (entry & 0x00ff_ffff_ffff_fe00) as usize;
        for round in 0..rounds {
            let mut rng = Rng::new(seed.wrapping_add(round));
            let mut bytes = good.clone();
            let what = match rng.below(3) {
                // A refcount.
                0 => {
                    let at = block + rng.below(64) as usize;
                    bytes[at] ^= 1 << rng.below(8);
                    format!("byte {at}")
                }
                // The flag of an entry.
                1 => {
                    let at = l2 + rng.below(8) as usize * 16;
                    bytes[at] ^= 0x80;
                    format!("flag at {at}")
                }
                _ => {
                    bytes[l1] ^= 0x80;
                    "flag of the L1 entry".to_string()
                }
            };
            write(&qemu.file("bad"), &bytes);
            let label = format!("{options}, seed {seed}, round {round}: {what}");
            let (errors, leaks) = qemu.faults("bad");
            let report = checked(&qemu.file("bad"), Repair::Nothing);
            let texts: Vec<String> = report.faults.iter().map(ToString::to_string).collect();
            // Theirs compares flags with refcounts that are too high, too.
            assert!(report.corruptions == 0 || errors > 0, "{label}: {texts:?}");
            let both = report.corruptions + report.leaks;
            assert_eq!(both > 0, errors + leaks > 0, "{label}: {errors} {leaks} {texts:?}");
            assert_eq!(report.leaks, leaks, "{label}: {texts:?}");
            assert!(std::fs::read(qemu.file("bad")).unwrap() == bytes, "{label}: it is only read");
            let report = checked(&qemu.file("bad"), Repair::All);
            assert_eq!((report.corruptions, report.leaks), (0, 0), "{label}: {:?}", report.faults);
            qemu.check("bad", &label);
        }
    }
}

#[test]
fn leaks_stay_while_there_are_corruptions() {
    let Some(qemu) = Qemu::find() else { return };
    let mut bytes = image(&qemu, "cluster_size=64k");
    let block = 2 << 16;
    // The refcounts of the header and of the refcount table.
    bytes[block + 1] = 0;
    bytes[block + 3] = 2;
    write(&qemu.file("bad"), &bytes);
    let report = checked(&qemu.file("bad"), Repair::Leaks);
    assert_eq!((report.corruptions, report.leaks, report.leaks_fixed), (1, 1, 0));
    assert!(std::fs::read(qemu.file("bad")).unwrap() == bytes);
}
