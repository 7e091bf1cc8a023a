//! Formats that are only read: images that qemu-img makes have the same bytes and the same map.

use std::process::Command;

use blockhaul_block::{ContextSet, DeviceExt as _, HOLE, ZERO};
use blockhaul_catalog::Intent;
use blockhaul_testkit::conform::{self, ConformOptions, InitialContent, Subject};
use blockhaul_testkit::rng::{self, Rng};
use blockhaul_testkit::tools;
use serde_json::Value;

use crate::common::{Qemu, content, error, extents, open, read_all, with, write};
use crate::equality::make_noise;

/// A format: our scheme, QEMU's name, and options.
pub struct Format {
    pub scheme: &'static str,
    pub qemu: &'static str,
    pub options: &'static str,
}

impl Format {
    /// The description of the image that was made.
    fn spec(&self, qemu: &Qemu) -> String {
        let options = if self.scheme == "vdi" { "" } else { "?names=allow" };
        format!("{}:{}{options}", self.scheme, qemu.file("image").display())
    }
}

const fn format(scheme: &'static str, qemu: &'static str, options: &'static str) -> Format {
    Format { scheme, qemu, options }
}

/// All kinds of images that qemu-img makes.
pub const FORMATS: &[Format] = &[
    format("vdi", "vdi", ""),
    format("vdi", "vdi", "static=on"),
    format("vhd", "vpc", "force_size=on"),
    format("vhd", "vpc", "subformat=dynamic"),
    format("vhd", "vpc", "subformat=fixed"),
    format("vhd", "vpc", "subformat=fixed,force_size=on"),
    format("vhdx", "vhdx", ""),
    format("vhdx", "vhdx", "block_size=1M"),
    format("vhdx", "vhdx", "subformat=fixed,block_size=2M"),
    format("vhdx", "vhdx", "block_state_zero=off,log_size=4M"),
    format("vmdk", "vmdk", "subformat=monolithicSparse"),
    format("vmdk", "vmdk", "subformat=monolithicSparse,zeroed_grain=on"),
    format("vmdk", "vmdk", "subformat=streamOptimized"),
    format("vmdk", "vmdk", "subformat=monolithicFlat"),
    format("vmdk", "vmdk", "subformat=twoGbMaxExtentSparse"),
    format("vmdk", "vmdk", "subformat=twoGbMaxExtentFlat"),
];

/// Makes a raw disk with data, zeroes and holes.
pub fn make_disk(qemu: &Qemu, rng: &mut Rng, size: u64) {
    std::fs::File::create(qemu.file("disk")).unwrap().set_len(size).unwrap();
    let commands: Vec<_> = (0..rng.between(4, 12))
        .map(|number| {
            let at = rng.below(size / 512) * 512;
            let len = rng.between(1, ((size - at) / 512).min(4000)) * 512;
            match number % 4 {
                3 => format!("write -z {at} {len}"),
                _ => format!("write -s noise{} {at} {len}", rng.below(3)),
            }
        })
        .collect();
    qemu.io("raw", "disk", &commands);
}

fn check(qemu: &Qemu, format: &Format, seed: u64) {
    let Format { scheme, qemu: name, options } = format;
    let mut rng = Rng::new(seed);
    let size = *rng.pick(&[3 << 20, (37 << 20) + 1024, 9 << 20, 512, 65 << 20]);
    make_disk(qemu, &mut rng, size);
    let _ = std::fs::remove_file(qemu.file("image"));
    let mut args = vec!["convert", "-f", "raw", "-O", name, "disk", "image"];
    if !options.is_empty() {
        args.splice(5..5, ["-o", options]);
    }
    qemu.img(&args);
    qemu.img(&["convert", "-f", name, "-O", "raw", "image", "converted"]);
    let wanted = std::fs::read(qemu.file("converted")).unwrap();
    let map = qemu.img(&["map", "-f", name, "--output=json", "image"]);
    let map: Vec<Value> = serde_json::from_str(&map).unwrap();
    let label = format!("{scheme} {options}, seed {seed}");
    let len = wanted.len() as u64;
    let parts: Vec<(u64, u64)> = (0..40)
        .map(|_| {
            let at = rng.below(len);
            (at, rng.between(1, (len - at).min(3 << 20)))
        })
        .collect();
    let has_map = *name != "vhdx";
    let spec = format.spec(qemu);
    with(&spec, move |device| async move {
        assert_eq!(device.facts().size, len, "{label}");
        for (at, part) in parts {
            let found = device.read(at, part as usize).await.unwrap();
            let same = found.bytes() == &wanted[at as usize..(at + part) as usize];
            assert!(same, "{label}: {part} bytes at {at}");
        }
        assert!(content(&device).await.unwrap() == wanted, "{label}");
        let base = extents(&device, ContextSet::empty().with(0)).await.unwrap();
        for (at, run) in base.ranges(0).filter(|(_, run)| run.state & ZERO != 0) {
            let bytes = &wanted[at as usize..(at + run.len) as usize];
            assert!(blockhaul_io::is_zero(bytes), "{label}: {run:?} at {at}");
        }
        for one in map.iter().filter(|_| has_map) {
            let number = |name: &str| one[name].as_u64().unwrap();
            let mut found = base.clone();
            found.skip(number("start"));
            found.truncate(number("length"));
            let fine = if one["data"].as_bool().unwrap() {
                // The file may have holes there.
                found.runs().iter().all(|run| run.state == 0 || run.state == HOLE | ZERO)
            } else {
                found.runs().iter().all(|run| run.state & ZERO != 0)
            };
            assert!(fine, "{label}: {one}: {found:?}");
        }
    });
}

