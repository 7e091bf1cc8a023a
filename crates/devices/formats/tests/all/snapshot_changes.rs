//! Internal snapshots are made, applied and deleted, and space is reserved: QEMU finds no fault and the
//! same disks, also after a power cut.

use std::collections::BTreeMap;
use std::path::Path;

use blockhaul_block::{Kind, Result};
use blockhaul_catalog::OpenContext;
use blockhaul_formats::qcow2::check::Repair;
use blockhaul_formats::qcow2::reserve::reserve;
use blockhaul_formats::qcow2::snapshot_change::{SnapshotChange, change_snapshot};
use blockhaul_io::{Runtime, RuntimeConfig};
use blockhaul_testkit::rng::{self, Rng};

use crate::checks::checked;
use crate::common::{Qemu, registry, write};
use crate::power::{Growing, change_given, cut_at_each_change};

const MIB: u64 = 1 << 20;
const CREATE: SnapshotChange = SnapshotChange::Create { date: (1_700_000_000, 5) };

fn on_worker<T, F>(work: impl FnOnce(OpenContext) -> F + Send + 'static) -> T
where
    T: Send + 'static,
    F: Future<Output = T> + 'static,
{
    let runtime =
        Runtime::start(&RuntimeConfig { workers: 1, ..RuntimeConfig::default() }).unwrap();
    runtime.block_on(move || work(OpenContext::new(&registry())))
}

fn changed(path: &Path, name: &str, change: SnapshotChange) -> Result<()> {
    let description = format!("file:{}", path.display());
    let name = name.to_string();
    on_worker(
        move |context| async move { change_snapshot(&context, &description, &name, change).await },
    )
}

/// Changes parts of an image at random.
fn scribble(qemu: &Qemu, size: u64, rng: &mut Rng) {
    let commands: Vec<String> = (0..6)
        .map(|_| {
            let at = rng.below(size / 512) * 512;
            let len = ((rng.below(400) + 1) * 512).min(size - at);
            match rng.below(5) {
                0 => format!("write -z {at} {len}"),
                1 => format!("discard {at} {len}"),
                _ => format!("write -P {} {at} {len}", rng.below(255) + 1),
            }
        })
        .collect();
    qemu.io("qcow2", "a", &commands);
}

const OPTIONS: [&str; 4] = [
    "cluster_size=64k",
    "cluster_size=4k,refcount_bits=64",
    "cluster_size=64k,extended_l2=on",
    "cluster_size=1k,compat=0.10",
];

#[test]
fn snapshots_keep_the_disk_as_it_was() {
    let Some(qemu) = Qemu::find() else { return };
    let seed = rng::seed();
    eprintln!("BLOCKHAUL_SEED={seed}");
    let mut rng = Rng::new(seed);
    for options in OPTIONS {
        qemu.create("a", options, 3 * MIB);
        qemu.io("qcow2", "a", &["write -c -P 7 1M 64k".into(), "write -c -P 8 2M 128k".into()]);
        scribble(&qemu, 3 * MIB, &mut rng);
        let mut kept: BTreeMap<String, Vec<u8>> = BTreeMap::new();
        for round in 0..10 {
            let label = format!("{options}, seed {seed}, round {round}");
            let some = kept.keys().nth(rng.below(kept.len().max(1) as u64) as usize).cloned();
            match (rng.below(4), some) {
                (0, Some(name)) => {
                    changed(&qemu.file("a"), &name, SnapshotChange::Apply).unwrap();
                    assert!(qemu.raw("a") == kept[&name], "{label}");
                }
                (1, Some(name)) => {
                    let before = qemu.raw("a");
                    changed(&qemu.file("a"), &name, SnapshotChange::Delete).unwrap();
                    kept.remove(&name);
                    assert!(qemu.raw("a") == before, "{label}");
                }
                _ => {
                    let name = format!("s{round}");
                    let before = qemu.raw("a");
                    changed(&qemu.file("a"), &name, CREATE).unwrap();
                    assert!(qemu.raw("a") == before, "{label}");
                    kept.insert(name, before);
                }
            }
            qemu.check("a", &label);
            let report = checked(&qemu.file("a"), Repair::Nothing);
            assert_eq!((report.corruptions, report.leaks), (0, 0), "{label}: {:?}", report.faults);
            scribble(&qemu, 3 * MIB, &mut rng);
            for (name, disk) in &kept {
                qemu.img(&["convert", "-l", name, "-O", "raw", "a", "snapshot"]);
                assert!(std::fs::read(qemu.file("snapshot")).unwrap() == *disk, "{label}: {name}");
            }
        }
    }
}

#[test]
fn a_snapshot_of_another_size_changes_the_size() {
    let Some(qemu) = Qemu::find() else { return };
    qemu.create("a", "cluster_size=512", MIB);
    qemu.io("qcow2", "a", &["write -P 1 0 1M".into()]);
    let small = qemu.raw("a");
    changed(&qemu.file("a"), "small", CREATE).unwrap();
    qemu.img(&["resize", "-f", "qcow2", "a", "8M"]);
    qemu.io("qcow2", "a", &["write -P 2 6M 64k".into()]);
    let large = qemu.raw("a");
    changed(&qemu.file("a"), "large", CREATE).unwrap();
    changed(&qemu.file("a"), "small", SnapshotChange::Apply).unwrap();
    qemu.check("a", "small");
    assert!(qemu.raw("a") == small);
    changed(&qemu.file("a"), "2", SnapshotChange::Apply).unwrap();
    qemu.check("a", "large");
    assert!(qemu.raw("a") == large);
}

#[test]
fn what_is_not_possible_is_refused_and_changes_nothing() {
    let Some(qemu) = Qemu::find() else { return };
    let refused = |name: &str, change, kind| {
        let before = std::fs::read(qemu.file("a")).unwrap();
        let error = changed(&qemu.file("a"), name, change).unwrap_err();
        assert_eq!(error.kind(), kind, "{error}");
        assert!(std::fs::read(qemu.file("a")).unwrap() == before, "{error}");
    };
    qemu.create("a", "cluster_size=64k", MIB);
    refused("none", SnapshotChange::Apply, Kind::NotFound);
    refused("none", SnapshotChange::Delete, Kind::NotFound);
    refused(&"x".repeat(70_000), CREATE, Kind::Usage);
    qemu.img(&["bitmap", "--add", "a", "b"]);
    changed(&qemu.file("a"), "s", CREATE).unwrap();
    refused("s", SnapshotChange::Apply, Kind::Unsupported);
    qemu.create("a", "cluster_size=64k", MIB);
    changed(&qemu.file("a"), "s", CREATE).unwrap();
    qemu.img(&["resize", "-f", "qcow2", "a", "2M"]);
    qemu.img(&["bitmap", "--add", "--disable", "a", "b"]);
    refused("s", SnapshotChange::Apply, Kind::Unsupported);
    // Only names can be deleted.
    refused("1", SnapshotChange::Delete, Kind::NotFound);
    qemu.create("a", "refcount_bits=1", MIB);
    refused("s", CREATE, Kind::Unsupported);
    qemu.create("a", "refcount_bits=2", MIB);
    qemu.io("qcow2", "a", &["write 0 64k".into()]);
    changed(&qemu.file("a"), "1", CREATE).unwrap();
    changed(&qemu.file("a"), "2", CREATE).unwrap();
    refused("3", CREATE, Kind::Unsupported);
    let data = qemu.file("data").display().to_string();
    qemu.create("a", &format!("data_file={data}"), MIB);
    refused("s", CREATE, Kind::Unsupported);
}

#[test]
fn a_power_cut_loses_neither_the_disk_nor_a_snapshot() {
    let Some(qemu) = Qemu::find() else { return };
    let seed = rng::seed();
    eprintln!("BLOCKHAUL_SEED={seed}");
    qemu.create("a", "cluster_size=4k", MIB);
    qemu.io("qcow2", "a", &["write -P 1 0 300k".into()]);
    changed(&qemu.file("a"), "s", CREATE).unwrap();
    let snapshot = qemu.raw("a");
    qemu.io("qcow2", "a", &["write -P 2 100k 300k".into()]);
    let disk = qemu.raw("a");
    let image = std::fs::read(qemu.file("a")).unwrap();
    for (name, change) in
        [("t", CREATE), ("s", SnapshotChange::Apply), ("s", SnapshotChange::Delete)]
    {
        let cuts = cut_at_each_change(
            &Growing { image: &image, grows: true },
            &format!("{change:?}"),
            seed,
            |device| {
                change_given(device, move |registry| async move {
                    let context = OpenContext::new(&registry);
                    change_snapshot(&context, "given:", name, change).await.is_ok()
                })
            },
            |left, label| {
                write(&qemu.file("left"), left);
                // Flags may be wrong until they are repaired.
                checked(&qemu.file("left"), Repair::All);
                qemu.check("left", label);
                let now = qemu.raw("left");
                let applied = change == SnapshotChange::Apply && now == snapshot;
                assert!(now == disk || applied, "{label}");
                if change != SnapshotChange::Delete {
                    qemu.img(&["convert", "-l", "s", "-O", "raw", "left", "old"]);
                    assert!(std::fs::read(qemu.file("old")).unwrap() == snapshot, "{label}");
                }
            },
        );
        assert!(cuts > 3, "{change:?}: {cuts} cuts");
    }
}

#[test]
fn reserved_space_is_allocated_and_zero() {
    let Some(qemu) = Qemu::find() else { return };
    for options in OPTIONS.into_iter().chain(["cluster_size=512,refcount_bits=1"]) {
        for writes in [false, true] {
            qemu.create("a", options, 2 * MIB);
            qemu.io("qcow2", "a", &["write -P 3 0 1M".into()]);
            let before = qemu.raw("a");
            let description = format!("file:{}", qemu.file("a").display());
            let len = on_worker(move |context| async move {
                reserve(&context, &description, MIB, writes).await
            })
            .unwrap();
            let file = std::fs::OpenOptions::new().write(true).open(qemu.file("a")).unwrap();
            file.set_len(len.max(file.metadata().unwrap().len())).unwrap();
            qemu.check("a", options);
            assert!(qemu.raw("a") == before, "{options}");
            let report = checked(&qemu.file("a"), Repair::Nothing);
            assert_eq!(report.allocated, report.clusters, "{options}");
            // What has its space keeps it.
            let description = format!("file:{}", qemu.file("a").display());
            let again = on_worker(move |context| async move {
                reserve(&context, &description, MIB, writes).await
            });
            assert_eq!(again.unwrap(), len.next_multiple_of(512), "{options}");
            qemu.check("a", options);
        }
    }
}
