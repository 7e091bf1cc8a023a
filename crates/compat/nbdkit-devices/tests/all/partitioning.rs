//! `partitioning:` compared with nbdkit's plugin: the same disks; and sfdisk reads their tables.

use std::ffi::OsStr;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use blockhaul_block::{DeviceExt, Kind, Request};
use blockhaul_catalog::{DeviceSpec, Intent, Registry, Stack};
use blockhaul_io::{Data, Runtime, RuntimeConfig};
use blockhaul_testkit::tools::{PeerProgram, ScratchDir, output};

const LIMIT: Duration = Duration::from_secs(120);

async fn open(spec: String, intent: Intent) -> blockhaul_block::Result<Stack> {
    let registry = Registry {
        backends: crate::backends(),
        path: blockhaul_backends::PATH_SCHEME,
        ..Registry::default()
    };
    registry.open(&DeviceSpec::parse(OsStr::new(&spec))?, Vec::new(), intent).await
}

fn run<T: Send + 'static, F: Future<Output = T> + 'static>(
    job: impl FnOnce() -> F + Send + 'static,
) -> T {
    Runtime::start(&RuntimeConfig { workers: 1, ..RuntimeConfig::default() }).unwrap().block_on(job)
}

fn ours(spec: &str) -> blockhaul_block::Result<Vec<u8>> {
    let spec = spec.to_string();
    run(move || async move {
        let stack = open(spec, Intent::READ).await?;
        let device = stack.device();
        let mut bytes = Vec::new();
        while (bytes.len() as u64) < device.facts().size {
            let len = (device.facts().size - bytes.len() as u64).min(1 << 20);
            bytes.extend_from_slice(device.read(bytes.len() as u64, len as usize).await?.bytes());
        }
        Ok(bytes)
    })
}

fn theirs(nbdkit: &PeerProgram, dir: &Path, parameters: &[&str]) -> Vec<u8> {
    let out = dir.join("out");
    let _ = std::fs::remove_file(&out);
    let mut command = nbdkit.command();
    command.current_dir(dir).arg("--exit-with-parent").arg("partitioning").args(parameters);
    command.arg("--run").arg(format!("nbdcopy \"$uri\" {}", out.display())).stdin(Stdio::null());
    let output = output(&mut command, LIMIT).unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    std::fs::read(&out).unwrap()
}

/// Files `a`, `b`, … of these sizes with different bytes, in the directory `dir`.
fn files(dir: &Path, sizes: &[usize]) -> Vec<String> {
    let names = (b'a'..).zip(sizes).map(|(letter, &size)| {
        std::fs::write(dir.join(char::from(letter).to_string()), vec![letter; size]).unwrap();
        char::from(letter).to_string()
    });
    names.collect()
}

/// The first difference, except for random GUIDs and the checksums over them in a GPT with 128
/// entries.
fn difference(ours: &[u8], theirs: &[u8], gpt: bool) -> Option<usize> {
    assert_eq!(ours.len(), theirs.len());
    let random = |at: usize| {
        let header = |at: usize| (16..20).contains(&at) || (88..92).contains(&at);
        let entry = |at: usize| at < 128 * 128 && (16..32).contains(&(at % 128));
        let from_end = ours.len() - at;
        gpt && match at {
            512..1024 => header(at - 512),
            1024..17408 => entry(at - 1024),
            _ if from_end <= 512 => header(512 - from_end),
            _ if from_end <= 33 * 512 => entry(33 * 512 - from_end),
            _ => false,
        }
    };
    (0..ours.len()).find(|&at| ours[at] != theirs[at] && !random(at))
}