#[test]
fn images_have_the_bytes_and_the_map_that_qemu_img_shows() {
    let Some(qemu) = Qemu::find() else { return };
    let seed = rng::seed();
    eprintln!("BLOCKHAUL_SEED={seed}");
    make_noise(&qemu, &mut Rng::new(seed));
    let rounds = if std::env::var_os("BLOCKHAUL_LONG").is_some() { 20 } else { 2 };
    for round in 0..rounds {
        for (number, format) in FORMATS.iter().enumerate() {
            check(&qemu, format, seed.wrapping_add(round * 100 + number as u64));
        }
    }
}

#[test]
fn images_keep_the_contract() {
    let Some(qemu) = Qemu::find() else { return };
    make_noise(&qemu, &mut Rng::new(1));
    for format in FORMATS {
        make_disk(&qemu, &mut Rng::new(7), 5 << 20);
        let mut args = vec!["convert", "-f", "raw", "-O", format.qemu, "disk", "image"];
        if !format.options.is_empty() {
            args.splice(5..5, ["-o", format.options]);
        }
        qemu.img(&args);
        qemu.img(&["convert", "-f", format.qemu, "-O", "raw", "image", "converted"]);
        let raw = std::fs::read(qemu.file("converted")).unwrap();
        let content = InitialContent::oracle(move |at| raw[at as usize]);
        let spec = format.spec(&qemu);
        let name = format!("{} {}", format.scheme, format.options);
        conform::check(&name, ConformOptions::default().content(content), move || {
            let spec = spec.clone();
            async move { open(&spec, Intent::READ).await.map(Subject::from) }
        });
    }
}

/// Offsets in images of QEMU: the headers, the log, and the BAT.
pub const HEADERS: [usize; 2] = [64 << 10, 128 << 10];
const LOG: usize = 1 << 20;
pub const BAT: usize = 2 << 20;

/// CRC-32C, bit by bit.
pub fn crc32c(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(!0_u32, |crc, &byte| {
        (0..8).fold(crc ^ u32::from(byte), |crc, _| crc >> 1 ^ (0x82f6_3b78 * (crc & 1)))
    })
}

/// An image whose writer ended between the last change of its log and that of the table. Block 20 is
/// in the log alone.
pub fn with_log(qemu: &Qemu) -> Vec<u8> {
    qemu.img(&["create", "-q", "-f", "vhdx", "-o", "block_size=1M", "image", "64M"]);
    qemu.io("vhdx", "image", &["write -P 5 0 3M".into(), "write -P 6 20M 1M".into()]);
    let mut image = std::fs::read(qemu.file("image")).unwrap();
    let mut entries = (LOG..BAT).step_by(4096).filter(|&at| image[at..].starts_with(b"loge"));
    let last = entries.next_back().unwrap();
    let id = image[last + 32..last + 48].to_vec();
    for at in HEADERS {
        image[at + 48..at + 64].copy_from_slice(&id);
        image[at + 4..at + 8].fill(0);
        let sum = crc32c(&image[at..at + 4096]);
        image[at + 4..at + 8].copy_from_slice(&sum.to_le_bytes());
    }
    let entry = BAT + 20 * 8;
    assert_eq!(image[entry] & 7, 6);
    image[entry..entry + 8].fill(0);
    image
}

#[test]
fn the_log_of_a_vhdx_is_applied_in_memory() {
    let Some(qemu) = Qemu::find() else { return };
    let image = with_log(&qemu);
    write(&qemu.file("replayed"), &image);
    qemu.img(&["check", "-q", "-f", "vhdx", "-r", "all", "replayed"]);
    qemu.img(&["convert", "-f", "vhdx", "-O", "raw", "replayed", "converted"]);
    let wanted = std::fs::read(qemu.file("converted")).unwrap();
    assert!(wanted[0] == 5 && wanted[20 << 20] == 6, "QEMU applies the log");
    write(&qemu.file("image"), &image);
    let spec = format!("vhdx:{}", qemu.file("image").display());
    assert!(read_all(&spec).unwrap() == wanted);
    assert!(std::fs::read(qemu.file("image")).unwrap() == image, "the file is not written");
    // Without the log, the block is missing.
    let mut damaged = image.clone();
    damaged[LOG..BAT].fill(0);
    write(&qemu.file("image"), &damaged);
    assert!(error(&spec).contains("no valid sequence"));
    write(&qemu.file("image"), &image[..image.len() - (1 << 20)]);
    let text = error(&spec);
    assert!(text.contains("when its log was written"), "{text}");
}

