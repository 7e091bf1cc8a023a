//! Bitmaps of images are added, removed and changed: QEMU finds no fault and the same bitmaps, and
//! a power cut leaves the old ones or the new ones.

use std::cell::Cell;
use std::path::Path;
use std::sync::Arc;

use blockhaul_block::{Device, DeviceExt as _, Result};
use blockhaul_catalog::{
    BitmapSlot, DeviceSpec, ImageBitmaps, Intent, NamePolicy, OpenContext, Registry,
};
use blockhaul_formats::qcow2::bitmap_change::{BitmapChange, change_bitmap};
use blockhaul_io::{Data, Runtime, RuntimeConfig};
use blockhaul_testkit::rng::{self, Rng};
use blockhaul_testkit::tools::long;
use serde_json::Value;

use crate::common::{Qemu, extents, registry, with, write};
use crate::power::{Growing, change_given, cut_at_each_change};

const MIB: u64 = 1 << 20;
const ADD: BitmapChange = BitmapChange::Add { granularity: None, enabled: true };

/// Changes a bitmap of the image in a file.
fn change(path: &Path, name: &str, change: BitmapChange) -> Result<()> {
    let runtime =
        Runtime::start(&RuntimeConfig { workers: 1, ..RuntimeConfig::default() }).unwrap();
    let description = format!("file:{}", path.display());
    let name = name.to_string();
    runtime.block_on(move || async move {
        let registry = registry();
        let context = OpenContext::new(&registry).with_names(NamePolicy::Refuse);
        change_bitmap(&context, &description, &name, change).await
    })
}

fn merge(sources: &[&str]) -> BitmapChange {
    BitmapChange::Merge { sources: sources.iter().map(|&one| one.into()).collect(), from: None }
}

/// What QEMU says about the bitmaps: names, granularities and flags.
fn bitmaps(qemu: &Qemu, name: &str) -> Vec<(String, u64, Vec<String>)> {
    let info: Value = serde_json::from_str(&qemu.img(&["info", "--output=json", name])).unwrap();
    let all = info["format-specific"]["data"]["bitmaps"].as_array().cloned().unwrap_or_default();
    let one = |one: &Value| {
        let flags = one["flags"].as_array().unwrap().iter();
        (
            one["name"].as_str().unwrap().to_string(),
            one["granularity"].as_u64().unwrap(),
            flags.map(|flag| flag.as_str().unwrap().to_string()).collect(),
        )
    };
    all.iter().map(one).collect()
}

/// The dirty ranges of a bitmap, as our reader finds them: offset and length in bytes.
fn dirty(qemu: &Qemu, name: &str, bitmap: &str) -> Vec<(u64, u64)> {
    let context = format!("qemu:dirty-bitmap:{bitmap}");
    with(&qemu.spec(name, "names=allow"), move |device| async move {
        let number = device.facts().context(&context).unwrap();
        let found = extents(&device, number).await.unwrap();
        let mut all = Vec::new();
        let mut at = 0;
        for run in found.runs() {
            if run.state != 0 {
                all.push((at, run.len));
            }
            at += run.len;
        }
        all
    })
}

/// The bits of all bitmaps.
fn all_dirty(qemu: &Qemu, name: &str) -> Vec<Vec<(u64, u64)>> {
    bitmaps(qemu, name).iter().map(|(bitmap, ..)| dirty(qemu, name, bitmap)).collect()
}

const OPTIONS: [&str; 5] = [
    "cluster_size=64k",
    "cluster_size=4k,refcount_bits=64",
    "cluster_size=1k,backing_file=base,backing_fmt=raw",
    "cluster_size=16k,extended_l2=on,backing_file=base,backing_fmt=raw",
    "cluster_size=64k,data_file=data,data_file_raw=on",
];

