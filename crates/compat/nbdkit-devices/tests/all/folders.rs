//! Disks with the contents of a directory: `floppy:`, `linuxdisk:`, `iso:`.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use blockhaul_block::{BASE_ALLOCATION, Can, DeviceExt, Kind, Reply, Request, ZERO};
use blockhaul_catalog::{Intent, Registry, Spec};
use blockhaul_io::{Config, Runtime};
use blockhaul_testkit::tools::{Peer, Scratch, among_peers, output};

const LIMIT: Duration = Duration::from_secs(120);

/// More than the tests store on a disk.
const MOST: u64 = 128 << 20;

/// All bytes of a device up to [`MOST`], read in pieces that cross its parts.
fn read(spec: &str) -> blockhaul_block::Result<Vec<u8>> {
    let spec = spec.to_string();
    let runtime = Runtime::start(&Config { workers: 1, ..Config::default() }).unwrap();
    runtime.block_on(move || async move {
        let registry = Registry {
            backends: crate::backends(),
            path: blockhaul_backends::PATH_SCHEME,
            ..Registry::default()
        };
        let spec = Spec::parse(OsStr::new(&spec))?;
        let stack = registry.open(&spec, Vec::new(), Intent::READ).await?;
        let device = stack.device();
        let mut bytes = Vec::new();
        assert!(!device.facts().can.intersects(Can::CHANGES));
        let size = device.facts().size.min(MOST);
        while (bytes.len() as u64) < size {
            let at = bytes.len() as u64;
            let len = (size - at).min(999_999);
            bytes.extend_from_slice(device.read(at, len as usize).await?.bytes());
            let base = device.facts().context(BASE_ALLOCATION).unwrap();
            let Reply::Extents(lists) = device.submit(Request::extents(at, len, base)).await?
            else {
                panic!("no extents");
            };
            for (at, extent) in lists[0].ranges(at).filter(|(_, extent)| extent.state & ZERO != 0) {
                let part = &bytes[at as usize..(at + extent.len) as usize];
                assert!(part.iter().all(|&byte| byte == 0), "not zero from {at} on");
            }
        }
        Ok(bytes)
    })
}

/// A directory with all sorts of things; returns its files by path.
fn fill(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let long = format!("{} with a long name.text", "x".repeat(200));
    let mut files = BTreeMap::from([
        ("EMPTY".to_string(), Vec::new()),
        ("hello.txt".to_string(), b"hello\n".to_vec()),
        ("Ünïcödé 🙂.txt".to_string(), b"text".to_vec()),
        ("dir/sub/deep".to_string(), vec![7; 16384]),
        ("dir/cluster and a byte".to_string(), vec![8; 16385]),
        (format!("dir/{long}"), vec![9; 100_000]),
        ("thirteen.char".to_string(), b"13".to_vec()),
    ]);
    for number in 0..600 {
        files.insert(format!("many/a file of many {number}"), number.to_string().into_bytes());
    }
    for (name, bytes) in &files {
        let path = folder.join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, bytes).unwrap();
    }
    std::fs::create_dir(folder.join("nothing in it")).unwrap();
    std::os::unix::fs::symlink("hello.txt", folder.join("link")).unwrap();
    files
}

/// Reads FAT strictly according to its specification.
struct Fat<'a> {
    disk: &'a [u8],
    /// The next cluster of each.
    next: Vec<usize>,
    /// Width of cluster numbers in bits.
    bits: usize,
    /// The first cluster, and the root directory if it is not in one.
    data: usize,
    root: &'a [u8],
    cluster: usize,
}

fn number(bytes: &[u8], at: usize, len: usize) -> usize {
    bytes[at..at + len].iter().rev().fold(0, |sum, &byte| sum << 8 | usize::from(byte))
}

