//! Images get other backing files, or write their data down: QEMU finds no fault and the same disk,
//! also after a power cut.

use std::path::Path;
use std::sync::Arc;

use blockhaul_block::{Device, Kind, Result};
use blockhaul_catalog::{NamePolicy, OpenContext};
use blockhaul_formats::qcow2::backing_change::{
    BackingName, RebaseMode, SnapshotPolicy, commit, rebase,
};
use blockhaul_io::{Runtime, RuntimeConfig};
use blockhaul_testkit::rng::{self, Rng};
use serde_json::Value;

use crate::common::{Qemu, registry, write};
use crate::power::{Growing, change_given, cut_at_each_change};

const MIB: u64 = 1 << 20;

/// Runs `work` with the devices of the formats, and files that images name.
fn on_worker<T, F>(work: impl FnOnce(OpenContext) -> F + Send + 'static) -> T
where
    T: Send + 'static,
    F: Future<Output = T> + 'static,
{
    let runtime =
        Runtime::start(&RuntimeConfig { workers: 1, ..RuntimeConfig::default() }).unwrap();
    runtime.block_on(move || {
        let context = OpenContext::new(&registry()).with_names(NamePolicy::Allow);
        work(context)
    })
}

fn name(name: &str, format: &str) -> BackingName {
    BackingName { name: name.into(), format: format.into() }
}

fn rebased(path: &Path, new: Option<BackingName>, how: RebaseMode) -> Result<u64> {
    let description = format!("file:{}", path.display());
    on_worker(move |context| async move {
        let changed =
            rebase(&context, &description, new.as_ref(), how, SnapshotPolicy::Refuse, &|_, _| ())
                .await?;
        assert_eq!(changed.snapshots, 0);
        Ok(changed.bytes)
    })
}

fn committed(path: &Path, keep: bool) -> Result<u64> {
    let description = format!("file:{}", path.display());
    on_worker(move |context| async move {
        let changed =
            commit(&context, &description, None, keep, SnapshotPolicy::Refuse, &|_, _| ()).await?;
        assert_eq!(changed.snapshots, 0);
        Ok(changed.bytes)
    })
}

fn info(qemu: &Qemu, image: &str) -> Value {
    serde_json::from_str(&qemu.img(&["info", "--output=json", image])).unwrap()
}

/// Changes parts of an image at random.
fn scribble(qemu: &Qemu, image: &str, format: &str, size: u64, rng: &mut Rng) {
    let commands: Vec<String> = (0..8)
        .map(|_| {
            let at = rng.below(size / 512) * 512;
            let len = (rng.below(400) + 1) * 512;
            let len = len.min(size - at);
            match rng.below(6) {
                0 => format!("write -z {at} {len}"),
                1 if format == "qcow2" => format!("write -z -u {at} {len}"),
                2 => format!("discard {at} {len}"),
                _ => format!("write -P {} {at} {len}", rng.below(255) + 1),
            }
        })
        .collect();
    qemu.io(format, image, &commands);
}

/// Makes a backing file with content.
fn base(qemu: &Qemu, image: &str, format: &str, size: u64, rng: &mut Rng) {
    qemu.img(&["create", "-q", "-f", format, image, &size.to_string()]);
    scribble(qemu, image, format, size, rng);
}

const OPTIONS: [&str; 4] = [
    "cluster_size=64k",
    "cluster_size=4k,refcount_bits=64",
    "cluster_size=64k,extended_l2=on",
    "cluster_size=512,compat=0.10",
];

#[test]
fn a_disk_stays_as_it_is_over_another_backing_file() {
    let Some(qemu) = Qemu::find() else { return };
    let seed = rng::seed();
    eprintln!("BLOCKHAUL_SEED={seed}");
    let mut rng = Rng::new(seed);
    let formats = ["raw", "qcow2"];
    for (round, options) in OPTIONS.into_iter().cycle().take(8).enumerate() {
        let label = format!("{options}, seed {seed}, round {round}");
        let sizes = [MIB, 2 * MIB, 3 * MIB + 512];
        let format = |rng: &mut Rng| formats[rng.below(2) as usize];
        let size = |rng: &mut Rng| sizes[rng.below(3) as usize];
        let (old, new) = (format(&mut rng), format(&mut rng));
        base(&qemu, "old", old, size(&mut rng), &mut rng);
        std::fs::copy(qemu.file("old"), qemu.file("new")).unwrap();
        if new != old || rng.below(2) == 0 {
            base(&qemu, "new", new, size(&mut rng), &mut rng);
        } else {
            scribble(&qemu, "new", new, MIB, &mut rng);
        }
        let disk = size(&mut rng);
        let text = disk.to_string();
        let create = ["create", "-q", "-f", "qcow2", "-o", options, "-b", "old", "-F", old];
        qemu.img(&[&create[..], &["top", &text]].concat());
        scribble(&qemu, "top", "qcow2", disk, &mut rng);
        let before = qemu.raw("top");
        let new = (rng.below(4) > 0).then(|| name("new", new));
        let how = if rng.below(2) == 0 { RebaseMode::Safe } else { RebaseMode::Compressed };
        rebased(&qemu.file("top"), new.clone(), how).unwrap();
        std::fs::remove_file(qemu.file("old")).unwrap();
        qemu.check("top", &label);
        let after = qemu.raw("top");
        let differs = after.iter().zip(&before).position(|(one, other)| one != other);
        assert!(after == before, "{label}: {new:?}: {differs:?} of {}", before.len());
        let found = info(&qemu, "top");
        let (path, format) = match &new {
            Some(new) => (new.name.as_str().into(), new.format.as_str().into()),
            None => (Value::Null, Value::Null),
        };
        assert_eq!(found["backing-filename"], path, "{label}");
        assert_eq!(found["backing-filename-format"], format, "{label}");
    }
}

#[test]
fn what_a_rebase_writes_can_be_compressed() {
    let Some(qemu) = Qemu::find() else { return };
    let text: Vec<u8> = (0..9 * MIB + 512).map(|n| (n % 1009 * n % 23) as u8 + b'a').collect();
    write(&qemu.file("base"), &text);
    for (options, most) in [
        ("cluster_size=64k", 3 * MIB),
        ("cluster_size=64k,extended_l2=on,compression_type=zstd", 3 * MIB),
        ("cluster_size=2M,compression_type=zstd", 3 * MIB),
        ("cluster_size=4k,compat=0.10", 6 * MIB),
    ] {
        let create =
            ["create", "-q", "-f", "qcow2", "-o", options, "-b", "base", "-F", "raw", "top"];
        qemu.img(&create);
        qemu.io("qcow2", "top", &["write -P 3 100k 3k".into(), "write -z 2M 64k".into()]);
        let before = qemu.raw("top");
        let empty = std::fs::metadata(qemu.file("top")).unwrap().len();
        let written = rebased(&qemu.file("top"), None, RebaseMode::Compressed).unwrap();
        assert!(written > 2 * MIB, "{options}: {written}");
        qemu.check("top", options);
        assert!(qemu.raw("top") == before, "{options}");
        let found: Value =
            serde_json::from_str(&qemu.img(&["check", "-f", "qcow2", "--output=json", "top"]))
                .unwrap();
        assert!(found["compressed-clusters"].as_u64().unwrap_or(0) >= 1, "{options}: {found}");
        let len = std::fs::metadata(qemu.file("top")).unwrap().len();
        assert!(len - empty < most, "{options}: {empty}, then {len} bytes");
    }
}

#[test]
fn data_is_written_down() {
    let Some(qemu) = Qemu::find() else { return };
    let seed = rng::seed();
    eprintln!("BLOCKHAUL_SEED={seed}");
    let mut rng = Rng::new(seed);
    for (round, options) in OPTIONS.into_iter().cycle().take(8).enumerate() {
        let label = format!("{options}, seed {seed}, round {round}");
        let format = ["raw", "qcow2"][rng.below(2) as usize];
        base(&qemu, "base", format, 3 * MIB, &mut rng);
        let size = [2 * MIB, 3 * MIB][rng.below(2) as usize].to_string();
        let create = ["create", "-q", "-f", "qcow2", "-o", options, "-b", "base", "-F", format];
        qemu.img(&[&create[..], &["top", &size]].concat());
        scribble(&qemu, "top", "qcow2", 2 * MIB, &mut rng);
        let before = qemu.raw("top");
        let old_base = qemu.img(&["info", "--output=json", "base"]);
        assert!(!old_base.is_empty());
        let keep = rng.below(2) == 0;
        committed(&qemu.file("top"), keep).unwrap();
        qemu.check("top", &label);
        assert!(qemu.raw("top") == before, "{label}");
        qemu.img(&["convert", "-f", format, "-O", "raw", "base", "base.raw"]);
        let base = std::fs::read(qemu.file("base.raw")).unwrap();
        assert!(base[..before.len()] == before, "{label}: the backing file");
        if format == "qcow2" {
            qemu.check("base", &label);
        }
        let map: Vec<Value> =
            serde_json::from_str(&qemu.img(&["map", "-f", "qcow2", "--output=json", "top"]))
                .unwrap();
        let own = map.iter().filter(|run| run["depth"] == 0 && run["present"] == true).count();
        assert_eq!(own > 0, keep, "{label}: {map:?}");
    }
}

#[test]
fn changes_that_are_not_possible_are_refused_and_change_nothing() {
    let Some(qemu) = Qemu::find() else { return };
    write(&qemu.file("base"), &vec![7; MIB as usize]);
    qemu.create("top", "backing_file=base,backing_fmt=raw,cluster_size=512,compat=0.10", 2 * MIB);
    qemu.io("qcow2", "top", &["write -P 3 0 64k".into()]);
    qemu.create("alone", "cluster_size=64k", MIB);
    let before = std::fs::read(qemu.file("top")).unwrap();
    let top = qemu.file("top");
    for (result, wanted) in [
        (rebased(&top, Some(name(&"x".repeat(500), "raw")), RebaseMode::Unsafe), "has 500 bytes"),
        (rebased(&top, Some(name("missing", "raw")), RebaseMode::Safe), "missing"),
        (rebased(&top, Some(name("top", "qcow2")), RebaseMode::Safe), "top"),
        (rebased(&top, Some(name("base", "odd")), RebaseMode::Safe), "odd"),
        (committed(&top, false), "blockhaul resize"),
        (committed(&qemu.file("alone"), false), "no backing file"),
    ] {
        let said = result.unwrap_err().to_string();
        assert!(said.contains(wanted), "{wanted}: {said}");
    }
    assert!(std::fs::read(&top).unwrap() == before);
    // An enabled bitmap of the backing file would be wrong.
    qemu.create("base2", "cluster_size=64k", 2 * MIB);
    qemu.img(&["bitmap", "--add", "base2", "b"]);
    qemu.create("top2", "backing_file=base2,backing_fmt=qcow2", 2 * MIB);
    qemu.io("qcow2", "top2", &["write -P 3 0 64k".into()]);
    let said = committed(&qemu.file("top2"), false).unwrap_err().to_string();
    assert!(said.contains("blockhaul bitmap disable"), "{said}");
}

#[test]
fn a_power_cut_leaves_the_same_disk() {
    let Some(qemu) = Qemu::find() else { return };
    let seed = rng::seed();
    eprintln!("BLOCKHAUL_SEED={seed}");
    let old = qemu.file("old").display().to_string();
    let new = qemu.file("new").display().to_string();
    write(&qemu.file("old"), &vec![7; MIB as usize]);
    let mut content = vec![7; MIB as usize];
    content[300 << 10..400 << 10].fill(9);
    write(&qemu.file("new"), &content);
    for (options, new) in [
        ("cluster_size=4k", Some(name(&new, "raw"))),
        ("cluster_size=64k", Some(name(&new, "raw"))),
        ("cluster_size=4k", None),
    ] {
        qemu.img(&["create", "-q", "-f", "qcow2", "-o", options, "-b", &old, "-F", "raw", "top"]);
        qemu.io("qcow2", "top", &["write -P 3 100k 100k".into()]);
        let image = std::fs::read(qemu.file("top")).unwrap();
        let disk = qemu.raw("top");
        let cuts = cut_at_each_change(
            &Growing { image: &image, grows: true },
            &format!("{options}, {new:?}"),
            seed,
            |device| rebase_given(device, new.clone()),
            |left, label| {
                write(&qemu.file("left"), left);
                assert_eq!(qemu.faults("left").0, 0, "{label}");
                assert!(qemu.raw("left") == disk, "{label}");
            },
        );
        assert!(cuts > 3, "{options}: {cuts} cuts");
    }
}

/// A snapshot shows the backing file where it has nothing itself.
#[test]
fn images_with_snapshots_are_refused_unless_these_may_change() {
    let Some(qemu) = Qemu::find() else { return };
    let snapshot = || {
        let args = ["convert", "-O", "raw", "-l", "snapshot.name=monday", "img", "snapshot.raw"];
        qemu.img(&args);
        std::fs::read(qemu.file("snapshot.raw")).unwrap()
    };
    for base in ["base", "other"] {
        qemu.img(&["create", "-q", "-f", "qcow2", base, "1M"]);
    }
    qemu.io("qcow2", "base", &["write -P 1 0 1M".into()]);
    qemu.img(&["create", "-q", "-f", "qcow2", "-b", "base", "-F", "qcow2", "img"]);
    qemu.img(&["snapshot", "-c", "monday", "img"]);
    qemu.io("qcow2", "img", &["write -P 3 0 64k".into()]);
    let path = qemu.file("img");
    let [image, below] = ["img", "base"].map(|name| std::fs::read(qemu.file(name)).unwrap());
    let before = snapshot();
    let other = || Some(name("other", "qcow2"));
    let refused = [
        rebased(&path, other(), RebaseMode::Safe),
        rebased(&path, None, RebaseMode::Safe),
        rebased(&path, None, RebaseMode::Compressed),
        rebased(&path, other(), RebaseMode::Unsafe),
        committed(&path, false),
        committed(&path, true),
    ];
    for result in refused {
        let error = result.unwrap_err();
        assert_eq!(error.kind(), Kind::Unsupported);
        assert!(error.to_string().contains("internal snapshots (1)"), "{error}");
    }
    assert!(std::fs::read(&path).unwrap() == image, "the image was changed");
    assert!(std::fs::read(qemu.file("base")).unwrap() == below, "its backing file was changed");
    let description = format!("file:{}", path.display());
    let changed = on_worker(move |context| async move {
        rebase(&context, &description, None, RebaseMode::Safe, SnapshotPolicy::Change, &|_, _| ())
            .await
    });
    assert_eq!(changed.unwrap().snapshots, 1);
    assert!(snapshot() != before, "it would not have to be refused");
}

/// Gives the image in a device another backing file; whether that has succeeded.
fn rebase_given(device: Arc<dyn Device>, new: Option<BackingName>) -> bool {
    change_given(device, move |registry| async move {
        let context = OpenContext::new(&registry).with_names(NamePolicy::Allow);
        let none = SnapshotPolicy::Refuse;
        rebase(&context, "given:", new.as_ref(), RebaseMode::Safe, none, &|_, _| ()).await.is_ok()
    })
}