#[test]
fn the_same_changes_by_qemu_have_the_same_result() {
    let Some(qemu) = Qemu::find() else { return };
    let seed = rng::seed();
    eprintln!("BLOCKHAUL_SEED={seed}");
    let mut rng = Rng::new(seed);
    write(&qemu.file("base"), &vec![7; MIB as usize]);
    for options in OPTIONS {
        // Each has a data file of its own.
        qemu.create("ours", options, 9 * MIB);
        qemu.create("theirs", &options.replace("=data,", "=data2,"), 9 * MIB);
        for step in 0..if long() { 25 } else { 12 } {
            let label = format!("{options}, seed {seed}, step {step}");
            let name = ["one", "two", "three"][rng.below(3) as usize];
            let other = ["one", "two", "three"][rng.below(3) as usize];
            let (by_us, by_qemu): (BitmapChange, Vec<&str>) = match rng.below(8) {
                0 | 1 => {
                    let enabled = rng.below(3) > 0;
                    let granularity =
                        [None, Some(512), Some(4096), Some(MIB)][rng.below(4) as usize];
                    let text = match granularity {
                        Some(512) => ["-g", "512"].as_slice(),
                        Some(4096) => &["-g", "4k"],
                        Some(_) => &["-g", "1M"],
                        None => &[],
                    };
                    let flag: &[&str] = if enabled { &["--add"] } else { &["--add", "--disable"] };
                    (BitmapChange::Add { granularity, enabled }, [flag, text].concat())
                }
                2 => (BitmapChange::Remove, vec!["--remove"]),
                3 => (BitmapChange::Clear, vec!["--clear"]),
                4 => (BitmapChange::Enable, vec!["--enable"]),
                5 => (BitmapChange::Disable, vec!["--disable"]),
                _ => (merge(&[other]), vec!["--merge", other]),
            };
            let change_by_us = change(&qemu.file("ours"), name, by_us);
            let args = [&["bitmap"], &by_qemu[..], &["theirs", name]].concat();
            let done = qemu.try_img(&args);
            assert_eq!(
                change_by_us.is_ok(),
                done.is_ok(),
                "{label}: {args:?}: {change_by_us:?}, {done:?}"
            );
            qemu.check("ours", &label);
            assert_eq!(bitmaps(&qemu, "ours"), bitmaps(&qemu, "theirs"), "{label} {by_qemu:?}");
            assert_eq!(all_dirty(&qemu, "ours"), all_dirty(&qemu, "theirs"), "{label} {by_qemu:?}");
            let at = rng.below(9 * MIB / 512 - 400) * 512;
            let len = (rng.below(400) + 1) * 512;
            for image in ["ours", "theirs"] {
                qemu.io("qcow2", image, &[format!("write -P {} {at} {len}", step + 1)]);
            }
            assert_eq!(all_dirty(&qemu, "ours"), all_dirty(&qemu, "theirs"), "{label} written");
        }
        assert!(qemu.raw("ours") == qemu.raw("theirs"), "{options}");
    }
}

#[test]
fn bitmaps_of_another_image_are_merged() {
    let Some(qemu) = Qemu::find() else { return };
    // 40 MiB with bits for 512 bytes: more than a cluster of 4 KiB has.
    for (name, granularity) in [("target", Some(512)), ("other", Some(64 << 10))] {
        qemu.create(name, "cluster_size=4k", 40 * MIB);
        change(&qemu.file(name), "b", BitmapChange::Add { granularity, enabled: true }).unwrap();
    }
    qemu.io("qcow2", "target", &["write 512 512".into(), "write 39M 1M".into()]);
    qemu.io("qcow2", "other", &["write 16M 20M".into(), "write 64k 512".into()]);
    let from = Some(format!("file:{}", qemu.file("other").display()));
    let sources = vec!["b".to_string()];
    let merge = BitmapChange::Merge { sources: sources.clone(), from: from.clone() };
    change(&qemu.file("target"), "b", merge.clone()).unwrap();
    qemu.check("target", "merged");
    let wanted = [(512, 512), (64 << 10, 64 << 10), (16 * MIB, 20 * MIB), (39 * MIB, MIB)];
    assert_eq!(dirty(&qemu, "target", "b"), wanted);
    // QEMU reads them alike: a bitmap into which it merges this one.
    qemu.img(&["bitmap", "--add", "-g", "512", "target", "copy"]);
    qemu.img(&["bitmap", "--merge", "b", "target", "copy"]);
    assert_eq!(dirty(&qemu, "target", "copy"), wanted);
    qemu.create("other", "cluster_size=4k", 41 * MIB);
    change(&qemu.file("other"), "b", ADD).unwrap();
    let said = change(&qemu.file("target"), "b", merge).unwrap_err().to_string();
    assert!(said.contains("41943040 bytes") || said.contains("42991616"), "{said}");
}