impl<'a> Fat<'a> {
    fn open(disk: &'a [u8]) -> Fat<'a> {
        assert_eq!(&disk[510..512], [0x55, 0xaa]);
        let start = number(disk, 0x1be + 8, 4) * 512;
        let boot = &disk[start..start + 512];
        assert_eq!((number(boot, 11, 2), &boot[510..]), (512, &[0x55, 0xaa][..]));
        assert_eq!(number(boot, 32, 4), number(disk, 0x1be + 12, 4), "sectors");
        let fat_len = match number(boot, 22, 2) {
            0 => number(boot, 36, 4) * 512,
            sectors => sectors * 512,
        };
        let at = start + number(boot, 14, 2) * 512;
        let fat = &disk[at..at + fat_len];
        assert!(fat == &disk[at + fat_len..at + 2 * fat_len], "the copy");
        let root = at + usize::from(boot[16]) * fat_len;
        let data = root + number(boot, 17, 2) * 32;
        let cluster = usize::from(boot[13]) * 512;
        let clusters = (start + number(boot, 32, 4) * 512 - data) / cluster;
        let (bits, name, about, kind) = match clusters {
            0..4085 => (12, b"FAT12   ", 36, 0x01),
            4085..65525 => (16, b"FAT16   ", 36, 0x0e),
            _ => (32, b"FAT32   ", 64, 0x0c),
        };
        assert_eq!((&boot[about + 18..about + 26], disk[0x1be + 4]), (&name[..], kind));
        if bits == 32 {
            assert_eq!(boot, &disk[start + 6 * 512..start + 7 * 512], "the copy");
        }
        let next = (0..clusters + 2).map(|index| match bits {
            12 => number(fat, index * 3 / 2, 2) >> (4 * (index % 2)) & 0xfff,
            bits => number(fat, index * bits / 8, bits / 8),
        });
        Fat { disk, next: next.collect(), bits, data, root: &disk[root..data], cluster }
    }

    /// The files and directories of the root directory, recursively.
    fn all(&self) -> BTreeMap<String, Vec<u8>> {
        let mut found = BTreeMap::new();
        let root = if self.bits == 32 { self.chain(2) } else { self.root.to_vec() };
        self.walk(&root, "", &mut found);
        found
    }

    fn chain(&self, first: usize) -> Vec<u8> {
        let mut bytes = Vec::new();
        let mut cluster = first;
        while (2..self.next.len()).contains(&cluster) {
            let at = self.data + (cluster - 2) * self.cluster;
            bytes.extend_from_slice(&self.disk[at..at + self.cluster]);
            cluster = self.next[cluster];
        }
        let end = if first == 0 { 0 } else { (1 << self.bits.min(28)) - 1 };
        assert_eq!(cluster, end, "the end of the chain of {first}");
        bytes
    }

    fn walk(&self, folder: &[u8], path: &str, found: &mut BTreeMap<String, Vec<u8>>) {
        let mut long = Vec::new();
        let mut sum = 0;
        let mut shorts = std::collections::HashSet::new();
        for entry in folder.chunks(32).take_while(|entry| entry[0] != 0) {
            if entry[11] == 0x0f {
                if entry[0] & 0x40 != 0 {
                    long.clear();
                }
                let units: Vec<u16> = (1..11)
                    .step_by(2)
                    .chain((14..26).step_by(2))
                    .chain([28, 30])
                    .map(|at| number(entry, at, 2) as u16)
                    .collect();
                long.splice(0..0, units);
                sum = entry[13];
                continue;
            }
            assert!(shorts.insert(entry[..11].to_vec()), "two of one short name");
            if entry[11] & 0x08 != 0 || entry[0] == b'.' {
                continue;
            }
            let name = if long.is_empty() {
                let text =
                    |part: &[u8]| String::from_utf8(part.to_vec()).unwrap().trim_end().to_string();
                match text(&entry[8..11]).as_str() {
                    "" => text(&entry[..8]),
                    extension => format!("{}.{extension}", text(&entry[..8])),
                }
            } else {
                let expected = entry[..11]
                    .iter()
                    .fold(0_u8, |sum, byte| sum.rotate_right(1).wrapping_add(*byte));
                assert_eq!(sum, expected);
                let end = long.iter().position(|&unit| unit == 0).unwrap_or(long.len());
                String::from_utf16(&long[..end]).unwrap()
            };
            long.clear();
            let first = number(entry, 20, 2) << 16 | number(entry, 26, 2);
            let name = format!("{path}{name}");
            if entry[11] & 0x10 != 0 {
                found.insert(format!("{name}/"), Vec::new());
                self.walk(&self.chain(first), &format!("{name}/"), found);
            } else {
                let mut bytes = self.chain(first);
                let size = number(entry, 28, 4);
                assert!(bytes.len() - size < self.cluster, "{name}");
                bytes.truncate(size);
                found.insert(name, bytes);
            }
        }
    }
}

/// The partition of a disk, as a separate file.
fn partition(scratch: &Scratch, disk: &[u8], end: usize) -> std::path::PathBuf {
    let path = scratch.file("partition");
    std::fs::write(&path, &disk[1 << 20..end]).unwrap();
    path
}

#[test]
fn a_floppy_holds_what_is_in_a_folder() {
    let scratch = Scratch::new().unwrap();
    let folder = scratch.file("folder");
    let mut files = fill(&folder);
    for folder in ["dir", "dir/sub", "many", "nothing in it"] {
        files.insert(format!("{folder}/"), Vec::new());
    }
    // One of each type, by size.
    for (options, bits) in [("", 12), ("?size=100000000&label=my label", 16), ("?size=1100M", 32)] {
        let disk = read(&format!("floppy:{}{options}", folder.display())).unwrap();
        let fat = Fat::open(&disk);
        assert_eq!(fat.bits, bits);
        let found = fat.all();
        let names = |files: &BTreeMap<String, Vec<u8>>| files.keys().cloned().collect::<Vec<_>>();
        assert_eq!(names(&found), names(&files));
        assert!(found == files, "contents differ");
        if bits == 16 {
            assert_eq!(disk.len(), 100_000_000);
        }
        let told = check(&scratch, &disk);
        assert!(told.is_empty() || told.contains("::/hello.txt"), "{told}");
    }
}

/// Checks a FAT disk with dosfstools, and returns the names in it, from mtools.
fn check(scratch: &Scratch, disk: &[u8]) -> String {
    let file = partition(scratch, disk, disk.len());
    // The part that was not read is empty.
    let part = std::fs::File::options().write(true).open(&file).unwrap();
    let sectors = number(disk, 0x1be + 12, 4) as u64;
    part.set_len(part.metadata().unwrap().len().max(sectors * 512)).unwrap();
    if let Some(fsck) = Peer::require("fsck.vfat") {
        let told = output(fsck.command().arg("-n").arg("-v").arg(&file), LIMIT).unwrap();
        assert!(told.status.success(), "{told:?}");
        assert!(!String::from_utf8_lossy(&told.stderr).contains("arning"), "{told:?}");
    }
    let Some(mdir) = Peer::require("mdir") else { return String::new() };
    let mut mdir = mdir.command();
    let told = mdir.env("LC_ALL", "C.UTF-8").arg("-i").arg(&file).args(["-b", "-/", "::/"]);
    let told = output(told, LIMIT).unwrap();
    assert!(told.status.success() || disk.len() < 2 << 20, "{told:?}");
    String::from_utf8_lossy(&told.stdout).into_owned()
}

#[test]
fn a_floppy_of_nothing_is_one_and_mistakes_are_told() {
    let scratch = Scratch::new().unwrap();
    let path = scratch.path().display();
    let disk = read(&format!("floppy:{path}")).unwrap();
    check(&scratch, &disk);
    assert!(Fat::open(&disk).all().is_empty());
    let cases = [
        ("floppy:".to_string(), "no directory", Kind::Usage),
        ("floppy:/no/such".to_string(), "/no/such", Kind::NotFound),
        (format!("floppy:{path}?size=1M"), "is too small", Kind::Usage),
        (format!("floppy:{path}?label=twelve chars"), "11 ASCII", Kind::Usage),
        (format!("floppy:{path}?size=3T"), "2 TiB", Kind::Usage),
    ];
    for (spec, part, kind) in cases {
        let error = read(&spec).err().unwrap();
        assert!(error.to_string().contains(part), "{spec}: {error}");
        assert_eq!(error.kind(), kind, "{spec}");
    }
}

#[test]
fn a_linux_disk_holds_what_is_in_a_folder() {
    let e2fsck = blockhaul_testkit::require_peer!("e2fsck");
    let debugfs = blockhaul_testkit::require_peer!("debugfs");
    let sfdisk = blockhaul_testkit::require_peer!("sfdisk");
    blockhaul_testkit::require_peer!("mke2fs");
    let scratch = Scratch::new().unwrap();
    let folder = scratch.file("folder");
    fill(&folder);
    for options in ["", "?type=ext4&label=mine", "?size=20M", "?size=%2b10M"] {
        let disk = read(&format!("linuxdisk:{}{options}", folder.display())).unwrap();
        let whole = scratch.file("disk");
        std::fs::write(&whole, &disk).unwrap();
        let mut command = sfdisk.command();
        let told = output(command.arg("--verify").arg(&whole), LIMIT).unwrap();
        assert!(String::from_utf8_lossy(&told.stdout).contains("No errors"), "{told:?}");
        let file = partition(&scratch, &disk, disk.len() - 33 * 512);
        let size = file.metadata().unwrap().len();
        match options {
            "?size=20M" => assert_eq!(size, 20 << 20),
            "?size=%2b10M" => assert!(size > 10 << 20),
            "?type=ext4&label=mine" => assert_eq!(&disk[(1 << 20) + 1144..][..5], b"mine\0"),
            _ => assert!(size < 10 << 20),
        }
        let mut command = e2fsck.command();
        let told = output(command.arg("-fn").arg(&file), LIMIT).unwrap();
        assert!(told.status.success(), "{told:?}");
        let mut command = debugfs.command();
        let told = output(command.args(["-R", "cat /hello.txt"]).arg(&file), LIMIT).unwrap();
        assert_eq!(told.stdout, b"hello\n");
    }
    let path = folder.display();
    let cases = [
        ("linuxdisk:".to_string(), "no directory"),
        (format!("linuxdisk:{path}?size=+x"), "not a size"),
        (format!("linuxdisk:{path}?size=64k"), "mke2fs failed"),
        (format!("linuxdisk:{path}?type=xfs"), "not one of ext2"),
    ];
    for (spec, part) in cases {
        let error = read(&spec).err().unwrap();
        assert!(error.to_string().contains(part), "{spec}: {error}");
    }
}

#[test]
fn a_cd_holds_what_is_in_folders() {
    let xorriso = match among_peers("xorriso") {
        Ok(command) => command,
        Err(reason) => return blockhaul_testkit::tools::skip_or_fail(&reason),
    };
    let scratch = Scratch::new().unwrap();
    let folder = scratch.file("folder");
    let other = scratch.file("it's another, one");
    fill(&folder);
    std::fs::create_dir(&other).unwrap();
    std::fs::write(other.join("second file"), "the second one").unwrap();
    // The program under its own name, which determines how it is called.
    let program = scratch.file("xorriso");
    let words: Vec<_> = std::iter::once(xorriso.get_program()).chain(xorriso.get_args()).collect();
    let words = words.iter().map(|word| format!("'{}'", word.display())).collect::<Vec<_>>();
    std::fs::write(&program, format!("#!/bin/sh\nexec {} \"$@\"\n", words.join(" "))).unwrap();
    let mut command = Command::new("chmod");
    output(command.arg("+x").arg(&program), LIMIT).unwrap();
    let spec = format!(
        "iso:{}?dir={}&params=-JrT -V 'My disk'&prog={}",
        folder.display(),
        other.display(),
        program.display()
    );
    let disk = read(&spec).unwrap();
    assert_eq!(&disk[32769..32774], b"CD001");
    assert_eq!(&disk[32808..32816], b"My disk ");
    for part in [&b"hello\n"[..], b"the second one", b"second file", &[9; 100_000]] {
        assert!(disk.windows(part.len()).any(|window| window == part), "{part:?}");
    }
    let cases = [
        ("iso:".to_string(), "no directory"),
        (format!("iso:{}?prog=/no/such", folder.display()), "failed"),
        (format!("iso:{}?what=x", folder.display()), "unknown option"),
        ("iso:/no/such?prog=true".to_string(), "/no/such"),
    ];
    for (spec, part) in cases {
        let error = read(&spec).err().unwrap();
        assert!(error.to_string().contains(part), "{spec}: {error}");
    }
}
