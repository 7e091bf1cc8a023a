//! Differencing images of Hyper-V and Virtual PC, which QEMU cannot make: its dynamic images, turned
//! into ones over a parent.

use std::process::Command;

use crate::common::{Qemu, error, read_all, write};
use crate::readers::{BAT, HEADERS, crc32c};

const MIB: usize = 1 << 20;
const SIZE: usize = 8 * MIB;

/// Parent and child with data, and the contents of the disk in the child.
struct Pair {
    child: Vec<u8>,
    parent: Vec<u8>,
    wanted: Vec<u8>,
}

/// Makes both images: of block 2 of the child, only the first 100 sectors, and sector 150, are its
/// own; block 3 is all its own, and the others are the parent's.
fn make(qemu: &Qemu, format: &str, options: &str, block: usize) -> Pair {
    let create = |name: &str| {
        qemu.img(&["create", "-q", "-f", format, "-o", options, name, &SIZE.to_string()]);
        let size = qemu.img(&["info", "-f", format, "--output=json", name]);
        let size: serde_json::Value = serde_json::from_str(&size).unwrap();
        assert_eq!(size["virtual-size"], SIZE);
    };
    create("parent");
    create("child");
    let own = [(2 * block, 100 * 512), (2 * block + 150 * 512, 512), (3 * block, block)];
    let own: Vec<_> = own.into_iter().filter(|(at, _)| *at < SIZE).collect();
    qemu.io(format, "parent", &[format!("write -P 1 0 {}", 2 * block + 160 * 512)]);
    let writes: Vec<_> = own.iter().map(|(at, len)| format!("write -P 2 {at} {len}")).collect();
    qemu.io(format, "child", &writes);
    let mut wanted = vec![0; SIZE];
    wanted[..2 * block + 160 * 512].fill(1);
    own.iter().for_each(|(at, len)| wanted[*at..at + len].fill(2));
    let [child, parent] = ["child", "parent"].map(|name| std::fs::read(qemu.file(name)).unwrap());
    Pair { child, parent, wanted }
}

fn put(bytes: &mut [u8], at: usize, field: &[u8]) {
    bytes[at..at + field.len()].copy_from_slice(field);
}

fn utf16(text: &str) -> Vec<u8> {
    text.encode_utf16().flat_map(u16::to_le_bytes).collect()
}

/// A parent locator with these keys.
fn locator(pairs: &[(&str, &str)]) -> Vec<u8> {
    let mut bytes = vec![
        0xb7, 0xef, 0x4a, 0xb0, 0x9e, 0xd1, 0x81, 0x4a, 0xb7, 0x89, 0x25, 0xb8, 0xe9, 0x44, 0x59,
        0x13,
    ];
    bytes.extend_from_slice(&[0, 0]);
    bytes.extend_from_slice(&(pairs.len() as u16).to_le_bytes());
    let mut texts = Vec::new();
    let start = 20 + 12 * pairs.len();
    for (key, value) in pairs {
        let [key, value] = [utf16(key), utf16(value)];
        let at = start + texts.len();
        bytes.extend_from_slice(&(at as u32).to_le_bytes());
        bytes.extend_from_slice(&((at + key.len()) as u32).to_le_bytes());
        bytes.extend_from_slice(&(key.len() as u16).to_le_bytes());
        bytes.extend_from_slice(&(value.len() as u16).to_le_bytes());
        texts.extend(key);
        texts.extend(value);
    }
    bytes.extend(texts);
    bytes
}

/// The current header's identifier of the contents, as text.
fn linkage(image: &[u8]) -> String {
    let sequence = |at: usize| u64::from_le_bytes(image[at + 8..at + 16].try_into().unwrap());
    let at = if sequence(HEADERS[1]) > sequence(HEADERS[0]) { HEADERS[1] } else { HEADERS[0] };
    let id = &image[at + 32..at + 48];
    let hex = |places: &[usize]| {
        places.iter().map(|&place| format!("{:02x}", id[place])).collect::<String>()
    };
    format!(
        "{{{}-{}-{}-{}-{}}}",
        hex(&[3, 2, 1, 0]),
        hex(&[5, 4]),
        hex(&[7, 6]),
        hex(&[8, 9]),
        hex(&[10, 11, 12, 13, 14, 15])
    )
}

/// Makes a VHDX a differencing one.
fn difference_vhdx(pair: &mut Pair, linkage: &str) {
    let metadata = 3 * MIB;
    let child = &mut pair.child;
    let count = child[metadata + 10];
    // Block size and flags are the first item; the parent locator is a new one.
    let parameters = 0x1_0000;
    child[metadata + parameters + 4] |= 2;
    child[metadata + 10] += 1;
    let entry = metadata + 32 + usize::from(count) * 32;
    let id = [
        0x2d, 0x5f, 0xd3, 0xa8, 0x0b, 0xb3, 0x4d, 0x45, 0xab, 0xf7, 0xd3, 0xd8, 0x48, 0x34, 0xab,
        0x0c,
    ];
    let locator = locator(&[("parent_linkage", linkage), ("relative_path", r".\parent")]);
    put(child, entry, &id);
    put(child, entry + 16, &0x2_0000_u32.to_le_bytes());
    put(child, entry + 20, &(locator.len() as u32).to_le_bytes());
    put(child, entry + 24, &4_u32.to_le_bytes());
    put(child, metadata + 0x2_0000, &locator);
    // A chunk has 4096 blocks of 1 MiB; its bitmap is the next entry.
    for block in [0, 1, 4, 5, 6, 7] {
        child[BAT + block * 8..BAT + block * 8 + 8].fill(0);
    }
    child[BAT + 2 * 8] = 7;
    let end = child.len().next_multiple_of(MIB);
    child.resize(end + MIB, 0);
    put(child, BAT + 4096 * 8, &(end as u64 | 6).to_le_bytes());
    for sector in (0..100).chain([150]) {
        let bit = 2 * 2048 + sector;
        child[end + bit / 8] |= 1 << (bit % 8);
    }
}

