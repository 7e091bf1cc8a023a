//! Bad images of the formats that are only read: truncated, with tables beyond the end, with wrong
//! checksums, and with random changes. Each is read or refused with a clear error, in bounded time.

use std::time::Duration;

use blockhaul_block::{ContextSet, DeviceExt as _};
use blockhaul_catalog::Intent;
use blockhaul_io::{Runtime, RuntimeConfig};
use blockhaul_testkit::rng::{self, Rng};

use crate::common::{Qemu, error, open, read_all, write};

/// Longest time for one image.
const LIMIT: Duration = Duration::from_secs(20);

/// A small image with data at its start, and in the middle; its bytes.
fn image(qemu: &Qemu, format: &str, options: &str) -> Vec<u8> {
    write(&qemu.file("disk"), &[0; 4 << 20]);
    qemu.io("raw", "disk", &["write -P 5 0 300k".into(), "write -P 6 2M 300k".into()]);
    let mut args = vec!["convert", "-f", "raw", "-O", format, "disk", "image"];
    if !options.is_empty() {
        args.splice(5..5, ["-o", options]);
    }
    qemu.img(&args);
    std::fs::read(qemu.file("image")).unwrap()
}

fn spec(qemu: &Qemu, scheme: &str) -> String {
    format!("{scheme}:{}", qemu.file("image").display())
}

#[track_caller]
fn refused(qemu: &Qemu, scheme: &str, bytes: &[u8], parts: &[&str]) {
    eprintln!("{scheme}: expected {parts:?}");
    write(&qemu.file("image"), bytes);
    let text = error(&spec(qemu, scheme));
    for part in parts {
        assert!(text.contains(part), "{part:?} in {text}");
    }
    assert!(text.len() < 500, "{text}");
}

fn put(bytes: &[u8], at: usize, field: &[u8]) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    bytes[at..at + field.len()].copy_from_slice(field);
    bytes
}

#[test]
fn other_files_are_no_images() {
    let Some(qemu) = Qemu::find() else { return };
    for scheme in ["vdi", "vhd", "vhdx", "vmdk"] {
        for len in [0, 1, 63, 511, 512, 513, 70_000] {
            refused(&qemu, scheme, &vec![7; len], &["image: use file:PATH"]);
        }
    }
}

#[test]
fn images_that_end_early_are_refused() {
    let Some(qemu) = Qemu::find() else { return };
    let formats = [
        ("vdi", "vdi", ""),
        ("vhd", "vpc", "force_size=on"),
        ("vhdx", "vhdx", "block_size=1M"),
        ("vmdk", "vmdk", ""),
    ];
    for (scheme, qemu_name, options) in formats {
        let bytes = image(&qemu, qemu_name, options);
        assert_eq!(read_all(&spec(&qemu, scheme)).unwrap().len(), 4 << 20);
        for part in [1, 3, 10, 40, 70, 90] {
            let cut = &bytes[..bytes.len() * part / 100 / 512 * 512];
            refused(&qemu, scheme, cut, &[scheme]);
        }
    }
    // Those with a footer need their last sectors.
    let bytes = read_all(&format!("as-vmdk:{}", qemu.file("disk").display())).unwrap();
    for part in [0, 1, 50, 90, 99] {
        let cut = &bytes[..bytes.len() * part / 100 / 512 * 512];
        refused(&qemu, "vmdk", cut, &["vmdk"]);
    }
}

#[test]
fn damaged_vdi_images_are_refused() {
    let Some(qemu) = Qemu::find() else { return };
    let good = image(&qemu, "vdi", "");
    let map = 512;
    refused(&qemu, "vdi", &put(&good, map, &[9, 0, 0, 0]), &["block 0 of the disk is block 9"]);
    refused(&qemu, "vdi", &put(&good, map, &[0xfd, 0xff, 0xff, 0xff]), &["block 0", "beyond"]);
    refused(&qemu, "vdi", &put(&good, 368, &u64::MAX.to_le_bytes()), &["a disk of"]);
    refused(&qemu, "vdi", &put(&good, 368, &(1_u64 << 50).to_le_bytes()), &["header says 4"]);
    let large = put(&good, 376, &(1_u32 << 31).to_le_bytes());
    refused(&qemu, "vdi", &large, &["blocks of 2147483648 bytes"]);
    // 2^32 - 1 blocks of 256 MiB in a short file.
    let absurd = put(&put(&good, 376, &(1_u32 << 28).to_le_bytes()), 384, &[0xff; 4]);
    let absurd = put(&absurd, 368, &(1_u64 << 59).to_le_bytes());
    refused(&qemu, "vdi", &absurd, &["block map", "exceeds"]);
}