#[test]
fn a_second_reader_agrees() {
    let script = "import importlib.util,sys;sys.exit(0 if importlib.util.find_spec('dissect.hypervisor') else 1)";
    let python = std::env::var("BLOCKHAUL_DISSECT_PYTHON").unwrap_or_else(|_| "python3".into());
    let found =
        Command::new(&python).args(["-c", script]).output().is_ok_and(|run| run.status.success());
    if !found {
        return tools::skip(
            "dissect.hypervisor is not installed (pip); BLOCKHAUL_DISSECT_PYTHON names its python3",
        );
    }
    let Some(qemu) = Qemu::find() else { return };
    make_noise(&qemu, &mut Rng::new(3));
    // Its reader of VDI images ends at the first block that is not allocated.
    for format in FORMATS.iter().filter(|format| format.scheme != "vdi") {
        make_disk(&qemu, &mut Rng::new(9), 20 << 20);
        let mut args = vec!["convert", "-f", "raw", "-O", format.qemu, "disk", "image"];
        if !format.options.is_empty() {
            args.splice(5..5, ["-o", format.options]);
        }
        qemu.img(&args);
        let (module, class) = match format.scheme {
            "vhd" => ("vhd", "VHD"),
            "vhdx" => ("vhdx", "VHDX"),
            _ => ("vmdk", "VMDK"),
        };
        let from = if class == "VMDK" { "pathlib.Path('image')" } else { "open('image', 'rb')" };
        let read = format!(
            "import pathlib; from dissect.hypervisor.disk.{module} import {class} as I; image = I({from}); \
             image = image if hasattr(image, 'read') else image.open(); \
             open('second', 'wb').write(image.read(20 << 20))"
        );
        let status =
            Command::new(&python).args(["-c", &read]).current_dir(qemu.scratch.path()).status();
        assert!(status.unwrap().success(), "{} {}", format.scheme, format.options);
        let ours = read_all(&format.spec(&qemu)).unwrap();
        let second = std::fs::read(qemu.file("second")).unwrap();
        assert!(ours[..20 << 20] == second, "{} {}", format.scheme, format.options);
    }
}

#[test]
fn backing_files_of_qcow2_images_have_any_format() {
    let Some(qemu) = Qemu::find() else { return };
    make_noise(&qemu, &mut Rng::new(5));
    for name in ["vmdk", "vhdx", "vpc", "vdi"] {
        make_disk(&qemu, &mut Rng::new(11), 9 << 20);
        qemu.img(&["convert", "-f", "raw", "-O", name, "disk", "base"]);
        let _ = std::fs::remove_file(qemu.file("top"));
        qemu.img(&["create", "-q", "-f", "qcow2", "-b", "base", "-F", name, "top"]);
        qemu.io("qcow2", "top", &["write -P 3 1M 100k".into()]);
        let wanted = qemu.raw("top");
        assert!(read_all(&qemu.spec("top", "names=allow")).unwrap() == wanted, "{name}");
        assert!(error(&qemu.spec("top", "")).contains("which is not opened"), "{name}");
    }
}

#[test]
fn a_delta_link_is_read_over_its_parent() {
    let Some(qemu) = Qemu::find() else { return };
    make_noise(&qemu, &mut Rng::new(6));
    make_disk(&qemu, &mut Rng::new(13), 9 << 20);
    qemu.img(&["convert", "-f", "raw", "-O", "vmdk", "disk", "base.vmdk"]);
    qemu.img(&["create", "-q", "-f", "vmdk", "-b", "base.vmdk", "-F", "vmdk", "top.vmdk"]);
    qemu.io("vmdk", "top.vmdk", &["write -P 3 1M 100k".into(), "write -P 4 8M 5k".into()]);
    qemu.img(&["convert", "-f", "vmdk", "-O", "raw", "top.vmdk", "converted"]);
    let wanted = std::fs::read(qemu.file("converted")).unwrap();
    let top = format!("vmdk:{}", qemu.file("top.vmdk").display());
    assert!(read_all(&format!("{top}?names=allow")).unwrap() == wanted);
    let own = format!("{top}?backing=vmdk:{}", qemu.file("base.vmdk").display());
    assert!(read_all(&own).unwrap() == wanted);
    assert!(error(&top).contains("which is not opened"));
    // A parent that was written gets another identifier.
    qemu.io("vmdk", "base.vmdk", &["write -P 9 0 64k".into()]);
    assert!(error(&format!("{top}?names=allow")).contains("was written after"));
}