#[test]
fn changes_that_are_not_possible_are_refused_and_change_nothing() {
    let Some(qemu) = Qemu::find() else { return };
    qemu.create("top", "cluster_size=64k", 9 * MIB);
    change(&qemu.file("top"), "there", ADD).unwrap();
    let before = std::fs::read(qemu.file("top")).unwrap();
    let long = "x".repeat(1024);
    let add = |granularity| BitmapChange::Add { granularity: Some(granularity), enabled: true };
    for (name, wrong, wanted) in [
        ("there", ADD, "already"),
        ("", ADD, "0 bytes"),
        (&long, ADD, "1024 bytes"),
        ("new", add(256), "granularity 256"),
        ("new", add(3000), "granularity 3000"),
        ("new", add(1 << 32), "granularity 4294967296"),
        ("new", BitmapChange::Remove, "it has \"there\""),
        ("new", BitmapChange::Enable, "no bitmap \"new\""),
        ("there", merge(&["other"]), "no bitmap \"other\""),
    ] {
        let said = change(&qemu.file("top"), name, wrong.clone()).unwrap_err().to_string();
        assert!(said.contains(wanted), "{wrong:?}: {said}");
    }
    assert!(std::fs::read(qemu.file("top")).unwrap() == before);
    // In use: flag 1 of the entry.
    let mut bytes = before.clone();
    let at = bytes.windows(5).rposition(|one| one == b"there").unwrap() - 24 + 15;
    assert_eq!(bytes[at], 2);
    bytes[at] |= 1;
    write(&qemu.file("top"), &bytes);
    for wrong in
        [BitmapChange::Clear, BitmapChange::Enable, BitmapChange::Disable, merge(&["there"])]
    {
        let said = change(&qemu.file("top"), "there", wrong).unwrap_err().to_string();
        assert!(said.contains("not saved correctly"), "{said}");
    }
    change(&qemu.file("top"), "there", BitmapChange::Remove).unwrap();
    qemu.check("top", "removed");
    assert_eq!(bitmaps(&qemu, "top"), []);
    // Too long for a table, and not of version 3.
    qemu.create("top", "cluster_size=64k", 1 << 45);
    let said = change(&qemu.file("top"), "b", add(512)).unwrap_err().to_string();
    assert!(said.contains("larger granularity"), "{said}");
    qemu.create("top", "compat=0.10", MIB);
    let said = change(&qemu.file("top"), "b", ADD).unwrap_err().to_string();
    assert!(said.contains("version 2"), "{said}");
}

/// Changes a bitmap of the image in a device; whether that has succeeded.
fn change_bitmap_given(device: Arc<dyn Device>, name: &'static str, change: BitmapChange) -> bool {
    change_given(device, move |registry| async move {
        let context = OpenContext::new(&registry).with_names(NamePolicy::Refuse);
        change_bitmap(&context, "given:", name, change).await.is_ok()
    })
}

#[test]
fn a_power_cut_leaves_the_old_bitmaps_or_the_new_ones() {
    let Some(qemu) = Qemu::find() else { return };
    let seed = rng::seed();
    eprintln!("BLOCKHAUL_SEED={seed}");
    write(&qemu.file("base"), &vec![7; MIB as usize]);
    let options = ["cluster_size=4k", "cluster_size=1k,backing_file=base,backing_fmt=raw"];
    for (options, number) in
        options.into_iter().flat_map(|one| [(one, 0), (one, 1), (one, 2), (one, 3)])
    {
        qemu.create("top", options, 2 * MIB);
        let (name, wanted): (_, BitmapChange) = match number {
            0 => ("one", ADD),
            1 => ("two", ADD),
            2 => ("one", BitmapChange::Remove),
            _ => ("one", merge(&["two"])),
        };
        for name in ["one", "two"].into_iter().take([0, 1, 1, 2][number]) {
            change(&qemu.file("top"), name, ADD).unwrap();
            qemu.io("qcow2", "top", &["write -P 3 100k 1800k".into()]);
        }
        if number == 3 {
            change(&qemu.file("top"), "one", BitmapChange::Clear).unwrap();
        }
        let image = std::fs::read(qemu.file("top")).unwrap();
        let state = |name: &str| (bitmaps(&qemu, name), all_dirty(&qemu, name));
        let old = state("top");
        change(&qemu.file("top"), name, wanted.clone()).unwrap();
        let new = state("top");
        assert_ne!(old, new);
        let content = qemu.raw("top");
        let cuts = cut_at_each_change(
            &Growing { image: &image, grows: true },
            &format!("{options}, {wanted:?}"),
            seed,
            |device| change_bitmap_given(device, name, wanted.clone()),
            |left, label| {
                write(&qemu.file("left"), left);
                assert_eq!(qemu.faults("left").0, 0, "{label}");
                let found = state("left");
                assert!(found == old || found == new, "{label}: {found:?}");
                assert!(qemu.raw("left") == content, "{label}");
            },
        );
        assert!(cuts > 3, "{options}: {cuts} cuts");
    }
}

/// The part of the disk that is written while its bitmaps are kept right.
const WRITTEN: (u64, usize) = (1536 << 10, 64 << 10);

/// Takes the bitmaps of the image in `given:`, writes to the disk, and stores the bitmaps again.
async fn write_with_bitmaps(registry: Registry) -> Result<()> {
    let slot = Arc::new(BitmapSlot::default());
    let registry = Registry { bitmaps: Arc::downgrade(&slot), ..registry };
    let spec = DeviceSpec::parse("qcow2:given:".as_ref()).unwrap();
    let stack = registry.open(&spec, Vec::new(), Intent::WRITE).await?;
    let store = slot.take().expect("a store");
    let mut found = store.take().await?;
    let (at, len) = WRITTEN;
    stack.device().write(at, Data::copy_of(&vec![9; len])).await?;
    stack.device().flush().await?;
    found.consistent.iter_mut().for_each(|one| one.dirty.push((at, len as u64)));
    store.store(found).await
}

