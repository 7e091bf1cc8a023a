//! Snapshots, bitmaps, images over other devices, and what QEMU's tools leave at the end of a file.

use blockhaul_block::{Can, ContextSet, DeviceExt as _, LeaseAccess};
use blockhaul_catalog::{Intent, NamePolicy, Registry};
use blockhaul_io::Data;
use blockhaul_testkit::rng::Rng;

use crate::common::{Qemu, content, error, extents, facts, read_all, with, write};

const CLUSTER: u64 = 64 << 10;

#[test]
fn a_snapshot_shows_the_disk_as_it_was() {
    let Some(qemu) = Qemu::find() else { return };
    qemu.create("top", "cluster_size=4k", 4 << 20);
    qemu.io("qcow2", "top", &["write -P 1 0 1m".into(), "write -c -P 2 2m 64k".into()]);
    let first = qemu.raw("top");
    qemu.img(&["snapshot", "-c", "before the upgrade", "top"]);
    qemu.io("qcow2", "top", &["write -P 3 512k 2m".into()]);
    qemu.img(&["snapshot", "-c", "later", "top"]);
    qemu.img(&["resize", "-q", "top", "5M"]);
    qemu.io("qcow2", "top", &["write -P 4 0 5m".into()]);
    let second = {
        qemu.img(&["convert", "-O", "raw", "-l", "later", "top", "later.raw"]);
        std::fs::read(qemu.file("later.raw")).unwrap()
    };
    let snapshot = |name: &str| read_all(&qemu.spec("top", &format!("snapshot={name}")));
    assert!(snapshot("before%20the%20upgrade").unwrap() == first);
    assert!(snapshot("1").unwrap() == first, "by its number");
    let later = snapshot("later").unwrap();
    assert_eq!(later.len(), 4 << 20, "the size that the disk had");
    assert!(later[..] == second[..4 << 20]);
    assert!(read_all(&qemu.spec("top", "")).unwrap() == vec![4; 5 << 20]);
    let text = error(&qemu.spec("top", "snapshot=none"));
    assert!(text.contains("\"before the upgrade\", \"later\""), "{text}");
}

// nbd: meta.name, meta.namespace
#[test]
fn a_bitmap_is_a_context_with_what_was_written_since() {
    let Some(qemu) = Qemu::find() else { return };
    let size = 40 << 20;
    qemu.create("top", "cluster_size=512", size);
    qemu.img(&["bitmap", "--add", "-g", "512", "top", "fine"]);
    qemu.img(&["bitmap", "--add", "-g", "64k", "top", "coarse"]);
    let mut rng = Rng::new(7);
    let writes: Vec<_> = (0..40)
        .map(|_| {
            let at = rng.below(size / 512 - 2000) * 512;
            (at, rng.between(1, 1999) * 512)
        })
        .collect();
    let commands: Vec<_> =
        writes.iter().map(|(at, len)| format!("write -P 1 {at} {len}")).collect();
    qemu.io("qcow2", "top", &commands);
    with(&qemu.spec("top", ""), move |device| async move {
        for (name, granularity) in [("fine", 512), ("coarse", 64 << 10)] {
            let context = device.facts().context(&format!("qemu:dirty-bitmap:{name}")).unwrap();
            let found = extents(&device, context).await.unwrap();
            let mut wanted = vec![0; (size / granularity) as usize];
            for &(at, len) in &writes {
                let last = (at + len - 1) / granularity;
                wanted[(at / granularity) as usize..=last as usize].fill(1);
            }
            for (at, run) in found.ranges(0) {
                let bits = at / granularity..(at + run.len) / granularity;
                assert!(
                    bits.clone().all(|bit| wanted[bit as usize] == run.state),
                    "{name} {bits:?}"
                );
            }
            assert_eq!(found.total(), size);
            // From within a bit.
            let list = &device.extents(1000, 7, context).await.unwrap()[0];
            assert_eq!(
                (list.total(), list.runs()[0].state),
                (7, wanted[1000 / granularity as usize])
            );
        }
    });
    // A program that knows no bitmaps has written to the image: bit 0 of the auto-clear features.
    let mut bytes = std::fs::read(qemu.file("top")).unwrap();
    bytes[95] &= !1;
    write(&qemu.file("stale"), &bytes);
    assert_eq!(
        facts(&qemu.spec("stale", "")).contexts,
        ["base:allocation", "qemu:allocation-depth"]
    );
}

#[test]
fn a_snapshot_has_no_bitmaps() {
    let Some(qemu) = Qemu::find() else { return };
    qemu.create("top", "cluster_size=4k", 1 << 20);
    qemu.img(&["bitmap", "--add", "top", "b"]);
    qemu.img(&["snapshot", "-c", "s", "top"]);
    assert_eq!(facts(&qemu.spec("top", "")).contexts[2], "qemu:dirty-bitmap:b");
    assert_eq!(facts(&qemu.spec("top", "snapshot=s")).contexts.len(), 2);
}