#[test]
fn damaged_vhd_images_are_refused() {
    let Some(qemu) = Qemu::find() else { return };
    let good = image(&qemu, "vpc", "force_size=on");
    // The copy of the footer is used if the first one is damaged.
    write(&qemu.file("image"), &put(&good, 100, &[1]));
    assert_eq!(read_all(&spec(&qemu, "vhd")).unwrap()[..1], [5]);
    let both = put(&put(&good, 100, &[1]), good.len() - 400, &[1]);
    refused(&qemu, "vhd", &both, &["checksum", "the footer"]);
    refused(&qemu, "vhd", &put(&good, 600, &[1]), &["checksum", "the header"]);
    let table = 1536;
    refused(&qemu, "vhd", &put(&good, table, &[0; 4]), &["block 0", "offset 0"]);
    refused(
        &qemu,
        "vhd",
        &put(&good, table, &[0xff, 0xff, 0xff, 0xfe]),
        &["block 0", "not within"],
    );
}

#[test]
fn damaged_vhdx_images_are_refused() {
    let Some(qemu) = Qemu::find() else { return };
    let good = image(&qemu, "vhdx", "block_size=1M");
    let [one, other] = [(64 << 10) + 100, (128 << 10) + 100];
    write(&qemu.file("image"), &put(&good, one, &[1]));
    assert_eq!(read_all(&spec(&qemu, "vhdx")).unwrap()[..1], [5]);
    refused(&qemu, "vhdx", &put(&put(&good, one, &[1]), other, &[1]), &["both headers"]);
    let [one, other] = [(192 << 10) + 100, (256 << 10) + 100];
    refused(&qemu, "vhdx", &put(&put(&good, one, &[1]), other, &[1]), &["both region tables"]);
    let bat = 2 << 20;
    for entry in [5_u64, 7, 4] {
        let text = format!("state {entry}");
        refused(&qemu, "vhdx", &put(&good, bat, &entry.to_le_bytes()), &["block 0", &text]);
    }
    for entry in [6_u64, 6 | 1 << 40, !1] {
        refused(&qemu, "vhdx", &put(&good, bat, &entry.to_le_bytes()), &["block 0", "not within"]);
    }
    refused(&qemu, "vhdx", &put(&good, 3 << 20, b"x"), &["metadata table"]);
}

/// The identifier of the metadata item "logical sector size" ([MS-VHDX] 2.6.2.4), as it is stored.
const LOGICAL_SECTOR: [u8; 16] = [
    0x1d, 0xbf, 0x41, 0x81, 0x6f, 0xa9, 0x09, 0x47, 0xba, 0x47, 0xf2, 0x33, 0xa8, 0xfa, 0xab, 0x5f,
];

/// The offset of that item in an image.
fn place_of_sector(image: &[u8]) -> usize {
    let entry = image.windows(16).position(|bytes| bytes == LOGICAL_SECTOR).unwrap();
    let offset = image[entry + 16..entry + 20].try_into().unwrap();
    // The region of metadata begins with its table.
    let region = image.windows(8).position(|bytes| bytes == b"metadata").unwrap();
    region + u32::from_le_bytes(offset) as usize
}

#[test]
fn the_logical_sectors_of_a_vhdx_are_the_minimum_block_of_exports() {
    let Some(qemu) = Qemu::find() else { return };
    let good = image(&qemu, "vhdx", "block_size=1M");
    let place = place_of_sector(&good);
    let wanted = std::fs::read(qemu.file("disk")).unwrap();
    for sector in [512_u32, 4096] {
        write(&qemu.file("image"), &put(&good, place, &sector.to_le_bytes()));
        let spec = spec(&qemu, "vhdx");
        assert!(read_all(&spec).unwrap() == wanted, "{sector}");
        let facts = crate::common::facts(&spec);
        let advertised = facts.advertised.unwrap();
        assert_eq!((advertised.minimum, advertised.preferred), (sector, 4096));
        // Callers in this program read any bytes.
        assert_eq!(facts.block.minimum, 1);
        // One of the two headers is enough.
        let [one, other] = [(64 << 10) + 100, (128 << 10) + 100];
        for damaged in [one, other] {
            let sectors = put(&good, place, &sector.to_le_bytes());
            write(&qemu.file("image"), &put(&sectors, damaged, &[1]));
            assert_eq!(crate::common::facts(&spec).advertised, Some(advertised));
        }
    }
    for sector in [0_u32, 1, 513, 1024, 8192, u32::MAX] {
        let text = format!("sectors of {sector} bytes");
        refused(&qemu, "vhdx", &put(&good, place, &sector.to_le_bytes()), &[&text]);
    }
}

