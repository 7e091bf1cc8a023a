//! Images with random changes: every one is read, or refused; nothing panics, hangs or takes much
//! memory.

use std::time::Duration;

use blockhaul_block::{ContextSet, DeviceExt as _};
use blockhaul_catalog::Intent;
use blockhaul_formats::qcow2::check::{Repair, check};
use blockhaul_io::{Data, Runtime, RuntimeConfig};
use blockhaul_testkit::rng::{self, Rng};
use blockhaul_testkit::tools::ScratchDir;

use crate::common::{Qemu, open, write};
use crate::hostile::{DATA, Image, L1, L2};

/// Longest time for one image.
const LIMIT: Duration = Duration::from_secs(20);

/// Numbers that find mistakes at boundaries.
const NUMBERS: [u64; 12] = [
    0,
    1,
    511,
    512,
    1 << 16,
    1 << 31,
    u32::MAX as u64,
    1 << 56,
    1 << 62,
    i64::MAX as u64,
    1 << 63,
    u64::MAX,
];

/// Where tables begin, so that changes hit them.
fn change(rng: &mut Rng, bytes: &mut Vec<u8>, tables: &[usize]) {
    for _ in 0..rng.between(1, 6) {
        if bytes.len() < 16 {
            return;
        }
        let base = *rng.pick(tables);
        let at = (base + rng.below(128) as usize).min(bytes.len() - 8);
        match rng.below(8) {
            0 => bytes[at] ^= 1 << rng.below(8),
            1 => bytes[at] = rng.number() as u8,
            2 => bytes[at & !7..][..8].copy_from_slice(&rng.pick(&NUMBERS).to_be_bytes()),
            3 => bytes[at & !3..][..4].copy_from_slice(&(*rng.pick(&NUMBERS) as u32).to_be_bytes()),
            4 => {
                // An offset of something else.
                let other = *rng.pick(tables) as u64 | rng.below(4) << 62 | rng.below(2);
                bytes[at & !7..][..8].copy_from_slice(&other.to_be_bytes());
            }
            5 => bytes.truncate(rng.below(bytes.len() as u64) as usize),
            6 => {
                let from = rng.below(bytes.len() as u64 - 8) as usize & !7;
                bytes.copy_within(from..from + 8, at & !7);
            }
            _ => bytes[at & !7..][..8].copy_from_slice(&rng.number().to_be_bytes()),
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
    for index in 0..device.facts().contexts.len() {
        let contexts = ContextSet::empty().with(index);
        let mut at = 0;
        for _ in 0..8 {
            match device.extents(at, size - at, contexts).await {
                Ok(lists) if at + lists[0].total() < size => at += lists[0].total(),
                _ => break,
            }
        }
    }
    for round in 0..8 {
        let at = if round % 2 == 0 { rng.below(size.min(1 << 20)) } else { rng.below(size) };
        let len = rng.between(1, (size - at).min(200 << 10));
        let _ = device.read(at, len as usize).await;
    }
}

/// Writes to an image, and checks and repairs it; errors are fine.
async fn change_disk(path: &str, seed: u64) {
    let mut rng = Rng::new(seed);
    if let Ok(stack) = open(&format!("qcow2:{path}?names=refuse"), Intent::WRITE).await {
        let device = stack.device();
        let size = device.facts().size;
        for _ in 0..if size == 0 { 0 } else { 8 } {
            let at = if rng.chance(50) { rng.below(size.min(1 << 20)) } else { rng.below(size) };
            let len = rng.between(1, (size - at).min(100 << 10));
            let _ = match rng.below(6) {
                0 => device.zero(at, len).await,
                1 => device.trim(at, len).await,
                2 => device.flush().await,
                _ => device.write(at, Data::copy_of(&vec![9; len as usize])).await,
            };
        }
        let _ = device.flush().await;
    }
    let repair = *rng.pick(&[Repair::Nothing, Repair::Leaks, Repair::All]);
    if let Ok(stack) = open(&format!("file:{path}"), Intent::WRITE).await {
        let _ = check(stack.device(), repair).await;
    }
}

fn rounds(short: u64) -> u64 {
    if std::env::var_os("BLOCKHAUL_LONG").is_some() { short * 50 } else { short }
}

fn run(name: &str, original: &[u8], tables: &[usize], options: &str, count: u64) {
    let scratch = ScratchDir::new().unwrap();
    let runtime =
        Runtime::start(&RuntimeConfig { workers: 2, ..RuntimeConfig::default() }).unwrap();
    let seed = rng::seed();
    for round in 0..count {
        let seed = seed.wrapping_add(round);
        let mut rng = Rng::new(seed);
        let mut bytes = original.to_vec();
        change(&mut rng, &mut bytes, tables);
        let path = scratch.file("image");
        write(&path, &bytes);
        let spec = format!("qcow2:{}?{options}", path.display());
        let writes = options == "write";
        let name_of_file = path.display().to_string();
        let ended = runtime.block_on(move || async move {
            let visited = if writes {
                blockhaul_io::timeout(LIMIT, change_disk(&name_of_file, seed)).await
            } else {
                blockhaul_io::timeout(LIMIT, visit(&spec, seed)).await
            };
            visited.is_ok()
        });
        assert!(ended, "{name}: BLOCKHAUL_SEED={seed}: not at an end after {LIMIT:?}");
    }
}

#[test]
fn random_changes_of_tables_are_survived() {
    let tables = [0, 0, 64, 104, L1, L2, L2, DATA];
    run("small image", &Image::new().0, &tables, "names=refuse", rounds(1500));
    run("small image", &Image::new().0, &tables, "write", rounds(300));
}

#[test]
fn random_changes_of_images_of_qemu_are_survived() {
    let Some(qemu) = Qemu::find() else { return };
    for options in [
        "cluster_size=4k",
        "cluster_size=16k,extended_l2=on,compression_type=zstd",
        "cluster_size=512,refcount_bits=1",
    ] {
        let _ = std::fs::remove_file(qemu.file("top"));
        qemu.create("top", options, 1 << 20);
        if !options.contains("refcount_bits") {
            qemu.img(&["bitmap", "--add", "-g", "4k", "top", "b"]);
            qemu.img(&["bitmap", "--disable", "top", "b"]);
        }
        qemu.io(
            "qcow2",
            "top",
            &[
                "write -c -P 1 0 128k".into(),
                "write -P 2 200k 99k".into(),
                "write -z 400k 32k".into(),
            ],
        );
        if !options.contains("refcount_bits") {
            qemu.img(&["snapshot", "-c", "s", "top"]);
        }
        let bytes = std::fs::read(qemu.file("top")).unwrap();
        // Every place that looks like the start of a table: an offset of a cluster.
        let mut tables = vec![0, 0, 64, 104];
        let words = bytes.chunks_exact(8).map(|word| u64::from_be_bytes(word.try_into().unwrap()));
        let offsets = words.map(|word| (word & 0x00ff_ffff_ffff_fe00) as usize);
        tables.extend(offsets.filter(|&offset| offset > 0 && offset < bytes.len()).take(64));
        for spec in ["", "snapshot=1", "write"] {
            run(options, &bytes, &tables, spec, rounds(200));
        }
    }
}