#[test]
fn an_image_may_be_in_any_device() {
    let Some(qemu) = Qemu::find() else { return };
    qemu.create("top", "cluster_size=64k", 1 << 20);
    qemu.io("qcow2", "top", &["write -P 9 70k 300k".into()]);
    let bytes = std::fs::read(qemu.file("top")).unwrap();
    let half = bytes.len() / 2 / 512 * 512;
    write(&qemu.file("one"), &bytes[..half]);
    write(&qemu.file("two"), &bytes[half..]);
    let one = qemu.file("one");
    let two = qemu.file("two");
    let split = format!("qcow2:split:{},{}", one.display(), two.display());
    assert!(read_all(&split).unwrap() == qemu.raw("top"));
    let file = format!("qcow2:file:{}%3flock=off", qemu.file("top").display());
    assert!(read_all(&file).unwrap() == qemu.raw("top"));
}

#[test]
fn clusters_that_were_allocated_and_never_written_are_holes() {
    let Some(qemu) = Qemu::find() else { return };
    qemu.create("top", "preallocation=metadata", 64 << 20);
    qemu.io("qcow2", "top", &["write -P 1 8m 1m".into(), "write -P 1 40m 64k".into()]);
    let map = qemu.img(&["map", "-f", "qcow2", "--output=json", "top"]);
    let map: Vec<serde_json::Value> = serde_json::from_str(&map).unwrap();
    with(&qemu.spec("top", ""), move |device| async move {
        let found = extents(&device, ContextSet::first()).await.unwrap();
        let data: Vec<_> = found.ranges(0).filter(|(_, run)| run.state == 0).collect();
        let data: Vec<_> = data.iter().map(|(at, run)| (*at, run.len)).collect();
        assert_eq!(data, [(8 << 20, 1 << 20), (40 << 20, 64 << 10)]);
        let wanted: u64 = map
            .iter()
            .filter(|one| one["zero"] == false)
            .filter_map(|one| one["length"].as_u64())
            .sum();
        assert_eq!(wanted, (1 << 20) + (64 << 10), "as QEMU");
    });
}

#[test]
fn plain_clusters_are_leased_as_ranges_of_the_file() {
    let Some(qemu) = Qemu::find() else { return };
    let size = 8 * CLUSTER;
    std::fs::File::create(qemu.file("base")).unwrap().set_len(size).unwrap();
    qemu.io("raw", "base", &[format!("write -P 3 0 {size}")]);
    qemu.create("top", "cluster_size=64k,backing_file=base,backing_fmt=raw", size);
    qemu.io(
        "qcow2",
        "top",
        &[
            "write -P 1 64k 128k".into(),
            "write -c -P 2 256k 64k".into(),
            "write -z 320k 64k".into(),
        ],
    );
    with(&qemu.spec("top", "names=allow"), move |device| async move {
        // Reads the tables.
        content(&device).await.unwrap();
        let lease = |cluster: u64| {
            device.file_at(cluster * CLUSTER, size - cluster * CLUSTER, LeaseAccess::Read)
        };
        let below = lease(0).unwrap();
        assert_eq!((below.at, below.len), (0, CLUSTER), "from the backing file, up to the image's");
        let own = lease(1).unwrap();
        assert_eq!(own.len, 2 * CLUSTER);
        assert!(lease(4).is_none() && lease(5).is_none(), "compressed, zero");
        assert!(device.file_at(CLUSTER, 1, LeaseAccess::Write).is_none());
    });
}

/// Why an image is not opened for writing.
fn refused(qemu: &Qemu, options: &str) -> String {
    let before = std::fs::read(qemu.file("top")).unwrap();
    let opened = crate::common::write_with(&qemu.spec("top", options), |_| async {});
    assert!(std::fs::read(qemu.file("top")).unwrap() == before, "nothing is written");
    opened.unwrap_err().to_string()
}

#[test]
fn what_would_not_stay_right_is_not_written() {
    let Some(qemu) = Qemu::find() else { return };
    qemu.create("top", "cluster_size=64k", 1 << 20);
    assert!(!facts(&qemu.spec("top", "")).can.contains(Can::WRITE));
    let good = std::fs::read(qemu.file("top")).unwrap();
    for (bits, wanted) in [(1, "dirty"), (2, "corrupt"), (1 << 7, "unknown")] {
        let mut bytes = good.clone();
        bytes[79] = bits;
        write(&qemu.file("top"), &bytes);
        let text = refused(&qemu, "");
        assert!(text.contains(wanted), "{text}");
    }
    write(&qemu.file("top"), &good);
    qemu.img(&["snapshot", "-c", "one", "top"]);
    assert!(refused(&qemu, "snapshot=one").contains("read-only"));
    qemu.img(&["bitmap", "--add", "top", "changes"]);
    let text = refused(&qemu, "");
    assert!(text.contains("changes") && text.contains("bitmap disable"), "{text}");
}