#[test]
fn disks_are_those_of_nbdkit() {
    let nbdkit = blockhaul_testkit::require_peer!("nbdkit");
    blockhaul_testkit::require_peer!("nbdcopy");
    let scratch = ScratchDir::new().unwrap();
    let sizes = [1, 511, 2 << 20, 1023, 12_345, 513, 512];
    let names = files(scratch.path(), &sizes);
    let cases: &[(usize, &str, &[&str])] = &[
        (1, "", &[]),
        (4, "", &[]),
        (
            4,
            "alignment=512,1024&mbr-id=0x82,default,0x7,010",
            &[
                "alignment=512",
                "mbr-id=0x82",
                "0",
                "alignment=1024",
                "mbr-id=default",
                "1",
                "mbr-id=7",
                "2",
                "mbr-id=010",
                "3",
            ],
        ),
        (7, "partition-type=mbr", &["partition-type=mbr"]),
        (5, "partition-type=mbr&alignment=4k", &["partition-type=dos", "alignment=4k"]),
        (7, "", &[]),
        (
            2,
            "partition-type=gpt&type-guid=default,{A2A0D0EB-E5B9-3344-87C0-68B6B72699C7}",
            &["partition-type=gpt", "0", "type-guid=A2A0D0EB-E5B9-3344-87C0-68B6B72699C7", "1"],
        ),
    ];
    for (count, options, parameters) in cases {
        let names = &names[..*count];
        // Digits stand for files; without any, all come last.
        let mut parameters: Vec<&str> = parameters.to_vec();
        let mut placed = 0;
        for word in &mut parameters {
            if let Ok(index) = word.parse::<usize>() {
                (*word, placed) = (&names[index], placed + 1);
            }
        }
        parameters.extend(names[placed..].iter().map(String::as_str));
        let theirs = theirs(&nbdkit, scratch.path(), &parameters);
        // Names are in the table, and so must be short.
        let dir = scratch.path().display();
        let paths: Vec<_> = names.iter().map(|name| format!("{dir}/{name}")).collect();
        let mut ours = ours(&format!("partitioning:{}?{options}", paths.join(","))).unwrap();
        let gpt = ours[0x1be + 4] == 0xee;
        if gpt {
            for (index, path) in paths.iter().enumerate() {
                for table in [1024, ours.len() - 33 * 512] {
                    let name = &mut ours[table + index * 128 + 56..][..72];
                    let told: Vec<u8> = name.iter().step_by(2).copied().collect();
                    let told = String::from_utf8(told).unwrap();
                    let short = path.len() < 36;
                    assert_eq!(told.trim_end_matches('\0'), if short { path } else { "" });
                    name.fill(0);
                    name[0] = names[index].as_bytes()[0];
                }
            }
        }
        assert_eq!(difference(&ours, &theirs, gpt), None, "{count} files, {options}");
    }
}

#[test]
fn sfdisk_finds_the_partitions() {
    let sfdisk = blockhaul_testkit::require_peer!("sfdisk");
    let scratch = ScratchDir::new().unwrap();
    let sizes = [1, 511, 2 << 20, 1023, 12_345, 513, 512];
    let names = files(scratch.path(), &sizes);
    let paths = names.iter().map(|name| scratch.file(name).display().to_string());
    let paths = paths.collect::<Vec<_>>().join(",");
    for (options, label, first, count) in
        [("partition-type=mbr", "dos", 2048, 8), ("partition-type=gpt", "gpt", 2048, 7)]
    {
        let disk = scratch.file("disk");
        std::fs::write(&disk, ours(&format!("partitioning:{paths}?{options}")).unwrap()).unwrap();
        let mut command = sfdisk.command();
        command.arg("--dump").arg(&disk);
        let told = output(&mut command, LIMIT).unwrap();
        // sfdisk reports a wrong checksum there.
        assert_eq!(String::from_utf8_lossy(&told.stderr), "");
        let told = String::from_utf8(told.stdout).unwrap();
        assert!(told.contains(&format!("label: {label}\n")), "{told}");
        let lines: Vec<_> = told.lines().filter(|line| line.contains("start=")).collect();
        assert_eq!(lines.len(), count, "{told}");
        assert!(lines[0].replace(' ', "").contains(&format!("start={first},size=1,")), "{told}");
        let mut command = sfdisk.command();
        command.arg("--verify").arg(&disk);
        let told = output(&mut command, LIMIT).unwrap();
        assert!(String::from_utf8_lossy(&told.stdout).contains("No errors"), "{told:?}");
    }
}