#[test]
fn damaged_vmdk_images_are_refused() {
    let Some(qemu) = Qemu::find() else { return };
    let good = image(&qemu, "vmdk", "");
    let long = |at: usize| u64::from_le_bytes(good[at..at + 8].try_into().unwrap());
    let directory = long(56) as usize * 512;
    let table =
        u32::from_le_bytes(good[directory..directory + 4].try_into().unwrap()) as usize * 512;
    let refuse = |at: usize, field: &[u8], parts: &[&str]| {
        refused(&qemu, "vmdk", &put(&good, at, field), parts);
    };
    refuse(4, &[9], &["version 9"]);
    refuse(20, &[3], &["grains of 1536 bytes"]);
    refuse(20, &[0], &["grains of 0 bytes"]);
    refuse(44, &[0; 4], &["tables of 0 grains"]);
    refuse(44, &[0xff; 4], &["tables of 4294967295 grains"]);
    refuse(12, &[0xff; 8], &["sectors in the header"]);
    refuse(12, &(1_u64 << 50).to_le_bytes(), &["directory of grains", "exceeds"]);
    refuse(56, &(1_u64 << 40).to_le_bytes(), &["directory of grains", "exceeds"]);
    refuse(36, &(1_u64 << 40).to_le_bytes(), &["the descriptor"]);
    refuse(directory, &[0xff; 4], &["table of grain 0", "exceeds"]);
    refuse(table, &[0xff; 4], &["grain 0", "not within"]);
    let stream = image(&qemu, "vmdk", "subformat=streamOptimized");
    // The first grain follows the header.
    let first =
        stream.windows(2).position(|two| two == [0x78, 0x9c] || two == [0x78, 0xda]).unwrap();
    let bad = |at: usize, field: &[u8], parts: &[&str]| {
        refused(&qemu, "vmdk", &put(&stream, at, field), parts);
    };
    bad(first, &[0, 0], &["cannot unpack", "offset 0 of the disk"]);
    bad(first - 12, &[1], &["marker", "sector 1"]);
    bad(first - 4, &[0xff; 4], &["compressed bytes"]);
    bad(first - 4, &[1, 0, 0, 0], &["cannot unpack"]);
    let stream = read_all(&format!("as-vmdk:{}", qemu.file("disk").display())).unwrap();
    let end = stream.len() - 1024;
    refused(&qemu, "vmdk", &put(&stream, end, b"x"), &["no footer"]);
    refused(&qemu, "vmdk", &put(&stream, end + 56, &[0xff; 8]), &["no footer"]);
    refused(&qemu, "vmdk", &put(&stream, end + 56, &[0xff; 4]), &["directory of grains"]);
}

#[test]
fn a_descriptor_cannot_have_files_opened() {
    let Some(qemu) = Qemu::find() else { return };
    image(&qemu, "vmdk", "subformat=monolithicFlat");
    let text = error(&spec(&qemu, "vmdk"));
    assert!(text.contains("names=allow") && text.contains("extent=DEVICE"), "{text}");
    let flat = qemu.file("image-flat");
    let own = format!("{}?extent={}", spec(&qemu, "vmdk"), flat.display());
    assert_eq!(read_all(&own).unwrap()[..1], [5]);
    for path in ["/etc/hostname", "../../etc/hostname", "nbd://host/x"] {
        let text =
            format!("# Disk DescriptorFile\nCID=1\nparentCID=ffffffff\nRW 1 FLAT \"{path}\" 0\n");
        refused(&qemu, "vmdk", text.as_bytes(), &["which is not opened", "vmdk:…?names=allow"]);
    }
    let text =
        "# Disk DescriptorFile\nCID=1\nparentCID=2\nparentFileNameHint=\"/etc/x\"\nRW 1 ZERO\n";
    refused(&qemu, "vmdk", text.as_bytes(), &["which is not opened", "backing=DEVICE"]);
}

/// Numbers that find mistakes at boundaries.
const NUMBERS: [u64; 10] =
    [0, 1, 511, 512, 1 << 16, 1 << 31, u32::MAX as u64, i64::MAX as u64, 1 << 63, u64::MAX];