#[test]
fn a_power_cut_leaves_bitmaps_that_lack_nothing_or_are_in_use() {
    let Some(qemu) = Qemu::find() else { return };
    let seed = rng::seed();
    eprintln!("BLOCKHAUL_SEED={seed}");
    for options in ["cluster_size=4k", "cluster_size=64k"] {
        qemu.create("top", options, 2 * MIB);
        for name in ["one", "two"] {
            change(&qemu.file("top"), name, ADD).unwrap();
            qemu.io("qcow2", "top", &["write -P 3 100k 800k".into()]);
        }
        let image = std::fs::read(qemu.file("top")).unwrap();
        let content = qemu.raw("top");
        let old = all_dirty(&qemu, "top");
        let end = WRITTEN.0 + WRITTEN.1 as u64;
        let covers = |ranges: &[(u64, u64)]| {
            ranges.iter().any(|&(at, len)| at <= WRITTEN.0 && at + len >= end)
        };
        let states = Cell::new([0; 3]);
        let count = |number: usize| {
            let mut all = states.get();
            all[number] += 1;
            states.set(all);
        };
        let cuts = cut_at_each_change(
            &Growing { image: &image, grows: true },
            options,
            seed,
            |device| {
                change_given(device, |registry| async move {
                    write_with_bitmaps(registry).await.is_ok()
                })
            },
            |left, label| {
                write(&qemu.file("left"), left);
                assert_eq!(qemu.faults("left").0, 0, "{label}");
                let found = bitmaps(&qemu, "left");
                assert_eq!(found.len(), 2, "{label}: {found:?}");
                if found.iter().all(|(_, _, flags)| flags.contains(&"in-use".to_string())) {
                    count(0);
                    return;
                }
                let dirty = all_dirty(&qemu, "left");
                if dirty.iter().all(|ranges| covers(ranges)) {
                    count(1);
                } else {
                    count(2);
                    assert_eq!(dirty, old, "{label}");
                    assert!(qemu.raw("left") == content, "{label}");
                }
            },
        );
        assert!(cuts > 3 && states.get().iter().all(|count| *count > 0), "{cuts} cuts, {states:?}");
    }
}

#[test]
fn bitmaps_are_taken_and_stored_and_no_cluster_is_lost() {
    let Some(qemu) = Qemu::find() else { return };
    for options in OPTIONS {
        write(&qemu.file("base"), &vec![7; MIB as usize]);
        qemu.create("top", options, 8 * MIB);
        for (name, granularity) in [("fine", 512), ("coarse", 1 << 20), ("gone", 4096)] {
            let add = BitmapChange::Add { granularity: Some(granularity), enabled: name != "fine" };
            change(&qemu.file("top"), name, add).unwrap();
        }
        let spec = qemu.spec("top", "names=allow");
        let runtime =
            Runtime::start(&RuntimeConfig { workers: 1, ..RuntimeConfig::default() }).unwrap();
        let stored = runtime.block_on(move || async move {
            let slot = Arc::new(BitmapSlot::default());
            let registry = Registry { bitmaps: Arc::downgrade(&slot), ..registry() };
            let spec = DeviceSpec::parse(spec.as_ref()).unwrap();
            let stack = registry.open(&spec, Vec::new(), Intent::WRITE).await?;
            let store = slot.take().expect("a store");
            store.check("another", 65536).await?;
            assert!(store.check("another", 1000).await.is_err());
            let mut found = store.take().await?;
            stack.device().write(MIB, Data::copy_of(&[1; 70000])).await?;
            found.consistent.retain(|one| one.name != "gone");
            for one in &mut found.consistent {
                one.dirty = vec![(0, 512), (MIB, 1 << 20), (3 * MIB, 5 * MIB)];
            }
            found.consistent[0].enabled = true;
            stack.device().flush().await?;
            store.store(found).await?;
            // What was stored is what is taken the next time.
            store.take().await?;
            let again = store.take().await?;
            assert_eq!((again.consistent.len(), again.inconsistent.len()), (0, 2));
            store
                .store(ImageBitmaps {
                    inconsistent: vec![("fine".into(), String::new())],
                    ..ImageBitmaps::default()
                })
                .await
        });
        stored.unwrap();
        let flags = vec!["in-use".to_string(), "auto".to_string()];
        assert_eq!(bitmaps(&qemu, "top"), [("fine".to_string(), 512, flags)], "{options}");
        qemu.check("top", options);
    }
}