#[test]
fn types_have_names() {
    let sfdisk = blockhaul_testkit::require_peer!("sfdisk");
    let scratch = ScratchDir::new().unwrap();
    let names = files(scratch.path(), &[512; 7]);
    let paths = names.iter().map(|name| scratch.file(name).display().to_string());
    let paths = paths.collect::<Vec<_>>();
    let disk = scratch.file("disk");
    // The names of sfdisk for the types.
    let gpt = [
        "EFI System",
        "BIOS boot",
        "Linux filesystem",
        "Linux swap",
        "Linux LVM",
        "Linux RAID",
        "Linux home",
    ];
    let mbr = ["ef", "82", "8e", "fd"];
    for (count, options, types) in [
        (7, "partition-type=gpt&type-guid=efi,bios,linux,swap,lvm,RAID,home", &gpt[..]),
        (4, "mbr-id=efi,swap,lvm,raid", &mbr[..]),
    ] {
        let spec = format!("partitioning:{}?{options}", paths[..count].join(","));
        std::fs::write(&disk, ours(&spec).unwrap()).unwrap();
        let column = if count == 7 { "Type" } else { "Id" };
        let mut command = sfdisk.command();
        command.args(["--list", "--output", column]).arg(&disk);
        let told = output(&mut command, LIMIT).unwrap();
        let told = String::from_utf8(told.stdout).unwrap();
        let found: Vec<_> = told.lines().skip_while(|line| *line != column).skip(1).collect();
        assert_eq!(found.iter().map(|line| line.trim()).collect::<Vec<_>>(), types, "{told}");
    }
}

#[test]
fn partitions_can_be_written_and_tables_cannot() {
    let scratch = ScratchDir::new().unwrap();
    let names = files(scratch.path(), &[4096, 4000]);
    let paths: Vec<_> = names.iter().map(|name| scratch.file(name)).collect();
    let spec = format!("partitioning:{},{}", paths[0].display(), paths[1].display());
    run(move || async move {
        let stack = open(spec, Intent::WRITE).await.unwrap();
        let device = stack.device();
        assert_eq!(device.facts().size, (2 << 20) + 4096);
        device.write((1 << 20) + 5, Data::copy_of(b"first")).await.unwrap();
        device.submit(Request::zero(2 << 20, 2000)).await.unwrap();
        let start = device.read(0, 512).await.unwrap();
        device.write(0, start).await.unwrap();
        // Across the end of a partition: zeroes can be written there.
        device.write((2 << 20) + 3999, Data::copy_of(b"x\0\0")).await.unwrap();
        for (at, bytes) in [(510, b"\0\0"), (5000, b"ab"), ((2 << 20) + 4000, b"\0b")] {
            let error = device.write(at, Data::copy_of(bytes)).await.unwrap_err();
            assert_eq!(error.kind(), Kind::Io, "{at}: {error}");
        }
        device.flush().await.unwrap();
    });
    let first = std::fs::read(&paths[0]).unwrap();
    let second = std::fs::read(&paths[1]).unwrap();
    assert_eq!((&first[..12], first.len()), (&b"aaaaafirstaa"[..], 4096));
    assert_eq!((second[1999], second[2000], &second[3998..]), (0, b'b', &b"bx"[..]));
}

#[test]
fn mistakes_are_told() {
    let scratch = ScratchDir::new().unwrap();
    files(scratch.path(), &[1, 0]);
    let cases = [
        ("partitioning:", "requires files"),
        ("partitioning:{}/b", "is empty"),
        ("partitioning:{}/a?alignment=100", "multiple of 512"),
        ("partitioning:{}/a?alignment=2M", "multiple of 512"),
        ("partitioning:{}/a?mbr-id=0x100", "0x00 to 0xff"),
        ("partitioning:{}/a?mbr-id=1,2", "2 values for 1 files"),
        ("partitioning:{}/a?type-guid=x", "write a GUID, or linux, efi, uefi, bios, swap"),
        ("partitioning:{}/a?type-guid=efi", "use mbr-id, or partition-type=gpt"),
        ("partitioning:{}/a?partition-type=gpt&mbr-id=efi", "use type-guid"),
        ("partitioning:{}/a?mbr-id=bios", "0x00 to 0xff, or linux, efi, uefi, swap"),
        ("partitioning:{}/a?partition-type=x", "not one of mbr"),
        ("partitioning:?files=x", "unknown option \"files\""),
    ];
    for (spec, part) in cases {
        let spec = spec.replace("{}", &scratch.path().display().to_string());
        let error = ours(&spec).err().unwrap();
        assert_eq!(error.kind(), Kind::Usage, "{spec}");
        assert!(error.to_string().contains(part), "{spec}: {error}");
    }
}
