//! Devices that consist of other devices, by any description: their contents, the files below them,
//! and the errors of invalid ones.

use std::ffi::OsStr;
use std::path::Path;

use blockhaul_block::{Can, DeviceExt, Error, Facts, Kind, Result};
use blockhaul_catalog::{DeviceSpec, ExportClient, Intent, NamePolicy, OpenContext, Registry};
use blockhaul_io::{Runtime, RuntimeConfig};

fn registry() -> Registry {
    Registry {
        backends: crate::backends(),
        path: blockhaul_backends::PATH_SCHEME,
        ..Registry::default()
    }
}

/// The contents of a device, and its facts.
fn read(spec: &str, intent: Intent) -> Result<(Vec<u8>, Facts)> {
    let runtime =
        Runtime::start(&RuntimeConfig { workers: 1, ..RuntimeConfig::default() }).unwrap();
    let spec = DeviceSpec::parse(OsStr::new(spec)).unwrap();
    runtime.block_on(move || async move {
        let stack = registry().open(&spec, Vec::new(), intent).await?;
        let facts = Facts::clone(&stack.device().facts());
        let bytes = stack.device().read(0, facts.size as usize).await?.bytes().to_vec();
        Ok((bytes, facts))
    })
}

fn error(spec: &str) -> Error {
    read(spec, Intent::READ).err().unwrap_or_else(|| panic!("{spec} was opened"))
}

/// Files a, `b,c` and `d:e` of 512 bytes each.
fn files(dir: &Path) -> String {
    for (name, byte) in [("a", 1), ("b,c", 2), ("d:e", 3)] {
        std::fs::write(dir.join(name), vec![byte; 512]).unwrap();
    }
    dir.display().to_string()
}

#[test]
fn parts_may_be_any_devices() {
    let dir = tempfile::tempdir().unwrap();
    let at = files(dir.path());
    let block = |byte: u8| vec![byte; 512];
    let pattern = pattern(512);
    for (spec, wanted, files) in [
        (format!("split:{at}/a,{at}/b%2cc,{at}/d:e"), [block(1), block(2), block(3)], 3),
        (format!("split:{at}/a,data:7*512,file:{at}/a"), [block(1), block(7), block(1)], 2),
        (
            format!("split:{at}/a,pattern:512,data:1?size=512"),
            {
                let mut last = block(0);
                last[0] = 1;
                [block(1), pattern, last]
            },
            1,
        ),
        // A comma of the second part, and one of a name in it.
        (format!("split:{at}/a,split:{at}/d:e%2c{at}/b%252cc"), [block(1), block(3), block(2)], 3),
        // A percent sign is written %25 at each level.
        (format!("split:{at}/a,zero:512,file:{at}/b%252cc"), [block(1), block(0), block(2)], 2),
    ] {
        let (found, facts) =
            read(&spec, Intent::READ).unwrap_or_else(|error| panic!("{spec}: {error}"));
        assert_eq!(found, wanted.concat(), "{spec}");
        assert_eq!(facts.files.len(), files, "{spec}");
        let whole = read(&format!("{at}/a"), Intent::READ).unwrap().1;
        assert!(facts.files.contains(&whole.files[0]), "{spec}");
    }
}

/// The start of `pattern:`.
fn pattern(len: usize) -> Vec<u8> {
    read(&format!("pattern:{len}"), Intent::READ).unwrap().0
}

#[test]
fn files_are_the_files_that_they_were() {
    let dir = tempfile::tempdir().unwrap();
    let at = files(dir.path());
    for intent in [Intent::READ, Intent::WRITE] {
        let paths = read(&format!("split:{at}/a,{at}/d:e"), intent).unwrap().1;
        let schemes = read(&format!("split:file:{at}/a,file:{at}/d:e"), intent).unwrap().1;
        assert_eq!((&*paths.name, &*schemes.name), ("split of 2 files", "split of 2 devices"));
        let same = |facts: Facts| format!("{:?}", Facts { name: "".into(), ..facts });
        assert_eq!(same(paths), same(schemes));
    }
    // A read-only part makes all of it read-only.
    let mixed = read(&format!("split:{at}/a,zero:512"), Intent::WRITE).unwrap().1;
    assert!(!mixed.can.contains(blockhaul_block::Can::WRITE));
}

