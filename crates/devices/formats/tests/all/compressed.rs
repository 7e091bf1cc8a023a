//! Images that are written compressed: the same bytes are read by ours and by QEMU's tools, the tables are
//! in order, and the images are smaller.

use std::sync::Arc;

use blockhaul_block::{Compression, Device, DeviceExt as _, Kind, Request, RequestFlags};
use blockhaul_catalog::{DeviceSpec, Intent};
use blockhaul_io::{Data, Runtime, RuntimeConfig};
use blockhaul_testkit::rng::{self, Rng};
use serde_json::Value;

use crate::common::{Qemu, content, open, read_all, registry, write_with};
use crate::equality::{Case, cases, make, make_noise};
use crate::writes::{Step, play_with, request, same};

/// Bytes that can be compressed, as text; sometimes not, or zeroes.
fn fill(rng: &mut Rng, cluster: u64, bytes: &mut [u8]) {
    for part in bytes.chunks_mut(cluster as usize) {
        match rng.below(8) {
            0 => rng.fill(part),
            1 => {}
            2 => part.fill(rng.below(256) as u8),
            most => part.fill_with(|| rng.below(most * 3) as u8),
        }
    }
}

/// Mostly writes of whole clusters.
fn packed_request(rng: &mut Rng, size: u64, cluster: u64, flags: RequestFlags) -> (Request, Step) {
    if rng.chance(30) {
        return request(rng, size, cluster);
    }
    let clusters = size.div_ceil(cluster);
    let first = rng.below(clusters);
    let most = (clusters - first).min(1 + (1 << 20) / cluster);
    let at = first * cluster;
    let mut end = ((first + rng.between(1, most)) * cluster).min(size);
    if rng.chance(20) {
        end = end.saturating_sub(rng.below(cluster)).max(at + 1);
    }
    let mut bytes = vec![0; (end - at) as usize];
    fill(rng, cluster, &mut bytes);
    (Request::write(at, Data::copy_of(&bytes)).with(flags), Step::Bytes(at, bytes))
}

fn compressed_clusters(qemu: &Qemu) -> u64 {
    let text = qemu.img(&["check", "-f", "qcow2", "--output=json", "top"]);
    let found: Value = serde_json::from_str(&text).unwrap();
    found["compressed-clusters"].as_u64().unwrap_or(0)
}

/// Writes the first cluster with bytes that can be compressed: random requests alone may leave none that
/// is compressed at the end.
async fn write_letters(
    device: &Arc<dyn Device>,
    model: &mut [u8],
    cluster: u64,
    flags: RequestFlags,
) {
    let letters: Vec<u8> = (0..cluster).map(|at| b'a' + (at % 26) as u8).collect();
    let request = Request::write(0, Data::copy_of(&letters)).with(flags);
    device.submit(request).await.unwrap();
    model[..letters.len()].copy_from_slice(&letters);
}

/// Plays on an image in several runs, with snapshots and writes of QEMU between them.
fn check(qemu: &Qemu, case: &Case, seed: u64, runs: u64) -> u64 {
    let label = format!("{case:?}, seed {seed}");
    eprintln!("{label}");
    let mut rng = Rng::new(seed);
    make(qemu, &mut rng, case);
    let mut model = qemu.raw("top");
    let cache = if rng.chance(50) { "32M" } else { "4k" };
    // Of all writes, or of those that ask for it.
    let all = rng.chance(50);
    let packs = if all { "on" } else { "off" };
    let spec = qemu.spec("top", &format!("names=allow&cache={cache}&compress={packs}"));
    let mut kept = Vec::new();
    for run in 0..runs {
        let seed = rng.number();
        let cluster = case.cluster;
        let flags = if all { RequestFlags::empty() } else { RequestFlags::COMPRESS };
        let played = write_with(&spec, move |device| async move {
            let unit = cluster as u32;
            let wanted = if all { Compression::All(unit) } else { Compression::Asked(unit) };
            assert_eq!(device.facts().compression, wanted);
            let mut rng = Rng::new(seed);
            let request = |rng: &mut Rng, size| packed_request(rng, size, cluster, flags);
            play_with(&device, &mut rng, &mut model, 10, request).await;
            write_letters(&device, &mut model, cluster, flags).await;
            same(&content(&device).await.unwrap(), &model, "before the end");
            model
        });
        model = played.unwrap_or_else(|error| panic!("{label}: {error}"));
        assert!(qemu.raw("top") == model, "{label}: qemu-img reads other bytes after run {run}");
        qemu.check("top", &label);
        // Wide enough for two references from each entry.
        if case.refcount_bits >= 16 {
            qemu.img(&["snapshot", "-c", &format!("run{run}"), "top"]);
            kept.push(model.clone());
        }
    }
    for (run, model) in kept.iter().enumerate() {
        let found = read_all(&qemu.spec("top", &format!("names=allow&snapshot=run{run}"))).unwrap();
        assert!(found == *model, "{label}: snapshot {run}");
    }
    let count = compressed_clusters(qemu);
    // QEMU goes on where we have ended.
    let len = case.cluster.min(model.len() as u64);
    qemu.io("qcow2", "top", &[format!("write -s noise0 0 {len}")]);
    if !kept.is_empty() {
        qemu.img(&["snapshot", "-d", "run0", "top"]);
    }
    qemu.check("top", &label);
    count
}