#[test]
fn disabled_bitmaps_stay_and_unknown_features_are_cleared() {
    let Some(qemu) = Qemu::find() else { return };
    qemu.create("top", "cluster_size=64k", 1 << 20);
    qemu.img(&["bitmap", "--add", "top", "changes"]);
    qemu.io("qcow2", "top", &["write -P 1 128k 64k".into()]);
    qemu.img(&["bitmap", "--disable", "top", "changes"]);
    let mut bytes = std::fs::read(qemu.file("top")).unwrap();
    // An auto-clear feature that nobody knows.
    bytes[90] = 1;
    write(&qemu.file("top"), &bytes);
    let written = crate::common::write_with(&qemu.spec("top", ""), |device| async move {
        device.write(0, Data::copy_of(&[7; 4096])).await
    });
    written.unwrap().unwrap();
    let bytes = std::fs::read(qemu.file("top")).unwrap();
    assert_eq!(bytes[88..96], [0, 0, 0, 0, 0, 0, 0, 1], "bitmaps are consistent");
    qemu.check("top", "a disabled bitmap");
    with(&qemu.spec("top", ""), |device| async move {
        let context = device.facts().context("qemu:dirty-bitmap:changes").unwrap();
        let list = crate::common::extents(&device, context).await.unwrap();
        let states: Vec<_> = list.runs().iter().map(|run| (run.len, run.state)).collect();
        assert_eq!(states, [(128 << 10, 0), (64 << 10, 1), (832 << 10, 0)]);
    });
}

#[test]
fn the_last_cluster_of_a_file_may_be_incomplete_but_not_missing() {
    let Some(qemu) = Qemu::find() else { return };
    qemu.create("top", "cluster_size=64k", 1 << 20);
    qemu.io("qcow2", "top", &["write -P 5 0 128k".into()]);
    let bytes = std::fs::read(qemu.file("top")).unwrap();
    let end = bytes.iter().rposition(|&byte| byte == 5).unwrap() + 1;
    write(&qemu.file("cut"), &bytes[..end - 1000]);
    let mut wanted = qemu.raw("top");
    wanted[(128 << 10) - 1000..128 << 10].fill(0);
    assert!(read_all(&qemu.spec("cut", "")).unwrap() == wanted);
    write(&qemu.file("cut"), &bytes[..end - (64 << 10)]);
    let text = error(&qemu.spec("cut", ""));
    assert!(text.contains("offset 65536 of the disk") && text.contains("truncated"), "{text}");
}

#[test]
fn many_requests_at_once_share_one_cluster_and_one_table() {
    let Some(qemu) = Qemu::find() else { return };
    qemu.create("top", "cluster_size=2M,compression_type=zstd", 16 << 20);
    qemu.io("qcow2", "top", &["write -c -P 7 0 8m".into()]);
    let wanted = qemu.raw("top");
    with(&qemu.spec("top", "cache=0"), move |device| async move {
        let reads: Vec<_> = (0..256)
            .map(|number| {
                let at = number * 37 * 997 % (9 << 20);
                (at, device.read(at, 40_000))
            })
            .collect();
        for (at, read) in reads {
            let at = at as usize;
            assert!(read.await.unwrap().bytes() == &wanted[at..at + 40_000], "{at}");
        }
        let one = device.extents(0, 16 << 20, ContextSet::first()).await.unwrap();
        assert_eq!(one[0].runs()[0].len, 8 << 20);
    });
}

#[test]
fn the_policy_of_the_program_applies_where_the_description_has_none() {
    let Some(qemu) = Qemu::find() else { return };
    qemu.create("base", "cluster_size=64k", 1 << 20);
    qemu.create("top", "backing_file=base,backing_fmt=qcow2", 1 << 20);
    let spec = qemu.spec("top", "");
    let text = error(&spec);
    assert!(text.contains("names=allow") && text.contains("backing=DEVICE"), "{text}");
    let runtime = blockhaul_io::Runtime::start(&blockhaul_io::RuntimeConfig::default()).unwrap();
    let opened = runtime.block_on(move || async move {
        let registry = Registry { names: NamePolicy::Allow, ..crate::common::registry() };
        let spec = blockhaul_catalog::DeviceSpec::parse(spec.as_ref()).unwrap();
        registry
            .open(&spec, Vec::new(), Intent::READ)
            .await
            .map(|stack| stack.device().facts().size)
    });
    assert_eq!(opened.unwrap(), 1 << 20);
}