#[test]
fn a_differencing_vhdx_has_sectors_of_its_parent() {
    let Some(qemu) = Qemu::find() else { return };
    let mut pair = make(&qemu, "vhdx", "block_size=1M", MIB);
    let linkage = linkage(&pair.parent);
    difference_vhdx(&mut pair, &linkage);
    write(&qemu.file("child"), &pair.child);
    let spec = format!("vhdx:{}", qemu.file("child").display());
    assert!(read_all(&format!("{spec}?names=allow")).unwrap() == pair.wanted);
    let own = format!("{spec}?backing=vhdx:{}", qemu.file("parent").display());
    assert!(read_all(&own).unwrap() == pair.wanted);
    assert!(error(&spec).contains("which is not opened"));
    let python = std::env::var("BLOCKHAUL_DISSECT_PYTHON").unwrap_or_else(|_| "python3".into());
    let read = "import pathlib; from dissect.hypervisor.disk.vhdx import VHDX; \
                open('second', 'wb').write(VHDX(pathlib.Path('child')).read(8 << 20))";
    let ran = Command::new(python).args(["-c", read]).current_dir(qemu.scratch.path()).output();
    if ran.is_ok_and(|ran| ran.status.success()) {
        assert!(std::fs::read(qemu.file("second")).unwrap() == pair.wanted, "the second reader");
    } else {
        eprintln!("not compared with dissect.hypervisor");
    }
    // The bitmap is missing.
    let mut bad = pair.child.clone();
    bad[BAT + 4096 * 8] = 0;
    write(&qemu.file("child"), &bad);
    assert!(error(&own).contains("bitmap of chunk 0"));
    // The parent was written since.
    write(&qemu.file("child"), &pair.child);
    for at in HEADERS {
        pair.parent[at + 32] ^= 1;
        pair.parent[at + 4..at + 8].fill(0);
        let sum = crc32c(&pair.parent[at..at + 4096]);
        put(&mut pair.parent, at + 4, &sum.to_le_bytes());
    }
    write(&qemu.file("parent"), &pair.parent);
    assert!(error(&format!("{spec}?names=allow")).contains("was written after"));
}

#[test]
fn a_differencing_vhdx_over_itself_is_refused() {
    let Some(qemu) = Qemu::find() else { return };
    let mut pair = make(&qemu, "vhdx", "block_size=1M", MIB);
    let linkage = linkage(&pair.child);
    difference_vhdx(&mut pair, &linkage);
    write(&qemu.file("parent"), &pair.child);
    let text = error(&format!("vhdx:{}?names=allow", qemu.file("parent").display()));
    assert!(text.contains("more than 16 devices within one another"), "{text}");
}

/// Sets the checksum of a footer or header of a VHD.
fn sum_vhd(bytes: &mut [u8], at: usize, len: usize, field: usize) {
    let part = &mut bytes[at..at + len];
    part[field..field + 4].fill(0);
    let sum = !part.iter().fold(0_u32, |sum, &byte| sum.wrapping_add(byte.into()));
    part[field..field + 4].copy_from_slice(&sum.to_be_bytes());
}

#[test]
fn a_differencing_vhd_has_sectors_of_its_parent() {
    let Some(qemu) = Qemu::find() else { return };
    let block = 2 * MIB;
    let Pair { mut child, parent, wanted } = make(&qemu, "vpc", "force_size=on", block);
    let end = child.len() - 512;
    // Identifier and name of the parent.
    put(&mut child, 512 + 40, &parent[68..84]);
    let name: Vec<u8> = "parent".encode_utf16().flat_map(u16::to_be_bytes).collect();
    put(&mut child, 512 + 64, &name);
    for footer in [0, end] {
        child[footer + 60..footer + 64].copy_from_slice(&4_u32.to_be_bytes());
        sum_vhd(&mut child, footer, 512, 64);
    }
    sum_vhd(&mut child, 512, 1024, 36);
    // Which sectors of block 2 are its own.
    let table = u64::from_be_bytes(child[512 + 16..512 + 24].try_into().unwrap()) as usize;
    let place = |child: &[u8], number: usize| {
        let at = table + number * 4;
        u32::from_be_bytes(child[at..at + 4].try_into().unwrap()) as usize * 512
    };
    let bitmap = place(&child, 2);
    child[bitmap..bitmap + 512].fill(0);
    for sector in (0..100).chain([150]) {
        child[bitmap + sector / 8] |= 0x80 >> (sector % 8);
    }
    let whole = place(&child, 3);
    child[whole..whole + 512].fill(0xff);
    write(&qemu.file("child"), &child);
    let spec = format!("vhd:{}", qemu.file("child").display());
    assert!(read_all(&format!("{spec}?names=allow")).unwrap() == wanted);
    assert!(error(&spec).contains("which is not opened"));
    child[512 + 40] ^= 1;
    sum_vhd(&mut child, 512, 1024, 36);
    write(&qemu.file("child"), &child);
    assert!(error(&format!("{spec}?names=allow")).contains("is not the one"));
    let own = format!("{spec}?backing=vhd:{}", qemu.file("parent").display());
    assert!(read_all(&own).unwrap() == wanted);
}