#[test]
fn partitions_may_be_any_devices() {
    let dir = tempfile::tempdir().unwrap();
    let at = files(dir.path());
    let spec = format!(
        "partitioning:{at}/a,data:7%3fsize=512?file=split:{at}/d:e%2c{at}/b%252cc&alignment=512"
    );
    let (found, facts) = read(&spec, Intent::READ).unwrap();
    let parts = [[1; 512], [7; 512], [3; 512], [2; 512]].concat();
    let mut wanted = parts.clone();
    wanted[513..1024].fill(0);
    assert_eq!(found[512..], wanted, "behind the table");
    assert_eq!(facts.files.len(), 3);
    assert_eq!(&*facts.name, "partitioning of 3 devices");
}

#[test]
fn errors_say_which_part_is_wrong() {
    let dir = tempfile::tempdir().unwrap();
    let at = files(dir.path());
    for (spec, kind, words) in [
        (format!("split:{at}/a,memory:1X"), Kind::Usage, &["split: part 2, memory:1X: ", "1X"][..]),
        (format!("split:{at}/a,nosuch:x"), Kind::Usage, &["part 2, nosuch:x: ", "unknown scheme"]),
        (format!("split:zero:1M,file:{at}/no"), Kind::NotFound, &["part 2, file:", "/no"]),
        (format!("split:{at}/a,zero:1M?colour=red"), Kind::Usage, &["part 2, zero:", "colour"]),
        (format!("split:{at}/a,-"), Kind::Usage, &["part 2, -: ", "pipe"]),
        (format!("split:{at}/a,x%2"), Kind::Usage, &["x%2", "hexadecimal"]),
        (
            format!("split:split:{at}/a%2cnosuch:y"),
            Kind::Usage,
            &["part 1, ", "part 2, nosuch:y: "],
        ),
        (
            format!("partitioning:{at}/a?file=memory:1X"),
            Kind::Usage,
            &["partitioning: part 2, memory:1X: "],
        ),
        ("split:".repeat(20) + "zero:1M", Kind::Usage, &["more than 16 devices"]),
        // As the file alone.
        (format!("split:{at}/a,{at}/no"), Kind::NotFound, &["/no"]),
    ] {
        let found = error(&spec);
        assert_eq!(found.kind(), kind, "{spec}: {found}");
        for word in words {
            assert!(found.to_string().contains(word), "{spec}: {found}");
        }
    }
    assert!(!error(&format!("split:{at}/a,{at}/no")).to_string().contains("part 2"));
}

#[test]
fn what_files_name_is_opened_only_where_it_is_allowed() {
    let runtime =
        Runtime::start(&RuntimeConfig { workers: 1, ..RuntimeConfig::default() }).unwrap();
    let (refused, size) = runtime.block_on(|| async {
        let context = OpenContext::new(&registry());
        let refused = context.open_named_in("disk.img", "memory:1M", Intent::READ).await.err();
        let allowed = Registry { names: NamePolicy::Allow, ..registry() };
        let context = OpenContext::new(&allowed);
        let opened = context.open_named_in("disk.img", "memory:1M", Intent::READ).await.unwrap();
        (refused.unwrap(), opened.device.facts().size)
    });
    assert_eq!((refused.kind(), size), (Kind::Refused, 1 << 20));
    assert!(refused.text().contains("disk.img names \"memory:1M\""), "{refused}");
}

#[test]
fn the_clients_of_a_directory_write_to_one_file() {
    let dir = tempfile::tempdir().unwrap();
    let spec = DeviceSpec::parse(OsStr::new(&format!("dir:{}", files(dir.path())))).unwrap();
    let runtime =
        Runtime::start(&RuntimeConfig { workers: 1, ..RuntimeConfig::default() }).unwrap();
    let writable = runtime.block_on(move || async move {
        let exports = registry().exports(&spec, &[], Intent::WRITE).await.unwrap().unwrap();
        let mut open = Vec::new();
        for _ in 0..3 {
            let visit = exports.admit(ExportClient::default()).await.unwrap();
            let export = visit.open("a", false).await.unwrap().unwrap();
            open.push((visit, export.device));
        }
        open.iter().all(|(_, device)| device.facts().can.contains(Can::WRITE))
    });
    assert!(writable, "a client has the file read-only");
}