fn change(rng: &mut Rng, bytes: &mut Vec<u8>, tables: &[usize]) {
    for _ in 0..rng.between(1, 4) {
        if bytes.len() < 1024 {
            return;
        }
        let at = (*rng.pick(tables) + rng.below(512) as usize).min(bytes.len() - 8);
        match rng.below(6) {
            0 => bytes[at] ^= 1 << rng.below(8),
            1 => bytes[at & !7..][..8].copy_from_slice(&rng.pick(&NUMBERS).to_le_bytes()),
            2 => bytes[at & !3..][..4].copy_from_slice(&(*rng.pick(&NUMBERS) as u32).to_le_bytes()),
            3 => bytes.truncate(rng.below(bytes.len() as u64) as usize),
            4 => {
                let from = rng.below(bytes.len() as u64 - 8) as usize & !7;
                bytes.copy_within(from..from + 8, at & !7);
            }
            _ => bytes[at & !7..][..8].copy_from_slice(&rng.number().to_le_bytes()),
        }
    }
}

/// Makes the checksums right again, so that changes of checked structures reach the readers.
fn fix_sums(scheme: &str, bytes: &mut [u8]) {
    if scheme == "vhd" {
        for (at, len, field) in [(0, 512, 64), (512, 1024, 36)] {
            let Some(part) = bytes.get_mut(at..at + len) else { return };
            part[field..field + 4].fill(0);
            let sum = !part.iter().fold(0_u32, |sum, &byte| sum.wrapping_add(byte.into()));
            part[field..field + 4].copy_from_slice(&sum.to_be_bytes());
        }
    }
    if scheme == "vhdx" {
        for (at, len) in [(64 << 10, 4 << 10), (128 << 10, 4 << 10), (192 << 10, 64 << 10)] {
            let Some(part) = bytes.get_mut(at..at + len) else { return };
            part[4..8].fill(0);
            let sum = crate::readers::crc32c(part);
            part[4..8].copy_from_slice(&sum.to_le_bytes());
        }
    }
}

/// Opens an image, and reads some of it; errors are fine.
async fn visit(spec: &str, seed: u64) {
    let Ok(stack) = open(spec, Intent::READ).await else { return };
    let device = stack.device().clone();
    let mut rng = Rng::new(seed);
    let size = device.facts().size;
    if size == 0 {
        return;
    }
    let mut at = 0;
    for _ in 0..8 {
        match device.extents(at, size - at, ContextSet::first()).await {
            Ok(lists) if at + lists[0].total() < size => at += lists[0].total(),
            _ => break,
        }
    }
    for round in 0..6 {
        let at = if round % 2 == 0 { rng.below(size.min(4 << 20)) } else { rng.below(size) };
        let len = rng.between(1, (size - at).min(200 << 10));
        let _ = device.read(at, len as usize).await;
    }
}

#[test]
fn random_changes_are_survived() {
    let Some(qemu) = Qemu::find() else { return };
    let rounds = if std::env::var_os("BLOCKHAUL_LONG").is_some() { 20_000 } else { 250 };
    let runtime =
        Runtime::start(&RuntimeConfig { workers: 2, ..RuntimeConfig::default() }).unwrap();
    let seed = rng::seed();
    eprintln!("BLOCKHAUL_SEED={seed}");
    let mib = 1 << 20;
    let with_log = crate::readers::with_log(&qemu);
    let originals = [
        ("vdi", image(&qemu, "vdi", ""), vec![64, 340, 512]),
        ("vhd", image(&qemu, "vpc", ""), vec![0, 512, 1024, 1536]),
        (
            "vhdx",
            image(&qemu, "vhdx", "block_size=1M"),
            vec![64 << 10, 192 << 10, 2 * mib, 3 * mib],
        ),
        ("vhdx", with_log, vec![64 << 10, mib, mib + 4096, mib + 16384, 2 * mib, 3 * mib]),
        ("vmdk", image(&qemu, "vmdk", ""), vec![0, 512, 0x2a00, 0x2c00, 0x3000]),
        ("vmdk", image(&qemu, "vmdk", "subformat=streamOptimized"), vec![0, 512, 65536, 66000]),
    ];
    for (scheme, original, tables) in originals {
        let mut tables = tables;
        tables.push(original.len().saturating_sub(1536));
        for round in 0..rounds {
            let seed = seed.wrapping_add(round);
            let mut rng = Rng::new(seed);
            let mut bytes = original.clone();
            change(&mut rng, &mut bytes, &tables);
            if rng.chance(80) {
                fix_sums(scheme, &mut bytes);
            }
            write(&qemu.file("image"), &bytes);
            let spec = spec(&qemu, scheme);
            let ended = runtime.block_on(move || async move {
                blockhaul_io::timeout(LIMIT, visit(&spec, seed)).await.is_ok()
            });
            assert!(ended, "{scheme}: BLOCKHAUL_SEED={seed}: not at an end after {LIMIT:?}");
        }
    }
}