#[test]
fn every_combination_is_compressed_as_the_model_says() {
    let Some(qemu) = Qemu::find() else { return };
    let seed = rng::seed();
    eprintln!("BLOCKHAUL_SEED={seed}");
    make_noise(&qemu, &mut Rng::new(seed));
    // A part of the combinations at a time.
    let (rounds, step) = if std::env::var_os("BLOCKHAUL_LONG").is_some() { (5, 1) } else { (1, 4) };
    let cases = cases();
    let cases = cases.iter().filter(|case| !case.has_data_file());
    for round in 0..rounds {
        for (number, case) in cases.clone().enumerate().skip(seed as usize % step).step_by(step) {
            let seed = seed.wrapping_add(round * 1000 + number as u64);
            let count = check(&qemu, case, seed, 2);
            // With one bit, no two clusters share a place in the file: a compressed one takes a whole place.
            let shares = case.refcount_bits > 1;
            assert!(!shares || count > 0, "{case:?}, seed {seed}: no compressed cluster");
        }
    }
}

/// Text in which little repeats.
fn text(rng: &mut Rng, len: usize) -> Vec<u8> {
    let words: Vec<Vec<u8>> = (0..500)
        .map(|_| (0..rng.between(2, 9)).map(|_| b'a' + rng.below(26) as u8).collect())
        .collect();
    let mut bytes = Vec::new();
    while bytes.len() < len {
        let word: &Vec<u8> = rng.pick(&words);
        bytes.extend_from_slice(word);
        bytes.push(b' ');
    }
    bytes.truncate(len);
    bytes
}

/// Writes a disk in pieces, some in flight at a time.
async fn write_all(device: &Arc<dyn Device>, disk: &[u8], piece: usize) {
    let mut flying = std::collections::VecDeque::new();
    for (number, part) in disk.chunks(piece).enumerate() {
        let at = (number * piece) as u64;
        flying.push_back(device.submit(Request::write(at, Data::copy_of(part))));
        if flying.len() > 4 {
            flying.pop_front().unwrap().await.unwrap();
        }
    }
    for pending in flying {
        pending.await.unwrap();
    }
    device.flush().await.unwrap();
}

/// A new image, whose data is packed without gaps, is about as long as QEMU's.
#[test]
fn a_new_image_is_about_as_small_as_qemus() {
    let Some(qemu) = Qemu::find() else { return };
    let seed = rng::seed();
    eprintln!("BLOCKHAUL_SEED={seed}");
    let disk = text(&mut Rng::new(seed), (8 << 20) + 1536);
    crate::common::write(&qemu.file("disk"), &disk);
    for (kind, cluster) in [("zlib", "64k"), ("zstd", "64k"), ("zstd", "4k"), ("zstd", "2M")] {
        let options = format!("cluster_size={cluster},compression_type={kind}");
        qemu.img(&["convert", "-c", "-f", "raw", "-O", "qcow2", "-o", &options, "disk", "theirs"]);
        let size = disk.len() as u64;
        let options = format!("compression={kind}&cluster={cluster}&compress=on");
        let spec = DeviceSpec::parse(qemu.spec("top", &options).as_ref()).unwrap();
        let written = disk.clone();
        let runtime =
            Runtime::start(&RuntimeConfig { workers: 2, ..RuntimeConfig::default() }).unwrap();
        runtime.block_on(move || async move {
            let intent = Intent::target(size);
            let registry = registry();
            let (stack, ready) = registry.open_target(&spec, Vec::new(), intent).await.unwrap();
            ready.run().await.unwrap();
            let unit = stack.device().facts().block.preferred as usize;
            write_all(stack.device(), &written, unit.max(512 << 10)).await;
        });
        drop(runtime);
        qemu.check("top", kind);
        assert!(qemu.raw("top") == disk, "{kind} {cluster}");
        let clusters = compressed_clusters(&qemu);
        assert!(clusters > 3, "{kind} {cluster}: {clusters}");
        let ours = std::fs::metadata(qemu.file("top")).unwrap().len();
        let theirs = std::fs::metadata(qemu.file("theirs")).unwrap().len();
        eprintln!("{kind} {cluster}: {ours} bytes, QEMU's {theirs}, of {size}");
        // Deflate forgets what is before each 4 KiB here.
        let most = if kind == "zlib" { theirs * 5 / 4 } else { theirs * 21 / 20 };
        assert!(ours <= most + (1 << 20), "{kind} {cluster}: {ours} bytes, QEMU's {theirs}");
        std::fs::remove_file(qemu.file("top")).unwrap();
    }
}

/// What is written again and again is freed, and its space is used again.
#[test]
fn space_of_compressed_data_is_used_again() {
    let Some(qemu) = Qemu::find() else { return };
    let seed = rng::seed();
    eprintln!("BLOCKHAUL_SEED={seed}");
    qemu.create("top", "cluster_size=64k", 4 << 20);
    let disk = text(&mut Rng::new(seed), 4 << 20);
    let written = disk.clone();
    write_with(&qemu.spec("top", "compress=on"), move |device| async move {
        for _ in 0..8 {
            write_all(&device, &written, 128 << 10).await;
            same(&content(&device).await.unwrap(), &written, "written again");
        }
    })
    .unwrap();
    qemu.check("top", "written again");
    assert!(qemu.raw("top") == disk);
    let len = std::fs::metadata(qemu.file("top")).unwrap().len();
    assert!(len < 10 << 20, "{len}");
}

#[test]
fn an_external_data_file_is_refused() {
    let Some(qemu) = Qemu::find() else { return };
    qemu.create("top", "data_file=data", 1 << 20);
    let spec = qemu.spec("top", "names=allow&compress=on");
    let runtime =
        Runtime::start(&RuntimeConfig { workers: 1, ..RuntimeConfig::default() }).unwrap();
    runtime.block_on(move || async move {
        let error = open(&spec, Intent::WRITE).await.map(|_| ()).unwrap_err();
        assert_eq!(error.kind(), Kind::Unsupported);
        assert!(error.to_string().contains("leave out compress"), "{error}");
    });
}
